"""Bars in rows: plain with intervals, stacked of parts, and waterfalls, in which each row begins where one ended."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.style import Panel, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT = 0.2  # inches


def bars(
    panels: Sequence[Panel],
    *,
    title: str,
    context: str,
    label: str,
    note: str = "",
    names: Mapping[str, str] | None = None,
    steps: bool = False,
) -> Figure:
    """Draw a bar from its start to its value in each row, with its interval, or its parts one after the other.

    ``names`` are the colours of what the legend tells, such as the parts. A panel's reference is a dashed line. With
    ``steps`` the values are changes, and a bar begins where the row above ends: a waterfall.
    """
    panels = [replace(p, rows=_steps(p.rows)) for p in panels] if steps else panels
    with style.style():
        figure, axes, body = style.row_panels(panels, title, context, note, label)
        for ax, panel in zip(axes, panels, strict=True):
            places = style.centres(panel.rows)
            for y, row in zip(places, panel.rows, strict=True):
                _bar(ax, y, row, names or {})
            for (y, row), (below, after) in pairwise(zip(places, panel.rows, strict=True)) if steps else ():
                ends = (y + _HEIGHT / 2, below - _HEIGHT / 2)
                if not after.whole or math.isclose(row.value, after.value):
                    ax.plot([row.value] * 2, ends, color=style.SOFT, lw=1)
            if panel.reference is not None:
                ax.axvline(panel.reference, color=style.INK, lw=1.2, ls="--")
        _limits(axes, panels)
        if names:
            style.legend(body, names)
        return style.settle(figure)


def _bar(ax: Axes, y: float, row: Row, names: Mapping[str, str]) -> None:
    at = row.start
    for name, width in row.parts.items():
        ax.barh(y, width, left=at, height=_HEIGHT, color=names[name], lw=0.6, edgecolor="white")
        at += width
    if not math.isnan(row.value):
        ax.barh(y, row.value - row.start, left=row.start, height=_HEIGHT, color=row.colour, lw=0)
    if not math.isnan(row.low):
        ax.plot([row.low, row.high], [y, y], color=style.INK, lw=1.6)


def _steps(rows: Sequence[Row]) -> list[Row]:
    """Rows of changes as bars: start and ends, with intervals, where they lie on the axis."""
    found, at = [], 0.0
    for row in rows:
        if row.whole or math.isnan(row.value):
            found.append(row)
        else:
            found.append(replace(row, start=at, value=at + row.value, low=at + row.low, high=at + row.high))
        at = at if math.isnan(row.value) else found[-1].value
    return found


def _limits(axes: Sequence[Axes], panels: Sequence[Panel]) -> None:
    """All panels on the scale of their longest bars; intervals reach at most half a scale beyond them."""
    rows = [r for p in panels for r in p.rows]
    ends = [v for r in rows for v in (r.start, r.value, r.start + sum(r.parts.values())) if not math.isnan(v)]
    ends += [p.reference for p in panels if p.reference is not None]
    low, high = min(ends), max(ends)
    reach = 0.5 * (high - low)
    for v in (v for r in rows for v in (r.low, r.high) if not math.isnan(v)):
        low, high = min(low, max(v, min(ends) - reach)), max(high, min(v, max(ends) + reach))
    margin = 0.02 * (high - low) or 1.0
    for ax in axes:
        ax.set_xlim(low - margin * (low != 0), high + margin)
        style.plain(ax.xaxis)
