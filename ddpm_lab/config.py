"""What to run: frozen configurations that validate themselves, and the presets.

Nothing here imports torch, so that the half of the lab that explains results can read configurations on any laptop.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

PURPOSES = ("timing", "profile")
DEVICES = ("cpu", "cuda")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
COMPILE_MODES = ("off", "whole")
LOADERS = ("packed", "files", "resident")
NETWORKS = {"tiny": 4, "seed": 4, "ddpm": 8, "s000": 4}
"""Names of the networks, and what the image size must be a multiple of."""
SCHEDULES = ("linear", "cosine")
OBJECTIVES = ("noise", "x0", "v")
LOSSES = ("l1", "l2")
START_METHODS = ("forkserver", "spawn")

DDPM = "ddpm_lab.model.train:ddpm"
LOADER_ALONE = "ddpm_lab.model.train:loader_alone"


class LabError(ValueError):
    """A refusal: one sentence for the user. Any other error is a defect and keeps its traceback."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in a notebook: the sentence, without the lab's insides above it."""
        return [f"{type(self).__name__}: {self}"]


class ConfigError(LabError):
    """A setting that cannot be run: one sentence that names the value, the place and the remedy."""


def choice(place: str, value: object, allowed: Iterable[object]) -> None:
    """Raise ConfigError unless ``value`` is one of ``allowed``."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ConfigError(f"{place} is {value!r}: choose one of {', '.join(map(str, allowed))}")


def whole(place: str, value: object, least: int) -> None:
    """Raise ConfigError unless ``value`` is a whole number of at least ``least``, and one that torch can hold."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise ConfigError(f"{place} is {value!r}: give a whole number of at least {least}, and below 2**63")


