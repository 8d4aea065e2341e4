"""Charts draw what their numbers say, and figures of questions those of the records, with nothing cut."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import records as make
from drawn_studies import STUDIES, amp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from scaled_records import ONE, strong, weak

from ddpm_lab.explain import charts
from ddpm_lab.explain.bands import S000
from ddpm_lab.explain.charts import Line, Panel, Plot, Row, bars, forest, lines
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.selection import Study
from ddpm_lab.questions import multi_gpu, recommendation
from ddpm_lab.questions.ask import answer

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


def test_a_name_with_bytes_that_are_no_text_is_drawn_with_escapes() -> None:
    name = "a\udcff.py"  # what Python makes of such a byte in a command line or a folder
    row = charts.Row(name=name, value=1.1, low=1.0, high=1.2, text=name)
    panels = [charts.Panel(rows=[row, charts.Row(name="b", missing=name)], heading=name)]
    figure = charts.forest(panels, title=name, context=name, note=name)
    plot = charts.Plot(lines=[charts.Line(name=each, x=[1.0, 2.0], y=[1.0, 2.0]) for each in (name, "b")])
    curve = charts.lines([plot], title="", context="")
    assert charts.png(figure)
    assert charts.png(curve)
    assert r"a\udcff.py" in [text.get_text() for text in figure.axes[0].texts]


def test_a_text_as_long_as_a_book_is_cut() -> None:
    """As of a command line that a record names: laying out all of it takes a minute."""
    rows = [replace(ROWS[0], name="x" * 200_000, text="$\\foo$ " * 9_000)]
    figure = forest([replace(PANEL, rows=rows)], **{**TEXT, "context": "y" * 200_000})
    assert all(len(text.get_text()) < 2_000 for ax in figure.axes for text in ax.texts)


# --- figures of questions ---

RANKS = [{**make.PHASES, "communication": 5.0}, {**make.PHASES, "forward": 12.0, "communication": 16.4}]
LOADING = {"data": {"seconds": 0.02, "overlapped_seconds": 0.018}}
BUDGETS: dict[str, dict[str, Any]] = {
    "budget, not explained": {"residual": 20.0},
    "budget, two ranks": {"ranks": RANKS, "spans": {"communication": {"seconds": 0.012, "overlapped_seconds": 0.009}}},
    "budget, a GPU": {"spans": LOADING, "host_phases": make.PHASES, "host_ahead_seconds": 0.02},
}


def study_of(name: str) -> Study:
    if name in STUDIES:
        return STUDIES[name]()
    case = dict(BUDGETS[name])
    return make.study([make.time_budget(*case.pop("ranks", []), **case)])


@cache
def drawn(name: str) -> dict[str, Figure]:
    """All figures of a study by the name of their file; that of the answer has none."""
    shown = answer(study_of(name))
    return {"": shown.figure(), **{short: figure for _, figure, short in shown.figures()}}


def texts(figure: Figure) -> list[Text]:
    """Texts that are drawn: labels of ticks outside the limits exist and are not."""
    outside: set[Text] = set()
    for ax in figure.axes:
        for axis in (ax.xaxis, ax.yaxis):
            low, high = sorted(axis.get_view_interval())
            slack = 1e-6 * (high - low)
            out = [t for t in axis.get_major_ticks() if not low - slack <= t.get_loc() <= high + slack]
            outside.update(text for tick in out for text in (tick.label1, tick.label2))
    found = [t for t in figure.findobj(Text) if isinstance(t, Text) and t not in outside]
    return [t for t in found if t.get_visible() and t.get_text().strip()]


def words(figure: Figure) -> str:
    return " ".join(" ".join(t.get_text().split()) for t in texts(figure))


def names(ax: Axes) -> list[str]:
    """Names of the rows of a panel."""
    return [" ".join(t.get_text().split()) for t in ax.get_yticklabels()]


def check_texts(figure: Figure) -> None:
    """Fail if a text is cut by the edge of a figure, or lies on another."""
    with charts.style():
        figure.draw_without_rendering()
        shown = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    width, height = figure.bbox.size
    for i, (first, a) in enumerate(shown):
        assert (a.x0 >= 0, a.x1 <= width, a.y0 >= 0, a.y1 <= height) == (True,) * 4, first
        for second, b in shown[i + 1 :]:
            apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
            assert apart, f"{first!r} lies on {second!r}"


def check_marks(figure: Figure) -> None:
    """Fail if a mark lies outside its panel, or a panel's numbers cannot be read off its axis."""
    for ax in figure.axes:
        low, high = sorted(ax.get_xlim())
        assert sum(low <= tick <= high for tick in ax.get_xticks()) >= 2
        for line in drawn_lines(ax):
            if line.get_marker() != "None" and line.get_clip_on():
                places = np.column_stack(line.get_data()).astype(float)
                pixels = ax.transData.transform(places[~np.isnan(places).all(axis=1)])
                assert ax.bbox.padded(1).count_contains(pixels) == len(pixels)


