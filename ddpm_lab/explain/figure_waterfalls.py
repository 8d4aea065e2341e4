"""Waterfalls: the lost scaling from the ideal step to the measured; a recommendation, change by change."""

from __future__ import annotations

from dataclasses import replace

from matplotlib.figure import Figure

from ddpm_lab.explain import phrases, quality
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.bars import bars
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.figure_ratios import COLOURS, MEANING, numbers
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.lost_scaling import Part, Seconds, Split, splits
from ddpm_lab.explain.lost_scaling_table import headline, milliseconds
from ddpm_lab.explain.recommended import Recommendation
from ddpm_lab.plan import LOST


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


def lost_scaling(study: Study) -> Figure | None:
    """Ideal step, each part of the loss where the one before ends, and the measured step; None without any."""
    found = [split for split in splits(study) if split.loss.known and split.total.known]
    if not found:
        return None
    records = tuple(r for r in study.records if r.family.endswith(LOST))
    return bars(
        [
            Panel(
                heading=f"{split.family}, batch {split.batch}{f' ({split.doubt})' if split.doubt else ''}",
                rows=_rows(split),
            )
            for split in found
        ],
        title=headline(found),
        context=phrases.context(replace(study, records=records), batch=False),
        label="milliseconds for a batch",
        steps=True,
        note="Each part is what a step gains where it alone is switched off, with its 95 % interval over sets; the "
        "interaction is what all together gain more or less. Ideal: one rank's time divided by the number of ranks. "
        f"{MEANING}",
    )


def _rows(split: Split) -> list[Row]:
    """The bars, from the ideal down; parts whose interval holds 0 are grey."""
    parts = [_part(split, part.name, part.seconds, _colour(part)) for part in split.parts]
    return [
        _part(split, "ideal", split.ideal, style.SOFT, whole=True),
        *parts,
        _part(split, "interaction", split.interaction, style.OPEN),
        _part(split, "measured", split.measured, style.SOFT, whole=True),
    ]


def _colour(part: Part) -> str:
    return style.BAD if part.lost else style.GOOD if part.gained else style.OPEN


def _part(split: Split, name: str, seconds: Seconds, colour: str, *, whole: bool = False) -> Row:
    return Row(
        name=name,
        value=1e3 * seconds.value,
        low=1e3 * seconds.low,
        high=1e3 * seconds.high,
        colour=colour,
        text=milliseconds(split, seconds, sign=not whole),
        whole=whole,
    )
