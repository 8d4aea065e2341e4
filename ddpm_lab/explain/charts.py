"""Charts of numbers with intervals, which know nothing of questions or records: read the style and rows, then forest.

``forest`` draws ratios beside a reference, ``bars`` plain, stacked and waterfall bars, ``lines`` values against x.
Callers give numbers and plain text; Matplotlib wraps and lays out, and is imported where something is drawn.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from dataclasses import replace as changed
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ddpm_lab.files import replace

if TYPE_CHECKING:
    import matplotlib.figure
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import SubFigure
    from matplotlib.lines import Line2D

Figure: TypeAlias = "matplotlib.figure.Figure"
INK, SOFT, FAINT, BAND = "#1f2933", "#52606d", "#c3cad1", "#e3e7eb"
GOOD, BAD, OPEN = "#0173b2", "#d55e00", "#949494"
"""Faster, or not worse; slower, or worse; not resolved. No chart uses them for anything else."""
SERIES = ("#117733", "#882255", "#44aa99", "#aa4499", "#999933", "#332288", "#88ccee", "#ddaa33")
"""Series without a verdict, after Paul Tol's colour-blind safe ``muted``."""
SEPARATOR = " \N{MIDDLE DOT} "
MARKERS = "osD^vPX*"
WIDTH, DPI, SMALL = 9.0, 150, 9.0
NAME, LONGEST = 33, 1_000
"""Characters in a line of a row's name, and in all of a text."""
_FIXED: Any = {
    "figure.dpi": DPI,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#eef0f2",
    "legend.frameon": False,
    "legend.fontsize": SMALL,
    "lines.solid_capstyle": "butt",
    "text.color": INK,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "xtick.color": SOFT,
    "ytick.color": INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "ytick.major.size": 0,
}


def fill(text: str, width: int) -> str:
    """Text in lines of ``width`` characters; what is longer than a page, as a command line may be, is cut.

    Bytes of a file's name that are no text are written as escapes: no font can draw them.
    """
    text = text.encode(errors="backslashreplace").decode()
    return textwrap.fill(text if len(text) <= LONGEST else f"{text[:LONGEST]} ...", width)


@contextmanager
def style() -> Iterator[None]:
    """Apply the style, whatever the caller has set, and leave nothing of it behind."""
    import matplotlib as mpl
    from matplotlib import style as mpl_style

    with mpl_style.context("default"), mpl.rc_context(_FIXED):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a chart: a value with its interval, or ``missing``, the reason why there is none.

    ``text`` stands at the right; ``dots`` are single sets. A bar begins at ``start``, or consists of ``parts``. In a
    waterfall a row begins where the one above ends.
    """

    name: str
    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    colour: str = OPEN
    text: str = ""
    dots: Sequence[float] = ()
    missing: str = ""
    start: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Rows under a heading, with a reference line and a grey band where there are any: ratios' is 1, differences' 0."""

    rows: Sequence[Row]
    heading: str = ""
    reference: float | None = None
    band: tuple[float, float] | None = None
    label: str = ""


