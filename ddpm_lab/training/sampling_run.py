"""Images from a checkpoint, in the parent: which are missing, and the ranks that make them."""

import dataclasses
import hashlib
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from PIL import Image

from ddpm_lab.checks import ConfigError, whole
from ddpm_lab.config import COMPILE, PRECISIONS, RunConfig
from ddpm_lab.declared import Opt, parsed, validate
from ddpm_lab.files import check_room, lock, replace
from ddpm_lab.measure import hardware
from ddpm_lab.measure.cluster import spread, training_cores
from ddpm_lab.measure.group import Group, GroupFailed
from ddpm_lab.output import Progress
from ddpm_lab.training.run_folder import RunFailed
from ddpm_lab.training.setting import check_ranks, emulated, fused_lacking, usual_device, usual_settings

GENERATION = "ddpm_lab.training.training:Generation"
SETTINGS = "sampling.json"
SILENCE_SECONDS = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """What decides the images, beside the checkpoint."""

    sampler: Annotated[str, Opt("sampler", choices=("ddim", "ddpm"))] = "ddim"
    steps: Annotated[int, Opt("denoising steps", least=1)] = 250
    seed: Annotated[int, Opt("with an image's number, its noise", least=0)] = 0
    weights: Annotated[str, Opt("averaged or last weights", choices=("ema", "trained"))] = "ema"
    precision: Annotated[str, Opt("number format", choices=PRECISIONS)] = "fp32"
    compile: Annotated[str, Opt("torch.compile", choices=COMPILE)] = "off"

    def __post_init__(self) -> None:
        validate(self)


