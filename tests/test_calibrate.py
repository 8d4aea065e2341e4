"""The instrument's own check, run for real: what it measures, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as make

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.sets import Instrument, Member
from ddpm_lab.plan import Plan
from ddpm_lab.questions import calibrate as module
from ddpm_lab.questions.calibrate import Calibration, calibrate, calibration, lines
from ddpm_lab.record import LedgerError, RunRecord


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    for minutes in (0, -1, float("nan"), "ten"):
        with pytest.raises(ConfigError, match="minutes is"):
            calibrate(minutes=minutes, output_dir=tmp_path)  # type: ignore[arg-type]
    for planted in (0, -0.05, 1.5, 0.001, 0.055, "5%"):
        with pytest.raises(ConfigError, match="planted is"):
            calibrate(planted=planted, output_dir=tmp_path)  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--output-dir"):
        calibrate(output_dir=tmp_path / "file")


def stub(monkeypatch: pytest.MonkeyPatch, free: int, others: float) -> list[RunConfig]:
    """Calibrate on two cores, of which so many are free at first, in sets beside ``others``; returns what they ran."""
    ran: list[RunConfig] = []

    def measure_set(instrument: Instrument, *, members: list[Member], plan: Plan, **told: Any) -> list[RunRecord]:
        assert instrument.usable_cores == 2
        ran.extend(m.config for m in members)
        window = make.sets({}, count=1, turns=1)[0].windows[0]
        windows = (replace(window, others_cores=others),)
        return [make.record(m.config, role=m.role, label=m.label, plan=plan, windows=windows, **told) for m in members]

    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
    monkeypatch.setattr(module, "free_cores", lambda: free)
    monkeypatch.setattr(module, "measure_set", measure_set)
    return ran


@pytest.mark.parametrize(("free", "threads"), [(2, 0), (1, 1)])
def test_it_takes_the_cores_that_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, threads: int
) -> None:
    ran = stub(monkeypatch, free, others=2.0 - free)
    records = calibrate(minutes=1e-6, device="cpu", output_dir=tmp_path, quiet=True)
    assert {config.threads for config in ran} == {threads}
    assert judged(records).disturbed == 0, "beside a process that takes the other core"


def test_a_calibration_of_disturbed_sets_alone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, 2, others=1.0)
    with pytest.raises(LedgerError, match="every set"):
        calibrate(minutes=1e-6, device="cpu", output_dir=tmp_path, quiet=True)
    assert len(Ledger(tmp_path / "trace_output" / "ledger.jsonl").read()[0]) >= 3, "they are kept"


@pytest.mark.alone
@pytest.mark.slow
def test_every_calibration_measures_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The function stands in the package under the name of its module.
    monkeypatch.setattr(sys.modules["ddpm_lab.questions.calibrate"], "Plan", partial(Plan, turns=4, window_seconds=0.1))
    first = calibrate(minutes=0.01, planted=0.5, output_dir=tmp_path, quiet=True)
    second = calibrate(minutes=0.01, planted=0.5, output_dir=tmp_path, quiet=True)
    kept = Ledger(tmp_path / "trace_output" / "ledger.jsonl").read()[0]
    assert [r.set_id for r in kept] == [r.set_id for r in (*first, *second)]
    assert [(r.role, r.status) for r in first] == [("baseline", "ok"), ("twin", "ok"), ("candidate", "ok")]
    assert {r.witness["ranks"][0]["pieces"] for r in first} == {100, 150}
    found = judged(first)
    assert found.planted == pytest.approx(0.5)
    assert 0.2 < found.planted_estimate.value < 1, "one set of short windows"
    assert found.planted_estimate.sets == found.sets == 1
    assert not found.passed, "one set is no proof"


# --- what it says ---

BASE = RunConfig(workload="ddpm_lab.training.limits:pieces", global_batch_size=1, options=(("pieces", 100),))
SLOWER = RunConfig(workload="ddpm_lab.training.limits:pieces", global_batch_size=1, options=(("pieces", 105),))


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
    dates = {s: f"2026-01-03T10:{i // 6:02d}:{10 * (i % 6):02d}+00:00" for s, i in order.items()}
    return [replace(r, environment=replace(r.environment, date=dates[r.set_id])) for r in found]


def judged(records: list[RunRecord]) -> Calibration:
    found = calibration(records)
    assert found is not None
    return found


def test_a_planted_slowdown_is_found() -> None:
    found = judged(calibrated())
    assert (found.passed, found.planted_in_interval, found.fit) == (True, True, True)
    assert found.planted == pytest.approx(0.05)
    assert found.seconds_per_set == pytest.approx(10)
    assert found.verdict().startswith("Fit to measure")
    resolvable = [v for v in found.resolvable.values() if v is not None]
    assert resolvable == sorted(resolvable, reverse=True), "more time resolves more"


@pytest.mark.parametrize(
    ("planted", "passed", "null_called", "verdict"),
    [
        ({"ratio": 1.0}, False, False, "Not fit to measure now: a planted slowdown of 5.0 %"),
        ({"twin": 1.1}, False, True, "Not fit to measure now: the baseline differs from itself"),
        ({"ratio": 1 / 1.5, "set_noise": 0.12, "count": 10}, True, False, "Fit for large differences only"),
        ({"count": 3}, False, False, "Not judged: 3 sets"),
    ],
)
def test_what_is_missed_differs_or_is_noisy_is_not_fit(
    planted: dict[str, Any], passed: bool, null_called: bool, verdict: str
) -> None:
    found = judged(calibrated(**planted))
    assert (found.passed, found.null_called, found.fit) == (passed, null_called, False)
    assert found.verdict().startswith(verdict)


def test_disturbed_sets_do_not_count_and_are_told() -> None:
    """Beside a process that takes a core the planted slowdown reads three times as slow."""
    found = judged(calibrated(crowded=range(8)))
    assert (found.sets, found.disturbed, found.passed, found.planted_in_interval) == (12, 8, True, True)
    assert "8 more were disturbed" in lines(found)[1]
    assert calibration(calibrated(count=3, crowded=range(3))) is None
    limited = [replace(r, config=replace(r.config, threads=1)) for r in calibrated()]
    assert judged(limited).as_dict()["threads"] == 1


def test_nothing_is_made_up_of_few_sets() -> None:
    for records in (calibrated(), calibrated(count=1), calibrated(1.0, twin=1.1)):
        found = judged(records)
        assert not re.search("nan|inf", "\n".join(lines(found)))
        assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["sets"] == found.sets
        picture = module.figure(found)
        assert np.isfinite(picture.axes[0].get_ylim()).all()
    assert set(judged(calibrated(count=1)).resolvable.values()) == {None}
    assert calibration(calibrated()[:2]) is None
