"""The gradient check of a configuration: its group, in seconds, before hours are spent on a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpm_lab.config import CHECK, RunConfig
from ddpm_lab.measure.seat import Instrument, Member, Seat
from ddpm_lab.plan import Plan

WARM_STEPS = 10
"""Steps before the comparison. Some layers start at zero, and those before them have no gradient for three steps."""
STEPS = 3


def check_gradients(config: RunConfig, instrument: Instrument) -> dict[str, Any]:
    """Train some steps as ``config`` says, and compare loss and gradient of the last ``STEPS`` with fp32.

    Whatever the purpose and the workload of ``config``, its training step is what is checked; ``instrument`` must know
    the code of the workload ``config.CHECK``. The answer is that of ``model.gradient_check``'s ``compare``, on the
    weights of rank 0. Raises GroupFailed where the group fails, or does not run what ``config`` says.
    """
    seat = Seat(Member("check", "gradient check", replace(config, purpose="check", workload=CHECK)), Plan(), instrument)
    limit = instrument.limits.build_seconds
    try:
        seat.start()
        seat.alive.advance(WARM_STEPS, limit)
        seat.hear_witness()
        answer: dict[str, Any] = seat.alive.call("compare", limit, steps=STEPS)[0]
        return answer
    finally:
        seat.close()
