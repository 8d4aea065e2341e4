"""Records that the bottleneck of a step is told from: its time budget, and sets of its changes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.selection import RECOMMENDATION, Study
from ddpm_lab.record import RunRecord


def profiled(config: RunConfig, *ranks: Mapping[str, float], **values: Any) -> RunRecord:
    """The time budget of a configuration: milliseconds of each phase of each rank."""
    made = make.time_budget(*ranks, **values)
    return replace(made, config=replace(config, purpose="profile"), experiment="bottleneck")


def told(config: RunConfig, ratios: Mapping[str, tuple[RunConfig, float]], **values: Any) -> list[RunRecord]:
    """Sets of changes of a configuration."""
    return make.sets(ratios, baseline=config, experiment="bottleneck", family="one change at a time", **values)


def study(*records: RunRecord, trials: Sequence[RunRecord] = ()) -> Study:
    return replace(make.study(records, RECOMMENDATION), trials=tuple(trials))
