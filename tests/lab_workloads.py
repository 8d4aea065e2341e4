"""Workloads with a known answer: what they cost, and how they fail, is planted by their options."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from ddpm_lab.config import RunConfig
from ddpm_lab.workload import RankContext, Unsupported


class Busy:
    """A step is ``micro_steps`` equal pieces of work; a fault is planted in one rank at one step."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        self.micro_steps = int(config.option("micro_steps", 100))
        self.values = torch.ones(64, 64)
        self.steps = 0
        self.fault("build")

    def fault(self, place: str) -> None:
        option = self.config.option
        if (
            option("fault_place", "forward") != place
            or self.context.rank != option("fault_rank", 0)
            or self.steps != option("fault_step", 0)
        ):
            return
        match option("fault", ""):
            case "raise":
                raise RuntimeError("planted fault")
            case "hang":
                time.sleep(3600)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "oom":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            case "unsupported":
                raise Unsupported("no C++ compiler: install g++")
            case "exit":
                os._exit(3)

    def batches(self) -> Iterator[Any]:
        yield from itertools.count()

    def step(self, batch: Any) -> float:
        del batch
        self.context.mark("forward")
        self.fault("forward")
        for _ in range(self.micro_steps):
            self.values @ self.values
        if self.context.world_size > 1:
            self.context.mark("all-reduce")
            dist.all_reduce(self.values)
            self.values.fill_(1.0)
        self.steps += 1
        return float("nan") if self.config.option("fault", "") == "nan" else 1.0

    def witness(self) -> dict[str, Any]:
        said = {"images": self.steps * self.config.rank_batch_size, "loader_workers": self.config.loader_workers}
        return {**said, **dict(self.config.option("says", ()))}

    def close(self) -> None:
        """Nothing was started."""


def busy(config: RunConfig, context: RankContext) -> Busy:
    """Make the busy workload."""
    return Busy(config, context)


class Compiling(Busy):
    """Runs a slow child process in its step, as a compiler does."""

    def step(self, batch: Any) -> float:
        subprocess.run(["sleep", "3600"], check=True)
        return super().step(batch)


def compiling(config: RunConfig, context: RankContext) -> Compiling:
    """Make the workload that hangs in a child process."""
    return Compiling(config, context)
