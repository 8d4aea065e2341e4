"""What happened: raw records. Everything the lab says is derived from them when they are read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Annotated, Any

from ddpm_lab.checks import LabError
from ddpm_lab.config import HOOKS, LATER, PRECISIONS, TRIAL_OPTIONS, RunConfig
from ddpm_lab.declared import Entries, Opt, reader
from ddpm_lab.output import printable
from ddpm_lab.plan import Plan

SCHEMA = 4
Count = Annotated[int, Opt(least=0)]
Amount = Annotated[float, Opt(least=0, below=1e15)]
Positive = Annotated[float, Opt(above=0, below=1e15)]
Finite = Annotated[float, Opt(least=-1e15, below=1e15)]
Cohort = tuple[str, str, str, str]
TWIN = "twin"
ROLES = (
    *("baseline", TWIN, "candidate", "cold", "profile", "quality", "choice", "search", "largest", "check", "wrong"),
    *("note", "space", "look"),
)
STATUSES = ("ok", "oom", "unsupported", "diverged", "crashed", "timed out", "refused", "left out")
TRIED = ("steps", "losses", "held_out", "weights_sha256")  # what the quality of a trial that went well says
MOST_COMBINATIONS, LONGEST_NAME, A_DAY = 20_000, 200_000, 86_400
"""Limits of what a record may hold; a clock may be a day fast. Otherwise the latest records are the ones that count."""
LASTING = ("diverged", "refused")
"""Failures that another try on the same machine and code would meet again.

What is unsupported can be installed, memory that was missing may have been another process's, and a thread that never
sleeps may be one that a variable of the environment turns off.
"""
HOST_THREADS = 2  # cores that a rank on a GPU wants: one launches the kernels of a step forwards, one backwards
CROWDED_CORES = 0.25
"""A turn is crowded when its ranks' threads and other processes want so many cores more than there are."""
CROWDED_SHARE = 0.2
"""A set with more than this share of its measured time in crowded turns does not count, and is measured again."""
BUSY_GPU_PERCENT = 10.0  # share of a GPU's time that other processes may take before a turn on it is crowded


class LedgerError(LabError):
    """A ledger that cannot be used, in one sentence."""


