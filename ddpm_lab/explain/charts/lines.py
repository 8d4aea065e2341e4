"""Lines: values against x, with intervals or shades, in panels below each other with one legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ddpm_lab.explain.charts import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

Values = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A series: points at x and y, with the ends of their intervals where they have any.

    Without a ``colour`` it has that of its place among the names. ``look`` is a Matplotlib format such as "--" or "o";
    ``shade`` fills between the ends, in place of an upright line at each point.
    """

    name: str
    x: Values
    y: Values
    low: Values = ()
    high: Values = ()
    colour: str = ""
    look: str = ""
    shade: bool = False
    width: float = 1.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A panel of lines. ``ticks`` are the only places with a number on the x axis, named by ``names`` if given.

    ``band`` is a grey range of y, ``level`` a dashed line at a y and ``at`` one at an x.
    """

    lines: Sequence[Line]
    x_label: str = ""
    y_label: str = ""
    heading: str = ""
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = True
    ticks: Sequence[float] = ()
    names: Sequence[str] = ()
    band: tuple[float, float] | None = None
    level: float | None = None
    at: float | None = None
    height: float = 2.6


def lines(plots: Sequence[Plot], *, title: str, context: str, note: str = "") -> Figure:
    """Draw panels of lines; a name has one colour and marker in all panels, and one entry in the legend."""
    with style.style():
        heights = [p.height for p in plots]
        known = dict.fromkeys(fill(s.name, 26) for p in plots for s in p.lines)
        legend = 0.2 + 0.19 * sum(name.count("\n") + 1 for name in known)
        figure, body = style.sheet(title, context, max(legend, sum(heights) + 0.75 * len(plots)), note)
        axes = body.subplots(len(plots), 1, squeeze=False, height_ratios=heights)[:, 0]
        places = {
            name: i for i, name in enumerate(dict.fromkeys(s.name for p in plots for s in p.lines if not s.colour))
        }
        shown: dict[str, Line2D] = {}
        for ax, plot in zip(axes, plots, strict=True):
            ax.set_title(fill(plot.heading, 80))
            for line in plot.lines:
                shown.setdefault(line.name, _draw(ax, line, places.get(line.name, 0)))
            _axes(ax, plot)
        named = {fill(name, 26): mark for name, mark in shown.items() if name}
        if len(named) > 1:
            body.legend(list(named.values()), list(named), loc="outside right upper")
        return style.settle(figure)


def _draw(ax: Axes, line: Line, place: int) -> Line2D:
    colour = line.colour or style.SERIES[place % len(style.SERIES)]
    if line.shade and len(line.low):
        ax.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, lw=0)
    for x, low, high in () if line.shade else zip(line.x, line.low, line.high, strict=bool(line.low)):
        if not math.isnan(low):
            ax.plot([x, x], [low, high], color=colour, lw=2, alpha=0.6)
    look = line.look or f"{style.MARKERS[place % len(style.MARKERS)]}-"
    (drawn,) = ax.plot(line.x, line.y, look, color=colour, lw=line.width, ms=5, label=line.name)
    return drawn


def _axes(ax: Axes, plot: Plot) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator

    if plot.band is not None:
        ax.axhspan(*plot.band, color=style.BAND, lw=0, zorder=0.5)
    if plot.level is not None:
        ax.axhline(plot.level, color=style.INK, lw=1.2, ls="--")
    if plot.at is not None:
        ax.axvline(plot.at, color=style.INK, lw=1.2, ls="--")
    ax.set_xlabel(plot.x_label)
    ax.set_ylabel(plot.y_label)
    style.plain(ax.yaxis, 5)
    style.plain(ax.xaxis)
    if plot.log_x:
        ax.set_xscale("log", base=2)
    if plot.log_y:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high < 300 * low else (1,), numticks=9))
        _numbers(ax.yaxis)
    elif plot.from_zero:
        ax.set_ylim(0, 1.08 * max(ax.dataLim.y1, plot.level or 0) or 1)
    if plot.ticks:
        ax.xaxis.set_major_locator(FixedLocator(list(plot.ticks)))
    if plot.log_x or plot.ticks:
        _numbers(ax.xaxis)
    if plot.names:
        ax.set_xticks(list(plot.ticks), list(plot.names))


def _numbers(axis: Axis) -> None:
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: style.number(value)))