def sheet(title: str, context: str, body: float, note: str = "") -> tuple[Figure, SubFigure]:
    """A figure with title, context and note, and the part for panels, ``body`` inches high."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    width = min(range(40, 75), key=lambda n: (fill(title, n).count("\n"), n))  # lines of equal length
    title, context, note = fill(title, width), fill(context, 126), fill(" ".join(note.split()), 130)
    head = 0.25 + 0.27 * (title.count("\n") + 1) + 0.17 * (context.count("\n") + 1)
    foot = 0.14 + 0.17 * (note.count("\n") + 1) if note else 0.08
    figure = Sheet(figsize=(WIDTH, head + body + foot), layout=ConstrainedLayoutEngine(w_pad=0.16))
    FigureCanvasAgg(figure)
    parts: Any = figure.subfigures(3, 1, height_ratios=[head, body, foot])
    top, middle, bottom = parts
    top.text(0.02, 1 - 0.1 / head, title, fontsize=14, fontweight="bold", va="top", linespacing=1.2)
    top.text(0.02, 0.08 / head, context, fontsize=SMALL, color=SOFT, va="bottom", linespacing=1.3)
    bottom.text(0.02, 1 - 0.02 / foot, note, fontsize=SMALL, color=SOFT, va="top", linespacing=1.3)
    return figure, middle


def message(title: str, context: str, text: str) -> Figure:
    """A sheet without a panel, for a study that has nothing to draw."""
    with style():
        text = fill(text, 105)
        figure, body = sheet(title, context, 0.2 * (text.count("\n") + 2))
        body.text(0.02, 1, text, va="top", linespacing=1.35)
        return settle(figure)


def row_panels(
    panels: Sequence[Panel], title: str, context: str, note: str, label: str, *, beside: bool = False
) -> tuple[Figure, list[Axes], SubFigure]:
    """Axes for rows, the first at the top: panels below each other on one scale, or ``beside`` each other.

    The y axis is in inches; ``centres`` says where rows lie.
    """
    sizes = [sum(map(_height, panel.rows)) for panel in panels]
    heads = [fill(p.heading, 66 // len(panels) if beside else 66) for p in panels]
    above = [0.3 + 0.17 * h.count("\n") if h else 0.08 for h in heads]
    body = max(sizes) + max(above) if beside else sum(sizes) + sum(above)
    figure, middle = sheet(title, context, body + 0.55, note)
    rows, columns = (1, len(panels)) if beside else (len(panels), 1)
    ratios = [max(sizes)] if beside else sizes
    grid = middle.subplots(rows, columns, sharex=not beside, sharey=beside, squeeze=False, height_ratios=ratios)
    axes = list(grid.flat)
    for ax, panel, head, size in zip(axes, panels, heads, sizes, strict=True):
        ax.set_title(head)
        ax.grid(visible=False, axis="y")
        ax.spines["left"].set_visible(False)
        ax.set_ylim(size, 0)
        ax.set_xlabel(fill(label, 66) if label and ax is axes[-1] else panel.label)
        ax.set_yticks(centres(panel.rows), [_name(r) for r in panel.rows])
        for y, row in zip(centres(panel.rows), panel.rows, strict=True):
            _words(ax, y, row)
    return figure, axes, middle


def _height(row: Row) -> float:
    """Inches of a row, by its lines."""
    lines = max(text.count("\n") for text in (_name(row), fill(row.missing, 75), fill(row.text, 28)))
    return 0.34 + 0.16 * lines


def _name(row: Row) -> str:
    """The name in lines that end after words or underscores."""
    return fill(row.name.replace("_", "_\0 "), NAME).replace("_\0 ", "_").replace("\0", "")


def centres(rows: Sequence[Row]) -> list[float]:
    """Where the middle of each row lies, in inches from the top."""
    heights = np.array([_height(r) for r in rows])
    return [float(y) for y in heights.cumsum() - heights / 2]


def _words(ax: Axes, y: float, row: Row) -> None:
    to = ax.get_yaxis_transform()
    ax.text(1.02, y, fill(row.text, 28), transform=to, va="center", fontsize=SMALL)
    if row.missing:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        words = ax.text(0.03, y, fill(row.missing, 75), transform=to, va="center", fontsize=SMALL, color=SOFT, bbox=box)
        words.set_in_layout(False)  # it may reach over the column of numbers, where its row has none
        ax.plot([0.012], [y], "x", transform=to, color=SOFT, ms=6, mew=1.6)


def plain(axis: Axis, ticks: int = 6) -> None:
    """Label an axis with plain numbers: 12,500; 45; 7.5."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
    _numbers(axis)


def _numbers(axis: Axis) -> None:
    """Do so where an axis has its ticks already; a change of its scale undoes it."""
    from matplotlib.ticker import NullLocator

    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: number(value))


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def settle(figure: Figure) -> Figure:
    """Lay out once and for all; the solver's last digits differ from run to run, and would with them the bytes."""
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.execute(figure)
    figure.set_layout_engine("none")
    for ax in figure.axes:
        left, bottom, width, height = ax.get_position().bounds
        ax.set_position((round(left, 6), round(bottom, 6), round(width, 6), round(height, 6)))
    return figure


def png(figure: Figure) -> bytes:
    """The figure as PNG: the same bytes for the same figure, since no software's name is written into it."""
    stream = io.BytesIO()
    metadata: dict[str, Any] = {"Software": None}
    with style():
        figure.savefig(stream, format="png", dpi=DPI, metadata=metadata)
    return stream.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG, in one step, so that no reader meets half of it. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, png(figure))


# --- forests: values with intervals beside a reference ----------------------------------------------------------------

_LOGARITHMIC = 5
"""Ratio of the ends of an axis of ratios from which on it is logarithmic."""


