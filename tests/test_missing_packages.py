"""No command needs a package that it does not use: figures no torch, measuring no scipy."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.ledger import Ledger

CHECKOUT = Path(__file__).resolve().parents[1]

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
