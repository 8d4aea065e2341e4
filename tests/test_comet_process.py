"""The real comet_ml: archives opened by zipfile and by comet itself, and a server that never answers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from comet_archive import messages, metric, others, read_by_comet
from test_tracking import notes
from test_training_run import logged
from test_training_run_processes import command, data, equal, finished

from ddpm_lab import comet_process
from ddpm_lab.model.checkpoint import Checkpoint, read

__all__ = ["data"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("comet_ml") is None, reason="make trackers"),
]
TWO = ("--world-size", "2", "--oversubscribe")
STEPS = 11


def weights(folder: Path) -> Checkpoint:
    return read(folder / "checkpoints" / f"step-{STEPS:08d}.pt")


@pytest.fixture(scope="module")
def untracked(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("untracked")
    code, _, err = finished(command(data, folder, STEPS, *TWO))
    assert (code, notes(err)) == (0, []), err
    return weights(folder)


def test_an_archive_holds_what_two_ranks_have_logged(data: Path, untracked: Checkpoint, tmp_path: Path) -> None:
    for steps in (6, STEPS):
        code, _, err = finished(command(data, tmp_path, steps, *TWO, "--tracker", "comet-offline"))
        assert code == 0, err
        (note,) = notes(err)
        assert str(tmp_path / "comet") in note
    assert equal(weights(tmp_path), untracked)
    archives = sorted((tmp_path / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime)
    losses = [(row["step"], row["loss"]) for row in logged(tmp_path)]
    assert [metric(archive, "train_loss") for archive in archives] == [losses[:6], losses[6:]]
    rows = [read_by_comet(archive) for archive in archives]
    key = (tmp_path / "comet_experiment.txt").read_text().strip()
    assert {row["experiment"] for found in rows for row in found} == {key}
    read_back = [float(r["value"]) for found in rows for r in found if r["name"] == "train_loss"]
    assert read_back == [loss for _, loss in losses]
    assert {"network", "optimizer.learning_rate"} <= {r["name"] for r in rows[0] if r["section"] == "param"}


PATIENCE = """
import sys
from ddpm_lab import tracking
tracking.CONNECT_SECONDS = 3
from ddpm_lab.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """A server that accepts and never answers; its address."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/clientlib/"


def test_a_server_that_never_answers_changes_nothing(
    data: Path, untracked: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMET_API_KEY", "x" * 25)
    python, _, _, *words = command(data, tmp_path, STEPS, *TWO)
    with silent_server() as address:
        monkeypatch.setenv("COMET_URL_OVERRIDE", address)
        code, out, err = finished([python, "-c", PATIENCE, *words])
    assert code == 0, err
    assert out.endswith(f"step-{STEPS:08d}.pt\n")
    (note,) = notes(err)
    assert "no answer in time" in note
    assert equal(weights(tmp_path), untracked)


KILLED = """
import os, pathlib, sys, time
from ddpm_lab.tracking import Tracker
tracker = Tracker("comet-offline", pathlib.Path(sys.argv[1]), "1" * 32, name="x", say=print)
tracker.log_metrics({"loss": 0.5}, step=3, epoch=1)
tracker.log_parameters({"a": 1})
tracker.log_others({"mine": 1})
while not tracker._calls.empty():
    time.sleep(0.01)
time.sleep(0.2)
os.kill(os.getpid(), 9)
"""


def test_a_killed_run_leaves_its_archive_and_comet_adds_nothing_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    archive = finished_archive(tmp_path)
    assert metric(archive, "loss") == [(3, 0.5)]
    assert {m["type"] for m in messages(archive)} == {"metric_msg", "parameter_msg", "log_other"}
    assert others(archive).keys() == {"mine", "Name", "offline_experiment"}
    counted = {"curr_step", "curr_epoch", "process duration"}  # of its own, and of nobody's interest
    assert {row["name"] for row in read_by_comet(archive) if row["section"] in ("param", "metric")} - counted == {
        *("loss", "a"),
    }
    with zipfile.ZipFile(archive) as file:
        text = b"".join(map(file.read, file.namelist())).decode()
    for private in (str(Path.home()), str(tmp_path), socket.gethostname(), sys.executable):
        assert private not in text


def finished_archive(folder: Path) -> Path:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        for archive in folder.glob("*.zip"):
            with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(archive) as file:
                if "messages.json" in file.namelist():
                    return archive
        time.sleep(0.1)
    raise AssertionError("no archive was finished")


def test_everything_that_comet_collects_by_itself_is_off() -> None:
    script = "import comet_ml, inspect; print(*inspect.signature(comet_ml.ExperimentConfig).parameters)"
    environment = {**os.environ, **comet_process.OFF}
    words = [sys.executable, "-c", script]
    known = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout.split()
    by_itself = {n for n in known if n.startswith(("log_", "auto_", "parse_")) and not n.endswith("_rate")}
    assert by_itself == set(comet_process.NOTHING_BY_ITSELF) - {"display_summary_level"}
