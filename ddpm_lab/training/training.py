"""The trainer with what a long run needs beside its steps: checkpoints, held-out loss, sample grids."""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion.network import AnyUNet, Inference, configured_network
from ddpm_lab.diffusion.sampling import ddim_steps, image_grid
from ddpm_lab.diffusion.step import allow_tf32
from ddpm_lab.training.checkpoint import Checkpoint, CheckpointError, Tensors, empty_network, read, write
from ddpm_lab.training.generation import generate, restore, write_png
from ddpm_lab.training.train import PLAIN, Trainer
from ddpm_lab.workload import RankContext

STRATA = 10
_SEED, _AT_ONCE = 20_061_968, 64


def training(config: RunConfig, context: RankContext) -> Training:
    """The workload of a run that trains for the weights, not for its speed; the option ``checkpoint`` is its start."""
    path = config.option("checkpoint", "")
    return Training(config, context, read(Path(path)) if path else None)


class Training(Trainer):
    """A trainer whose methods its parent calls between steps, on every rank; what one rank can do, rank 0 does."""

    def __init__(self, config: RunConfig, context: RankContext, start: Checkpoint | None = None) -> None:
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
        if self.scaler and start.scaler:
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
        first, second = (
            named([adam[p][moment] if adam else torch.zeros_like(p) for p in self.parameters])
            for moment in ("exp_avg", "exp_avg_sq")
        )
        return Checkpoint(
            config=self.config,
            step=self.steps,
            adam_steps=int(adam[self.parameters[0]]["step"]) if adam else 0,
            weights=named(self.weights),
            averages=named(self.averages),
            first_moments=first,
            second_moments=second,
            scaler=self.scaler.state_dict() if self.scaler else None,
        )

    def save(self, *, path: str) -> str | None:
        """Write a checkpoint on rank 0; returns one sentence if that failed, and then an older one is untouched."""
        return None if self.context.rank else _failure(path, lambda: write(Path(path), self.state()))

    def set_threads(self, *, count: int) -> None:
        """Compute with so many threads from here on: the same mathematics, summed in another order."""
        torch.set_num_threads(count)

    def samples(self, *, path: str, count: int, steps: int) -> str | None:
        """Write a grid of images of the averaged weights by DDIM, on rank 0; returns a sentence if that fails."""
        if self.context.rank:
            return None
        eager = dataclasses.replace(self.config, compile="off", compile_mode="default")
        images = self._drawn(self.ema, eager, range(count), min(steps, self.diffusion.timesteps))
        return _failure(path, lambda: write_png(Path(path), images))

    @torch.no_grad()
    def held_out_loss(self, *, draws: int) -> dict[str, Any] | None:
        """Loss of the averaged weights on held-out images, and of ten ranges of timesteps; None but on rank 0.

        The i-th of n draws has a timestep from the i-th of n equal parts of 0..T - 1, so that the timesteps are
        stratified; images take turns in a fixed random order. Timesteps, noise and images are functions of the data and
        ``draws`` alone, never of the run. The network is evaluated eagerly in fp32, whatever it was trained in.

        Raises:
            ConfigError: nothing is held out of the data.
        """
        if self.context.rank:
            return None
        packed, diffusion = self.data.packed, self.diffusion
        if not (images := len(packed.held_out_indices)):
            raise ConfigError(f"{packed.dest} holds no image out of training: prepare it with a held-out part")
        network, _ = self._plain()
        allow_tf32(False)
        generator = torch.Generator().manual_seed(_SEED)
        order = torch.randperm(images, generator=generator)
        within = torch.rand(draws, generator=generator, dtype=torch.float64)
        t = ((torch.arange(draws, dtype=torch.float64) + within) / draws * diffusion.timesteps).long()
        t = t.clamp_(max=diffusion.timesteps - 1)
        losses: list[Tensor] = []
        for start in range(0, draws, _AT_ONCE):
            part = torch.arange(start, min(start + _AT_ONCE, draws))
            pixels = packed.images[packed.held_out_indices[order[part % images].numpy()]]
            x0 = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(self.device, torch.float32).div_(127.5).sub_(1)
            noise = torch.randn(x0.shape, generator=generator).to(self.device)
            times = t[part].to(self.device)
            prediction = network(diffusion.q_sample(x0, times, noise), times)
            losses.append(diffusion.prediction_loss(prediction, x0, times, noise).double().cpu())
        allow_tf32(self.config.precision == "tf32")
        each, strata = torch.cat(losses), t * STRATA // diffusion.timesteps
        by_time = [float(each[strata == s].mean()) for s in range(STRATA)]
        return {"step": self.steps, "loss": float(each.mean()), "by_time": by_time}

    def draw_png(self, *, count: int, steps: int) -> str | None:
        """The first ``count`` images of the averaged weights in a row, PNG in URL-safe base64; None but on rank 0."""
        if self.context.rank:
            return None
        stream = io.BytesIO()
        row = np.concatenate(_pixels(self._drawn(*self._plain(), range(count), steps)), axis=1)
        Image.fromarray(row).save(stream, format="PNG", optimize=True)
        return base64.urlsafe_b64encode(stream.getvalue()).decode("ascii")

    def draw_pixels(self, *, path: str, count: int, steps: int) -> None:
        """Write the first ``count`` images of the averaged weights to a .npy file, uint8 (N, S, S, 3), on rank 0."""
        if self.context.rank:
            return
        parts = [range(start, min(start + _AT_ONCE, count)) for start in range(0, count, _AT_ONCE)]
        plain = self._plain()
        np.save(path, np.concatenate([_pixels(self._drawn(*plain, part, steps)) for part in parts]))

    def _plain(self) -> tuple[AnyUNet, RunConfig]:
        """The averaged weights in the plain network, and its configuration: no kernel or format judges itself."""
        config = dataclasses.replace(self.config, **PLAIN)
        network = configured_network(config, self.device)
        restore(network, self.averages)
        return network, config

    def _drawn(self, network: AnyUNet, config: RunConfig, numbers: range, steps: int) -> Tensor:
        """Images (N, 3, S, S) of these numbers by DDIM."""
        evaluate = Inference(network, config, self.device)
        images = generate(evaluate, ddim_steps(self.diffusion, steps), numbers, self.context.mark)
        allow_tf32(self.config.precision == "tf32")
        return images.cpu()


def _pixels(images: Tensor) -> npt.NDArray[np.uint8]:
    """Images (N, S, S, 3) of 8 bits."""
    return np.stack([image_grid(image[None]) for image in images])


def _failure(path: str, do: Callable[[], None]) -> str | None:
    """One sentence where what is done cannot be written to ``path``."""
    try:
        do()
    except (CheckpointError, OSError) as error:
        return str(error) if isinstance(error, CheckpointError) else f"cannot write {path}: {error.strerror or error}"
    return None
