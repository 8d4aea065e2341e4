"""The command line: help everywhere, refusals in one line, and no package that a command does not need."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import records as make
from conftest import Call

from ddpm_lab import __version__
from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.data.synthetic import write_folder
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.questions import planned, planning

COMMANDS = (
    *("check", "prepare", "run", "compare", "strategy", "bottleneck", "benchmark", "summary"),
    *("train", "sample", "rank", "submit", "collect", "recommend"),
    *("report", "figures"),
)


# --- help ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_has_help(call: Call, command: str) -> None:
    code, out, err = call(*command.split(), "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: ddpm-lab {command}")
    described = out.partition("options:")[2].splitlines()
    for line, following in zip(described, [*described[1:], ""], strict=True):
        if line.strip().startswith("-"):
            assert line.strip().split("  ", 1)[1:] or following.startswith(" " * 20), f"{line} is not described"


def test_the_overview_names_every_command(call: Call) -> None:
    code, out, _ = call("--help")
    assert code == 0
    listed = re.findall(r"^ {4}(\w+)", out, re.MULTILINE)
    assert set(listed) >= {command.split()[0] for command in COMMANDS}
    assert call("--version")[1] == f"ddpm-lab {__version__}\n"


def test_the_module_runs_like_the_command() -> None:
    shown = subprocess.run([sys.executable, "-m", "ddpm_lab", "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"ddpm-lab {__version__}\n"


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", ["COMMAND"]),
        ("dance", ["'dance'", "run"]),
        ("run", ["EXPERIMENT", "--help"]),
        ("run multi_gpu --bands s002", ["--bands", "'s002'", "s000, s001"]),
        ("run multi_gpu --bands good=50%,better=80%,poor=0", ["--bands", "better=80%", "falling"]),
        ("figures --ledger LEDGER --bands good=50%", ["good=50%"]),
        ("run amp --scaling weak", ["--scaling", "amp", "only multi_gpu"]),
        ("run multi_gpu --scaling sideways", ["scaling is 'sideways'", "strong, weak, both"]),
        ("run dance", ["experiment", "'dance'", "multi_gpu"]),
        ("run amp dance", ["experiment", "'dance'"]),
        ("run amp --output-dir ~nosuchuser/a", ["~nosuchuser/a", "no such user", "whole path"]),
        ("run amp --data ~nosuchuser/a --output-dir EMPTY", ["~nosuchuser/a", "no such user"]),
        ("run amp --preset huge", ["preset", "'huge'", "smoke, quick, full"]),
        ("run amp --network huge", ["network", "'huge'", "tiny"]),
        ("run amp --minutes -1", ["minutes", "-1", "from 0"]),
        ("run amp --minutes nan", ["minutes", "nan", "from 0"]),
        ("run amp --minutes ten", ["--minutes", "'ten'"]),
        ("run amp --sets 0", ["sets", "0", "at least 1"]),
        ("run amp --seeds -1", ["seeds", "-1", "at least 0"]),
        ("run amp --images 400", ["images", "400", "give seeds"]),
        ("run workers --seeds 8", ["--seeds", "workers", "multi_gpu, amp"]),
        ("run amp --seed -1", ["seed", "-1", "at least 0"]),
        ("run amp --seed 99999999999999999999", ["seed", "99999999999999999999", "below 2**63"]),
        ("run amp --image-size 30", ["image_size", "30", "multiple of 4"]),
        ("run peers --image-size 30", ["image_size", "30", "network 'seed'", "multiple of 4"]),
        ("run peers --network tiny --parts fp32", ["'fp32'", "the published code", "'tiny'"]),
        ("run amp --image-size 0", ["image_size", "0"]),
        ("run amp --batch-size 0", ["global_batch_size is 0", "at least 1"]),
        ("run multi_gpu --batch-sizes -8", ["global_batch_sizes is -8", "at least 1"]),
        ("run multi_gpu --batch-sizes 3 --world-sizes 1,2", ["3", "2 ranks", "multiple"]),
        ("run amp --lost-scaling", ["--lost-scaling", "amp", "only multi_gpu"]),
        ("run batch_size --batch-size 8", ["--batch-size", "batch_size", "only profile, amp"]),
        ("run profile --world-size 2 --batch-size 3", ["3", "2 ranks", "multiple"]),
        ("run profile amp --batch-size 8 --device cuda", ["'cuda'"]),
        ("run amp --device tpu", ["--device", "'tpu'", "cuda"]),
        ("run amp --device cuda", ["'cuda'", "no GPU is visible", "cpu"]),
        ("run amp --data nowhere", ["nowhere"]),
        ("run amp --data EMPTY", ["EMPTY", "no"]),
        ("run amp --held-out nowhere --data EMPTY", ["nowhere"]),
        ("run amp --output-dir FILE/below", ["FILE/below", "--output-dir"]),
        ("run amp --unknown", ["--unknown", "see ddpm-lab run --help"]),
        ("--unknown check", ["--unknown", "see ddpm-lab --help"]),
        ("train --steps 5 --output-dir DEST --world-size 0", ["world_size is 0"]),
        ("sample nowhere.pt --count 1 --batch-size 0", ["batch_size is 0"]),
        ("strategy --batch-size 0", ["--batch-size is 0"]),
        ("report --preset huge", ["preset", "'huge'"]),
        ("report --minutes 0", ["minutes", "above 0"]),
        ("report --network huge", ["network", "'huge'"]),
        ("report --notebook 99_dance", ["99_dance"]),
        ("report -p no_such_parameter 1", ["no_such_parameter"]),
        ("report --data nowhere", ["nowhere"]),
        ("report --output-dir FILE/below", ["FILE/below"]),
        ("prepare nowhere DEST", ["nowhere"]),
        ("prepare EMPTY DEST", ["EMPTY"]),
        ("prepare synthetic DEST --image-size 0", ["0"]),
        ("prepare synthetic FILE/below", ["FILE/below"]),
        ("run multi_gpu --batch-sizes 7 --preset smoke", ["7 images cannot be shared by 2 ranks", "nothing can be"]),
        ("run multi_gpu --batch-sizes 1 --scaling strong", ["1 image cannot be shared by 2 ranks"]),
        ("run exchange --world-sizes 1", ["world_sizes has 1", "give 2 or more"]),
        ("run all_reduce --world-sizes 1", ["world_sizes has 1", "give 2 or more"]),
        ("run profile --world-sizes 2", ["--world-sizes", "profile", "only multi_gpu, amp"]),
        ("run amp --world-sizes two", ["world_sizes is 'two'"]),
        ("run multi_gpu --world-sizes 1,4", ["4 CPU ranks need 4 cores", "oversubscribe"]),
        ("figures --ledger nowhere.jsonl", ["nowhere.jsonl", "no ledger"]),
        ("figures --ledger TEXT", ["TEXT", "none of its 2 lines is a record"]),
        ("figures --ledger LEDGER --machine cray", ["'cray'", "Example CPU 9000"]),
        ("figures --check --publish", ["--publish", "--check"]),
    ],
)
def test_a_wrong_value_exits_2_with_one_line(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hardware, "gpus", tuple)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "FILE").touch()
    (tmp_path / "TEXT").write_text("# A page\n\nand no record\n")
    Ledger(tmp_path / "LEDGER").append([make.record(RunConfig())])
    given = arguments.split()
    if given[:1] in (["run"], ["report"], ["figures"]) and "--output-dir" not in given:
        given += ["--output-dir", "out"]
    code, out, err = call(*given)
    assert (code, out) == (2, "")
    assert err.startswith("ddpm-lab: ")
    assert err.count("\n") == 1, err
    assert err.endswith("\n")
    for word in words:
        assert word in err
    assert not list(tmp_path.rglob("ledger.jsonl"))


@pytest.mark.parametrize(
    ("typed", "value"),
    [("True", True), ("False", False), ("None", None), ("true", True), ("[1, 2]", [1, 2]), ("seed", "seed")],
)
def test_a_parameter_may_be_typed_as_python_or_json_has_it(
    call: Call, monkeypatch: pytest.MonkeyPatch, typed: str, value: object
) -> None:
    seen: dict[str, Any] = {}

    def report(**how: Any) -> SimpleNamespace:
        seen.update(how)
        return SimpleNamespace(exit_code=0)

    monkeypatch.setattr("ddpm_lab.reports.report.report", report)
    assert call("report", "-p", "published", typed)[0] == 0
    assert seen["parameters"] == {"published": value}
    assert type(seen["parameters"]["published"]) is type(value)


def test_a_defect_keeps_its_traceback_and_an_interrupt_says_how_to_go_on(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(planning, "plan_question", broken)
    error: BaseException = ValueError("a defect")
    with pytest.raises(ValueError, match="a defect"):
        call("run", "amp")
    error = KeyboardInterrupt()
    code, _, err = call("run", "amp")
    assert code == 130
    assert "every complete set is in the ledger, the same command goes on" in err

    def terminated(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(planning, "plan_question", terminated)
    before = signal.getsignal(signal.SIGTERM)
    code, _, err = call("run", "amp")
    assert code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert "the same command goes on" in err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("multi_gpu --world-sizes 2 --batch-sizes 64", {"world_sizes": [2], "global_batch_sizes": [64]}),
        ("multi_gpu --scaling weak", {"scaling": "weak"}),
        ("multi_gpu --world-sizes 1,2,4 --oversubscribe", {"world_sizes": [1, 2, 4], "oversubscribe": True}),
        ("torch_compile --world-sizes 2 --batch-size 64", {"world_sizes": [2], "global_batch_size": 64}),
        ("workers --batch-size 8 --worker-counts 0,1", {"global_batch_size": 8, "worker_counts": [0, 1]}),
        ("peers --parts fp32,levers", {"parts": ["fp32", "levers"]}),
        ("amp --minutes 4 --sets 3 --seed 5", {"minutes": 4.0, "sets": 3, "seed": 5}),
        ("amp workers --minutes 4", {"minutes": 2.0}),
        ("amp --skip-bad --held-out h --data d --network seed", {"skip_bad": True, "held_out": "h", "data": "d"}),
        ("amp", {"preset": "quick", "data": "synthetic", "device": None, "network": None, "minutes": None}),
    ],
)
def test_options_reach_the_experiment(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, expected: dict[str, Any]
) -> None:
    seen: dict[str, Any] = {}

    def plan_question(name: str, **settings: Any) -> None:
        seen.update(settings, name=name)
        raise ConfigError("far enough")

    monkeypatch.setattr(planning, "plan_question", plan_question)
    monkeypatch.setattr(hardware, "gpus", tuple)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
    assert call("run", *arguments.split(), "--output-dir", tmp_path)[0] == 2
    assert seen["name"] == arguments.split(maxsplit=1)[0]
    assert {name: seen[name] for name in expected} == expected
    assert ("world_sizes" in seen) == ("world_sizes" in expected)


def test_every_experiment_is_checked_before_the_first_is_measured(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned.Planned, "measure", lambda _: pytest.fail("something was measured"))
    monkeypatch.setattr(hardware, "gpus", tuple)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
    code, _, err = call("run", "amp", "multi_gpu", "--world-sizes", "2", "--batch-size", "5", "--output-dir", tmp_path)
    assert code == 2
    assert "5" in err


@pytest.mark.slow
def test_nothing_completed_exits_1(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Campaign, "run", lambda *_, **__: None)
    code, out, _ = call("run", "profile", "--preset", "smoke", "--output-dir", tmp_path)
    assert code == 1, out


# --- what the commands do --------------------------------------------------------------------------------------------


def test_check_says_whether_the_lab_can_run(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("check", "--output-dir", tmp_path, "--json")
    found = json.loads(out)
    assert (code, found["can_run"]) == (0, True)
    assert {item["name"] for item in found["items"]} >= {"torch", "NVIDIA GPU", "C++ compiler"}
    code, out, _ = call("check", "--output-dir", tmp_path)
    assert code == 0
    assert out.endswith("The lab can run here.\n")
    assert len(out.splitlines()) == len(found["items"]) + 1


def test_check_exits_1_where_the_lab_cannot_run(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    code, out, _ = call("check")
    assert code == 1
    assert [line.split(":")[0] for line in out.splitlines() if line.startswith("MISSING")] == ["MISSING  Linux"]
    assert "cannot run here" in out


def test_prepare_decodes_a_folder(call: Call, tmp_path: Path) -> None:
    write_folder(tmp_path / "images", count=8)
    code, out, _ = call("prepare", tmp_path / "images", tmp_path / "prepared", "--json")
    assert code == 0
    assert json.loads(out)["count"] == 8
    (tmp_path / "images" / "train" / "9.png").write_bytes(b"no image")
    code, out, err = call("prepare", tmp_path / "images", tmp_path / "again")
    assert (code, out) == (2, "")
    assert "9.png" in err.splitlines()[-1]
    code, out, _ = call("prepare", tmp_path / "images", tmp_path / "again", "--skip-bad")
    assert code == 0
    assert "left out: " in out
    assert "9.png" in out


def test_figures_of_what_is_no_ledger_of_questions_are_refused(call: Call, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("hi\n")
    code, out, err = call("figures", "--ledger", tmp_path / "file.txt", "--output-dir", tmp_path)
    assert (code, out) == (2, "")
    assert "file.txt is no ledger, its only line is not a record" in err
    Ledger(tmp_path / "compare.jsonl").append(make.sets({}, experiment="compare", count=1, turns=2))
    code, out, err = call("figures", "--ledger", tmp_path / "compare.jsonl", "--output-dir", tmp_path)
    assert (code, out) == (2, "")
    assert "holds no records of a question with figures" in err


def test_figures_are_rebuilt_published_and_checked(call: Call, tmp_path: Path) -> None:
    ledger = tmp_path / "own.jsonl"
    Ledger(ledger).append(make.sets({"bf16": (RunConfig(precision="bf16"), 1.5)}))
    code, out, _ = call("figures", "--ledger", ledger, "--output-dir", tmp_path, "--json")
    found = {row["experiment"]: row for row in json.loads(out)}
    assert code == 0
    assert set(found) == {"amp", "recommendation"}
    assert found["amp"]["verdict"] == "faster"
    assert Path(found["amp"]["figure"]) == tmp_path / "image_output" / "03_amp.png"
    assert Path(found["amp"]["figure"]).is_file()
    assert call("figures", "--check", "--output-dir", tmp_path)[0] == 1
    code, out, _ = call("figures", "--ledger", ledger, "--output-dir", tmp_path, "--publish")
    assert code == 0
    assert found["amp"]["claim"] in out
    assert call("figures", "--check", "--output-dir", tmp_path)[:2] == (
        0,
        "every published figure matches the published records\n",
    )
    next((tmp_path / "image_output" / "published").rglob("03_amp.png")).unlink()
    code, out, err = call("figures", "--check", "--output-dir", tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("ddpm-lab: ")
    assert "03_amp.png is missing" in err
