"""The waterfall of a recommendation, change by change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpm_lab.explain import phrases, quality
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.bars import bars
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.figure_ratios import COLOURS, numbers
from ddpm_lab.explain.questions.recommendation import Recommendation

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def recommendation(found: Recommendation, title: str) -> Figure:
    """Speed after each change, beginning where the one before ends, and what is recommended; from the same sets."""
    rows, before = [], 1.0
    judged = f" Quality of what is recommended: {quality.sentence(found.judged)}." if found.count else ""
    for i, step in enumerate(found.steps):
        colour = COLOURS.get(step.verdict, style.OPEN) if i < found.count or not found.count else style.OPEN
        rows.append(_speed(f"+ {step.label}", step.row, before, colour))
        before = step.row.ratio.value
    if found.count > 1:
        rows.append(_speed("recommended", found.best, 1.0, style.SOFT))
    return bars(
        [Panel(rows=rows, reference=1)],
        title=title,
        context=phrases.context(found.study),
        label="speed relative to the baseline",
        note=f"Measured again after the search, one change more in each row: the bar goes from the speed before to the "
        "speed after, with its 95 % interval over sets. Blue: the change is faster; orange: slower; grey: no "
        f"difference found, or not recommended.{judged}",
    )


def _speed(name: str, c: Comparison, start: float, colour: str) -> Row:
    value, (low, high) = c.ratio.value, c.ratio.ends
    return Row(name=name, value=value, low=low, high=high, start=start, colour=colour, text=numbers(c.ratio))
