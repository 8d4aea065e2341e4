"""Workloads that train nothing: an all-reduce, and work with a known answer."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion.step import Untrained
from ddpm_lab.measure.process import host_id
from ddpm_lab.workload import RankContext


class Repeated(Untrained):
    """A step that only calls ``once``; ``does`` says in the witness what that is."""

    def __init__(
        self, config: RunConfig, context: RankContext, mark: str, once: Callable[[], object], **does: Any
    ) -> None:
        self.config, self.context, self.mark, self.once, self.does = config, context, mark, once, does
        self.steps = 0

    def step(self, batch: None) -> float:
        del batch
        self.context.mark(self.mark)
        self.once()
        self.steps += 1
        return 0.0

    def witness(self) -> dict[str, Any]:
        return {"images": self.steps * self.config.rank_batch_size, **self.does}


def all_reduce(config: RunConfig, context: RankContext) -> Repeated:
    """A step sums the option ``message_bytes`` of fp32 over all ranks."""
    message = torch.zeros(config.option("message_bytes", 2**20) // 4, device=context.device)
    one = torch.ones(1, device=context.device)
    dist.all_reduce(one)
    names = [torch.zeros(1, dtype=torch.int64, device=context.device) for _ in range(context.world_size)]
    dist.all_gather(names, torch.tensor([int(host_id(), 16)], device=context.device))
    told = {"message_bytes": message.nbytes, "summed_over": float(one), "hosts": len({int(name) for name in names})}
    # Zeros stay zeros, whatever the number of steps.
    return Repeated(config, context, "all-reduce", lambda: dist.all_reduce(message), **told)


def pieces(config: RunConfig, context: RankContext) -> Repeated:
    """The workload of ``ddpm-lab check --instrument``: a step of ``config.option("pieces")`` equal pieces.

    A planted slowdown is a few pieces more: work in proportion, where a sleep would overshoot by some 90 microseconds
    and shrink under load. A piece mixes what a training step mixes: a convolution, a normalisation and element-wise
    work, forward and backward. On a GPU it is larger, so that a step does not only launch kernels.
    """
    count = int(config.option("pieces", 100))
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
