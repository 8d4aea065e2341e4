"""The instrument's own check: what it measures and refuses, and what it says of planted records."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import records as make
import torch
from fresh_processes import context

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import campaign, hardware
from ddpm_lab.measure.sets import Instrument, Member
from ddpm_lab.plan import Plan
from ddpm_lab.questions import calibrate as module
from ddpm_lab.questions.calibrate import Calibration, calibrate, calibration, lines
from ddpm_lab.record import LedgerError, RunRecord
from ddpm_lab.training.pieces import Pieces


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    for minutes in (0, -1, float("nan"), "ten", True):
        with pytest.raises(ConfigError, match="minutes is"):
            calibrate(minutes=minutes, output_dir=tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(("free", "others", "threads"), [(2, 0.0, 0), (1, 1.0, 1), (2, 1.0, None)])
def test_it_takes_the_cores_that_are_free_and_fails_where_every_set_was_disturbed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, others: float, threads: int | None
) -> None:
    def measure_set(instrument: Instrument, *, members: list[Member], plan: Plan, **how: Any) -> list[RunRecord]:
        assert (instrument.usable_cores, plan.turns, how["gives_up"]) == (2, 12, False)
        told: dict[str, Any] = {name: how[name] for name in ("experiment", "family")}
        window = make.sets({}, count=1, turns=1)[0].windows[0]
        told |= {"plan": plan, "windows": (replace(window, others_cores=others),)}
        told |= {"baseline_id": members[0].config.run_id}
        return [make.record(m.config, role=m.role, label=m.label, **told) for m in members]

    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
    monkeypatch.setattr(module, "free_cores", lambda: free)
    monkeypatch.setattr(campaign, "measure_set", measure_set)
    how: dict[str, Any] = {"minutes": 1e-6, "device": "cpu", "output_dir": tmp_path, "quiet": True}
    if threads is None:
        with pytest.raises(LedgerError, match="every set"):
            calibrate(**how)
    else:
        assert [calibrate(**how).slower.config.threads for _ in range(2)] == [threads] * 2
    kept = Ledger(tmp_path / "trace_output" / "ledger.jsonl").read()[0]
    assert len(kept) >= (3 if threads is None else 6), "each measures afresh, and all is kept"


# --- what it says ---

BASE = RunConfig(workload="ddpm_lab.training.pieces:pieces", global_batch_size=1, options=(("pieces", 100),))
SLOWER = replace(BASE, options=(("pieces", 105),))


def calibrated(ratio: float = 1 / 1.05, *, count: int = 20, twin: float = 1.0, **values: Any) -> list[RunRecord]:
    """Records of a calibration whose sets are ten seconds apart."""
    values |= {"experiment": "calibrate", "baseline": BASE, "baseline_label": "baseline"}
    found = make.sets({"5 % more work": (SLOWER, ratio)}, count=count, twin_ratio=twin, **values)
    order = {s: i for i, s in enumerate(dict.fromkeys(r.set_id for r in found))}
    dates = {s: f"2026-01-03T10:{i // 6:02d}:{10 * (i % 6):02d}+00:00" for s, i in order.items()}
    return [replace(r, environment=replace(r.environment, date=dates[r.set_id])) for r in found]


def judged(records: list[RunRecord]) -> Calibration:
    found = calibration(records)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("planted", "passed", "null_called", "fit", "verdict"),
    [
        ({}, True, False, True, "Fit to measure"),
        ({"ratio": 1.0}, False, False, False, "Not fit to measure now: a planted slowdown of 5.0 %"),
        ({"twin": 1.1}, False, True, False, "Not fit to measure now: the baseline differs from itself"),
        ({"ratio": 1 / 1.5, "set_noise": 0.12, "count": 10}, True, False, False, "Fit for large differences only"),
        ({"count": 3}, False, False, False, "Not judged: 3 sets"),
    ],
)
def test_what_is_found_missed_differs_or_is_noisy(
    planted: dict[str, Any], passed: bool, null_called: bool, fit: bool, verdict: str
) -> None:
    found = judged(calibrated(**planted))
    assert (found.passed, found.null_called, found.fit) == (passed, null_called, fit)
    assert found.verdict().startswith(verdict)
    assert found.seconds_per_set == pytest.approx(10)
    resolvable = [v for v in found.resolvable.values() if v is not None]
    assert resolvable == sorted(resolvable, reverse=True), "more time resolves more"


# --- what it measures ---


def test_a_planted_step_does_so_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, silu = list[int](), torch.nn.functional.silu

    def counted(values: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return silu(values)

    monkeypatch.setattr(torch.nn.functional, "silu", counted)
    workload = Pieces(SLOWER, context())
    for _ in range(2):
        workload.step(None)
    assert len(calls) == 2 * 105
    assert workload.witness() == {"pieces": 105, "images": 2}


def test_nothing_is_made_up_of_few_sets() -> None:
    for records in (calibrated(), calibrated(count=1), calibrated(1.0, twin=1.1)):
        found = judged(records)
        assert not re.search("nan|inf", "\n".join(lines(found)))
        assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["sets"] == found.slower.sets
    assert set(judged(calibrated(count=1)).resolvable.values()) == {None}
    assert calibration(calibrated()[:2]) is None
