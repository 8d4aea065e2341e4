"""What an experiment trains on which images, what the machine offers, the trainer's defaults, and a user's training."""

import contextlib
import dataclasses
import importlib.util
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ddpm_lab.checks import ConfigError, compiler, missing_to_compile
from ddpm_lab.config import (
    LOADER_ALONE,
    OBSERVED_OPTIONS,
    OWN,
    OWN_LOADER,
    PRECISIONS,
    OptimizerConfig,
    RunConfig,
    digest,
)
from ddpm_lab.declared import Opt
from ddpm_lab.measure import hardware
from ddpm_lab.measure.code_version import CodeVersion, Loaded, Tree, code_version, in_lab, settings_among
from ddpm_lab.measure.group import Group, GroupFailed
from ddpm_lab.measure.hardware import gpu_trouble, least_capability
from ddpm_lab.measure.sets import Instrument
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.plan import RECOMMENDATION, SEARCH, WHOLE_QUESTION, Experiment
from ddpm_lab.processor import multiplies_bf16
from ddpm_lab.workload import Unsupported

OWN_DATA = "own-"
CUDA_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
CPU_PRECISIONS = ("fp32", "bf16")
FOR_OWN = ("profile", "multi_gpu", "amp", "workers", "torch_compile", "batch_size")
"""Questions that can be asked of a training of the user's."""
OWN_BATCH = 8
"""Images of the one step in which such a training is tried."""

# Settings that several questions take.
WorldSizes = Annotated[Sequence[int] | None, Opt("numbers of ranks, such as 1,2,4", least=1)]
WorldSize = Annotated[int, Opt("number of ranks", least=1)]
Batch = Annotated[int | None, Opt("images of a step over all ranks", least=1)]
Batches = Annotated[Sequence[int] | None, Opt("batch sizes, such as 16,32", least=1)]
Precision = Annotated[str, Opt("number format", choices=PRECISIONS)]
Precisions = Annotated[Sequence[str] | None, Opt("number formats", choices=PRECISIONS)]
Workers = Annotated[int | None, Opt("worker processes that decode files while they are needed", least=0)]


FUSED_NEEDS: dict[str, Any] = {"device": "cpu", "compile": "off", "channels_last": True, "implementation": "lab"}
"""Settings beside which fused kernels are usual."""


def usual_settings(device: str) -> dict[str, Any]:
    """The trainer's settings for speed by what the device can do; none was measured slower than plain fp32."""
    if device == "cuda":
        capability = least_capability() or (8, 0)  # elsewhere, as where a grid is only looked at
        # fp16 has its products from 7.0 on, bf16 from 8.0 on (CUDA C++ Programming Guide, table of throughputs).
        precision = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
        compiles = capability >= (7, 0) and not missing_to_compile("cuda")
        own = {"kernels": "aten", "compile": "whole" if compiles else "off", "loader": "resident"}
    else:
        precision = "bf16" if multiplies_bf16() else "fp32"
        kernels = "fused" if compiler("cpu")[-1] else "aten"
        own = {"kernels": kernels, "compile": "off", "loader": "packed", "freed_memory": "kept"}
    return {"precision": precision, "channels_last": True, **own}


def fused_lacking(config: RunConfig) -> str:
    """Why fused kernels, which are usual here, cannot be compiled or loaded; empty where they can. Imports torch."""
    if any(getattr(config, name) != value for name, value in FUSED_NEEDS.items()):
        return ""
    from ddpm_lab.diffusion.kernels import library  # noqa: PLC0415 - only where they are wanted

    try:
        library()
    except Unsupported as problem:
        return f"plain kernels (aten) are used: {problem}"
    return ""


def emulated(config: RunConfig) -> str:
    """The warning of a number format that this processor has no instructions for."""
    if config.device != "cpu" or config.precision != "bf16" or multiplies_bf16():
        return ""
    return "precision bf16 is emulated on this processor, many times slower than fp32: leave it out"


