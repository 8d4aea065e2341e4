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
    """Cost of a cold compile in seconds (geometric mean over ``measurements``) and the steps that earn it back.

    ``cold_low`` and ``cold_high`` are the 95 % interval of the cost, NaN for one measurement. ``steps_low`` and
    ``steps_high`` follow from the intervals of cost and ratio; from that of the ratio alone where the cost has none.
    Infinite: never, at this speed.
    """

    cold_seconds: float
    cold_low: float
    cold_high: float
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
    cost = stats.geometric_estimate(np.log(cold))
    step = row["step_seconds"] * row["ratio"]  # of the baseline, paired with the configuration's
    saved, saved_low, saved_high = (step * (1 - 1 / row[end]) for end in ("ratio", "low", "high"))
    ends = (math.nan, math.nan)
    if cold and not math.isnan(saved_low):
        ends = (math.inf, math.inf)
        if saved > 0:
            ends = stats.quotient_interval((cost.value, cost.low, cost.high), (saved, saved_low, saved_high))
    return BreakEven(
        cold_seconds=cost.value,
        cold_low=cost.low,
        cold_high=cost.high,
        measurements=len(cold),
        steps=stats.break_even_steps(cost.value, step, row["ratio"]),
        steps_low=ends[0],
        steps_high=ends[1],
    )


def total_seconds(cost: BreakEven, row: Mapping[str, Any], steps: float) -> tuple[float, float, float]:
    """Compile time and so many steps: value and interval; the interval meets eager training at the break-even's ends.

    Distances of the parts from their ends add up as squares (MOVER, as for the break-even).
    """
    step = row["step_seconds"] * row["ratio"]
    total = cost.cold_seconds + steps * step / row["ratio"]
    parts = (
        (cost.cold_seconds, cost.cold_low, cost.cold_high),
        (steps * step / row["ratio"], steps * step / row["high"], steps * step / row["low"]),
    )
    below, above = (
        math.hypot(*(0.0 if math.isnan(part[end]) else part[end] - part[0] for part in parts)) for end in (1, 2)
    )
    return total, total - below, total + above


def counters(study: Study, run_id: str) -> str:
    """What a configuration's last witness counted: "1 compiled frame, 1 graph, 0 graph breaks and 0 recompiles"."""
    names = {"compiled_frames": "compiled frame", "graphs": "graph", "graph_breaks": "graph break"}
    names["recompiles"] = "recompile"
    ranks = [rank for r in study.records if r.run_id == run_id for rank in r.witness.get("ranks", ())]
    counted = [rank for rank in ranks if names.keys() <= rank.keys()]
    return phrases.joined([phrases.plural(int(counted[-1][k]), noun) for k, noun in names.items()]) if counted else ""


def pays_off(cost: BreakEven, row: Mapping[str, Any]) -> str:
    """Such as "after 2,130 steps (1,900 to 2,500)", "never, at this speed", "not resolved", or "unknown"."""
    if row["verdict"] == stats.SLOWER:
        return "never, at this speed"
    if row["verdict"] != stats.FASTER:
        return stats.NOT_RESOLVED
    if math.isnan(cost.steps):
        return "unknown"
    few, many = (phrases.significant(v) for v in (cost.steps_low, cost.steps_high))
    between = f"{few} or more" if math.isinf(cost.steps_high) else f"{few} to {many}"
    return f"after {phrases.plural(phrases.significant(cost.steps), 'step')} ({between})"


def sentence(study: Study, row: Mapping[str, Any]) -> str:
    """Cost and break-even in a sentence."""
    cost = break_even(study, row)
    if math.isnan(cost.cold_seconds):
        return "The cost of a cold compile was not measured."
    measured = phrases.plural(cost.measurements, "measurement")
    text = f"Compiling takes {phrases.seconds(cost.cold_seconds)} with an empty cache ({measured})"
    made = f" Witnessed: {found}." if (found := counters(study, row["run_id"])) else ""
    when = pays_off(cost, row)
    if when == stats.NOT_RESOLVED:
        return f"{text}; whether it pays off is not resolved.{made}"
    if when.startswith("never"):
        return f"{text} and pays off never, at this speed.{made}"
    alone = "; the interval is that of the speed alone" if cost.measurements == 1 and when.startswith("after") else ""
    return f"{text} and pays off {when}{alone}.{made}"
