"""The gradient check of a configuration: its group, in seconds, before hours are spent on a run."""

from __future__ import annotations

from typing import Any

from ddpm_lab.measure.seat import Seat

WARM_STEPS = 10
"""Steps before the comparison. Some layers start at zero, and those before them have no gradient for three steps."""
STEPS = 3


def compare_gradients(seat: Seat) -> dict[str, Any]:
    """Train some steps as the seat's configuration says, and compare loss and gradient of the last ``STEPS`` with fp32.

    Its workload is ``config.CHECK``. Returns the record's ``quality``, with the answer of ``model.gradient_check``'s
    ``compare`` on the weights of rank 0. Raises GroupFailed where the group fails, or does not run what its label says.
    """
    limit = seat.instrument.limits.build_seconds
    seat.instrument.progress(f"{seat.member.label}: comparing loss and gradient with fp32")
    seat.start()
    seat.alive.advance(WARM_STEPS, limit)
    seat.hear_witness()
    answer = seat.alive.call("compare", limit, steps=STEPS)[0]
    return {"quality": {"gradients": answer}}
