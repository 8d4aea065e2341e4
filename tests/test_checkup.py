"""The check-up: what is missing is found, named, and what it would add is said."""

import os
import shutil
import sys
import sysconfig
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from ddpm_lab.cli.check import Item, checkup
from ddpm_lab.measure import hardware


def items(output: Path) -> dict[str, Item]:
    found = checkup(output)
    named = {item.name: item for item in found}
    assert len(named) == len(found)
    return named


def test_this_machine_can_run_the_lab(tmp_path: Path) -> None:
    found = items(tmp_path)
    assert all(item.present for item in found.values() if item.needed)
    assert {name for name, item in found.items() if item.needed} >= {"Linux", "torch", "numpy", "output folder"}
    assert all(item.detail and item.adds for item in found.values())
    assert not any("\n" in item.detail + item.adds for item in found.values())


def test_nothing_is_changed(tmp_path: Path) -> None:
    assert items(tmp_path / "not" / "there")["output folder"].present
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("missing", "needed"), [("torch", True), ("matplotlib", False), ("PIL", True)])
def test_a_missing_package_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str, needed: bool
) -> None:
    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *a: None if name == missing else real(name, *a))
    item = items(tmp_path)[missing]
    assert (item.present, item.needed, item.detail) == (False, needed, "missing")
    assert "make setup" in item.adds


def test_without_a_compiler_notebook_05_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    found = items(tmp_path)
    for name, package in (("C++ compiler", "g++"), ("Python headers", "python3-dev")):
        assert not found[name].present
        assert not found[name].needed
        assert "notebook 05" in found[name].adds
        assert f"apt install {package}" in found[name].adds


def test_another_platform_or_python_cannot_run_the_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(sys, "version_info", (3, 14, 0, "final", 0))
    found = items(tmp_path)
    for name in ("Linux", "Python 3.11 to 3.13"):
        assert (found[name].present, found[name].needed) == (False, True)


def test_gpus_and_cores_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = (hardware.Gpu("Card X", "GPU-1", 80 << 30), hardware.Gpu("Card Y", "GPU-2", 24 << 30))
    monkeypatch.setattr(hardware, "gpus", lambda: cards)
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    found = items(tmp_path)
    assert found["NVIDIA GPU"].present
    assert found["NVIDIA GPU"].detail == "Card X (80 GiB), Card Y (24 GiB)"
    assert not found["two ranks"].present


def test_a_folder_that_cannot_be_written_is_needed_and_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    item = items(tmp_path / "results")["output folder"]
    assert (item.present, item.needed) == (False, True)
    assert str(tmp_path / "results") in item.detail
    assert "--output-dir" in item.adds


def test_free_space_is_that_of_the_nearest_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    real = shutil.disk_usage

    def disk_usage(path: Path) -> Any:
        asked.append(path)
        return real(path)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    items(tmp_path / "a" / "b")
    assert asked == [tmp_path]
