"""Training runs as processes of their own: killed, stopped, and what goes on."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import wait_for
from test_training import equal
from test_training_run import logged, steps_in

from ddpm_lab.training.checkpoint import read
from ddpm_lab.training.run_folder import checkpoints_in

KILLS = 20 if os.environ.get("CHAOS") == "full" else 3


def command(data: Path, folder: Path, steps: int, *more: str) -> list[str]:
    words = "--image-size 8 --batch-size 8 --sample-every 0 --evaluate-every 0 --seed 5 --no-probe"
    given = ["--data", str(data), "--output-dir", str(folder), "--steps", str(steps)]
    return [sys.executable, "-m", "ddpm_lab", "train", *given, *words.split(), *more]


@contextlib.contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A command on one core, so with one thread: two would wait for each other beside busy neighbours."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(arguments, **pipes, start_new_session=True) as process:
        psutil.Process(process.pid).cpu_affinity(sorted(os.sched_getaffinity(0))[:1])
        try:
            yield process
        finally:
            process.kill()


def finished(arguments: list[str]) -> str:
    """What it has said on standard error."""
    with started(arguments) as process:
        _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return err


@pytest.mark.slow
@pytest.mark.chaos
def test_kills_change_nothing(data: Path, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    """Kill -9 at random moments: while starting, training, and saving, which happens ten times a second."""
    chance, steps, seen = random.Random(0), 300 + 30 * KILLS, set[int]()
    whole, arguments = (command(data, tmp_path / name, steps, "--save-every", "4") for name in ("whole", "killed"))
    saved = tmp_path / "killed" / "checkpoints"
    for i in range(KILLS):
        before = checkpoints_in(saved)[:1]
        with started(arguments) as process:
            if i % 3 < 2:  # once it trains; else while it starts
                wait_for(lambda: checkpoints_in(saved)[:1] != before or process.poll() is not None)  # noqa: B023
                time.sleep(chance.uniform(0, 0.3))
            else:
                time.sleep(chance.uniform(0, 6))
            assert process.poll() is None, "it ended before it could be killed: more steps are needed"
        seen |= {read(path).step for path in checkpoints_in(saved)}
    assert len(seen) > KILLS // 2
    assert f"goes on after step {max(seen):,} of {steps:,}" in finished(arguments)
    finished(whole)
    assert not list(tmp_path.rglob("*.unreadable"))
    one, other = (read(tmp_path / name / "checkpoints" / f"step-{steps:08d}.pt") for name in ("whole", "killed"))
    assert equal(one, other)
    rows = [[(r["step"], r["loss"]) for r in logged(tmp_path / name)] for name in ("whole", "killed")]
    assert rows[0] == rows[1]
    assert [step for step, _ in rows[0]] == list(range(1, steps + 1))
    record_property("chaos", ("kills: train", KILLS, "the same weights as without"))


@pytest.mark.slow
def test_sigterm_saves_and_stops_and_the_same_command_goes_on(data: Path, tmp_path: Path) -> None:
    """Also where every process gets it, as from ``timeout`` or a service manager."""
    log, before, step = tmp_path / "log.jsonl", 0, 0
    for send in (os.kill, os.killpg):
        with started(command(data, tmp_path, 100_000, "--save-every", "100000")) as process:
            wait_for(lambda: process.poll() or (log.exists() and log.stat().st_size > before))  # noqa: B023
            send(process.pid, signal.SIGTERM)
            _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM, err
        assert (f"goes on after step {step:,} of 100,000" in err) == bool(step)
        step, before = steps_in(tmp_path)[-1], log.stat().st_size
        assert err.splitlines()[-1].startswith(f"SIGTERM, saved after step {step:,}")
        assert len(logged(tmp_path)) == step


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
