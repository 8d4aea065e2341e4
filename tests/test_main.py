"""The command line: help, refusals in one line, options that reach what they are meant for, and packages not needed."""

import errno
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import records as make
from conftest import Call

from ddpm_lab import __version__
from ddpm_lab.__main__ import GROUPS, _parser
from ddpm_lab.checks import ConfigError
from ddpm_lab.config import COMMAND, RunConfig
from ddpm_lab.files import CHECKOUT
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.questions import planning

COMMANDS = [name for names in GROUPS.values() for name in names]


def test_every_command_and_option_has_help_and_the_overview_names_all(call: Call) -> None:
    overview = call("--help")[1]
    assert [line.split()[0] for line in overview.splitlines() if line.startswith("    ")][: len(COMMANDS)] == COMMANDS
    for name in COMMANDS:
        (commands,) = (a.choices for a in _parser([name])._actions if isinstance(a.choices, dict))
        assert all(action.help for action in commands[name]._actions), name
        code, out, err = call(name, "--help")
        assert (code, err) == (0, "")
        assert f"example: ddpm-lab {name}" in out
    amp, every = call("run", "amp", "--help")[1], call("run", "--help")[1]
    own = ("--precisions", "--scaling", "--bands", "--worker-counts")
    assert [option in amp for option in own] == [True, False, False, False]
    assert all(option in every for option in own)
    assert call("--version") == (0, f"ddpm-lab {__version__}\n", "")


REFUSED = {
    "": ["COMMAND"],
    "rnu amp": ["'rnu'", "did you mean run?"],
    "run": ["EXPERIMENT"],
    "run ampp": ["'ampp'", "multi_gpu", "did you mean amp?"],
    "run amp --presett smoke": ["--presett", "did you mean --preset?"],
    "run amp --seeds 1001": ["seeds is 1001", "at most 1000"],
    "run amp --device cuda": ["'cuda'", "no GPU is visible"],
    "run multi_gpu --bands good=50%,better=80%,poor=0": ["--bands", "better=80%"],
    "run amp --output-dir ~nosuchuser/a": ["~nosuchuser/a"],
    "run amp --output-dir FILE/below": ["FILE/below", "--output-dir"],
    "run amp --data=": ["a path is empty"],
    "rank": ["run, train, sample"],
    "run amp --seed 99999999999999999999": ["seed", "99999999999999999999"],
    "run amp multi_gpu --world-sizes 2 --batch-size 5": ["5", "2 ranks"],  # before amp is measured
    "run amp --data EMPTY": ["EMPTY"],
    "run strategy amp": ["strategy", "alone"],
    "run strategy --preset smoke": ["--preset"],
    "figures --ledger RECORDS --output-dir /proc/below": ["/proc/below"],
    "compare mine:before mine:after --per-step 8": ["--per-step"],
    "compare TIME.toml TEXT.toml": ["TIME.toml", "options", "datetime.time"],
    "compare TEXT.toml TIME.toml": ["TEXT.toml", "options", "'text'"],
    "compare DEEP.toml TEXT.toml": ["DEEP.toml"],
    "summary DIGITS.toml DIGITS.toml": ["DIGITS.toml", "4300 digits"],
    f"summary {'x' * 5000}.jsonl": ["File name too long"],
    "train --steps 5 --data EMPTY --output-dir EMPTY/run": ["EMPTY/run lies inside the image folder"],
    "train --steps 5 --output-dir DEST --config none.toml": ["--config: cannot read"],
    "train --steps 5 --output-dir DEST --config /dev/zero": ["--config: cannot read"],
    "summary /dev/zero": ["cannot use /dev/zero: File too large"],
    "sample none.pt --count 3": ["none.pt"],
    "prepare synthetic FILE/below": ["FILE/below"],
    "figures --ledger TEXT": ["TEXT", "2 lines"],
    "figures --check --publish": ["--publish", "--check"],
    "recommend --minutes 0.1": ["minutes is 0.1"],
    "recommend --minutes=nan": ["minutes is nan"],
    "recommend --minutes=-5": ["minutes is -5.0"],
    "recommend --only precision": ["--only is 'precision'"],
    "benchmark --ledger LEDGER --batch-sizes 16": ["--batch-sizes"],
    "benchmark --machine here": ["--ledger"],
    "benchmark --device gpu": ["'gpu'", "cpu, cuda"],
    "check --instrument --device gpu": ["'gpu'", "cpu, cuda"],
    "benchmark --network=": ["network is ''"],
    "benchmark --output-dir ''": ["a path is empty"],
    "sample none.pt --count 3 --output-dir ''": ["a path is empty"],
    "run multi_gpu --bands=": ["--bands is ''"],
    "compare mine:a mine:b --threshold=": ["--threshold is ''"],
    "compare mine:a mine:b --resolution=": ["--resolution is ''"],
    "compare mine:a mine:b --gate --markdown=": ["a path is empty"],
    "run amp --workload __main__:make": ["'__main__'"],
    "compare WORK.toml GRID.toml": ["WORK.toml holds a command line"],
    "compare 'python a.py --x=a:b' mine:step --per-step 4": ["python a.py --x=a:b", "two of a kind"],
    "compare 'python a.py' 'torchrun a.py' --cores 1": ["cores is 1", "chooses its threads itself"],
    "compare mine:a mine:b --gate --markdown none/page.md": ["none/page.md", "--markdown"],
    "report --notebook CELL.ipynb --output-dir out": ["CELL.ipynb is no notebook"],
}


