"""Workloads with a known answer: what they cost, and how they fail, is planted by their options."""

import hashlib
import itertools
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.utils.data import DataLoader

from ddpm_lab.config import RunConfig
from ddpm_lab.workload import RankContext, Unsupported


class Planted:
    """Nothing is started, and nothing is told."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        self.config, self.context, self.option = config, context, config.option

    def batches(self) -> Iterator[Any]:
        yield from itertools.count()

    def witness(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """Nothing was started."""


def leave_service(file: str) -> None:
    """Start a process of another session whose parent ends at once; its number is in the file."""
    if not (child := os.fork()):
        os.setsid()
        if service := os.fork():
            Path(file).write_text(str(service))
        else:
            time.sleep(3600)
        os._exit(0)
    os.waitpid(child, 0)


def looping() -> Iterator[None]:
    """A loop of a user's, around a loader of its own."""
    loader: DataLoader[int] = DataLoader(range(1 << 20), batch_size=4, num_workers=2, prefetch_factor=3)  # type: ignore[arg-type]
    while True:
        for _ in loader:
            yield


def pooling() -> Iterator[None]:
    """A loop that has had torch's compiler start its helper processes."""
    from torch._inductor.async_compile import AsyncCompile  # noqa: PLC0415 - it takes seconds

    AsyncCompile.process_pool()
    while True:
        yield


def hum() -> None:
    """Compute for ever, and let others have the interpreter meanwhile."""
    data = bytes(1 << 22)
    while True:
        hashlib.sha256(data)


