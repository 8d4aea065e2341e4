"""One optimizer step of anybody's network and loss: number format, compilation, ranks, memory format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddpm_lab.config import RunConfig
from ddpm_lab.model.step import (
    PrecisionWatch,
    allow_tf32,
    autocast,
    channels_last_seen,
    compile_counters,
    descend,
    distributed,
    exchange_seen,
    inductor_seen,
    require,
)
from ddpm_lab.workload import RankContext

Loss = Callable[[Any, Any], Tensor]


class LossStep:
    """Trains ``network`` with ``loss(model, batch)``, or with ``whole(model, batch)``, which does all of a step itself.

    ``whole`` returns the loss and leaves the number format to itself. ``update`` is called after each step, as for an
    average of the weights. Raises Unsupported for what this machine cannot do.
    """

    def __init__(
        self,
        config: RunConfig,
        context: RankContext,
        network: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        *,
        whole: Loss | None = None,
        clip_norm: float | None = None,
        update: Callable[[], None] | None = None,
    ) -> None:
        require(config)
        allow_tf32(config.precision == "tf32")
        self.config, self.context, self.mark = config, context, context.mark
        self.device = torch.device(context.device)
        self.network = network.to(memory_format=torch.channels_last) if config.channels_last else network
        self.parameters = [p for p in self.network.parameters() if p.requires_grad]
        self.loss, self.whole, self.update = loss, whole, update
        self.optimizer, self.clip_norm = optimizer, clip_norm
        self.scaler = torch.amp.GradScaler(self.device.type) if config.precision == "fp16" else None
        self.model: Any = self.network
        self.ddp = distributed(self.network, config, context)
        if self.ddp:
            context.watch(self.ddp)
            self.model = self.ddp
        if config.compile == "whole":
            self.model = torch.compile(self.model, mode=config.compile_mode)
        self.batch: Any = None
        self.steps = self.losses_read = 0
        self.precision = PrecisionWatch(self.network, self.device, eager=False, run=self._forward_once)

    def step(self, batch: Any) -> Tensor:
        """One step with a batch on the device; returns the loss, still there."""
        if self.config.compile != "off":
            self.batch = batch  # for the witness, which cannot look into what is compiled
        loss = self._whole(batch) if self.whole else self._backward(batch)
        if self.update:
            self.mark("ema")
            self.update()
        self.steps += 1
        return loss.detach()

    def _backward(self, batch: Any) -> Tensor:
        if not self.steps and self.config.compile == "off":
            self.precision.watch()  # and not before: a held-out loss runs the network in another format
        self.mark("forward")
        with autocast(self.config, self.device):
            loss = self.loss(self.model, batch)
        self.mark("backward")
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
        if self.config.read_loss:
            loss.item()
            self.losses_read += 1
        self.mark("optimizer")
        descend(self.optimizer, self.parameters, self.scaler, self.clip_norm)
        return loss

    def _whole(self, batch: Any) -> Tensor:
        assert self.whole
        self.mark("whole step")
        return self.whole(self.model, batch)

    def _forward_once(self) -> None:
        with autocast(self.config, self.device):
            (self.whole or self.loss)(self.network, self.batch)

    def witness(self) -> dict[str, Any]:
        """What runs, read back from the objects that run; of a whole step the number format is its own."""
        counters = compile_counters(self.config)
        seen: dict[str, Any] = {
            "compile": "whole" if counters.get("compiled_frames", 0) else "off",
            "parameters": sum(p.numel() for p in self.parameters),
            **exchange_seen(self.ddp, self.context),
            **counters,
            **(inductor_seen(self.model) if counters.get("compiled_frames", 0) else {}),
        }
        # The wrapper exchanges nothing where a loss goes past it. A static graph is first timed in the second step.
        if self.ddp and self.steps > 1 and not any(self.ddp.reducer.get_backward_stats()):
            seen["exchange_enabled"] = False
        if self.precision.layers and self.steps and not self.whole:
            seen["precision"] = self.precision.seen()
            seen["autocast_scaler"] = self.scaler is not None and self.scaler.is_enabled()
        if (channels_last := channels_last_seen(self.network)) is not None:
            seen["channels_last"] = channels_last
        if self.steps:
            seen["read_loss"] = self.losses_read == self.steps
        return seen
