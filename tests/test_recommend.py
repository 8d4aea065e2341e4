"""A search measured for real: what is refused, that it goes on after a kill, and that its answer trains."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Call, alive

from ddpm_lab import experiments
from ddpm_lab.checks import ConfigError
from ddpm_lab.ledger import Ledger
from ddpm_lab.plan import RECOMMENDATION, SEARCH
from ddpm_lab.recommend import recommend
from ddpm_lab.record import RunRecord


@pytest.mark.parametrize("minutes", [0, -5, math.nan, math.inf, True, 0.01])
def test_a_budget_that_makes_no_sense_is_refused(tmp_path: Path, minutes: Any) -> None:
    with pytest.raises(ConfigError, match=r"minutes is .*: (give a number above 0|a search and the sets)"):
        recommend(minutes=minutes, output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"only": {"precision": ["fp64"]}}, "only precision is 'fp64': choose one of fp32, bf16"),
        ({"sets": 0}, "sets is 0"),
        ({"seeds": -1}, "seeds is -1"),
        ({"images": 100}, "images is 100, and without seeds"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"preset": "huge"}, "preset is 'huge'"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_measured(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        recommend(**{"output_dir": tmp_path, "quiet": True, "device": "cpu", **settings})
    assert Ledger(tmp_path / "trace_output" / "ledger.jsonl").read()[0] == []


def test_quick_without_minutes_measures_nothing(tmp_path: Path) -> None:
    assert experiments.recommendation(output_dir=tmp_path).records == ()
    assert not (tmp_path / "recommended.toml").exists()


@pytest.mark.slow
def test_a_killed_search_goes_on_and_its_answer_trains(tmp_path: Path, call: Call) -> None:
    """A smoke search killed after its first set is not begun again, and the file that it ends in trains two steps."""
    command = [sys.executable, "-m", "ddpm_lab", "recommend", "--preset", "smoke", "--device", "cpu"]
    command += ["--output-dir", str(tmp_path)]
    ledger = Ledger(tmp_path / "trace_output" / "ledger.jsonl")

    def measured(experiment: str) -> list[RunRecord]:
        return [r for r in ledger.read()[0] if r.experiment == experiment and r.set_id]

    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        deadline = time.monotonic() + 300
        while not measured(SEARCH) and time.monotonic() < deadline:
            time.sleep(0.1)
        everything = [p.pid for p in psutil.Process(run.pid).children(recursive=True)]
        os.kill(run.pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while alive(everything) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert alive(everything) == []
    before = measured(SEARCH)
    assert {r.role for r in before} == {"baseline", "twin", "candidate"}
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert [r.set_id for r in measured(SEARCH)] == [r.set_id for r in before], "the set is not measured again"
    fresh = measured(RECOMMENDATION)
    assert len({r.set_id for r in fresh}) == 1
    assert {r.set_id for r in fresh}.isdisjoint(r.set_id for r in before)
    assert "too few sets" in shown.stdout.lower() or "Keep the baseline" in shown.stdout
    assert "Left out: tf32 (needs a CUDA device)" in shown.stdout
    again = experiments.recommendation(preset="smoke", device="cpu", output_dir=tmp_path)
    assert len(measured(RECOMMENDATION)) == len(fresh)
    assert again.records
    assert (tmp_path / "image_output" / "06_recommendation.png").is_file()
    folder = tmp_path / "run"
    code, _, err = call(
        *("train", "--config", tmp_path / "recommended.toml", "--steps", 2, "--output-dir", folder),
        *("--sample-every", 0, "--evaluate-every", 0),
    )
    assert code == 0, err
    assert (folder / "checkpoints" / "step-00000002.pt").is_file()
