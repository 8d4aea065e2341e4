"""What a rank does: build its workload, then obey its parent, one command at a time.

Between commands a rank sleeps on its own pipe, never in a collective, with its device idle.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ddpm_lab.config import NCCL
from ddpm_lab.measure.code_version import astray, loaded, unlisted
from ddpm_lab.measure.freed_memory import freed_memory_seen, keep_freed_memory
from ddpm_lab.measure.phases import UNNAMED, PhaseClock, mean, profile_steps
from ddpm_lab.measure.plain import make_workload
from ddpm_lab.measure.process import Heartbeat, RankJob, host_id, join_store, report
from ddpm_lab.workload import RankContext

COMMANDS = ("window", "witness", "loaded", "budget", "profile", "advance", "call")
"""Methods of ``Rank`` that its parent may have called, between its start and ``finish``."""


class Rank:
    """The state of a rank while it lives."""

    def __init__(self, job: RankJob, commands: Connection, beat: Heartbeat) -> None:
        self.job = job
        self.commands = commands
        self.beat = beat
        self.started = time.perf_counter()
        self.count = 0

    def serve(self) -> None:
        """Build, say so, and obey until the parent says finish or closes the pipe."""
        self.beat.mark("build")
        self.build()
        report(self.job, "build", {"build_seconds": time.perf_counter() - self.started, "pid": os.getpid()})
        self._sleep_until_told("built")
        while True:
            try:
                command, arguments = self.commands.recv()
            except EOFError:
                return
            if command == "finish":
                self.finish()
                return
            assert command in COMMANDS
            getattr(self, command)(**arguments)
            self._sleep_until_told("done")

    def _sleep_until_told(self, word: str) -> None:
        self.beat.mark("asleep")
        self.commands.send(word)

    def build(self) -> None:
        """Set the process up and make the workload; nothing here is timed as training."""
        config = self.job.config
        # NCCL reads its settings when a group's first communicator is made.
        os.environ.update({**self.job.environment, **NCCL[config.exchange.nccl]})
        torch.set_num_threads(self.job.threads)
        if config.freed_memory == "kept":
            keep_freed_memory()
        torch.manual_seed(config.seed)
        self.cuda = config.device == "cuda"
        self.device = f"cuda:{self._device_index()}" if self.cuda else "cpu"
        if self.cuda:
            torch.cuda.set_device(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        dist.init_process_group(
            # NCCL refuses two ranks on one GPU.
            "nccl" if self.cuda and not config.oversubscribe else "gloo",
            store=self._store(),
            rank=self.job.rank,
            world_size=config.world_size,
            timeout=timedelta(seconds=self.job.collective_seconds),
        )
        module, _, function = config.workload.partition(":")
        make = getattr(importlib.import_module(module), function)
        context = RankContext(
            rank=self.job.rank,
            world_size=config.world_size,
            device=self.device,
            threads=self.job.threads,
            mark=self.beat.mark,
        )
        self.clock = clock = PhaseClock(self.beat.mark, self.device)
        if config.purpose == "profile":  # a run that is timed carries nothing of the phase clock
            context = replace(context, mark=clock.mark, span=clock.span, watch=clock.watch)
        self.workload = make_workload(make, config.sources[-1], config, context)
        self.batches = self.workload.batches()
        # What exists now lives as long as the rank. Left to the collector, it would be searched before every window.
        gc.collect()
        gc.freeze()

    def _device_index(self) -> int:
        """The rank's own GPU; one of those that are here where ranks share them."""
        index, shared = self.job.device_index, self.job.config.oversubscribe
        return index % torch.cuda.device_count() if shared else index

    def _store(self) -> Any:
        """Where the ranks of the group find each other, and nobody else finds them."""
        if self.job.store:
            return join_store(*self.job.store, seconds=self.job.collective_seconds)
        path = str(self.job.folder / "rendezvous")
        return dist.FileStore(path, self.job.config.world_size)  # type: ignore[attr-defined]

    def synchronize(self) -> None:
        """Wait until the device has done what it was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def window(self, *, settle: int, steps: int) -> None:
        """Run ``settle`` untimed steps, line up with the other ranks, and time ``steps`` steps."""
        beat, batches, step = self.beat, self.batches, self.workload.step
        gc.collect()
        for _ in range(settle):
            beat.mark("data")
            step(next(batches))
            beat.steps += 1
        self.synchronize()
        beat.mark("barrier")
        if self.job.config.world_size > 1:
            dist.barrier()
        losses = []
        marks: list[Any] = []
        data_seconds = 0.0
        now = time.perf_counter
        start = before = now()
        first: Any = self._event() if self.cuda else start
        for _ in range(steps):
            beat.mark("data")
            batch = next(batches)
            data_seconds += now() - before
            losses.append(step(batch))
            beat.steps += 1
            before = now()
            marks.append(self._event() if self.cuda else before)
        self.synchronize()
        end = now()
        self.count += 1
        report(
            self.job,
            f"window{self.count}",
            {
                "host": host_id(),
                "start": start,
                "end": end,
                "step_ends": [first.elapsed_time(m) / 1e3 if self.cuda else m - first for m in marks],
                "data_seconds": data_seconds,
                "losses": [float(loss) for loss in losses],
                "memory": self._memory(),
            },
        )

    def advance(self, *, steps: int) -> None:
        """Train ``steps`` steps with nothing in between that training does not need: such a run supplies no speed."""
        losses = []
        begun = time.perf_counter()
        for _ in range(steps):
            self.beat.mark("data")
            losses.append(self.workload.step(next(self.batches)))
            self.beat.steps += 1
        self.synchronize()
        seconds = time.perf_counter() - begun
        report(self.job, "advance", {"losses": [float(loss) for loss in losses], "seconds": seconds})

    def call(self, *, method: str, arguments: dict[str, Any]) -> None:
        """What else the workload can do, on every rank: saving, a held-out loss; its answer must be ready for JSON."""
        self.beat.mark(method)
        report(self.job, "call", {"answer": getattr(self.workload, method)(**arguments)})

    def _memory(self) -> dict[str, int]:
        """Bytes that this rank holds now: its resident set, and on a GPU what torch has allocated and reserved."""
        held = {"rss_bytes": psutil.Process().memory_info().rss}
        if self.cuda:
            held["allocated_bytes"] = torch.cuda.memory_allocated(self.device)
            held["reserved_bytes"] = torch.cuda.memory_reserved(self.device)
        return held

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def witness(self) -> None:
        """Read back what runs."""
        self.beat.mark("witness")
        seen = {
            "world_size": dist.get_world_size(),
            "rank": dist.get_rank(),
            "steps": self.beat.steps,
            "backend": dist.get_backend(),
            "device": self.device,
            "device_uuid": self._uuid(),
            "host": host_id(),
            "cuda": torch.version.cuda if self.cuda else None,
            "threads": torch.get_num_threads(),
            "threads_wait": {name: os.environ.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")},
            "freed_memory": freed_memory_seen(),
            "unlisted_modules": unlisted(self.job.modules),
            **({"astray_modules": astray(self.job.tree.apart)} if self.job.tree else {}),
            **self.workload.witness(),
        }
        if dist.get_backend() == "nccl":
            seen |= nccl_seen(os.environ)
        if self.cuda:
            free, total = torch.cuda.mem_get_info(self.device)
            seen["device_used_bytes"], seen["device_total_bytes"] = total - free, total
        report(self.job, "witness", seen)

    def loaded(self) -> None:
        """Say what was loaded from outside of libraries."""
        report(self.job, "loaded", loaded()._asdict())

    def _uuid(self) -> str | None:
        if not self.cuda:
            return None
        return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"

    def budget(self, *, settle: int, steps: int, rounds: int) -> None:
        """Take the time budget: in each round a window as training runs, then one that waits at the end of each phase.

        Marks and spans are kept, so these windows have no other purpose: none of them supplies a speed.
        """
        if self.job.config.purpose != "profile":
            raise RuntimeError("a time budget is taken only of a run with the purpose 'profile'")
        found: dict[str, list[dict[str, Any]]] = {"unsynchronised": [], "synchronised": []}
        for _ in range(rounds):
            for variant, windows in found.items():
                gc.collect()
                for _ in range(settle):
                    self._marked_step()
                self.synchronize()
                self.beat.mark("barrier")
                if self.job.config.world_size > 1:
                    dist.barrier()
                helpers = _children_seconds()
                self.clock.start(synchronised=variant == "synchronised")
                start = time.perf_counter()
                for _ in range(steps):
                    self._marked_step()
                self.synchronize()
                end = time.perf_counter()
                window = self.clock.stop(start, end, steps)
                window["helpers_cpu_seconds"] = max(0.0, _children_seconds() - helpers) / steps
                windows.append(window)
        means = {variant: mean(windows) for variant, windows in found.items()}
        report(self.job, "budget", {**means, "memory": self._memory()})

    def _marked_step(self) -> None:
        """One step with a mark at each of its ends: what lies between these and the workload's own is in no phase."""
        mark = self.clock.mark
        mark("data")
        batch = next(self.batches)
        mark(UNNAMED)
        self.workload.step(batch)
        mark(UNNAMED)
        self.beat.steps += 1

    def profile(self, *, wait: int, warmup: int, active: int, repeat: int, trace: str) -> None:
        """Profile some steps: a run with another purpose, which never supplies a time."""
        schedule = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
        self.clock.tracing = True
        found = profile_steps(self._marked_step, schedule, Path(trace), self.cuda)
        self.clock.tracing = False
        report(self.job, "profile", found)

    def finish(self) -> None:
        """Stop the workload and leave the rank's summary."""
        self.beat.mark("finish")
        seen = self.workload.witness()
        peak_memory = peak_reserved = None
        if self.cuda:
            peak_memory = torch.cuda.max_memory_allocated(self.device)
            peak_reserved = torch.cuda.max_memory_reserved(self.device)
        self.workload.close()
        report(
            self.job,
            "summary",
            {
                "rank": self.job.rank,
                "steps": self.beat.steps,
                "device": self.device,
                "device_uuid": self._uuid(),
                "threads": self.job.threads,
                "peak_memory_bytes": peak_memory,
                "peak_reserved_bytes": peak_reserved,
                "peak_rss_bytes": _peak_rss_bytes(),
                "images": seen.get("images"),
                "indices_sha256": str(seen.get("indices_sha256", "")),
            },
        )
        if self.job.config.world_size == 1:
            dist.destroy_process_group()


def nccl_seen(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings of NCCL in an environment: by their name in ``NCCL``, and every one that is set."""
    names = [name for name, values in NCCL.items() if values.items() <= environment.items()]
    own = {name: value for name, value in environment.items() if name.startswith("NCCL_")}
    return {"nccl": names[-1], "nccl_environment": own}  # the default, which sets nothing, comes first


def _peak_rss_bytes() -> int | None:
    """The most memory this process has had resident; None is unknown.

    The kernel's mark for this address space. ``ru_maxrss`` also counts the one that stood before an ``exec``, which is
    the parent's. In a rank of the fork server it begins with what the server had loaded, which the rank maps too.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def _children_seconds() -> float:
    """CPU seconds that this process's children (loader workers) have used so far."""
    used = 0.0
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            used += times.user + times.system
    return used
