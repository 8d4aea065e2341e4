"""The look of every chart: colours with one meaning each, a sheet of fixed width, and PNGs that never vary."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from ddpm_lab.files import replace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

INK, SOFT, FAINT, BAND = "#1f2933", "#52606d", "#c3cad1", "#e3e7eb"
GOOD, BAD, OPEN = "#0173b2", "#d55e00", "#949494"
"""Faster, or not worse; slower, or worse; not resolved. No chart uses them for anything else."""
SERIES = ("#117733", "#882255", "#44aa99", "#aa4499", "#999933", "#332288", "#88ccee", "#ddaa33")
"""Series without a verdict, after Paul Tol's colour-blind safe ``muted``."""
SEPARATOR = " \N{MIDDLE DOT} "
MARKERS = "osD^vPX*"
WIDTH, DPI, SMALL = 9.0, 150, 9.0
NAME = 33
"""Characters in a line of a row's name."""
_FIXED: Any = {
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],  # comes with Matplotlib, so every machine has it
    "font.size": 10,
    "figure.dpi": DPI,
    "savefig.dpi": DPI,
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
    "xtick.color": SOFT,
    "ytick.color": INK,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "ytick.major.size": 0,
}


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
    waterfall a ``whole`` row begins at ``start``, any other where the row above ends.
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
    whole: bool = False
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Rows under a heading, with a reference line and a grey band where there are any."""

    rows: Sequence[Row]
    heading: str = ""
    reference: float | None = None
    band: tuple[float, float] | None = None
    label: str = ""


def sheet(title: str, context: str, body: float, note: str = "") -> tuple[Figure, SubFigure]:
    """A figure with title, context and note, and the part for panels, ``body`` inches high."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    width = min(range(40, 75), key=lambda n: (fill(title, n).count("\n"), n))  # lines of equal length
    title, context, note = fill(title, width), fill(context, 126), fill(" ".join(note.split()), 130)
    head = 0.25 + 0.27 * (title.count("\n") + 1) + 0.17 * (context.count("\n") + 1)
    foot = 0.14 + 0.17 * (note.count("\n") + 1) if note else 0.08
    figure = Figure(figsize=(WIDTH, head + body + foot), layout=ConstrainedLayoutEngine(w_pad=0.16))
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
    heads = [fill(p.heading, 34 if beside else 66) for p in panels]
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
        ax.set_xlabel(panel.label)
        ax.set_yticks(centres(panel.rows), [_name(r) for r in panel.rows])
        for y, row in zip(centres(panel.rows), panel.rows, strict=True):
            _words(ax, y, row)
    if label:
        axes[-1].set_xlabel(fill(label, 66))
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
    heights = [_height(r) for r in rows]
    return [sum(heights[:i]) + h / 2 for i, h in enumerate(heights)]


def _words(ax: Axes, y: float, row: Row) -> None:
    to = ax.get_yaxis_transform()
    ax.text(1.02, y, fill(row.text, 28), transform=to, va="center", fontsize=SMALL)
    if row.missing:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        words = ax.text(0.03, y, fill(row.missing, 75), transform=to, va="center", fontsize=SMALL, color=SOFT, bbox=box)
        words.set_in_layout(False)  # it may reach over the column of numbers, where its row has none
        ax.plot([0.012], [y], "x", transform=to, color=SOFT, ms=6, mew=1.6)


def legend(body: SubFigure, colours: Mapping[str, str]) -> None:
    """Name colours in rows below the panels."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=name) for name, colour in colours.items()]
    columns = len(patches) if len(patches) < 6 else (len(patches) + 1) // 2
    body.legend(handles=patches, borderaxespad=1.5, loc="outside lower left", ncols=columns, handlelength=1.2)


def plain(axis: Axis, ticks: int = 6) -> None:
    """Label an axis with plain numbers: 12,500; 45; 7.5."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def number(value: float) -> str:
    """A plain number for an axis."""
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
