"""Where the time of a step goes: a clock at every phase boundary, and spans of what runs beside the main line.

On a GPU the main line is the device's own: an event is recorded with each mark, so that host work hidden behind the
device costs nothing. Time that no mark names shows in the residual, since the window has a clock of its own.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter  # which somebody's code may replace in its module
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

COMPUTE = ("forward", "backward", "optimizer", "ema")
COMMUNICATION = "communication"
UNNAMED = "step"  # what the lab marks around a workload's step: time under this name is in no phase
RANGE = "phase: "  # beginning of the names of the profiler's ranges around the phases of a step
TOP = 80  # operators kept by name; the rest are summed as (other operators)

Interval = tuple[float, float]


def length(intervals: Iterable[Interval]) -> float:
    """Seconds that the intervals cover, each second once."""
    covered, reached = 0.0, -math.inf
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def shared(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Seconds that both cover."""
    return length(first) + length(second) - length([*first, *second])


def mean(windows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of equally long windows, number by number; what a window lacks was 0 there."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for window in windows for name in window):
        values = [window.get(name) for window in windows]
        nested = any(isinstance(value, Mapping) for value in values)
        found[name] = mean([v or {} for v in values]) if nested else round(sum(v or 0 for v in values) / len(values), 9)
    return found


def cuda_event() -> Any:
    """A moment on the device's line: when it has done what it was given so far."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


class PhaseClock:
    """Passes marks on to the heartbeat; in a budget window keeps them, and under the profiler makes ranges of them."""

    def __init__(self, beat: Callable[[str], None], device: str) -> None:
        self._beat, self._cuda = beat, device.startswith("cuda")
        self._marks: list[tuple[str, float, Any]] | None = None
        self._spans: list[tuple[str, Any, Any]] = []
        self._synchronised = False
        self.tracing = False  # whether marks become ranges of the profiler
        self._range = ExitStack()

    def mark(self, phase: str) -> None:
        """End the phase before and begin ``phase``."""
        if self._marks is not None:
            if self._synchronised and self._cuda:
                torch.cuda.synchronize()
            self._marks.append((phase, perf_counter(), self._event()))
        elif self.tracing:
            self._range.close()
            if phase != UNNAMED:
                self._range.enter_context(torch.profiler.record_function(RANGE + phase))
        self._beat(phase)

    def span(self, name: str, start: Any, end: Any) -> None:
        """Note what ran beside the main line: seconds of ``time.perf_counter``, or CUDA events; from any thread."""
        if self._marks is not None:
            self._spans.append((name, start, end))

    def _event(self) -> Any:
        return cuda_event() if self._cuda and self._marks is not None else None

    def watch(self, ddp: DistributedDataParallel, hook: Any = None) -> None:
        """Note when ``ddp`` exchanges gradients, by ``hook`` or as torch does by default. Once, before any step."""
        # A function with annotations as text would be refused: DDP compares them with types.
        ddp.register_comm_hook(None, lambda _, bucket: self._all_reduce(bucket, hook))

    def _all_reduce(self, bucket: Any, hook: Any) -> Future[torch.Tensor]:
        # Imported with the first exchange, so that no other rank's start pays for it.
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: PLC0415

        waiting = self._marks is not None and self._synchronised
        # With the last gradients the backward pass is over: until the optimizer begins, only the exchange is left.
        if waiting or (bucket.is_last() and not self.tracing):
            self.mark(COMMUNICATION)
        start = self._event() or perf_counter()
        exchange: Any = hook or allreduce_hook  # its annotation leaves out that None means all ranks

        def done(future: Future[torch.Tensor]) -> torch.Tensor:
            # On a GPU this runs when the exchange is queued, on a stream that waits for it: the event is its end.
            self.span(COMMUNICATION, start, self._event() or perf_counter())
            return future.value()

        future: Future[torch.Tensor] = exchange(None, bucket).then(done)
        if waiting:
            future.wait()
            self.mark("backward")
        return future

    def start(self, *, synchronised: bool) -> None:
        """Keep marks and spans from now on; ``synchronised``: wait for device and communication at each mark."""
        self._marks, self._spans, self._synchronised = [], [], synchronised
        self._origin = self._event()

    def stop(self, start: float, end: float, steps: int) -> dict[str, Any]:
        """Seconds per step of the window that the caller timed from ``start`` to ``end`` (``time.perf_counter``).

        The last mark ends the last phase. Of spans, cut to the window, what ran beside a phase of ``COMPUTE`` is
        overlapped. On a GPU also what the host spent in each phase, and how far it was ahead when a step began.
        """
        marks, self._marks = self._marks or [], None
        on_device = self._cuda and not self._synchronised

        def seconds(moment: Any) -> float:
            """A moment in seconds since the start of the window."""
            return moment - start if isinstance(moment, int | float) else self._origin.elapsed_time(moment) / 1e3

        def by_phase(moments: list[float]) -> dict[str, list[Interval]]:
            intervals: dict[str, list[Interval]] = defaultdict(list)
            for (phase, _, _), interval in zip(marks, itertools.pairwise(moments), strict=False):
                intervals[phase].append(interval)
            return intervals

        def per_step(phases: Mapping[str, list[Interval]]) -> dict[str, float]:
            return {name: sum(b - a for a, b in parts) / steps for name, parts in phases.items() if name != UNNAMED}

        host_moments = [seconds(moment) for _, moment, _ in marks]
        main = by_phase([seconds(event) for _, _, event in marks] if on_device else host_moments)
        spans: dict[str, list[Interval]] = defaultdict(list)
        for name, span_start, span_end in self._spans:
            spans[name].append((max(0.0, seconds(span_start)), min(end - start, seconds(span_end))))
        if on_device:  # the host loads the next batch while the device still computes
            spans.setdefault("data", by_phase(host_moments)["data"])
        compute = [interval for name in COMPUTE for interval in main.get(name, ())]
        phases, step_seconds = per_step(main), (end - start) / steps
        budget: dict[str, Any] = {
            "step_seconds": step_seconds,
            "phases": phases,
            "residual_seconds": step_seconds - sum(phases.values()),
            "spans": {
                name: {"seconds": length(parts) / steps, "overlapped_seconds": shared(parts, compute) / steps}
                for name, parts in spans.items()
            },
        }
        if on_device:
            pairs = zip(marks, host_moments, strict=True)
            ahead = [seconds(event) - host for (name, _, event), host in pairs if name == "data"]
            budget["host_phases"] = per_step(by_phase(host_moments))
            budget["host_ahead_seconds"] = sum(ahead) / steps
        return budget


def profile_steps(step: Callable[[], None], plan: dict[str, int], trace: Path, cuda: bool) -> dict[str, Any]:
    """Profile ``plan['active']`` steps after ``wait`` and ``warmup`` ones, ``repeat`` times.

    Writes a compressed Chrome trace of the last repetition to ``trace``. Returns the operators of all repetitions, with
    exclusive ("self") times so that each second of a thread counts once, and the seconds of each phase.
    """
    operators: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    phases: dict[str, float] = defaultdict(float)
    wall_seconds = start = 0.0

    def add_repetition(profiler: Any) -> None:
        for event in profiler.key_averages():
            # A kernel stands in the list twice: by itself, and as device time of the operator that launched it.
            if event.device_type != DeviceType.CPU or event.key.startswith("ProfilerStep"):
                continue
            if event.key.startswith(RANGE):
                phases[event.key.removeprefix(RANGE)] += event.cpu_time_total / 1e6
            else:
                row = (event.count, event.self_cpu_time_total / 1e6, event.self_device_time_total / 1e6)
                operators[event.key] = [a + b for a, b in zip(operators[event.key], row, strict=True)]
        partial = trace.with_name(f".partial.{trace.name}")
        profiler.export_chrome_trace(str(partial))  # compressed, by the end of its name
        partial.replace(trace)

    def now() -> float:
        if cuda:
            torch.cuda.synchronize()
        return perf_counter()

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    first = plan["wait"] + plan["warmup"]
    last = first + plan["active"] - 1
    with profile(activities=activities, schedule=schedule(**plan), on_trace_ready=add_repetition) as profiler:
        for _ in range(plan["repeat"]):
            for i in range(last + 1):
                if i == first:
                    start = now()
                step()
                if i == last:
                    wall_seconds += now() - start
                profiler.step()
    steps, rows = plan["active"] * plan["repeat"], _operator_rows(operators, by_device=cuda)
    found = {"steps": steps, "wall_seconds": wall_seconds, "schedule": plan, "phases": phases}
    return {**found, "operators": rows, "traces": [trace.name]}


def _operator_rows(operators: Mapping[str, list[float]], *, by_device: bool) -> list[dict[str, Any]]:
    """The ``TOP`` operators by their own seconds, the longest first, and the sum of the rest as a last row."""
    column = 2 if by_device and any(row[2] for row in operators.values()) else 1
    ranked = sorted(operators.items(), key=lambda item: item[1][column], reverse=True)
    rows = [(name, *columns) for name, columns in ranked[:TOP]]
    if rest := [columns for _, columns in ranked[TOP:]]:
        rows.append(("(other operators)", *map(sum, zip(*rest, strict=True))))
    names = ("name", "calls", "self_cpu_seconds", "self_device_seconds")
    return [dict(zip(names, row, strict=True)) for row in rows]
