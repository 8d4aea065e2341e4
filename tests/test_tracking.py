"""What a tracker is told, and that it can fail, hang or be missing without any harm to a run."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from test_training_run import CONFIG, logged, ranks
from test_training_run_processes import data

from ddpm_lab import tracking
from ddpm_lab.config import RunConfig
from ddpm_lab.data.packed import read_manifest
from ddpm_lab.measure.progress import Progress
from ddpm_lab.stopping import Stop
from ddpm_lab.tracking import Tracker
from ddpm_lab.training_run import Outcome, Schedule, train

__all__ = ["data", "ranks"]

STAND_IN = """
import json, os, time

class ExperimentConfig:
    def __init__(self, **given):
        self.given = given

class Experiment:
    alive, url = True, "https://example.com/one"
    def __getattr__(self, name):
        def call(*values, **named):
            {trouble}
            with open(os.environ["TOLD"], "a") as file:
                file.write(json.dumps([name, values, named]) + chr(10))
        return call

def start(**given):
    {start}
    return Experiment()
"""
"""A package with comet_ml's name that writes down the calls, but for the planted trouble."""


@dataclass
class Stage:
    """A run on a stage: stand-ins for its ranks and, put before the real one, for the package comet_ml."""

    place: Path
    data: Path
    capture: pytest.CaptureFixture[str]

    def plant(self, trouble: str = "pass", start: str = "pass", text: str = STAND_IN) -> None:
        """Have the stand-in do something at its start, or in each call."""
        (self.place / "stand-in").mkdir(exist_ok=True)
        (self.place / "stand-in" / "comet_ml.py").write_text(text.format(trouble=trouble, start=start))

    def calls(self, name: str) -> list[tuple[Any, dict[str, Any]]]:
        """Values and named values of each call that the stand-in got."""
        lines = [json.loads(line) for line in (self.place / "told.jsonl").read_text().splitlines()]
        return [(values, named) for called, values, named in lines if called == name]

    def config(self, **settings: Any) -> RunConfig:
        """A configuration with real images."""
        sha256 = read_manifest(self.data).content_hash
        return dataclasses.replace(CONFIG, data=str(self.data), data_sha256=sha256, **settings)

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.place / "run"

    def run(self, config: RunConfig, steps: int, tracker: str | None) -> Outcome:
        """Train, with stand-ins for ranks."""
        schedule = Schedule(steps=steps, sample_every=0, evaluate_every=7)
        progress = Progress("train")
        return train(config, schedule, self.folder, threads=1, stop=Stop(), progress=progress, tracker=tracker)

    def notes(self) -> list[str]:
        """What was said of the tracker."""
        return notes(self.capture.readouterr().err)


