"""Runs as a table with speed-ups, from jobs, folders and records; and what differs between two of them."""

import csv
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import records as make
from conftest import Call
from scaled_records import family, paired

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DiffusionConfig, RunConfig
from ddpm_lab.explain import phrases
from ddpm_lab.files import settings_text
from ddpm_lab.ledger import Ledger
from ddpm_lab.questions.multi_gpu import scaling_rows
from ddpm_lab.record import Window
from ddpm_lab.reports import summary
from ddpm_lab.reports.summary import ACCURACY, Summary
from ddpm_lab.training.run_folder import RunFolder

BASE = RunConfig()


def row(seconds: float | None, **values: Any) -> Summary:
    given = {"configuration": "tiny", "gpus": 1, "nodes": 1, "log": "a.out", "epoch_seconds": seconds, **values}
    return Summary(seconds=seconds, **given)


def gains(found: list[Summary]) -> list[float | None]:
    return [run.speed_up for run in summary.compared(found) if (run.devices or 1) > 1]


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_the_published_table_and_speed_ups() -> None:
    times = ((1, 1, 362.45, 0.1187), (4, 1, 95.23, 0.1192), (8, 2, 57.14, 0.1190))
    found = [
        row(s, configuration=None, gpus=g, nodes=n, loss=loss, job_id=str(12345 + i), epoch_seconds=s / 50)
        for i, (g, n, s, loss) in enumerate(times)
    ]
    runs = summary.compared(found)
    shown = summary.grid(runs)
    assert [*shown[0]] == [*list(summary.COLUMNS)[:8], "Note"]
    assert [[*row.values()][:8] for row in shown] == [
        ["12345", "1 GPU", "1", "1", "362.45", "7.25", "0.1187", ACCURACY],
        ["12346", "4 GPUs", "4", "1", "95.23", "1.90", "0.1192", ACCURACY],
        ["12347", "8 GPUs on 2 nodes", "8", "2", "57.14", "1.14", "0.1190", ACCURACY],
    ]
    assert summary.speed_up_lines(runs)[:3] == [
        "Baseline (1 GPU, 1 GPU): 362.45 seconds",
        "4 GPUs, 4 GPUs: speed-up 3.81x, efficiency 95.2 %; excellent, by S001",
        "8 GPUs on 2 nodes, 8 GPUs on 2 nodes: speed-up 6.34x, efficiency 79.3 %; good, by S001",
    ]
    beyond = summary.compared([row(100.0), row(10.0, gpus=4)])
    assert beyond[1].rating == "above 100 %", "of another machine, perhaps; multi_gpu says so too"


# --- records and folders ---------------------------------------------------------------------------------------------


def window(seconds: float, images: int, **values: Any) -> Window:
    given = {"turn": 0, "position": 0, "start_seconds": 0.0, "steps": 1, "rank_seconds": (), "step_seconds": ()}
    return Window(seconds=seconds, images=images, **{**given, "data_seconds": (), **values})


def test_a_configuration_s_numbers_are_those_of_its_windows_and_trials() -> None:
    config = RunConfig(data_sha256="ff", precision="bf16", global_batch_size=8)
    kept = (window(2.0, 300, state={"gpu_utilisation_percent": 80.0}), window(2.0, 500))
    timed = [make.record(config, role=role, windows=kept) for role in ("candidate", "twin", "note")]
    looks = [{"images": n, "loss": loss} for n, loss in ((0, 0.9), (8, 0.4), (16, 0.5))]
    trial = make.record(RunConfig(), role="quality", windows=(), quality={"held_out": looks})
    crowd = RunConfig(world_size=4, global_batch_size=8, oversubscribe=True)
    many = make.record(crowd, mechanism_only=True, windows=kept)
    untrained = make.record(RunConfig(workload="ddpm_lab.training.pieces:pieces"), windows=kept)
    failed = make.record(RunConfig(seed=1), role="quality", status="crashed")
    one, tried, shared = summary.of_records([*timed, trial, failed, many, untrained])
    busy = summary.of_records(make.sets({"2 ranks": (RunConfig(world_size=2), 7.0)}, crowded=range(6)))
    assert [(run.seconds, run.note, run.found) for run in busy] == 2 * [(None, phrases.DISTURBED, True)]
    assert (one.configuration, one.gpus, one.ranks, one.nodes) == ("tiny, batch 8, precision bf16", 0, 1, 1)
    assert (one.seconds, one.epoch_seconds, one.loss, one.gpu_percent) == (4.0, 4.0 * 50_000 / 800, None, 80.0)
    assert (tried.loss, tried.seconds) == (0.4, None)
    assert (shared.seconds, shared.epoch_seconds, shared.note) == (None, None, summary.MECHANISM)
    assert gains([row(10.0, gpus=0, ranks=1), shared]) == [None]
    assert [*summary.grid([shared])[0].values()][4] == "unknown"


