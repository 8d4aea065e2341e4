"""The picture of a time budget: bars as long as their phases, all text readable, whatever the record holds."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import records as make
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from test_figures import texts

from ddpm_lab.explain import figure_style, figures
from ddpm_lab.record import RunRecord

SPANS = {"communication": {"seconds": 0.012, "overlapped_seconds": 0.009}}
RANKS = [{**make.PHASES, "communication": 5.0}, {**make.PHASES, "forward": 12.0, "communication": 16.4}]
CASES: dict[str, dict[str, Any]] = {
    "one rank": {"ranks": []},
    "not explained": {"ranks": [], "residual": 20.0},
    "two ranks": {"ranks": RANKS, "spans": SPANS},
    "eight ranks": {"ranks": RANKS * 4, "spans": SPANS},
    "a GPU": {
        "ranks": [],
        "spans": {"data": {"seconds": 0.02, "overlapped_seconds": 0.018}},
        "host_phases": make.PHASES,
        "host_ahead_seconds": 0.02,
    },
    "everything beside": {
        "ranks": RANKS,
        "spans": {
            **SPANS,
            "data": {"seconds": 0.07, "overlapped_seconds": 0.06},
            "a thread of the workload": {"seconds": 0.03, "overlapped_seconds": 0.03},
        },
    },
    "the loader is the limit": {"ranks": [{**make.PHASES, "data": 400.0}]},
    "phases of its own": {"ranks": [{"data": 1.0, "augmentation": 2.0, "discriminator": 30.0, "generator": 29.0}]},
    "no phases": {"ranks": [{}], "residual": 9.0},
    "tiny phases": {"ranks": [{**dict.fromkeys(make.PHASES, 0.2), "communication": 0.2, "backward": 60.0}]},
}


def record(name: str) -> RunRecord:
    case = dict(CASES[name])
    return make.time_budget(*case.pop("ranks"), **case)


def drawn(name: str) -> Figure:
    return figures.figure(make.study([record(name)]))


@pytest.mark.parametrize("name", CASES)
def test_no_text_is_cut_or_lies_on_another(name: str) -> None:
    figure = drawn(name)
    with figure_style.style():
        figure.draw_without_rendering()
        shown = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    width, height = figure.bbox.size
    for i, (words, a) in enumerate(shown):
        assert a.x0 >= 0, words
        assert a.x1 <= width, words
        assert a.y0 >= 0, words
        assert a.y1 <= height, words
        for other, b in shown[i + 1 :]:
            apart = a.x1 <= b.x0 + 1 or b.x1 <= a.x0 + 1 or a.y1 <= b.y0 + 1 or b.y1 <= a.y0 + 1
            assert apart, f"{words!r} lies on {other!r}"


def bars(figure: Figure, panel: int) -> list[Rectangle]:
    found = [p for p in figure.axes[panel].patches if isinstance(p, Rectangle)]
    return sorted((p for p in found if p.get_height() > 0.3), key=lambda p: p.get_x())


def test_bars_are_as_long_as_their_phases_and_end_where_the_step_does() -> None:
    parts = bars(drawn("not explained"), 0)
    assert [p.get_width() for p in parts] == pytest.approx([*make.PHASES.values(), 20.0])
    for first, second in itertools.pairwise(parts):
        assert first.get_x() + first.get_width() == pytest.approx(second.get_x())
    assert parts[-1].get_hatch(), "what lies in no phase is hatched"
    assert not any(p.get_hatch() for p in parts[:-1])


def test_overlap_is_as_long_as_it_took_and_ends_with_backward() -> None:
    figure = drawn("two ranks")
    (strip,) = (p for p in figure.axes[0].patches if isinstance(p, Rectangle) and p.get_height() < 0.3)
    assert strip.get_width() == pytest.approx(9.0)
    backward = bars(figure, 0)[3]
    assert strip.get_x() + strip.get_width() == pytest.approx(backward.get_x() + backward.get_width())
    assert len(figure.axes) == 3, "the slowest rank, the one that waits most, and each phase waited for"


def test_the_answer_says_what_a_newcomer_asks() -> None:
    words = " ".join(t.get_text() for t in texts(drawn("one rank")))
    for part in ("Backward takes 52 % of a step", "the loader is not the limit", "2 cores, no GPU", "2026-01-03"):
        assert part in words
    for part in ("120 steps", "forward\n36 %", "compute", "I/O", "transfer", "Compute share 94 %", "milliseconds"):
        assert part in words


def test_operators_stand_below_the_answer() -> None:
    ((caption, figure, name),) = figures.more(make.study([record("one rank")]))
    assert name == "operators"
    assert "each second counted once" in caption
    assert "Convolutions take 62 %" in " ".join(t.get_text() for t in texts(figure))


def test_the_same_record_gives_the_same_bytes() -> None:
    assert figures.png(drawn("two ranks")) == figures.png(drawn("two ranks"))
