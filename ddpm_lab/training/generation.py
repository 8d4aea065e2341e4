"""Images from a trained network: which image it is decides its noise, never the batch or the rank that makes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ddpm_lab.config import RunConfig
from ddpm_lab.data.draws import rank_share
from ddpm_lab.diffusion.network import AnyUNet, Inference, configured_network
from ddpm_lab.diffusion.process import Diffusion
from ddpm_lab.diffusion.sampling import SAMPLERS, Step, denoise, image_grid
from ddpm_lab.diffusion.step import Untrained
from ddpm_lab.training.checkpoint import read
from ddpm_lab.workload import RankContext

_NOISE = 5  # the purposes 1 to 4 are those of ``data/draws.py`` and ``denoising.py``


def image_generator(seed: int, number: int) -> torch.Generator:
    """The generator of an image's noise, from its number and the seed alone; on the CPU, whatever device samples."""
    state = np.random.SeedSequence([seed, _NOISE, number]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def generate(evaluate: Inference, steps: Sequence[Step], numbers: Sequence[int], mark: Callable[[str], None]) -> Tensor:
    """The images (N, 3, S, S) in [-1, 1] of these numbers, by the seed and size of ``evaluate.config``."""
    size, device = evaluate.config.image_size, evaluate.device
    generators = [image_generator(evaluate.config.seed, number) for number in numbers]
    unused = torch.Generator(device)

    def noise() -> Tensor:
        return torch.stack([torch.randn(3, size, size, generator=generator) for generator in generators]).to(device)

    x = noise()
    for step in steps:
        mark("denoising")
        x = denoise(evaluate, replace(step, of_noise=0.0), x, generator=unused)
        if step.of_noise > 0:
            x.add_(noise(), alpha=step.of_noise)
    return x.clamp_(-1, 1)


def write_png(path: Path, images: Tensor) -> None:
    """Write images (N, 3, H, W) in [-1, 1] as one PNG, in a grid if N is above 1; the file is there whole or not."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # two may write into one folder
    try:
        Image.fromarray(image_grid(images)).save(partial, format="PNG")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def write_grid(paths: Sequence[Path], path: Path) -> None:
    """Tile image files of one size into one PNG."""
    pixels = torch.from_numpy(np.stack([np.asarray(Image.open(image).convert("RGB")) for image in paths]))
    write_png(path, pixels.permute(0, 3, 1, 2).float().div_(127.5).sub_(1))


@torch.no_grad()
def restore(network: AnyUNet, tensors: Iterable[Tensor]) -> None:
    """Copy tensors in the order of the lab's own network into a network of either kind."""
    for mine, saved in zip(network.parameters(), tensors, strict=True):
        mine.copy_(saved.reshape(mine.shape))


class Generation(Untrained):
    """One rank that makes its share of the images named by ``numbers``, and writes each as a PNG of its number.

    A step is one batch of every rank. ``options``: checkpoint, weights ("ema" or "trained"), sampler, steps, folder,
    numbers. Raises CheckpointError for a checkpoint that cannot be used.
    """

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        checkpoint = read(Path(config.option("checkpoint", "")))
        network = configured_network(config, torch.device(context.device))
        tensors = checkpoint.averages if config.option("weights", "ema") == "ema" else checkpoint.weights
        restore(network, tensors.values())
        self.evaluate = Inference(network, config, context.device)
        walk = SAMPLERS[config.option("sampler", "ddim")]
        self.sampler = walk(Diffusion(config.diffusion), config.option("steps", 250))
        self.share = rank_share(config.global_batch_size, context.rank, context.world_size)
        self.numbers: list[int] = list(config.option("numbers", ()))
        self.folder = Path(config.option("folder", ""))
        self.images = 0

    def batches(self) -> Iterator[list[int]]:
        """The numbers of this rank's images, batch by batch; at the end there may be none."""
        for start in range(0, len(self.numbers), self.config.global_batch_size):
            yield self.numbers[start + self.share.start : start + self.share.stop]

    def step(self, batch: list[int]) -> float:
        """Make and write the images of these numbers; nothing is trained, so there is no loss."""
        if not batch:
            return 0.0
        images = generate(self.evaluate, self.sampler, batch, self.context.mark).cpu()
        self.context.mark("writing")
        for number, image in zip(batch, images, strict=True):
            write_png(self.folder / f"{number:06d}.png", image[None])
        self.images += len(batch)
        return 0.0

    def witness(self) -> dict[str, Any]:
        """How many images were made, and how the network ran that made them."""
        return {"images": self.images, **(self.evaluate.witness() if self.images else {})}


generation = Generation
"""The workload, as configurations name it."""
