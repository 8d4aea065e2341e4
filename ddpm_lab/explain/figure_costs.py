"""What a run costs beside its steps, eager and compiled, and when compiling pays off."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddpm_lab.explain import compiling, decisions, phrases
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.bars import bars
from ddpm_lab.explain.charts.lines import Line, Plot, lines
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.figure_ratios import measured
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES = {
    "start": "start-up",
    "build": "data and network",
    "compile": "compile",
    "warmup": "warm-up",
    "steady": "timed steps",
    "teardown": "tear-down",
}
_COLOURS = dict(zip(STAGES.values(), style.SERIES, strict=False))


def stage_seconds(records: Sequence[RunRecord]) -> dict[str, float]:
    """Median seconds of each stage that any of the records went through, in the order of a run."""
    values = {name: [r.stages[name] for r in records if name in r.stages] for name in STAGES}
    return {name: float(np.median(found)) for name, found in values.items() if found}


def cost_split(study: Study) -> Figure | None:
    """One stacked bar for eager training, and for compiled training from a warm and from a cold cache."""
    panels, counted = [], []
    for c in comparisons(study):
        if c.role == "candidate" and (rows := _bars(study, c)):
            panels.append(Panel(heading=c.family, rows=rows))
            counted.append(compiling.counters(study, c.run_id))
    if not panels:
        return None
    witnessed = phrases.joined([words for words in dict.fromkeys(counted) if words])
    return bars(
        panels,
        title="What a run costs beside its steps",
        context=phrases.context(study),
        label="seconds",
        names=_COLOURS,
        note="Median of each stage over the groups measured; timed steps last as long as the plan of a set says, and a "
        f"cold compile is measured without them.{f' Witnessed: {witnessed}.' if witnessed else ''}",
    )


def _bars(study: Study, c: Comparison) -> list[Row]:
    """The bars of a compiled configuration; none unless its compile was measured."""
    ok = [r for r in study.records if r.status == "ok" and r.baseline_id == c.baseline_id]
    cold = [r for r in ok if r.run_id == c.run_id and r.compile_cache == "cold"]
    warm = [r for r in ok if r.run_id == c.run_id and r.compile_cache == "warm"]
    eager = [r for r in ok if r.role in ("baseline", "twin")]
    if not (cold or warm):
        return []
    rows = []
    for name, found in ((c.baseline_label, eager), (f"{c.label}, warm cache", warm), (f"{c.label}, cold cache", cold)):
        if found:
            parts = {STAGES[stage]: seconds for stage, seconds in stage_seconds(found).items()}
            compiled = f", compile {phrases.seconds(parts['compile'])}" if "compile" in parts else ""
            text = f"{phrases.seconds(sum(parts.values()))}{compiled}"
            rows.append(Row(name=f"{name} ({phrases.plural(len(found), 'group')})", parts=parts, text=text))
    return rows


def break_even(study: Study) -> Figure | None:
    """Time since the start with and without compiling, up to beyond the step where the lines cross."""
    found = [(c, compiling.break_even(study, c)) for rows in measured(study) for c in rows if c.role == "candidate"]
    plots = [_crossing(c, cost) for c, cost in found if not math.isnan(cost.cold_seconds)]
    if not plots:
        return None
    return lines(
        plots[:4],
        title="When compiling pays off: total time with and without it",
        context=phrases.context(study),
        note="A projection: cold compile time and steady steps. Shade: 95 % interval of the speed ratio, and of the "
        "compile time where it was measured more than once. Dashed: where the lines cross.",
    )


def _crossing(c: Comparison, cost: compiling.BreakEven) -> Plot:
    step = c.step_seconds * c.ratio.value
    pays = c.verdict == decisions.FASTER and math.isfinite(cost.steps)
    last = 2.2 * cost.steps if pays else 4 * cost.cold_seconds / step
    scale, unit = (60.0, "minutes") if step * last > 300 else (1.0, "seconds")
    along = np.linspace(0, last, 60)
    total, low, high = np.array([compiling.total_seconds(cost, c, at) for at in along]).T / scale
    when = compiling.pays_off(cost, c)
    words = f"pays off {when}" if when.startswith(("after", "never")) else f"break-even {when}"
    return Plot(
        lines=[
            Line(
                name=c.baseline_label, x=[0, last], y=[0, step * last / scale], colour=style.INK, look="--", width=2.2
            ),
            Line(name=c.label, x=along, y=total, low=low, high=high, look="-", shade=True, width=2.2),
        ],
        heading=f"{c.family}: {words}",
        x_label="steps",
        y_label=f"{unit} since the start",
        at=cost.steps if pays else None,
    )