@pytest.fixture
def stage(
    data: Path, tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Stage:
    ranks()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'stand-in'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("TOLD", str(tmp_path / "told.jsonl"))
    made = Stage(tmp_path, data, capfd)
    made.plant()
    return made


def notes(err: str) -> list[str]:
    return [line for line in err.splitlines() if "tracker:" in line]


# --- what is told ----------------------------------------------------------------------------------------------------


def test_every_step_is_told_once_with_its_epoch(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    count = read_manifest(stage.data).train_count
    stage.run(config := stage.config(global_batch_size=count // 8 * 2), 20, "comet")
    metrics = stage.calls("log_metrics")
    steps = [(named["step"], values[0]) for values, named in metrics if "train_loss" in values[0]]
    assert [(step, v["train_loss"]) for step, v in steps] == [
        (row["step"], row["loss"]) for row in logged(stage.folder)
    ]
    assert {step: v["held_out_loss"] for step, v in steps if "held_out_loss" in v} == {7: 0.5, 14: 0.5, 20: 0.5}
    assert all(named["epoch"] == -(-named["step"] * config.global_batch_size // count) for _, named in metrics)
    losses: dict[int, list[float]] = {}
    for step, values in steps:
        losses.setdefault(-(-step * config.global_batch_size // count), []).append(values["train_loss"])
    means = [(n["epoch"], v[0]["train_loss_epoch"]) for v, n in metrics if "train_loss_epoch" in v[0]]
    whole = range(1, -(-21 * config.global_batch_size // count))  # whose last step is one of them
    assert means == [(epoch, pytest.approx(sum(losses[epoch]) / len(losses[epoch]))) for epoch in whole]
    assert any("cpu_utilisation_percent" in values[0] and "ram_used_bytes" in values[0] for values, _ in metrics)
    parameters = stage.calls("log_parameters")[0][0][0]
    assert parameters["optimizer.learning_rate"] == 2e-4
    assert (parameters["world_size"], parameters["train.steps"]) == (2, 20)
    others = stage.calls("log_others")[0][0][0]
    assert (others["host_name"], others["slurm_job_id"]) == (socket.gethostname(), "4242")
    assert {"python", "torch", "machine"} <= set(others)
    assert str(stage.data) not in (stage.place / "told.jsonl").read_text(), "no path of the user's is told"
    assert stage.notes() == ["train: tracker: https://example.com/one"]


def test_a_run_goes_on_in_the_same_experiment(stage: Stage) -> None:
    stage.plant(start='Experiment().started(given["experiment_key"], given["mode"])')
    count = read_manifest(stage.data).train_count
    config = stage.config(global_batch_size=count // 20 * 2)
    for steps in (4, 14):
        stage.run(config, steps, "comet")
    (one, mode), (two, _) = (values for values, _ in stage.calls("started"))
    assert (one, mode) == (two, "get_or_create")
    assert len(one) == 32
    metrics = stage.calls("log_metrics")
    assert [named["step"] for values, named in metrics if "train_loss" in values[0]] == list(range(1, 15))
    first = next(values[0]["train_loss_epoch"] for values, _ in metrics if "train_loss_epoch" in values[0])
    epoch = [row["loss"] for row in logged(stage.folder) if row["step"] * config.global_batch_size <= count]
    assert first == pytest.approx(sum(epoch) / len(epoch)), "with the steps of the earlier start"


def test_without_being_asked_nothing_is_started(stage: Stage) -> None:
    imported = stage.place / "imported"
    stage.plant(text=f"open({str(imported)!r}, 'w')")
    stage.run(stage.config(), 5, None)
    usual = {".lock", "checkpoints", "config.toml", "log.csv", "log.jsonl", "samples"}
    assert {p.name for p in stage.folder.iterdir()} == usual
    assert stage.notes() == []
    assert not imported.exists()
    assert "comet_ml" not in sys.modules


def test_what_is_unknown_is_not_told(stage: Stage) -> None:
    with Tracker("comet", stage.place, "0" * 32, name="x", say=lambda _: None) as tracker:
        tracker.log_metrics({"a": float("nan"), "b": None, "c": 1.0})
        tracker.log_metrics({"a": float("inf")})
        tracker.log_others({"a": None, "b": "x"})
    assert [values[0] for values, _ in stage.calls("log_metrics")] == [{"c": 1.0}]
    assert [values[0] for values, _ in stage.calls("log_others")] == [{"b": "x"}]


# --- what goes wrong -------------------------------------------------------------------------------------------------

RAISES = 'raise ValueError("planted")'
TROUBLE: list[tuple[dict[str, str], str]] = [
    ({"text": "raise ModuleNotFoundError('x', name='comet_ml')"}, "comet_ml is not installed: run make trackers"),
    ({"text": "import os; os._exit(3)"}, "its process ended (3)"),
    ({"start": RAISES}, "ValueError: planted"),
    ({"trouble": RAISES}, "ValueError: planted"),
    ({"trouble": f"if name == 'end': {RAISES}"}, "ValueError: planted"),
    ({"start": "Experiment.alive = False"}, "did not accept"),
    ({"start": "time.sleep(600)"}, "no answer in time"),
]


@pytest.mark.parametrize(
    ("planted", "words"),
    [*TROUBLE, pytest.param({"trouble": "time.sleep(600)"}, "no answer in time", marks=pytest.mark.slow)],
)
def test_whatever_fails_the_run_ends_as_usual_and_says_so_once(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, planted: dict[str, str], words: str
) -> None:
    monkeypatch.setattr(tracking, "CONNECT_SECONDS", 1)
    monkeypatch.setattr(tracking, "END_SECONDS", 1)
    stage.plant(**planted)
    begun = time.monotonic()
    outcome = stage.run(stage.config(), 30, "comet")
    assert time.monotonic() - begun < 3 * (1 + 1 + 3)
    assert (outcome.step, len(logged(stage.folder))) == (30, 30)
    (note,) = stage.notes()
    assert words in note
    assert not [words for words in children() if "comet_process" in words]


def children() -> list[str]:
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            found.append(" ".join(child.cmdline()))
    return found


def test_what_comes_too_fast_is_dropped_and_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.plant(start="time.sleep(1.5)")
    monkeypatch.setattr(tracking, "WAITING", 10)
    said: list[str] = []
    tracker = Tracker("comet", stage.place, "0" * 32, name="x", say=said.append)
    begun = time.monotonic()
    for step in range(10_000):
        tracker.log_metrics({"loss": 1.0}, step=step)
    assert time.monotonic() - begun < 1, "it does not wait"
    tracker.close()
    (line,) = said
    dropped = int(line.partition("; ")[2].split()[0].replace(",", ""))
    assert dropped + len(stage.calls("log_metrics")) == 10_000
    assert dropped > 1_000


KILLED = """
import os, pathlib, sys
from ddpm_lab import tracking
tracking.CONNECT_SECONDS = tracking.END_SECONDS = 1
tracker = tracking.Tracker("comet", pathlib.Path(sys.argv[1]), "0" * 32, name="x", say=print)
print(tracker._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("planted", [{"start": "time.sleep(600)"}, {"trouble": "time.sleep(600)"}])
def test_nothing_outlives_a_killed_run(stage: Stage, planted: dict[str, str]) -> None:
    stage.plant(**planted)
    words = [sys.executable, "-c", KILLED, str(stage.place)]
    pid = int(subprocess.run(words, capture_output=True, text=True, check=False, timeout=60).stdout)
    deadline = time.monotonic() + 30
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "it outlives the run"
            time.sleep(0.05)