class OtherSchemaError(LedgerError):
    """A record that another edition of the lab wrote."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What must be equal for two records to be compared. Host name and date are recorded, not compared."""

    cpu: str
    usable_cores: Annotated[int, Opt(least=1)]
    gpus: tuple[str, ...] = ()
    driver: str | None = None
    torch: str = ""
    python: str = ""

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """A short name for people: what computes, and how many cores stand beside it."""
        cores = f"{self.usable_cores} core{'s' if self.usable_cores != 1 else ''}"
        gpus = " + ".join(f"{count} x {name}" for name, count in sorted(Counter(self.gpus).items()))
        return printable(f"{gpus}, {self.cpu}, {cores}" if gpus else f"{self.cpu}, {cores}, no GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and when a record was measured; None is unknown, never a guess."""

    machine: Machine
    hostname: str | None
    python: str
    packages: dict[str, str]
    cuda: str | None
    gpu_uuids: tuple[str, ...]
    ram_bytes: Count | None
    kernel: str
    slurm_job_id: str | None
    git_commit: str | None
    load_before: Amount | None
    date: str  # ISO 8601 with the offset from UTC

    def __post_init__(self) -> None:
        moment(self.date)


def moment(date: object) -> float:
    """Seconds since 1970 of a date in ISO 8601. Raises ValueError for what is none."""
    found = datetime.fromisoformat(str(date))
    if found.utcoffset() is None or str(date)[:10] != found.date().isoformat():
        raise ValueError(f"date is {date!r}: give ISO 8601 with the offset from UTC")
    return found.timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One timed window: ``seconds`` is the wall time from the first rank's start to the last rank's end.

    A step ends when its slowest rank ends it. ``data_seconds`` is each rank's wait for data, ``others_cores`` how many
    cores other processes kept busy. ``state`` is what the machine did, by the names of ``others.Watch``, and the
    memory of the largest rank at the end (``rss_bytes``, on a GPU ``allocated_bytes`` and ``reserved_bytes``).
    """

    turn: Count
    position: Count
    start_seconds: Finite
    seconds: Annotated[float, Opt(least=1e-9, below=1e9)]
    images: Count
    steps: Annotated[int, Opt(least=1)]
    rank_seconds: Annotated[tuple[float, ...], Opt(above=0)]
    step_seconds: Annotated[tuple[float, ...], Opt(least=0)]
    data_seconds: Annotated[tuple[float, ...], Opt(least=0)]
    others_cores: Finite | None = None
    stolen_seconds: Finite | None = None
    state: dict[str, Finite | None] = field(default_factory=dict)

    @property
    def seconds_per_image(self) -> float:
        """Wall seconds for each image; NaN for a window without images."""
        return self.seconds / self.images if self.images > 0 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank reports of itself; None is unknown, or does not exist.

    ``peak_memory_bytes`` and ``peak_reserved_bytes`` are torch's on the GPU. ``peak_rss_bytes`` is the most host memory
    of the rank's own process, shared libraries included (0.3 GiB with torch alone), loader workers not.
    """

    rank: Count
    device: str
    device_uuid: str | None
    threads: Count
    peak_memory_bytes: Count | None
    peak_reserved_bytes: Count | None
    peak_rss_bytes: Count | None
    losses: tuple[float, ...]
    images: Count | None
    indices_sha256: str


# What is read of the parts of a record, which may hold anything besides.

Seconds = Annotated[tuple[float, ...], Opt(above=0, below=1e15)]
Phases = dict[str, Amount]

# Where a rank ran, what a user's training offers, what a compiler counted.
_RANK = Entries(
    **dict.fromkeys(("rank", "threads", "parameters"), Count),
    **dict.fromkeys(("compiled_frames", "graphs", "graph_breaks", "recompiles"), Count),
    **dict.fromkeys(("flop", "bytes"), Amount),
    **dict.fromkeys(("flop_per_image", "device_total_bytes"), Amount | None),
    device=str,
    host=str | None,
    work={str: Entries({"elements": Amount}, flop=Amount)},
    threads_wait=dict[str, Any],
    first_losses=tuple[float, ...],
    offers=tuple[str, ...],
)

# A time budget of at least one rank: its steps as they are, with a wait after each phase, and under the profiler.
_PROFILED = {"step_seconds": Positive, "phases": Phases}
_SPAN = Entries({"seconds": Amount, "overlapped_seconds": Amount})  # beside the phases, a part of it while others ran
_SPENT = Entries(
    {**_PROFILED, "residual_seconds": Finite, "spans": {str: _SPAN}},
    helpers_cpu_seconds=Amount,
    host_ahead_seconds=Finite | None,
    host_phases=Phases,
)
_RANK_BUDGET = Entries({"unsynchronised": _SPENT, "synchronised": _SPENT}, profiled=(Entries(_PROFILED), None))
_BUDGET = Entries(
    {"steps": Count, "ranks": [_RANK_BUDGET]},
    **dict.fromkeys(("others_cores", "stolen_seconds"), Finite | None),
    state=dict[str, Finite | None],
)

# Wrong ways to measure: steps that are timed as they are, under a profiler whose events are summed, and in phases.
_TIMED = {"steps": Positive, "seconds": Positive}
_PHASED = Entries({**_TIMED, "phases": Phases, "cpu_seconds": Amount}, gpu_utilisation_percent=Amount | None)
_WAYS = Entries(
    fresh=Entries({"step_seconds": Seconds}),
    runs=Entries({"seconds": Seconds}),
    profiled=Entries({**_TIMED, "inclusive_seconds": Amount, "exclusive_seconds": Positive}),
    counted=Entries({"parameters": Count}),
    hidden_devices=dict[str, Any],
    labelled_two=tuple[str, ...],
    **dict.fromkeys(("bars", "loss_read", "unsynchronised"), Entries(_TIMED)),
    **dict.fromkeys(("phases", "one_thread", "phases_waited_for"), _PHASED),
)

PROFILE = Entries(
    steps=Count,
    operators=[
        Entries({"name": str, "calls": Amount}, self_cpu_seconds=Amount | None, self_device_seconds=Amount | None)
    ],
    traces=tuple[str, ...],
    budget=(_BUDGET, None),
    wrong_ways=_WAYS,
)

# A gradient check, each step beside its reference.
_ERRORS = dict.fromkeys(("loss_error", "gradient_error", "ranks_error"), Amount | None)
_LAYER = Entries({"name": str, "error": Amount})
_CHECKED_STEP = Entries({"skipped": bool, "nonfinite": Count, **_ERRORS, "worst_layer": (_LAYER, None)})
_GRADIENTS = Entries(
    {"precision": Annotated[str, Opt(choices=PRECISIONS)], "loss": str, "steps": [_CHECKED_STEP]},
    hook=Annotated[str, Opt(choices=HOOKS)],
)

# Of witness, quality and look. Images that a trial drew are in one row, as base64 of a PNG.
PARTS = Entries(
    ranks=[_RANK],
    gradients=(_GRADIENTS, None),
    samples=(Entries({"png": str, "images": Count, "sampler": str, "steps": Count}), None),
    fid=(Entries({"images": Count, "steps": Count, "inception_sha256": str}, fid=Amount, reason=str), None),
    steps=Count,
    losses=Annotated[tuple[float, ...], Opt(least=-1e15, below=1e15)],
    held_out=[Entries({"images": Count, "loss": Finite})],
    weights_sha256=str,
    sets=tuple[str, ...],
    log_ratios=dict[str, Annotated[tuple[float, ...], Opt(least=-100, below=100)]],
    trainer=str | None,
    codes=tuple[str, ...],
)
SPACE = Entries(  # as plan.Space writes it
    {
        "settings": dict[str, tuple[tuple[str, str, dict[str, Any]], ...]],
        "guess": tuple[Count, ...],
        "left_out": tuple[tuple[str, str], ...],
    },
    only=tuple[tuple[str, tuple[str, ...]], ...],
    preset=str,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What one configuration did in one set.

    Roles: baseline, twin (the baseline again), candidate; cold (a cold compile), profile; choice (a network chosen for
    this machine); search and largest (sizes tried for the largest batch, and how that ended, its limit as the label);
    quality (a trial), check (of a gradient), wrong (a wrong way to measure, whose numbers are in the profile); note (a
    configuration that was left out); space (what a search could choose from, and by its family the sets that measured
    its winner again); look (an answer was shown, which rested on ``sets`` of this baseline with these ``log_ratios`` by
    run id, the twin's under TWIN). ``primary`` marks the candidate of the question's primary comparison.
    ``stages`` are seconds: start, build, compile (the first step), warmup, steady, teardown; of a trial training.
    """

    set_id: str
    experiment: str
    family: str
    role: Annotated[str, Opt(choices=ROLES)]
    label: str
    config: RunConfig
    baseline_id: str
    plan: Plan
    environment: Environment
    code_version: str
    data_name: str
    status: Annotated[str, Opt(choices=STATUSES)] = "ok"
    reason: str | None = None
    mechanism_only: bool = False
    primary: bool = False
    stages: dict[str, Amount] = field(default_factory=dict)
    compile_cache: str | None = None
    warmup_steps: Count = 0
    ranks: tuple[RankRecord, ...] = ()
    windows: tuple[Window, ...] = ()
    witness: Annotated[dict[str, Any], PARTS] = field(default_factory=dict)
    profile: Annotated[dict[str, Any], PROFILE] | None = None
    quality: Annotated[dict[str, Any], PARTS] | None = None
    space: Annotated[dict[str, Any], SPACE] | None = None
    look: Annotated[dict[str, Any], PARTS] | None = None
    schema: int = SCHEMA

    def __hash__(self) -> int:
        return hash((self.set_id, self.label, self.date))

    @property
    def run_id(self) -> str:
        return self.config.run_id

    @property
    def cohort(self) -> Cohort:
        """Machine, code version, data, plan: only records that agree in all four are compared."""
        return (self.environment.machine.key, self.code_version, self.config.data_sha256, self.plan.key)

    @property
    def machine(self) -> Machine:
        return self.environment.machine

    @property
    def date(self) -> str:
        """When it was measured, ISO 8601."""
        return self.environment.date

    def as_dict(self) -> dict[str, Any]:
        config, chosen = self.config.as_dict(), self.config.chosen
        config = {name: value for name, value in config.items() if name in chosen or name not in LATER}
        return {**dataclasses.asdict(self), "config": config, "run_id": self.run_id}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunRecord:
        """Rebuild a record. Raises OtherSchemaError for another edition's, ValueError for values that do not fit."""
        schema = values.get("schema") if isinstance(values, Mapping) else None
        if type(schema) is not int:
            raise ValueError("it has no schema")
        if schema != SCHEMA:
            remedy = "move the file away and measure again" if schema < SCHEMA else "update ddpm_lab"
            raise OtherSchemaError(f"a record has schema {schema}, this version reads {SCHEMA}: {remedy}")
        values = {k: v for k, v in values.items() if k != "run_id"}
        found: RunRecord = _fields({**values, "config": _configuration(json.dumps(values["config"]))}, "")
        needed = {"quality": TRIED, "look": ("sets", "log_ratios")}.get(found.role, ()) if found.status == "ok" else ()
        if lacks := [name for name in needed if name not in (values.get(found.role) or ())]:
            raise ValueError(f"{found.role}.{lacks[0]} is missing")
        if math.prod(map(len, (found.space or {"settings": {}})["settings"].values())) > MOST_COMBINATIONS:
            raise ValueError(f"space has more than {MOST_COMBINATIONS:,} combinations")
        texts = {name: getattr(found, name) for name in ("experiment", "family", "label")}
        texts["machine"] = found.machine.name
        if long := [name for name, text in texts.items() if len(text) > LONGEST_NAME]:
            raise ValueError(f"{long[0]} is longer than {LONGEST_NAME:,} characters")
        if moment(found.date) > time.time() + A_DAY:
            raise ValueError(f"date is {found.date!r}, which is to come")
        ranks = found.config.world_size
        if not found.config.command and any(len(w.rank_seconds) != ranks for w in found.windows):
            raise ValueError(f"windows.rank_seconds: give one for each of {ranks} ranks")
        for name in TRIAL_OPTIONS if found.role == "quality" else ():
            if type(value := found.config.option(name, 0)) is not int:
                raise ValueError(f"config.options.{name} is {value!r}: give a whole number")
        return found


_fields = reader(RunRecord)


@lru_cache(maxsize=4096)
def _configuration(text: str) -> RunConfig:
    """A configuration from its JSON: thousands of records share a few, and with them what is computed from one."""
    return RunConfig.from_dict(json.loads(text))


def set_log_ratio(baseline: RunRecord, other: RunRecord, twin: RunRecord | None = None) -> float:
    """What one set finds for a configuration: the mean of its ``turn_log_ratios``, NaN where there is none."""
    logs = turn_log_ratios(baseline, other, twin)
    return statistics.fmean(logs) if logs else math.nan


def turn_log_ratios(baseline: RunRecord, other: RunRecord, twin: RunRecord | None = None) -> list[float]:
    """The ln(baseline's seconds per image / the other's) of each turn that all have; above 0 the other is faster.

    With ``twin`` the baseline's logarithm is the mean of its own and its twin's, which is narrower at no cost; the mean
    of their times would favour every candidate where windows scatter.
    """
    sides = [seconds_by_turn(r) for r in (baseline, *([twin] if twin else []))]
    theirs = seconds_by_turn(other)
    turns = theirs.keys() & set.intersection(*(set(side) for side in sides))
    return [statistics.fmean(math.log(side[t]) for side in sides) - math.log(theirs[t]) for t in sorted(turns)]


def seconds_by_turn(record: RunRecord) -> dict[int, float]:
    """Seconds per image by turn, of the windows that have a time."""
    values = {w.turn: w.seconds_per_image for w in record.windows}
    return {turn: seconds for turn, seconds in values.items() if math.isfinite(seconds) and seconds > 0}


def crowded(records: Sequence[RunRecord], *, to_come: int = 0) -> bool:
    """Whether a set does not count, since other processes took the cores or the GPU of its ranks for too long.

    A turn is crowded when, on average over its windows, the ranks' threads together with what other processes and the
    hypervisor took exceed the usable cores by CROWDED_CORES; on a GPU, whose ranks take HOST_THREADS each, also when
    another process computes on it. That is decided by load, never by time; what is unknown crowds nothing. A crowded
    turn then weighs as long as it took, all sides together: two threads of which one has lost its core may take sixty
    times as long, and one such turn would be the whole set. Of a set that is still measured, the turns ``to_come`` are
    taken to be as short as the shortest.
    """
    turns: dict[int, list[tuple[float, float]]] = {}
    for r in records:
        for w in r.windows:
            turns.setdefault(w.turn, []).append((-1.0 if r.config.oversubscribe else _excess(r, w), w.seconds))
    seconds = {turn: sum(taken for _, taken in windows) for turn, windows in turns.items()}
    full = [turn for turn, windows in turns.items() if statistics.fmean(excess for excess, _ in windows) >= 0]
    whole = sum(seconds.values()) + to_come * min(seconds.values(), default=0.0)
    return sum(seconds[turn] for turn in full) > CROWDED_SHARE * whole


def crowded_sets(records: Iterable[RunRecord]) -> set[str]:
    """Ids of the sets that do not count."""
    sets: dict[str, list[RunRecord]] = defaultdict(list)
    for r in records:
        sets[r.set_id].append(r)
    return {set_id for set_id, members in sets.items() if set_id and crowded(members)}


def _excess(record: RunRecord, window: Window) -> float:
    """At least 0 where others want too much of the cores, in cores, or of the GPUs, in percent."""
    config, state = record.config, window.state
    cores, watched = record.machine.usable_cores, state.get("watched_seconds")
    threads = min(cores, (HOST_THREADS if config.device == "cuda" else config.rank_threads(cores)) * config.node_size)
    stolen = (window.stolen_seconds or 0.0) / watched if watched else 0.0
    excess = threads + ((window.others_cores or 0.0) + stolen) - cores - CROWDED_CORES
    if config.device == "cpu":
        return excess
    # Where NVML does not tell how busy another process is, one that comes, goes or changes its memory is at work.
    unknown = 100.0 if state.get("gpu_others_changed_bytes") else 0.0
    percent = state.get("gpu_others_percent")
    return 100.0 if excess >= 0 else (unknown if percent is None else percent) - BUSY_GPU_PERCENT


# --- what a gradient check says of a configuration: sound, or what is wrong ---

GRADIENT_BOUNDS = {
    "fp32": (1e-5, 1e-4, 1e-3),
    **dict.fromkeys(("tf32", "fp16"), (2e-3, 0.02, 0.1)),
    "bf16": (1e-2, 0.1, 0.5),
}
"""The most by which a sound step is off, relative to fp32, by precision: its loss, its gradient, its worst layer's.

Measured on a CPU over tiny and seed, both losses, several seeds, batches of 8 to 64, up to 20 steps from 0, 20 and 300
on; well above what sound settings show, and well below what a defect does. fp32 (accumulation, two ranks, compiled,
fused kernels, plain): 2e-7, 1e-5 and 3e-5; it grows with the number of values that are added up, so a GPU has room for
ten times as much. bf16: up to 9e-4, 0.04 and 0.2 in the first 40 steps; after 300 the gradient itself was smaller, and
off by 0.1, its worst layer's by 0.3. tf32 and fp16 have not been measured: both keep three bits more than bf16, so an
eighth of its errors is expected, and a fifth of its bounds granted.
"""

HOOK_BOUNDS = {"none": (0.0, 0.0, 0.0), "bf16": (0.0, 0.01, 0.05), "fp16": (0.0, 0.002, 0.02)}
"""What an exchange by a hook may add to these: it rounds each rank's gradient, and their sum.

Measured with two gloo ranks in fp32, tiny and seed, both losses, batches of 8 and 64, after 10 and 100 steps. bf16: the
gradient was off by 2.4e-3, the worst layer's by 7e-3. fp16: the gradient by 3e-4, but a layer's that falls below what
fp16 can hold by 0.03 to 0.8: no scaler guards an exchange. For that defect there is no room here.
"""

FLIP_BOUNDS = (0.0, 0.02, 0.2)
"""What a flipped sign may do to one step, in any precision.

Under an L1 loss the gradient at an output turns its sign where the prediction meets its target. In fp32 rounding turns
one of N about every hundredth step, which changes the output's gradient by 2 / sqrt(N); measured in the weights': 3e-3,
and 0.02 in the worst layer's. A defect is in every step, so under an L1 loss the median step has to keep the bounds
above, and the worst step these.
"""

RANKS_BOUND = 1e-6
"""The most by which ranks' gradients differ, in any precision: all of them get the same sum, to the last bit."""


def gradient_fault(answer: Mapping[str, Any], *, layers: bool = True) -> str:
    """What is wrong by the answer of a gradient check (``training.gradient_check``); empty if it is sound.

    Steps that the gradient scaler skipped are not judged; at least one has to be left. Without ``layers`` no layer is
    judged alone, as for the question whether to train: an exchange in fp16 lost more than half of a bias's gradient,
    the whole gradient was off by 0.03 %, and eight trained runs were not worse.
    """
    taken = [step for step in answer["steps"] if not step["skipped"]]
    if not taken:
        return f"the gradient scaler skipped every step of {len(answer['steps'])}"
    if nonfinite := sum(step["nonfinite"] for step in taken):
        return f"{nonfinite:,} values of loss and gradient are infinite or no numbers"
    numbers = ("loss_error", "gradient_error", "worst_layer", "ranks_error")
    if any(step[name] is None for step in taken for name in numbers):
        return "the reference has no loss or gradient to compare with, or a rank's gradient is no number"
    found, hook = [], answer.get("hook", "none")
    precision = answer["precision"] + f" with gradients exchanged in {hook}" * (hook != "none")
    if (apart := max(step["ranks_error"] for step in taken)) > RANKS_BOUND:
        found.append(f"the gradients of two ranks differ by {_share(apart)}, and after an exchange they are the same")
    layer = max((step["worst_layer"] for step in taken), key=lambda layer: float(layer["error"]))["name"]
    errors = {"the loss": [s["loss_error"] for s in taken], "the gradient": [s["gradient_error"] for s in taken]}
    if layers:
        errors[f"the gradient of {layer}"] = [step["worst_layer"]["error"] for step in taken]
    bounds = zip(GRADIENT_BOUNDS[answer["precision"]], HOOK_BOUNDS[hook], FLIP_BOUNDS, strict=True)
    for (what, off), (own, hooked, flips) in zip(errors.items(), bounds, strict=False):
        once = max(own + hooked, flips) if answer["loss"] == "l1" else own + hooked
        if max(off) > once or statistics.median_low(off) > own + hooked:
            found.append(f"{what} is off by {_share(max(off))}, and {precision} explains {_share(own + hooked)}")
    return "; ".join(found)


def _share(error: float) -> str:
    """A relative error in percent, or as a power of ten where that would be mostly zeros."""
    if 0 < error < 1e-4:
        return f"{error:.0e}"
    return f"{100 * error:.0f} %" if error > 0.1 else f"{100 * error:.2g} %"
