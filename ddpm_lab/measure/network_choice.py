"""Which network a GPU can measure within a preset's budget: the largest, found by trying, and remembered."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ddpm_lab.config import RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure.hardware import machine
from ddpm_lab.measure.seat import Instrument, Member
from ddpm_lab.measure.sets import measure_alone
from ddpm_lab.measure.shortfall import Target
from ddpm_lab.plan import USUAL_TURNS, Plan
from ddpm_lab.record import RunRecord

PLACES = 16
"""Configurations in one set of each of a preset's experiments, twins included."""
SHARE = 0.8
"""Share of the budget that the forecast may fill; the rest is for notebooks and for what a forecast misses."""


def choose_network(
    candidates: Sequence[tuple[str, RunConfig]],
    instrument: Instrument,
    ledger: Ledger,
    target: Target,
    *,
    budget_seconds: float,
) -> str:
    """The last of ``candidates``, smallest first, whose forecast fits the budget; at least the first.

    The choice is a record of role "choice" and is used again on the same machine with the same code and plan.
    """
    here, plan = machine().key, target.plan
    names = {config.run_id: name for name, config in candidates}
    for record in reversed(ledger.read(lambda heads: [h for h in heads if h.role == "choice"])[0]):
        same = (record.environment.machine.key, record.code_version, record.plan) == (here, instrument.code.key, plan)
        if record.role == "choice" and same and record.run_id in names:
            return names[record.run_id]
    chosen: RunRecord | None = None
    for name, config in candidates:
        instrument.progress(f"trying network {name}")
        record = measure_alone(
            instrument, experiment="network", family="network", plan=plan, member=Member("choice", name, config)
        )
        seconds = forecast_seconds(record, plan, target.sets)
        if record.status != "ok" or (chosen and seconds > SHARE * budget_seconds):
            break
        reason = f"the largest network whose forecast ({seconds / 60:.0f} min) fits {budget_seconds / 60:.0f} min"
        chosen = dataclasses.replace(record, reason=reason)
    if chosen is None:
        return candidates[0][0]
    ledger.append([chosen])
    return names[chosen.run_id]


def forecast_seconds(record: RunRecord, plan: Plan, sets: int) -> float:
    """Seconds of a whole preset at the speed of a group that was started, warmed and ended once."""
    step = record.stages.get("warmup", 0.0) / max(1, record.warmup_steps)
    window = max(plan.window_seconds, plan.window_steps * step) + plan.settle_steps * step
    return sets * PLACES * (sum(record.stages.values()) + (plan.turns or USUAL_TURNS) * window)
