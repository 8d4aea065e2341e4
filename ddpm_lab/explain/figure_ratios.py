"""Figures of a comparison: speed relative to the baseline, and the time that this is for a fixed amount of work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddpm_lab.explain import decisions, findings, phrases
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.bars import bars
from ddpm_lab.explain.charts.forest import forest
from ddpm_lab.explain.charts.lines import Line, Plot, lines
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import MECHANISM_ONLY, Comparison, comparisons, families
from ddpm_lab.explain.findings import Finding, listed
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.stats import Interval
from ddpm_lab.plan import LOST

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {decisions.FASTER: style.GOOD, decisions.SLOWER: style.BAD}
MEANING = "Blue: faster; orange: slower; grey: no difference found."
POINTS = f"Geometric mean and 95 % interval over sets; dots: single sets. {MEANING}"


def row(c: Comparison, name: str = "") -> Row:
    """A comparison as a row: its ratio, or why it has none."""
    if not c.sets:
        return Row(name=name or c.label, missing=phrases.failure(c))
    return Row(
        name=name or c.label,
        value=c.ratio.value,
        low=c.ratio.low,
        high=c.ratio.high,
        colour=COLOURS.get(c.verdict, style.OPEN),
        dots=c.set_ratios if c.sets > 1 else (),
        text=numbers(c.ratio),
    )


def numbers(ratio: Interval) -> str:
    """Such as "1.62  (1.55–1.69)"."""
    return phrases.times(ratio).replace(" (", "  (").replace(" to ", phrases.DASH)


def band(rows: Sequence[Comparison]) -> tuple[float, float] | None:
    """The interval of the baseline against itself; None without one."""
    return next((r.noise.ends for r in rows if r.noise.exists), None)


def _shown(rows: Sequence[Comparison]) -> list[Comparison]:
    """Comparisons that may appear in a figure of speed."""
    return [c for c in rows if not c.mechanism_only and c.config.exchange.enabled]


def ratios(study: Study, found: Finding, compared: Sequence[Comparison]) -> Figure:
    """Speed of each configuration relative to its baseline: one panel a family, failures as rows with their reason."""
    panels, every = [], _shown(compared)
    for rows in families(every):
        shown = [c for c in rows if c.role == "candidate" or (c.role != "note" and not c.sets)]
        shown = [c for c in shown if c.role != "twin"] or shown
        if shown:
            panels.append(Panel(heading=rows[0].family, rows=[*map(row, shown)], reference=1, band=band(rows)))
    hidden = [(c.label, phrases.failure(c)) for c in every if c.role == "note" and not c.sets]
    hidden += [
        (r.label, MECHANISM_ONLY if r.mechanism_only else "")
        for r in study.records
        if r.role != "twin" and not r.family.endswith(LOST) and (r.mechanism_only or not r.config.exchange.enabled)
    ]
    left_out = listed("Not shown", hidden)
    if not panels:
        return style.message(found.headline, phrases.context(study), f"{found.claim} {left_out}")
    note = f"{POINTS}{' Band: the baseline repeated.' * any(p.band for p in panels)} {left_out}"
    bases = {c.baseline_label for c in every}
    return forest(
        panels,
        title=found.headline,
        context=phrases.context(study),
        note=f"{note} {phrases.begun(findings.qualities(every))}.",
        label=f"speed relative to {bases.pop() if len(bases) == 1 else 'the baseline'} (above 1 is faster)",
    )


def times(study: Study) -> Figure | None:
    """Time for 50,000 images as bars: each baseline's, and the others' by their ratios to it; None without any."""
    shown = measured(study)
    if not shown:
        return None
    unit, time_of = projection([c for rows in shown for c in rows])
    panels = []
    for rows in shown:
        base = next((c for c in rows if c.role == "baseline"), rows[0])
        panels.append(Panel(heading=rows[0].family, rows=[_bar(c, base, time_of) for c in rows]))
    return bars(
        panels,
        title="Time for 50,000 images",
        context=phrases.context(study),
        label=f"{unit} (projected from timed steps)",
        note=f"The baseline's time divided by each ratio, with its 95 % interval over sets. {MEANING}",
    )


def _bar(c: Comparison, base: Comparison, time_of: Callable[..., Interval]) -> Row:
    time = time_of(c, base)
    colour = style.SOFT if c is base else COLOURS.get(c.verdict, style.OPEN)
    text = phrases.significant(time.value)
    return Row(name=c.label, value=time.value, low=time.low, high=time.high, colour=colour, text=text)


def by_workers(study: Study) -> Figure | None:
    """Time for 50,000 images against the loader workers, training and the loader alone; None below three numbers."""
    shown = [sorted(rows, key=lambda c: c.config.loader_workers) for rows in measured(study)]
    shown = [rows for rows in shown if len({c.config.loader_workers for c in rows}) > 2]
    plots = []
    for alone in (False, True):
        kept = [rows for rows in shown if rows[0].loader_alone == alone]
        if kept:
            unit, time_of = projection([c for rows in kept for c in rows])
            ticks = sorted({c.config.loader_workers for rows in kept for c in rows})
            heading = "The loader alone" if alone else "Training"
            series = [timed(rows, time_of, lambda c: c.config.loader_workers) for rows in kept]
            plots.append(Plot(lines=series, heading=heading, x_label="loader workers", y_label=unit, ticks=ticks))
    if not plots:
        return None
    return lines(
        plots,
        title="Time for 50,000 images against loader workers",
        context=phrases.context(study),
        note="A projection from timed steps; upright lines: 95 % interval of the ratio to the baseline.",
    )


def timed(
    rows: Sequence[Comparison],
    time_of: Callable[..., Interval],
    x: Callable[[Comparison], float],
    name: str = "",
) -> Line:
    """A family as a line of times against ``x``, each with the interval of its ratio to the baseline."""
    base = next((c for c in rows if c.role == "baseline"), rows[0])
    found = [time_of(c, base) for c in rows]
    low, high = [t.low for t in found], [t.high for t in found]
    return Line(name=name or rows[0].family, x=[x(c) for c in rows], y=[t.value for t in found], low=low, high=high)


def measured(study: Study) -> list[list[Comparison]]:
    """Families of what has a speed, without the twins."""
    kept = [[r for r in rows if r.sets and r.role != "twin"] for rows in families(_shown(comparisons(study)))]
    return [rows for rows in kept if rows]


def projection(rows: Sequence[Comparison]) -> tuple[str, Callable[..., Interval]]:
    """The unit in which the longest time for 50,000 images is read, and a row's time in it, from its baseline's."""
    longest = max(r.projected_seconds for r in rows)
    unit, scale = ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0) if longest > 300 else ("seconds", 1.0)

    def time_of(c: Comparison, base: Comparison | None = None) -> Interval:
        if base is None or c is base:
            return Interval(value=c.projected_seconds / scale)
        ratio, whole = c.ratio.inverse, base.projected_seconds / scale
        return Interval(value=whole * ratio.value, low=whole * ratio.low, high=whole * ratio.high)

    return unit, time_of
