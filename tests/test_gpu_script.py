"""The script for a GPU machine: its steps in order and in time, and what it brings back."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddpm_lab.ledger import PUBLISHED, Ledger
from ddpm_lab.reports import published

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "gpu.sh"
# Commands of the lab alone, in place of a Python that has them: so many GPUs, and what takes long or fails.
PYTHON = """#!/bin/sh
case "$*" in
  *device_count*) echo {gpus} ;;
  *hypothesis*) exit 1 ;;
  *"{slow}"*) exec sleep 60 ;;
  *"{failing}"*) echo no luck >&2; exit 1 ;;
esac
"""


def run(folder: Path, *words: str, python: str = sys.executable) -> tuple[int, dict[str, str], str]:
    """Exit code, what is said of each step by its name, and the end."""
    command = [str(SCRIPT), "--output-dir", str(folder / "results"), *words]
    environment = os.environ | {"PYTHON": python, "DDPM_LAB_MEASURING_LOCK": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    steps = re.findall(r"^ *\d+ s  (\S+) +(.*)$", done.stdout, re.MULTILINE)
    return done.returncode, dict(steps), done.stdout.partition("\nFailed")[2] + done.stderr


def python(folder: Path, *, gpus: int = 1, slow: str = "nothing is", failing: str = "nothing does") -> str:
    (file := folder / "python").write_text(PYTHON.format(gpus=gpus, slow=slow, failing=failing))
    file.chmod(0o755)
    return str(file)


def test_what_fails_or_takes_too_long_is_told_and_all_else_is_done_once(tmp_path: Path) -> None:
    code, steps, said = run(tmp_path, python=python(tmp_path, failing="run amp --network seed --preset quick"))
    assert (code, "seed_amp. Not finished: none" in said) == (1, True)
    assert "no luck" in steps.pop("seed_amp")
    assert {step.partition(",")[0] for step in steps.values()} == {"ok"}
    assert {"check", "train", "attention", "seed_levers", "seed_peers"} < steps.keys()
    assert "seed_multi_gpu" not in steps, "of one GPU"

    slow = python(tmp_path, gpus=2, slow="run multi_gpu --network seed")
    code, again, said = run(tmp_path, "--minutes", "0.12", python=slow)
    assert (code, "Failed: none" in said) == (1, False)
    assert {again[name] for name in ("images", "check", "attention")} == {"finished before"}
    assert again["seed_amp"].startswith("ok"), "all had their time, so measurements begin anew"
    assert again["seed_multi_gpu"].startswith("stopped after")
    assert again["seed_exchange"] == "no time left"
    assert run(tmp_path, python=python(tmp_path, gpus=0))[0] == 2
    assert run(tmp_path, "--minute", "3")[0] == 2


@pytest.mark.slow
def test_the_folder_of_a_dry_run_is_one_to_publish(tmp_path: Path) -> None:
    words, results = ("--device", "cpu"), tmp_path / "results"
    code, steps, _ = run(tmp_path, *words, "--minutes", "0")
    assert (code, set(steps.values())) == (1, {"no time left"})
    (finished,) = (tmp_path / "results.work").glob("finished-cpu-*")
    for name in steps.keys() - {"images", "attention", "tiny_profile"}:
        (finished / name).touch()
    code, steps, _ = run(tmp_path, *words, "--minutes", "9")
    assert code == 0, steps
    assert "EFFICIENT_ATTENTION" in (results / "logs" / "attention.log").read_text()
    assert {r.experiment for r in Ledger(results / "ledger.jsonl").read()[0]} == {"profile"}
    assert published.publish([results / "ledger.jsonl"], None, tmp_path) == [], "no page shows a figure yet"
    (ledger,) = (tmp_path / PUBLISHED).iterdir()
    (tmp_path / "README.md").write_text(f"![]({published.FIGURES.as_posix()}/{ledger.stem}/01_profile.png)")
    assert [path.stem for path, _ in published.publish([ledger], None, tmp_path)] == ["01_profile"]
    assert published.check(tmp_path) == []
