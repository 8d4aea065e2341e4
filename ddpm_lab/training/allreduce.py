"""An all-reduce as a workload: how fast ranks exchange a message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpm_lab.checks import ConfigError, whole
from ddpm_lab.config import RunConfig, digest
from ddpm_lab.diffusion.step import Untrained
from ddpm_lab.workload import RankContext


class AllReduce(Untrained):
    """A step sums ``message_bytes`` of fp32 over all ranks, in equal ``buckets``.

    These are options of the configuration, by default 1 MiB and one bucket.
    """

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        size, buckets = _options(config)
        self.buckets = torch.zeros(size // 4, device=context.device).tensor_split(buckets)
        self.steps = 0
        one = torch.ones(1, device=context.device)
        dist.all_reduce(one)
        self.summed = float(one)
        names = [torch.zeros(1, dtype=torch.int64, device=context.device) for _ in range(context.world_size)]
        dist.all_gather(names, torch.tensor([host()], device=context.device))
        self.hosts = len({int(name) for name in names})

    def step(self, batch: None) -> float:
        """The exchange; zeros stay zeros, whatever the number of steps."""
        del batch
        self.context.mark("all-reduce")
        for bucket in self.buckets:
            dist.all_reduce(bucket)
        self.steps += 1
        return 0.0

    def witness(self) -> dict[str, Any]:
        """What was exchanged, over how many ranks it was summed, and on how many hosts."""
        return {
            "images": self.steps * self.config.rank_batch_size,
            "message_bytes": sum(b.nbytes for b in self.buckets),
            "buckets": len(self.buckets),
            "summed_over": self.summed,
            "hosts": self.hosts,
        }


def host() -> int:
    """A number for what has a network of its own: equal for processes of one machine and one network namespace."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return int(digest([boot.read_text(), str(network.readlink())]), 16)


def _options(config: RunConfig) -> tuple[int, int]:
    """Bytes and buckets. Raises ConfigError for what cannot be run."""
    options = dict(config.options)
    size, buckets = options.pop("message_bytes", 2**20), options.pop("buckets", 1)
    if options:
        raise ConfigError(f"options has {', '.join(options)}: an all-reduce knows message_bytes and buckets")
    whole("options.message_bytes", size, 4)
    whole("options.buckets", buckets, 1)
    if size % 4 or buckets > size // 4:
        raise ConfigError(
            f"options.message_bytes is {size} in {buckets} buckets: give a multiple of 4 bytes, at least 4 a bucket"
        )
    return size, buckets


all_reduce = AllReduce
"""The workload, as configurations name it."""
