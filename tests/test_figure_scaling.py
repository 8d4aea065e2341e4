"""Figures of scaling: where the points are, in which panel, and what never appears."""

from dataclasses import replace

import numpy as np
import pytest
import records as make
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from test_scaling import ONE, lost, strong, study, weak

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import figure_scaling, figure_style, findings
from ddpm_lab.explain.bands import S000
from ddpm_lab.explain.frames import Study


def words(figure: Figure) -> str:
    return " ".join(" ".join(t.get_text().split()) for t in figure.findobj(Text) if isinstance(t, Text))


def points(ax: Axes) -> list[float]:
    """Heights of the marked points of the lines in a panel."""
    kept = [line for line in ax.lines if line.get_transform() == ax.transData and line.get_marker() != "None"]
    return [float(y) for line in kept for y in np.asarray(line.get_ydata(), dtype=float)]


def both(*batches: int) -> Study:
    found = []
    for batch in batches:
        base = replace(ONE, global_batch_size=batch)
        found += strong({2: 1.6, 4: 2.4}, base=base, step_seconds=0.01 * batch / 64, seed=batch)
        found += weak({2: 1.9, 4: 3.7}, base=base, step_seconds=0.01 * batch / 64, seed=batch)
    return study(found, lost())


def test_strong_and_weak_have_panels_of_their_own() -> None:
    with figure_style.style():
        figure = figure_scaling.speed_up(both(64))
    assert figure is not None
    upper, lower = figure.axes
    assert points(upper) == pytest.approx([1, 1.6, 2.4], rel=0.02)
    assert points(lower) == pytest.approx([1, 1.9, 3.7], rel=0.02)
    for ax in (upper, lower):
        ideal = next(line for line in ax.lines if line.get_linestyle() == "--")
        assert np.array_equal(np.asarray(ideal.get_xdata()), np.asarray(ideal.get_ydata()))
    assert "Strong scaling: the ranks share the batch" in words(figure)
    assert "50" not in {t.get_text() for t in figure.findobj(Text) if isinstance(t, Text)}, "what scales nothing"


def test_one_kind_alone_has_one_panel() -> None:
    with figure_style.style():
        figure = figure_scaling.speed_up(study(strong({2: 1.6})))
    assert figure is not None
    assert len(figure.axes) == 1
    assert "Weak" not in words(figure)


def test_time_and_throughput_say_the_same() -> None:
    with figure_style.style():
        figure = figure_scaling.by_ranks(both(64, 128))
    assert figure is not None
    for seconds, rate in (figure.axes[:2], figure.axes[2:]):
        assert [50_000 / s for s in points(seconds)] == pytest.approx(points(rate), rel=1e-6)
    # 64 images in 10 ms, on one GPU and shared by four; as many images a second for four batches of 64.
    assert points(figure.axes[1])[0] == pytest.approx(6400, rel=0.05)
    assert points(figure.axes[1])[2] == pytest.approx(2.4 * 6400, rel=0.05)
    assert points(figure.axes[3])[2] == pytest.approx(3.7 * 6400, rel=0.05)


def test_against_the_batch_size_weak_scaling_counts_the_images_of_a_rank() -> None:
    with figure_style.style():
        figure = figure_scaling.by_batch(both(64, 128))
        assert figure_scaling.by_batch(both(64)) is None
    assert figure is not None
    assert [ax.get_xlabel() for ax in figure.axes] == [
        *["global batch size, images a step"] * 2,
        *["images a step on each rank"] * 2,
    ]
    for ax in figure.axes:
        assert [int(t) for t in ax.get_xticks()] == [64, 128]


@pytest.mark.parametrize("name", ["s001", "s000"])
def test_efficiencies_lie_over_their_bands_with_the_threshold(name: str) -> None:
    chosen = both(64) if name == "s001" else replace(both(64), bands=S000)
    with figure_style.style():
        figure = figure_scaling.efficiency(chosen)
    assert figure is not None
    for ax in figure.axes:
        (line,) = (line for line in ax.lines if line.get_linestyle() == "--")
        assert list(np.asarray(line.get_xdata())) == [75, 75]
    said = words(figure)
    expected = ("60 %, overhead", "80 %, good", "95 %, excellent")
    for part in expected if name == "s001" else ("60 %, acceptable", "80 %, good", f"{name.upper()}'s bands: perfect"):
        assert part in said


def test_each_device_has_a_bar_where_equal_work_was_measured() -> None:
    cpu = replace(ONE, device="cpu")
    here = make.sets(
        {"2 ranks": (replace(cpu, world_size=2), 1.2)},
        baseline=cpu,
        baseline_label="1 rank",
        experiment="multi_gpu",
        family="seed, batch 64, CPU",
    )
    with figure_style.style():
        figure = figure_scaling.layouts(study(here, strong({4: 3.0})))
        unequal = figure_scaling.layouts(study(here, weak({4: 3.0})))
    assert figure is not None
    (ax,) = figure.axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["1 CPU rank", "2 CPU ranks", "1 GPU", "4 GPUs"]
    assert unequal is not None
    assert [t.get_text() for t in unequal.axes[0].get_yticklabels()] == ["1 CPU rank", "2 CPU ranks"]


def test_hosts_are_named_where_there_are_several() -> None:
    two = {"8 GPUs on 2 hosts": (replace(ONE, world_size=8, nodes=2), 6.3)}
    one = {"4 GPUs": (replace(ONE, world_size=4), 3.4)}
    family = "seed, batch 64"
    records = make.sets({**one, **two}, baseline=ONE, baseline_label="1 GPU", experiment="multi_gpu", family=family)
    of = study(make.on(make.GPUS, records))
    with figure_style.style():
        ranks, bars = figure_scaling.by_ranks(of), figure_scaling.layouts(of)
    assert ranks is not None
    assert bars is not None
    assert [t.get_text() for t in ranks.axes[0].get_xticklabels()] == ["1", "4", "8\n2 hosts"]
    assert "8 GPUs on 2 hosts" in words(bars)
    lead = [replace(r, primary=r.label == "8 GPUs on 2 hosts") for r in of.records]
    said = findings.finding(replace(of, records=tuple(lead))).claim
    assert "8 GPUs on 2 hosts (good), by S001's bands; 8 GPUs on 2 hosts: good scaling on several nodes" in said


def test_ranks_that_share_cores_appear_nowhere() -> None:
    four = RunConfig(world_size=4, oversubscribe=True)
    records = make.sets(
        {"2 ranks": (RunConfig(world_size=2), 1.1), "4 ranks": (four, 1.7)},
        baseline_label="1 rank",
        experiment="multi_gpu",
        mechanism_only=["4 ranks"],
    )
    for draw in (figure_scaling.speed_up, figure_scaling.efficiency, figure_scaling.by_ranks, figure_scaling.layouts):
        with figure_style.style():
            figure = draw(study(records))
        assert figure is not None
        assert "4 ranks" not in words(figure)
        assert "4 CPU ranks" not in words(figure)
        if draw in (figure_scaling.speed_up, figure_scaling.by_ranks):
            assert all([t.get_text() for t in ax.get_xticklabels()] == ["1", "2"] for ax in figure.axes)
