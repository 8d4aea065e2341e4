"""The instrument's own check, run for real: what it measures, and what it refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import records as make

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.sets import Instrument, Member
from ddpm_lab.plan import Plan
from ddpm_lab.questions.calibrate import calibrate, calibration, calibrations
from ddpm_lab.record import LedgerError, RunRecord


@pytest.mark.parametrize("value", [0, -1, float("nan"), "ten"])
def test_minutes_are_refused(tmp_path: Path, value: float) -> None:
    with pytest.raises(ConfigError, match=r"minutes is .*: give a number above 0"):
        calibrate(minutes=value, output_dir=tmp_path)


@pytest.mark.parametrize("value", [0, -0.05, 1.5, 0.001, 0.055, "5%"])
def test_a_planted_slowdown_is_a_whole_number_of_pieces(tmp_path: Path, value: float) -> None:
    with pytest.raises(ConfigError, match=r"planted is .*: give whole per cents"):
        calibrate(planted=value, output_dir=tmp_path)


def test_an_unwritable_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LedgerError, match="choose another --output-dir"):
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

    module = sys.modules["ddpm_lab.questions.calibrate"]
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
    found = calibration(records)
    assert found is not None, "beside a process that takes the other core"
    assert found.disturbed == 0


def test_a_calibration_of_disturbed_sets_alone_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch, 2, others=1.0)
    with pytest.raises(LedgerError, match="other processes took the cores of every set"):
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
    found = calibration(first)
    assert found is not None
    assert found.planted == pytest.approx(0.5)
    assert 0.2 < found.planted_estimate.value < 1, "one set of short windows"
    assert found.planted_estimate.sets == found.sets == 1
    assert not found.passed, "one set is no proof"
    assert "Not judged: 1 set in the time given" in found.verdict()
    assert len(calibrations(kept)) == 2
