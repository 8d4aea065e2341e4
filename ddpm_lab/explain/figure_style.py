"""The look of every figure: one sheet with a title that says the finding, its context, and panels of fixed size.

Sizes are in inches and text is wrapped by its measured width, so that nothing overlaps or is cut whatever the records
say; fonts and resolution are fixed, so that the same records give the same bytes.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import style as mpl_style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.textpath import text_to_path
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

SEPARATOR = " \N{MIDDLE DOT} "
WIDTH = 9.0
DPI = 150
INK, SOFT, FAINT, BAND = "#1f2933", "#52606d", "#9aa5b1", "#dde2e7"
PALETTE: tuple[str, ...] = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc")
PALETTE += ("#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9")
"""Seaborn's colour-blind safe colours; meaning is never carried by colour alone."""
MARKERS = "osD^vPX*"

TITLE_POINTS, HEADING_POINTS, TEXT_POINTS, SMALL_POINTS = 14.0, 10.5, 10.0, 9.0
_EDGE, _TITLE_LINE, _CONTEXT_LINE, _HEADING, _HEADING_LINE = 0.22, 0.27, 0.18, 0.30, 0.19
LINE = 0.16
"""Inches from one line of small text to the next."""
_FONT = "DejaVu Sans"  # comes with Matplotlib, so every machine has it
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


