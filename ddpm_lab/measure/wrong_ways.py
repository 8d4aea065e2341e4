"""Wrong ways to measure, run in a group of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpm_lab.measure.seat import Seat
from ddpm_lab.measure.witness import mismatches

WORKLOAD = "ddpm_lab.training.wrong_ways:wrong_ways"


def run_wrong_ways(seat: Seat) -> dict[str, Any]:
    """Run what the option ``ways`` of the seat's configuration names, in its order; the first one starts cold.

    Returns the record's ``profile`` with ``wrong_ways``: what each way of ``model.wrong_ways`` answers, and under
    ``labelled_two`` what the witness says where one rank is labelled two. Raises GroupFailed.
    """
    seat.start()
    found: dict[str, Any] = {}
    for way in str(seat.config.option("ways", "")).split():
        seat.instrument.progress(f"{seat.member.label}: the wrong way, {way.replace('_', ' ')}")
        with seat.watched() as watch:
            found[way] = seat.alive.call(way, seat.instrument.limits.build_seconds)[0]
        if (busy := watch.state.get("gpu_utilisation_percent")) is not None:
            found[way]["gpu_utilisation_percent"] = busy
        if not seat.witness:
            seat.hear_witness()
    label = replace(seat.config, world_size=2, global_batch_size=2 * seat.config.global_batch_size)
    return {"profile": {"wrong_ways": {**found, "labelled_two": mismatches(label, seat.witness)}}}
