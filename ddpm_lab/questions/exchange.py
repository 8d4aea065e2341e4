"""How should ranks exchange gradients? Several ranks as by default, and with each setting of the exchange alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import ExchangeConfig, RunConfig
from ddpm_lab.explain import phrases, sentences
from ddpm_lab.explain.answer import Answer, speeds
from ddpm_lab.explain.changes import NO_EXCHANGE
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.findings import compared
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import Experiment, Family
from ddpm_lab.questions.quality import trained_views
from ddpm_lab.training.setting import Batch, Precision, Setup, WorldSizes

BASELINE = "default"
_SETTINGS: dict[str, dict[str, Any]] = {
    NO_EXCHANGE: {"enabled": False},
    "bf16 hook": {"hook": "bf16"},
    "fp16 hook": {"hook": "fp16"},
    "buckets of 5 MiB": {"bucket_mb": 5},
    "static graph": {"static_graph": True},
    "no bucket view": {"bucket_view": False},
    "buckets of 100 MiB": {"bucket_mb": 100},
    "buckets of 1 MiB": {"bucket_mb": 1},
}
_ONE_IN_TWO = "one exchange in 2 micro-batches"


def exchange(
    setup: Setup,
    *,
    world_sizes: WorldSizes = None,
    global_batch_size: Batch = None,
    precision: Precision = "fp32",
) -> Experiment:
    """What is each setting of the exchange worth, and what does the exchange cost at all?

    Two ranks, on a GPU as many as there are; ``smoke`` measures the first two settings. NCCL's settings need GPUs.
    One exchange in 2 micro-batches halves the updates of weights too, so no ratio to the default says what it is worth:
    what the exchange costs there is measured against the same steps without it, last.
    """
    usual = [setup.most_ranks] if setup.device == "cuda" else [2]
    asked = setup.world_sizes(world_sizes, [n for n in usual if n > 1])
    if world_sizes is not None and 1 in asked:
        raise ConfigError("world_sizes has 1, and one rank exchanges nothing: give 2 or more")
    families = []
    for ranks in asked:
        batch = setup.batch_size(global_batch_size, ranks)
        base = setup.config(global_batch_size=batch, world_size=ranks, precision=precision)
        families.append(
            Family(
                name=setup.family_name(batch, ranks),
                baseline=base,
                baseline_label=BASELINE,
                candidates=_candidates(base)[: 2 if setup.preset == "smoke" else None],
                primary="bf16 hook",
            )
        )
        if setup.preset != "smoke":
            families.append(_half_as_often(setup, base))
    if families:
        return Experiment(name="exchange", families=tuple(families))
    alone = Family(
        name=setup.family_name(batch := setup.batch_size(global_batch_size), 1),
        baseline=setup.config(global_batch_size=batch, precision=precision),
        baseline_label=setup.ranks_label(1),
        candidates=(),
        mechanism=True,
    )
    left_out = ((alone.name, setup.ranks_label(2), setup.why_alone),)
    return Experiment(name="exchange", families=(alone,), left_out=left_out)


def _candidates(base: RunConfig) -> tuple[tuple[str, RunConfig], ...]:
    settings = dict(_SETTINGS)
    if base.device == "cuda":
        settings["NCCL for PCIe"] = {"nccl": "pcie"}
    return tuple(
        (label, dataclasses.replace(base, exchange=ExchangeConfig(**changes))) for label, changes in settings.items()
    )


def _half_as_often(setup: Setup, base: RunConfig) -> Family:
    """The same micro-batches, two to a step: half as many exchanges for equal images, in batches twice as large."""
    twice = dataclasses.replace(base, global_batch_size=2 * base.global_batch_size, accumulation=2)
    return Family(
        name=f"{setup.family_name(twice.global_batch_size, base.world_size)}, {_ONE_IN_TWO}",
        baseline=twice,
        baseline_label=BASELINE,
        candidates=((NO_EXCHANGE, dataclasses.replace(twice, exchange=ExchangeConfig(enabled=False))),),
    )


def answer(study: Study) -> Answer:
    """Compare the settings of the exchange; ranks that exchange nothing train apart and are none."""
    exposed = exposed_communication(comparisons(study))
    return speeds(study, compared(study, keep=sentences.trains, own=lambda _: exposed), views=trained_views(study))


def exposed_communication(rows: Sequence[Comparison]) -> list[str]:
    """How much shorter a step is where ranks exchange nothing: a note for each family."""
    told = []
    for row in rows:
        if row.role != "candidate" or sentences.trains(row) or not row.sets:
            continue
        if row.resolved:
            shorter, low, high = (100 * (1 - 1 / v) for v in (row.ratio.value, *row.ratio.ends))
            span = "" if math.isnan(low) else f" ({low:.1f} to {high:.1f} %)"
            text = f"{shorter:.1f} % shorter{span}: exposed communication"
        else:
            text = f"not called shorter (ratio {phrases.ratio(row)}, {phrases.evidence(row)})"
        told.append(f"Without exchange a step of {row.family} is {text}.")
    return told
