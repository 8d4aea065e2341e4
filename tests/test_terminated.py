"""SIGTERM ends a run as Ctrl-C does: with a sentence, after its ranks, and what was measured stays."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import alive


@pytest.mark.slow
def test_ranks_are_gone_before_the_run_is(tmp_path: Path) -> None:
    words = ["run", "multi_gpu", "--preset", "smoke", "--mode", "single", "--network", "tiny", "--output-dir", "out"]
    started = subprocess.Popen(
        [sys.executable, "-m", "ddpm_lab", *words], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    assert started.stderr is not None
    assert any("starting" in line for line in started.stderr)
    family: list[int] = []
    while len(family) < 3:  # what forks, what removes, and a rank
        family = [child.pid for child in psutil.Process(started.pid).children(recursive=True)]
        time.sleep(0.05)
    started.terminate()
    rest = started.stderr.read()
    ended = time.monotonic()
    started.stderr.close()
    assert started.wait(60) == 143, rest
    assert "ddpm-lab: stopped; every complete set is in the ledger, the same command goes on" in rest
    while alive(family) and time.monotonic() - ended < 3:  # the server of forks, which sees that its parent has gone
        time.sleep(0.05)
    assert alive(family) == []
