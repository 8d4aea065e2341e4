"""The phase clock: against a workload that times itself, against a simulated device, and what it costs."""

import gzip
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import code_of
from fresh_processes import context
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import phases
from ddpm_lab.measure.group import Group, Limits
from ddpm_lab.measure.phases import RANGE, PhaseClock, profile_steps
from ddpm_lab.measure.process import BEAT, Heartbeat
from ddpm_lab.training.train import Trainer

SETTLE, STEPS = 2, 20


def group(function: str, world_size: int = 1, purpose: str = "profile", **options: Any) -> Group:
    workload = f"lab_workloads:{function}"
    how: dict[str, Any] = {"workload": workload, "purpose": purpose, "world_size": world_size, "oversubscribe": True}
    config = RunConfig(global_batch_size=8, options=tuple(options.items()), **how)
    limits, modules = Limits(build_seconds=60), code_of(workload).modules
    return Group(config, threads=1, modules=modules, limits=limits)


def take(g: Group, settle: int = SETTLE, steps: int = STEPS) -> list[dict[str, Any]]:
    return g.ask("budget", 60, "testing", settle=settle, steps=steps, rounds=1)


# Against a workload that times itself

Known = list[tuple[dict[str, Any], dict[str, float]]]


@pytest.fixture(scope="module")
def known() -> Known:
    """Windows, each with the workload's own truth of the same steps, in seconds per step.

    Several, for medians: a process that loses its core between a mark and the workload's own look at the clock spoils
    one window. No phase is short: what Python does between the two looks is some 40 us on a slow machine.
    """
    with group("phased", unnamed_seconds=0.008) as g:
        budgets = [take(g, settle=1, steps=6)[0] for _ in range(5)]
        (witness,) = g.witness()
    windows = [budget[variant] for budget in budgets for variant in ("unsynchronised", "synchronised")]
    steps = witness["truth"]
    assert len(steps) == 7 * len(windows)
    truths = [steps[7 * i + 1 : 7 * i + 7] for i in range(len(windows))]
    return [(w, {n: statistics.fmean(s[n] for s in t) for n in t[0]}) for w, t in zip(windows, truths, strict=True)]


def error(known: Known, found: Callable[[dict[str, Any]], float], true: str) -> float:
    """Median over windows of the relative error."""
    return statistics.median(abs(found(window) / truth[true] - 1) for window, truth in known)


@pytest.mark.alone
@pytest.mark.slow
def test_phases_overlap_and_residual_come_back_within_a_few_percent(known: Known) -> None:
    for phase in ("data", "copy", "forward", "backward", "communication", "optimizer", "ema"):
        assert error(known, lambda w, n=phase: w["phases"][n], phase) < 0.02, phase  # type: ignore[misc]
    assert all(truth["overlapped"] < 0.95 * truth["exchange"] for _, truth in known), "nothing to tell apart"
    for field, true in (("seconds", "exchange"), ("overlapped_seconds", "overlapped")):
        assert error(known, lambda w, f=field: w["spans"]["communication"][f], true) < 0.02  # type: ignore[misc]
    off = []
    for window, truth in known:
        wall, residual = window["step_seconds"], window["residual_seconds"]
        assert set(window["phases"]) <= set(truth)
        assert sum(window["phases"].values()) + residual == pytest.approx(wall, rel=1e-6)
        off.append(abs(residual - truth["unnamed"]) / wall)
        # the wall is read apart from the phases: nothing of a step is outside it
        assert wall >= sum(truth[name] for name in (*window["phases"], "unnamed"))
    assert statistics.median(off) < 0.03, "the residual is the time that no mark names"


# Two ranks that exchange gradients


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.parametrize("hook", [False, True])
def test_communication_of_two_ranks_is_seen_and_stays_as_it_was(hook: bool) -> None:
    weights = []
    for purpose in ("timing", "profile"):
        with group("exchanging", 2, purpose, hook=hook) as g:
            if purpose == "profile":
                ranks = take(g)
            else:
                g.window(settle=SETTLE, steps=2 * STEPS + SETTLE, limit=60, stage="testing")
            weights += [w["weights"] for w in g.witness()]
    assert weights[0] == weights[1] == weights[2] == weights[3]
    for rank in ranks:
        for variant in ("unsynchronised", "synchronised"):
            window = rank[variant]
            span, phase = window["spans"]["communication"], window["phases"]["communication"]
            if variant == "unsynchronised":
                assert 0 < span["overlapped_seconds"] <= span["seconds"]
            else:  # each exchange is waited for
                assert span["overlapped_seconds"] < 0.05 * span["seconds"]
            # what is not overlapped is what the main line waits for
            assert span["seconds"] - span["overlapped_seconds"] <= phase * 1.02 + 50e-6, variant
            assert abs(window["residual_seconds"]) < 0.03 * window["step_seconds"]


# Against a simulated device