def sample(
    checkpoint: Path,
    folder: Path,
    count: int,
    sampling: Sampling,
    *,
    device: str | None = None,
    world_size: int,
    batch_size: int = 64,
    progress: Progress,
) -> list[Path]:
    """Make the images 0 to ``count`` - 1 of a checkpoint that ``folder`` lacks, and return the paths of all.

    ``batch_size`` is that of each rank. On a CPU the network has fused kernels, where it can. Raises ConfigError where
    this cannot be run or the folder holds images of other settings, CheckpointError for a checkpoint that cannot be
    used, and RunFailed where a rank failed; the images that were made stay.
    """
    for name, value in (("count", count), ("world_size", world_size), ("batch_size", batch_size)):
        whole(name, value, 1)
    if count > 1_000_000:  # a file is named by the six digits of its image's number
        raise ConfigError(f"count is {count:,}: give at most 1,000,000, and more with another seed and folder")
    device = usual_device(device)
    nodes = spread(world_size)
    check_ranks(device, world_size // nodes, len(hardware.gpus()), hardware.usable_cores())
    ranks = {"device": device, "world_size": world_size, "nodes": nodes, "global_batch_size": world_size * batch_size}
    config, origin = _plan(checkpoint, folder, sampling, ranks)
    paths = [folder / f"{number:06d}.png" for number in range(count)]
    with _claimed(folder, origin):
        missing = tuple(n for n, path in enumerate(paths) if not _is_whole(path, config.image_size))
        if missing:
            _make(dataclasses.replace(config, options=(*config.options, ("numbers", missing))), count, progress)
        else:
            progress.done(f"all {count:,} images are there")
    return paths


def _plan(
    checkpoint: Path, folder: Path, sampling: Sampling, ranks: dict[str, Any]
) -> tuple[RunConfig, dict[str, Any]]:
    """The configuration of the ranks, and what tells these images from others."""
    from ddpm_lab.training.checkpoint import read  # noqa: PLC0415 - torch only where one is read

    found = read(checkpoint)
    trained, usual = found.config, usual_settings(ranks["device"])
    if sampling.steps > trained.diffusion.timesteps:
        raise ConfigError(
            f"steps is {sampling.steps}: give at most the {trained.diffusion.timesteps} timesteps of the process"
        )
    options = {"checkpoint": str(checkpoint.absolute()), "folder": str(folder.absolute())}
    options |= {name: getattr(sampling, name) for name in ("weights", "sampler", "steps")}
    config = RunConfig(
        workload=GENERATION,
        precision=sampling.precision,
        compile=sampling.compile,
        kernels=usual["kernels"] if sampling.compile == "off" else "aten",
        freed_memory=usual.get("freed_memory", "default"),
        seed=sampling.seed,
        options=tuple(options.items()),
        **ranks,
        **{name: getattr(trained, name) for name in ("network", "image_size", "attention_axis", "diffusion")},
    )
    content = hashlib.sha256(checkpoint.read_bytes()).hexdigest()[:16]
    return config, {"step": found.step, "checkpoint": content, **asdict(sampling)}


@contextmanager
def _claimed(folder: Path, origin: dict[str, Any]) -> Iterator[None]:
    """Hold the folder, which nobody else then fills, and note in it where its images come from.

    Raises ConfigError if it cannot be written, holds other images, or somebody else fills it.
    """
    check_room(folder)
    held = os.open(folder, os.O_RDONLY)
    try:
        if not lock(held, wait=False):
            raise ConfigError(f"{folder}: another command makes images there: let it end, or give another --output-dir")
        for left in folder.glob("*.png.*.partial"):
            left.unlink(missing_ok=True)  # of a command that was killed while it wrote
        if any(folder.glob("*.png")):
            _check_origin(folder, origin)
        else:
            replace(folder / SETTINGS, json.dumps(origin, indent=1) + "\n")
        yield
    finally:
        os.close(held)


def _check_origin(folder: Path, origin: dict[str, Any]) -> None:
    """Raise ConfigError if a folder holds images that come from elsewhere, or does not say from where."""
    before = None
    with suppress(OSError, ValueError):
        before = parsed((folder / SETTINGS).read_bytes())
    if not isinstance(before, dict):
        raise ConfigError(f"{folder} holds images of another origin: give another --output-dir")
    if unlike := [f"{name} is {value!r}" for name, value in origin.items() if before.get(name) != value]:
        raise ConfigError(f"{folder} holds images of other settings ({'; '.join(unlike)}): give another --output-dir")


def _is_whole(path: Path, image_size: int) -> bool:
    """Whether an image is there: a machine that lost its power leaves files that are cut off."""
    try:
        with Image.open(path, formats=("PNG",)) as image:
            image.load()
            return image.size == (image_size, image_size)
    except Exception:  # decoders meet damage with OSError, SyntaxError, ValueError, struct.error, ...
        return False


def _make(config: RunConfig, count: int, progress: Progress) -> None:
    """Run the ranks until every missing image is there."""
    if lacking := fused_lacking(config):
        config = dataclasses.replace(config, kernels="aten")
    for warning in filter(None, (emulated(config), lacking)):
        progress.done(warning)
    free = training_cores() if config.device == "cpu" else hardware.usable_cores()
    missing, begun = len(config.option("numbers", ())), time.monotonic()
    done = count - missing
    progress(f"{done:,} of {count:,} images; starting")
    try:
        with Group(config, threads=max(1, free // config.node_size), progress=progress) as group:
            begun = time.monotonic()
            for batch in range(1, math.ceil(missing / config.global_batch_size) + 1):
                group.advance(1, SILENCE_SECONDS, "sampling")
                made = min(batch * config.global_batch_size, missing)
                rate = made / (time.monotonic() - begun)
                progress.expect((missing - made) / rate)
                progress(f"{done + made:,} of {count:,} images, {rate:.3g} images/s")
    except GroupFailed as failed:
        advice = "; a smaller --batch-size needs less" if failed.status == "oom" else ""
        error = RunFailed(f"{failed.reason}{advice}; the images that were made stay")
        error.add_note(failed.detail.strip())
        raise error from failed
    progress.done(f"made {missing:,} images, {missing / (time.monotonic() - begun):.3g} images/s")
