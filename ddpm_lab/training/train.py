"""The lab's own workload: one optimizer step of a DDPM (Ho et al. 2020, algorithm 1), with every lever a setting."""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddpm_lab.config import RunConfig
from ddpm_lab.data.draws import noise_and_timesteps, rank_share
from ddpm_lab.data.loaders import Batch
from ddpm_lab.diffusion import kernels
from ddpm_lab.diffusion.network import compile_stages, configured_network, forward_once, network_seen
from ddpm_lab.diffusion.process import Diffusion
from ddpm_lab.diffusion.step import Feed, LoaderAlone, Step, adam, adam_seen, autocast, require
from ddpm_lab.workload import RankContext

PLAIN: dict[str, Any] = {
    **{"precision": "fp32", "compile": "off", "compile_mode": "default"},
    **{"channels_last": False, "implementation": "lab", "kernels": "aten"},
}
"""Settings of a step as torch does it where nothing is said, to which other steps are compared."""


def loader_alone(config: RunConfig, context: RankContext) -> LoaderAlone:
    """The loader without training: how many images per second it could deliver."""
    return LoaderAlone(Feed(config, context))


class Trainer(Step):
    """One rank of a training run.

    Timesteps and noise are drawn outside the network, per global sample, so that precision, compilation, world size and
    loader change nothing of what is learned from.
    """

    network: Any
    optimizer: torch.optim.Adam

    def __init__(self, config: RunConfig, context: RankContext, *, start_step: int = 0) -> None:
        require(config)
        device = torch.device(context.device)
        self.share = rank_share(config.global_batch_size, context.rank, context.world_size)
        self.data = Feed(config, context, start_step=start_step)
        self.diffusion = Diffusion(config.diffusion).to(device)
        torch.manual_seed(config.seed)  # the same initial weights on every rank
        network = configured_network(config, device)
        self.ema = copy.deepcopy(network).requires_grad_(False)
        if config.compile == "regional":
            compile_stages(network, config.compile_mode)
        # A function with annotations as text would be refused: DDP compares them with types.
        hook = None if config.exchange.hook == "none" else lambda _, bucket: self._compressed(bucket)
        how: dict[str, Any] = {"watch": config.compile == "off", "hook": hook}
        run = partial(forward_once, network, config, device)
        super().__init__(config, context, network, adam(network.parameters(), config.optimizer), run, **how)
        self.weights: list[Tensor] = [*self.parameters]
        self.averages: list[Tensor] = [*self.ema.parameters()]
        self.steps = start_step
        self.losses_read = start_step if config.read_loss else 0
        self.fused_before = kernels.State.uses
        self.seen: dict[str, Any] = {}

    def loss(self, batch: Batch, part: slice) -> Tensor:
        """Mean loss of the images ``part`` of this rank's share, on the device."""
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

    def step(self, batch: Batch) -> Tensor:
        """One optimizer step; returns this rank's mean loss, still on the device."""
        self.data.note(batch)
        mark, parts = self.context.mark, self.config.accumulation
        size = len(batch.images) // parts
        total: Tensor | None = None
        for i in range(parts):
            # Only the last micro-batch exchanges gradients: they add up locally until then.
            quiet = self.ddp.no_sync() if self.ddp and i < parts - 1 else contextlib.nullcontext()
            with quiet:
                loss = self.loss(batch, slice(i * size, (i + 1) * size)) / parts
                mark("backward")
                scaled = loss if self.scaler is None else self.scaler.scale(loss)
                scaled.backward()  # type: ignore[no-untyped-call]
            total = loss.detach() if total is None else total + loss.detach()
        mark("optimizer")
        self.descend()
        self.steps += 1
        if self.steps % self.config.optimizer.ema_every == 0:
            mark("ema")
            self._average()
        assert total is not None
        if self.config.read_loss:
            total.item()
            self.losses_read += 1
        return total

    def _compressed(self, bucket: Any) -> Any:
        """Exchange a bucket of gradients in two bytes a value; returns its future."""
        # Imported with the first exchange, so that no other rank's start pays for it.
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: PLC0415

        hook = getattr(default_hooks, f"{self.config.exchange.hook}_compress_hook")
        self.seen["exchange_hook"] = hook.__name__.removesuffix("_compress_hook")
        return hook(None, bucket)

    @torch.no_grad()
    def _average(self) -> None:
        """Move the averaged weights towards the trained ones: ema <- decay ema + (1 - decay) weights."""
        optimizer = self.config.optimizer
        update = self.steps // optimizer.ema_every
        decay = optimizer.decay_at(update)
        if update == 1:  # later ones may have reached the decay that was asked for
            self.seen["ema_warmup"] = decay < optimizer.ema_decay
        self.seen["ema"] = optimizer.ema
        if optimizer.ema == "foreach":
            torch._foreach_lerp_(self.averages, self.weights, 1 - decay)
            return
        for average, weight in zip(self.averages, self.weights, strict=True):
            average.copy_(average * decay + weight * (1 - decay))

    def witness(self) -> dict[str, Any]:
        """What runs, read back from the objects that run."""
        seen = {
            "precision": self.precision.seen(),
            "autocast_scaler": self.scaler is not None and self.scaler.is_enabled(),
            "weights_device": str(self.parameters[0].device),
            "adam": adam_seen(self.optimizer),
            **super().witness(),
            **network_seen(self.network),
            **self.data.witness(),
        }
        if self.steps:
            seen["kernels"] = "fused" if kernels.State.uses > self.fused_before else "aten"
            if self.ddp:
                seen["exchange_hook"] = "none"
        return {**seen, **self.seen}


ddpm = Trainer
"""The workload, as configurations name it."""