class Device:
    """Host and device clocks that a test sets; an event takes the device's time when it is recorded."""

    host = device = 100.0

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        outer = self

        class Event:
            def __init__(self, *, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = outer.device

            def elapsed_time(self, later: Any) -> float:
                return float(later.at - self.at) * 1e3

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(phases, "perf_counter", lambda: self.host)

    def wait(self, device: Any = None) -> None:
        del device
        self.host = self.device = max(self.host, self.device)

    def run(self, host: float, device: float) -> None:
        """The host works, then gives the device work, which begins when the device has done what it had."""
        self.host += host
        self.device = max(self.device, self.host) + device


@pytest.mark.parametrize("synchronised", [False, True])
def test_on_a_device_hidden_host_work_costs_nothing(monkeypatch: pytest.MonkeyPatch, synchronised: bool) -> None:
    """Data 3 s and launches of 1 s on the host, 10 s of work on the device: the host's is hidden but for the first."""
    clocks = Device(monkeypatch)
    clock = PhaseClock(lambda _: None, "cuda:0")
    clock.start(synchronised=synchronised)
    start = clocks.host
    for _ in range(4):
        for phase, host, device in (("data", 3, 0), ("forward", 1, 10)):
            clock.mark(phase)
            clocks.run(host, device)
            clock.mark(phases.UNNAMED)
    clocks.wait()
    found = clock.stop(start, clocks.host, 4)
    assert found["residual_seconds"] == pytest.approx(0)
    expected: dict[str, Any] = {"step_seconds": 14, "phases": {"data": 3, "forward": 11}, "spans": {}}
    if not synchronised:
        expected = {
            "step_seconds": (3 + 1 + 4 * 10) / 4,
            "phases": {"data": 3 / 4, "forward": 41 / 4},
            "host_phases": {"data": 3, "forward": 1},
            "spans": {"data": {"seconds": 3, "overlapped_seconds": 9 / 4}},
            "host_ahead_seconds": (0 + 10 + 16 + 22) / 4,
        }
    assert {name: found[name] for name in expected} == expected


intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: (min(p), max(p))), max_size=8)


@given(intervals, intervals)
def test_each_second_counts_once(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    one, other = ({s for start, end in found for s in range(start, end)} for found in (first, second))
    assert phases.length(first) == len(one)
    assert phases.shared(first, second) == len(one & other)


def test_the_profiler_counts_each_second_once_and_phases_are_no_operators(tmp_path: Path) -> None:
    values = torch.ones(200, 200)

    def step() -> None:
        with torch.profiler.record_function(f"{RANGE}forward"), torch.profiler.record_function("outer"):
            time.sleep(0.01)
            values @ values

    plan = {"wait": 1, "warmup": 1, "active": 3, "repeat": 1}
    result = profile_steps(step, plan, tmp_path / "trace.json.gz", cuda=False)
    rows = {row["name"]: row for row in result["operators"]}
    assert (result["steps"], rows["outer"]["calls"], rows["aten::mm"]["calls"]) == (3, 3, 3)
    # the sleep is the outer range's own; the product inside is not counted there again
    assert 0.03 <= rows["outer"]["self_cpu_seconds"] < result["wall_seconds"]
    assert sum(row["self_cpu_seconds"] for row in rows.values()) <= result["wall_seconds"] * 1.05
    assert not [name for name in rows if name.startswith(("ProfilerStep", RANGE))]
    assert result["phases"].keys() == {"forward"}
    assert 0.03 <= result["phases"]["forward"] <= result["wall_seconds"]
    with gzip.open(tmp_path / "trace.json.gz", "rt") as file:
        trace = json.load(file)
    assert {"aten::mm", "outer"} <= {event.get("name") for event in trace["traceEvents"]}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


@pytest.mark.alone
@pytest.mark.slow
def test_marks_cost_less_than_one_percent_of_a_step(tmp_path: Path, synthetic: RunConfig) -> None:
    """Of the smallest network: the marks of a step, each at its own cost, against the step's time."""
    beat = tmp_path / "beat"
    beat.write_bytes(BEAT.pack(0.0, 0, 0, b""))
    clock, made = PhaseClock(Heartbeat(beat).mark, "cpu"), list[str]()
    trainer = Trainer(synthetic, context(mark=made.append))
    batches = trainer.batches()
    seconds: dict[str, list[float]] = {"steps": [], "marks": []}
    clock.start(synchronised=False)

    def marks() -> None:
        for _ in range(100):
            clock.mark("forward")

    for name, work in (("steps", lambda: trainer.step(next(batches))), ("marks", marks)):
        for _ in range(60):
            start = time.perf_counter()
            work()
            seconds[name].append(time.perf_counter() - start)
    per_step = len(made) / 60 + 4  # and those that a rank makes around a step
    assert statistics.median(seconds["marks"]) / 100 * per_step < 0.01 * statistics.median(seconds["steps"])
