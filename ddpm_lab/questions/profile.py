"""Where does the time of a training step go? One profiled run: phases, what lies in none, and operators."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from ddpm_lab.explain import charts, phrases
from ddpm_lab.explain.answer import Answer, View, speeds
from ddpm_lab.explain.charts import Figure, Panel, Row, bars
from ddpm_lab.explain.comparisons import MECHANISM_ONLY
from ddpm_lab.explain.findings import ANSWERED, FAILED, NOT_EXPLAINED, compared, plain
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.table import Table
from ddpm_lab.plan import Experiment, Question
from ddpm_lab.record import RunRecord
from ddpm_lab.training.setting import Batch, Precision, Setup, WorldSize

QUESTION = Question(title="Where does the time of a training step go?", file="01_profile")


def profile(
    setup: Setup, *, global_batch_size: Batch = None, precision: Precision | None = None, world_size: WorldSize = 1
) -> Experiment:
    """Where does the time of a training step go? One profiled run, which supplies no speed."""
    setup.check_ranks(world_size)
    precision, batch = precision or setup.plain_precision, setup.batch_size(global_batch_size, world_size)
    config = setup.config(purpose="profile", global_batch_size=batch, precision=precision, world_size=world_size)
    label = f"{setup.precision_name(precision)}, {setup.ranks_label(world_size)}"
    family = setup.family_name(batch, world_size)
    return Experiment(name="profile", families=(), profiles=((family, label, config),))


# --- the time budget: each second once --------------------------------------------------------------------------------

IO, TRANSFER, COMPUTE, OTHER = "I/O", "transfer", "compute", "other"
CLASSES = {
    "data": IO,
    "copy": TRANSFER,
    "forward": COMPUTE,
    "backward": COMPUTE,
    "communication": TRANSFER,
    "optimizer": COMPUTE,
    "EMA": COMPUTE,
}
"""Class of each phase, in the order of a step; phases of a workload's own are of the class "other"."""
LONG = {"data": "waiting for data", "copy": "host-to-device copy", "EMA": "weight averaging (EMA)"}
WORKERS = "loader workers"
_NAMES = {"ema": "EMA", "all-reduce": "communication"}

UNEXPLAINED = 0.10  # share of a step in no phase above which a budget explains nothing
AHEAD, BUSY = 0.05, 80.0
"""A GPU that is busy for less of the time (per cent) waits for a host that is less ahead of it (part of a step)."""
DISTURBED = 0.1  # share of the cores above which other processes disturb a budget


def class_of(phase: str) -> str:
    return CLASSES.get(phase, OTHER)


def _ordered(phases: Mapping[str, float]) -> dict[str, float]:
    """Seconds by name for people, in the order of a step; names that mean the same are one."""
    found = dict.fromkeys(CLASSES, 0.0)
    for name, seconds in phases.items():
        found[_NAMES.get(name, name)] = found.get(_NAMES.get(name, name), 0.0) + float(seconds)
    return {name: seconds for name, seconds in found.items() if seconds}


class TARGETS:
    """S002's thresholds for what a step does, each a share of 1.

    ``compute`` is to be exceeded by the part of a step's wall time that computes, ``io`` not to be reached by the part
    that waits for data; ``memory`` are the ends of what should be in use, ``utilisation`` is to be exceeded by the
    device.
    """

    whose = "S002"
    compute, io, memory, utilisation = 0.80, 0.15, (0.30, 0.60), 0.80


class Line:
    """A rank's step: its wall time, the seconds of each phase by name in the order of a step, and of no phase.

    The residual is below 0 where phases sum to more than the wall time.
    """

    def __init__(self, window: Mapping[str, Any]) -> None:
        self.step_seconds, self.residual_seconds = float(window["step_seconds"]), float(window["residual_seconds"])
        self.phases = _ordered(window["phases"])

    @property
    def residual_share(self) -> float:
        return self.residual_seconds / self.step_seconds

    def share(self, name: str) -> float:
        """Share of the step of a phase, or of all phases of a class."""
        return sum(s for phase, s in self.phases.items() if name in (phase, class_of(phase))) / self.step_seconds


