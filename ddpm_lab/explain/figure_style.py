"""The look of every figure: one sheet with a title that says the finding, its context, and panels of fixed size.

Sizes are in inches, so that nothing overlaps whatever the number of rows; fonts and resolution are fixed, so that the
same records give the same bytes.
"""

from __future__ import annotations

import io
import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import seaborn as sns
from matplotlib import style as mpl_style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SEPARATOR = " \N{MIDDLE DOT} "
WIDTH = 9.0
DPI = 150
INK, SOFT, FAINT, BAND = "#1f2933", "#52606d", "#9aa5b1", "#dde2e7"
PALETTE: tuple[str, ...] = tuple(sns.color_palette("colorblind").as_hex())
"""Seaborn's colour-blind safe colours; meaning is never carried by colour alone."""

TITLE_POINTS, HEADING_POINTS, TEXT_POINTS, SMALL_POINTS = 14.0, 10.5, 10.0, 9.0
_EDGE, _TITLE_LINE, _CONTEXT_LINE, _HEADING = 0.22, 0.27, 0.18, 0.30
_TITLE_CHARACTERS, _CONTEXT_CHARACTERS = 70, 124


@contextmanager
def style() -> Iterator[None]:
    """The lab's style, whatever the caller has set, and nothing of it left afterwards."""
    fixed = {
        **sns.axes_style("whitegrid"),
        "figure.dpi": DPI,
        "savefig.dpi": DPI,
        "font.family": ["sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],
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


def characters(inches: float, points: float = SMALL_POINTS) -> int:
    """Characters that surely fit into a width; DejaVu Sans is 0.58 of its size wide on average."""
    return max(8, int(inches * 72 / (0.58 * points)))


def number(value: float) -> str:
    """A plain number for an axis: 12,500; 45; 7.5."""
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.3g}"


def wrap(text: str, width: int, lines: int) -> str:
    """``text`` in at most ``lines`` lines of ``width`` characters, with an ellipsis where it is cut."""
    return "\n".join(textwrap.wrap(text, width, max_lines=lines, placeholder=" \N{HORIZONTAL ELLIPSIS}"))


def _wrap_items(text: str) -> str:
    """Wrap between the items of a context line, not inside one."""
    lines: list[str] = []
    for item in text.split(SEPARATOR):
        if lines and len(lines[-1]) + len(item) + len(SEPARATOR) <= _CONTEXT_CHARACTERS:
            lines[-1] += SEPARATOR + item
        else:
            lines += wrap(item, _CONTEXT_CHARACTERS, 2).split("\n")
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
    title = wrap(title, _TITLE_CHARACTERS, 3)
    context = _wrap_items(context)
    note = wrap(note, _CONTEXT_CHARACTERS, 4)
    head = _EDGE + _TITLE_LINE * (title.count("\n") + 1) + _CONTEXT_LINE * (context.count("\n") + 1) + 0.24
    foot = _CONTEXT_LINE * (note.count("\n") + 1) + 0.12 if note else 0.0
    heading = _HEADING if headings else 0.0
    total = head + sum(heights) + len(heights) * heading + gap * (len(heights) - 1) + bottom + foot
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
        top -= heading
        width = WIDTH - left - right
        ax = figure.add_axes((left / WIDTH, (top - height) / total, width / WIDTH, height / total))
        if headings:
            figure.text(x, (top + 0.09) / total, headings[i], fontsize=HEADING_POINTS, fontweight="bold")
        panels.append(ax)
        top -= height + gap
    return figure, panels


def message(title: str, context: str, text: str) -> Figure:
    """A sheet without a panel, for a study that has nothing to draw."""
    wrapped = wrap(text, 96, 14)
    height = 0.25 + 0.2 * (wrapped.count("\n") + 1)
    figure, (ax,) = sheet(title, context, [height], left=_EDGE, bottom=0.2)
    ax.set_axis_off()
    ax.text(0, 1, wrapped, va="top", fontsize=TEXT_POINTS, linespacing=1.35, transform=ax.transAxes)
    return figure


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
