"""The profiler's table and trace, on work whose shape is known."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import pytest
import torch

from ddpm_lab.measure import profiling
from ddpm_lab.measure.profiling import RANGE, profile_steps

PLAN = {"wait": 1, "warmup": 1, "active": 3, "repeat": 1}


def profiled(folder: Path, rank: int = 3) -> dict[str, object]:
    values = torch.ones(200, 200)

    def step() -> None:
        with torch.profiler.record_function("outer"):
            time.sleep(0.01)
            values @ values

    return profile_steps(step, PLAN, folder / "trace.json.gz", cuda=False, rank=rank)


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


def test_phases_are_summed_and_are_no_operators(tmp_path: Path) -> None:
    def step() -> None:
        with torch.profiler.record_function(f"{RANGE}forward"):
            time.sleep(0.01)
            torch.ones(50, 50) @ torch.ones(50, 50)

    result = profile_steps(step, PLAN, tmp_path / "trace.json.gz", cuda=False, rank=0)
    assert 0.03 <= result["phases"].pop("forward") <= result["wall_seconds"]
    assert result["phases"] == {}
    assert "aten::mm" in {row["name"] for row in result["operators"]}
    assert not any(row["name"].startswith(RANGE) for row in result["operators"])


def test_a_trace_keeps_the_first_of_too_many_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "MOST_EVENTS", 3)
    partial = tmp_path / "partial.json"
    names = {"ph": "M", "name": "process_name"}
    events = [{"ph": "X", "ts": t, "dur": 1, "name": str(t)} for t in (30, 10, 40, 20)]
    partial.write_text(json.dumps({"traceEvents": [*events, names]}))
    profiling._compress(partial, tmp_path / "trace.json.gz", rank=0)
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        trace = json.load(file)
    assert [event["name"] for event in trace["traceEvents"]] == ["process_name", "10", "20"]
    assert trace["ddpmLabEvents"] == {"kept": 3, "of": 5}
