"""Progress: lines where a person or a file can see them, not more often than they can be read."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpm_lab.measure.progress import FILE_VARIABLE, Progress


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No notebook and no file, unless a test says so."""
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)


def test_lines_that_come_faster_than_once_a_second_are_left_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = Progress("amp")
    for tenth in range(35):
        now = 100.0 + tenth / 10
        progress(f"line {tenth}")
    assert capsys.readouterr().err.splitlines() == [f"amp: line {n}" for n in (0, 10, 20, 30)]


def test_a_file_receives_every_line_also_when_nothing_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "progress"))
    quiet = Progress("amp", quiet=True)
    quiet.always("one")
    quiet.done("two")
    assert (tmp_path / "progress").read_text() == "one\ntwo\n"
    assert capsys.readouterr() == ("", "")


def test_a_file_that_cannot_be_written_stops_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "no such folder" / "progress"))
    Progress("amp").always("one")
    assert capsys.readouterr().err == "amp: one\n"


def test_in_a_notebook_one_output_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, dict[str, str]]] = []

    def display(data: dict[str, str], **_: Any) -> Any:
        shown.append(("new", data))
        return SimpleNamespace(update=lambda data, **_: shown.append(("update", data)))

    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    progress = Progress("amp")
    progress.always("one")
    progress.always("two")
    progress.done("three")
    assert [(kind, data["text/plain"]) for kind, data in shown] == [
        ("new", "one"),
        ("update", "two"),
        ("update", "three"),
    ]


def test_every_line_says_how_long_it_still_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, clock = Progress("amp"), [1000.0]
    monkeypatch.setattr("ddpm_lab.measure.progress.time.monotonic", lambda: clock[-1])
    progress.expect(60)
    for now in (1000.0, 1030.0, 1058.0, 1070.0):
        clock.append(now)
        progress.always("turn")
    progress.expect(None)
    progress.always("turn")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "amp: about 60 s left; turn",
        "amp: about 30 s left; turn",
        "amp: nearly done; turn",
        "amp: takes longer than forecast; turn",
        "amp: turn",
    ]


def test_a_line_that_stays_is_whole_and_the_next_one_comes_below_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress("amp")
    progress.always("turn 1")
    progress.stay("lost: " + "x" * 300)
    progress.always("turn 2")
    shown = capsys.readouterr().err
    assert "x" * 300 + "\n" in shown
    assert shown.endswith("amp: turn 2")
