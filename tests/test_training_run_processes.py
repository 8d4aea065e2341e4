"""Training runs as processes of their own: killed, stopped, out of disk, with other ranks, and what goes on."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import wait_for
from test_training import equal
from test_training_run import logged, steps_in

from ddpm_lab.training.checkpoint import read
from ddpm_lab.training.run_folder import checkpoints_in

KILLS = 40 if os.environ.get("CHAOS") == "full" else 6


ON_ONE_CORE = """
import os, sys
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, [cores[int(sys.argv[1]) % len(cores)]])
os.execv(sys.argv[2], sys.argv[2:])
"""
"""One thread for each trainer: two of them would wait for each other beside busy neighbours."""


def command(data: Path, folder: Path, steps: int, *more: str) -> list[str]:
    words = f"--steps {steps} --image-size 8 --batch-size 8 --sample-every 0 --evaluate-every 0 --seed 5 --no-probe"
    paths = ["--data", str(data), "--output-dir", str(folder)]
    return [sys.executable, "-m", "ddpm_lab", "train", *paths, *words.split(), *more]


@contextlib.contextmanager
def started(arguments: list[str], core: int = 0) -> Iterator[subprocess.Popen[str]]:
    words = [sys.executable, "-c", ON_ONE_CORE, str(core), *arguments]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(words, **pipes, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def finished(arguments: list[str], code: int = 0) -> str:
    """What it has said on standard error, ended with this code."""
    with started(arguments) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return err


def _killed_often(arguments: list[str], checkpoints: Path, seed: int) -> list[int]:
    """Kill -9 the same command at random moments; returns the steps of the checkpoints that each left."""
    chance = random.Random(seed)
    left = []
    for _ in range(KILLS // 2):
        before = checkpoints_in(checkpoints)[:1]
        with started(arguments, core=seed) as process:
            if chance.random() < 0.7:  # once it trains; else while it starts
                wait_for(lambda: checkpoints_in(checkpoints)[:1] != before or process.poll() is not None)  # noqa: B023
                time.sleep(chance.uniform(0, 0.3))
            else:
                time.sleep(chance.uniform(0, 6))
            assert process.poll() is None, "it ended before it could be killed: more steps are needed"
        left += [read(path).step for path in checkpoints_in(checkpoints)[:2]]
    return left


@pytest.mark.slow
@pytest.mark.chaos
def test_kills_change_nothing(data: Path, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Kill -9 at random moments: while starting, training, and saving, which happens ten times a second."""
    steps, often = 300 + 15 * KILLS, ("--save-every", "4", "--keep", "2")
    finished(command(data, tmp_path / "whole", steps, *often))
    whole = read(tmp_path / "whole" / "checkpoints" / f"step-{steps:08d}.pt")
    rows = [(r["step"], r["loss"]) for r in logged(tmp_path / "whole")]
    assert [step for step, _ in rows] == list(range(1, steps + 1))
    folders = [tmp_path / name for name in ("first", "second")]
    commands = [command(data, folder, steps, *often) for folder in folders]
    with ThreadPoolExecutor() as pool:
        left = list(pool.map(_killed_often, commands, [f / "checkpoints" for f in folders], (0, 1)))
    for folder, arguments, seen in zip(folders, commands, left, strict=True):
        assert len(set(seen)) > KILLS // 4
        assert f"goes on after step {max(seen):,} of {steps:,}" in finished(arguments)
        assert not list(folder.rglob("*.unreadable"))
        assert equal(read(folder / "checkpoints" / f"step-{steps:08d}.pt"), whole)
        assert [(r["step"], r["loss"]) for r in logged(folder)] == rows
    record_property("chaos", ("kills: train", KILLS, "the same weights as without"))


@pytest.mark.slow
@pytest.mark.parametrize("whole_session", [False, True])
def test_sigterm_saves_and_stops(data: Path, tmp_path: Path, whole_session: bool) -> None:
    """Also where every process gets it, as from ``timeout`` or a service manager."""
    arguments = command(data, tmp_path, 100_000, "--save-every", "100000")
    with started(arguments) as process:
        wait_for((tmp_path / "log.jsonl").exists)
        wait_for(lambda: (tmp_path / "log.jsonl").stat().st_size > 0)
        (os.killpg if whole_session else os.kill)(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, err
    (step,) = steps_in(tmp_path)
    assert err.splitlines()[-1].startswith(f"SIGTERM, saved after step {step:,}")
    assert len(logged(tmp_path)) == step
    assert f"goes on after step {step:,} of {step + 5:,}" in finished(command(data, tmp_path, step + 5))


@pytest.mark.slow
def test_a_signal_while_ranks_build_ends_at_once(data: Path, tmp_path: Path) -> None:
    with started(command(data, tmp_path, 100_000)) as process:
        wait_for((tmp_path / "log.jsonl").exists)
        wait_for(lambda: bool(psutil.Process(process.pid).children()))
        begun = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, logged(tmp_path)) == (128 + signal.SIGTERM, []), err
    assert psutil.wait_procs(begun, timeout=10)[1] == [], "nobody is left"
    assert "SIGTERM, stopped at once" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_checkpoint(data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with started(command(data, tmp_path, 100_000, "--save-every", "500")) as process:
        wait_for(lambda: folder.is_dir() and any(folder.glob("step-*.pt")))
        for rank in psutil.Process(process.pid).children(recursive=True):  # who write checkpoints
            rank.rlimit(psutil.RLIMIT_FSIZE, (200 * 1024, 200 * 1024))
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    assert "step-00001000.pt: File too large" in err.splitlines()[-1]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert list(before) == ["step-00000500.pt"]