class Budget:
    """The time budget of the slowest rank: the one whose own work takes longest, so that the others wait for it.

    ``running`` is its step as training runs, ``waiting`` with each phase waited for, ``others`` are the other ranks as
    training runs. ``beside`` are seconds per step that ran beside the phases, by name, with those of them beside
    computing; ``ahead_seconds`` is how far the host is ahead of the device when a step begins (None on a CPU).
    ``disturbance`` is a sentence if others took more than a turn of a set may lose, or if nobody knows what they took.
    ``trace_difference`` is the largest difference of a phase's share from the profiler's trace, ``profiler_slowdown``
    the profiled step's time over this one's; NaN where there is no trace.
    """

    def __init__(self, values: Mapping[str, Any], usable_cores: int) -> None:
        lines = [Line(rank["unsynchronised"]) for rank in values["ranks"]]
        own = [line.step_seconds - line.phases.get("communication", 0.0) for line in lines]
        self.rank = own.index(max(own))
        slowest, self.steps = values["ranks"][self.rank], int(values["steps"])
        window = slowest["unsynchronised"]
        self.on_device = "host_phases" in window
        self.running, self.waiting = lines[self.rank], Line(slowest["synchronised"])
        self.others = {rank: line for rank, line in enumerate(lines) if rank != self.rank}
        self.beside = {name: (s["seconds"], s["overlapped_seconds"]) for name, s in window["spans"].items()}
        if (helpers := window.get("helpers_cpu_seconds", 0.0)) > 0:
            self.beside[WORKERS] = (helpers, helpers)
        self.ahead_seconds: float | None = window.get("host_ahead_seconds")
        self.busy_percent: float | None = (values.get("state") or {}).get("gpu_utilisation_percent")
        others, cores = values.get("others_cores"), phrases.plural(usable_cores, "core")
        self.disturbance = "What other processes took is unknown here" if others is None else ""
        if others is not None and others > DISTURBED * usable_cores:
            self.disturbance = f"Other processes kept {others:.1f} of {cores} busy while the time budget was taken"
        self.trace_difference, self.profiler_slowdown = _check(window, slowest.get("profiled"))

    @property
    def explained(self) -> bool:
        """Whether the phases account for the step."""
        return abs(self.running.residual_share) <= UNEXPLAINED

    @property
    def waits_for_host(self) -> bool:
        """Whether the GPU has less to do than the host that launches its kernels, and neither waits for data."""
        if self.ahead_seconds is None or self.busy_percent is None or self.running.share("data") >= TARGETS.io:
            return False
        return self.ahead_seconds < AHEAD * self.running.step_seconds and self.busy_percent < BUSY


def budget(record: RunRecord) -> Budget | None:
    """The time budget that a profile record holds, or None."""
    values = (record.profile or {}).get("budget")
    return Budget(values, record.machine.usable_cores) if values and values["ranks"] else None


def _check(window: Mapping[str, Any], profiled: Mapping[str, Any] | None) -> tuple[float, float]:
    """Largest difference of a phase's share from the trace, and how many times as long the profiled step took.

    The trace's ranges are the host's, so on a GPU the host's own phases are what they check. The trace holds the wait
    for gradients in the backward pass, and a phase that comes rarely perhaps not at all: shares are of what both hold.
    """
    if not profiled or not profiled.get("phases"):
        return math.nan, math.nan
    ours, theirs = _ordered(window.get("host_phases", window["phases"])), _ordered(profiled["phases"])
    if "communication" not in theirs:
        ours["backward"] = ours.get("backward", 0.0) + ours.pop("communication", 0.0)
    both = [name for name in ours if name in theirs]
    a, b = (sum(phases[name] for name in both) for phases in (ours, theirs))
    shares = [abs(ours[name] / a - theirs[name] / b) for name in both] if a and b else []
    return max(shares, default=math.nan), float(profiled["step_seconds"]) / float(window["step_seconds"])


def percent(share: float) -> str:
    """Such as "52 %", "6.0 %", "below 0.1 %"."""
    if abs(share) < 0.0005:
        return "below 0.1 %"
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def headline(found: Budget) -> str:
    """The answer in one line."""
    line = found.running
    if not found.explained:
        return f"Not explained: {percent(line.residual_share)} of a step lies in no phase"
    top = max(line.phases, key=lambda name: line.phases[name])
    data, exchange = line.share("data"), line.share("communication")
    if top == "data":
        return f"Waiting for data takes {percent(data)} of a step: the loader is the limit"
    fed = "the GPU waits for the host" if found.waits_for_host else "the loader is not the limit"
    ends = [fed if data < TARGETS.io else f"waiting for data takes {percent(data)}"]
    if top != "communication" and exchange >= UNEXPLAINED:
        ends.insert(0, f"waiting for gradients takes {percent(exchange)}")
    return f"{phrases.begun(top)} takes {percent(line.share(top))} of a step; {', '.join(ends)}"


