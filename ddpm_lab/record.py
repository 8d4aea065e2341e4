"""What happened: raw records. Everything the lab says is derived from them when they are read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
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


def check_schema(schema: Any) -> None:
    """Raise OtherSchemaError for that of a record that this edition does not read."""
    if schema != SCHEMA:
        remedy = "move the file away and measure again" if schema < SCHEMA else "update ddpm_lab"
        raise OtherSchemaError(f"a record has schema {schema}, this version reads {SCHEMA}: {remedy}")


@dataclass(frozen=True, kw_only=True)
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

    @cached_property
    def key(self) -> str:
        """Twelve hexadecimal digits."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:12]

    @property
    def name(self) -> str:
        """A short name for people: what computes, and how many cores stand beside it."""
        cores = f"{self.usable_cores} core{'s' if self.usable_cores != 1 else ''}"
        if not self.gpus:
            return f"{self.cpu}, {cores}, no GPU"
        models = sorted(set(self.gpus))
        counted = " + ".join(f"{self.gpus.count(m)} x {m}" for m in models)
        return f"{counted}, {self.cpu}, {cores}"


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

    A step ends when its slowest rank ends it. ``data_seconds`` is each rank's wait for data, ``others_cores`` how many
    cores other processes kept busy. ``state`` is what the machine did, by the names of ``others.Watch``, and the
    memory of the largest rank at the end (``rss_bytes``, on a GPU ``allocated_bytes`` and ``reserved_bytes``).
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

    ``peak_memory_bytes`` and ``peak_reserved_bytes`` are torch's on the GPU. ``peak_rss_bytes`` is the most host memory
    of the rank's own process, shared libraries included (0.3 GiB with torch alone), loader workers not.
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
        values |= {"config": self.config.as_dict(), "run_id": self.run_id}
        values |= {name: dataclasses.asdict(values[name]) for name in ("plan", "environment")}
        return values | {name: [dataclasses.asdict(each) for each in values[name]] for name in ("ranks", "windows")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunRecord:
        """Rebuild a record. Raises OtherSchemaError for another edition's, ValueError for values that do not fit."""
        check_schema(values["schema"])
        values = {k: v for k, v in values.items() if k != "run_id"}
        found: RunRecord = _fields({**values, "config": _configuration(json.dumps(values["config"]))}, "")
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


def crowded(records: Sequence[RunRecord]) -> bool:
    """Whether a set does not count, since other processes took the cores or the GPU of its ranks in too many turns.

    A turn is crowded when, on average over its windows, the ranks' threads together with what other processes and the
    hypervisor took exceed the usable cores by CROWDED_CORES; on a GPU, when another process computes on it. Decided by
    load, never by time; what is unknown crowds nothing.
    """
    turns: dict[int, list[float]] = {}
    for r in records:
        for w in r.windows:
            turns.setdefault(w.turn, []).append(-1.0 if r.config.oversubscribe else _excess(r, w))
    full = sum(statistics.fmean(excess) >= 0 for excess in turns.values())
    return full > CROWDED_SHARE * len(turns)


def _excess(record: RunRecord, window: Window) -> float:
    """At least 0 where others want too much of the cores, in cores, or of the GPUs, in percent."""
    config, state = record.config, window.state
    if config.device == "cuda":
        # Where NVML does not tell how busy another process is, one that comes, goes or changes its memory is at work.
        unknown = 100.0 if state.get("gpu_others_changed_bytes") else 0.0
        percent = state.get("gpu_others_percent")
        return (unknown if percent is None else percent) - BUSY_GPU_PERCENT
    cores, watched = record.machine.usable_cores, state.get("watched_seconds")
    threads = min(cores, config.rank_threads(cores) * config.node_size)
    stolen = (window.stolen_seconds or 0.0) / watched if watched else 0.0
    return threads + ((window.others_cores or 0.0) + stolen) - cores - CROWDED_CORES
