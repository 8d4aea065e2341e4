"""An all-reduce as a workload: how fast ranks exchange a message."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from ddpm_lab.checks import ConfigError, whole
from ddpm_lab.config import RunConfig, digest
from ddpm_lab.training.limits import Repeated
from ddpm_lab.workload import RankContext


def all_reduce(config: RunConfig, context: RankContext) -> Repeated:
    """A step sums ``message_bytes`` of fp32 over all ranks in equal ``buckets``. Raises ConfigError for bad options."""
    size, count = _options(config)
    buckets = torch.zeros(size // 4, device=context.device).tensor_split(count)
    one = torch.ones(1, device=context.device)
    dist.all_reduce(one)
    names = [torch.zeros(1, dtype=torch.int64, device=context.device) for _ in range(context.world_size)]
    dist.all_gather(names, torch.tensor([host()], device=context.device))

    def once() -> None:
        for bucket in buckets:  # zeros stay zeros, whatever the number of steps
            dist.all_reduce(bucket)

    told = {"message_bytes": sum(b.nbytes for b in buckets), "buckets": len(buckets), "summed_over": float(one)}
    return Repeated(config, context, "all-reduce", once, **told, hosts=len({int(name) for name in names}))


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
