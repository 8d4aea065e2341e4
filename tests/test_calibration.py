"""What a calibration says: found where it is there, missed where it is not, and no false alarm."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import pages
from ddpm_lab.questions import calibrate as figure_calibration
from ddpm_lab.questions.calibrate import calibration, calibrations, lines
from ddpm_lab.record import RunRecord

BASE = RunConfig(workload="ddpm_lab.training.planted:pieces", global_batch_size=1, options=(("pieces", 100),))
SLOWER = RunConfig(workload="ddpm_lab.training.planted:pieces", global_batch_size=1, options=(("pieces", 105),))


def calibrated(ratio: float = 1 / 1.05, *, count: int = 20, twin: float = 1.0, **values: Any) -> list[RunRecord]:
    """Records of a calibration whose sets are ten seconds apart."""
    found = make.sets(
        {"5 % more work": (SLOWER, ratio)},
        baseline=BASE,
        baseline_label="baseline",
        experiment="calibrate",
        family="calibration of today",
        count=count,
        twin_ratio=twin,
        **values,
    )
    order = {s: i for i, s in enumerate(dict.fromkeys(r.set_id for r in found))}
    timed = []
    for r in found:
        i = order[r.set_id]
        date = f"2026-01-03T10:{i // 6:02d}:{10 * (i % 6):02d}+00:00"
        timed.append(dataclasses.replace(r, environment=dataclasses.replace(r.environment, date=date)))
    return timed


def test_a_planted_slowdown_is_found() -> None:
    found = calibration(calibrated())
    assert found is not None
    assert found.passed
    assert found.planted == pytest.approx(0.05)
    assert found.planted_in_interval
    assert found.seconds_per_set == pytest.approx(10)
    assert found.fit
    assert found.verdict().startswith("Fit to measure: 20 minutes resolve a difference of ")
    resolvable = [v for v in found.resolvable.values() if v is not None]
    assert resolvable == sorted(resolvable, reverse=True), "more time resolves more"


def test_a_slowdown_that_is_not_there_is_missed() -> None:
    found = calibration(calibrated(1.0))
    assert found is not None
    assert not found.passed
    assert not found.planted_in_interval
    assert "a planted slowdown of 5.0 % was not found" in found.verdict()


def test_a_baseline_that_differs_from_itself_is_called() -> None:
    found = calibration(calibrated(twin=1.1))
    assert found is not None
    assert found.null_called
    assert not found.passed
    assert "differs from itself" in found.verdict()


def test_a_noisy_machine_is_fit_for_large_differences_only() -> None:
    found = calibration(calibrated(1 / 1.5, set_noise=0.12, count=10))
    assert found is not None
    assert found.passed
    assert not found.fit
    assert found.verdict().startswith("Fit for large differences only: 20 minutes resolve ")


def test_disturbed_sets_do_not_count_and_are_told() -> None:
    """Beside a process that takes a core the planted slowdown reads three times as slow."""
    found = calibration(calibrated(crowded=range(8)))
    assert found is not None
    assert (found.sets, found.disturbed) == (12, 8)
    assert found.passed
    assert found.planted_in_interval
    assert "12 sets of 10.0 s" in lines(found)[1]
    assert lines(found)[1].endswith("; 8 more were disturbed by other processes and do not count.")
    assert "disturbed" not in "".join(lines(calibration(calibrated()) or found))
    assert calibration(calibrated(count=3, crowded=range(3))) is None


def test_the_threads_are_told_where_they_are_fewer_than_the_cores() -> None:
    records = [dataclasses.replace(r, config=dataclasses.replace(r.config, threads=1)) for r in calibrated()]
    found = calibration(records)
    assert found is not None
    assert "with 1 of 2 cores" in lines(found)[1]
    assert found.as_dict()["threads"] == 1


def test_noise_and_drift_are_told_as_planted() -> None:
    records = calibrated(set_noise=0.02, turn_noise=0.0, drift=0.0, count=200)
    found = calibration(records)
    assert found is not None
    assert found.noise == pytest.approx(0.02, rel=0.15)
    assert abs(found.drift_per_minute[0]) < 0.001
    starts = [r.environment.date for r in records]
    assert starts == sorted(starts)
    slowing = [
        dataclasses.replace(
            r, windows=tuple(dataclasses.replace(w, seconds=w.seconds * math.exp(0.01 * i / 18)) for w in r.windows)
        )
        for i, r in enumerate(records)  # three records a set, six sets a minute: 1 % a minute
    ]
    drifted = calibration(slowing)
    assert drifted is not None
    slope, low, high = drifted.drift_per_minute
    assert slope == pytest.approx(-0.01)
    assert low <= slope <= high
    assert drifted.noise == pytest.approx(found.noise, rel=0.05), "drift is shared by all and no noise of a ratio"


def test_few_sets_are_not_judged_and_nothing_is_made_up() -> None:
    found = calibration(calibrated(count=3))
    assert found is not None
    assert not found.passed
    assert "Not judged" in found.verdict()
    values = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert values["sets"] == 3
    one = calibration(calibrated(count=1))
    assert one is not None
    assert set(one.resolvable.values()) == {None}
    assert json.dumps(one.as_dict(), allow_nan=False)
    assert calibration(calibrated()[:2]) is None
    assert calibrations([]) == []


@pytest.mark.parametrize("records", [calibrated(), calibrated(count=1), calibrated(1.0, twin=1.1)])
def test_words_and_picture_exist_for_each(records: Sequence[RunRecord]) -> None:
    found = calibration(records)
    assert found is not None
    said = "\n".join(lines(found))
    assert "nan" not in said
    assert "inf" not in said
    picture = figure_calibration.figure(found)
    assert len(picture.axes) == 2
    assert np.isfinite(picture.axes[0].get_ylim()).all()


def test_the_index_says_how_finely_the_machine_measures(tmp_path: Path) -> None:
    found = calibration(calibrated())
    assert found is not None
    target = tmp_path / "index.html"
    pages.write_index([], target)
    assert "ddpm-lab check --instrument" in target.read_text()
    pages.write_index([], target, calibration=figure_calibration.section(found))
    html = target.read_text()
    assert f'alt="{found.verdict()}"' in html
    assert "data:image/png;base64," in html
