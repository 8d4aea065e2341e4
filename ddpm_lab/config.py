"""Configurations of a training run: frozen dataclasses that validate themselves.

This module does not import torch, so results can be explained on a computer without it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Annotated, Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.declared import Opt, known, validate

DEVICES = ("cpu", "cuda")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
COMPILE, COMPILE_MODES = ("off", "regional", "whole"), ("default", "reduce-overhead", "max-autotune")
LOADERS = ("packed", "files", "resident", "still")
"""``still`` returns its first batch at every step, which removes the cost of loading; it cannot train a network."""
NETWORKS = {"tiny": 4, "seed-16": 4, "seed-32": 4, "seed": 4, "ddpm": 8, "s000": 4}
"""Names of the networks from the smallest, each with the number that the image size must be a multiple of."""
SEED_FAMILY = ("seed-16", "seed-32", "seed", "s000")
LOSSES = ("l1", "l2")
HOOKS = ("none", "bf16", "fp16")
_PCIE = (
    "NCCL_DEBUG=INFO NCCL_ALGO=ring,tree;allreduce:tree NCCL_PROTO=Simple NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=0 "
    "NCCL_NET_GDR_LEVEL=0 NCCL_BUFFSIZE=33554432 NCCL_NTHREADS=64 NCCL_MAX_NCHANNELS=8 NCCL_MIN_NCHANNELS=4"
)
NCCL: dict[str, dict[str, str]] = {"default": {}, "pcie": dict(v.split("=") for v in _PCIE.split())}
"""Environment variables for NCCL, by name. ``pcie`` was published for GPUs connected only by PCIe: it disables
peer-to-peer transfers, which is harmful with NVLink. Two values differ from those published: "Tree" alone leaves no
algorithm for broadcasts and gathers, which need rings, and NCCL needs at least 64 threads (16 gives its maximum)."""

DDPM = "ddpm_lab.training.train:ddpm"
LOADER_ALONE = "ddpm_lab.training.train:loader_alone"
OWN = "ddpm_lab.training.own:own"
OWN_LOADER = "ddpm_lab.training.own:loader_alone"
"""The workloads that run the user's own training; their option ``make`` names it as module:function."""
OBSERVED_OPTIONS = ("parameters", "samples", "sample")
"""Options that record what the user's function returned on its first call; later calls must return the same."""
TRIAL_OPTIONS = ("images", "draws")  # options of a trial; all others identify the user's training
OWN_CHOICES: dict[str, Any] = {
    **{"accumulation": (1,), "implementation": ("lab",), "kernels": ("aten",), "read_loss": (False,)},
    **{"attention_axis": ("channels",), "compile": ("off", "whole"), "loader": ("files", "packed"), "mirror": (True,)},
}
"""Allowed values for the user's own training, of settings for which the lab's own trainer allows more."""
TRAINING = "ddpm_lab.training.training:training"
PEER_WORKLOADS = "ddpm_lab.training.peers:"
"""Beginning of the workloads that are other people's trainers."""
CHECK = "ddpm_lab.training.gradient_check:gradient_check"
COMMAND = "ddpm_lab.measure.command:command"
"""The workload of a command line, which is in the option ``command``; this is not the name of a function. The option
``as_is`` leaves the command's environment unchanged, and ``optimizer`` is the class whose steps are counted."""


