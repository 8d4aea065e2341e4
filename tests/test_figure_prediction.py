"""Figures of exchanges and of predicted steps: what is drawn, and what is marked as predicted."""

import re
from collections.abc import Callable

import pytest
import records as make
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from scaled_records import all_reduces, scaled

from ddpm_lab.explain import figures
from ddpm_lab.explain.figure_prediction import exchange, steps
from ddpm_lab.explain.frames import study
from ddpm_lab.record import RunRecord


def ring(ranks: int, size: int) -> float:
    return 2 * (ranks - 1) * (1e-4 + size / ranks * 1e-9)


def step(ranks: int, images: int, exchanged: bool) -> float:
    return 4e-3 + 1e-3 * images + 0.5 * ring(ranks, 4 * 2**20) * exchanged


def words(figure: Figure) -> str:
    texts = [*figure.texts, *(t for ax in figure.axes for t in ax.texts)]
    return " ".join(t.get_text() for t in texts).replace("\n", " ")


def lines(ax: Axes, keep: Callable[[str], bool]) -> list[int]:
    """How many points each line has whose style is kept; those beside the panel are left out."""
    return [
        len(line.get_xdata())  # type: ignore[arg-type]
        for line in ax.get_lines()
        if line.get_transform() == ax.transData and keep(str(line.get_linestyle()))
    ]


@pytest.fixture
def training() -> list[RunRecord]:
    return scaled(step)


def test_every_measured_exchange_is_a_point_in_both_panels_with_its_fitted_link() -> None:
    shown = make.study(all_reduces(ring, ranks=(2, 4), machine=make.GPUS))
    drawn = exchange(shown, "a title")
    assert drawn is not None
    for ax in drawn.axes:
        points = [line for line in ax.get_lines() if line.get_marker() != "None" and len(line.get_xdata()) == 6]  # type: ignore[arg-type]
        assert [line.get_linestyle() for line in points] == ["None", "None"]
        assert lines(ax, lambda style: style.startswith("--")) == [6, 6]
    said = words(drawn)
    assert "2 ranks" in said
    assert "4 ranks" in said
    assert re.search(r"latency (9\d.\d|10\d) \N{MICRO SIGN}s", said)
    assert "64 MiB: " in figures.alt_text(shown)


def test_a_link_that_cannot_be_fitted_leaves_its_measurements() -> None:
    drawn = exchange(make.study(all_reduces(ring, messages=(2**10, 2**20))), "a title")
    assert drawn is not None
    assert "not enough data to fit a link" in words(drawn)
    assert lines(drawn.axes[0], lambda style: style.startswith("--")) == []


def test_predictions_are_dashed_and_hollow_and_measurements_filled(training: list[RunRecord]) -> None:
    drawn = steps(study([*training, *all_reduces(ring, ranks=(2, 4), machine=make.GPUS)], "multi_gpu"))
    assert drawn is not None
    assert len(drawn.axes) == 3
    for ax in drawn.axes:
        own = [line for line in ax.get_lines() if line.get_transform() == ax.transData]
        predicted = [line for line in own if len(line.get_xdata()) == 10]  # type: ignore[arg-type]
        assert len(predicted) == 2
        assert all(to_hex(line.get_markerfacecolor()) == "#ffffff" for line in predicted)
        assert all(line.get_linestyle() == "--" for line in predicted)
        measured = [line for line in own if len(line.get_xdata()) == 1]  # type: ignore[arg-type]
        assert measured
        assert all(to_hex(line.get_markerfacecolor()) != "#ffffff" for line in measured)
        assert "extrapolation" in [t.get_text() for t in ax.texts]
    said = words(drawn)
    assert "measured" in said
    assert "predicted, ring" in said
    assert "predicted, tree" in said
    assert "Assumed: ring, every link as the measured one" in said
    assert "each rank keeps 64 images" in said
    assert drawn.texts[0].get_text().startswith("Predicted for 16 ranks")


def test_it_stands_under_more_where_links_were_measured_and_is_absent_where_not(training: list[RunRecord]) -> None:
    links = all_reduces(ring, ranks=(2, 4), machine=make.GPUS)
    found = {name: caption for caption, _, name in figures.more(study([*training, *links], "multi_gpu"))}
    assert found["predicted"].startswith("Predicted, not measured")
    assert "predicted" not in {name for _, _, name in figures.more(study(training, "multi_gpu"))}


def test_records_that_do_not_suffice_are_told_in_place_of_a_figure(training: list[RunRecord]) -> None:
    few = all_reduces(ring, messages=(2**10,), machine=make.GPUS)
    drawn = steps(study([*training, *few], "multi_gpu"))
    assert drawn is not None
    assert "not enough data" in words(drawn)