@contextmanager
def style() -> Iterator[None]:
    """The lab's style, whatever the caller has set, and nothing of it left afterwards."""
    fixed: Any = {
        "axes.grid": True,
        "lines.solid_capstyle": "round",
        "patch.edgecolor": "w",
        "patch.force_edgecolor": True,
        "xtick.bottom": False,
        "ytick.left": False,
        "figure.dpi": DPI,
        "savefig.dpi": DPI,
        "font.family": ["sans-serif"],
        "font.sans-serif": [_FONT],
        "font.size": TEXT_POINTS,
        "axes.labelsize": TEXT_POINTS,
        "xtick.labelsize": SMALL_POINTS,
        "ytick.labelsize": TEXT_POINTS,
        "text.color": INK,
        "axes.labelcolor": INK,
        "xtick.color": SOFT,
        "ytick.color": INK,
        "axes.edgecolor": FAINT,
        "grid.color": "#eef0f2",
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with mpl_style.context("default"), mpl.rc_context(fixed):
        yield


def number(value: float) -> str:
    """A plain number for an axis: 12,500; 45; 7.5."""
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"


@lru_cache(maxsize=4096)
def width(line: str, points: float = SMALL_POINTS, *, bold: bool = False) -> float:
    """Inches that a line of text takes at most.

    Measured without hinting, so that every machine wraps alike; drawn lines are up to 3 % wider, short ones more.
    """
    font = FontProperties(family=_FONT, size=points, weight="bold" if bold else "normal")
    return 1.02 * float(text_to_path.get_text_width_height_descent(line, font, False)[0]) / 72 + 0.01 if line else 0.0


def block_width(text: str, points: float = SMALL_POINTS, *, bold: bool = False) -> float:
    """Inches that a text of several lines takes."""
    return max(width(line, points, bold=bold) for line in text.split("\n"))


def fit(text: str, inches: float, lines: int, points: float = SMALL_POINTS, *, bold: bool = False) -> str:
    """``text`` wrapped to a width, never at a no-break space.

    Only what does not fit into so many lines is cut, with an ellipsis.
    """

    def fits(line: str) -> bool:
        return width(line, points, bold=bold) <= inches

    done: list[str] = []
    for word in re.split(r"[ \n]+", text.strip()):
        rest = word
        if done and fits(f"{done[-1]} {rest}"):
            done[-1] += f" {rest}"
            continue
        while not fits(rest):  # a word longer than a line, such as a path
            head = _longest(rest, fits)
            done.append(head)
            rest = rest[len(head) :]
        done.append(rest)
    if len(done) > lines:
        done = done[:lines]
        done[-1] = _longest(done[-1], lambda head: fits(f"{head} {_ELLIPSIS}")).rstrip() + f" {_ELLIPSIS}"
    return "\n".join(done)


def _longest(text: str, fits: Callable[[str], bool]) -> str:
    """The longest beginning of ``text`` that fits, at least one character."""
    return next((text[:n] for n in range(len(text), 1, -1) if fits(text[:n])), text[:1])


def _balanced(text: str, inches: float, lines: int, points: float) -> str:
    """A title in as few lines as it needs, all about equally long."""
    wrapped = fit(text, inches, lines, points, bold=True)
    if "\n" not in wrapped or wrapped.endswith(_ELLIPSIS):
        return wrapped
    for narrower in range(1, 20):
        tried = fit(text, inches * (1 - narrower / 40), lines, points, bold=True)
        if tried.count("\n") > wrapped.count("\n") or tried.endswith(_ELLIPSIS):
            break
        wrapped = tried
    return wrapped


def _wrap_items(text: str, inches: float) -> str:
    """Wrap between the items of a context line, not inside one."""
    lines: list[str] = []
    for item in text.split(SEPARATOR):
        if lines and width(lines[-1] + SEPARATOR + item) <= inches:
            lines[-1] += SEPARATOR + item
        else:
            lines += fit(item, inches, 3).split("\n")
    return "\n".join(lines)


def sheet(
    title: str,
    context: str,
    heights: Sequence[float],
    *,
    headings: Sequence[str] = (),
    left: float = 1.0,
    right: float = 0.3,
    bottom: float = 0.62,
    gap: float = 0.2,
    note: str = "",
) -> tuple[Figure, list[Axes]]:
    """A figure with a title, its context, and one panel under another.

    Args:
        title: the finding; wrapped.
        context: hardware, network, data, date, sets; wrapped.
        heights: inches of each panel.
        headings: a line above each panel, or none.
        left, right: margins of the panels in inches.
        bottom: inches under the last panel, for its ticks and label.
        gap: inches between panels, for ticks and label where they have their own.
        note: a line at the foot.
    """
    title = _balanced(title, WIDTH - 2 * _EDGE, 3, TITLE_POINTS)
    context = _wrap_items(context, WIDTH - 2 * _EDGE)
    note = fit(note, WIDTH - 2 * _EDGE, 8)
    head = _EDGE + _TITLE_LINE * (title.count("\n") + 1) + _CONTEXT_LINE * (context.count("\n") + 1) + 0.24
    foot = _CONTEXT_LINE * (note.count("\n") + 1) + 0.12 if note else 0.0
    heads = [fit(text, WIDTH - 2 * _EDGE, 3, HEADING_POINTS, bold=True) for text in headings]
    spaces = [_HEADING + _HEADING_LINE * text.count("\n") for text in heads] or [0.0] * len(heights)
    total = head + sum(heights) + sum(spaces) + gap * (len(heights) - 1) + bottom + foot
    figure = Figure(figsize=(WIDTH, total))
    FigureCanvasAgg(figure)
    y = 1 - _EDGE / total
    x = _EDGE / WIDTH
    figure.text(x, y, title, fontsize=TITLE_POINTS, fontweight="bold", va="top", linespacing=1.25)
    y -= (_TITLE_LINE * (title.count("\n") + 1) + 0.05) / total
    figure.text(x, y, context, fontsize=SMALL_POINTS, color=SOFT, va="top", linespacing=1.3)
    if note:
        figure.text(x, 0.1 / total, note, fontsize=SMALL_POINTS, color=SOFT, va="bottom", linespacing=1.3)
    top = total - head
    panels = []
    for i, height in enumerate(heights):
        top -= spaces[i]
        wide = WIDTH - left - right
        ax = figure.add_axes((left / WIDTH, (top - height) / total, wide / WIDTH, height / total))
        if heads:
            figure.text(x, (top + 0.09) / total, heads[i], fontsize=HEADING_POINTS, fontweight="bold")
        panels.append(ax)
        top -= height + gap
    return figure, panels


def message(title: str, context: str, text: str) -> Figure:
    """A sheet without a panel, for a study that has nothing to draw."""
    wrapped = fit(text, WIDTH - 2 * _EDGE, 14, TEXT_POINTS)
    height = 0.25 + 0.2 * (wrapped.count("\n") + 1)
    figure, (ax,) = sheet(title, context, [height], left=_EDGE, bottom=0.2)
    ax.set_axis_off()
    ax.text(0, 1, wrapped, va="top", fontsize=TEXT_POINTS, linespacing=1.35, transform=ax.transAxes)
    return figure


def name_rows(ax: Axes, names: Sequence[str], *, end: float = 0.4, **text: Any) -> None:
    """Names of rows, the first at the top, beside a panel; ``end`` is what the last row has of room below."""
    ax.set_yticks(range(len(names)), names, **text)
    ax.set_ylim(len(names) - end, -0.6)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)


