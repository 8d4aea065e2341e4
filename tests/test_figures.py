"""Figures of questions: the numbers of the records, in the figures that a question has, with nothing cut."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import matplotlib as mpl
import numpy as np
import pytest
import records as make
from drawn_studies import STUDIES, amp
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from scaled_records import ONE, strong, weak
from test_charts import boxes, drawn_lines, intervals, points, spans

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.bands import S000
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.style import png, save
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.questions import multi_gpu, recommendation
from ddpm_lab.questions.ask import answer

RANKS = [{**make.PHASES, "communication": 5.0}, {**make.PHASES, "forward": 12.0, "communication": 16.4}]
EXCHANGE = {"communication": {"seconds": 0.012, "overlapped_seconds": 0.009}}
BUDGETS: dict[str, dict[str, Any]] = {
    "budget, one rank": {"ranks": []},
    "budget, not explained": {"ranks": [], "residual": 20.0},
    "budget, two ranks": {"ranks": RANKS, "spans": EXCHANGE},
    "budget, a GPU": {
        "ranks": [],
        "spans": {"data": {"seconds": 0.02, "overlapped_seconds": 0.018}},
        "host_phases": make.PHASES,
        "host_ahead_seconds": 0.02,
    },
    "budget, phases of its own": {"ranks": [{"data": 1.0, "augmentation": 2.0, "generator": 29.0}]},
}


def study_of(name: str) -> Study:
    if name not in BUDGETS:
        return STUDIES[name]()
    case = dict(BUDGETS[name])
    return make.study([make.time_budget(*case.pop("ranks"), **case)])


@cache
def drawn(name: str) -> dict[str, Figure]:
    """All figures of a study by the name of their file; that of the answer has none."""
    study = study_of(name)
    return {"": answer(study).figure(), **{short: figure for _, figure, short in answer(study).figures()}}


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


def check_texts(figure: Figure) -> None:
    """Fail if a text is cut by the edge of a figure, or lies on another."""
    with style.style():
        figure.draw_without_rendering()
        shown = [(text.get_text(), text.get_window_extent()) for text in texts(figure)]
    width, height = figure.bbox.size
    for said, b in shown:
        assert (b.x0 >= 0, b.x1 <= width, b.y0 >= 0, b.y1 <= height) == (True,) * 4, said
    for i, (first, a) in enumerate(shown):
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
OFTEN = {"12 configurations", "wordy", "strong and weak", "quality, with samples", "two families, learned", *BUDGETS}


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
        ("gpus", {"", "speedup", "batch"}),
        ("machine", {"", "speedup", "batch", "machine"}),
        ("strong and weak, two CPU ranks", {""}),
        ("12 configurations", {"", "time"}),
        ("1 configuration", {""}),
        ("compiled, costs", {"", "break_even", "costs"}),
        ("batch sizes", {""}),
        ("batches, learned", {"", "quality", "curves"}),
        ("quality, with samples", {"", "curves", "samples"}),
        ("levers, learned", {"", "levers", "quality", "curves"}),
        ("budget, one rank", {"", "operators"}),
        ("profile", {""}),
        ("nothing", {""}),
    ],
)
def test_a_question_has_the_figures_that_its_records_allow(name: str, expected: set[str]) -> None:
    assert set(drawn(name)) == expected


def test_the_same_records_give_the_same_bytes_in_another_process() -> None:
    code = "import test_figures as t; print(*t.digests())"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "MPLBACKEND": "svg", "LC_ALL": "C"}
    folder = Path(__file__).parent
    other = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=folder, check=True, capture_output=True, text=True
    )
    before = dict(mpl.rcParams)
    with mpl.rc_context({"font.size": 31, "savefig.dpi": 40, "axes.grid": False, "savefig.bbox": "tight"}):
        assert other.stdout.split() == [str(v) for v in digests()]
    assert dict(mpl.rcParams) == before, "no global setting is changed"


def digests() -> list[int]:
    found = []
    for name in ("resolved", "compiled, costs", "profile", "quality, with samples"):
        study = study_of(name)
        found += [crc32(png(f)) for f in (answer(study).figure(), *(f for _, f, _ in answer(study).figures()))]
    return found


def test_save_replaces_the_file_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "image_output" / "03_amp.png"
    figure = drawn("resolved")[""]
    save(figure, path)
    save(figure, path)
    assert path.read_bytes() == png(figure)
    assert b"Software" not in path.read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["03_amp.png"]


# --- comparisons ---


def test_every_row_has_the_ratio_and_the_ends_of_its_comparison_and_the_band_those_of_the_twin() -> None:
    study = STUDIES["12 configurations"]()
    (ax,) = answer(study).figure().axes
    rows = [c for c in comparisons(study) if c.role == "candidate" and c.sets]
    twin = next(c for c in comparisons(study) if c.role == "twin")
    assert sorted(value for value, _ in points(ax)) == sorted(c.ratio.value for c in rows)
    assert list(intervals(ax).values()) == [c.ratio.ends for c in rows]
    assert spans(ax) == [pytest.approx(twin.ratio.ends)]


def test_failures_are_rows_with_their_reason_and_mechanisms_are_in_no_figure_of_speed() -> None:
    assert "crashed: the process ended with signal 9" in words(drawn("all failed")[""])
    assert "1.62 (1.60–1.63)" in words(drawn("resolved")[""])
    two, four = RunConfig(world_size=2), RunConfig(world_size=4, oversubscribe=True)
    tried = {"2 ranks": (two, 1.1), "4 ranks": (four, 1.77)}
    study = make.study(
        make.sets(tried, experiment="multi_gpu", baseline_label="1 rank", mechanism_only=["4 ranks"]),
    )
    figure = answer(study).figure()
    assert [t.get_text() for ax in figure.axes for t in ax.get_yticklabels()] == ["2 ranks"]
    assert "Not shown: 4 ranks" in words(figure)


def test_times_are_the_baselines_divided_by_the_ratios() -> None:
    study = amp()
    base, bf16 = (next(c for c in comparisons(study) if c.label == name) for name in ("fp32", "bf16"))
    (ax,) = drawn("resolved")["time"].axes
    assert [end for _, end in boxes(ax)] == pytest.approx(
        [base.projected_seconds, base.projected_seconds / bf16.ratio.value]
    )
    (ends,) = intervals(ax).values()
    assert ends == pytest.approx([base.projected_seconds / v for v in (bf16.ratio.high, bf16.ratio.low)])
    (panel,) = drawn("12 configurations")["time"].axes
    (line,) = [line for line in drawn_lines(panel) if len(np.asarray(line.get_xdata())) == 13]
    times = np.asarray(line.get_ydata(), dtype=float)
    assert times[0] / times[12] == pytest.approx(7.0, rel=0.05), "12 workers are planted 7 times as fast as none"


# --- scaling ---


def marked(ax: Axes) -> list[float]:
    return [float(y) for line in drawn_lines(ax) if line.get_marker() != "None" for y in np.asarray(line.get_ydata())]


def scaled(*batches: int) -> Study:
    found = []
    for batch in batches:
        base = replace(ONE, global_batch_size=batch)
        found += strong({2: 1.6, 4: 2.4}, base=base, step_seconds=0.01 * batch / 64, seed=batch)
        found += weak({2: 1.9, 4: 3.7}, base=base, step_seconds=0.01 * batch / 64, seed=batch)
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
    assert "S000's bands: perfect from 100 %" in words(figure)
    assert multi_gpu.by_ranks(make.study(make.on(make.GPUS, strong({2: 1.6})))) is None, "two points are no line"


def test_time_against_the_batch_size_counts_the_images_of_a_rank_in_weak_scaling() -> None:
    figure = multi_gpu.by_batch(scaled(32, 64, 128))
    assert figure is not None
    for ax, images in zip(figure.axes, ("global batch size", "images a step on each rank"), strict=True):
        assert ax.get_xlabel().startswith(images)
        assert [int(t) for t in ax.get_xticks()] == [32, 64, 128]
    # 64 images in 10 ms on one GPU: 50,000 in 7.8 s, and on four in that divided by 2.4 and by 3.7.
    for ax, ratio in zip(figure.axes, (2.4, 3.7), strict=True):
        times = marked(ax)
        assert times[1] == pytest.approx(7.8, rel=0.05)
        assert times[1] / times[-2] == pytest.approx(ratio, rel=0.03)
    assert multi_gpu.by_batch(scaled(64)) is None


def test_hosts_are_named_where_there_are_several() -> None:
    tried = {
        "4 GPUs": (replace(ONE, world_size=4), 3.4),
        "8 GPUs on 2 hosts": (replace(ONE, world_size=8, nodes=2), 6.3),
    }
    values: dict[str, Any] = {"baseline_label": "1 GPU", "experiment": "multi_gpu", "family": "seed, batch 64"}
    study = make.study(make.on(make.GPUS, make.sets(tried, baseline=ONE, **values)))
    figure = multi_gpu.by_ranks(study)
    assert figure is not None
    assert [t.get_text() for t in figure.axes[0].get_xticklabels()] == ["1", "4", "8\n2 hosts"]
    lead = [replace(r, primary=r.label == "8 GPUs on 2 hosts") for r in study.records]
    said = answer(replace(study, records=tuple(lead))).finding.notes[0]
    assert "with 8 GPUs on 2 hosts" in said
    assert "good scaling on several nodes" in said


# --- a step and its phases ---


def test_phases_lie_end_to_end_and_end_where_the_step_does() -> None:
    (ax,) = drawn("budget, not explained")[""].axes
    found = boxes(ax)
    assert [b - a for a, b in found] == pytest.approx([*make.PHASES.values(), 20.0])
    assert all(first[1] == pytest.approx(second[0]) for first, second in pairwise(found))
    assert len(drawn("budget, one rank")[""].axes) == 1, "on one CPU rank nothing is waited for"


def test_what_runs_beside_the_phases_is_as_long_as_it_took_and_ends_with_backward() -> None:
    figure = drawn("budget, two ranks")[""]
    slowest, _, _ = figure.axes
    *phases, beside = boxes(slowest)
    names = [t.get_text() for t in slowest.get_yticklabels()]
    assert names[-1] == "communication, beside computing"
    assert beside[1] - beside[0] == pytest.approx(9.0)
    assert beside[1] == pytest.approx(phases[names.index("backward")][1])


def test_loading_beside_computing_has_the_colour_of_its_class() -> None:
    ax = drawn("budget, a GPU")[""].axes[0]
    names = [t.get_text() for t in ax.get_yticklabels()]
    bars = dict(zip(names, ax.patches, strict=True))
    assert bars["loading, beside computing"].get_facecolor() == bars["waiting for data"].get_facecolor()


def test_operators_are_named_and_counted() -> None:
    record = make.profile(RunConfig(purpose="profile"))
    assert record.profile is not None
    name = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    kernel = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3>>"
    )
    more = [{"name": n, "calls": 4.0, "self_cpu_seconds": 1.0, "self_device_seconds": 0.0} for n in (name, kernel)]
    study = make.study([replace(record, profile={**record.profile, "operators": record.profile["operators"] + more})])
    shown = ["".join(t.get_text().split("\n")) for t in texts(answer(study).figure())]
    assert name in shown
    (short,) = [word for word in shown if word.startswith("void at::")]
    assert short.endswith(", 3>>"), "of a kernel, which is longer than two lines, both ends"
    assert any(word.endswith("%, 1 call a step") for word in shown)
    assert not any(re.search(r"(?<!\d)1 calls", word) for word in shown)


# --- compiling and the machine ---


def test_a_run_is_the_stages_of_its_groups_end_to_end() -> None:
    (ax,) = drawn("compiled, costs")["costs"].axes
    labels = [" ".join(t.get_text().split()) for t in ax.get_yticklabels()]
    assert labels == ["eager (12 groups)", "compiled, warm cache (6 groups)", "compiled, cold cache (3 groups)"]
    found = boxes(ax)
    assert [b - a for a, b in found] == pytest.approx([0.03, 1.2, 0.25, 3.7, 0.04, 0.03, 1.2, 1.6, 0.25, 3.7, 0.04, 34])
    said = words(drawn("compiled, costs")["costs"])
    assert "2 compiled frames, 3 graphs, 1 graph break and 0 recompiles" in said
    assert "34.0 s, compile 34.0 s" in said


def test_memory_over_the_run_begins_anew_with_each_set() -> None:
    two = {"2 ranks": (RunConfig(world_size=2), 1.3)}
    records = make.sets(two, experiment="multi_gpu", count=2)
    figure = multi_gpu.over_the_run(make.study(make.with_state(records)))
    assert figure is not None
    (memory,) = figure.axes
    gap = np.nan
    for line in memory.lines:
        np.testing.assert_array_equal(line.get_xdata(), [1, 2, 3, 4, 5, 6, gap, 7, 8, 9, 10, 11, 12, gap])
        np.testing.assert_array_equal(line.get_ydata(), [*6 * [471.0], gap, *6 * [471.0], gap])
    assert multi_gpu.over_the_run(make.study(make.with_state(records, rss_bytes=None))) is None


def test_a_gpu_adds_its_memory_clock_and_power() -> None:
    axes = drawn("machine")["machine"].axes
    assert [ax.get_ylabel() for ax in axes] == ["MiB", "MHz", "W"]
    assert [np.asarray(ax.lines[0].get_ydata())[0] for ax in axes[:2]] == [3 << 10, 1755], "the GPU's, not the host's"


# --- quality ---


def test_settings_that_learn_as_well_are_grey_and_what_is_worse_is_not() -> None:
    held_out, training = drawn("quality, with samples")["curves"].axes
    for ax in (held_out, training):
        colours = [line.get_color() for line in ax.lines]
        assert colours.count(style.OPEN) == 2
        assert colours[-1] == style.INK
        assert len(colours) == 4


def test_losses_are_drawn_with_their_intervals_and_the_margin() -> None:
    study = STUDIES["quality, with samples"]()
    rows = [c for c in comparisons(study) if c.role == "candidate"]
    _, losses = drawn("quality, with samples")[""].axes
    shown = sorted(rows, key=lambda c: -c.ratio.value)
    assert [value for value, _ in points(losses)] == [c.equivalence.difference for c in shown]
    assert list(intervals(losses).values()) == [(c.equivalence.low, c.equivalence.high) for c in shown]
    margin = rows[0].equivalence.margin
    assert spans(losses) == [pytest.approx((-margin, margin))]


def test_a_recommendation_is_drawn_from_speed_to_speed() -> None:
    (ax,) = drawn("recommendation, searched")[""].axes
    *steps, whole = boxes(ax)
    found = recommendation.recommendation(study_of("recommendation, searched"))
    assert found is not None
    ends = [step.row.ratio.ends for step in found.steps]
    assert list(intervals(ax).values()) == [*ends, found.best.row.ratio.ends]
    assert steps[0][0] == 1
    assert all(first[1] == pytest.approx(second[0]) for first, second in pairwise(steps))
    assert whole == pytest.approx((1, steps[-1][1])), "the bars close"
    assert drawn("recommendation, small")[""].axes[0].get_xlim()[0] > 0.9
