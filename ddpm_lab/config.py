"""What to run: frozen configurations that validate themselves.

Nothing here imports torch, so that the half of the lab that explains results can read configurations on any laptop.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpm_lab.checks import ConfigError, choice, known, number, texts, whole
from ddpm_lab.exchange_settings import ExchangeConfig
from ddpm_lab.optimizer_settings import OptimizerConfig
from ddpm_lab.own_settings import ABLE, OWN, OWN_LOADER, TRIED

PURPOSES = ("timing", "profile", "quality", "check")
DEVICES = ("cpu", "cuda")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
COMPILE = ("off", "regional", "whole")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")
IMPLEMENTATIONS = ("lab", "plain")
KERNELS = ("aten", "fused")
FREED_MEMORY = ("default", "kept")
ATTENTION_AXES = ("channels", "positions")
LOADERS = ("packed", "files", "resident", "still")
"""``still`` hands out its first batch at every step: no work of loading is left, and nothing worth learning."""
NETWORKS = {"tiny": 4, "seed": 4, "ddpm": 8, "s000": 4}
"""Names of the networks, and what the image size must be a multiple of."""
SEED_FAMILY = ("seed", "s000")
SCHEDULES = ("linear", "cosine")
OBJECTIVES = ("noise", "x0", "v")
LOSSES = ("l1", "l2")
START_METHODS = ("forkserver", "spawn")

DDPM = "ddpm_lab.model.train:ddpm"
LOADER_ALONE = "ddpm_lab.model.train:loader_alone"
SAMPLING = "ddpm_lab.model.denoising:sampling"
TRAINING = "ddpm_lab.model.training:training"
CHECK = "ddpm_lab.model.gradient_check:gradient_check"


def digest(value: object) -> str:
    """Twelve hexadecimal digits of the hash of ``value`` as canonical JSON."""
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
        if (gamma := self.min_snr_gamma) is not None and not (number(gamma) and gamma > 0):
            raise ConfigError(f"diffusion.min_snr_gamma is {gamma!r}: give a finite number above 0, or null")
        if gamma is not None and self.loss != "l2":
            raise ConfigError(f"diffusion.min_snr_gamma needs loss 'l2', not {self.loss!r}: set diffusion.loss to l2")


PARTS = (("diffusion", DiffusionConfig), ("optimizer", OptimizerConfig), ("exchange", ExchangeConfig))
UNLEARNED: dict[str, Any] = {"loader": "packed", "loader_workers": 0, "freed_memory": "default", "read_loss": False}
"""Settings that change no bit of what the lab's trainer learns, and their values where only that matters."""


