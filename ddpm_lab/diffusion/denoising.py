"""The workload of sampling: every step is one step of a sampler, the network's evaluation and the update after it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpm_lab.checks import ConfigError, choice, whole
from ddpm_lab.config import RunConfig
from ddpm_lab.data.draws import rank_share
from ddpm_lab.diffusion.network import Inference, configured_network
from ddpm_lab.diffusion.process import Diffusion
from ddpm_lab.diffusion.reference import ReferenceSampler
from ddpm_lab.diffusion.sampling import SAMPLERS, denoise, sampling_timesteps
from ddpm_lab.diffusion.step import Untrained
from ddpm_lab.diffusion.unet import count_flops, count_parameters
from ddpm_lab.workload import RankContext

DDIM_STEPS = 250
_NOISE = 4  # the purposes 1 to 3 are those of ``data/draws.py``


class Sampling(Untrained):
    """One rank that samples its share of a batch over and over: from noise to images, then from fresh noise.

    The network is freshly built, with the same weights in every implementation: these are also its averaged weights,
    since it has not been trained. There are no data. ``options`` of the configuration: ``sampler``, "ddpm" (all
    timesteps) or "ddim", and ``steps`` of the latter. Implementation "plain" is the reference network in the reference
    sampler. Raises Unsupported for what this machine cannot do, and ConfigError for what is no sampling.
    """

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        self.sampler, count = _options(config)
        self.config, self.context = config, context
        self.device = torch.device(context.device)
        size = config.image_size
        self.shape = (len(rank_share(config.global_batch_size, context.rank, context.world_size)), 3, size, size)
        diffusion = Diffusion(config.diffusion)
        self.times = sampling_timesteps(diffusion.timesteps, count)
        state = np.random.SeedSequence([config.seed, _NOISE, context.rank]).generate_state(1, np.uint64)
        self.generator = torch.Generator(self.device).manual_seed(int(state[0]))
        torch.manual_seed(config.seed)  # the same weights on every rank
        self.evaluate = Inference(configured_network(config, self.device), config, self.device)
        self.walk = SAMPLERS[self.sampler](diffusion, count)
        self.reference = ReferenceSampler(self._predict, diffusion).to(self.device) if self.evaluate.plain else None
        self.steps = self.done = 0
        self.x = torch.empty(0)

    def _advance(self) -> Tensor:
        """The images one step further."""
        if self.reference is None:
            return denoise(self._predict, self.walk[self.done], self.x, generator=self.generator)
        time, following = [*self.times, -1][self.done : self.done + 2]
        if self.sampler == "ddim":
            return self.reference.ddim_sample(self.x, time, following)
        return self.reference.p_sample(self.x, time, self.generator)

    def _predict(self, x: Tensor, t: Tensor) -> Tensor:
        """The network's prediction, a phase of the time budget; what follows it is another."""
        self.context.mark("forward")
        prediction = self.evaluate(x, t)
        self.context.mark("update")
        return prediction

    def step(self, batch: Any) -> Tensor:
        """One denoising step of this rank's images; returns their mean, still on the device."""
        del batch
        if self.done == 0:
            self.context.mark("noise")
            self.x = torch.randn(self.shape, generator=self.generator, device=self.device)
        self.x = self._advance()
        self.done = (self.done + 1) % len(self.times)
        self.steps += 1
        return self.x.mean()

    def witness(self) -> dict[str, Any]:
        """What runs, read back from the objects that run."""
        seen = self.evaluate.witness()
        if not self.steps:
            del seen["kernels"]
        return {
            "parameters": count_parameters(self.evaluate.network),
            "weights_device": str(next(self.evaluate.network.parameters()).device),
            "sampler": self.sampler,
            "sampler_steps": len(self.times),
            "flop_per_image": count_flops(self.config.network, image_size=self.config.image_size)[0],
            "images": self.steps * self.shape[0],
            **seen,
        }


def _options(config: RunConfig) -> tuple[str, int]:
    """The sampler and its number of steps. Raises ConfigError for what it does not know, or what is for training."""
    options = dict(config.options)
    sampler, steps = options.pop("sampler", "ddpm"), options.pop("steps", None)
    choice("options.sampler", sampler, SAMPLERS)
    if options:
        raise ConfigError(f"options has {', '.join(options)}: a sampling step knows sampler and steps")
    if config.accumulation != 1 or config.read_loss:
        raise ConfigError(
            f"accumulation is {config.accumulation} and read_loss {config.read_loss}: sampling has no loss, so leave "
            "both out"
        )
    most = config.diffusion.timesteps
    if sampler == "ddpm" and steps is not None:
        raise ConfigError(f"options.steps is {steps!r} with sampler 'ddpm', which walks all timesteps: use ddim")
    count = most if sampler == "ddpm" else DDIM_STEPS if steps is None else steps
    whole("options.steps", count, 1)
    if count > most:
        raise ConfigError(f"options.steps is {count}: give at most the {most} timesteps")
    return sampler, count


sampling = Sampling
"""The workload, as configurations name it."""
