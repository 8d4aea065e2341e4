"""The lab's own workload: one optimizer step of a DDPM (Ho et al. 2020, algorithm 1), with every lever a setting."""

import copy
from typing import Any

import torch
from torch import Tensor

from ddpm_lab.config import RunConfig
from ddpm_lab.data.draws import noise_and_timesteps, rank_share
from ddpm_lab.data.loaders import Batch
from ddpm_lab.diffusion import kernels
from ddpm_lab.diffusion.network import compile_stages, configured_network, network_seen
from ddpm_lab.diffusion.process import Diffusion
from ddpm_lab.diffusion.step import Feed, Step, autocast
from ddpm_lab.workload import RankContext

PLAIN: dict[str, Any] = {
    **{"precision": "fp32", "compile": "off", "compile_mode": "default"},
    **{"channels_last": False, "implementation": "lab", "kernels": "aten"},
}
"""Settings of a step as torch does it where nothing is said, to which other steps are compared."""


class Trainer(Step):
    """One rank of a training run.

    Timesteps and noise are drawn outside the network, per global sample, so that precision, compilation, world size and
    loader change nothing of what is learned from.
    """

    network: Any

    def __init__(self, config: RunConfig, context: RankContext, *, start_step: int = 0) -> None:
        device = torch.device(context.device)
        self.share = rank_share(config.global_batch_size, context.rank, context.world_size)
        self.data = Feed(config, context, start_step=start_step)
        self.diffusion = Diffusion(config.diffusion, device)
        torch.manual_seed(config.seed)  # the same initial weights on every rank
        network = configured_network(config, device)
        self.ema = copy.deepcopy(network).requires_grad_(False)
        if config.compile == "regional":
            compile_stages(network, config.compile_mode)
        # DDP would compare the annotations of a function that has any with its own types.
        hook = None if config.exchange.hook == "none" else lambda _, bucket: self._compressed(bucket)
        super().__init__(config, context, network, hook=hook)
        self.averages: list[Tensor] = [*self.ema.parameters()]
        self.steps = start_step
        self.losses_read = start_step if config.read_loss else 0
        self.fused_before = kernels.State.uses
        self.seen: dict[str, Any] = {}

    def loss(self, batch: Batch, part: slice) -> Tensor:
        mark = self.context.mark
        mark("copy")
        x0 = batch.images[part].to(self.device, non_blocking=True)
        mark("forward")
        noise, t = noise_and_timesteps(
            self.config.seed,
            batch.step,
            self.share.start + part.start,
            self.share.start + part.stop,
            global_batch_size=self.config.global_batch_size,
            shape=x0.shape[1:],
            timesteps=self.diffusion.timesteps,
            device=self.device,
        )
        if self.config.channels_last:
            noise = noise.contiguous(memory_format=torch.channels_last)
        x_t = self.diffusion.q_sample(x0, t, noise)
        with autocast(self.config, self.device):
            prediction = self.model(x_t, t)
        return self.diffusion.prediction_loss(prediction, x0, t, noise).mean()

    def _compressed(self, bucket: Any) -> Any:
        """Exchange a bucket of gradients in two bytes a value; returns its future."""
        # Imported with the first exchange, so that no other rank's start pays for it.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415

        hook = getattr(default_hooks, f"{self.config.exchange.hook}_compress_hook")
        self.seen["exchange_hook"] = hook.__name__.removesuffix("_compress_hook")
        return hook(None, bucket)

    @torch.no_grad()
    def update(self) -> None:
        """Move the averaged weights towards the trained ones: ema <- decay ema + (1 - decay) weights."""
        optimizer = self.config.optimizer
        if self.steps % optimizer.ema_every:
            return
        self.context.mark("ema")
        update = self.steps // optimizer.ema_every
        decay = optimizer.decay_at(update)
        if update == 1:  # later ones may have reached the decay that was asked for
            self.seen["ema_warmup"] = decay < optimizer.ema_decay
        self.seen["ema"] = optimizer.ema
        if optimizer.ema == "foreach":
            torch._foreach_lerp_(self.averages, self.parameters, 1 - decay)
            return
        for average, weight in zip(self.averages, self.parameters, strict=True):
            average.copy_(average * decay + weight * (1 - decay))

    def witness(self) -> dict[str, Any]:
        seen = {**super().witness(), **network_seen(self.network)}
        if self.steps:
            seen["kernels"] = "fused" if kernels.State.uses > self.fused_before else "aten"
            if self.ddp:
                seen["exchange_hook"] = "none"
        return {**seen, **self.seen}


ddpm, loader_alone = Trainer, Feed
"""The workload, and the loader without training, as configurations name them."""
