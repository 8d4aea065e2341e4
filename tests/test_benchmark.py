"""The benchmark command: what it measures, what it refuses, and the folder that it fills."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import records as make
from conftest import Call
from paired_records import paired

from ddpm_lab import experiments, files, report_commands, strategy
from ddpm_lab.benchmark import Benchmark, parts, request
from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import decisions
from ddpm_lab.explain.benchmark_files import DASHBOARD, TABLE
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.questions import multi_gpu
from ddpm_lab.run_folder import RunFolder
from ddpm_lab.setting import Images, Setup

GPU = hardware.Gpu(name="Example GPU X", uuid=None, memory_bytes=None)
FILES = {
    DASHBOARD,
    TABLE,
    "benchmark_results.json",
    "benchmark_results.csv",
    "summary_table.md",
    "summary_table.csv",
}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cores and no GPU, wherever the tests run."""
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(hardware, "usable_cores", lambda: 4)


@pytest.fixture
def eight_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: (GPU,) * 8)


def ask(**values: Any) -> Benchmark:
    return request(**{"batch_size": 32, **values})


# --- what is asked for -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("eight_gpus")
def test_a_batch_for_each_is_weak_and_a_shared_one_strong() -> None:
    assert parts(ask()) == [
        {"scaling": "weak", "global_batch_sizes": [32], "world_sizes": [1, 8], "alone": False},
        {"scaling": "strong", "global_batch_sizes": [16, 32, 64, 128], "world_sizes": [1, 8], "alone": False},
    ]
    assert ask().network == "seed"
    assert ask(device="cpu").network == "tiny"


def test_one_side_alone() -> None:
    single = [{"scaling": "strong", "global_batch_sizes": [16, 32], "world_sizes": [1]}]
    for skipped in ({"skip_multi": True}, {"mode": "single"}):
        assert parts(ask(batch_sizes=[16], **skipped)) == single
    assert [(p["world_sizes"], p["alone"]) for p in parts(ask(skip_single=True))] == [([2], True)] * 2


@pytest.mark.usefixtures("eight_gpus")
def test_auto_asks_for_each_batch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """S003's thresholds: a network of ten million parameters wants several devices from batch 64 on."""
    monkeypatch.setattr(experiments, "cohorts_here", lambda *_: [])
    asked = ask(mode="auto", batch_size=64, batch_sizes=[32, 64, 128], network="seed")
    assert [(p["scaling"], p["global_batch_sizes"], p["world_sizes"]) for p in parts(asked)] == [
        ("weak", [64], [1, 8]),
        ("strong", [64, 128], [1, 8]),
        ("strong", [32], [1]),
    ]
    assert capsys.readouterr().err.count("--mode auto:") == 3


def test_a_machine_with_one_device_measures_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    assert [p["world_sizes"] for p in parts(ask())] == [[1]]
    for several in ({"mode": "multi"}, {"skip_single": True}):
        with pytest.raises(strategy.NoRanksError, match="needs two ranks"):
            ask(**several)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"skip_single": True, "skip_multi": True}, "nothing is left"),
        ({"mode": "single", "skip_single": True}, "nothing is left"),
        ({"mode": "multi", "skip_multi": True}, "nothing is left"),
        ({"batch_sizes": [15]}, "15 cannot be shared by 2 ranks"),
        ({"batch_sizes": [0]}, "--batch-sizes is 0"),
        ({"batch_sizes": []}, "--batch-sizes is"),
        ({"batch_size": 0}, "--batch-size is 0"),
        ({"sets": 0}, "--runs is 0"),
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ask(**values)


def test_a_default_that_cannot_be_shared_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpus", lambda: (GPU,) * 3)
    assert ask().batch_sizes == (96,), "16, 32, 64 and 128 are no multiples of 3"


def test_workers_and_several_alone_are_settings_of_the_question() -> None:
    images = Images(folder="f", sha256="a" * 64, name="images")
    setup = Setup(preset="quick", network="tiny", images=images, device="cpu", gpus=0, usable_cores=4)
    common: dict[str, Any] = {"scaling": "weak", "global_batch_sizes": [8], "lost_scaling": False}
    (family,) = multi_gpu(setup, world_sizes=[1, 2], loader_workers=3, **common).families
    assert {(c.loader, c.loader_workers) for c in (family.baseline, family.candidates[0][1])} == {("files", 3)}
    (lone,) = multi_gpu(setup, world_sizes=[2], alone=True, **common).families
    assert (lone.baseline, lone.baseline_label, lone.candidates) == (
        RunConfig(data="f", data_sha256="a" * 64, world_size=2, global_batch_size=16),
        "2 ranks",
        (),
    )
    with pytest.raises(ConfigError, match="loader_workers is 5: 4 cores"):
        multi_gpu(setup, loader_workers=5, **common)


# --- the commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("benchmark --model huge", "'huge'"),
        ("benchmark --batch-sizes 16,x", "--batch-sizes is '16,x'"),
        ("benchmark --batch_sizes 15", "15 cannot be shared"),
        ("benchmark --skip_single_gpu --skip-multi-gpu", "nothing is left"),
        ("benchmark --machine here", "--machine is for --ledger"),
        ("benchmark --ledger none.jsonl", "none.jsonl"),
        ("benchmark --num_workers 9", "loader_workers is 9"),
        ("benchmark --data nowhere", "nowhere"),
        ("benchmark --device cuda", "no GPU"),
    ],
)
def test_refusals_in_one_line(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*arguments.split(), "--output-dir", tmp_path / "out")
    assert (code, out) == (2, "")
    assert words in err
    assert err.splitlines()[-1].startswith("ddpm-lab: ")