def plain_numbers(axis: Axis, ticks: int) -> None:
    """An axis of plain numbers with at most so many intervals between its ticks."""
    axis.set_major_locator(MaxNLocator(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def fixed_ticks(axis: Axis, places: Sequence[float], form: str) -> None:
    """Ticks at ``places`` alone, with numbers in a format such as ".0f"."""
    axis.set_major_locator(FixedLocator(places))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: format(value, form)))


def interval(ax: Axes, ends: Sequence[float], at: float, *, upright: bool = False, **look: Any) -> None:
    """A line between the ends of an interval, nothing without one: in a row ``at``, or upright at that place."""
    if not math.isnan(ends[0]):
        x, y = ([at, at], ends) if upright else (ends, [at, at])
        ax.plot(x, y, solid_capstyle="butt", **look)


def points(
    ax: Axes,
    names: Sequence[str],
    spans: Sequence[tuple[float, float, float]],
    beside: Sequence[tuple[str, str]],
    *,
    start: float,
    first: str,
    others: str,
) -> None:
    """Rows of a point with its interval (value, low, high), on a line from ``start``, and two texts beside each.

    ``first`` is the colour of the first row, ``others`` that of all below.
    """
    to = ax.get_yaxis_transform()
    for y, ((value, *ends), (text, below)) in enumerate(zip(spans, beside, strict=True)):
        colour, weight = (others, "bold" if first == others else "normal") if y else (first, "bold")
        ax.plot([start, value], [y, y], color=BAND, lw=1.6, zorder=1)
        interval(ax, ends, y, color=colour, lw=2.8, zorder=3)
        ax.plot([value], [y], "o", ms=8, color=colour, zorder=4)
        ax.text(1.02, y - 0.03, text, transform=to, va="bottom", color=colour, fontweight=weight)
        ax.text(1.02, y + 0.05, below, transform=to, va="top", fontsize=SMALL_POINTS, color=SOFT)
    name_rows(ax, names, end=0.45)
    plain_numbers(ax.xaxis, 6)


def absent(ax: Axes, y: float, text: str, colour: str, left: float) -> None:
    """A row without a number: a cross, and from ``left``, a share of the panel, the reason."""
    to = ax.get_yaxis_transform()
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    ax.plot([0.015], [y], "x", transform=to, color=colour, ms=7, mew=2, clip_on=False, zorder=5)
    ax.text(left, y, text, transform=to, va="center", fontsize=SMALL_POINTS, color=SOFT, zorder=5, bbox=box)


def png(figure: Figure) -> bytes:
    """The figure as PNG: the same bytes for the same figure, since neither date nor software is written into it."""
    stream = io.BytesIO()
    with style():
        metadata: dict[str, Any] = {"Software": None}
        figure.savefig(stream, format="png", dpi=DPI, metadata=metadata)
    return stream.getvalue()


def save(figure: Figure, path: Path | str) -> None:
    """Write the figure as PNG, in one step, so that a reader never meets half of it.

    Raises OSError if the folder cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(png(figure))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
