"""torch.profiler over a few steps: a Chrome trace for each rank, and a table of operators by exclusive time.

A profiled run has no other purpose: the profiler changes what it watches, so no time is ever taken from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

TOP = 80
"""Operators kept by name; the rest are summed as ``(other operators)``."""

RANGE = "phase: "
"""Beginning of the names of the ranges that the lab lays around the phases of a step."""


def profile_steps(step: Callable[[], None], plan: dict[str, int], trace: Path, cuda: bool) -> dict[str, Any]:
    """Profile ``plan['active']`` steps after ``wait`` and ``warmup`` ones, ``repeat`` times.

    Writes a compressed Chrome trace of the last repetition to ``trace``, in which torch notes the rank. Returns the
    operators of all repetitions, and the seconds of each phase that the steps mark. Exclusive ("self") times are the
    time inside an operator less that inside the operators it calls, so that each second of a thread counts once.
    """
    operators: dict[str, list[float]] = {}
    phases: dict[str, float] = {}
    wall = begun = 0.0

    def ready(profiler: Any) -> None:
        for event in profiler.key_averages():
            # A kernel stands in the list twice: by itself, and as device time of the operator that launched it.
            if event.device_type != DeviceType.CPU:
                continue
            if event.key.startswith(RANGE):
                name = event.key.removeprefix(RANGE)
                phases[name] = phases.get(name, 0.0) + event.cpu_time_total / 1e6
            elif not event.key.startswith("ProfilerStep"):
                found = (event.count, event.self_cpu_time_total / 1e6, event.self_device_time_total / 1e6)
                before = operators.get(event.key, [0.0, 0.0, 0.0])
                operators[event.key] = [a + b for a, b in zip(before, found, strict=True)]
        partial = trace.with_name(f".partial.{trace.name}")
        profiler.export_chrome_trace(str(partial))  # compressed, by the end of its name
        partial.replace(trace)

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    first, last = plan["wait"] + plan["warmup"], plan["wait"] + plan["warmup"] + plan["active"] - 1
    with profile(activities=activities, schedule=schedule(**plan), on_trace_ready=ready) as profiler:
        for _ in range(plan["repeat"]):
            for i in range(last + 1):
                begun = now() if i == first else begun
                step()
                wall += now() - begun if i == last else 0.0
                profiler.step()
    ranked = sorted(operators.items(), key=lambda item: -(item[1][2] if cuda else item[1][1]))
    rest = [sum(column) for column in zip(*(row for _, row in ranked[TOP:]), strict=True)]
    rows = [(name, *row) for name, row in ranked[:TOP]] + ([("(other operators)", *rest)] if rest else [])
    names = ("name", "calls", "self_cpu_seconds", "self_device_seconds")
    return {
        "steps": plan["active"] * plan["repeat"],
        "wall_seconds": wall,
        "schedule": plan,
        "phases": phases,
        "operators": [dict(zip(names, row, strict=True)) for row in rows],
        "traces": [trace.name],
    }
