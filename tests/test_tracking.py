"""Comet ML: what its archives hold, and that it can fail, hang or be missing without any harm to a run."""

import dataclasses
import importlib.util
import json
import logging
import math
import socket
import sys
import threading
import zipfile
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import records as make
from test_training_run import CONFIG

from ddpm_lab.checks import ConfigError
from ddpm_lab.cli.measure import TRACKED, log_study
from ddpm_lab.cli.options import tracker_chosen
from ddpm_lab.config import RunConfig
from ddpm_lab.data.packed import read_manifest
from ddpm_lab.explain.charts import png
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.selection import study
from ddpm_lab.questions.ask import answer
from ddpm_lab.training.tracking import TrackedTraining, Tracker

comet = pytest.mark.skipif(importlib.util.find_spec("comet_ml") is None, reason="make trackers")


class Archive:
    """What comet_ml has written: each number's steps and values, settings, words, and all files as bytes."""

    def __init__(self, path: Path) -> None:
        with zipfile.ZipFile(path) as file:
            self.files = {name: file.read(name) for name in file.namelist()}
        self.metrics: dict[str, list[tuple[int | None, Any]]] = {}
        self.settings: dict[str, Any] = {}
        self.words: dict[str, Any] = {}
        self.kinds: set[str] = set()
        for line in self.files["messages.json"].splitlines():
            kind, payload = json.loads(line)["type"], json.loads(line)["payload"]
            self.kinds.add(kind)
            if kind == "metric_msg":
                metric = payload["metric"]
                self.metrics.setdefault(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
            elif kind == "parameter_msg":
                self.settings[payload["param"]["paramName"]] = payload["param"]["paramValue"]
            elif kind == "log_other":
                self.words[payload["key"]] = payload["value"]


def archives(folder: Path) -> list[Archive]:
    return [Archive(path) for path in sorted(folder.glob("*.zip"), key=lambda path: path.stat().st_mtime)]


@comet
def test_an_archive_holds_what_was_logged_and_nothing_of_comets_own(data: Path, tmp_path: Path) -> None:
    """An epoch's mean loss counts its steps before a restart too."""
    images = read_manifest(data).train_count
    config = dataclasses.replace(CONFIG, data=str(data), global_batch_size=images // 8 * 2)
    rows = [{"step": i, "loss": 1 / i, "images_per_second": 9.0, "held_out_loss": 0.5} for i in range(1, 11)]
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:3]))
    say: list[str] = []
    with TrackedTraining("comet-offline", tmp_path, config, schedule={"steps": 10}, step=3, say=say.append) as tracked:
        tracked.steps(rows[3:7])
        tracked.steps([*rows[7:9], rows[9] | {"held_out_loss": None, "images_per_second": float("nan")}])
    (archive,) = archives(tmp_path / "comet")
    assert len(say) == 1
    assert archive.kinds == {"metric_msg", "parameter_msg", "log_other"}
    assert archive.metrics["train_loss"] == [(row["step"], row["loss"]) for row in rows[3:]]
    assert [step for step, _ in archive.metrics["held_out_loss"]] == list(range(4, 10))
    means = [(last, pytest.approx(fmean(row["loss"] for row in rows[last - 4 : last]))) for last in (4, 8)]
    assert archive.metrics["train_loss_epoch"] == means
    assert {"cpu_utilisation_percent", "ram_used_bytes"} <= archive.metrics.keys()
    assert (archive.settings["optimizer.learning_rate"], archive.settings["train.steps"]) == (2e-4, 10)
    assert archive.words["host_name"] == socket.gethostname()
    assert {"python", "torch", "machine"} <= archive.words.keys()
    text = b"".join(archive.files.values()).decode()
    assert not [private for private in (str(data), str(tmp_path), sys.executable) if private in text]


