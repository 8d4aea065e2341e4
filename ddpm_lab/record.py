"""Raw records of what was measured. All results are computed from them when they are read."""

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
from ddpm_lab.plan import Plan, Space

SCHEMA = 4
Count = Annotated[int, Opt(least=0)]
Amount = Annotated[float, Opt(least=0, below=1e15)]
Positive = Annotated[float, Opt(above=0, below=1e15)]
Finite = Annotated[float, Opt(least=-1e15, below=1e15)]
Cohort = tuple[str, str, str, str]
TWIN = "twin"
ROLES = (
    *("baseline", TWIN, "candidate", "cold", "profile", "quality", "search", "largest", "check", "wrong"),
    *("note", "space", "look"),
)
STATUSES = ("ok", "oom", "unsupported", "diverged", "crashed", "timed out", "refused", "left out")
TRIED = ("steps", "losses", "held_out", "weights_sha256")  # required in ``quality`` of a successful trial
MOST_COMBINATIONS, LONGEST_NAME, A_DAY = 20_000, 200_000, 86_400
"""Limits on a record. Its date may be up to a day ahead, for fast clocks; a later date would outrank all others."""
LASTING = ("diverged", "refused")
"""Failures that are permanent for the same machine and code.

Others may pass: what is unsupported can be installed, another process may have used the missing memory, and an
environment variable may turn off a thread that never sleeps.
"""
HOST_THREADS = 2  # cores that a rank on a GPU needs: one launches the kernels of the forward pass, one the backward's
CROWDED_CORES = 0.25
"""A turn is crowded if its ranks' threads and other processes together need this many more cores than there are."""
CROWDED_SHARE = 0.2
"""A set with more than this share of its measured time in crowded turns does not count, and is measured again."""
BUSY_GPU_PERCENT = 10.0  # share of a GPU's time that other processes may use before a turn on it is crowded


class LedgerError(LabError):
    """A ledger cannot be used."""


class OtherSchemaError(LedgerError):
    """A record was written by another version of the lab."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The properties of a machine that must be equal for two records to be compared. Its host name need not be."""

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
        """A short readable name: the GPUs if any, the CPU, and the number of usable cores."""
        cores = f"{self.usable_cores} core{'s' if self.usable_cores != 1 else ''}"
        gpus = " + ".join(f"{count} x {name}" for name, count in sorted(Counter(self.gpus).items()))
        return printable(f"{gpus}, {self.cpu}, {cores}" if gpus else f"{self.cpu}, {cores}, no GPU")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and when a record was measured. None means unknown."""

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


def moment(date: object) -> float:
    """Return seconds since 1970 for an ISO 8601 date with a UTC offset. Raises ValueError for anything else."""
    found = datetime.fromisoformat(str(date))
    if found.utcoffset() is None or str(date)[:10] != found.date().isoformat():
        raise ValueError(f"date is {date!r}: give ISO 8601 with the offset from UTC")
    return found.timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One timed window: ``seconds`` is the wall time from the first rank's start to the last rank's end.

    A step ends when its slowest rank finishes it. ``data_seconds`` is the time each rank waited for data, and
    ``others_cores`` the number of cores that other processes kept busy. ``state`` has the machine's state, as in
    ``others.Watch``, and the largest final memory of any rank (``rss_bytes``; ``allocated_bytes``, ``reserved_bytes``).
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
        """Wall time per image in seconds; NaN for a window without images."""
        return self.seconds / self.images if self.images > 0 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """The summary of one rank; None means unknown or not applicable.

    ``peak_memory_bytes`` and ``peak_reserved_bytes`` are torch's values for the GPU. ``peak_rss_bytes`` is the peak of
    host memory of the rank's own process, with shared libraries (0.3 GiB for torch alone) but without loader workers.
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


# The parts of a record that are read; they may contain other entries, too.

Seconds = Annotated[tuple[float, ...], Opt(above=0, below=1e15)]
Phases = dict[str, Amount]

# Where a rank ran, what the user's training provides, and the compiler's counters.
_RANK = Entries(
    **dict.fromkeys(("rank", "threads", "parameters"), Count),
    **dict.fromkeys(("compiled_frames", "graphs", "graph_breaks", "recompiles"), Count),
    device_total_bytes=Amount | None,
    device=str,
    host=str | None,
    threads_wait=dict[str, Any],
    first_losses=tuple[float, ...],
    offers=tuple[str, ...],
)

# Time budgets of one or more ranks: of ordinary steps, of steps that wait after each phase, and under the profiler.
_PROFILED = {"step_seconds": Positive, "phases": Phases}
_SPAN = Entries({"seconds": Amount, "overlapped_seconds": Amount})  # outside the phases; partly in parallel with them
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

