"""From a study to its answer: each question's own, and for everything else a comparison of speeds."""

from __future__ import annotations

from collections.abc import Callable

from ddpm_lab.explain.answer import Answer, speeds
from ddpm_lab.explain.findings import compared
from ddpm_lab.explain.frames import Study, once
from ddpm_lab.questions import (
    all_reduce,
    amp,
    batch_size,
    claims,
    exchange,
    multi_gpu,
    peers,
    profile,
    quality,
    recommendation,
    torch_compile,
    workers,
)

_OWN: dict[str, Callable[[Study], Answer]] = {
    module.__name__.rpartition(".")[2]: module.answer
    for module in (
        *(profile, multi_gpu, amp, workers, torch_compile, batch_size, exchange, all_reduce, peers, quality, claims),
        recommendation,
    )
}


@once
def answer(study: Study) -> Answer:
    """Return the answer that the records of a study give to its question."""
    own = _OWN.get(study.experiment)
    return own(study) if own else speeds(study, compared(study))