def forest(
    panels: Sequence[Panel], *, title: str, context: str, note: str = "", label: str = "", beside: bool = False
) -> Figure:
    """Draw rows of points with intervals: panels below each other share an axis, those ``beside`` share the names.

    Panels of one reference have one scale. An absurdly wide interval ends with an arrow at the edge of the axis.
    """
    with style():
        figure, axes, _ = row_panels(panels, title, context, note, label, beside=beside)
        for ax, panel in zip(axes, panels, strict=True):
            _forest_axis(ax, [p for p in panels if p.reference == panel.reference], ticks=4 if beside else 7)
            if panel.reference is not None:
                ax.axvline(panel.reference, color=SOFT, lw=1.2, zorder=1)
            if panel.band is not None:
                ax.axvspan(*panel.band, color=BAND, lw=0, zorder=0.5)
            for y, row in zip(centres(panel.rows), panel.rows, strict=True):
                if not math.isnan(row.value):
                    _mark(ax, y, row)
        return settle(figure)


def _forest_axis(ax: Axes, panels: Sequence[Panel], *, ticks: int) -> None:
    """Set the limits and scale of the axis: it shows all points and bands, but cuts off absurdly wide intervals."""
    from matplotlib.ticker import FixedLocator

    rows, ratios = [r for panel in panels for r in panel.rows if not math.isnan(r.value)], bool(panels[0].reference)
    points = [x for row in rows for x in (row.value, *row.dots)]
    points += [x for panel in panels for x in (panel.reference, *(panel.band or ())) if x is not None]
    low, high = min(points, default=0.0), max(points, default=1.0)
    ends = [x for row in rows for x in (row.low, row.high) if not math.isnan(x)]
    reach = max(high - low, 0.15 * ratios)
    left = min([low, *(max(x, low - reach) for x in ends)])
    right = max([high, *(min(x, high + reach) for x in ends)])
    left = max(left, 0.5 * low) if ratios else left
    margin = 0.06 * (right - left) or 0.02
    wide = ratios and right / left > _LOGARITHMIC
    low, high = (left / 1.15, right * 1.15) if wide else (left - margin, right + margin)
    plain(ax.xaxis, ticks)
    if ratios and high / low > _LOGARITHMIC:
        ax.set_xscale("log")
        steps = (1, 1.5, 2, 3, 4, 6, 8) if high / low < 30 else (1, 3) if high / low < 1e4 else (1,)
        values = (step * 10.0**exponent for exponent in range(-4, 7) for step in steps)
        ax.xaxis.set_major_locator(FixedLocator([value for value in values if low <= value <= high]))
        _numbers(ax.xaxis)
    ax.set_xlim(low, high)


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


# --- bars: plain with intervals, stacked of parts, and waterfalls -----------------------------------------------------

_HEIGHT = 0.2  # inches


def bars(
    panels: Sequence[Panel],
    *,
    title: str,
    context: str,
    label: str = "",
    note: str = "",
    names: Mapping[str, str] | None = None,
    steps: bool = False,
    beside: bool = False,
) -> Figure:
    """Draw a bar from its start to its value in each row, with its interval, or its parts one after the other.

    ``names`` are the colours of what the legend tells, such as the parts. A panel's reference is a dashed line. With
    ``steps`` the values are changes, and a bar begins where the row above ends: a waterfall. Panels ``beside`` each
    other share the names, and no scale.
    """
    from matplotlib.patches import Patch

    panels = [changed(p, rows=_steps(p.rows)) for p in panels] if steps else panels
    with style():
        figure, axes, body = row_panels(panels, title, context, note, label, beside=beside)
        for ax, panel in zip(axes, panels, strict=True):
            places = centres(panel.rows)
            for y, row in zip(places, panel.rows, strict=True):
                _bar(ax, y, row, names or {})
            for (y, below), row in zip(pairwise(places), panel.rows, strict=False) if steps else ():
                ax.plot([row.value] * 2, (y + _HEIGHT / 2, below - _HEIGHT / 2), color=SOFT, lw=1)
            if panel.reference is not None:
                ax.axvline(panel.reference, color=INK, lw=1.2, ls="--")
            _bar_limits(ax, [panel] if beside else panels, 3 if beside else 6)
        if names:
            patches = [Patch(facecolor=colour, label=name) for name, colour in names.items()]
            columns = len(patches) if len(patches) < 6 else (len(patches) + 1) // 2
            body.legend(handles=patches, borderaxespad=1.5, loc="outside lower left", ncols=columns, handlelength=1.2)
        return settle(figure)


