"""A long run on its ranks: the trainer with checkpoints, held-out loss and sample grids, and images of a checkpoint.

Which image it is decides its noise, never the batch or the rank that makes it.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from ddpm_lab.diffusion.reference import restore
from ddpm_lab.diffusion.sampling import denoise, image_grid, walk
from ddpm_lab.diffusion.step import Step, Untrained, allow_tf32
from ddpm_lab.training.checkpoint import SECTIONS, Checkpoint, CheckpointError, Tensors, empty_network, read, write
from ddpm_lab.training.train import PLAIN, Trainer
from ddpm_lab.workload import RankContext

_SEED, _AT_ONCE = 20_061_968, 64
_NOISE = 5  # the purposes 1 to 3 are those of ``data/draws.py``


def generate(
    evaluate: Inference, sampler: str, steps: int, numbers: Sequence[int], mark: Callable[[str], None]
) -> Tensor:
    """The images (N, 3, S, S) in [-1, 1] of these numbers, by the seed, size and process of ``evaluate.config``."""
    size, device = evaluate.config.image_size, evaluate.device
    # The noise of an image comes from its number and the seed alone; on the CPU, whatever device samples. A generator
    # of torch takes 32 bits of a seed: of a hundred thousand images two would be the same.
    generators = [np.random.default_rng([evaluate.config.seed, _NOISE, number]) for number in numbers]

    def noise() -> Tensor:
        drawn = [generator.standard_normal((3, size, size), dtype=np.float32) for generator in generators]
        return torch.from_numpy(np.stack(drawn)).to(device)

    x, diffusion = noise(), Diffusion(evaluate.config.diffusion, device)
    for step in walk(diffusion.timesteps, steps):
        mark("denoising")
        x = denoise(evaluate, diffusion, sampler, x, step, noise=noise)
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
def held_out_loss(step: Step, network: Callable[[Tensor, Tensor], Tensor], draws: int) -> dict[str, Any]:
    """Loss of ``network`` on held-out images, which holds the averaged weights of ``step`` in fp32.

    The i-th of n draws has a timestep from the i-th of n equal parts of 0..T - 1, so that the timesteps are stratified;
    images take turns in a fixed random order. Timesteps, noise and images are functions of the data and ``draws``
    alone, never of the run. The network is evaluated eagerly in fp32, whatever it was trained in.
    """
    packed, device = step.data.packed, step.device
    diffusion = Diffusion(step.config.diffusion, device)
    allow_tf32(False)
    generator = torch.Generator().manual_seed(_SEED)
    order = torch.randperm(len(packed.held_out_indices), generator=generator)
    within = torch.rand(draws, generator=generator, dtype=torch.float64)
    t = ((torch.arange(draws, dtype=torch.float64) + within) / draws * diffusion.timesteps).long()
    t = t.clamp_(max=diffusion.timesteps - 1)
    losses: list[Tensor] = []
    for start in range(0, draws, _AT_ONCE):
        part = torch.arange(start, min(start + _AT_ONCE, draws))
        pixels = packed.images[packed.held_out_indices[order[part % len(order)].numpy()]]
        x0 = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(device, torch.float32).div_(127.5).sub_(1)
        noise, times = torch.randn(x0.shape, generator=generator).to(device), t[part].to(device)
        for first in range(0, len(part), at_once := _at_once(step.config)):
            step.context.mark("held-out loss")
            few = slice(first, first + at_once)
            prediction = network(diffusion.q_sample(x0[few], times[few], noise[few]), times[few])
            losses.append(diffusion.prediction_loss(prediction, x0[few], times[few], noise[few]).double().cpu())
    allow_tf32(step.config.precision == "tf32")
    return {"step": step.steps, "loss": float(torch.cat(losses).mean())}


def _at_once(config: RunConfig) -> int:
    """Images that are evaluated at once: they fit into memory where those of a step do, or are small."""
    step, small = config.rank_batch_size // config.accumulation, _AT_ONCE * 32**2
    return min(_AT_ONCE, max(1, step, small // config.image_size**2))


class Training(Trainer):
    """A trainer for the weights, not for its speed; the option ``checkpoint`` is its start.

    Its parent calls its methods between steps, on every rank; what one rank can do, rank 0 does.
    """

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        path = config.option("checkpoint", "")
        start = read(Path(path)) if path else None
        super().__init__(config, context, start_step=start.step if start else 0)
        if start:
            self._restore(start)

    def _restore(self, start: Checkpoint) -> None:
        restore(self.network, start.weights.values())
        restore(self.ema, start.averages.values())
        moments = zip(self.parameters, start.first_moments.values(), start.second_moments.values(), strict=True)
        state: dict[int, dict[str, Tensor]] = {}
        for index, (parameter, *saved) in enumerate(moments):
            # In the memory format of the weight, as Adam itself makes them: one kernel goes through all in step.
            first, second = (torch.empty_like(parameter.detach()).copy_(m.reshape(parameter.shape)) for m in saved)
            state[index] = {"step": torch.tensor(float(start.adam_steps)), "exp_avg": first, "exp_avg_sq": second}
        if start.adam_steps:
            self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        if start.scaler:
            self.scaler.load_state_dict(start.scaler)

    @torch.no_grad()
    def state(self) -> Checkpoint:
        """The state of training now, copied to the CPU."""
        shapes = {name: p.shape for name, p in empty_network(self.config).named_parameters()}

        def named(tensors: list[Tensor]) -> Tensors:
            return {
                name: tensor.detach().cpu().reshape(shape).clone(memory_format=torch.contiguous_format)
                for (name, shape), tensor in zip(shapes.items(), tensors, strict=True)
            }

        adam = self.optimizer.state  # empty before the first step that was not left out
        moments = (
            [adam[p][moment] if adam else torch.zeros_like(p) for p in self.parameters]
            for moment in ("exp_avg", "exp_avg_sq")
        )
        tensors: Iterable[list[Tensor]] = (self.parameters, self.averages, *moments)
        return Checkpoint(
            config=self.config,
            step=self.steps,
            adam_steps=int(adam[self.parameters[0]]["step"]) if adam else 0,
            scaler=self.scaler.state_dict() or None,
            **dict(zip(SECTIONS, map(named, tensors), strict=True)),
        )

    def save(self, *, path: str) -> str | None:
        """Write a checkpoint on rank 0; returns one sentence if that failed, and then an older one is untouched."""
        return None if self.context.rank else _failure(path, lambda: write(Path(path), self.state()))

    def samples(self, *, path: str, count: int, steps: int) -> str | None:
        """Write a grid of images of the averaged weights by DDIM, on rank 0; returns a sentence if that fails."""
        if self.context.rank:
            return None
        eager = dataclasses.replace(self.config, compile="off", compile_mode="default")
        images = self._drawn(self.ema, eager, range(count), min(steps, self.diffusion.timesteps))
        return _failure(path, lambda: write_png(Path(path), images))

    def held_out_loss(self, *, draws: int) -> dict[str, Any] | None:
        """As the function of this name; None but on rank 0."""
        return None if self.context.rank else held_out_loss(self, self._plain()[0], draws)

    def draw_pixels(self, *, path: str, count: int, steps: int) -> None:
        """Write the first ``count`` images of the averaged weights to a .npy file, uint8 (N, S, S, 3), on rank 0."""
        if self.context.rank:
            return
        plain, numbers = self._plain(), range(count)
        parts = (self._drawn(*plain, numbers[i : i + _AT_ONCE], steps) for i in range(0, count, _AT_ONCE))
        np.save(path, np.stack([image_grid(image[None]) for part in parts for image in part]))

    def _plain(self) -> tuple[AnyUNet, RunConfig]:
        """The averaged weights in the plain network, and its configuration: no kernel or format judges itself."""
        config = dataclasses.replace(self.config, **PLAIN)
        network = configured_network(config, self.device)
        restore(network, self.averages)
        return network, config

    def _drawn(self, network: AnyUNet, config: RunConfig, numbers: range, steps: int) -> Tensor:
        """Images (N, 3, S, S) of these numbers by DDIM."""
        evaluate, count = Inference(network, config, self.device), _at_once(self.config)
        parts = [numbers[i : i + count] for i in range(0, len(numbers), count)]
        images = torch.cat([generate(evaluate, "ddim", steps, part, self.context.mark).cpu() for part in parts])
        allow_tf32(self.config.precision == "tf32")
        return images


def _failure(path: str, do: Callable[[], None]) -> str | None:
    """One sentence where what is done cannot be written to ``path``."""
    try:
        do()
    except (CheckpointError, OSError) as error:
        return str(error) if isinstance(error, CheckpointError) else f"cannot write {path}: {error.strerror or error}"
    return None


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
        self.sampler, self.count = config.option("sampler", "ddim"), config.option("steps", 250)
        self.share = rank_share(config.global_batch_size, context.rank, context.world_size)
        self.numbers: list[int] = list(config.option("numbers", ()))
        self.folder = Path(config.option("folder", ""))

    def batches(self) -> Iterator[list[int]]:
        """The numbers of this rank's images, batch by batch; at the end there may be none."""
        for start in range(0, len(self.numbers), self.config.global_batch_size):
            yield self.numbers[start + self.share.start : start + self.share.stop]

    def step(self, batch: list[int]) -> float:
        """Make and write the images of these numbers; nothing is trained, so there is no loss."""
        if not batch:
            return 0.0
        images = generate(self.evaluate, self.sampler, self.count, batch, self.context.mark).cpu()
        self.context.mark("writing")
        for number, image in zip(batch, images, strict=True):
            write_png(self.folder / f"{number:06d}.png", image[None])
        return 0.0


training = Training
"""The workload, as configurations name it."""
