"""An all-reduce as a workload: how fast ranks exchange a message, alone or after compute of known length."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddpm_lab.checks import ConfigError, number, whole
from ddpm_lab.config import RunConfig, digest
from ddpm_lab.workload import RankContext


class AllReduce:
    """A step waits ``compute_seconds`` and then sums ``message_bytes`` of fp32 over all ranks, in equal ``buckets``.

    These are options of the configuration (by default no wait, 1 MiB, one bucket). The wait sleeps, so that more ranks
    than cores do not fight for them: a compute of known length, for predictions to be held against. The exchange
    begins when the wait ends; nothing overlaps.
    """

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        self.compute_seconds, size, buckets = _options(config)
        self.buckets = torch.zeros(size // 4, device=context.device).tensor_split(buckets)
        self.steps = 0
        self.waited = 0.0
        one = torch.ones(1, device=context.device)
        dist.all_reduce(one)
        self.summed = float(one)
        names = [torch.zeros(1, dtype=torch.int64, device=context.device) for _ in range(context.world_size)]
        dist.all_gather(names, torch.tensor([host()], device=context.device))
        self.hosts = len({int(name) for name in names})

    def batches(self) -> Iterator[None]:
        """There are no data."""
        return itertools.repeat(None)

    def step(self, batch: None) -> float:
        """The wait and the exchange; zeros stay zeros, whatever the number of steps."""
        del batch
        if self.compute_seconds:
            self.context.mark("wait")
            begun = time.perf_counter()
            time.sleep(self.compute_seconds)
            self.waited += time.perf_counter() - begun
        self.context.mark("all-reduce")
        for bucket in self.buckets:
            dist.all_reduce(bucket)
        self.steps += 1
        return 0.0

    def witness(self) -> dict[str, Any]:
        """What was exchanged, over how many ranks it was summed, how long the wait was, and on how many hosts."""
        return {
            "images": self.steps * self.config.rank_batch_size,
            "message_bytes": sum(b.nbytes for b in self.buckets),
            "buckets": len(self.buckets),
            "summed_over": self.summed,
            "waited_seconds": self.waited / self.steps if self.steps else math.nan,
            "hosts": self.hosts,
        }

    def close(self) -> None:
        """Nothing was started."""


def host() -> int:
    """A number for what has a network of its own: equal for processes of one machine and one network namespace."""
    boot, network = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
    return int(digest([boot.read_text(), str(network.readlink())]), 16)


def all_reduce(config: RunConfig, context: RankContext) -> AllReduce:
    """The workload that measures links, and steps of known compute."""
    return AllReduce(config, context)


def _options(config: RunConfig) -> tuple[float, int, int]:
    """Seconds of compute, bytes and buckets. Raises ConfigError for what cannot be run."""
    options = dict(config.options)
    seconds, size, buckets = (
        options.pop(name, usual) for name, usual in (("compute_seconds", 0.0), ("message_bytes", 2**20), ("buckets", 1))
    )
    if options:
        raise ConfigError(
            f"options has {', '.join(options)}: an all-reduce knows message_bytes, buckets and compute_seconds"
        )
    whole("options.message_bytes", size, 4)
    whole("options.buckets", buckets, 1)
    if size % 4 or buckets > size // 4:
        raise ConfigError(
            f"options.message_bytes is {size} in {buckets} buckets: give a multiple of 4 bytes, at least 4 a bucket"
        )
    if not (number(seconds) and 0 <= seconds < 60):
        raise ConfigError(f"options.compute_seconds is {seconds!r}: give seconds from 0 to 60")
    if seconds and config.device == "cuda":
        raise ConfigError(f"options.compute_seconds is {seconds}: a timed wait is for CPU ranks; leave it out on a GPU")
    return float(seconds), size, buckets