@pytest.mark.usefixtures("two_cores")
def test_a_wrong_value_exits_2_with_one_line(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").touch()
    (tmp_path / "TEXT").write_text("# A page\n\nand no record\n")
    Ledger(tmp_path / "LEDGER").append([make.record(RunConfig())])
    Ledger(tmp_path / "RECORDS").append(make.sets({"bf16": (replace(RunConfig(), precision="bf16"), 1.6)}))
    tables = {"DEEP": f"a = {'[' * 100_000}", "TIME": "[options]\nq = 07:32:00", "TEXT": 'options = "text"'}
    tables |= {"DIGITS": f"seed = {'1' * 5000}", "GRID": "grid = 1"}
    tables |= {"WORK": f'workload = "{COMMAND}"\n[options]\ncommand = "touch x"'}
    for name, text in tables.items():
        (tmp_path / f"{name}.toml").write_text(text)
    (tmp_path / "CELL.ipynb").write_text('{"cells": [5], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}')
    for arguments, words in REFUSED.items():
        given = shlex.split(arguments)
        if given[:1] in (["run"], ["figures"], ["recommend"], ["benchmark"]) and "--output-dir" not in given:
            given += ["--output-dir", "out"]
        code, out, err = call(*given)
        assert (code, out) == (2, ""), arguments
        assert err.startswith("ddpm-lab: ")
        assert err.count("\n") == 1, err
        for word in words:
            assert word in err, arguments
    assert not [path for path in tmp_path.rglob("ledger.jsonl") if path.is_file()]
    assert not (tmp_path / "DEST").exists()


def test_a_parameter_may_be_typed_as_python_has_it(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    made = SimpleNamespace(exit_code=0)
    monkeypatch.setattr("ddpm_lab.reports.report.report", lambda **how: seen.update(how) or made)
    values = {"True": True, "None": None, "[1, 2]": [1, 2], "(1, 2)": [1, 2], "1.5": 1.5, "seed": "seed"}
    for typed, value in (values | {text: text for text in ("3j", "...", "{1}", "b'a'")}).items():
        assert call("report", "-p", "published", typed)[0] == 0
        assert seen["parameters"] == {"published": value}
        assert type(seen["parameters"]["published"]) is type(value)


OUTSIDE: dict[BaseException, str] = {
    OSError(errno.ENOSPC, "No space left on device", "/a/b"): "/a/b: No space left on device",
    OSError(errno.ENOSPC, "No space left on device", "/from", None, "/to"): "cannot use /to: No space left on device",
    PermissionError(errno.EACCES, "Permission denied", "/a\nb"): "/a\\nb: Permission denied",
    MemoryError(): "out of memory",
    RuntimeError("can't start new thread"): "out of memory or processes",
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"): "out of memory or processes",
}


def test_a_defect_keeps_its_traceback_and_a_signal_is_an_exit_code(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(planning, "plan_question", broken)
    error: BaseException = ValueError("a defect")
    with pytest.raises(ValueError, match="a defect"):
        call("run", "amp")
    for planted, words in OUTSIDE.items():
        error = planted
        code, out, err = call("run", "amp")
        assert (code, out, err.count("\n")) == (2, "", 1), err
        assert words in err
        planted.add_note("where in a rank")
        assert "in a rank" not in call("run", "amp")[2]
        err = call("run", "amp", "--debug")[2]
        assert err.startswith("Traceback")
        assert words in err.splitlines()[-1]
        assert "where in a rank" in err
    error = KeyboardInterrupt()
    assert call("run", "amp")[0] == 130
    monkeypatch.setattr(planning, "plan_question", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert call("run", "amp")[0] == 143
    assert signal.getsignal(signal.SIGTERM) == before


FULL = {
    "run amp --preset smoke": "trace_output",
    "report --preset smoke": "reports",
    "figures --ledger RECORDS": "image_output",
    "train --steps 1 --no-probe --network tiny --image-size 8 --data DATA": "checkpoints",
}


@pytest.mark.usefixtures("two_cores")
def test_a_full_disk_is_told_before_anything_is_measured(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit to the size of files fails where a full disk does: when something is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Campaign, "measure", lambda _: pytest.fail("something was measured"))
    Ledger(tmp_path / "RECORDS").append(make.sets({"bf16": (replace(RunConfig(), precision="bf16"), 1.6)}))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for arguments, place in FULL.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, before[1]))
        try:
            code, out, err = call(*arguments.replace("DATA", str(data)).split(), "--output-dir", "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (code, out) == (2, ""), err
        assert place in err
        assert "Traceback" not in err
        assert err.splitlines()[-1].startswith("ddpm-lab: ")


@pytest.mark.slow
def test_a_module_of_the_working_folder_hides_no_library(tmp_path: Path) -> None:
    """The process that starts ranks imports libraries, in whatever folder one works."""
    (tmp_path / "numpy.py").write_text("raise RuntimeError('the wrong numpy')")
    loops = "\n".join(f"def {name}():\n    while True:\n        time.sleep(0.001)\n        yield" for name in "ab")
    (tmp_path / "mine.py").write_text(f"import time\n{loops}\n")
    command = "import sys; del sys.path[0]; from ddpm_lab.__main__ import main; sys.exit(main(sys.argv[1:]))"
    words = ["compare", "mine:a", "mine:b", "--sets", "1", "--minutes", "0.1", "--output-dir", "out"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    run = [sys.executable, "-c", command, *words]
    done = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


REACHED: dict[str, dict[str, Any]] = {
    "multi_gpu --world-sizes 1,2,4 --batch-sizes 64 --oversubscribe": {
        **{"world_sizes": [1, 2, 4], "global_batch_sizes": [64], "oversubscribe": True}
    },
    "torch_compile --world-sizes 2 --batch-size 64": {"world_sizes": [2], "global_batch_size": 64},
    "peers --parts peers,levers": {"parts": ["peers", "levers"]},
    "amp --minutes 4 --sets 3 --seed 5": {"minutes": 4.0, "sets": 3, "seed": 5},
    "amp workers --minutes 4": {"minutes": 2.0},
    "amp --skip-bad --held-out h --data d --network seed": {"skip_bad": True, "held_out": "h", "data": "d"},
    "bottleneck --precision bf16 --only fp32": {"precision": "bf16", "only": ["fp32"]},
}


@pytest.mark.usefixtures("two_cores")
def test_options_reach_the_experiment(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def plan_question(name: str, **settings: Any) -> None:
        seen.update(settings, name=name)
        raise ConfigError("far enough")

    monkeypatch.setattr(planning, "plan_question", plan_question)
    for arguments, expected in REACHED.items():
        seen.clear()
        assert call("run", *arguments.split(), "--output-dir", tmp_path)[0] == 2
        assert seen["name"] == arguments.split()[0]
        assert {name: seen.get(name) for name in expected} == expected
        assert not {"preset", "world_sizes"} & (seen.keys() - expected.keys()), "what is not given keeps its default"


# --- packages that are not there ---

# As if the packages were not installed: a finder that raised would also upset those who only ask whether they are.
BLOCKER = """
import sys
from importlib.machinery import PathFinder
class Absent(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {blocked!r} else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Absent
"""


def without(folder: Path, *packages: str) -> dict[str, str]:
    """Environment in which every new process finds these packages unimportable."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(BLOCKER.format(blocked=set(packages)))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(CHECKOUT)])}


def lab(folder: Path, environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    """What a command of the lab says there."""
    command = [sys.executable, "-m", "ddpm_lab", *words]
    how: dict[str, Any] = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
    return subprocess.run(command, **how, check=False, timeout=600)


@pytest.mark.slow
def test_the_half_that_explains_needs_no_torch_and_no_jupyter(tmp_path: Path) -> None:
    environment = without(tmp_path / "blocked", "torch", "torchvision", "nbformat", "papermill")
    Ledger(tmp_path / "l.jsonl").append(make.sets({"bf16": (RunConfig(precision="bf16"), 1.5)}))
    shown = lab(tmp_path, environment, "figures", "--ledger", "l.jsonl", "--output-dir", str(tmp_path), "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    found = {row["experiment"]: row for row in json.loads(shown.stdout)}
    assert (set(found), found["amp"]["verdict"]) == ({"amp", "recommendation"}, "faster")
    assert Path(found["amp"]["figure"]).samefile(tmp_path / "image_output" / "03_amp.png")
    assert "Example CPU 9000" in found["amp"]["hardware"]
    commands = {"run amp": "torch", "train --steps 9 --output-dir run": "torch", "report --output-dir .": "nbformat"}
    for words, package in commands.items():
        shown = lab(tmp_path, environment, *words.split())
        assert (shown.returncode, shown.stderr.count("\n")) == (2, 1), shown.stderr
        assert shown.stderr.startswith(f"ddpm-lab: {package} is not installed here")


@pytest.mark.slow
def test_the_half_that_measures_needs_no_scipy(tmp_path: Path) -> None:
    environment = without(tmp_path / "blocked", "scipy", "matplotlib", "papermill", "IPython")
    shown = lab(tmp_path, environment, *["run", "amp", "--preset", "smoke", "--json", "--output-dir", "out"])
    assert shown.returncode == 0, shown.stderr
    (answer,) = json.loads(shown.stdout)
    ledger = tmp_path / "out" / "trace_output" / "ledger.jsonl"
    assert (answer["ledger"], answer["measured_sets"]) == (str(ledger), 1)
    assert "ddpm-lab figures --ledger" in answer["finding"]
    records, damaged = Ledger(ledger).read()
    assert not damaged
    measured = [(r.label, r.status, r.reason, bool(r.windows)) for r in records if r.set_id]
    assert measured == [(label, "ok", None, True) for label in ("fp32", "fp32 again", "bf16")]