class _Remembered:
    """Room for a run id that was computed once, outside of what makes two configurations equal."""

    __slots__ = ("_run_id",)
    _run_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig(_Remembered):
    """One configuration of a training run, complete: two runs with equal ``run_id`` do the same work.

    ``global_batch_size`` counts the images of one optimizer step over all ranks; a rank sees
    ``global_batch_size / world_size`` of them in ``accumulation`` micro-batches. The ranks are spread evenly over
    ``nodes`` hosts. ``data`` is the folder that ``data_sha256`` was read from: where the images lie is not part of what
    is run, so it is not part of the run id. ``options`` are the settings of a workload other than the lab's own.

    ``implementation`` "plain" is the network as its paper's code is usually written, in NCHW and einsum; ``kernels``
    "fused" computes its blocks as is fastest on a CPU, such as normalisation and what follows it in one pass.
    ``freed_memory`` "kept" keeps what a step frees for the next one, where the C library by default gives large blocks
    back (CPU only). ``attention_axis`` is over what the seed family's middle attention normalises. ``read_loss`` makes
    every step wait for its loss, as printing it would.
    ``threads`` are the compute threads of a rank; 0 gives each its share of the usable cores. With ``oversubscribe``
    there are more ranks than cores, or GPUs, which they share by gloo: that shows that it works, and no speed.
    ``revision`` is the commit whose sources run; none is the code as it lies here.
    """

    purpose: str = "timing"
    workload: str = DDPM
    device: str = "cpu"
    world_size: int = 1
    nodes: int = 1
    global_batch_size: int = 32
    accumulation: int = 1
    precision: str = "fp32"
    compile: str = "off"
    compile_mode: str = "default"
    channels_last: bool = True
    implementation: str = "lab"
    kernels: str = "aten"
    freed_memory: str = "default"
    attention_axis: str = "channels"
    read_loss: bool = False
    loader: str = "packed"
    loader_workers: int = 0
    data: str = ""
    data_sha256: str = ""
    network: str = "tiny"
    image_size: int = 32
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    seed: int = 0
    oversubscribe: bool = False
    threads: int = 0
    revision: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        texts(workload=self.workload, data=self.data, data_sha256=self.data_sha256, revision=self.revision)
        for name in ("channels_last", "read_loss", "oversubscribe"):
            choice(name, getattr(self, name), (True, False))
        choice("purpose", self.purpose, PURPOSES)
        choice("device", self.device, DEVICES)
        choice("precision", self.precision, PRECISIONS)
        choice("compile", self.compile, COMPILE)
        choice("compile_mode", self.compile_mode, COMPILE_MODES)
        choice("implementation", self.implementation, IMPLEMENTATIONS)
        choice("kernels", self.kernels, KERNELS)
        choice("freed_memory", self.freed_memory, FREED_MEMORY)
        choice("attention_axis", self.attention_axis, ATTENTION_AXES)
        choice("loader", self.loader, LOADERS)
        choice("network", self.network, NETWORKS)
        least = dict.fromkeys(("world_size", "nodes", "global_batch_size", "accumulation", "image_size"), 1)
        for name in (*least, "loader_workers", "seed", "threads"):
            whole(name, getattr(self, name), least.get(name, 0))
        for place, kind in PARTS:
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
        if self.world_size % self.nodes:
            raise ConfigError(
                f"world_size {self.world_size} cannot be shared by {self.nodes} nodes: give a multiple of {self.nodes}"
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
        self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        """Raise ConfigError for a setting that would change nothing in this configuration."""
        if self.compile_mode != "default" and (self.compile == "off" or self.device == "cpu"):
            raise ConfigError(
                f"compile_mode is {self.compile_mode!r} with compile {self.compile!r} on {self.device}: it needs a "
                "compiled step on a CUDA device; leave it at default"
            )
        for name, able in ABLE.items() if self.is_own else ():
            choice(f"{name} of {self.work_name}", getattr(self, name), able)
        seed_family = self.network in SEED_FAMILY
        if not seed_family and (self.implementation == "plain" or self.attention_axis != "channels"):
            raise ConfigError(
                f"implementation {self.implementation!r} with attention_axis {self.attention_axis!r}: network "
                f"{self.network!r} has only 'lab' and 'channels'; choose one of {', '.join(SEED_FAMILY)}"
            )
        if self.kernels == "fused" and (self.compile, self.implementation) != ("off", "lab"):
            raise ConfigError(
                "kernels is 'fused', which is for the lab's own network, eager: leave compile off, or use kernels aten"
            )
        if self.kernels == "fused" and not self.channels_last:
            raise ConfigError("kernels is 'fused', which works in the channels_last format: set channels_last, or aten")
        if self.freed_memory == "kept" and self.device != "cpu":
            raise ConfigError(
                f"freed_memory is 'kept' on {self.device}, where a step's memory is the GPU's: leave it at default"
            )
        if self.implementation == "plain" and self.compile == "regional":
            raise ConfigError("compile is 'regional', which compiles the lab's own blocks: use whole for 'plain'")
        if self.world_size == 1 and self.exchange != ExchangeConfig():
            raise ConfigError("exchange has settings, but one rank exchanges nothing: leave it out, or use more ranks")
        if self.exchange.nccl != "default" and (self.device != "cuda" or self.oversubscribe):
            raise ConfigError(
                f"exchange.nccl is {self.exchange.nccl!r} on {self.device}, where gloo exchanges gradients and not "
                "NCCL: leave it out, or use GPUs"
            )
        if self.loader == "still" and self.purpose in ("quality", "check"):
            raise ConfigError(
                "loader is 'still', which repeats one batch and shows what loading costs: to train, use packed, files "
                "or resident"
            )

    @property
    def is_own(self) -> bool:
        """Whether a training of the user's is run."""
        return self.workload in (OWN, OWN_LOADER)

    @property
    def work_name(self) -> str:
        """What is trained, for people: the network, or the user's workload as module:function."""
        return str(self.option("make", self.workload)) if self.is_own else self.network

    @property
    def own_options(self) -> tuple[tuple[str, Any], ...]:
        """The options that say which training of the user's it is; none of the lab's own trainer."""
        return tuple((k, v) for k, v in self.options if k not in TRIED) if self.is_own else ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Every ``module:function`` whose code a rank runs."""
        return tuple(dict.fromkeys((self.workload, self.work_name))) if self.is_own else (self.workload,)

    @property
    def rank_batch_size(self) -> int:
        """Images of one optimizer step on one rank."""
        return self.global_batch_size // self.world_size

    def rank_threads(self, usable_cores: int) -> int:
        """Compute threads of a rank on hosts with so many usable cores each."""
        return self.threads or max(1, usable_cores // self.node_size)

    @property
    def node_size(self) -> int:
        """Ranks on one host."""
        return self.world_size // self.nodes

    @property
    def run_id(self) -> str:
        """Twelve hexadecimal digits that identify the work: a hash of the canonical JSON without ``data``."""
        try:
            return self._run_id
        except AttributeError:
            values = self.as_dict()
            del values["data"]
            object.__setattr__(self, "_run_id", digest(values))
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
        known("a configuration", values, cls)
        for place, kind in PARTS:
            if isinstance(values.get(place), Mapping):
                known(place, values[place], kind)
                values[place] = kind(**values[place])
        if isinstance(values.get("options"), Mapping):
            values["options"] = tuple(values["options"].items())
        return cls(**values)

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process by name, without defaults: the lab may be of another revision there, with others."""
        usual, values = RunConfig().as_dict(), self.as_dict()
        for place, _ in PARTS:
            values[place] = {k: v for k, v in values[place].items() if v != usual[place][k]}
        return RunConfig.from_dict, ({k: v for k, v in values.items() if v != usual[k]},)

    def differences(self, other: RunConfig) -> dict[str, tuple[Any, Any]]:
        """Settings whose values differ, as name -> (mine, other's); ``data`` is left out as in the run id."""
        mine, theirs = self.as_dict(), other.as_dict()
        return {k: (mine[k], theirs[k]) for k in mine if k != "data" and mine[k] != theirs[k]}
