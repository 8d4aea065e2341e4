"""What people are told: no foreign text moves a cursor or begins a line, no output that fails is a traceback."""

import ast
import csv
import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import records as make
from conftest import Call
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import ddpm_lab
from ddpm_lab import output as module
from ddpm_lab.__main__ import main
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import table
from ddpm_lab.ledger import Ledger
from ddpm_lab.output import FILE_VARIABLE, Progress, printable, say
from ddpm_lab.questions import gate
from ddpm_lab.questions.ask import answer

JOB = '{"ddpm_lab_runs": [{"seconds": 5.0}]}\n'
FOREIGN = "a\x1b[2J\x07\r\nddpm-lab: all is well\u202e\u2028\x9b1m\udcff\t"


@given(st.text())
def test_what_is_printable_is_one_line_and_nothing_else_changes(text: str) -> None:
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert (printable(text) == text) == text.isprintable()


def test_every_line_is_printed_by_one_function() -> None:
    """What is printed elsewhere could hold anything."""
    found = [
        f"{path.name}:{node.lineno}"
        for path in Path(ddpm_lab.__file__).parent.rglob("*.py")
        if re.search(r"\bprint\(|\bsys\.std", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
    ]
    assert [place.partition(":")[0] for place in found] == ["output.py"], found


def same_lines(text: str) -> None:
    """Assert that no line holds a control character, and none is forged."""
    assert all(line.isprintable() for line in text.split("\n")), ascii(text)
    assert not any(line.lstrip("| ").startswith("ddpm-lab: all is well") for line in text.splitlines())


def test_a_record_that_is_read_holds_only_text_and_is_the_same_run(tmp_path: Path) -> None:
    config = RunConfig(workload="mine:make", options=(("note", FOREIGN),))
    profile = {"unread": [{FOREIGN: [FOREIGN]}]}
    record = make.record(config, label=FOREIGN, reason=FOREIGN, data_name=FOREIGN, profile=profile)
    Ledger(tmp_path / "l.jsonl").append([record])
    (found,), damaged = Ledger(tmp_path / "l.jsonl").read()
    assert (damaged, found.run_id, found.config) == ([], record.run_id, record.config)
    clean = printable(FOREIGN)
    assert [found.label, found.reason, found.data_name] == [clean] * 3
    assert found.profile == {"unread": [{clean: [clean]}]}


@pytest.mark.parametrize("value", ["=1+1", "-1", "@x", "\t=1"])
def test_no_cell_of_a_csv_is_a_formula(value: str) -> None:
    text = table.csv_text([{"a": value, "b": -1.5, "c": None}])
    (row,) = csv.DictReader(io.StringIO(text))
    assert row["a"].lstrip()[0] not in "=+-@"
    assert row["a"].lstrip("'") == printable(value)
    assert (row["b"], row["c"]) == ("-1.5", ""), "numbers stay"


def test_messages_about_foreign_names_are_one_line(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    for i in range(4):
        Image.new("RGB", (8, 8), (i, 0, 0)).save(tmp_path / "images" / f"{i}.png")
    bad = FOREIGN.replace("\x9b", "") + ".png"
    (tmp_path / "images" / bad).write_bytes(b"no image")
    code, out, err = call("prepare", "images", "prepared")
    assert (code, out, err.count("\n")) == (2, "", 1)
    same_lines(err)
    code, out, err = call("prepare", "images", "prepared", "--skip-bad")
    assert (code, out.count("\n"), "left out: " in out) == (0, 2, True), err
    same_lines(out + err)


def test_a_decision_in_markdown_shows_names_as_text() -> None:
    study = make.study(make.sets({"b*c*<i>\n# x": (replace(RunConfig(), precision="bf16"), 1.6)}))
    shown = answer(study)
    text = gate.summary(shown, gate.outcome(shown, 0.03))
    assert "b\\*c\\*\\<i\\>\\\\n\\# x" in text
    assert not [line for line in text.splitlines() if line.startswith("# ")]


# --- outputs that fail -----------------------------------------------------------------------------------------------


def outcome(arguments: list[str], monkeypatch: pytest.MonkeyPatch, **streams: Any) -> int:
    """The exit code of a command with these outputs, whatever ends it."""
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    try:
        return main(arguments)
    except SystemExit as end:
        return int(str(end.code))


@pytest.mark.parametrize("words", ["summary a.out --json", "--version"])
def test_a_full_or_closed_output_is_one_sentence(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.out").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    with open("/dev/full", "w") as full, open("/dev/full", "w") as other:  # noqa: PTH123
        for out, told in ((full, "standard output: No space left"), (None, "standard output is closed")):
            assert outcome(words.split(), monkeypatch, stdout=out, stderr=(said := io.StringIO())) == 2, said.getvalue()
            assert told in said.getvalue()
            assert said.getvalue().count("\n") == 1
        assert outcome(["summary", "nowhere.jsonl"], monkeypatch, stdout=sys.__stdout__, stderr=other) == 2
        assert outcome(["summary", "nowhere.jsonl"], monkeypatch, stderr=None) == 2, "closed, as by 2>&-"
        sys.stderr.close()


def test_an_encoding_that_lacks_characters_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    assert outcome(["--version"], monkeypatch, stdout=io.TextIOWrapper(raw, encoding="ascii", write_through=True)) == 0
    say("\u00d7")
    assert raw.getvalue().endswith(b"\\xd7\n")


@pytest.mark.parametrize(
    ("words", "closed", "code"), [("--help", ["stdout"], 141), ("summary none.out", ["stdout", "stderr"], 2)]
)
def test_nobody_reads_on(tmp_path: Path, words: str, closed: list[str], code: int) -> None:
    """As in ``ddpm-lab ... | head -1``, or with ``2>&1``; messages that nobody reads change no outcome."""
    reader, writer = os.pipe()
    os.close(reader)
    out, err = (writer if name in closed else subprocess.PIPE for name in ("stdout", "stderr"))
    command = [sys.executable, "-m", "ddpm_lab", *words.split()]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, stdout=out, stderr=err, text=True, check=False)
    os.close(writer)
    assert ended.returncode == code
    assert not ended.stderr


# --- progress ---

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that a test sets; no notebook and no file, unless a test says so."""
    clock = [1000.0]
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return clock


@pytest.mark.parametrize(("terminal", "seconds"), [(True, 1), (False, 10)])
def test_lines_come_at_intervals_longer_where_they_stay(
    terminal: bool, seconds: int, now: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = list[str]()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setattr(module, "say", lambda line, **_: shown.append(line))
    now[0] = 1000.0
    progress = Progress("amp")
    for tenth in range(350):
        now[0] = 1000.0 + tenth / 10
        progress(f"line {tenth}")
    assert shown == [f"amp: line {n}" for n in range(10, 350, 10 * seconds)], "the first after a second"


@pytest.mark.usefixtures("now")
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


@pytest.mark.usefixtures("now")
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
        for text in "1234":
            (progress.done if text == "3" else progress.always)(text)
    assert shown == [("new", "1"), ("update", "2"), ("update", "3"), ("new", "4")]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = Progress("amp")
    progress.stay("lost: " + "x" * 300)
    progress.always("y" * 300)
    assert [len(line) > 200 for line in capsys.readouterr().err.split("\n")] == [True, False]
