"""Figures: reproducible, complete, with nothing cut or overlapping, whatever the study holds."""

import re
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
import records as make
from drawn_studies import STUDIES, amp, corrected, gpus
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import figure_style, figures
from ddpm_lab.explain.frames import Study


def drawn(study: Study) -> list[Figure]:
    return [figures.figure(study), *(figure for _, figure, _ in figures.more(study))]


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


@cache
def drawn_once(name: str) -> list[Figure]:
    """For tests that only look."""
    return drawn(STUDIES[name]())


def check_texts(figure: Figure) -> None:
    """Fail if a text is cut by the edge of a figure, or lies on another."""
    with figure_style.style():
        figure.draw_without_rendering()
        shown = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    width, height = figure.bbox.size
    for words, b in shown:
        assert b.x0 >= 0, words
        assert b.x1 <= width, words
        assert b.y0 >= 0, words
        assert b.y1 <= height, words
    for i, (first, a) in enumerate(shown):
        for second, b in shown[i + 1 :]:
            apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
            assert apart, f"{first!r} lies on {second!r}"


def check_marks(figure: Figure) -> None:
    """Fail if a mark of a figure that was drawn lies outside its panel."""
    for ax in figure.axes:
        for line in ax.lines:
            if line.get_transform() == ax.transData and line.get_marker() != "None" and line.get_clip_on():
                points = np.column_stack(line.get_data()).astype(float)
                drawn_points = points[~np.isnan(points).all(axis=1)]  # the rest are gaps of a line
                pixels = ax.transData.transform(drawn_points)
                assert np.isfinite(pixels).all()
                assert ax.bbox.padded(1).count_contains(pixels) == len(pixels)


# What has been cut before.
OFTEN = {"12 configurations", "gpus", "wordy", "strong and weak", "quality, with samples", "two families, learned"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in STUDIES]
)
def test_nothing_is_cut_or_shortened_or_lies_elsewhere(name: str) -> None:
    for figure in drawn_once(name):
        check_texts(figure)
        assert [t.get_text() for t in texts(figure) if "\N{HORIZONTAL ELLIPSIS}" in t.get_text()] == []
        check_marks(figure)


def test_a_waterfall_of_small_gains_has_an_axis_to_read() -> None:
    for name in ("recommendation, searched", "recommendation, small"):
        (ax,) = figures.figure(STUDIES[name]()).axes
        low, high = ax.get_xlim()
        assert sum(low <= tick <= high for tick in ax.get_xticks()) >= 3


def test_a_long_verdict_stands_in_full() -> None:
    words = " ".join(" ".join(t.get_text().split()) for t in texts(figures.figure(corrected())))
    assert "inconclusive (resolves " in words


@pytest.mark.parametrize("bold", [False, True])
@pytest.mark.parametrize("points", [9.0, 10.0, 14.0])
def test_measured_widths_hold_when_drawn(points: float, *, bold: bool) -> None:
    lines = ["not resolved (corrected for 4 comparisons)", "WWWW @@@ 0.97  (0.95\N{EN DASH}1.00)", "illicit, 1.11 ffi"]
    with figure_style.style():
        figure = Figure()
        FigureCanvasAgg(figure)
        for line in lines:
            text = figure.text(0, 0, line, fontsize=points, fontweight="bold" if bold else "normal")
            inches = text.get_window_extent().width / figure_style.DPI
            # Half a millimetre too much at most, and all texts have more than that to the next one.
            assert inches - 0.02 <= figure_style.width(line, points, bold=bold) <= 1.1 * inches + 0.02


def test_text_is_wrapped_by_its_width_and_loses_nothing() -> None:
    words = "ratio of iiiiiiiiii to WWWWWWWWWW, " * 6 + "/a/path/without/any/space/" * 9
    wrapped = figure_style.fit(words, 2.5, 99)
    assert all(figure_style.width(line) <= 2.5 for line in wrapped.split("\n"))
    assert "".join(wrapped.split()) == "".join(words.split())
    # No word moves up that would have fitted.
    pairs = pairwise(wrapped.split("\n")[:7])
    assert all(figure_style.width(f"{one} {two.split()[0]}") > 2.5 for one, two in pairs)
    cut = figure_style.fit(words, 2.5, 3)
    assert cut.count("\n") == 2
    assert cut.endswith("\N{HORIZONTAL ELLIPSIS}")
    assert all(figure_style.width(line) <= 2.5 for line in cut.split("\n"))


