"""What happened: raw records. Everything the lab says is derived from them when they are read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any

from ddpm_lab.checks import LabError
from ddpm_lab.config import RunConfig
from ddpm_lab.declared import Opt, fields_reader
from ddpm_lab.plan import Plan

SCHEMA = 4
Cohort = tuple[str, str, str, str]
TWIN = "twin"
ROLES = (
    *("baseline", TWIN, "candidate", "cold", "profile", "quality", "choice", "search", "largest", "check", "wrong"),
    *("note", "space", "look"),
)
STATUSES = (*("ok", "oom", "unsupported", "diverged", "crashed", "timed out", "refused", "left out"),)
LASTING = ("oom", "diverged", "refused")
"""Failures that another try on the same machine and code would meet again; what is unsupported can be installed."""


class LedgerError(LabError):
    """A ledger that cannot be used, in one sentence."""


class OtherSchemaError(LedgerError):
    """A record that another edition of the lab wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What must be equal for two records to be compared. Host name and date are recorded, not compared."""

    cpu: str
    usable_cores: int
    gpus: tuple[str, ...] = ()
    driver: str | None = None
    torch: str = ""
    python: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gpus", tuple(self.gpus))

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits."""
        return _machine_key(self)

    @property
    def name(self) -> str:
        """A short name for people: what computes, and how many cores stand beside it."""
        cores = f"{self.usable_cores} core{'s' if self.usable_cores != 1 else ''}"
        if not self.gpus:
            return f"{self.cpu}, {cores}, no GPU"
        models = sorted(set(self.gpus))
        counted = " + ".join(f"{self.gpus.count(m)} x {m}" for m in models)
        return f"{counted}, {self.cpu}, {cores}"


