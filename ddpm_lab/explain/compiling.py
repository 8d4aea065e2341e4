"""What compiling costs and when it pays off."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ddpm_lab.explain import decisions, phrases, stats
from ddpm_lab.explain.comparisons import Comparison
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


def break_even(study: Study, row: Comparison) -> BreakEven:
    """The break-even of one compiled configuration."""
    cold = [
        r.stages["compile"]
        for r in study.records
        if r.role == "cold" and r.status == "ok" and r.run_id == row.run_id and "compile" in r.stages
    ]
    cost = stats.estimate(np.log(cold))
    step = row.step_seconds * row.ratio.value  # of the baseline, paired with the configuration's
    saved, saved_low, saved_high = (step * (1 - 1 / v) for v in (row.ratio.value, *row.ratio.ends))
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
        steps=stats.break_even_steps(cost.value, step, row.ratio.value),
        steps_low=ends[0],
        steps_high=ends[1],
    )


def total_seconds(cost: BreakEven, row: Comparison, steps: float) -> tuple[float, float, float]:
    """Compile time and so many steps: value and interval; the interval meets eager training at the break-even's ends.

    Distances of the parts from their ends add up as squares (MOVER, as for the break-even).
    """
    step = row.step_seconds * row.ratio.value
    total = cost.cold_seconds + steps * step / row.ratio.value
    parts = (
        (cost.cold_seconds, cost.cold_low, cost.cold_high),
        (steps * step / row.ratio.value, steps * step / row.ratio.high, steps * step / row.ratio.low),
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


def pays_off(cost: BreakEven, row: Comparison) -> str:
    """Such as "after 2,130 steps (1,900 to 2,500)", "never, at this speed", "inconclusive", or "unknown"."""
    if row.verdict == decisions.SLOWER:
        return "never, at this speed"
    if row.verdict != decisions.FASTER:
        return decisions.INCONCLUSIVE
    if math.isnan(cost.steps):
        return "unknown"
    few, many = (phrases.significant(v) for v in (cost.steps_low, cost.steps_high))
    between = f"{few} or more" if math.isinf(cost.steps_high) else f"{few} to {many}"
    return f"after {phrases.plural(phrases.significant(cost.steps), 'step')} ({between})"


def sentence(study: Study, row: Comparison) -> str:
    """Cost and break-even in a sentence."""
    cost = break_even(study, row)
    if math.isnan(cost.cold_seconds):
        return "The cost of a cold compile was not measured."
    measured = phrases.plural(cost.measurements, "measurement")
    text = f"Compiling takes {phrases.seconds(cost.cold_seconds)} with an empty cache ({measured})"
    made = f" Witnessed: {found}." if (found := counters(study, row.run_id)) else ""
    when = pays_off(cost, row)
    if when == decisions.INCONCLUSIVE:
        return f"{text}; whether it pays off is not known yet.{made}"
    if when.startswith("never"):
        return f"{text} and pays off never, at this speed.{made}"
    alone = "; the interval is that of the speed alone" if cost.measurements == 1 and when.startswith("after") else ""
    return f"{text} and pays off {when}{alone}.{made}"
