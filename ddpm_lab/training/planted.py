"""Work with a known answer: a step of equal pieces, of which one configuration does a few more than another.

A planted slowdown must be work, in proportion: a sleep overshoots by some 90 microseconds, and shrinks under load.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from ddpm_lab.config import RunConfig
from ddpm_lab.workload import RankContext

PIECES = 100
"""Pieces in a step without a planted slowdown; one piece more is 1 % more work."""


class Pieces:
    """A step of ``config.option("pieces")`` equal pieces, each the forward and backward pass of a small convolution.

    A piece mixes what a training step mixes: a convolution, a normalisation and element-wise work, forward and
    backward. On a GPU it is larger, so that a step takes milliseconds and not only launches kernels.
    """

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        self.pieces = int(config.option("pieces", PIECES))
        self.mark = context.mark
        self.config, self.steps = config, 0
        width, images = (128, 32) if config.device == "cuda" else (8, 1)
        torch.manual_seed(config.seed)
        self.convolution = nn.Conv2d(width, width, 3, padding=1, device=context.device)
        values = torch.randn(images, width, 16, 16, device=context.device)
        self.values = values.contiguous(memory_format=torch.channels_last)

    def batches(self) -> Iterator[Any]:
        """There are no data."""
        return itertools.repeat(None)

    def step(self, batch: Any) -> float:
        """All pieces of one step."""
        del batch
        self.mark("forward")
        for _ in range(self.pieces):
            result = functional.silu(functional.group_norm(self.convolution(self.values), 8))
            result.backward(self.values)  # type: ignore[no-untyped-call]
        self.convolution.zero_grad(set_to_none=True)
        self.steps += 1
        return 0.0

    def witness(self) -> dict[str, Any]:
        """The pieces of a step, read back from what runs."""
        return {"pieces": self.pieces, "images": self.steps * self.config.rank_batch_size}

    def close(self) -> None:
        """Nothing was started."""


def pieces(config: RunConfig, context: RankContext) -> Pieces:
    """The workload that ``ddpm-lab check --instrument`` measures."""
    return Pieces(config, context)