# What has been cut before.
OFTEN = {"12 configurations", "wordy", "two families, learned", "budget, two ranks"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in (*STUDIES, *BUDGETS)]
)
def test_nothing_is_cut_or_shortened_or_lies_elsewhere(name: str) -> None:
    for figure in drawn(name).values():
        check_texts(figure)
        check_marks(figure)
        assert "\N{HORIZONTAL ELLIPSIS}" not in words(figure)
        smallest = min(float(t.get_fontsize()) for t in texts(figure))
        assert smallest * 900 / figure.get_size_inches()[0] / 72 >= 11, "readable at 900 pixels"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("resolved", {"", "time"}),
        ("machine", {"", "speedup", "batch", "machine"}),
        ("strong and weak, two CPU ranks", {""}),
        ("compiled, costs", {"", "costs"}),
        ("two families, learned", {"", "curves"}),
        ("levers, learned", {"", "levers", "curves"}),
        ("budget, two ranks", {"", "operators"}),
        ("nothing", {""}),
    ],
)
def test_a_question_has_the_figures_that_its_records_allow(name: str, expected: set[str]) -> None:
    assert set(drawn(name)) == expected


# --- comparisons ---


def test_bars_of_questions_are_what_their_records_say() -> None:
    base, bf16 = (next(c for c in comparisons(amp()) if c.label == name) for name in ("fp32", "bf16"))
    (ax,) = drawn("resolved")["time"].axes
    assert [end for _, end in boxes(ax)] == pytest.approx(
        [base.projected_seconds / c.ratio.value for c in (base, bf16)]
    )
    (ends,) = intervals(ax).values()
    assert ends == pytest.approx([base.projected_seconds / v for v in (bf16.ratio.high, bf16.ratio.low)])
    (ax,) = drawn("budget, not explained")[""].axes
    found = boxes(ax)
    assert [b - a for a, b in found] == pytest.approx([*make.PHASES.values(), 20.0])
    assert all(first[1] == pytest.approx(second[0]) for first, second in pairwise(found))
    (ax,) = drawn("compiled, costs")["costs"].axes
    assert names(ax) == ["eager (12 groups)", "compiled, warm cache (6 groups)", "compiled, cold cache (3 groups)"]
    found = boxes(ax)
    assert [b - a for a, b in found] == pytest.approx([0.03, 1.2, 0.25, 3.7, 0.04, 0.03, 1.2, 1.6, 0.25, 3.7, 0.04, 34])
    (ax,) = drawn("recommendation, searched")[""].axes
    *steps, whole = boxes(ax)
    way = recommendation.recommendation(study_of("recommendation, searched"))
    assert way is not None
    ratios = [step.row.ratio.ends for step in way.steps[1:]]
    assert list(intervals(ax).values()) == [*ratios, way.best.row.ratio.ends]
    assert steps[0][0] == 1
    assert all(first[1] == pytest.approx(second[0]) for first, second in pairwise(steps))
    assert whole == pytest.approx((1, steps[-1][1])), "the bars close"


# --- scaling ---


def marked(ax: Axes) -> list[float]:
    return [float(y) for line in drawn_lines(ax) if line.get_marker() != "None" for y in np.asarray(line.get_ydata())]


def scaled(*batches: int) -> Study:
    found = []
    for batch in batches:
        values: dict[str, Any] = {"step_seconds": 0.01 * batch / 64, "seed": batch}
        base = replace(ONE, global_batch_size=batch)
        found += strong({2: 1.6, 4: 2.4}, base=base, **values) + weak({2: 1.9, 4: 3.7}, base=base, **values)
    return make.study(make.on(make.GPUS, found))


def test_strong_and_weak_scaling_have_panels_of_their_own_with_the_ideal_and_the_threshold() -> None:
    study = replace(scaled(64), bands=S000)
    figure = multi_gpu.by_ranks(study)
    assert figure is not None
    for i, planted in enumerate(([1, 1.6, 2.4], [1, 1.9, 3.7])):
        gain, efficiency = figure.axes[2 * i : 2 * i + 2]
        rows = [c for c in multi_gpu.scaling_rows(study) if c.scaling == ("strong", "weak")[i] and c.role != "twin"]
        assert marked(gain) == pytest.approx(planted, rel=0.02)
        assert marked(efficiency) == pytest.approx([100 * c.efficiency.value for c in rows])
        upright = [line for line in drawn_lines(efficiency) if len(set(np.asarray(line.get_xdata()))) == 1]
        ends = [float(y) for line in upright for y in np.asarray(line.get_ydata())]
        assert ends == pytest.approx([100 * v for c in rows if c.role == "candidate" for v in c.efficiency.ends])
        ideal, level = (next(line for line in ax.lines if line.get_linestyle() == "--") for ax in (gain, efficiency))
        assert np.array_equal(np.asarray(ideal.get_xdata()), np.asarray(ideal.get_ydata()))
        assert list(np.asarray(level.get_ydata())) == [75, 75]
