"""The heartbeat that a parent reads while a rank writes it."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

from ddpm_lab.measure.process import BEAT, Heartbeat


def _write(path: Path, seconds: float) -> None:
    beat = Heartbeat(path)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        beat.steps += 1
        beat.mark("forward" if beat.steps % 2 else "backward")


def _fresh(path: Path) -> Heartbeat:
    path.write_bytes(BEAT.pack(time.monotonic(), 0, 0, b"start"))
    return Heartbeat(path)


def test_a_reader_never_sees_half_a_mark(tmp_path: Path) -> None:
    """A torn mark would look like a rank that has been silent since the machine started."""
    beat = _fresh(tmp_path / "beat")
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=(tmp_path / "beat", 2.0))
    writer.start()
    seen = 0
    while writer.is_alive():
        said = beat.read()
        assert time.monotonic() - said.seconds < 30
        assert said.phase in ("start", "forward", "backward")
        assert said.marks == said.steps
        seen = max(seen, said.steps)
    writer.join()
    assert writer.exitcode == 0
    assert seen > 1000


def test_a_touch_keeps_what_the_rank_said(tmp_path: Path) -> None:
    beat = _fresh(tmp_path / "beat")
    beat.steps = 7
    beat.mark("a phase with a name that is too long")
    before = beat.read()
    beat.touch()
    after = beat.read()
    assert after[1:] == before[1:] == (7, 1, "a phase with a name that"[:24])
    assert after.seconds >= before.seconds
