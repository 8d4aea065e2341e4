"""The profiler's table and trace, on work whose shape is known."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import torch

from ddpm_lab.measure.profiling import RANGE, profile_steps

PLAN = {"wait": 1, "warmup": 1, "active": 3, "repeat": 1}


def profiled(folder: Path) -> dict[str, object]:
    values = torch.ones(200, 200)

    def step() -> None:
        with torch.profiler.record_function("outer"):
            time.sleep(0.01)
            values @ values

    return profile_steps(step, PLAN, folder / "trace.json.gz", cuda=False)


def test_exclusive_times_count_each_second_once(tmp_path: Path) -> None:
    result = profiled(tmp_path)
    rows = {row["name"]: row for row in result["operators"]}  # type: ignore[attr-defined]
    assert result["steps"] == 3
    assert rows["outer"]["calls"] == 3
    assert rows["aten::mm"]["calls"] == 3
    # the sleep is the outer range's own; the product inside is not counted there again
    assert 0.03 <= rows["outer"]["self_cpu_seconds"] < result["wall_seconds"]
    total = sum(row["self_cpu_seconds"] for row in rows.values())
    assert total <= result["wall_seconds"] * 1.05  # type: ignore[operator]
    assert not any(name.startswith("ProfilerStep") for name in rows)
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        trace = json.load(file)
    assert "aten::mm" in {event.get("name") for event in trace["traceEvents"]}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


def test_phases_are_summed_and_are_no_operators(tmp_path: Path) -> None:
    def step() -> None:
        with torch.profiler.record_function(f"{RANGE}forward"):
            time.sleep(0.01)
            torch.ones(50, 50) @ torch.ones(50, 50)

    result = profile_steps(step, PLAN, tmp_path / "trace.json.gz", cuda=False)
    assert 0.03 <= result["phases"].pop("forward") <= result["wall_seconds"]
    assert result["phases"] == {}
    assert "aten::mm" in {row["name"] for row in result["operators"]}
    assert not any(row["name"].startswith(RANGE) for row in result["operators"])
