"""Ask a question: one function for each experiment, from settings to the configurations that answer it.

Each takes a ``Setup`` (what is trained, on what, how much) and a grid, of which None means the preset's choice for this
machine. What the machine cannot run is left out and named, or refused if it was asked for by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.declared import arguments
from ddpm_lab.plan import RECOMMENDATION, SEARCH, WITH_TRIALS, Experiment
from ddpm_lab.questions import all_reduce as collectives
from ddpm_lab.questions.all_reduce import all_reduce
from ddpm_lab.questions.amp import amp
from ddpm_lab.questions.batch_size import batch_size
from ddpm_lab.questions.bottleneck import bottleneck
from ddpm_lab.questions.claims import claims
from ddpm_lab.questions.exchange import exchange
from ddpm_lab.questions.multi_gpu import multi_gpu
from ddpm_lab.questions.peers import PLAN, peers
from ddpm_lab.questions.profile import profile
from ddpm_lab.questions.quality import quality, with_trials
from ddpm_lab.questions.search import SEARCH_PLAN, recommendation, search
from ddpm_lab.questions.torch_compile import torch_compile
from ddpm_lab.questions.workers import workers
from ddpm_lab.training.own_workload import nothing_asked
from ddpm_lab.training.setting import Setup

PLANS = {"peers": PLAN, "all_reduce": collectives.PLAN, SEARCH: SEARCH_PLAN}
"""How a set is measured where it is not as the preset says."""
LONG = ("peers", "quality", "claims")
"""Questions that take too long to be measured beside the others: notebooks do so in the preset ``full`` only."""
QUESTIONS: dict[str, Callable[..., Experiment]] = {
    f.__name__: f
    for f in (
        *(profile, multi_gpu, amp, workers, torch_compile, batch_size, exchange, all_reduce, peers, quality),
        *(bottleneck, claims),
    )
}

STAGES: dict[str, Callable[..., Experiment]] = {f.__name__: f for f in (search, recommendation)}
"""What ``recommend`` measures in the course of its answer; nobody asks for one alone."""


def ask(name: str, setup: Setup, *, seeds: int | None = None, images: int | None = None, **grid: Any) -> Experiment:
    """The experiment that answers a question; ``seeds`` and ``images`` are those of the runs that are for quality."""
    grid = arguments({**QUESTIONS, **STAGES}[name], grid, name)
    experiment = _ask(name, setup, seeds=seeds, images=images, **grid)
    # A question has one primary comparison: that of its first family.
    others = tuple(dataclasses.replace(f, primary="") for f in experiment.families[1:])
    return dataclasses.replace(experiment, families=experiment.families[:1] + others)


def _ask(name: str, setup: Setup, *, seeds: int | None, images: int | None, **grid: Any) -> Experiment:
    if setup.own and setup.own.lacks(name):
        return nothing_asked(name, setup)
    trained = {option: value for option, value in (("seeds", seeds), ("images", images)) if value is not None}
    if name in (*WITH_TRIALS, RECOMMENDATION):
        return with_trials({**QUESTIONS, **STAGES}[name](setup, **grid), setup, seeds=seeds, images=images)
    if name == SEARCH:
        return search(setup, **grid)
    for option, value in trained.items():
        if name != "quality":
            able = ", ".join((*WITH_TRIALS, "quality"))
            raise ConfigError(f"{option} is {value!r}, and {name} trains no runs for quality: only {able} do")
    return QUESTIONS[name](setup, **grid, **arguments(QUESTIONS[name], trained, name))
