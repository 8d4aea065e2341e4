"""A reader that goes away ends a command without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


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