# Wrong ways to measure: timed steps, profiler events added up, and phases.
_TIMED = {"steps": Positive, "seconds": Positive}
_PHASED = Entries({**_TIMED, "phases": Phases, "cpu_seconds": Amount}, gpu_utilisation_percent=Amount | None)
_WAYS = Entries(
    fresh=Entries({"step_seconds": Seconds}),
    runs=Entries({"seconds": Seconds}),
    profiled=Entries({**_TIMED, "inclusive_seconds": Amount, "exclusive_seconds": Positive}),
    counted=Entries({"parameters": Count}),
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

# A gradient check: the errors of each step relative to a reference step.
_ERRORS = dict.fromkeys(("loss_error", "gradient_error", "ranks_error"), Amount | None)
_LAYER = Entries({"name": str, "error": Amount})
_CHECKED_STEP = Entries({"skipped": bool, "nonfinite": Count, **_ERRORS, "worst_layer": (_LAYER, None)})
_GRADIENTS = Entries(
    {"precision": Annotated[str, Opt(choices=PRECISIONS)], "loss": str, "steps": [_CHECKED_STEP]},
    hook=Annotated[str, Opt(choices=HOOKS)],
)

# Entries of witness, quality and look.
PARTS = Entries(
    ranks=[_RANK],
    gradients=(_GRADIENTS, None),
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The result of one configuration in one set.

    Roles: baseline, twin (the baseline again), candidate; cold (a cold compile), profile; search and largest (a size
    tried for the largest batch, and the result, with its limit as the label); quality (a trial), check (of a
    gradient), wrong (a wrong way to measure, with its numbers in the profile); note (a configuration that was left
    out); space (the search space, whose family names the sets that measured the winner again); look (an answer was
    shown, based on ``sets`` of this baseline and on ``log_ratios`` by run id, the twin's under TWIN). ``primary``
    marks the candidate of the question's primary comparison. ``stages`` are the seconds of start, build, compile (the
    first step), warmup, steady and teardown, or of a trial's training.
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
    space: dict[str, Any] | None = None
    look: Annotated[dict[str, Any], PARTS] | None = None
    schema: int = SCHEMA

    def __hash__(self) -> int:
        return hash((self.set_id, self.label, self.date))

    @property
    def run_id(self) -> str:
        return self.config.run_id

    @property
    def cohort(self) -> Cohort:
        """Machine, code version, data and plan. Only records that agree in all four are compared."""
        return (self.environment.machine.key, self.code_version, self.config.data_sha256, self.plan.key)

    @property
    def machine(self) -> Machine:
        return self.environment.machine

    @property
    def date(self) -> str:
        return self.environment.date

    def as_dict(self) -> dict[str, Any]:
        config, chosen = self.config.as_dict(), self.config.chosen
        config = {name: value for name, value in config.items() if name in chosen or name not in LATER}
        return {**dataclasses.asdict(self), "config": config, "run_id": self.run_id}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunRecord":
        """Rebuild a record. Raises OtherSchemaError for another schema, and ValueError for invalid values."""
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
        space = Space.from_dict(found.config, found.space) if found.space is not None else None
        if space and math.prod(map(len, space.settings.values())) > MOST_COMBINATIONS:
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
    """Rebuild a configuration from JSON. Cached, so that records share configurations and their cached properties."""
    return RunConfig.from_dict(json.loads(text))


def set_log_ratio(baseline: RunRecord, other: RunRecord, twin: RunRecord | None = None) -> float:
    """Return the result of one set for a configuration: the mean of its ``turn_log_ratios``, or NaN without any."""
    logs = turn_log_ratios(baseline, other, twin)
    return statistics.fmean(logs) if logs else math.nan


def turn_log_ratios(baseline: RunRecord, other: RunRecord, twin: RunRecord | None = None) -> list[float]:
    """Return ln(baseline's seconds per image / the other's) for each common turn; positive if the other is faster.

    With ``twin``, the baseline's logarithm is averaged with its twin's, which reduces the variance at no cost. If their
    times were averaged instead, scatter between windows would favour every candidate.
    """
    sides = [seconds_by_turn(r) for r in (baseline, *([twin] if twin else []))]
    theirs = seconds_by_turn(other)
    turns = theirs.keys() & set.intersection(*(set(side) for side in sides))
    return [statistics.fmean(math.log(side[t]) for side in sides) - math.log(theirs[t]) for t in sorted(turns)]


def seconds_by_turn(record: RunRecord) -> dict[int, float]:
    """Return the seconds per image by turn, for the windows with a finite, positive time."""
    values = {w.turn: w.seconds_per_image for w in record.windows}
    return {turn: seconds for turn, seconds in values.items() if math.isfinite(seconds) and seconds > 0}


def crowded(records: Sequence[RunRecord], *, to_come: int = 0) -> bool:
    """Return whether a set does not count because other processes used its ranks' cores or GPU for too long.

    A turn is crowded if, on average over its windows, the ranks' threads plus the cores used by other processes and the
    hypervisor exceed the usable cores by CROWDED_CORES. On a GPU, where each rank needs HOST_THREADS cores, it is also
    crowded if another process computes on the GPU. Only load decides this, not time; unknown load counts as none.
    Crowded turns are weighted by duration: if one of two threads loses its core, a turn may take sixty times as long
    and be most of the set. The ``to_come`` turns of an unfinished set are assumed to be as short as the shortest yet.
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
    """Return the ids of the sets that do not count (see ``crowded``)."""
    sets: dict[str, list[RunRecord]] = defaultdict(list)
    for r in records:
        sets[r.set_id].append(r)
    return {set_id for set_id, members in sets.items() if set_id and crowded(members)}


def _excess(record: RunRecord, window: Window) -> float:
    """Return by how much others' load exceeds the limit, in cores or in percent of the GPU; negative if it does not."""
    config, state = record.config, window.state
    cores, watched = record.machine.usable_cores, state.get("watched_seconds")
    threads = min(cores, (HOST_THREADS if config.device == "cuda" else config.rank_threads(cores)) * config.node_size)
    stolen = (window.stolen_seconds or 0.0) / watched if watched else 0.0
    excess = threads + ((window.others_cores or 0.0) + stolen) - cores - CROWDED_CORES
    if config.device == "cpu":
        return excess
    # If NVML does not report another process's use, count it as busy when it appears, ends or changes its memory.
    unknown = 100.0 if state.get("gpu_others_changed_bytes") else 0.0
    percent = state.get("gpu_others_percent")
    return 100.0 if excess >= 0 else (unknown if percent is None else percent) - BUSY_GPU_PERCENT


# --- whether a gradient check found a fault in a configuration ---

GRADIENT_BOUNDS = {
    "fp32": (1e-5, 1e-4, 1e-3),
    **dict.fromkeys(("tf32", "fp16"), (2e-3, 0.02, 0.1)),
    "bf16": (1e-2, 0.1, 0.5),
}
"""Largest relative errors of a sound step by precision: of its loss, of its gradient, of its worst layer's gradient.

The reference is fp32. Measured on a CPU with tiny and seed, both losses, several seeds, batches of 8 to 64, up to 20
steps after 0, 20 and 300 steps. The bounds are well above the errors of sound settings and well below those of defects.
fp32 (accumulation, two ranks, compiled, fused kernels, plain): 2e-7, 1e-5 and 3e-5; errors grow with the number of
values added up, so the bounds leave a GPU a factor of ten. bf16: up to 9e-4, 0.04 and 0.2 in the first 40 steps; after
300 steps, with a smaller gradient, 0.1 for the gradient and 0.3 for the worst layer. tf32 and fp16 are not measured:
both keep three bits more than bf16, so an eighth of its errors is expected, and a fifth of its bounds allowed.
"""

HOOK_BOUNDS = {"none": (0.0, 0.0, 0.0), "bf16": (0.0, 0.01, 0.05), "fp16": (0.0, 0.002, 0.02)}
"""Additional errors allowed for an exchange by a hook, which rounds each rank's gradient and the sum.

Measured with two gloo ranks in fp32, tiny and seed, both losses, batches of 8 and 64, after 10 and 100 steps. bf16:
2.4e-3 for the gradient and 7e-3 for the worst layer. fp16: 3e-4 for the gradient, but 0.03 to 0.8 for a layer whose
gradient is too small for fp16, since no scaler protects an exchange. The bounds do not allow for that defect.
"""

FLIP_BOUNDS = (0.0, 0.02, 0.2)
"""Largest errors that a flipped sign may cause in one step, in any precision.

With an L1 loss, the gradient at an output changes its sign where the prediction crosses the target. In fp32, rounding
flips one of N signs about every hundred steps, which changes the output's gradient by 2 / sqrt(N); measured errors were
3e-3 for the weights' gradient and 0.02 for the worst layer's. A defect affects every step. So with an L1 loss the
median step must stay within the bounds above, and the worst step within these.
"""

RANKS_BOUND = 1e-6
"""Largest difference between ranks' gradients, in any precision: all ranks should get exactly the same sum."""


def gradient_fault(answer: Mapping[str, Any], *, layers: bool = True) -> str:
    """Return the fault that a gradient check (``training.gradient_check``) found, or an empty string if there is none.

    Steps that the gradient scaler skipped are ignored, but at least one other step is required. With ``layers`` false,
    single layers are not checked, as when deciding whether to train: an exchange in fp16 lost more than half of a
    bias's gradient, but the whole gradient was off by 0.03 %, and eight trained runs were not worse.
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
    """Format a relative error in percent, or as a power of ten if it is tiny."""
    if 0 < error < 1e-4:
        return f"{error:.0e}"
    return f"{100 * error:.0f} %" if error > 0.1 else f"{100 * error:.2g} %"