class Busy(Planted):
    """A step is ``micro_steps`` equal pieces of work; a fault is planted in one rank at one step."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.values, self.steps = torch.ones(64, 64), 0
        self.lock = multiprocessing.RLock() if self.option("lock", False) else None
        if service := self.option("service", ""):
            leave_service(service)
        if self.option("stops_clocks", False):
            time.perf_counter = time.monotonic = lambda: 0.0
        if self.option("hums", False):
            threading.Thread(target=hum, daemon=True).start()
        self.fault("build")

    def fault(self, place: str) -> None:
        planted = [
            self.option(f"fault_{name}", usual) for name, usual in (("place", "forward"), ("rank", 0), ("step", 0))
        ]
        if planted != [place, self.context.rank, self.steps]:
            return
        match self.option("fault", ""):
            case "raise":
                raise RuntimeError("planted fault")
            case "end of file":
                raise EOFError("planted end of a file")
            case "hang":
                time.sleep(3600)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "oom":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
            case "unsupported":
                raise Unsupported("no C++ compiler: install g++")
            case "kill parent" | "stop parent" as what:
                os.kill(os.getppid(), signal.SIGKILL if "kill" in what else signal.SIGSTOP)
                time.sleep(1.0 if "kill" in what else 0.0)  # the steps left take less time than it takes to notice
            case "fork":
                os.fork()
            case "exit" | "leave" as what:
                os._exit(3 if what == "exit" else 0)
            case "threads":
                torch.set_num_threads(torch.get_num_threads() + 1)
            case "full disk":  # of this process alone; Python ignores the signal, and writing fails
                resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    def step(self, batch: Any) -> float:
        del batch
        self.context.mark("forward")
        self.fault("forward")
        for _ in range(self.option("micro_steps", 100)):
            self.values @ self.values
        if self.context.world_size > 1 and not self.option("alone", False):
            self.context.mark("all-reduce")
            self.fault("all-reduce")
            dist.all_reduce(self.values)
            self.values.fill_(1.0)
        self.steps += 1
        return float("nan") if self.option("fault", "") == "nan" else 1.0

    def witness(self) -> dict[str, Any]:
        honest = min(self.steps, int(self.option("skips_after", self.steps)))
        said = {"images": honest * self.config.rank_batch_size, "loader_workers": self.config.loader_workers}
        return {**said, **dict(self.option("says", ()))}

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)


class Phased(Planted):
    """Busy phases whose true lengths the workload itself times, with an exchange in a thread beside the backward pass.

    The truth is one dictionary for each step: seconds of each phase, of the exchange (a span), and of what both the
    exchange and the backward pass cover.
    """

    SECONDS: ClassVar = {"data": 0.008, "copy": 0.008, "forward": 0.01, "backward": 0.012, "optimizer": 0.008}

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.truth: list[dict[str, float]] = []

    def busy(self, phase: str, seconds: float = 0.008, start: float | None = None) -> float:
        start = now = time.perf_counter() if start is None else start
        while now - start < self.SECONDS.get(phase, seconds):
            now = time.perf_counter()
        self.truth[-1][phase] = now - start
        return now

    def batches(self) -> Iterator[Any]:
        while True:
            self.truth.append({})
            self.busy("data")
            yield None

    def step(self, batch: Any) -> float:
        del batch
        mark, truth = self.context.mark, self.truth[-1]
        times: list[float] = []
        thread = threading.Thread(target=self.exchange, args=(times,))  # here: it takes a while, and no phase's time
        self.busy("unnamed", float(self.option("unnamed_seconds", 0.0)))
        for phase in ("copy", "forward"):
            mark(phase)
            self.busy(phase)
        mark("backward")
        start = time.perf_counter()
        thread.start()
        end = self.busy("backward", start=start)
        mark("communication")
        begun = time.perf_counter()
        thread.join()
        truth["communication"] = time.perf_counter() - begun
        for phase in ("optimizer", "ema"):
            mark(phase)
            self.busy(phase)
        truth["exchange"] = times[1] - times[0]
        truth["overlapped"] = max(0.0, min(times[1], end) - max(times[0], start))
        return 0.0

    def exchange(self, times: list[float]) -> None:
        times.append(time.perf_counter())
        time.sleep(0.020)  # 8 ms longer than the backward pass
        times.append(time.perf_counter())
        self.context.span("communication", times[0], times[1])

    def witness(self) -> dict[str, Any]:
        return {"truth": self.truth}


class Exchanging(Planted):
    """A small network under DistributedDataParallel whose gradients go in several buckets."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        super().__init__(config, context)
        torch.manual_seed(0)
        self.network = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6)))
        self.ddp = torch.nn.parallel.DistributedDataParallel(self.network, bucket_cap_mb=0.3)
        hook = bf16_compress_hook if self.option("hook", False) else None
        context.watch(self.ddp, hook and (lambda _, bucket: hook(None, bucket)))  # type: ignore[arg-type]
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.1)
        self.images = torch.randn(256, 256, generator=torch.Generator().manual_seed(context.rank))

    def step(self, batch: Any) -> float:
        del batch
        self.context.mark("forward")
        loss = self.ddp(self.images).square().mean()
        self.context.mark("backward")
        loss.backward()
        self.context.mark("optimizer")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def witness(self) -> dict[str, Any]:
        return {"weights": [float(p.double().sum()) for p in self.network.parameters()]}


class Waiting(Planted):
    """A step of timed waits, so that ranks do not fight for cores: what is lost to more ranks is planted, in seconds.

    A step takes ``fixed`` and for each image of the rank ``image``; ``loader`` unless batches are ready, ``exchange``
    where gradients are exchanged, and ``slow`` on rank 1.
    """

    ready: tuple[str, ...] = ("still",)

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.gradients = torch.ones(1000)

    def wait(self, name: str, times: float = 1) -> None:
        time.sleep(times * float(self.option(name, 0.0)))

    def batches(self) -> Iterator[Any]:
        for step in itertools.count():
            if self.config.loader not in self.ready:
                self.wait("loader")
            yield step

    def step(self, batch: Any) -> float:
        del batch
        config = self.config
        self.context.mark("forward")
        self.wait("image", config.rank_batch_size)
        if self.context.rank == 1:
            self.wait("slow")
        self.context.mark("optimizer")
        self.wait("fixed")
        if config.world_size > 1 and config.exchange.enabled:
            self.context.mark("communication")
            dist.all_reduce(self.gradients)
            self.wait("exchange")
        return 0.0


busy, phased = Busy, Phased
exchanging, waiting = Exchanging, Waiting
