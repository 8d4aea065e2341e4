"""The time budget of a group as a record keeps it: enough whole cycles, every rank, checked by the trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import code_of

from ddpm_lab.config import OptimizerConfig, RunConfig
from ddpm_lab.measure.seat import Instrument, Member, Seat
from ddpm_lab.measure.sets import measure_alone, profile_alone
from ddpm_lab.measure.time_budget import BUDGET_SECONDS, take_budget
from ddpm_lab.plan import USUAL_TURNS, Plan
from ddpm_lab.record import RunRecord


@pytest.mark.parametrize("step_seconds", [1e-5, 0.004, 0.03, 0.7, 9.0])
@pytest.mark.parametrize(("ema_every", "prefetch"), [(10, 0), (7, 0), (1, 4)])
def test_windows_hold_whole_cycles_and_end_in_time(step_seconds: float, ema_every: int, prefetch: int) -> None:
    asked: dict[str, Any] = {}

    class Group:
        pids = (1,)

        def budget(self, **values: Any) -> list[dict[str, Any]]:
            asked.update(values)
            return [{"memory": {"rss_bytes": 3}}, {"memory": {"rss_bytes": 5}}]

    instrument = cast("Instrument", None)
    config = RunConfig(purpose="profile", optimizer=OptimizerConfig(ema_every=ema_every))
    seat = Seat(Member("profile", "p", config), Plan(), instrument)
    seat.instrument = Instrument(code=code_of("lab_workloads:busy"), cache=Path(), usable_cores=2, data_name="")
    seat.group, seat.warm_step_seconds = cast("Any", Group()), step_seconds
    seat.witness = [{"prefetch_batches": prefetch}]
    taken = take_budget(seat)
    steps, rounds = asked["steps"], asked["rounds"]
    assert steps % ema_every == 0
    assert steps >= max(seat.plan.window_steps, 10 * prefetch)
    assert steps * step_seconds >= seat.plan.window_seconds * 0.999
    assert asked["settle"] >= prefetch
    assert 1 <= rounds <= USUAL_TURNS
    assert rounds == USUAL_TURNS or 2 * (rounds + 1) * steps * step_seconds > BUDGET_SECONDS
    assert rounds == 1 or 2 * rounds * steps * step_seconds <= BUDGET_SECONDS
    assert taken["steps"] == steps * rounds
    assert taken["state"]["rss_bytes"] == 5, "the largest rank's"
    assert taken["state"]["watched_seconds"] >= 0


@pytest.mark.slow
def test_a_profile_record_holds_the_budget_and_no_speed(instrument: Instrument, tmp_path: Path) -> None:
    workload = "lab_workloads:phased"
    config = RunConfig(workload=workload, purpose="profile", global_batch_size=8)
    record = measure_alone(
        replace(instrument, code=code_of(workload)),
        experiment="profile",
        family="phased",
        plan=Plan(turns=2, window_seconds=0.1, warmup_steps=5),
        member=Member("profile", "phased", config),
        work=profile_alone([tmp_path / "trace.json.gz"]),
    )
    assert (record.status, record.windows) == ("ok", ())
    record = RunRecord.from_dict(json.loads(json.dumps(record.as_dict())))
    assert record.profile is not None
    budget = record.profile["budget"]
    (rank,) = budget["ranks"]
    assert budget["state"]["rss_bytes"] <= record.ranks[0].peak_rss_bytes
    running, profiled = rank["unsynchronised"], rank["profiled"]
    # the trace saw the same phases; a step's sleeps and busy loops take as long under the profiler
    assert set(profiled["phases"]) == set(running["phases"])
    for phase in ("forward", "backward"):
        shares = (values["phases"][phase] / values["step_seconds"] for values in (running, profiled))
        assert next(shares) == pytest.approx(next(shares), abs=0.05)
    # the ranges of the phases are no operators
    assert not any(op["name"].startswith("phase") for op in record.profile["operators"])
