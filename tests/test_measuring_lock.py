"""Who measures on a core is alone there: others wait, say for whom, and go on when it ends, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpm_lab.measure.measuring_lock import VARIABLE, lock_file, measuring

HOLDER = """
import os, sys, time
from ddpm_lab.measure.measuring_lock import measuring
os.sched_setaffinity(0, {int(c) for c in sys.argv[1].split(",")})
with measuring(lambda text: print(text, flush=True)) as waited:
    print("has it", waited, flush=True)
    sys.stdin.readline()
"""
CORES = sorted(os.sched_getaffinity(0))


def started(*cores: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", HOLDER, ",".join(map(str, cores))]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "measuring.lock"))


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    process = started(CORES[0])
    assert line(process) == "has it False"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_waits_until_the_first_is_killed(holder: subprocess.Popen[str]) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)
        holder.send_signal(signal.SIGKILL)

    with measuring(say) as waited:
        assert waited
    assert len(said) == 1
    assert f"process {holder.pid} measures" in said[0]


@pytest.mark.skipif(len(CORES) < 2, reason="one core")
def test_processes_on_other_cores_do_not_wait_for_each_other(holder: subprocess.Popen[str]) -> None:
    other = started(CORES[1])
    assert line(other) == "has it False"
    other.communicate("\n", timeout=60)
    assert holder.poll() is None


def test_it_is_taken_once_and_a_search_may_measure_within_it() -> None:
    with measuring(print) as first:
        with measuring(print) as second:
            assert (first, second) == (False, False)
        process = started(*CORES)
        assert f"process {os.getpid()} measures" in line(process), "the inner one let go of what the outer one holds"
    assert line(process) == "has it True"
    process.communicate("\n", timeout=60)


def test_without_a_file_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")
    with measuring(print) as waited:
        assert not waited
    monkeypatch.delenv(VARIABLE)
    assert str(os.getuid()) in lock_file().name
