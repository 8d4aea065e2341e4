"""Workloads that misbehave, each through the real ``compare``: one sentence blames the right side, nothing is left."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from conftest import marked

MINE = """
import ctypes, os, random, resource, signal, subprocess, sys, threading, time
import torch

def loop(fault=lambda: None, at=30, result=1.0):
    for step in range(1, 10**9):
        if step == at:
            fault()
        sum(range(20_000))
        yield result

def ok():
    yield from loop()

def after(fault, **how):
    return lambda: loop(fault, **how)

def raise_(error):
    raise error

def several(what, count):
    for _ in range(count):
        what()

def careful():
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        return os.kill(os.getpid(), signal.SIGKILL) if i == 64 else i

def loads():
    yield from (1.0 for _ in torch.utils.data.DataLoader(Data(), num_workers=1))

def ends():
    yield from (1.0 for _ in range(20))

def nothing():
    yield from ()

def slow():
    while True:
        time.sleep(0.05)
        yield

def in_build():
    time.sleep(1000)

class Caught(Exception):
    pass

raises = after(lambda: raise_(ValueError("planted")))
segfaults = after(lambda: ctypes.string_at(0))
runs_out = after(lambda: raise_(MemoryError()))
leaves_0 = after(lambda: os._exit(0))
leaves_3 = after(lambda: os._exit(3))
exits = after(lambda: sys.exit("planted"))
stops = after(lambda: os.kill(os.getpid(), signal.SIGSTOP))
is_nan = after(int, result=float("nan"))
closes = after(lambda: os.closerange(3, 500))
ignores = after(lambda: [signal.signal(n, signal.SIG_IGN) for n in (signal.SIGTERM, signal.SIGINT)], at=1)
moves = after(lambda: os.chdir("/"), at=1)
deletes = after(lambda: os.remove(__file__))
prints = after(lambda: several(lambda: print("x" * 10**6), 100))
threads = after(lambda: several(threading.Thread(target=time.sleep, args=(600,), daemon=True).start, 1), at=1)
forks = after(lambda: several(lambda: os.fork() or time.sleep(600), 3))
starts = after(lambda: subprocess.Popen(["sleep", "600"]))
hangs = after(lambda: time.sleep(1000), at=3)
catches = after(careful, at=3)
seeds = after(lambda: (random.seed(0), torch.manual_seed(0), torch.set_num_threads(1)))
allocates = after(lambda: torch.empty(10**15))
recurses = after(lambda: (f := lambda: f())())
orphans = after(lambda: os.kill(os.getppid(), signal.SIGKILL))
"""
CRASH, RUNS = "crashed: rank 0", "ran as 1 rank"
WORKLOADS = {
    **{"raises": "ValueError: planted (mine.py, line ", "segfaults": "was killed by SIGSEGV", "runs_out": "oom"},
    **{"leaves_0": "ended with exit code 0", "leaves_3": "ended with exit code 3", "exits": "SystemExit: planted"},
    **{"stops": "no sign of life for", "is_nan": "no longer finite", "ends": "the loop of mine:ends ended after 20"},
    **{"nothing": "mine:nothing ended after 0 steps", "closes": CRASH},
    **{"hangs": "for 60 s (more --minutes wait longer)", "in_build": "while building", "allocates": "oom"},
    **{
        "loads": "DataLoader worker (pid",
        "catches": "(mine.py, line ",
        "recurses": "RecursionError",
        "orphans": "the process that starts ranks was killed in its turn",
        "deletes": "the code was edited (mine)",
    },
    **dict.fromkeys(("ignores", "moves", "prints", "threads", "forks", "starts", "seeds", "slow"), RUNS),
}
"""What is said of each side, and that it is wrong or ran."""
SHORT = ("loads", "orphans")
IN_FULL = os.environ.get("CHAOS") == "full"


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.parametrize("side", WORKLOADS if IN_FULL else SHORT)
def test_a_side_that_misbehaves_is_blamed_and_leaves_nothing(
    side: str, tmp_path: Path, record_property: Any, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    temporary = Path(tempfile.mkdtemp(prefix="lab"))  # a socket's path must be short
    request.addfinalizer(lambda: shutil.rmtree(temporary))
    environment = {**os.environ, "CHAOS_MARK": side, "TMPDIR": str(temporary)}
    words = ["compare", "mine:ok", f"mine:{side}", "--minutes", "0.1", "--device", "cpu", "--output-dir", "out"]
    how: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True, "stdin": subprocess.DEVNULL}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-m", "ddpm_lab", *words], **how) as command:
        try:
            said, _ = command.communicate(timeout=600)
        except subprocess.TimeoutExpired:
            os.killpg(command.pid, signal.SIGKILL)
            raise
    line = next(
        (
            text
            for text in reversed(said.splitlines())
            if WORKLOADS[side] in text and (side in text or "(mine)" in text)
        ),
        "",
    )
    assert line, said[-3000:]
    assert "Traceback" not in said
    assert "The baseline failed" not in said
    assert len(said) < 100_000
    assert command.returncode == (2 if line.startswith("ddpm-lab: ") else 0 if WORKLOADS[side] == RUNS else 1), said
    assert marked("CHAOS_MARK", side) == []
    assert [file.name for file in temporary.iterdir() if "torchinductor" not in file.name] == []  # torch's own cache
    record_property("chaos", (f"a workload that misbehaves: {side}", 1, f"exit code {command.returncode}"))
