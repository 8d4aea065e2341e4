"""SIGTERM ends a run as Ctrl-C does: with a sentence, after its ranks, and what was measured stays.

A reader that goes away ends a command without a word.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from conftest import alive


@pytest.mark.slow
def test_ranks_are_gone_before_the_run_is(tmp_path: Path) -> None:
    words = ["run", "multi_gpu", "--preset", "smoke", "--world-sizes", "1", "--network", "tiny", "--output-dir", "out"]
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
    assert "ddpm-lab: stopped;" in rest
    while alive(family) and time.monotonic() - ended < 3:  # the server of forks, which sees that its parent has gone
        time.sleep(0.05)
    assert alive(family) == []


@pytest.mark.parametrize(
    ("words", "buffered", "closed"),
    [
        ("summary a.out", "", ("stdout",)),  # written at once, in the middle of the command
        ("--help", "1", ("stdout",)),  # written at its end
        ("summary none.out", "1", ("stdout", "stderr")),
    ],
)
def test_nobody_reads_on(tmp_path: Path, words: str, buffered: str, closed: tuple[str, ...]) -> None:
    """As in ``ddpm-lab ... | head -1``, or with ``2>&1``."""
    (tmp_path / "a.out").write_text('{"ddpm_lab_runs": [{"seconds": 5.0}]}\n')
    reader, writer = os.pipe()
    os.close(reader)
    out, err = (writer if name in closed else subprocess.PIPE for name in ("stdout", "stderr"))
    command = [sys.executable, "-m", "ddpm_lab", *words.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": "" if buffered else "1"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, stdout=out, stderr=err, text=True, check=False)
    os.close(writer)
    assert ended.returncode == 141
    assert not ended.stderr
