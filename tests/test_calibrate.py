"""The instrument's own check, run for real: what it measures, and what it refuses."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from ddpm_lab.calibrate import calibrate
from ddpm_lab.checks import ConfigError
from ddpm_lab.explain.calibration import calibration, calibrations
from ddpm_lab.ledger import Ledger
from ddpm_lab.plan import Plan
from ddpm_lab.record import LedgerError


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


@pytest.mark.alone
@pytest.mark.slow
def test_every_calibration_measures_afresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The function stands in the package under the name of its module.
    monkeypatch.setattr(sys.modules["ddpm_lab.calibrate"], "Plan", partial(Plan, turns=4, window_seconds=0.1))
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