def test_several_devices_that_are_not_there_exit_1(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    code, out, err = call("benchmark", "--mode", "multi", "--output_dir", tmp_path)
    assert (code, out) == (1, "")
    assert err == "ddpm-lab: --mode multi needs two ranks, and this machine has 1 usable core: use --mode single\n"


def ledger_of(tmp_path: Path, **values: Any) -> Path:
    answer = paired({64: 1.6, 128: 1.05}, {32: 6.45}, **values)
    Ledger(tmp_path / "l.jsonl").append(answer.records)
    return tmp_path / "l.jsonl"


@pytest.mark.slow
def test_the_folder_from_records_alone(call: Call, tmp_path: Path) -> None:
    code, out, err = call("benchmark", "--ledger", ledger_of(tmp_path), "--output-dir", tmp_path / "out")
    assert (code, err) == (0, "")
    report = {f"comparison_report_seed.{kind}" for kind in ("md", "html")}
    assert {p.name for p in (tmp_path / "out").iterdir()} == FILES | report
    for name in ("benchmark_results.csv", "summary_table.csv"):
        assert len(pd.read_csv(tmp_path / "out" / name)) == 6
    assert re.search(r"^BENCHMARK COMPLETE!\nTime Speedup: 6\.\d\dx \(95 % interval", out, re.MULTILINE)
    assert f"Results saved to: {tmp_path / 'out'}" in out
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    assert call("benchmark", "--ledger", tmp_path / "l.jsonl", "--output-dir", tmp_path / "out")[0] == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before
    code, out, _ = call("benchmark", "--ledger", tmp_path / "l.jsonl", "--output-dir", tmp_path / "out", "--json")
    assert json.loads(out) == json.loads((tmp_path / "out" / "benchmark_results.json").read_text())


def test_records_of_something_else_are_no_benchmark(call: Call, tmp_path: Path) -> None:
    Ledger(tmp_path / "l.jsonl").append(make.sets({}, count=1))
    code, out, err = call("benchmark", "--ledger", tmp_path / "l.jsonl", "--output-dir", tmp_path / "out")
    assert (code, out) == (1, "")
    assert "holds no records of one GPU or rank beside several" in err


def test_a_folder_that_cannot_be_written_is_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = call("benchmark", "--ledger", ledger_of(tmp_path), "--output-dir", tmp_path / "file" / "out")
    assert (code, err.startswith("ddpm-lab: cannot write to")) == (2, True)


def test_the_summary_of_ledgers_logs_and_run_folders_is_one_table(call: Call, tmp_path: Path) -> None:
    ledger = ledger_of(tmp_path)
    log = tmp_path / "slurm-5.out"
    log.write_text('{"ddpm_lab_runs": [{"configuration": "other", "gpus": 1, "seconds": 5.5}]}\n')
    with RunFolder(tmp_path / "run") as run:
        run.write_settings(RunConfig(seed=1), {"steps": 2})
        run.open_logs(0)
        run.log([{"step": i, "loss": 1.0, "images_per_second": 64.0, "held_out_loss": 0.5} for i in (1, 2)])
    code, out, err = call("summary", ledger, log, tmp_path / "run", "--csv", tmp_path / "t.csv")
    assert (code, err) == (0, "")
    frame = pd.read_csv(tmp_path / "t.csv")
    assert frame["Configuration"].tolist()[-2:] == ["other", "tiny, batch 32"]
    assert frame["Time (s)"].tolist()[-2:] == [5.5, 1.0]
    assert frame["Val Loss"].tolist()[-1] == 0.5
    assert frame["Steps"].tolist()[-1] == 2
    assert "0.5000 in 2 steps" in out
    assert len(frame) == 8
    assert "Baseline (Single GPU; seed, batch 64):" in out
    code, out, _ = call("summary", ledger, "--json", "--markdown", tmp_path / "t.md")
    assert len(json.loads(out)["runs"]) == 6
    assert (tmp_path / "t.md").read_text().startswith("| Job ID | Configuration |")
    assert call("summary", tmp_path)[2].startswith("ddpm-lab: SOURCE: ")


@pytest.mark.slow
def test_a_demo_is_measured_once_and_goes_on(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    if hardware.gpus() or hardware.usable_cores() < 2:
        pytest.skip("needs two cores and no GPU")
    monkeypatch.setattr(files, "CHECKOUT", tmp_path)  # where prepared images are kept
    monkeypatch.setitem(report_commands.DEMO, "sets", 1)
    monkeypatch.chdir(tmp_path)
    code, out, err = call("demo")
    assert code == 0, err
    (folder,) = tmp_path.glob("benchmark_results_*")
    assert re.fullmatch(r"benchmark_results_\d{8}_\d{6}", folder.name)
    results = json.loads((folder / "benchmark_results.json").read_text())
    ran = [(c["scaling"], c["side"], c["device"], c["global_batch_size"], c["sets"]) for c in results]
    assert ran == [
        ("weak", "single", "cpu", 8, 1),
        ("weak", "multi", "cpu", 16, 1),
        ("strong", "single", "cpu", 16, 1),
        ("strong", "multi", "cpu", 16, 1),
    ]
    assert "Time Speedup: " in out
    assert decisions.TOO_FEW in out
    ledger = (folder / "trace_output" / "ledger.jsonl").read_bytes()
    assert call("demo", "--output-dir", folder)[0] == 0
    assert (folder / "trace_output" / "ledger.jsonl").read_bytes() == ledger, "everything was there"
