"""Machines on which one thing is wrong: the configuration in question, what it costs, and the change that cures it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.selection import RECOMMENDATION, Study
from ddpm_lab.questions.bottleneck import batch_sizes, changes
from ddpm_lab.record import RunRecord

LEVERS = "planted:machine"
COSTS = {"loader": 0.0, "fixed": 0.002, "image": 0.001, "narrow": 1.1, "compiled": 1.0, "slow": 0.0}
"""Seconds, and factors, by the names of the options of the workload."""


@dataclass(frozen=True, slots=True)
class Planted:
    """A configuration in question with planted ``costs``; ``cure`` is the change that must come first.

    ``beside`` is another change that is measured, if any.
    """

    settings: Mapping[str, Any]
    costs: Mapping[str, float]
    cure: str
    beside: str = ""

    @property
    def config(self) -> RunConfig:
        """The configuration in question."""
        options = tuple({**COSTS, **self.costs}.items())
        values = {"global_batch_size": 16, "oversubscribe": True, **self.settings}
        return RunConfig(workload=LEVERS, options=options, **values)

    def changes(self) -> dict[str, RunConfig]:
        """The changes that are measured, by name."""
        config = self.config
        offered = {**changes(config, usable_cores=2, most_ranks=2), **batch_sizes(config)}
        return {name: offered[name] for name in (self.cure, self.beside) if name}

    @property
    def gain(self) -> float:
        """How many times as fast a step is with the cure, for equal images, by the planted costs."""
        config = self.config
        cured = self.changes()[self.cure]
        return seconds(config) / config.global_batch_size / (seconds(cured) / cured.global_batch_size)


def seconds(config: RunConfig) -> float:
    """What a step is planted to take."""
    costs = dict(config.options)
    factor = (costs["narrow"] if config.precision == "bf16" else 1) * (
        costs["compiled"] if config.compile != "off" else 1
    )
    loading = costs["loader"] if config.loader == "files" else 0.0
    slow = costs["slow"] if config.world_size > 1 else 0.0
    return float(loading + costs["fixed"] + slow + factor * costs["image"] * config.rank_batch_size)


MACHINES = {
    "slow loader": Planted({"loader": "files"}, {"loader": 0.030}, "packed data", beside="bf16"),
    "tiny batch": Planted({"global_batch_size": 8}, {"fixed": 0.020}, "batch 64"),
    "accidental fp32": Planted({}, {"narrow": 0.6}, "bf16"),
    "compile that never pays off": Planted({"compile": "whole"}, {"compiled": 1.4}, "eager"),
}


def profiled(config: RunConfig, *ranks: Mapping[str, float], **values: Any) -> RunRecord:
    """The time budget of a configuration: milliseconds of each phase of each rank."""
    made = make.time_budget(*ranks, **values)
    return replace(made, config=replace(config, purpose="profile"), experiment="bottleneck")


def told(config: RunConfig, ratios: Mapping[str, tuple[RunConfig, float]], **values: Any) -> list[RunRecord]:
    """Sets of changes of a configuration."""
    return make.sets(ratios, baseline=config, experiment="bottleneck", family="one change at a time", **values)


def study(*records: RunRecord, trials: Sequence[RunRecord] = ()) -> Study:
    return replace(make.study(records, RECOMMENDATION), trials=tuple(trials))