def evidence(found: Budget) -> str:
    """What stands behind the headline, in sentences."""
    line, beside = found.running, []
    for name, (seconds, overlapped) in found.beside.items():
        if name == WORKERS:
            beside.append(f"{WORKERS} {phrases.seconds(seconds)} of CPU time a step")
        elif seconds > 0:
            what, part = "loading" if name == "data" else name, percent(overlapped / seconds)
            beside.append(f"{what} {phrases.seconds(seconds)} a step, {part} of it while computing")
    if found.ahead_seconds is not None:
        beside.append(f"the host {phrases.seconds(max(0.0, found.ahead_seconds))} ahead when a step begins")
    parts = [
        f"A step takes {phrases.seconds(line.step_seconds)}; {percent(line.residual_share)} lies in no phase",
        f"Compute share {percent(line.share(COMPUTE))} (target: above {percent(TARGETS.compute)}), "
        f"I/O {percent(line.share(IO))} (target: below {percent(TARGETS.io)})",
        f"Beside the phases: {phrases.joined(beside)}" if beside else "",
    ]
    if found.waits_for_host:
        text = f"The GPU was busy {found.busy_percent:.0f} % of the time: fewer launches an image feed it better"
        parts.append(f"{text}, by a larger batch, torch.compile or CUDA graphs")
    if not math.isnan(found.trace_difference):
        text = f"The profiler's trace gives the same shares within {max(0.1, 100 * found.trace_difference):.1f} points"
        parts.append(f"{text}, at {found.profiler_slowdown:.2f} times the step time")
    return ". ".join(filter(None, (*parts, found.disturbance)))


def table(found: Budget) -> Table:
    """A row for each phase, for what lies in none, and for the whole step."""
    time = "Time per step" + (f", rank {found.rank} (slowest)" if found.others else "")
    lines = {"Each phase waited for": found.waiting, **{f"Rank {r}": line for r, line in found.others.items()}}

    def row(name: str, kind: str, seconds: Sequence[float]) -> dict[str, str]:
        first, *others = map(phrases.seconds, seconds)
        cells = {"Phase": name, "Class": kind, time: first, "Share": percent(seconds[0] / found.running.step_seconds)}
        return cells | dict(zip(lines, others, strict=True))

    every = [found.running, *lines.values()]
    names = _ordered({name: 1.0 for line in every for name in line.phases})
    rows = [row(LONG.get(n, n), class_of(n), [line.phases.get(n, 0.0) for line in every]) for n in names]
    rows.append(row("in no phase", "residual", [line.residual_seconds for line in every]))
    return [*rows, row("whole step", "wall time", [line.step_seconds for line in every])]


# --- operators --------------------------------------------------------------------------------------------------------


def on_device(record: RunRecord) -> bool:
    """Whether a profile holds device time, which then is what its shares are taken of."""
    return any((op.get("self_device_seconds") or 0) > 0 for op in (record.profile or {}).get("operators", ()))


def unseen(record: RunRecord) -> str:
    """A sentence where a profile of a GPU holds no device time; else empty."""
    why = "The profiler saw nothing of the GPU (CUPTI may be refused here, as on WSL2)"
    return "" if record.config.device == "cpu" or on_device(record) else f"{why}: operators stand by their CPU time."


class Operator(NamedTuple):
    """Calls and exclusive seconds of an operator in a profiled step, and its share of all seconds."""

    name: str
    calls: float
    seconds: float
    share: float


def operators(record: RunRecord) -> list[Operator]:
    """Operators of a profile by exclusive time, longest first.

    Exclusive time leaves out what an operator spends in others that it calls, so the seconds add up. It is device time
    where the profile holds any, else CPU time.
    """
    field, steps = "self_device_seconds" if on_device(record) else "self_cpu_seconds", _steps(record)
    every = (record.profile or {}).get("operators", ())
    # ProfilerStep is a range around operators: the Python code between them.
    timed = [(op, float(op.get(field) or 0.0)) for op in every if not op["name"].startswith("ProfilerStep")]
    total = sum(seconds for _, seconds in timed)
    found = [Operator(op["name"], op["calls"] / steps, s / steps, s / total) for op, s in timed if s > 0]
    return sorted(found, key=lambda op: (-op.seconds, op.name))


def _steps(record: RunRecord) -> int:
    return max(1, int((record.profile or {}).get("steps", 1)))


# --- the answer -------------------------------------------------------------------------------------------------------

_TOP = 12  # operators in figure and table
_COLOURS = dict(zip((COMPUTE, IO, TRANSFER, OTHER), charts.SERIES, strict=False))
_SHOWN = 0.0005  # smaller phases are named in the note