def digest(value: object) -> str:
    """Return the first twelve hexadecimal digits of the SHA-256 of ``value`` as canonical JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffusionConfig:
    """The forward process and the training objective (Ho et al. 2020; Nichol & Dhariwal 2021)."""

    schedule: Annotated[str, Opt("noise schedule", choices=("linear", "cosine"))] = "cosine"
    timesteps: Annotated[int, Opt("steps of the forward process", least=2, below=1_000_001)] = 1000
    objective: Annotated[str, Opt("what the network predicts", choices=("noise", "x0", "v"))] = "noise"
    loss: Annotated[str, Opt("distance of prediction and truth", choices=LOSSES)] = "l1"
    min_snr_gamma: Annotated[float | None, Opt("min-SNR weighting (Hang et al. 2023)", above=0)] = None

    def __post_init__(self) -> None:
        validate(self, "diffusion.")
        if self.min_snr_gamma is not None and self.loss != "l2":
            raise ConfigError(f"diffusion.min_snr_gamma needs loss 'l2', not {self.loss!r}: set diffusion.loss to l2")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Adam, gradient clipping and the exponential moving average (EMA) of the weights.

    ``adam`` and ``ema`` choose the implementation: one kernel for all weights (fused), one kernel per operation
    (foreach), or weight by weight (loop); the results are equal. With ``ema_warmup`` the n-th update decays by
    min((1 + n) / (10 + n), ema_decay), so the initial weights soon stop counting (tf.train.ExponentialMovingAverage).
    """

    learning_rate: Annotated[float, Opt("learning rate of Adam", above=0)] = 2e-4
    betas: Annotated[tuple[float, float], Opt("betas of Adam", least=0, below=1)] = (0.9, 0.99)
    clip_norm: Annotated[float | None, Opt("largest norm of the gradient", above=0)] = 1.0
    ema_decay: Annotated[float, Opt("decay of the averaged weights", least=0, below=1)] = 0.995
    ema_every: Annotated[int, Opt("steps between updates of the averages", least=1)] = 10
    ema_warmup: bool = True
    adam: Annotated[str, Opt("how Adam is computed", choices=("fused", "foreach", "loop"))] = "fused"
    ema: Annotated[str, Opt("how averages are computed", choices=("foreach", "loop"))] = "foreach"

    def __post_init__(self) -> None:
        validate(self, "optimizer.")

    def decay_at(self, update: int) -> float:
        """Return the decay of the averages at update number ``update``, counted from 1."""
        return min(self.ema_decay, (1 + update) / (10 + update)) if self.ema_warmup else self.ema_decay


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeConfig:
    """How DistributedDataParallel exchanges gradients. With a single rank, all settings must be at their defaults.

    ``bucket_view`` stores gradients in the buckets that are exchanged, which saves a copy; ``static_graph`` promises
    that every step uses the same weights. ``hook`` rounds gradients to two bytes per value before they are sent and
    added up, which changes what is learned. If not ``enabled``, each rank trains alone, to measure the exchange's cost.
    """

    enabled: bool = True
    bucket_view: bool = True
    static_graph: bool = False
    bucket_mb: Annotated[int, Opt("size of a bucket in MiB", least=1)] = 25
    hook: Annotated[str, Opt("number format of exchanged gradients", choices=HOOKS)] = "none"
    nccl: Annotated[str, Opt("environment of NCCL", choices=tuple(NCCL))] = "default"

    def __post_init__(self) -> None:
        validate(self, "exchange.")
        for f in () if self.enabled else dataclasses.fields(self)[1:]:
            if getattr(self, f.name) != f.default:
                given = f"exchange.{f.name} is {getattr(self, f.name)!r} and exchange.enabled is false"
                raise ConfigError(f"{given}: where nothing is exchanged it would change nothing; leave it out")