def torchs_precision(device: str) -> str:
    """The precision of code that sets none: from capability 8.0 on torch computes convolutions in tf32.

    Matrix products, a small part of these networks, it leaves in fp32; here they are in tf32 too.
    """
    return "tf32" if device == "cuda" and (least_capability() or (8, 0)) >= (8, 0) else "fp32"


class Images(NamedTuple):
    """Prepared images: the folder, the content hash, and a name for people."""

    folder: str
    sha256: str
    name: str
    image_size: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A training of the user's as it was tried.

    ``offers`` are some of training, dataset, loss, held_out_loss, and eager, where it compiles nothing by itself.
    """

    name: str
    place: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    offers: tuple[str, ...] = ()

    @property
    def own_format(self) -> bool:
        """Whether its number format is its own, which the lab cannot set."""
        return "loss" not in self.offers

    @property
    def sha256(self) -> str:
        """In the place of a data hash: only what was made alike is compared."""
        return own_data(self.name) + digest(dict(self.options))

    def settings(self) -> dict[str, Any]:
        """The settings that every configuration of it has: it is trained as its code is written."""
        return {
            "workload": OWN,
            "options": (("make", self.name), *self.options),
            "loader": "files",
            "channels_last": False,
            "optimizer": OptimizerConfig(clip_norm=None, ema_every=1),
        }

    def lacks(self, question: str) -> str:
        """Why a question cannot be asked of it; empty where it can."""
        if question != "profile" and "training" not in self.offers:
            return (
                f"{self.name} does its own steps, in which nothing can be set: let it return a "
                "ddpm_lab.workload.Training, or compare two versions of it with ddpm-lab compare"
            )
        if question == "amp" and self.own_format:
            return f"{self.name} has a step of its own, whose number format is its own too: give a loss in place of it"
        if question == "torch_compile" and "eager" not in self.offers:
            return f"{self.name} compiles by itself: leave torch.compile to the lab, which compares it with eager steps"
        if question == "workers" and "dataset" not in self.offers:
            return f"{self.name} gives ready batches and no dataset, so there is nothing for loader workers to load"
        return ""


def own_data(name: str) -> str:
    """How the data hash of a user's training begins."""
    return f"{OWN_DATA}{digest(name)[:6]}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all configurations of an experiment have in common, and what the machine offers."""

    preset: str
    network: str
    images: Images
    device: str
    gpus: int
    usable_cores: int
    seed: int = 0
    oversubscribe: bool = False
    hosts: int = 1
    places: int = 0  # ranks that a job has room for on each host; 0 is as many as there are devices
    limited: bool = False  # usable_cores are fewer than the machine has: other processes take the rest
    own: Own | None = None  # a training of the user's, in place of the network and the images
    formats: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # number and memory format by other trainer

    def config(self, **settings: Any) -> RunConfig:
        common = {
            "network": self.network,
            "device": self.device,
            "data": self.images.folder,
            "data_sha256": self.images.sha256,
            "image_size": self.images.image_size,
            "seed": self.seed,
        }
        if self.own:
            common |= {**self.own.settings(), "precision": self.plain_precision}
            settings |= {"loader": "files"}
            if settings.get("workload") == LOADER_ALONE:
                settings["workload"] = OWN_LOADER
            if self.own.own_format and settings.get("precision", "fp32") != "fp32":
                raise ConfigError(f"precision is {settings['precision']!r}: {self.own.lacks('amp')}")
        config = RunConfig(**{**common, "nodes": self.nodes(settings.get("world_size", 1)), **settings})
        if self.limited and config.device == "cpu":
            config = dataclasses.replace(config, threads=max(1, self.usable_cores // config.node_size))
        over = config.node_size > (self.gpus if config.device == "cuda" else self.usable_cores)
        return dataclasses.replace(config, oversubscribe=True) if over and self.oversubscribe else config

    @property
    def node_size(self) -> int:
        """Ranks that one host can give a device of their own."""
        devices = self.gpus if self.device == "cuda" else self.usable_cores
        return min(devices, self.places) if self.places else devices

    @property
    def most_ranks(self) -> int:
        """Ranks that all hosts together can give a device of their own."""
        return self.hosts * self.node_size

    @property
    def doubled_ranks(self) -> list[int]:
        """1, 2, 4, ... as far as ranks have a device of their own."""
        return [2**i for i in range(self.most_ranks.bit_length())]

    def nodes(self, ranks: int) -> int:
        """Over how many hosts so many ranks are spread: as few as have room for them."""
        return min(self.hosts, -(-ranks // self.node_size)) if self.places else 1

    def batch_size(self, asked: int | None, ranks: int = 1) -> int:
        """The global batch size asked for, or the preset's: 128, and 8 on a CPU except in ``full``."""
        usual = 128 if self.device == "cuda" or self.preset == "full" else 8
        return -(-usual // ranks) * ranks if asked is None else asked

    def world_sizes(self, asked: Sequence[int] | None, usual: Sequence[int]) -> list[int]:
        """The world sizes asked for, checked; or those of ``usual`` that this machine can run."""
        if asked is None:
            return [n for n in usual if (n <= self.most_ranks or self.oversubscribe) and n % self.nodes(n) == 0]
        for ranks in asked:
            self.check_ranks(ranks)
        return sorted(set(asked))

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError for more ranks than the machine has devices for."""
        each = ranks // self.nodes(ranks)
        check_ranks(self.device, each, self.gpus, self.usable_cores, self.oversubscribe, limited=self.limited)

    def files(self, loader_workers: int) -> dict[str, Any]:
        """Settings of a loader that decodes each file when it is needed; raises ConfigError for too many workers."""
        check_cores("loader_workers", loader_workers, self.usable_cores)
        return {"loader": "files", "loader_workers": loader_workers}

    def ranks_label(self, ranks: int) -> str:
        """``2 GPUs``, ``2 ranks`` or ``8 GPUs on 2 hosts``."""
        hosts = f" on {self.nodes(ranks)} hosts" if self.nodes(ranks) > 1 else ""
        return f"{ranks} {'GPU' if self.device == 'cuda' else 'rank'}{'s' * (ranks > 1)}{hosts}"

    def family_name(self, batch: int | None, ranks: int | None = None, *, per_rank: bool = False) -> str:
        """A family's name for people: what everything in it has in common."""
        return ", ".join([self.own.name if self.own else self.network, *self._words(batch, ranks, per_rank)])

    @property
    def plain_precision(self) -> str:
        """In which a baseline computes: fp32, and a training of the user's as torch does where code says nothing."""
        return torchs_precision(self.device) if self.own and not self.own.own_format else "fp32"

    @property
    def usual_precision(self) -> str:
        """In which the preset compiles: bf16, unless the number format is not the lab's to set."""
        return "fp32" if self.own and self.own.own_format else "bf16"

    def precision_name(self, precision: str) -> str:
        """A number format for people."""
        return "own number format" if self.own and self.own.own_format else precision

    def splits_scaling(self, asked: bool | None) -> bool:
        """Whether the lost scaling is split into its causes; None does so in ``full``, where it can be."""
        if self.own and asked:
            raise ConfigError(f"lost_scaling splits the step of the lab's own trainer, not that of {self.own.name}")
        return self.preset == "full" and not self.own if asked is None else asked

    def loader_name(self, batch: int) -> str:
        """What a loader alone loads, for people."""
        return self.family_name(batch) if self.own else ", ".join(self._words(batch))

    @property
    def why_alone(self) -> str:
        """Why a machine with one device measures no second rank."""
        if self.limited and self.device == "cpu":
            return "one core is free, since other processes take the rest; each rank needs its own"
        have = "GPU" if self.device == "cuda" else "usable core"
        return f"this machine has one {have}; each rank needs its own"

    @property
    def cores_name(self) -> str:
        """The cores that can be measured with, for people."""
        kind = "free" if self.limited else "usable"
        return f"{self.usable_cores} {kind} core{'s' * (self.usable_cores != 1)}"

    def _words(self, batch: int | None, ranks: int | None = None, per_rank: bool = False) -> list[str]:
        """Batch and ranks where they are known, and the size of images where it is not CIFAR's: ``64x64 pixels``."""
        size = self.images.image_size
        pixels = f"{size}x{size} pixels" if size != 32 else ""
        step = f"batch {batch}{' per rank' * per_rank}" if batch else ""
        return [word for word in (step, pixels, self.ranks_label(ranks) if ranks else "") if word]


def usual_device(device: str | None) -> str:
    """The device, or the GPU where there is one. Raises ConfigError for a GPU that torch cannot use."""
    if device in (None, "cuda") and (trouble := gpu_trouble()):
        raise ConfigError(trouble)
    return device or ("cuda" if hardware.gpus() else "cpu")


def check_ranks(
    device: str, ranks: int, gpus: int, usable_cores: int, oversubscribe: bool | None = None, *, limited: bool = False
) -> None:
    """Raise ConfigError without torch, for a GPU that it cannot use, and for more ranks than GPUs, or usable cores.

    With ``oversubscribe`` ranks share them; None where they cannot. ``limited`` cores are those that other processes
    leave free.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "torch is not installed here: pip install torch torchvision, or use a checkout after make setup"
        )
    if device == "cuda" and (trouble := gpu_trouble()):
        raise ConfigError(trouble)
    if device == "cuda" and not gpus:
        raise ConfigError("device is 'cuda', but no GPU is visible: use device cpu, or check the driver (nvidia-smi)")
    most = gpus if device == "cuda" else usable_cores
    if ranks <= most or oversubscribe:
        return
    have = "are free, since other processes take the rest" if limited else "are usable here"
    need = f"{ranks} CPU ranks need {ranks} cores, {usable_cores} {have}"
    if device == "cuda":
        need = f"{ranks} ranks need {ranks} GPUs, this machine has {gpus}"
    share = ", or --oversubscribe (such records show that it works, and nothing about speed)"
    raise ConfigError(f"{need}: give at most {most}{'' if oversubscribe is None else share}")


def check_cores(name: str, count: int, usable_cores: int, ranks: int = 1) -> None:
    """Raise ConfigError for more workers or threads than a rank has cores; one is never refused."""
    most = max(1, usable_cores // ranks)
    if count > most:
        give = "that" if ranks == 1 else f"{most} to each of {ranks} ranks"
        raise ConfigError(f"{name} is {count}: {usable_cores} cores are usable, give at most {give}")


# A training of the user's, tried before anything is measured: one rank makes it and does one step. What cannot be
# imported, returns the wrong thing or fails is refused here in one sentence, with the line.


def find_here() -> None:
    """The folder one works in may hold the module: a script finds it there, a command does not by itself."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)  # first, as for a script: train.py and test.py are common names


def check_name(question: str, name: object) -> None:
    """Raise ConfigError for a training of the user's that is not named so that it is found, or cannot be asked of."""
    module, _, function = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not module or not function.isidentifier() or module.endswith(".py"):
        how = "module:function, such as mine:make, without .py"
        raise ConfigError(f"workload is {name!r}: name the function that makes your training as {how}")
    if question not in (*FOR_OWN, SEARCH, RECOMMENDATION):
        raise ConfigError(
            f"workload is {name!r}, and the experiment {question} is about the lab's own trainer: leave it out, or ask "
            f"some of {', '.join(FOR_OWN)}"
        )
    find_here()
    top, spec = module.partition(".")[0], None
    with contextlib.suppress(ValueError):  # of a name that begins with a dot
        spec = importlib.util.find_spec(top)
    if spec is None or top == "__main__":
        raise ConfigError(f"workload {name!r}: there is no module {top!r}; is its folder on the Python path?")


def code_of(configs: Iterable[RunConfig], instrument: Instrument, tree: Tree | None = None) -> CodeVersion:
    """The code that ranks run, in ``tree`` for a revision's. Raises ConfigError where a rank cannot tell it."""
    modules, libraries, settings = dict[str, str](), set[str](), set[str]()
    for config in {config.sources: config for config in configs}.values():
        if not all(map(in_lab, config.sources)):
            revision = tree.revision if tree else config.revision
            eager = dataclasses.replace(config, compile="off", compile_mode="default", revision=revision)
            _, found = look(eager, instrument, tree)
            modules.update(found.modules)
            libraries.update(found.libraries)
            settings.update(found.settings)
    # What a later one has written is no setting of an earlier one either.
    found = Loaded(modules, sorted(libraries), sorted(settings - instrument.code.written))
    return dataclasses.replace(code_version(found, tree), written=instrument.code.written)


def look(config: RunConfig, instrument: Instrument, tree: Tree | None = None) -> tuple[dict[str, Any], Loaded]:
    """What a workload's first rank says after one step, and what it loaded and read. Raises ConfigError if it fails."""
    name = config.sources[-1]
    instrument.progress(f"looking at {name}")
    limit = instrument.limits.build_seconds
    try:
        with Group(
            config,
            threads=config.rank_threads(instrument.usable_cores),
            tree=tree,
            limits=instrument.limits,
            written=instrument.code.written,
            progress=lambda text: instrument.progress(f"{name}: {text}"),
        ) as group:
            group.advance(1, limit)
            ranks, loaded = group.witness(), group.loaded()
    except GroupFailed as failed:
        raise ConfigError(f"workload {name!r} cannot be measured: {failed.reason}") from failed
    if wrong := mismatches(config, [{**seen, "unlisted_modules": []} for seen in ranks]):
        raise ConfigError(f"workload {name!r} cannot be measured: {'; '.join(wrong)}")
    read = set(loaded.settings) - instrument.code.written
    folders = (Path.cwd(), *map(Path, tree.folders if tree else ()))
    return ranks[0], loaded._replace(settings=settings_among(read, folders, map(Path, loaded.modules.values())))


def look_at(name: str, instrument: Instrument, *, device: str, seed: int) -> tuple[Own, CodeVersion]:
    """What the training of ``name`` offers, and its code. Raises ConfigError where its first step fails."""
    config = RunConfig(**Own(name=name).settings(), device=device, seed=seed, global_batch_size=OWN_BATCH)
    seen, loaded = look(config, instrument)
    offers = ("training", *seen["offers"]) if "offers" in seen else ()
    options = [(key, seen[key]) for key in OBSERVED_OPTIONS if offers]
    if "loss" not in offers:
        options.append(("number_format", "own"))
    found = Own(name=name, place=seen.get("maker", ""), options=tuple(options), offers=offers)
    return found, dataclasses.replace(code_version(loaded), written=instrument.code.written)


def check_brought(name: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of the lab's own data and network, beside a training that brings both."""
    usual = {"data": "synthetic", "held_out": None, "skip_bad": False, "network": None, "image_size": 32}
    usual |= {"image_sizes": None}
    for place, value in given.items():
        if place in usual and value != usual[place]:
            raise ConfigError(f"{place} is {value!r}, and {name} brings its own data and model: leave it out")


def with_own(setup: Setup, own: Own) -> Setup:
    samples = dict(own.options).get("samples")
    told = "data of its own" if samples is None else f"{samples:,} samples"
    images = setup.images._replace(sha256=own.sha256, name=told)
    return dataclasses.replace(setup, own=own, images=images)


def nothing_asked(question: str, setup: Setup) -> Experiment:
    """An experiment of which nothing is measured, and that says why."""
    left_out = (setup.family_name(None), WHOLE_QUESTION, setup.own.lacks(question) if setup.own else "")
    return Experiment(name=question, families=(), left_out=(left_out,), asked=setup.config())