@lru_cache(maxsize=256)
def _machine_key(machine: Machine) -> str:
    return hashlib.sha256(json.dumps(dataclasses.asdict(machine), sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where and when a record was measured; None is unknown, never a guess."""

    machine: Machine
    hostname: str | None
    python: str
    packages: dict[str, str]
    cuda: str | None
    gpu_uuids: tuple[str, ...]
    ram_bytes: int | None
    kernel: str
    slurm_job_id: str | None
    git_commit: str | None
    load_before: float | None
    date: str  # ISO 8601 with the offset from UTC


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One timed window: ``seconds`` is the wall time from the first rank's start to the last rank's end.

    A step ends when its slowest rank ends it, so ``step_seconds`` add up to the window; ``data_seconds`` is each rank's
    wait for data; ``others_cores`` is how many cores other processes kept busy meanwhile (None: unknown). ``state`` is
    what the machine did, by the names of ``measure.machine_watch.Watch``, and the memory that the largest rank held at
    the window's end (``rss_bytes``, on a GPU ``allocated_bytes`` and ``reserved_bytes``).
    """

    turn: int
    position: int
    start_seconds: float
    seconds: float
    images: int
    steps: int
    rank_seconds: tuple[float, ...]
    step_seconds: tuple[float, ...]
    data_seconds: tuple[float, ...]
    others_cores: float | None = None
    stolen_seconds: float | None = None
    state: dict[str, float | None] = field(default_factory=dict)

    @property
    def seconds_per_image(self) -> float:
        """Wall seconds for each image; NaN for a window without images."""
        return self.seconds / self.images if self.images > 0 else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank reports of itself; None is unknown, or does not exist.

    ``peak_memory_bytes`` and ``peak_reserved_bytes`` are what torch had allocated and reserved on the GPU.
    ``peak_rss_bytes`` is the most host memory that the rank's own process had resident: its tensors on a CPU, Python,
    and the libraries that it shares with other processes (about 0.3 GiB with torch alone); not its loader workers.
    """

    rank: int
    device: str
    device_uuid: str | None
    threads: int
    peak_memory_bytes: int | None
    peak_reserved_bytes: int | None
    peak_rss_bytes: int | None
    losses: tuple[float, ...]
    images: int | None
    indices_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """What one configuration did in one set.

    ``role`` is baseline, twin (the baseline again), candidate, cold (a cold compile, measured alone), profile, choice
    (a network chosen for this machine), search (a size tried for the largest batch that fits, alone), largest (how that
    search ended, its limit as the label; both belong to no set), check (of a gradient), wrong (a wrong way to measure,
    run to be shown; its numbers are in the profile and no speed), note (a configuration that was left out before any
    set), space (what a search could choose from, and by its family the sets that measured again what it found), or look
    (an answer was shown: ``look`` has the ``sets`` of this baseline that it rested on, and their ``log_ratios`` by run
    id, the twin's under TWIN: they say how much sets of this machine scatter).
    ``status`` is ok, oom, unsupported, diverged, crashed, timed out, refused or left out.
    ``primary`` marks the candidate of the question's primary comparison, which its definition fixes.
    ``baseline_id`` is the run id of the set's baseline. ``stages`` are seconds: start, build, compile (the first step,
    compiled configurations only), warmup, steady, teardown; of a trial training.
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
    stages: dict[str, float] = field(default_factory=dict)
    compile_cache: str | None = None
    warmup_steps: int = 0
    ranks: tuple[RankRecord, ...] = ()
    windows: tuple[Window, ...] = ()
    witness: dict[str, Any] = field(default_factory=dict)
    profile: dict[str, Any] | None = None
    quality: dict[str, Any] | None = None
    space: dict[str, Any] | None = None
    look: dict[str, Any] | None = None
    schema: int = SCHEMA

    @property
    def run_id(self) -> str:
        """Run id of the configuration."""
        return self.config.run_id

    @property
    def cohort(self) -> Cohort:
        """Machine, code version, data, plan: only records that agree in all four are compared."""
        return (self.environment.machine.key, self.code_version, self.config.data_sha256, self.plan.key)

    @property
    def machine(self) -> Machine:
        """Where it was measured."""
        return self.environment.machine

    @property
    def date(self) -> str:
        """When it was measured, ISO 8601."""
        return self.environment.date

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["config"] = self.config.as_dict()
        values["run_id"] = self.run_id
        for name in ("plan", "environment"):
            values[name] = dataclasses.asdict(values[name])
        for name in ("ranks", "windows"):
            values[name] = [dataclasses.asdict(item) for item in values[name]]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunRecord:
        """Rebuild a record. Raises OtherSchemaError for another edition's, ValueError for values that do not fit."""
        if (schema := values["schema"]) > SCHEMA:
            raise OtherSchemaError(f"a record has schema {schema}, this version reads {SCHEMA}: update ddpm_lab")
        if schema < SCHEMA:
            raise OtherSchemaError(
                f"a record has schema {schema}, of an earlier edition, and this version reads {SCHEMA}: move the file "
                "away and measure again"
            )
        values = {k: v for k, v in values.items() if k != "run_id"}
        found: RunRecord = _fields({**values, "config": _configuration(json.dumps(values["config"]))})
        return found


_fields = fields_reader(RunRecord)


@lru_cache(maxsize=4096)
def _configuration(text: str) -> RunConfig:
    """A configuration from its JSON: thousands of records share a few, and with them what is computed from one."""
    return RunConfig.from_dict(json.loads(text))


CROWDED_CORES = 0.25
"""A turn is crowded when its ranks' threads and other processes want so many cores more than there are."""
CROWDED_SHARE = 0.2
"""A set with more than this share of crowded turns does not count, and is measured again."""
BUSY_GPU_PERCENT = 10.0
"""Share of a GPU's time that other processes may take before a turn on it is crowded."""


def set_log_ratio(baseline: RunRecord, other: RunRecord, twin: RunRecord | None = None) -> float:
    """What one set finds for a configuration: the mean over turns of ln(baseline's seconds per image / its own).

    Above 0 the configuration is faster. With ``twin`` the baseline's logarithm is the mean of the baseline's and its
    twin's, which is narrower at no cost; the mean of their times would favour every candidate where windows scatter.
    Only turns count that all have; NaN where there is none.
    """
    logs = turn_log_ratios(baseline, other, twin)
    return statistics.fmean(logs) if logs else math.nan


def turn_log_ratios(baseline: RunRecord, other: RunRecord, twin: RunRecord | None = None) -> list[float]:
    """The log ratio of each turn that all have; see ``set_log_ratio``."""
    sides = [seconds_by_turn(r) for r in (baseline, *([twin] if twin else []))]
    theirs = seconds_by_turn(other)
    turns = theirs.keys() & set.intersection(*(set(side) for side in sides))
    return [statistics.fmean(math.log(side[t]) for side in sides) - math.log(theirs[t]) for t in sorted(turns)]


def seconds_by_turn(record: RunRecord) -> dict[int, float]:
    """Seconds per image by turn, of the windows that have a time."""
    values = {w.turn: w.seconds_per_image for w in record.windows}
    return {turn: seconds for turn, seconds in values.items() if math.isfinite(seconds) and seconds > 0}


def crowded(records: Sequence[RunRecord]) -> bool:
    """Whether a set does not count, since other processes took the cores or the GPU of its ranks in too many turns.

    A turn is crowded when, on average over its windows, the ranks' threads together with what other processes and the
    hypervisor took exceed the usable cores by a quarter of a core or more; on a GPU, when another process computes on
    it. Decided by load, never by time. What is not known crowds nothing.
    """
    turns: dict[int, list[float]] = {}
    for r in records:
        cuda, cores = r.config.device == "cuda", r.environment.machine.usable_cores
        threads = 0 if cuda else min(cores, r.config.rank_threads(cores) * r.config.node_size)
        for w in r.windows:
            excess = _gpu_excess(w) if cuda else threads + _taken_cores(w) - cores - CROWDED_CORES
            turns.setdefault(w.turn, []).append(-1.0 if r.config.oversubscribe else excess)
    full = sum(statistics.fmean(excess) >= 0 for excess in turns.values())
    return full > CROWDED_SHARE * len(turns)


def _taken_cores(window: Window) -> float:
    """Cores that other processes and the hypervisor took during a window."""
    watched = window.state.get("watched_seconds")
    return (window.others_cores or 0.0) + ((window.stolen_seconds or 0.0) / watched if watched else 0.0)


def _gpu_excess(window: Window) -> float:
    """At least 0 where another process computes on the window's GPUs."""
    percent = window.state.get("gpu_others_percent")
    if percent is None and window.state.get("gpu_others_changed_bytes"):
        percent = 100.0  # NVML does not tell how busy it is: one that comes, goes or changes its memory is at work
    return (percent or 0.0) - BUSY_GPU_PERCENT