LEARNED = ("network", "image_size", "attention_axis", "diffusion", "global_batch_size", "seed", "data_sha256", "mirror")
"""Settings that determine what is learned, in addition to the optimizer's."""
PARTS = ("diffusion", "optimizer", "exchange")
SAME_WEIGHTS: dict[str, Any] = {"loader": "packed", "loader_workers": 0, "freed_memory": "default", "read_loss": False}
"""Settings that do not change the learned weights at all, with the values to use where only the weights matter."""
LATER = ("mirror",)
"""Settings that came after the first published records: at its default no record holds one, as those do not."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The complete configuration of a training run: two runs with equal ``run_id`` do the same work.

    ``global_batch_size`` is the number of images in one optimizer step over all ranks, which process them in
    ``accumulation`` micro-batches; the ranks are spread evenly over ``nodes`` hosts. ``data`` is the folder of the
    images, whose content hash is ``data_sha256``; the folder is not part of the run id. ``implementation`` "plain" is
    the network as the paper's code is usually written, with NCHW and einsum; ``kernels`` "fused" uses kernels written
    for the CPU, such as a normalisation with the operations after it. ``freed_memory`` "kept" reuses the memory that a
    step frees, where the C library would return large blocks to the system (CPU only). ``attention_axis`` is the axis
    that the seed family's middle attention normalises. ``read_loss`` makes every step wait for its loss, as printing it
    would. With ``oversubscribe``, ranks outnumber cores or GPUs, and share them using gloo. ``revision`` is the commit
    whose code runs; empty for the working tree. ``options`` are for workloads other than the lab's own.
    """

    purpose: Annotated[str, Opt(choices=("timing", "profile", "quality", "check"))] = "timing"
    workload: str = DDPM
    device: Annotated[str, Opt("what computes", choices=DEVICES)] = "cpu"
    world_size: Annotated[int, Opt("ranks: GPUs, or processes on a CPU", least=1)] = 1
    nodes: Annotated[int, Opt("hosts", least=1)] = 1
    global_batch_size: Annotated[int, Opt("images of a step over all ranks", least=1)] = 32
    accumulation: Annotated[int, Opt("micro-batches of a step", least=1)] = 1
    precision: Annotated[str, Opt("number format", choices=PRECISIONS)] = "fp32"
    compile: Annotated[str, Opt("what torch.compile compiles", choices=COMPILE)] = "off"
    compile_mode: Annotated[str, Opt("mode of torch.compile", choices=COMPILE_MODES)] = "default"
    channels_last: bool = True
    implementation: Annotated[str, Opt("form of the network's code", choices=("lab", "plain"))] = "lab"
    kernels: Annotated[str, Opt("kernels of the network", choices=("aten", "fused"))] = "aten"
    freed_memory: Annotated[str, Opt("memory that a step frees", choices=("default", "kept"))] = "default"
    attention_axis: Annotated[str, Opt(choices=("channels", "positions"))] = "channels"
    read_loss: bool = False
    loader: Annotated[str, Opt("how images are loaded", choices=LOADERS)] = "packed"
    loader_workers: Annotated[int, Opt("worker processes of the loader", least=0)] = 0
    mirror: Annotated[bool, Opt("mirror half of the images at random")] = True
    data: str = ""
    data_sha256: str = ""
    network: Annotated[str, Opt("network", choices=tuple(NETWORKS))] = "tiny"
    image_size: Annotated[int, Opt("side of the images in pixels", least=1, below=16_385)] = 32
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    seed: Annotated[int, Opt("seed of weights, data order and noise", least=0)] = 0
    oversubscribe: Annotated[bool, Opt("allow more ranks than cores or GPUs; speed is not claimed")] = False
    threads: Annotated[int, Opt("compute threads of a rank; 0: its share of the cores", least=0, below=4_097)] = 0
    revision: str = ""
    options: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        try:
            json.dumps(options := dict(self.options))
        except (TypeError, ValueError, RecursionError) as error:
            given = f"options is {str(self.options)[:60]!r}"
            raise ConfigError(f"{given}: give a table of numbers, texts, lists and tables ({error})") from error
        object.__setattr__(self, "options", tuple((str(k), v) for k, v in options.items()))
        validate(self)
        for sentence in (*self._impossible(), *self._without_effect()):
            raise ConfigError(sentence)

    def _impossible(self) -> Iterator[str]:
        """Yield a sentence for each reason why this configuration cannot run."""
        module, _, function = self.workload.partition(":")
        ranks, nodes, multiple = self.world_size, self.nodes, NETWORKS[self.network]
        shared = ranks * self.accumulation
        if not module or module.endswith(".py") or not function.isidentifier():
            yield f"workload is {self.workload!r}: name it as module:function, such as mine:before, without .py"
        if self.image_size % multiple:
            yield f"image_size is {self.image_size}: network {self.network!r} needs a multiple of {multiple}"
        if ranks % nodes:
            yield f"world_size {ranks} cannot be shared by {nodes} nodes: give a multiple of {nodes}"
        if self.global_batch_size % shared:
            parts = f"{ranks} ranks in {self.accumulation} micro-batches"
            yield f"global_batch_size {self.global_batch_size} cannot be shared by {parts}: give a multiple of {shared}"
        if self.loader != "files" and self.loader_workers:
            none = f"with loader {self.loader!r}, which has none"
            yield f"loader_workers is {self.loader_workers} {none}: use loader 'files', or 0 workers"
        if self.device == "cpu" and self.precision in ("tf32", "fp16"):
            yield f"precision {self.precision!r} needs a CUDA device: use fp32 or bf16 on a CPU"
        if self.compile_mode != "default" and self.accumulation > 1:
            graphs = f"compile_mode {self.compile_mode!r}, whose CUDA graphs hold the gradients of one micro-batch"
            yield f"accumulation is {self.accumulation} with {graphs}: use accumulation 1, or compile_mode default"
        if self.exchange.static_graph and self.accumulation > 1:
            static = "exchange.static_graph, which torch cannot use with micro-batches"
            yield f"accumulation is {self.accumulation} with {static}: use accumulation 1, or no static graph"
        for name, able in OWN_CHOICES.items() if self.is_own else ():
            if (value := getattr(self, name)) not in able:
                yield f"{name} of {self.work_name} is {value!r}: choose one of {', '.join(map(str, able))}"

    def _without_effect(self) -> Iterator[str]:
        """Yield a sentence for each setting that would have no effect in this configuration."""
        gpu, plain, fused = self.device == "cuda", self.implementation == "plain", self.kernels == "fused"
        if self.compile_mode != "default" and (self.compile == "off" or not gpu):
            needs = "needs a compiled step on a CUDA device; leave it at default"
            yield f"compile_mode is {self.compile_mode!r} with compile {self.compile!r} on {self.device}: it {needs}"
        if self.network not in SEED_FAMILY and (plain or self.attention_axis != "channels"):
            forms = f"implementation {self.implementation!r} with attention_axis {self.attention_axis!r}"
            able = f"has only 'lab' and 'channels'; choose one of {', '.join(SEED_FAMILY)}"
            yield f"{forms}: network {self.network!r} {able}"
        if fused and (plain or self.compile != "off"):
            yield "kernels is 'fused', for the lab's own network, eager: leave compile off, or use kernels aten"
        if fused and not self.channels_last:
            yield "kernels is 'fused', which works in the channels_last format: set channels_last, or aten"
        if self.freed_memory == "kept" and gpu:
            yield "freed_memory is 'kept' on cuda, where a step's memory is the GPU's: leave it at default"
        if plain and self.compile == "regional":
            yield "compile is 'regional', which compiles the lab's own blocks: use whole for 'plain'"
        if self.world_size == 1 and self.exchange != ExchangeConfig():
            yield "exchange has settings, but one rank exchanges nothing: leave it out, or use more ranks"
        if self.exchange.nccl != "default" and (not gpu or self.oversubscribe):
            why = f"on {self.device}, where gloo exchanges gradients and not NCCL"
            yield f"exchange.nccl is {self.exchange.nccl!r} {why}: leave it out, or use GPUs"
        if self.loader == "still" and self.purpose in ("quality", "check"):
            yield "loader is 'still', which repeats one batch and trains nothing: use packed, files or resident"

    @property
    def is_own(self) -> bool:
        return self.workload in (OWN, OWN_LOADER)

    @property
    def command(self) -> str:
        """The command line that is measured if the workload is COMMAND, else an empty string."""
        return str(self.option("command", "")) if self.workload == COMMAND else ""

    @property
    def work_name(self) -> str:
        """A readable name of what is trained: the network, or the user's workload as module:function."""
        return str(self.option("make", self.workload)) if self.is_own else self.network

    @property
    def own_options(self) -> tuple[tuple[str, Any], ...]:
        """The options that identify the user's own training, or another trainer; empty for the lab's own."""
        others = self.is_own or self.workload.startswith(PEER_WORKLOADS)
        return tuple((k, v) for k, v in self.options if k not in TRIAL_OPTIONS) if others else ()

    @property
    def sources(self) -> tuple[str, ...]:
        """Every ``module:function`` whose code a rank runs."""
        return tuple(dict.fromkeys((self.workload, self.work_name))) if self.is_own else (self.workload,)

    @property
    def rank_batch_size(self) -> int:
        """Number of images in one optimizer step on one rank."""
        return self.global_batch_size // self.world_size

    def rank_threads(self, usable_cores: int) -> int:
        """Return the number of compute threads of a rank, on hosts with ``usable_cores`` each."""
        return self.threads or max(1, usable_cores // self.node_size)

    @property
    def node_size(self) -> int:
        """Number of ranks on each host."""
        return self.world_size // self.nodes

    @cached_property
    def run_id(self) -> str:
        """Twelve hexadecimal digits that identify the work: a hash of ``chosen`` without ``data``.

        Defaults are not hashed, so adding a field does not change the ids of earlier records.
        """
        return digest({name: value for name, value in self.chosen.items() if name != "data"})

    @cached_property
    def chosen(self) -> dict[str, Any]:
        """The settings that are not at their defaults, as plain values."""
        usual = _usual()
        found = {name: value for name, value in self.as_dict().items() if value != usual[name]}
        for part in found.keys() & set(PARTS):
            found[part] = {k: v for k, v in found[part].items() if v != usual[part][k]}
        return found

    def option(self, name: str, default: Any) -> Any:
        return dict(self.options).get(name, default)

    def as_dict(self) -> dict[str, Any]:
        """Return all settings as plain values, ready for JSON."""
        values: dict[str, Any] = {**dataclasses.asdict(self), "options": dict(self.options)}
        values["optimizer"]["betas"] = list(self.optimizer.betas)
        return values

    @property
    def flat(self) -> dict[str, Any]:
        """All settings as plain values by name; nested ones have names such as ``optimizer.learning_rate``."""
        found: dict[str, Any] = {}
        for name, value in self.as_dict().items():
            found |= {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "RunConfig":
        """Rebuild a configuration from ``as_dict``. Raises ConfigError for an unknown name."""
        known("a configuration", values, cls)
        return cls(**values)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle settings by name and without defaults: another process may run a revision with other defaults."""
        return RunConfig.from_dict, (self.chosen,)

    def differences(self, other: "RunConfig") -> dict[str, tuple[Any, Any]]:
        """Return the settings that differ, as {name: (own value, other's value)}; ``data`` is ignored."""
        mine, theirs = self.as_dict(), other.as_dict()
        return {k: (mine[k], theirs[k]) for k in mine if k != "data" and mine[k] != theirs[k]}


@cache
def _usual() -> dict[str, Any]:
    return RunConfig().as_dict()
