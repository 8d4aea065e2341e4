"""The trainer with what a long run needs beside its steps: the loss on held-out images, and its weights by name."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from ddpm_lab.config import RunConfig
from ddpm_lab.model.held_out_loss import held_out_loss
from ddpm_lab.model.step import allow_tf32
from ddpm_lab.model.train import Trainer
from ddpm_lab.workload import RankContext


def training(config: RunConfig, context: RankContext) -> Training:
    """The workload of a run that trains for the weights, not for its speed."""
    return Training(config, context)


class Training(Trainer):
    """A trainer whose methods its parent calls between steps, on every rank; what one rank can do, rank 0 does."""

    def held_out_loss(self, *, draws: int) -> dict[str, Any] | None:
        """Loss of the averaged weights on held-out images, and of ten ranges of timesteps; None but on rank 0."""
        if self.context.rank:
            return None
        allow_tf32(False)
        loss, by_time = held_out_loss(self.ema, self.data.packed, self.diffusion, self.device, draws=draws)
        allow_tf32(self.config.precision == "tf32")
        return {"step": self.steps, "loss": loss, "by_time": by_time}

    @torch.no_grad()
    def weights_sha256(self) -> str:
        """Hash of the trained weights: equal on every rank, and between runs that learn the same to the last bit."""
        found = hashlib.sha256()
        for weight in self.parameters:
            found.update(weight.contiguous().cpu().numpy().tobytes())
        return found.hexdigest()[:16]
