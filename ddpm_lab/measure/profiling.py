"""torch.profiler over a few steps: a Chrome trace for each rank, and a table of operators by exclusive time.

A profiled run has no other purpose: the profiler changes what it watches, so no time is ever taken from it.
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

TOP = 80
"""Operators kept by name; the rest are summed as ``(other operators)``."""

MOST_EVENTS = 400_000
"""Events kept in a trace, some 5 MB compressed: more would not open in a browser."""

RANGE = "phase: "
"""Beginning of the names of the ranges that the lab lays around the phases of a step."""
HIDDEN = ("ProfilerStep", RANGE)


def profile_steps(step: Callable[[], None], plan: dict[str, int], trace: Path, cuda: bool, rank: int) -> dict[str, Any]:
    """Profile ``plan['active']`` steps after ``wait`` and ``warmup`` ones, ``repeat`` times.

    Writes a gzip-compressed Chrome trace of the last repetition to ``trace`` with the rank in its metadata, and returns
    the operators of all repetitions, and the seconds of each phase where the steps lay ranges around their phases.
    Exclusive ("self") times count each second of a thread once: the time inside an operator less the time inside the
    operators it calls.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    operators: dict[str, list[float]] = {}
    phases: dict[str, float] = {}
    walls: list[float] = []

    def ready(profiler: Any) -> None:
        for event in profiler.key_averages():
            if event.key.startswith(RANGE) and event.device_type == DeviceType.CPU:
                name = event.key.removeprefix(RANGE)
                phases[name] = phases.get(name, 0.0) + event.cpu_time_total / 1e6
            # A kernel stands in the list twice: by itself, and as device time of the operator that launched it.
            if event.key.startswith(HIDDEN) or event.device_type != DeviceType.CPU:
                continue
            row = operators.setdefault(event.key, [0.0, 0.0, 0.0])
            row[0] += event.count
            row[1] += event.self_cpu_time_total / 1e6
            row[2] += event.self_device_time_total / 1e6
        partial = trace.with_name(f".{trace.name}.partial.json")
        profiler.export_chrome_trace(str(partial))
        _compress(partial, trace, rank)

    cycle = schedule(wait=plan["wait"], warmup=plan["warmup"], active=plan["active"], repeat=plan["repeat"])
    with profile(activities=activities, schedule=cycle, on_trace_ready=ready) as profiler:
        for _ in range(plan["repeat"]):
            for _ in range(plan["wait"] + plan["warmup"]):
                step()
                profiler.step()
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(plan["active"]):
                step()
                if i == plan["active"] - 1:
                    if cuda:
                        torch.cuda.synchronize()
                    walls.append(time.perf_counter() - start)
                profiler.step()
    ranked = sorted(operators.items(), key=lambda item: -(item[1][2] if cuda else item[1][1]))
    rest = [sum(column) for column in zip(*(row for _, row in ranked[TOP:]), strict=True)]
    rows = [(name, *row) for name, row in ranked[:TOP]] + ([("(other operators)", *rest)] if rest else [])
    names = ("name", "calls", "self_cpu_seconds", "self_device_seconds")
    return {
        "steps": plan["active"] * plan["repeat"],
        "wall_seconds": sum(walls),
        "schedule": plan,
        "phases": phases,
        "operators": [dict(zip(names, row, strict=True)) for row in rows],
        "traces": [trace.name],
    }


def _compress(partial: Path, trace: Path, rank: int) -> None:
    """Write the rank into the trace, check that it is whole, leave out what is too much, and compress it.

    Of too many events those that began first are kept, and ``ddpmLabEvents`` says how many of how many.
    """
    values = json.loads(partial.read_bytes())
    events = values.get("traceEvents")
    if not events:
        raise RuntimeError("the profiler wrote a trace without events")
    values["ddpmLabRank"] = rank
    if len(events) > MOST_EVENTS:
        # Metadata has no time of its own, and names the rows of what is kept.
        values["traceEvents"] = sorted(events, key=lambda e: 0 if e.get("ph") == "M" else e.get("ts", 0))[:MOST_EVENTS]
    values["ddpmLabEvents"] = {"kept": len(values["traceEvents"]), "of": len(events)}
    partial.unlink()
    packed = trace.with_name(f".{trace.name}.partial")
    with gzip.open(packed, "wt", compresslevel=6) as file:
        json.dump(values, file, separators=(",", ":"))
    packed.replace(trace)
