"""The command and a search measured for real: what is refused, that it goes on after a kill, that its answer trains."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import planted_search as planted
import psutil
import pytest
import records as make
from conftest import Call, alive

from ddpm_lab.checks import ConfigError
from ddpm_lab.ledger import Ledger
from ddpm_lab.plan import RECOMMENDATION, SEARCH
from ddpm_lab.questions import experiments
from ddpm_lab.questions.recommend import recommend
from ddpm_lab.record import RunRecord


@pytest.mark.parametrize("minutes", [0, -5, math.nan, math.inf, True, 0.01])
def test_a_budget_that_makes_no_sense_is_refused(tmp_path: Path, minutes: Any) -> None:
    with pytest.raises(ConfigError, match=r"minutes is .*: (give a number above 0|a search and the sets)"):
        recommend(minutes=minutes, output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_quick_without_minutes_measures_nothing(tmp_path: Path) -> None:
    assert experiments.recommendation(output_dir=tmp_path).study.records == ()
    assert not (tmp_path / "recommended.toml").exists()


def test_it_answers_from_records_and_refuses_mixed_machines(call: Call, tmp_path: Path) -> None:
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    Ledger(here).append(planted.searched())
    Ledger(there).append(make.on(make.GPUS, planted.searched(seed=9)))
    code, out, _ = call("recommend", "--ledger", here, "--output-dir", tmp_path, "--train-images", 1000, "--json")
    found = json.loads(out)
    assert (code, found["verdict"], found["sets"]) == (0, "faster", 6)
    assert found["low"] < found["ratio"] < found["high"]
    assert not (tmp_path / "recommended.toml").exists(), "records of another machine recommend nothing for this one"
    code, out, err = call("recommend", "--ledger", here, there, "--output-dir", tmp_path)
    assert (code, out) == (2, "")
    assert err.startswith("ddpm-lab: the records come from 2 machines: choose one")
    code, out, _ = call("recommend", "--ledger", here, there, "--machine", "all", "--output-dir", tmp_path)
    assert code == 0
    assert "12 sets" in out
    assert "2 machines: " in out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--minutes", "0.1"), "minutes is 0.1: a search and the sets that measure again"),
        (("--only", "precision"), "--only is 'precision': give a setting and its values"),
        (("--only", "speed=all"), "only is 'speed': choose one of precision"),
        (("--train-images", "0"), "train_images is 0: give a whole number of at least 1"),
        (("--resolution", "much"), "a share is 'much'"),
        (("--sets", "0"), "sets is 0"),
        (("--seeds", "-1"), "seeds is -1"),
        (("--images", "100"), "images is 100, and without seeds"),
        (("--preset", "huge"), "preset is 'huge'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    call: Call, tmp_path: Path, options: tuple[str, ...], words: str
) -> None:
    code, out, err = call("recommend", "--device", "cpu", "--output-dir", tmp_path, *options)
    assert (code, out) == (2, "")
    assert f"ddpm-lab: {words}" in err
    assert not (tmp_path / "trace_output" / "ledger.jsonl").exists()


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
    assert (tmp_path / "image_output" / "06_recommendation.png").is_file()
    folder = tmp_path / "run"
    code, _, err = call(
        *("train", "--config", tmp_path / "recommended.toml", "--steps", 2, "--output-dir", folder),
        *("--sample-every", 0, "--evaluate-every", 0),
    )
    assert code == 0, err
    assert (folder / "checkpoints" / "step-00000002.pt").is_file()
