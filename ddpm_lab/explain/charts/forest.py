"""Forest plots: values with intervals beside a reference, such as speeds relative to a baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.style import Panel, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LOGARITHMIC = 5
"""Ratio of the ends of an axis of ratios from which on it is logarithmic."""


def forest(
    panels: Sequence[Panel], *, title: str, context: str, note: str = "", label: str = "", beside: bool = False
) -> Figure:
    """Draw rows of points with intervals: panels below each other share an axis, those ``beside`` share the names.

    An interval that is absurdly wide ends with an arrow at the edge of the axis.
    """
    with style.style():
        figure, axes, _ = style.row_panels(panels, title, context, note, label, beside=beside)
        for ax, panel in zip(axes, panels, strict=True):
            low, high = _limits([panel] if beside else panels)
            _axis(ax, low, high, ratios=panel.reference == 1, narrow=beside)
            if panel.reference is not None:
                ax.axvline(panel.reference, color=style.SOFT, lw=1.2, zorder=1)
            if panel.band is not None:
                ax.axvspan(*panel.band, color=style.BAND, lw=0, zorder=0.5)
            ax.set_xlim(low, high)
            for y, row in zip(style.centres(panel.rows), panel.rows, strict=True):
                if not math.isnan(row.value):
                    _mark(ax, y, row)
        return style.settle(figure)


def _limits(panels: Sequence[Panel]) -> tuple[float, float]:
    """Ends of the axis: all points and bands, and intervals as far as they are not absurdly wide."""
    rows = [r for p in panels for r in p.rows if not math.isnan(r.value)]
    points = [v for r in rows for v in (r.value, *r.dots)]
    points += [v for p in panels for v in ((p.reference,) if p.reference is not None else ()) + (p.band or ())]
    low, high = min(points, default=0.0), max(points, default=1.0)
    ends = [v for r in rows for v in (r.low, r.high) if not math.isnan(v)]
    reach = max(high - low, 0.15 if panels[0].reference == 1 else 0.0)
    least, most = min([low, *(max(v, low - reach) for v in ends)]), max([high, *(min(v, high + reach) for v in ends)])
    if panels[0].reference == 1:
        least = max(least, 0.5 * low)
        if most / least > _LOGARITHMIC:
            return least / 1.15, most * 1.15
    margin = 0.06 * (most - least) or 0.02
    return least - margin, most + margin


def _axis(ax: Axes, low: float, high: float, *, ratios: bool, narrow: bool) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    style.plain(ax.xaxis, 4 if narrow else 7)
    if ratios and high / low > _LOGARITHMIC:
        ax.set_xscale("log")
        steps = (1, 1.5, 2, 3, 4, 6, 8) if high / low < 30 else (1, 3) if high / low < 1e4 else (1,)
        ticks = [n * 10.0**k for k in range(-4, 7) for n in steps]
        ax.xaxis.set_major_locator(FixedLocator([t for t in ticks if low <= t <= high]))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: style.number(value)))


def _mark(ax: Axes, y: float, row: Row) -> None:
    low, high = ax.get_xlim()
    # Fixed offsets keep the dots apart and the figure reproducible.
    offsets = [y + 0.085 + 0.02 * (i % 3 - 1) for i in range(len(row.dots))]
    if offsets:
        ax.plot(row.dots, offsets, "o", ms=3.2, mew=0, color=row.colour, alpha=0.45, zorder=2)
    if not math.isnan(row.low):
        ax.plot([row.low, row.high], [y, y], color=row.colour, lw=2.8, zorder=3)
        for cut, end, marker in ((row.low < low, low, "<"), (row.high > high, high, ">")):
            if cut:
                ax.plot([end], [y], marker, color=row.colour, ms=7, zorder=4, clip_on=False)
    ax.plot([row.value], [y], "o", ms=7, color=row.colour, zorder=5)
