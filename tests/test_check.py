"""The command check: what is missing is found, named, and what it would add is said."""

import json
import os
import shutil
import sys
import sysconfig
from importlib import util
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import Call

from ddpm_lab.cli.check import NEEDED, Item, checkup
from ddpm_lab.measure import hardware


def items(output: Path) -> dict[str, Item]:
    found = checkup(output)
    named = {item.name: item for item in found}
    assert len(named) == len(found)
    return named


def test_this_machine_can_run_the_lab_and_nothing_is_changed(tmp_path: Path, call: Call) -> None:
    found = items(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []
    assert all(found[name].present for name in NEEDED)
    assert all(item.detail and item.adds and "\n" not in item.detail + item.adds for item in found.values())
    code, out, _ = call("check", "--output-dir", tmp_path, "--json")
    assert (code, json.loads(out)["can_run"]) == (0, True)
    assert {item["name"] for item in json.loads(out)["items"]} == set(found)
    assert call("check", "--output-dir", tmp_path)[1].endswith("The lab can run here.\n")


def test_what_is_missing_is_named_with_what_it_would_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *a: None if name in ("torch", "PIL") else real(name, *a))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    found = items(tmp_path)
    adds = {"torch": "make setup", "PIL": "make setup", "C++ compiler": "g++", "Python headers": "python3-dev"}
    for name, words in adds.items():
        assert (found[name].present, words in found[name].adds) == (False, True)
    assert not found["two ranks"].present


def test_another_platform_or_python_or_a_read_only_folder_cannot_run_the_lab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
    monkeypatch.setattr(os, "access", lambda *_: False)
    code, out, _ = call("check", "--output-dir", tmp_path, "--json")
    missing = [item["name"] for item in json.loads(out)["items"] if item["needed"] and not item["present"]]
    assert (code, missing) == (1, ["Linux", "Python 3.11 to 3.13", "output folder"])


def test_a_folder_that_cannot_be_made_or_is_full_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert items(tmp_path / "below")["output folder"].present
    assert not items(tmp_path / "file" / "below")["output folder"].present
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert not items(tmp_path)["output folder"].present


def test_gpus_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = (hardware.Gpu("Card X", "GPU-1", 80 << 30), hardware.Gpu("Card Y", "GPU-2", 24 << 30))
    monkeypatch.setattr(hardware, "gpus", lambda: cards)
    gpu = items(tmp_path)["NVIDIA GPU"]
    assert (gpu.present, gpu.detail) == (True, "Card X (80 GiB), Card Y (24 GiB)")
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "apt install gcc" in items(tmp_path)["C compiler"].adds, "Triton's"
