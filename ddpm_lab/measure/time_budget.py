"""The time budget of a group, as a record keeps it: how long its windows are, and what every rank found."""

from __future__ import annotations

import math
from typing import Any

from ddpm_lab.measure.seat import Seat, memory_held
from ddpm_lab.plan import USUAL_TURNS

BUDGET_SECONDS = 6.0
"""Rounds beyond the first are taken while both kinds of window together stay below this."""


def take_budget(seat: Seat) -> dict[str, Any]:
    """Take the time budget of a warm group: windows as training runs, in turns with synchronised ones.

    A window holds a whole number of the steps between two updates of the averaged weights, at least as many as a timed
    window, so that a phase that comes rarely has its right share. Raises GroupFailed.

    Returns:
        ``steps`` behind each number, ``rounds``, ``others_cores`` (cores that other processes kept busy meanwhile;
        None: unknown), ``stolen_seconds`` and ``state`` (as in a window's record), and ``ranks``: for each rank its
        ``unsynchronised`` and ``synchronised`` windows, in seconds per step.
    """
    plan, step_seconds = seat.plan, seat.warm_step_seconds
    least = max(plan.window_steps, 10 * seat.prefetch_batches, math.ceil(plan.window_seconds / max(step_seconds, 1e-6)))
    cycle = seat.config.optimizer.ema_every
    steps = -(-least // cycle) * cycle
    rounds = max(1, min(plan.turns or USUAL_TURNS, int(BUDGET_SECONDS / (2 * steps * max(step_seconds, 1e-6)))))
    with seat.watched() as watch:
        ranks = seat.alive.budget(
            settle=max(plan.settle_steps, seat.prefetch_batches),
            steps=steps,
            rounds=rounds,
            limit=max(seat.instrument.limits.window_seconds, 20 * step_seconds),
        )
    return {
        "steps": steps * rounds,
        "rounds": rounds,
        "others_cores": None if watch.others_cores is None else round(watch.others_cores, 3),
        "stolen_seconds": watch.stolen_seconds,
        "state": watch.state | memory_held(ranks),
        "ranks": ranks,
    }


def with_traces(budget: dict[str, Any], profiles: list[dict[str, Any]]) -> dict[str, Any]:
    """The budget with what each rank's profiled steps say of the same phases, in seconds per step, to check it by."""
    ranks = [
        {
            **rank,
            "profiled": {
                "step_seconds": profile["wall_seconds"] / profile["steps"],
                "phases": {name: seconds / profile["steps"] for name, seconds in profile["phases"].items()},
            },
        }
        for rank, profile in zip(budget["ranks"], profiles, strict=True)
    ]
    return {**budget, "ranks": ranks}
