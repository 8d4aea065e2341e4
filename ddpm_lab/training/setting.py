"""What an experiment trains, on which images and machine, the trainer's defaults, and the user's own training."""

import contextlib
import dataclasses
import importlib.util
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from ddpm_lab.checks import ConfigError, choice, compiler, missing_to_compile
from ddpm_lab.config import (
    DEVICES,
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
from ddpm_lab.processor import favours_bf16, multiplies_bf16
from ddpm_lab.workload import Unsupported

OWN_DATA = "own-"
CUDA_PRECISIONS = ("fp32", "tf32", "fp16", "bf16")
CPU_PRECISIONS = ("fp32", "bf16")
FOR_OWN = ("profile", "multi_gpu", "amp", "workers", "torch_compile", "batch_size")
"""Questions that can be asked about the user's own training."""
OWN_BATCH = 8
"""Number of images in the single step that tests the user's own training."""

# Settings that several questions take.
WorldSizes = Annotated[Sequence[int] | None, Opt("numbers of ranks, such as 1,2,4", least=1)]
WorldSize = Annotated[int, Opt("number of ranks", least=1)]
Batch = Annotated[int | None, Opt("images of a step over all ranks", least=1)]
Batches = Annotated[Sequence[int] | None, Opt("batch sizes, such as 16,32", least=1)]
Precision = Annotated[str, Opt("number format", choices=PRECISIONS)]
Precisions = Annotated[Sequence[str] | None, Opt("number formats", choices=PRECISIONS)]
Workers = Annotated[int | None, Opt("worker processes that decode files while they are needed", least=0)]


FUSED_NEEDS: dict[str, Any] = {"device": "cpu", "compile": "off", "channels_last": True, "implementation": "lab"}
"""The settings with which fused kernels are the default."""


def usual_settings(device: str) -> dict[str, Any]:
    """Return the trainer's default settings for speed on a device; none was measured slower than plain fp32."""
    if device == "cuda":
        capability = least_capability() or (8, 0)  # without a GPU, as when settings are only listed
        # fp16 has its products from 7.0 on, bf16 from 8.0 on (CUDA C++ Programming Guide, table of throughputs).
        precision = "bf16" if capability >= (8, 0) else "fp16" if capability >= (7, 0) else "fp32"
        compiles = capability >= (7, 0) and not missing_to_compile("cuda")
        own = {"kernels": "aten", "compile": "whole" if compiles else "off", "loader": "resident"}
    else:
        precision = "bf16" if favours_bf16() else "fp32"
        kernels = "fused" if compiler("cpu")[-1] else "aten"
        own = {"kernels": kernels, "compile": "off", "loader": "packed", "freed_memory": "kept"}
    return {"precision": precision, "channels_last": True, **own}


def fused_lacking(config: RunConfig) -> str:
    """Return why the default fused kernels cannot be compiled or loaded; empty if they can. Imports torch."""
    if any(getattr(config, name) != value for name, value in FUSED_NEEDS.items()):
        return ""
    from ddpm_lab.diffusion.kernels import library  # noqa: PLC0415 - only if they are used

    try:
        library()
    except Unsupported as problem:
        return f"plain kernels (aten) are used: {problem}"
    return ""


def emulated(config: RunConfig) -> str:
    """Return a warning if this processor has no instructions for the number format, else an empty string."""
    if config.device != "cpu" or config.precision != "bf16" or multiplies_bf16():
        return ""
    return "precision bf16 is emulated on this processor, many times slower than fp32: leave it out"


def torchs_precision(device: str) -> str:
    """Return torch's default precision: tf32 for convolutions from compute capability 8.0 on, else fp32.

    Torch computes matrix products, a small part of these networks, in fp32; the lab uses tf32 for them, too.
    """
    return "tf32" if device == "cuda" and (least_capability() or (8, 0)) >= (8, 0) else "fp32"


class Images(NamedTuple):
    """Prepared images: the folder, the content hash, a readable name, and the image size."""

    folder: str
    sha256: str
    name: str
    image_size: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The user's own training, after a test of one step.

    ``offers`` contains some of training, dataset, loss, held_out_loss, and eager (it does not call torch.compile).
    """

    name: str
    place: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    offers: tuple[str, ...] = ()

    @property
    def own_format(self) -> bool:
        """Whether the training chooses its number format itself, so that the lab cannot set it."""
        return "loss" not in self.offers

    @property
    def sha256(self) -> str:
        """Used as the data hash, so that only equal trainings are compared."""
        return own_data(self.name) + digest(dict(self.options))

    def settings(self) -> dict[str, Any]:
        """Return the settings that all of its configurations share: the training runs as its code is written."""
        return {
            "workload": OWN,
            "options": (("make", self.name), *self.options),
            "loader": "files",
            "channels_last": False,
            "optimizer": OptimizerConfig(clip_norm=None, ema_every=1),
        }

    def lacks(self, question: str) -> str:
        """Return why a question cannot be asked about this training; empty if it can."""
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
    """Return the prefix of the data hash of the user's training ``name``."""
    return f"{OWN_DATA}{digest(name)[:6]}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all configurations of an experiment have in common, and the resources of the machine."""

    preset: str
    network: str
    images: Images
    device: str
    gpus: int
    usable_cores: int
    seed: int = 0
    oversubscribe: bool = False
    hosts: int = 1
    places: int = 0  # maximum number of ranks of a job on each host; 0 means one per device
    limited: bool = False  # usable_cores excludes cores that other processes use
    own: Own | None = None  # the user's own training, instead of the network and the images
    formats: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the fastest settings, by trainer

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
        """Maximum number of ranks on one host with a device each."""
        devices = self.gpus if self.device == "cuda" else self.usable_cores
        return min(devices, self.places) if self.places else devices

    @property
    def most_ranks(self) -> int:
        """Maximum number of ranks on all hosts with a device each."""
        return self.hosts * self.node_size

    @property
    def doubled_ranks(self) -> list[int]:
        """The powers of two up to ``most_ranks``."""
        return [2**i for i in range(self.most_ranks.bit_length())]

    def nodes(self, ranks: int) -> int:
        """Return the number of hosts for ``ranks`` ranks: as few as have enough places."""
        return min(self.hosts, -(-ranks // self.node_size)) if self.places else 1

    def batch_size(self, asked: int | None, ranks: int = 1) -> int:
        """Return ``asked``, or the preset's global batch size: 128, or 8 on a CPU except in ``full``."""
        usual = 128 if self.device == "cuda" or self.preset == "full" else 8
        return -(-usual // ranks) * ranks if asked is None else asked

    def world_sizes(self, asked: Sequence[int] | None, usual: Sequence[int]) -> list[int]:
        """Return ``asked``, or the ``usual`` world sizes that fit. Raises ConfigError if one of ``asked`` does not."""
        if asked is None:
            return [n for n in usual if (n <= self.most_ranks or self.oversubscribe) and n % self.nodes(n) == 0]
        for ranks in asked:
            self.check_ranks(ranks)
        return sorted(set(asked))

    def check_ranks(self, ranks: int) -> None:
        each = ranks // self.nodes(ranks)
        check_ranks(self.device, each, self.gpus, self.usable_cores, self.oversubscribe, limited=self.limited)

    def files(self, loader_workers: int) -> dict[str, Any]:
        """Return the settings of a loader that decodes files on demand. Raises ConfigError for too many workers."""
        check_cores("loader_workers", loader_workers, self.usable_cores)
        return {"loader": "files", "loader_workers": loader_workers}

    def ranks_label(self, ranks: int) -> str:
        """Return a label such as ``2 GPUs``, ``2 ranks`` or ``8 GPUs on 2 hosts``."""
        hosts = f" on {self.nodes(ranks)} hosts" if self.nodes(ranks) > 1 else ""
        return f"{ranks} {'GPU' if self.device == 'cuda' else 'rank'}{'s' * (ranks > 1)}{hosts}"

    def family_name(
        self, batch: int | None, ranks: int | None = None, *, per_rank: bool = False, trained: bool = True
    ) -> str:
        """Return the readable name of a family: the network or training, batch, image size and ranks.

        A network that is not ``trained``, as where the loader is measured alone, is left out.
        """
        size = self.images.image_size
        words = (
            self.own.name if self.own else self.network * trained,
            f"batch {batch}{' per rank' * per_rank}" if batch else "",
            f"{size}x{size} pixels" if size != 32 else "",
            self.ranks_label(ranks) if ranks else "",
        )
        return ", ".join(filter(None, words))

    @property
    def plain_precision(self) -> str:
        """The precision of a baseline: fp32, or torch's default for the user's own training."""
        return torchs_precision(self.device) if self.own and not self.own.own_format else "fp32"

    @property
    def usual_precision(self) -> str:
        """The precision of compiled configurations: bf16, or fp32 if the user's training chooses its number format."""
        return "fp32" if self.own and self.own.own_format else "bf16"

    def precision_name(self, precision: str) -> str:
        return "own number format" if self.own and self.own.own_format else precision

    @property
    def why_alone(self) -> str:
        """The reason why a machine with one device does not measure two ranks."""
        if self.limited and self.device == "cpu":
            return "one core is free, since other processes take the rest; each rank needs its own"
        have = "GPU" if self.device == "cuda" else "usable core"
        return f"this machine has one {have}; each rank needs its own"

    @property
    def cores_name(self) -> str:
        """The number of cores that can be used, such as "4 free cores"."""
        kind = "free" if self.limited else "usable"
        return f"{self.usable_cores} {kind} core{'s' * (self.usable_cores != 1)}"


def usual_device(device: str | None) -> str:
    """Return ``device``, by default a GPU if there is one. Raises ConfigError for another, or an unusable GPU."""
    if device is not None:
        choice("device", device, DEVICES)
    if device in (None, "cuda") and (trouble := gpu_trouble()):
        raise ConfigError(trouble)
    return device or ("cuda" if hardware.gpus() else "cpu")


def check_ranks(
    device: str, ranks: int, gpus: int, usable_cores: int, oversubscribe: bool | None = None, *, limited: bool = False
) -> None:
    """Raise ConfigError if torch is missing or cannot use the GPU, or if ranks outnumber GPUs or usable cores.

    With ``oversubscribe``, ranks share devices; None means they cannot. ``limited``: other processes use some cores.
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
    """Raise ConfigError if there are more workers or threads than cores for a rank; one is always allowed."""
    most = max(1, usable_cores // ranks)
    if count > most:
        give = "that" if ranks == 1 else f"{most} to each of {ranks} ranks"
        raise ConfigError(f"{name} is {count}: {usable_cores} cores are usable, give at most {give}")


# The user's own training is tested before anything is measured: one rank creates it and runs one step. Errors in
# importing it, in what it returns or in its step are reported here in one sentence, with the line.


def find_here() -> None:
    """Add the working directory to the Python path, where a script finds modules but an installed command does not."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)  # first, as for a script: train.py and test.py are common names


def check_name(question: str, name: object) -> None:
    """Raise ConfigError if ``name`` is no importable module:function, or if the question needs the lab's trainer."""
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
    with contextlib.suppress(ValueError):  # the name begins with a dot
        spec = importlib.util.find_spec(top)
    if spec is None or top == "__main__":
        raise ConfigError(f"workload {name!r}: there is no module {top!r}; is its folder on the Python path?")


def code_of(configs: Iterable[RunConfig], instrument: Instrument, tree: Tree | None = None) -> CodeVersion:
    """Return the code version of what ranks run, from ``tree`` if given. Raises ConfigError if a rank fails."""
    modules, libraries, settings = dict[str, str](), set[str](), set[str]()
    for config in {config.sources: config for config in configs}.values():
        if not all(map(in_lab, config.sources)):
            revision = tree.revision if tree else config.revision
            eager = dataclasses.replace(config, compile="off", compile_mode="default", revision=revision)
            _, loaded = look(eager, instrument, tree)
            modules.update(loaded.modules)
            libraries.update(loaded.libraries)
            settings.update(loaded.settings)
    # Files that any of the configurations has written are not settings.
    loaded = Loaded(modules, sorted(libraries), sorted(settings - instrument.code.written))
    return dataclasses.replace(code_version(loaded, tree), written=instrument.code.written)


def look(
    config: RunConfig, instrument: Instrument, tree: Tree | None = None, *, judged: bool = False
) -> tuple[dict[str, Any], Loaded]:
    """Run one step of a workload and return the first rank's witness and loaded code. Raises ConfigError on failure.

    With ``judged`` its held-out loss, if it has one, is computed once as well.
    """
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
            losses = group.advance(1, limit)[0]["losses"]
            ranks, loaded = group.witness(), group.loaded()
            if judged and "held_out_loss" in ranks[0].get("offers", ()):
                losses.append(group.call("held_out_loss", limit, draws=1)[0]["loss"])
            if wrong := [loss for loss in losses if not math.isfinite(loss)]:
                raise GroupFailed("diverged", f"a loss is {wrong[0]} after the first step")
    except GroupFailed as failed:
        raise ConfigError(f"workload {name!r} cannot be measured: {failed.reason}") from failed
    if wrong := mismatches(config, [{**seen, "unlisted_modules": []} for seen in ranks]):
        raise ConfigError(f"workload {name!r} cannot be measured: {'; '.join(wrong)}")
    read = set(loaded.settings) - instrument.code.written
    folders = (Path.cwd(), *map(Path, tree.folders if tree else ()))
    return ranks[0], loaded._replace(settings=settings_among(read, folders, map(Path, loaded.modules.values())))


def look_at(
    name: str, instrument: Instrument, *, device: str, seed: int, judged: bool = False
) -> tuple[Own, CodeVersion]:
    """Test the user's training ``name`` and return it with its code version. Raises ConfigError if it fails.

    ``judged``: quality is asked for, so its held-out loss is tested too.
    """
    config = RunConfig(**Own(name=name).settings(), device=device, seed=seed, global_batch_size=OWN_BATCH)
    witness, loaded = look(config, instrument, judged=judged)
    offers = ("training", *witness["offers"]) if "offers" in witness else ()
    options = [(key, witness[key]) for key in OBSERVED_OPTIONS if offers]
    if "loss" not in offers:
        options.append(("number_format", "own"))
    own = Own(name=name, place=witness.get("maker", ""), options=tuple(options), offers=offers)
    return own, dataclasses.replace(code_version(loaded), written=instrument.code.written)


def check_brought(name: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError if data or network are ``given`` for the user's own training, which defines both."""
    usual = {"data": "synthetic", "held_out": None, "skip_bad": False, "network": None, "image_size": 32}
    usual |= {"image_sizes": None}
    for place, value in given.items():
        if place in usual and value != usual[place]:
            raise ConfigError(f"{place} is {value!r}, and {name} brings its own data and model: leave it out")


def with_own(setup: Setup, own: Own) -> Setup:
    samples = dict(own.options).get("samples")
    data = "data of its own" if samples is None else f"{samples:,} samples"
    images = setup.images._replace(sha256=own.sha256, name=data)
    return dataclasses.replace(setup, own=own, images=images)


def nothing_asked(question: str, setup: Setup) -> Experiment:
    left_out = (setup.family_name(None), WHOLE_QUESTION, setup.own.lacks(question) if setup.own else "")
    return Experiment(name=question, families=(), left_out=(left_out,), asked=setup.config())