def several(place: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is a list (or tuple) with at least one entry."""
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"{place} is {value!r}: give a list with at least one entry")


def _known(place: str, values: Mapping[str, Any], kind: type) -> None:
    """Raise ConfigError for a name in ``values`` that is no setting of the dataclass ``kind``."""
    known = sorted(f.name for f in dataclasses.fields(kind))
    for name in values:
        if name not in known:
            raise ConfigError(f"{place} has no setting {name!r}: it has {', '.join(known)}")


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def percent(text: str) -> float:
    """``2%``, ``2 %`` or ``0.02`` as a share. Raises ConfigError for anything else."""
    bare = text.strip()
    try:
        value = float(bare.removesuffix("%")) / (100 if bare.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise ConfigError(f"a share is {text!r}: give more than 0 and less than 100 %, such as 2% or 0.02")
    return value


def _digest(value: object) -> str:
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionConfig:
    """The forward process and the training objective (Ho et al. 2020; Nichol & Dhariwal 2021)."""

    schedule: str = "cosine"
    timesteps: int = 1000
    objective: str = "noise"
    loss: str = "l1"
    min_snr_gamma: float | None = None

    def __post_init__(self) -> None:
        choice("diffusion.schedule", self.schedule, SCHEDULES)
        choice("diffusion.objective", self.objective, OBJECTIVES)
        choice("diffusion.loss", self.loss, LOSSES)
        whole("diffusion.timesteps", self.timesteps, 2)
        if self.min_snr_gamma is not None and not (_number(self.min_snr_gamma) and self.min_snr_gamma > 0):
            raise ConfigError(f"diffusion.min_snr_gamma is {self.min_snr_gamma!r}: give a number above 0, or null")
        if self.min_snr_gamma is not None and self.loss != "l2":
            raise ConfigError(f"diffusion.min_snr_gamma needs loss 'l2', not {self.loss!r}: set diffusion.loss to l2")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Adam, gradient clipping and the exponential moving average of the weights."""

    learning_rate: float = 2e-4
    betas: tuple[float, float] = (0.9, 0.99)
    clip_norm: float | None = 1.0
    ema_decay: float = 0.995
    ema_every: int = 10

    def __post_init__(self) -> None:
        several("optimizer.betas", self.betas)
        object.__setattr__(self, "betas", tuple(self.betas))
        if not (_number(self.learning_rate) and self.learning_rate > 0):
            raise ConfigError(f"optimizer.learning_rate is {self.learning_rate!r}: give a number above 0")
        if len(self.betas) != 2 or not all(_number(b) and 0 <= b < 1 for b in self.betas):
            raise ConfigError(f"optimizer.betas is {self.betas!r}: give two numbers in [0, 1)")
        if self.clip_norm is not None and not (_number(self.clip_norm) and self.clip_norm > 0):
            raise ConfigError(f"optimizer.clip_norm is {self.clip_norm!r}: give a number above 0, or null for none")
        if not (_number(self.ema_decay) and 0 <= self.ema_decay < 1):
            raise ConfigError(f"optimizer.ema_decay is {self.ema_decay!r}: give a number in [0, 1)")
        whole("optimizer.ema_every", self.ema_every, 1)


class _Remembered:
    """Room for a run id that was computed once, outside of what makes two configurations equal."""

    __slots__ = ("_run_id",)
    _run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(_Remembered):
    """One configuration of a training run, complete: two runs with equal ``run_id`` do the same work.

    ``global_batch_size`` counts the images of one optimizer step over all ranks; a rank sees
    ``global_batch_size / world_size`` of them in ``accumulation`` micro-batches. ``data`` is the folder that
    ``data_sha256`` was read from: where the images lie is not part of what is run, so it is not part of the run id.
    ``options`` are the settings of a workload other than the lab's own.
    """

    purpose: str = "timing"
    workload: str = DDPM
    device: str = "cpu"
    world_size: int = 1
    global_batch_size: int = 32
    accumulation: int = 1
    precision: str = "fp32"
    compile: str = "off"
    channels_last: bool = True
    loader: str = "packed"
    loader_workers: int = 0
    data: str = ""
    data_sha256: str = ""
    network: str = "tiny"
    image_size: int = 32
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    seed: int = 0
    oversubscribe: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        choice("purpose", self.purpose, PURPOSES)
        choice("device", self.device, DEVICES)
        choice("precision", self.precision, PRECISIONS)
        choice("compile", self.compile, COMPILE_MODES)
        choice("loader", self.loader, LOADERS)
        choice("network", self.network, NETWORKS)
        whole("world_size", self.world_size, 1)
        whole("global_batch_size", self.global_batch_size, 1)
        whole("accumulation", self.accumulation, 1)
        whole("loader_workers", self.loader_workers, 0)
        whole("seed", self.seed, 0)
        whole("image_size", self.image_size, 1)
        for place, kind in (("diffusion", DiffusionConfig), ("optimizer", OptimizerConfig)):
            if not isinstance(getattr(self, place), kind):
                names = ", ".join(f.name for f in dataclasses.fields(kind))
                raise ConfigError(f"{place} is {getattr(self, place)!r}: give settings by name, some of {names}")
        object.__setattr__(self, "options", tuple((str(k), v) for k, v in self.options))
        module, _, function = self.workload.partition(":")
        if not module or not function.isidentifier():
            raise ConfigError(f"workload is {self.workload!r}: name it as module:function")
        multiple = NETWORKS[self.network]
        if self.image_size % multiple:
            raise ConfigError(
                f"image_size is {self.image_size}: network {self.network!r} needs a multiple of {multiple}"
            )
        if self.global_batch_size % (self.world_size * self.accumulation):
            raise ConfigError(
                f"global_batch_size {self.global_batch_size} cannot be shared by {self.world_size} ranks in "
                f"{self.accumulation} micro-batches: give a multiple of {self.world_size * self.accumulation}"
            )
        if self.loader != "files" and self.loader_workers:
            raise ConfigError(
                f"loader_workers is {self.loader_workers} with loader {self.loader!r}, which has none: "
                "use loader 'files', or 0 workers"
            )
        if self.device == "cpu" and self.precision in ("tf32", "fp16"):
            raise ConfigError(f"precision {self.precision!r} needs a CUDA device: use fp32 or bf16 on a CPU")

    @property
    def rank_batch_size(self) -> int:
        """Images of one optimizer step on one rank."""
        return self.global_batch_size // self.world_size

    @property
    def run_id(self) -> str:
        """Twelve hexadecimal digits that identify the work: a hash of the canonical JSON without ``data``."""
        try:
            return self._run_id
        except AttributeError:
            values = self.as_dict()
            del values["data"]
            object.__setattr__(self, "_run_id", _digest(values))
            return self._run_id

    def option(self, name: str, default: Any) -> Any:
        """The workload's own setting ``name``."""
        return dict(self.options).get(name, default)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        values = dataclasses.asdict(self)
        values["options"] = dict(self.options)
        values["optimizer"]["betas"] = list(self.optimizer.betas)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunConfig:
        """Rebuild a configuration; raises ConfigError for a name that does not exist."""
        values = dict(values)
        _known("a configuration", values, cls)
        for place, kind in (("diffusion", DiffusionConfig), ("optimizer", OptimizerConfig)):
            if isinstance(values.get(place), Mapping):
                _known(place, values[place], kind)
                values[place] = kind(**values[place])
        if isinstance(values.get("options"), Mapping):
            values["options"] = tuple(values["options"].items())
        return cls(**values)

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Settings whose values differ, as name -> (mine, other's); ``data`` is left out as in the run id."""
        mine, theirs = self.as_dict(), other.as_dict()
        return {k: (mine[k], theirs[k]) for k in mine if k != "data" and mine[k] != theirs[k]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one set is measured.

    A window lasts ``window_seconds`` or ``window_steps`` steps, whichever is longer; with loader workers at least 20
    steps and ten times the prefetch queue. A set has ``turns`` turns, half as many where windows last over twice that.
    """

    turns: int = 12
    window_seconds: float = 0.2
    window_steps: int = 5
    settle_steps: int = 2
    warmup_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("turns", "window_steps", "settle_steps", "warmup_steps"):
            whole(f"plan.{name}", getattr(self, name), 1)
        if not (_number(self.window_seconds) and 0 < self.window_seconds < 3600):
            raise ConfigError(f"plan.window_seconds is {self.window_seconds!r}: give seconds above 0")
        object.__setattr__(self, "window_seconds", float(self.window_seconds))  # 1 and 1.0 are one plan

    @property
    def key(self) -> str:
        """Hash that says which sets may be pooled."""
        return _plan_key(self)


@lru_cache(maxsize=256)
def _plan_key(plan: Plan) -> str:
    return _digest(dataclasses.asdict(plan))


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """How much is run: sets per comparison, the plan of a set, cold compiles, and the budget of all notebooks."""

    name: str
    sets: int
    plan: Plan
    cold_compiles: int
    minutes: float | None


PRESETS = {
    preset.name: preset
    for preset in (
        Preset(name="smoke", sets=1, plan=Plan(turns=2, window_seconds=0.1), cold_compiles=1, minutes=3.0),
        Preset(name="quick", sets=6, plan=Plan(), cold_compiles=1, minutes=9.5),
        Preset(name="full", sets=12, plan=Plan(), cold_compiles=3, minutes=None),
    )
}


def preset(name: str) -> Preset:
    """The preset called ``name``; raises ConfigError for another."""
    choice("preset", name, PRESETS)
    return PRESETS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Configurations that are compared with one baseline, in the same sets.

    ``candidates`` come in order of importance: where time is short the last ones are left out first. A family that only
    shows that a mechanism works (``mechanism``) needs one set. With ``search_up_to`` the largest global batch size that
    fits into memory, up to this one, is searched first, and larger candidates are left out.
    """

    name: str
    baseline: RunConfig
    baseline_label: str
    candidates: tuple[tuple[str, RunConfig], ...]
    mechanism: bool = False
    search_up_to: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One question: families of configurations, and what was left out of them before any measuring, with reasons."""

    name: str
    families: tuple[Family, ...]
    left_out: tuple[tuple[str, str, str], ...] = ()  # (family, label, reason)
    profiles: tuple[tuple[str, str, RunConfig], ...] = ()  # (family, label, configuration): they supply no time

    @property
    def configurations(self) -> tuple[RunConfig, ...]:
        """Every configuration, baselines first within each family."""
        compared = [c for f in self.families for c in (f.baseline, *(config for _, config in f.candidates))]
        return (*compared, *(config for _, _, config in self.profiles))
