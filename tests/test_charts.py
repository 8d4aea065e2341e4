"""Charts draw points, intervals, bands and bars where the numbers are; a chart that does not is found."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from ddpm_lab.explain import charts
from ddpm_lab.explain.charts import Line, Panel, Plot, Row, bars, forest, lines

TEXT: Any = {"title": "A title", "context": "a context", "note": "A note.", "label": "a label"}
ROWS = [
    Row(name="faster", value=1.5, low=1.4, high=1.6, colour=charts.GOOD, dots=(1.45, 1.5, 1.55)),
    Row(name="slower", value=0.8, low=0.7, high=0.9, colour=charts.BAD),
    Row(name="one set", value=1.1),
    Row(name="failed", missing="out of memory"),
]
PANEL = Panel(rows=ROWS, heading="a family", reference=1, band=(0.97, 1.02))


def drawn_lines(ax: Axes) -> list[Line2D]:
    """Lines in the coordinates of the data, without reference lines across the panel."""
    return [line for line in ax.lines if line.get_transform() == ax.transData]


def points(ax: Axes) -> list[tuple[float, float]]:
    """Where single points lie: (value, row)."""
    found = [line for line in drawn_lines(ax) if line.get_marker() == "o" and len(np.asarray(line.get_xdata())) == 1]
    return [(float(np.asarray(p.get_xdata())[0]), float(np.asarray(p.get_ydata())[0])) for p in found]


def intervals(ax: Axes) -> dict[float, tuple[float, float]]:
    """Ends of the lines along rows, by row."""
    ends = [(np.asarray(line.get_xdata()), np.asarray(line.get_ydata())) for line in drawn_lines(ax)]
    return {float(y[0]): (float(x[0]), float(x[1])) for x, y in ends if len(x) == 2 and y[0] == y[1]}


def spans(ax: Axes) -> list[tuple[float, float]]:
    """Ends of the grey bands across a forest plot."""
    found = [p for p in ax.patches if isinstance(p, Rectangle) and p.get_data_transform() != ax.transData]
    return [(p.get_x(), p.get_x() + p.get_width()) for p in found]


def boxes(ax: Axes) -> list[tuple[float, float]]:
    """Start and end of each bar, from the top."""
    found = [p for p in ax.patches if isinstance(p, Rectangle) and p.get_data_transform() == ax.transData]
    found.sort(key=lambda p: (p.get_y(), p.get_x()))
    return [(round(p.get_x(), 9), round(p.get_x() + p.get_width(), 9)) for p in found]


def legend_of(figure: Figure) -> list[str]:
    return [t.get_text() for part in figure.subfigs for legend in part.legends for t in legend.get_texts()]


def check_rows(ax: Axes, rows: Sequence[Row]) -> None:
    """Fail unless every interval is in its row, from its low to its high end, and nowhere else."""
    places = dict(zip(charts.centres(rows), rows, strict=True))
    assert intervals(ax) == {y: (row.low, row.high) for y, row in places.items() if not math.isnan(row.low)}


def check_forest(ax: Axes) -> None:
    check_rows(ax, ROWS)
    assert points(ax) == [(row.value, y) for y, row in zip(charts.centres(ROWS), ROWS, strict=True) if row.value > 0]
    assert spans(ax) == [PANEL.band]
    (dots,) = [line for line in drawn_lines(ax) if len(np.asarray(line.get_xdata())) == 3]
    assert np.asarray(dots.get_xdata()).tolist() == [1.45, 1.5, 1.55]
    found = [line.get_color() for line in drawn_lines(ax) if line.get_marker() == "o" and line.get_alpha() is None]
    assert found == [charts.GOOD, charts.BAD, charts.OPEN]
    low, high = ax.get_xlim()
    assert low < 0.7
    assert high > 1.6


def line_of(ax: Axes, *ends: float) -> Line2D:
    return next(line for line in drawn_lines(ax) if np.asarray(line.get_xdata()).tolist() == [*ends])


PLANTS: dict[str, Callable[[Axes], object]] = {
    "an interval is shifted": lambda ax: line_of(ax, 1.4, 1.6).set_xdata([1.4, 1.1 * 1.6]),
    "the band is shifted": lambda ax: next(p for p in ax.patches if isinstance(p, Rectangle)).set_x(0.9 * 0.97),
    "an interval is lost": lambda ax: line_of(ax, 0.7, 0.9).remove(),
}


def test_points_intervals_dots_and_band_are_where_the_numbers_are_and_a_planted_fault_is_found() -> None:
    check_forest(forest([PANEL], **TEXT).axes[0])
    for plant in PLANTS.values():
        (ax,) = forest([PANEL], **TEXT).axes
        plant(ax)
        with pytest.raises(AssertionError):
            check_forest(ax)


def test_an_absurd_interval_ends_with_an_arrow_and_leaves_the_others_readable() -> None:
    wide = replace(ROWS[2], low=0.01, high=90.0)
    (ax,) = forest([replace(PANEL, rows=[*ROWS[:2], wide])], **TEXT).axes
    low, high = ax.get_xlim()
    assert 0.2 < low < 0.7
    assert 1.6 < high < 4
    arrows = {str(line.get_marker()): float(np.asarray(line.get_xdata())[0]) for line in ax.lines}
    assert (arrows["<"], arrows[">"]) == (low, high)


def test_ratios_far_apart_have_a_logarithmic_axis_and_panels_share_one() -> None:
    far = [replace(ROWS[0], value=170.0, low=160.0, high=180.0), ROWS[1]]
    first, second = forest([PANEL, replace(PANEL, rows=far)], **TEXT).axes
    assert first.get_xlim() == second.get_xlim()
    assert first.get_xscale() == "log"
    losses = Panel(rows=[replace(ROWS[0], value=0.001, low=-0.001, high=0.003)], reference=0, band=(-0.006, 0.006))
    left, right = forest([PANEL, losses], **TEXT, beside=True).axes
    assert left.get_xlim() != right.get_xlim()
    assert right.get_xlim()[0] < -0.006 < 0.006 < right.get_xlim()[1], "the margin is part of the picture"


def test_bars_reach_from_zero_to_their_values_and_parts_lie_end_to_end() -> None:
    colours = {"compile": charts.SERIES[0], "steps": charts.SERIES[1]}
    parts = Panel(rows=[Row(name="cold", parts={"compile": 30.0, "steps": 4.0})])
    figure = bars([replace(PANEL, reference=0.75), parts], **TEXT, names=colours)
    ax, second = figure.axes
    assert boxes(ax) == [(0, 1.5), (0, 0.8), (0, 1.1)]
    check_rows(ax, ROWS)
    (threshold,) = [line for line in ax.lines if line.get_linestyle() == "--"]
    assert np.asarray(threshold.get_xdata()).tolist() == [0.75, 0.75]
    assert ax.get_xlim()[0] == 0
    assert boxes(second) == [(0, 30), (30, 34)]
    assert legend_of(figure) == list(colours)


def test_a_waterfall_goes_from_where_one_row_ends_to_where_the_next_begins() -> None:
    rows = [
        Row(name="ideal", value=8.0, low=7.8, high=8.2),
        Row(name="lost", value=4.0, low=3.5, high=4.5),
        Row(name="gained", value=-1.0, low=-1.5, high=-0.5),
    ]
    (ax,) = bars([Panel(rows=rows)], **TEXT, steps=True).axes
    assert [tuple(sorted(box)) for box in boxes(ax)] == [(0, 8), (8, 12), (11, 12)]
    ends = [(7.8, 8.2), (11.5, 12.5), (10.5, 11.5)]
    assert sorted(intervals(ax).values()) == sorted(ends)


def test_lines_and_their_intervals_are_where_the_numbers_are() -> None:
    one = Line(name="one", x=[1, 2, 4], y=[1.0, 1.9, 3.0], low=[math.nan, 1.8, 2.7], high=[math.nan, 2.0, 3.3])
    two = Line(name="two", x=[1, 4], y=[1.0, 2.0], low=[0.9, 1.8], high=[1.1, 2.2], shade=True)
    plot = Plot(lines=[one, two], ticks=[1, 2, 4])
    (ax,) = lines([plot], title="A title", context="", note="").axes
    found = sorted(np.column_stack(line.get_data()).tolist() for line in drawn_lines(ax))
    values = [[[1, 1], [2, 1.9], [4, 3.0]], [[1, 1], [4, 2]]]
    assert found == [*values, [[2, 1.8], [2, 2.0]], [[4, 2.7], [4, 3.3]]]
    (shade,) = ax.collections
    corners = {tuple(v) for v in np.asarray(shade.get_paths()[0].vertices).tolist()}
    assert {(1, 0.9), (4, 1.8), (1, 1.1), (4, 2.2)} <= corners
    assert ax.get_ylim()[0] == 0
    assert ax.get_xticks().tolist() == [1, 2, 4]


def test_a_text_as_long_as_a_book_is_cut() -> None:
    """As of a command line that a record names: laying out all of it takes a minute."""
    rows = [replace(ROWS[0], name="x" * 200_000, text="$\\foo$ " * 9_000)]
    figure = forest([replace(PANEL, rows=rows)], **{**TEXT, "context": "y" * 200_000})
    assert all(len(text.get_text()) < 2_000 for ax in figure.axes for text in ax.texts)