def test_one_call_is_singular() -> None:
    words = [t.get_text() for t in texts(figures.figure(STUDIES["profile"]()))]
    assert any(word.endswith("  1 call a step") for word in words)
    assert not any("1 calls" in word and not re.search(r"\d1 calls", word) for word in words)


def test_an_operator_with_a_long_name_is_named_in_full() -> None:
    record = make.profile(RunConfig(purpose="profile"))
    assert record.profile is not None
    name = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    kernel = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3>>"
    )
    more = [{"name": n, "calls": 4.0, "self_cpu_seconds": 1.0, "self_device_seconds": 0.0} for n in (name, kernel)]
    study = make.study([replace(record, profile={**record.profile, "operators": record.profile["operators"] + more})])
    words = ["".join(t.get_text().split("\n")) for t in texts(figures.figure(study))]
    assert name in words
    # Of a kernel, which is longer than two lines, both ends.
    (short,) = [w for w in words if w.startswith("void at::")]
    assert short.endswith(", 3>>")


@pytest.mark.parametrize("name", ["resolved", pytest.param("gpus", marks=pytest.mark.slow), "profile"])
def test_the_same_records_give_the_same_bytes_whatever_is_set(name: str) -> None:
    first = [figures.png(figure) for figure in drawn(STUDIES[name]())]
    with mpl.rc_context({"font.size": 31, "savefig.dpi": 40, "axes.grid": False, "savefig.bbox": "tight"}):
        second = [figures.png(figure) for figure in drawn(STUDIES[name]())]
    assert first == second
    assert b"Software" not in first[0]


def test_no_global_setting_is_changed() -> None:
    before = dict(mpl.rcParams)
    drawn(gpus())
    assert dict(mpl.rcParams) == before


def test_the_answer_shows_its_numbers() -> None:
    words = " ".join(t.get_text() for t in texts(figures.figure(amp())))
    for part in (
        "bf16 is 62 % faster than fp32",
        "1.60–1.6",
        "the baseline repeated",
        "6 sets of 6 turns",
        "2026-01-03",
        "2 cores, no GPU",
    ):
        assert part in words


def test_the_points_are_where_the_ratios_are() -> None:
    (ax,) = figures.figure(amp()).axes
    lines = [(line.get_marker(), np.asarray(line.get_xdata(), dtype=float)) for line in ax.lines]
    points = [float(x[0]) for marker, x in lines if marker == "o" and len(x) == 1]
    assert min(points) == pytest.approx(1.0, abs=0.02)
    assert max(points) == pytest.approx(1.62, rel=0.02)


def test_a_failure_is_shown_with_its_reason() -> None:
    words = " ".join(t.get_text() for t in texts(figures.figure(STUDIES["all failed"]())))
    assert "crashed: the process ended with signal 9" in words


def test_a_mechanism_is_in_no_figure_of_speed() -> None:
    records = make.sets(
        {"2 ranks": (RunConfig(world_size=2), 1.1), "4 ranks": (RunConfig(world_size=4), 1.77)},
        experiment="multi_gpu",
        baseline_label="1 rank",
        mechanism_only=["4 ranks"],
    )
    study = make.study(records)
    for figure in drawn(study):
        labels = [t.get_text() for ax in figure.axes for t in (*ax.get_yticklabels(), *ax.get_xticklabels())]
        assert not {"4 ranks", "4"} & set(labels)
    assert "Not shown: 4 ranks" in " ".join(t.get_text() for t in texts(figures.figure(study)))


def test_save_replaces_the_file_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "image_output" / "03_amp.png"
    figure = figures.figure(amp())
    figures.save(figure, path)
    figures.save(figure, path)
    assert path.read_bytes() == figures.png(figure)
    assert [p.name for p in path.parent.iterdir()] == ["03_amp.png"]


def test_figures_are_readable_at_900_pixels() -> None:
    for figure in drawn(gpus()):
        inches = figure.get_size_inches()[0]
        smallest = min(float(t.get_fontsize()) for t in texts(figure))
        assert smallest * 900 / inches / 72 >= 11