def _bar(ax: Axes, y: float, row: Row, names: Mapping[str, str]) -> None:
    at = row.start
    for name, width in row.parts.items():
        ax.barh(y, width, left=at, height=_HEIGHT, color=names[name], lw=0.6, edgecolor="white")
        at += width
    if not math.isnan(row.value):
        ax.barh(y, row.value - row.start, left=row.start, height=_HEIGHT, color=row.colour, lw=0)
    if not math.isnan(row.low):
        ax.plot([row.low, row.high], [y, y], color=INK, lw=1.6)


def _steps(rows: Sequence[Row]) -> list[Row]:
    """Rows of changes as bars: start and ends, with intervals, where they lie on the axis."""
    found, at = [], 0.0
    for row in rows:
        found.append(changed(row, start=at, value=at + row.value, low=at + row.low, high=at + row.high))
        at = found[-1].value
    return found


def _bar_limits(ax: Axes, panels: Sequence[Panel], ticks: int) -> None:
    """An axis on the scale of the longest bars of ``panels``; intervals reach at most half a scale beyond them."""
    rows = [r for p in panels for r in p.rows]
    ends = [v for r in rows for v in (r.start, r.value, r.start + sum(r.parts.values())) if not math.isnan(v)]
    ends += [p.reference for p in panels if p.reference is not None]
    low, high = min(ends), max(ends)
    first, last = 1.5 * low - 0.5 * high, 1.5 * high - 0.5 * low
    for v in (v for r in rows for v in (r.low, r.high) if not math.isnan(v)):
        low, high = min(low, max(v, first)), max(high, min(v, last))
    margin = 0.02 * (high - low) or 1.0
    ax.set_xlim(low - margin * (low != 0), high + margin)
    plain(ax.xaxis, ticks)


# --- lines: values against x, with intervals or shades, in panels with one legend -------------------------------------

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

    ``level`` is a dashed line at a y.
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
    level: float | None = None
    height: float = 2.6


def lines(plots: Sequence[Plot], *, title: str, context: str, note: str = "") -> Figure:
    """Draw panels of lines; a name has one colour and marker in all panels, and one entry in the legend."""
    with style():
        heights, every = [p.height for p in plots], [line for p in plots for line in p.lines]
        legend = 0.2 + 0.19 * sum(name.count("\n") + 1 for name in {fill(line.name, 26) for line in every})
        figure, body = sheet(title, context, max(legend, sum(heights) + 0.75 * len(plots)), note)
        axes = body.subplots(len(plots), 1, squeeze=False, height_ratios=heights)[:, 0]
        places = list(dict.fromkeys(line.name for line in every if not line.colour))
        shown: dict[str, Line2D] = {}
        for ax, plot in zip(axes, plots, strict=True):
            ax.set_title(fill(plot.heading, 80))
            for line in plot.lines:
                shown.setdefault(line.name, _draw(ax, line, places.index(line.name) if line.name in places else 0))
            _axes(ax, plot)
        named = {fill(name, 26): mark for name, mark in shown.items() if name}
        if len(named) > 1:
            body.legend(list(named.values()), list(named), loc="outside right upper")
        return settle(figure)


def _draw(ax: Axes, line: Line, place: int) -> Line2D:
    colour = line.colour or SERIES[place % len(SERIES)]
    if line.shade and len(line.low):
        ax.fill_between(line.x, line.low, line.high, color=colour, alpha=0.15, lw=0)
    for x, low, high in () if line.shade else zip(line.x, line.low, line.high, strict=bool(line.low)):
        if not math.isnan(low):
            ax.plot([x, x], [low, high], color=colour, lw=2, alpha=0.6)
    look = line.look or f"{MARKERS[place % len(MARKERS)]}-"
    (drawn,) = ax.plot(line.x, line.y, look, color=colour, lw=line.width, ms=5, label=line.name)
    return drawn


def _axes(ax: Axes, plot: Plot) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator

    if plot.level is not None:
        ax.axhline(plot.level, color=INK, lw=1.2, ls="--")
    ax.set_xlabel(plot.x_label)
    ax.set_ylabel(plot.y_label)
    plain(ax.yaxis, 5)
    plain(ax.xaxis)
    if plot.log_x:
        ax.set_xscale("log", base=2)
        _numbers(ax.xaxis)
    if plot.log_y:
        ax.set_yscale("log")
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high < 300 * low else (1,), numticks=9))
        _numbers(ax.yaxis)
    elif plot.from_zero:
        ax.set_ylim(0, 1.08 * max(ax.dataLim.y1, plot.level or 0) or 1)
    if plot.ticks:
        ax.xaxis.set_major_locator(FixedLocator(list(plot.ticks)))
    if plot.names:
        ax.set_xticks(list(plot.ticks), list(plot.names))
