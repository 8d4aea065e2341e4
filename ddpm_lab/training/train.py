"""The lab's own workload: one optimizer step of a DDPM (Ho et al. 2020, algorithm 1), with every lever a setting."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterator
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
from ddpm_lab.diffusion.step import (
    Feed,
    LoaderAlone,
    PrecisionWatch,
    adam,
    adam_seen,
    allow_tf32,
    autocast,
    compile_seen,
    descend,
    distributed,
    exchange_seen,
    require,
)
from ddpm_lab.workload import RankContext

PLAIN: dict[str, Any] = {
    **{"precision": "fp32", "compile": "off", "compile_mode": "default"},
    **{"channels_last": False, "implementation": "lab", "kernels": "aten"},
}
"""Settings of a step as torch does it where nothing is said, to which other steps are compared."""


def loader_alone(config: RunConfig, context: RankContext) -> LoaderAlone:
    """The loader without training: how many images per second it could deliver."""
    return LoaderAlone(Feed(config, context))


class Trainer:
    """One rank of a training run.

    Timesteps and noise are drawn outside the network, per global sample, so that precision, compilation, world size and
    loader change nothing of what is learned from.
    """

    def __init__(self, config: RunConfig, context: RankContext, *, start_step: int = 0) -> None:
        require(config)
        self.config, self.context = config, context
        self.device = torch.device(context.device)
        self.share = rank_share(config.global_batch_size, context.rank, context.world_size)
        self.data = Feed(config, context, start_step=start_step)
        self.diffusion = Diffusion(config.diffusion).to(self.device)
        allow_tf32(config.precision == "tf32")
        torch.manual_seed(config.seed)  # the same initial weights on every rank
        self.network = configured_network(config, self.device)
        self.ema = copy.deepcopy(self.network).requires_grad_(False)
        self.parameters = list(self.network.parameters())
        self.weights: list[Tensor] = [*self.parameters]
        self.averages: list[Tensor] = [*self.ema.parameters()]
        self.optimizer = adam(self.parameters, config.optimizer)
        self.scaler = torch.amp.GradScaler(self.device.type) if config.precision == "fp16" else None
        if config.compile == "regional":
            compile_stages(self.network, config.compile_mode)
        self.model: Callable[[Tensor, Tensor], Tensor] = self.network
        self.ddp = distributed(self.network, config, context)
        if self.ddp:
            # A function with annotations as text would be refused: DDP compares them with types.
            hook = None if config.exchange.hook == "none" else lambda _, bucket: self._compressed(bucket)
            context.watch(self.ddp, hook)
            self.model = self.ddp
        if config.compile == "whole":
            self.model = torch.compile(self.model, mode=config.compile_mode)
        self.steps = start_step
        self.losses_read = start_step if config.read_loss else 0
        self.fused_before = kernels.State.uses
        self.ema_seen: str | None = None
        self.warmup_seen: bool | None = None
        self.hook_seen = "none"
        once = partial(forward_once, self.network, config, self.device)
        self.precision = PrecisionWatch(self.network, self.device, eager=config.compile == "off", run=once)

    def batches(self) -> Iterator[Batch]:
        """Endless batches of this rank's share."""
        return iter(self.data.loader)

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
        descend(self.optimizer, self.parameters, self.scaler, self.config.optimizer.clip_norm)
        self.steps += 1
        if self.steps % self.config.optimizer.ema_every == 0:
            mark("ema")
            self.update_ema()
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
        self.hook_seen = hook.__name__.removesuffix("_compress_hook")
        return hook(None, bucket)

    @torch.no_grad()
    def update_ema(self) -> None:
        """Move the averaged weights towards the trained ones: ema <- decay ema + (1 - decay) weights."""
        update = self.steps // self.config.optimizer.ema_every
        decay = self.config.optimizer.decay_at(update)
        if update == 1:  # later ones may have reached the decay that was asked for
            self.warmup_seen = decay < self.config.optimizer.ema_decay
        self.ema_seen = self.config.optimizer.ema
        if self.ema_seen == "foreach":
            torch._foreach_lerp_(self.averages, self.weights, 1 - decay)
            return
        for average, weight in zip(self.averages, self.weights, strict=True):
            average.copy_(average * decay + weight * (1 - decay))

    @torch.no_grad()
    def weights_sha256(self) -> str:
        """Hash of weights and averages: equal on every rank, and between runs that learn the same to the last bit."""
        found = hashlib.sha256()
        for weight in (*self.weights, *self.averages):
            found.update(weight.contiguous().cpu().numpy().tobytes())
        return found.hexdigest()[:16]

    def witness(self) -> dict[str, Any]:
        """What runs, read back from the objects that run."""
        seen: dict[str, Any] = {
            "precision": self.precision.seen(),
            "autocast_scaler": self.scaler is not None and self.scaler.is_enabled(),
            "parameters": sum(p.numel() for p in self.parameters),
            "weights_device": str(self.parameters[0].device),
            "adam": adam_seen(self.optimizer),
            **compile_seen(self.config, self.model),
            **network_seen(self.network),
            **exchange_seen(self.ddp, self.context),
            **self.data.witness(),
        }
        if self.steps:
            seen["kernels"] = "fused" if kernels.State.uses > self.fused_before else "aten"
            seen["read_loss"] = self.losses_read == self.steps
        if self.ema_seen:
            seen["ema"] = self.ema_seen
        if self.warmup_seen is not None:
            seen["ema_warmup"] = self.warmup_seen
        if self.ddp and self.steps:
            seen["exchange_hook"] = self.hook_seen
        return seen

    def close(self) -> None:
        """Stop the loader workers."""
        self.data.loader.close()


ddpm = Trainer
"""The workload, as configurations name it."""
