"""What compiling costs and when it pays off."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddpm_lab.explain import phrases, stats
from ddpm_lab.explain.frames import Study


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Cost of a cold compile in seconds (median over ``measurements``) and the steps that earn it back.

    ``steps_low`` and ``steps_high`` follow from the interval of the ratio; the spread of the compile time is not in
    them. Infinite: never, at this speed.
    """

    cold_seconds: float
    measurements: int
    steps: float
    steps_low: float
    steps_high: float


def break_even(study: Study, row: Mapping[str, Any]) -> BreakEven:
    """The break-even of one compiled configuration, a row of ``frames.comparisons``."""
    cold = [
        r.stages["compile"]
        for r in study.records
        if r.role == "cold" and r.status == "ok" and r.run_id == row["run_id"] and "compile" in r.stages
    ]
    seconds = float(np.median(cold)) if cold else math.nan
    step = row["step_seconds"] * row["ratio"]  # of the baseline, paired with the configuration's

    def steps(ratio: float) -> float:
        return stats.break_even_steps(seconds, step, ratio)

    return BreakEven(
        cold_seconds=seconds,
        measurements=len(cold),
        steps=steps(row["ratio"]),
        steps_low=steps(row["high"]),
        steps_high=steps(row["low"]),
    )


def pays_off(cost: BreakEven, row: Mapping[str, Any]) -> str:
    """Such as "after 2,130 steps (1,900 to 2,500)", "never, at this speed", "not resolved", or "unknown"."""
    if row["verdict"] == stats.SLOWER:
        return "never, at this speed"
    if row["verdict"] != stats.FASTER:
        return stats.NOT_RESOLVED
    if math.isnan(cost.steps):
        return "unknown"
    few, many = (phrases.significant(v) for v in (cost.steps_low, cost.steps_high))
    return f"after {phrases.plural(phrases.significant(cost.steps), 'step')} ({few} to {many})"


def sentence(study: Study, row: Mapping[str, Any]) -> str:
    """Cost and break-even in a sentence."""
    cost = break_even(study, row)
    if math.isnan(cost.cold_seconds):
        return "The cost of a cold compile was not measured."
    measured = phrases.plural(cost.measurements, "measurement")
    text = f"Compiling takes {phrases.seconds(cost.cold_seconds)} with an empty cache ({measured})"
    when = pays_off(cost, row)
    if when == stats.NOT_RESOLVED:
        return f"{text}; whether it pays off is not resolved."
    if when.startswith("never"):
        return f"{text} and pays off never, at this speed."
    return f"{text} and pays off {when}."
