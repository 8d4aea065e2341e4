"""The workload of ``ddpm-lab check --instrument``: work whose amount is known."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion.step import Untrained
from ddpm_lab.workload import RankContext


class Pieces(Untrained):
    """A step of ``config.option("pieces")`` equal pieces.

    A planted slowdown is a few pieces more: work in proportion, where a sleep would overshoot by some 90 microseconds
    and shrink under load. A piece mixes what a training step mixes: a convolution, a normalisation and element-wise
    work, forward and backward. On a GPU it is larger, so that a step does not only launch kernels.
    """

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        self.count, self.steps = int(config.option("pieces", 100)), 0
        width, images = (128, 32) if config.device == "cuda" else (8, 1)
        torch.manual_seed(config.seed)
        self.convolution = nn.Conv2d(width, width, 3, padding=1, device=context.device)
        values = torch.randn(images, width, 16, 16, device=context.device)
        self.values = values.contiguous(memory_format=torch.channels_last)

    def step(self, batch: None) -> float:
        del batch
        self.context.mark("forward")
        for _ in range(self.count):
            result = functional.silu(functional.group_norm(self.convolution(self.values), 8))
            result.backward(self.values)  # type: ignore[no-untyped-call]
        self.convolution.zero_grad(set_to_none=True)
        self.steps += 1
        return 0.0

    def witness(self) -> dict[str, Any]:
        return {"images": self.steps * self.config.rank_batch_size, "pieces": self.count}


pieces = Pieces
"""The workload, as configurations name it."""