@comet
def test_an_archive_holds_every_comparison_and_the_figure(tmp_path: Path) -> None:
    configs = {"bf16": (dataclasses.replace(RunConfig(), precision="bf16"), 1.3)}
    broken = {"fused": (dataclasses.replace(RunConfig(), kernels="fused"), "crashed", "/home/me/secret.py failed")}
    measured = study(make.sets(configs, failures=broken), "amp", output_dir=tmp_path)
    log_study("comet-offline", measured)
    (archive,) = archives(tmp_path / "trace_output" / "comet")
    rows = comparisons(measured)
    assert [row.role for row in rows] == ["baseline", "twin", "candidate", "candidate"]
    for row in rows[:3]:
        known = {name: value for name in TRACKED if not math.isnan(value := getattr(row, name))}
        assert known == {name: archive.metrics[f"{row.label}/{name}"][0][1] for name in known}
        assert archive.words[f"{row.label}/verdict"] == row.verdict
    assert {name: value for name, value in archive.settings.items() if "/" in name} == {
        "bf16/precision": "bf16",
        "fused/kernels": "fused",
    }
    assert png(answer(measured).figure()) in archive.files.values()
    assert b"secret" not in b"".join(archive.files.values())


class Stand:
    """In the place of comet_ml's experiment, where a fault is planted in one of its methods."""

    url = "https://example.com/one"

    def __init__(self, alive: bool = True, fails_at: str = "") -> None:
        self.alive, self.fails_at = alive, fails_at

    def __getattr__(self, name: str) -> Any:
        def method(*_: Any, **__: Any) -> None:
            if name == self.fails_at:
                raise ValueError("planted")

        return method


@pytest.mark.parametrize(
    ("stand", "words"),
    [
        (None, "make trackers"),
        (Stand(), "https://example.com/one"),
        (Stand(alive=False), "did not accept"),
        (Stand(fails_at="log_metrics"), "planted"),
        (Stand(fails_at="end"), "planted"),
    ],
)
def test_whatever_fails_is_said_once(
    stand: Stand | None, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = stand and SimpleNamespace(ExperimentConfig=SimpleNamespace, start=lambda **_: stand)
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    said: list[str] = []
    tracker = Tracker("comet", tmp_path, "0" * 32, name="x", say=said.append)
    for step in range(3):
        tracker.metrics({"loss": 1.0}, step=step)
    tracker.close()
    assert len(said) == 1
    assert words in said[0]


def test_of_the_errors_that_comet_logs_the_first_is_told_and_no_other_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """While its console shows less, its logger lets no error through by itself."""
    monkeypatch.setattr(logger := logging.getLogger("comet_ml"), "level", logging.CRITICAL)
    module = SimpleNamespace(ExperimentConfig=SimpleNamespace, start=lambda **_: Stand())
    monkeypatch.setitem(sys.modules, "comet_ml", module)
    said: list[str] = []
    tracker = Tracker("comet", tmp_path, "0" * 32, name="x", say=said.append)
    for number in range(3):
        logger.getChild("connection").error("error %d", number)
    assert len(tracker._errors.buffer) == 1
    tracker.close()
    assert "(error 0)" in said[0]


@comet
def test_a_server_that_does_not_answer_is_asked_a_few_times(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked, said = list[str](), list[str]()

    def hang_up(server: socket.socket) -> None:
        while True:
            there, _ = server.accept()
            asked.append(there.recv(9999).decode(errors="replace"))
            there.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=hang_up, args=[server], daemon=True).start()
        monkeypatch.setenv("COMET_URL_OVERRIDE", f"http://127.0.0.1:{server.getsockname()[1]}/clientlib/")
        monkeypatch.setenv("COMET_API_KEY", "x" * 25)
        Tracker("comet", tmp_path, "0" * 32, name="x", say=said.append)
    assert sum("add/run" in text for text in asked) == 3
    assert len(said) == 1


def test_the_tracker_is_the_option_or_follows_from_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMET_API_KEY", raising=False)
    assert tracker_chosen(None) is None
    assert tracker_chosen("comet-offline") == "comet-offline"
    with pytest.raises(ConfigError, match="COMET_API_KEY"):
        tracker_chosen("comet")
    monkeypatch.setenv("COMET_API_KEY", "key")
    assert tracker_chosen(None) == tracker_chosen("comet") == "comet"
    assert tracker_chosen("none") is None
