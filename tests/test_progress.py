"""Progress: lines where a person or a file can see them, not more often than they can be read."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpm_lab.measure import progress as module
from ddpm_lab.measure.progress import FILE_VARIABLE, Progress

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets; no notebook and no file, unless a test says so."""
    clock = [1000.0]
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


def test_lines_come_once_a_second_and_say_how_long_it_still_takes(capsys: Captured, now: list[float]) -> None:
    progress = Progress("amp")
    for tenth in range(35):
        now[0] = 1000.0 + tenth / 10
        progress(f"line {tenth}")
    assert capsys.readouterr().err.splitlines() == [f"amp: line {n}" for n in (0, 10, 20, 30)]
    now[0] = 1000.0
    progress.expect(60)
    for now[0] in (1000.0, 1030.0):
        progress.always("turn")
    assert capsys.readouterr().err.splitlines() == ["amp: about 60 s left; turn", "amp: about 30 s left; turn"]


def test_a_file_receives_every_line_also_when_nothing_is_shown(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "progress"))
    quiet = Progress("amp", quiet=True)
    quiet.always("one\r\n\x1b[2J\u2028")
    quiet.done("two")
    assert (tmp_path / "progress").read_text() == "one\\r\\n\\x1b[2J\\u2028\ntwo\n", "one line, whatever it holds"
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "no such folder" / "progress"))
    Progress("amp").always("one")
    assert capsys.readouterr().err == "amp: one\n", "a file that cannot be written stops nothing"


def test_lines_replace_each_other_in_a_notebook_and_on_a_terminal_unless_they_stay(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[str, str]] = []

    def display(data: dict[str, str], **_: Any) -> Any:
        shown.append(("new", data["text/plain"]))
        return SimpleNamespace(update=lambda data, **_: shown.append(("update", data["text/plain"])))

    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=object))
        patch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
        progress = Progress("amp")
        for show, text in (
            (progress.always, "1"),
            (progress.always, "2"),
            (progress.done, "3"),
            (progress.always, "4"),
        ):
            show(text)
    assert shown == [("new", "1"), ("update", "2"), ("update", "3"), ("new", "4")]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress("amp")
    progress.stay("lost: " + "x" * 300)
    progress.always("y" * 300)
    assert [len(line) > 200 for line in capsys.readouterr().err.split("\n")] == [True, False]
