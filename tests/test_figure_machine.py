"""The figure of the machine: the neighbours and the memory that the records hold, turn by turn."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import records as make
from matplotlib.figure import Figure

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import figure_style
from ddpm_lab.explain.figure_machine import over_the_run
from ddpm_lab.explain.frames import Study


def study(**state: float | None) -> Study:
    two = {"2 ranks": (RunConfig(world_size=2), 1.3)}
    found = make.sets(two, experiment="multi_gpu", count=2, crowded=[(1, 0), (1, 1)])
    return make.study(make.with_state(found, **state))


def drawn(of: Study) -> Figure:
    with figure_style.style():
        figure = over_the_run(of)
    assert figure is not None
    return figure


def words(figure: Figure) -> str:
    return " ".join(t.get_text() for t in [*figure.texts, *(t for ax in figure.axes for t in ax.texts)])


def test_each_set_is_a_line_of_its_own_at_its_turns() -> None:
    _, memory = drawn(study()).axes
    gap = np.nan
    for line in memory.lines:
        np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3, 4, 5, 6, gap, 7, 8, 9, 10, 11, 12, gap])
        np.testing.assert_array_equal(line.get_ydata(), [*6 * [471.0], gap, *6 * [471.0], gap])
    assert len([line for line in memory.lines if len(np.asarray(line.get_xdata())) > 1]) == 2


def test_a_set_that_does_not_count_is_crossed_and_its_crowded_turns_stand_above_the_line() -> None:
    neighbours, _ = drawn(study()).axes
    (crosses,) = [line for line in neighbours.lines if line.get_marker() == "x"]
    assert np.asarray(crosses.get_xdata()).tolist() == [7, 8, 9, 10, 11, 12]
    (limit,) = [line for line in neighbours.lines if line.get_linestyle() == "--"]
    (bars,) = neighbours.collections
    boxes = [path.get_extents() for path in bars.get_paths()]
    heights = {round((box.x0 + box.x1) / 2): box.y1 for box in boxes}
    assert [turn for turn, height in heights.items() if height > np.asarray(limit.get_ydata())[0]] == [7, 8]


def test_unknown_neighbours_are_not_drawn_as_none() -> None:
    known = study()
    records = tuple(
        dataclasses.replace(r, windows=tuple(dataclasses.replace(w, others_cores=None) for w in r.windows))
        for r in known.records
    )
    figure = drawn(dataclasses.replace(known, records=records))
    assert not figure.axes[0].collections[0].get_paths()
    assert "not available" in words(figure)
    assert "What other processes took is unknown here." in words(figure)


def test_a_gpu_adds_its_memory_clock_and_power() -> None:
    figure = drawn(study(**make.GPU_STATE))
    assert [ax.get_ylabel() for ax in figure.axes] == ["cores", "MiB", "MHz", "W"]
    assert np.asarray(figure.axes[2].lines[0].get_ydata())[0] == 1755
    assert np.asarray(figure.axes[1].lines[0].get_ydata())[0] == 3 << 10, "the GPU's memory, not the host's"


@pytest.mark.parametrize("state", [{}, {"rss_bytes": None}])
def test_records_without_a_state_have_no_figure(state: dict[str, float | None]) -> None:
    found = study(**state)
    if not state:
        found = dataclasses.replace(
            found,
            records=tuple(
                dataclasses.replace(r, windows=tuple(dataclasses.replace(w, state={}) for w in r.windows))
                for r in found.records
            ),
        )
    assert over_the_run(found) is None