def answer(study: Study) -> Answer:
    """Show the time budget of the latest profile, and its operators."""
    latest = next(((r, b) for r in reversed(study.records) if r.status == "ok" and (b := budget(r))), None)
    if latest is None:
        found = compared(replace(study, records=()))
        if failed := next((r for r in reversed(study.records) if r.status != "ok"), None):
            why = f"{failed.label}: {phrases.failure(failed)}."
            found = plain(study, "The profile failed", FAILED, why)
        return speeds(study, found)
    record, taken = latest
    context = phrases.context(replace(study, records=(record,)))
    mechanism = f"{MECHANISM_ONLY.capitalize()}." if record.mechanism_only else ""
    status, verdict = (ANSWERED, "profiled") if taken.explained else (NOT_EXPLAINED, NOT_EXPLAINED)
    fields = {"evidence": f"{evidence(taken)}.", "verdict": verdict}
    found = plain(study, headline(taken), status, mechanism, unseen(record), **fields)
    drawn = partial(_operators_figure, f"{context}{charts.SEPARATOR}{record.family}", record)
    views = (
        View("Operators of profiled steps, each second counted once.", "operators", drawn),
        View("The operators in numbers.", table=partial(_operators_table, record)),
    )
    where = [context, record.label, phrases.plural(taken.steps, "step"), *[MECHANISM_ONLY] * record.mechanism_only]
    figure = partial(_budget_figure, taken, charts.SEPARATOR.join(where))
    shown = views if operators(record) else ()
    return Answer(study=study, finding=found, figure=figure, table=partial(table, taken), views=shown)


def _operators_table(record: RunRecord) -> Table:
    """Return the operators that take most of a profiled step."""
    found = operators(record)
    if rest := found[_TOP:]:
        calls, seconds, share = (sum(column) for column in zip(*(op[1:] for op in rest), strict=True))
        found = [*found[:_TOP], Operator(phrases.plural(len(rest), "other operator"), calls, seconds, share)]
    return [
        {
            "Operator": op.name,
            "Calls per step": f"{op.calls:,.0f}",
            "Exclusive time per step, under the profiler": phrases.seconds(op.seconds),
            "Share": f"{100 * op.share:.1f} %",
        }
        for op in found
    ]


def _budget_figure(found: Budget, context: str) -> Figure:
    """A step as it runs, of several ranks the slowest one's; and with each phase waited for, where that differs."""
    shown = [_panel(f"{f'Rank {found.rank}, the slowest, as' if found.others else 'As'} training runs", found.running)]
    if found.others or found.on_device:
        what = "the device" if found.on_device else "communication"
        shown.append(_panel(f"Waiting for {what} at the end of each phase", found.waiting))
    kinds = {class_of(name) for name in found.running.phases}
    small = [name for name in found.running.phases if found.running.share(name) < _SHOWN]
    note = f"Compute share {percent(found.running.share(COMPUTE))}: forward, backward, optimizer and averaging."
    note += f" Below 0.1 %: {phrases.joined(small)}." if small else ""
    return bars(
        shown,
        title=headline(found),
        context=context,
        label="milliseconds since the step began",
        note=note + (f" {found.disturbance}." if found.disturbance else ""),
        names={kind: colour for kind, colour in _COLOURS.items() if kind in kinds},
        steps=True,
    )


def _panel(heading: str, line: Line) -> Panel:
    phases = [(n, s, _COLOURS[class_of(n)]) for n, s in line.phases.items() if line.share(n) >= _SHOWN]
    rows = [
        Row(
            name=LONG.get(name, name),
            value=1e3 * max(0.0, seconds),
            colour=colour,
            text=f"{percent(seconds / line.step_seconds)}, {phrases.seconds(max(0.0, seconds))}",
        )
        for name, seconds, colour in [*phases, ("in no phase", line.residual_seconds, charts.FAINT)]
    ]
    return Panel(heading=f"{heading}: {phrases.seconds(line.step_seconds)} a step", rows=rows)


def _operators_figure(context: str, record: RunRecord) -> Figure:
    rows = []
    for op in operators(record)[:_TOP]:
        text = f"{100 * op.share:.1f} %, {phrases.plural(charts.number(op.calls), 'call')} a step"
        rows.append(Row(name=_short(op.name), value=100 * op.share, colour=charts.SERIES[0], text=text))
    kind = "device" if on_device(record) else "CPU"
    return bars(
        [Panel(rows=rows)],
        title="The operators that take most of a training step",
        context=f"{context}{charts.SEPARATOR}{phrases.plural(_steps(record), 'profiled step')}",
        label="share of all operator time, %",
        note=f"Exclusive {kind} time: in an operator without those it calls, so that each second counts once. The "
        f"profiler slows a step down: shares are shown, not speeds. {unseen(record)}".strip(),
    )


def _short(name: str) -> str:
    """The name of an operator; of kernels, which are longer than two lines, both ends."""
    n = charts.NAME
    return name if len(name) <= 2 * n else f"{name[:n]}\N{HORIZONTAL ELLIPSIS}{name[1 - n :]}"
