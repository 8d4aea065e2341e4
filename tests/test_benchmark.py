"""One device against several: what is measured, what is refused, and the folder that tells of it."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as make
from conftest import Call
from records import study
from scaled_records import ONE, family, paired, strong
from test_figures import boxes, check_texts, intervals

from ddpm_lab import files
from ddpm_lab.__main__ import _parser
from ddpm_lab.cli import report
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.plan import Experiment
from ddpm_lab.questions import experiments, planning
from ddpm_lab.reports import benchmark

ALONE = replace(ONE, global_batch_size=256)
STUDIES = {
    "gpus": paired({16: 0.8, 32: 1.05, 64: 1.6}, {32: 6.45}, set_noise=0.001),
    "ranks": paired({16: 1.1}, {8: 1.2}, device="cpu", ranks=2),
    "failed": study([*family(64, 1.6), *family(128, 1.0, failed=("oom", "a | b <script>alert(1)</script>"))]),
    "all failed": study(
        [replace(r, status="crashed", reason="signal 9", windows=(), ranks=()) for r in family(64, 1.6)]
    ),
    "one alone": study(strong({}, ALONE)),
    "several alone": study(strong({}, replace(ALONE, world_size=8), baseline_label="8 GPUs")),
}


# --- what is measured ------------------------------------------------------------------------------------------------


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores and no GPU, wherever the tests run."""
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(hardware, "usable_cores", lambda: 4)
    monkeypatch.setattr(planning, "free_cores", lambda: 4)


def planned(tmp_path: Path, *words: str) -> list[Experiment]:
    """What the command would measure on this machine."""
    options = _parser(["benchmark"]).parse_args(["benchmark", *words])
    return [one.experiment for one in report.plan(options, tmp_path)]


def asked(experiment: Experiment) -> list[tuple[str, list[int]]]:
    """Families with the ranks of their configurations."""
    return [(f.name, [f.baseline.world_size, *(c.world_size for _, c in f.candidates)]) for f in experiment.families]


@pytest.mark.usefixtures("four_cores")
def test_what_is_measured_by_batches_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ``auto`` by S003's thresholds: ten million parameters want several devices from batch 64 on."""
    monkeypatch.setattr(experiments, "measured_here", lambda *_, **__: make.study([], "multi_gpu"))
    names = ["tiny, batch 16", "tiny, batch 32", "tiny, batch 16 per rank, weak scaling"]
    cases = {
        "--batch-sizes 16,32": [[(name, [1, 2]) for name in names]],
        "--batch-sizes 16,32 --ranks single": [[(name, [1]) for name in names[:2]]],
        "--batch-sizes 16,32 --ranks multi": [[(name, [2]) for name in names]],
        "--batch-sizes 32,64 --network seed --ranks auto --preset smoke": [
            [("seed, batch 64", [1, 2])],
            [("seed, batch 32", [1])],
        ],
    }
    for words, expected in cases.items():
        assert [asked(part) for part in planned(tmp_path, *words.split())] == expected
    (smoke,) = planned(tmp_path, "--preset", "smoke", "--seed", "3", "--loader-workers", "1")
    assert asked(smoke) == [(names[0], [1, 2])]
    assert {(c.seed, c.loader, c.loader_workers) for c in smoke.configurations} == {(3, "files", 1)}
    with monkeypatch.context() as three:
        three.setattr(report, "several_ranks", lambda *_, **__: 3)
        (found,) = planned(tmp_path)  # the defaults cannot be shared by three
    assert [name for name, _ in asked(found) if "weak" not in name] == ["tiny, batch 96"]
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    (only,) = planned(tmp_path, "--batch-sizes", "16")
    assert asked(only) == [("tiny, batch 16", [1])]


@pytest.mark.usefixtures("four_cores")
def test_several_ranks_need_as_many_free_cores(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "free_cores", lambda: 1)
    code, out, err = call("benchmark", "--ranks", "multi", "--output-dir", tmp_path / "out")
    assert (code, out, "--oversubscribe" in err.splitlines()[-1]) == (2, "", True)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    assert call("benchmark", "--ranks", "multi", "--output-dir", tmp_path)[:2] == (1, "")