def test_a_ledger_gives_times_of_windows_paired_speed_ups_losses_and_why_there_are_none() -> None:
    """Times that drift between sets give another ratio of means than of pairs."""
    answer = paired({64: 1.6}, {32: 6.45}, set_noise=0.001, drift=1.0)
    shown = {(r.family, r.ranks): r for r in scaling_rows(answer) if r.role != "twin"}
    for run in summary.of_study(answer, "ledger.jsonl"):
        of = shown[run.configuration or "", run.ranks or 0]
        windows = [w for r in answer.records if (r.family, r.role) == (of.family, of.role) for w in r.windows]
        assert run.seconds == pytest.approx(sum(w.seconds for w in windows))
        assert run.epoch_seconds == of.projected_seconds
        assert run.speed_up == (of.ratio.value if of.ranks > 1 else None)
        assert run.rating == ("" if of.ranks == 1 else "good" if "weak" in of.family else "overhead")
    base = RunConfig(global_batch_size=32)
    two = replace(base, world_size=2, global_batch_size=64)
    found = make.sets({"2 ranks": (two, 1.2)}, baseline=base, baseline_label="1 rank", experiment="multi_gpu")
    tried = make.trials({"2 ranks": (two, 0.01)}, baseline=base, seed_noise=0, pair_noise=0)
    runs = summary.of_study(replace(make.study(found), trials=tuple(tried)), "")
    assert [run.loss for run in runs] == [pytest.approx(0.35), pytest.approx(0.36)]
    runs = summary.of_study(make.study([*family(64, 1.6), *family(128, 1.0, failed=("oom", "needs 90 GiB"))]), "")
    assert [run.note for run in runs if run.seconds is None] == ["8 GPUs; out of memory: needs 90 GiB"]
    busy = make.sets({"2 ranks": (two, 1.2)}, baseline=base, experiment="multi_gpu", crowded=[1])
    alone = {run.ranks: run.seconds for run in summary.of_records(busy)}
    assert {run.ranks: run.seconds for run in summary.of_study(make.study(busy), "")} == pytest.approx(alone)
    hidden = paired({16: 1.1}, {}, device="cpu", ranks=2, mechanism_only=["1 rank", "2 ranks"])
    assert [run.seconds for run in summary.of_study(hidden, "")] == [None, None]


# --- what differs ----------------------------------------------------------------------------------------------------


def test_what_is_trained_and_where_should_not_differ() -> None:
    other = replace(BASE, seed=1, world_size=2, diffusion=DiffusionConfig(objective="v"))
    found = summary.differences((BASE, 2), (other, None))
    assert found == {"world_size": (1, 2), "diffusion.objective": ("noise", "v"), "seed": (0, 1)}
    assert set(summary.unexpected(found, ["world_size"])) == {"seed", "diffusion.objective"}
    assert summary.unexpected(found, ["world_size", "seed", "diffusion"]) == [], "a table's name stands for all in it"
    with pytest.raises(ConfigError, match="'ranks'"):
        summary.unexpected({}, ["ranks"])
    assert summary.differences((replace(BASE, data="/one"), 2), (BASE, 2)) == {}, "wherever the images lie"


# --- the command -----------------------------------------------------------------------------------------------------


def folder_of(folder: Path, config: RunConfig, steps: int) -> Path:
    with RunFolder(folder) as made:
        made.write_settings(config, {"steps": steps})
        made.cut_log(0)
        made.log([{"step": i + 1, "loss": 1.0, "images_per_second": 64.0, "held_out_loss": 0.5} for i in range(steps)])
    return folder


def test_ledgers_logs_and_run_folders_are_one_table(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    Ledger(path).append(paired({64: 1.6}, {}).records)
    (tmp_path / "slurm-5.out").write_text("srun: error\n")
    again = tmp_path / "." / "run" / ".." / "l.jsonl"  # the same file is shown once
    words = (path, tmp_path / "slurm-5.out", again, folder_of(tmp_path / "run", replace(BASE, seed=1), 2))
    code, out, err = call("summary", *words, "--csv", tmp_path / "t.csv", "--json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    names = [(r["configuration"], r["found"]) for r in found["runs"]]
    assert names == [*[("seed, batch 64", True)] * 2, (None, False), ("tiny, batch 32", True)]
    last = found["runs"][-1]
    assert (last["seconds"], last["epoch_seconds"], last["loss"], last["steps"]) == (1.0, 50_000 / 64, 0.5, 2)
    assert [run["speed_up"] is None for run in found["runs"]] == [True, False, True, True]
    with (tmp_path / "t.csv").open(newline="") as file:
        assert [r["Time (s)"] for r in csv.DictReader(file)][2:] == ["", "1.0"]
    assert call("summary", tmp_path / "slurm-5.out")[0] == 1
    assert call("summary", tmp_path / "none.out")[0] == 2


def test_a_table_is_written_in_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    (log := tmp_path / "slurm-5.out").write_text("Datei über Bord", encoding="utf-8")
    words = [sys.executable, "-m", "ddpm_lab", "summary", str(log), "--csv", str(tmp_path / "t.csv")]
    ascii_alone = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run(words, env={**os.environ, **ascii_alone}, capture_output=True, check=False)
    assert "über Bord" in (tmp_path / "t.csv").read_text(encoding="utf-8")


def test_what_differs_between_two_runs(call: Call, tmp_path: Path) -> None:
    """Runs are named by folders of ``train``, or by files of settings."""
    one, two = folder_of(tmp_path / "a", BASE, 2), folder_of(tmp_path / "b", replace(BASE, precision="bf16"), 3)
    code, out, _ = call("summary", one, two)
    assert (code, out.startswith("Job ID")) == (0, True)
    assert {"precision", "train.steps"} <= {line.split()[0] for line in out.splitlines() if line}
    assert call("summary", one, two, "--only", "precision")[0] == 1
    code, out, _ = call("summary", one, two, "--json", "--only", "train")
    assert (code, json.loads(out)["unexpected"]) == (1, ["precision"])
    assert call("summary", one, tmp_path / "none.toml")[0] == 2
    (tmp_path / "own.toml").write_text(settings_text({"world_size": 2, "train": {"steps": 2}}))
    found = json.loads(call("summary", one, tmp_path / "own.toml", "--json")[1])
    assert found["differences"] == {"world_size": [1, 2]}
    for sides in ((one, tmp_path / "own.toml"), (one, two, "--json")):
        code, _, err = call("summary", *sides, "--csv", tmp_path / "t.csv")
        assert (code, "--csv" in err) == (2, True), "no table is made of these"
    assert json.loads(call("summary", one, one, "--json")[1])["differences"] == {}
