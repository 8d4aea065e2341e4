"""Work with a known answer: a step of equal pieces, of which one configuration does a few more than another.

A planted slowdown must be work, in proportion: a sleep overshoots by some 90 microseconds, and shrinks under load.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ddpm_lab.config import RunConfig
from ddpm_lab.training.limits import Repeated
from ddpm_lab.workload import RankContext

PIECES = 100
"""Pieces in a step without a planted slowdown; one piece more is 1 % more work."""


def pieces(config: RunConfig, context: RankContext) -> Repeated:
    """The workload that ``ddpm-lab check --instrument`` measures: a step of ``config.option("pieces")`` pieces.

    A piece mixes what a training step mixes: a convolution, a normalisation and element-wise work, forward and
    backward. On a GPU it is larger, so that a step takes milliseconds and not only launches kernels.
    """
    count = int(config.option("pieces", PIECES))
    width, images = (128, 32) if config.device == "cuda" else (8, 1)
    torch.manual_seed(config.seed)
    convolution = nn.Conv2d(width, width, 3, padding=1, device=context.device)
    values = torch.randn(images, width, 16, 16, device=context.device).contiguous(memory_format=torch.channels_last)

    def once() -> None:
        for _ in range(count):
            result = functional.silu(functional.group_norm(convolution(values), 8))
            result.backward(values)  # type: ignore[no-untyped-call]
        convolution.zero_grad(set_to_none=True)

    return Repeated(config, context, "forward", once, pieces=count)
