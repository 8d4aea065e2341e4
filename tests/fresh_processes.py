"""What tests run in processes that are started anew, which import it by this name.

A test module has none of its own there: some packages install a top-level ``tests``, which such a process finds first.
"""

import dataclasses
import os
import sys
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ddpm_lab.config import RunConfig
from ddpm_lab.data.loaders import Batch
from ddpm_lab.diffusion.network import configured_network
from ddpm_lab.training.train import Trainer
from ddpm_lab.workload import RankContext


def context(rank: int = 0, world_size: int = 1, **changes: Any) -> RankContext:
    """A rank on the CPU, unless ``changes`` say otherwise, whose marks nobody hears."""
    if compiler := sys.modules.get("torch._dynamo.utils"):  # a rank's process has compiled nothing before
        compiler.counters.clear()
    usual: dict[str, Any] = {"device": "cpu", "threads": 1, "mark": lambda _: None}
    return RankContext(rank=rank, world_size=world_size, **{**usual, **changes})


class DoublePrecision(Trainer):
    """The same trainer, whose images and weights are in float64."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        def network(config: RunConfig, device: torch.device) -> nn.Module:
            return configured_network(config, device).double()

        with mock.patch("ddpm_lab.training.train.configured_network", network):
            super().__init__(config, context)

    def loss(self, batch: Batch, part: slice) -> Tensor:
        return super().loss(batch._replace(images=batch.images.double()), part)


def gradients(rank: int, world_size: int, config: RunConfig, folder: str, kind: type[Trainer]) -> None:
    """The averaged gradients of one step, written by rank 0."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous{world_size}", rank=rank, world_size=world_size
    )
    trainer = kind(dataclasses.replace(config, world_size=world_size), context(rank, world_size))
    torch.manual_seed(1)  # a new network ends in zeros
    for parameter in trainer.network.parameters():
        nn.init.normal_(parameter, std=0.05)
    seen: list[Tensor] = []
    trainer.optimizer.step = lambda: seen.extend(p.grad.clone() for p in trainer.parameters if p.grad is not None)  # type: ignore[assignment,method-assign,misc]
    loss = trainer.step(next(trainer.batches()))
    torch.distributed.all_reduce(loss)
    if rank == 0:
        flat = torch.cat([g.reshape(-1) for g in seen])
        torch.save({"gradient": flat, "loss": float(loss) / world_size}, f"{folder}/{world_size}.pt")
    # As the lab's own ranks leave: in an orderly exit gloo's threads may be found running, which aborts the process.
    os._exit(0)