# --- what the records say --------------------------------------------------------------------------------------------


LOW = {"set_noise": 0.001, "turn_noise": 0.001}


@pytest.mark.parametrize(
    ("ratio", "values", "verdict", "said"),
    [
        (1.13, LOW, "faster", "multi-GPU beneficial"),
        (1.05, LOW, "faster", "marginal difference"),
        (0.90, LOW, "slower", "single GPU preferred"),
        (1.13, {"device": "cpu", "ranks": 2, **LOW}, "faster", "multi-rank beneficial"),
        (1.6, {"count": 3}, "too few sets", "too few sets (3)"),
        (1.0, {"set_noise": 0.003}, "same", "same within 3 %"),
    ],
)
def test_s003_s_words_for_what_is_resolved_and_none_for_what_is_not(
    ratio: float, values: dict[str, Any], verdict: str, said: str
) -> None:
    _, several = benchmark.rows(paired({64: ratio}, {}, **values))
    assert several.verdict.startswith(verdict)
    assert benchmark.recommendation(several).endswith(said)


def test_the_mean_of_speed_ups_and_their_inverses_is_one() -> None:
    (mean,) = benchmark.means(benchmark.rows(paired({64: 2.0, 128: 0.5}, {32: 7.0}, set_noise=0.001))).values()
    assert mean == pytest.approx(1.0, rel=0.01), "weak scaling is no part of it"


def test_the_files_and_the_table_hold_what_the_comparisons_say() -> None:
    answer = STUDIES["gpus"]
    found = [benchmark.to_dict(answer, row) for row in benchmark.rows(answer)]
    order = [(r["scaling"], r["global_batch_size"], r["world_size"]) for r in found[:4]]
    assert order == [("weak", 32, 1), ("weak", 256, 8), ("strong", 16, 1), ("strong", 16, 8)]
    for one, row in zip(found, benchmark.rows(answer), strict=True):
        assert one["images_per_second"] == row.images_per_second
        assert one["epoch_seconds"] == pytest.approx(50_000 / row.images_per_second)
    weak = found[1]
    assert weak["speedup"] == pytest.approx(6.45, rel=0.01)
    assert weak["speedup_low"] < weak["speedup"] < weak["speedup_high"]
    assert weak["efficiency"] == pytest.approx(weak["speedup"] / 8)
    assert (weak["verdict"], weak["recommendation"]) == ("faster", None)
    shown = benchmark.comparison(answer)
    assert [row["Batch Size"] for row in shown] == ["32 each", "16", "32", "64"]
    assert shown[3]["Recommendation"] == "multi-GPU beneficial"
    assert "out of memory" in benchmark.comparison(STUDIES["failed"])[1]["Multi GPU"]
    assert [*benchmark.comparison(STUDIES["one alone"])[0].values()][2] == "not measured"
    assert [*benchmark.comparison(STUDIES["several alone"])[0].values()][1] == "not measured"
    ranks = benchmark.comparison(STUDIES["ranks"])
    assert not any("GPU" in cell for row in ranks for cell in (*row, *row.values()))


# --- pictures and pages ----------------------------------------------------------------------------------------------


def test_bars_and_intervals_are_where_the_numbers_are() -> None:
    answer = STUDIES["gpus"]
    rows = benchmark.rows(answer)
    several = [r for r in rows if r.ranks > 1]
    axes = benchmark.dashboard(answer).axes
    expected = [[r.projected_seconds for r in rows], [r.images_per_second for r in rows]]
    expected += [[r.ratio.value for r in several], [r.efficiency.value for r in several]]
    assert [[end for _, end in boxes(ax)] for ax in axes] == [pytest.approx(values) for values in expected]
    assert [*intervals(axes[2]).values()] == [r.ratio.ends for r in several]
    dashed = [[np.asarray(line.get_xdata())[0] for line in ax.lines if line.get_linestyle() == "--"] for ax in axes]
    assert dashed == [[], [], [8], [0.75]]


@pytest.mark.parametrize("name", ["failed", "all failed"])
def test_the_folder_of_every_kind_of_study(name: str, tmp_path: Path) -> None:
    """The same rows as JSON and CSV, unknown is null, and no text of a picture is cut."""
    answer = STUDIES[name]
    found = [benchmark.to_dict(answer, row) for row in benchmark.rows(answer)]
    assert set(benchmark.write(answer, tmp_path)) == set(tmp_path.iterdir())
    assert json.loads((tmp_path / "benchmark_results.json").read_text()) == found
    with (tmp_path / "benchmark_results.csv").open(newline="") as file:
        cells = list(csv.DictReader(file))
    for column in ("sets", "images_per_second", "speedup"):
        assert [float(row[column]) if row[column] else None for row in cells] == [r[column] for r in found]
    for one in found:
        assert (one["images_per_second"] is None) == (one["sets"] == 0) == (one["reason"] is not None)
        assert one["speedup"] is None or (one["world_size"] > 1 and one["sets"])
    (drawn,) = benchmark.table(answer).axes[0].tables
    pictured = {"".join(cell.get_text().get_text().split()) for cell in drawn.get_celld().values()}
    shown = [cell for row in benchmark.comparison(answer) for cell in (*row, *row.values())]
    assert pictured == {"".join(cell.split()) for cell in shown}
    for figure in (benchmark.dashboard(answer), benchmark.table(answer)):
        check_texts(figure)


def test_the_report_names_the_command_that_judges_these_settings() -> None:
    words = "run multi_gpu --output-dir /else/where --batch-sizes 8 --world-sizes 2 --precision fp32 --scaling weak"
    text = benchmark.report(replace(STUDIES["ranks"], output_dir=Path("/else/where")))
    assert f"`ddpm-lab {words} --seeds 8`" in text


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_folder_is_made_from_records_alone(call: Call, tmp_path: Path) -> None:
    Ledger(tmp_path / "l.jsonl").append(STUDIES["one alone"].records)
    words = ("benchmark", "--ledger", tmp_path / "l.jsonl", "--output-dir", tmp_path / "out")
    code, out, err = call(*words)
    assert (code, err) == (0, "")
    assert all(str(path) in out for path in (tmp_path / "out").iterdir())
    Ledger(tmp_path / "other.jsonl").append(make.sets({}, count=1))
    assert call("benchmark", "--ledger", tmp_path / "other.jsonl", "--output-dir", tmp_path / "none")[:2] == (1, "")
    (tmp_path / "file").write_text("")
    code, _, err = call(*words[:-1], tmp_path / "file" / "out")
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.slow
def test_a_smoke_benchmark_is_measured_once_and_goes_on(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if hardware.gpus() or hardware.usable_cores() < 2:
        pytest.skip("needs two cores and no GPU")
    monkeypatch.setattr(files, "CHECKOUT", tmp_path)  # where prepared images are kept
    monkeypatch.chdir(tmp_path)
    code, _, err = call("benchmark", "--preset", "smoke")
    assert code == 0, err
    (folder,) = tmp_path.glob("benchmark_results_*")
    found = json.loads((folder / "benchmark_results.json").read_text())
    assert [(r["scaling"], r["world_size"], r["sets"]) for r in found] == [("strong", 1, 1), ("strong", 2, 1)]
    assert found[1]["verdict"] == "too few sets"
    ledger = (folder / "trace_output" / "ledger.jsonl").read_bytes()
    assert call("benchmark", "--preset", "smoke", "--output-dir", folder)[0] == 0
    assert (folder / "trace_output" / "ledger.jsonl").read_bytes() == ledger, "everything was there"
    for words in (("--seed", "1"), ()):
        assert call("benchmark", "--preset", "smoke", "--output-dir", folder, *words)[0] == 0
        shown = json.loads((folder / "benchmark_results.json").read_text())
        assert (shown == found) is (not words), "what was asked for, and not what was measured last"
