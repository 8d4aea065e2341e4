"""What a rank does: build its workload, then obey its parent, asleep on its pipe with the device idle in between."""

import contextlib
import ctypes
import gc
import importlib
import inspect
import itertools
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter  # which somebody's code may replace in its module
from typing import Any

import psutil
import torch
import torch.distributed as dist

from ddpm_lab.config import NCCL, RunConfig
from ddpm_lab.measure import hook
from ddpm_lab.measure.code_version import astray, in_lab, loaded, unlisted
from ddpm_lab.measure.hardware import IN_ORDER
from ddpm_lab.measure.others import tree_seconds
from ddpm_lab.measure.phases import UNNAMED, PhaseClock, cuda_event, mean, profile_steps
from ddpm_lab.measure.process import Heartbeat, RankJob, host_id, join_store
from ddpm_lab.workload import RankContext, Training, Unsupported, Workload, call_maker, named

COMMANDS = ("window", "witness", "loaded", "budget", "profile", "advance", "call", "set_threads", "finish")
"""Methods of ``Rank`` that its parent may have called; each returns its report."""


class Rank:
    """The state of a rank while it lives."""

    def __init__(self, job: RankJob, commands: Connection, beat: Heartbeat) -> None:
        self.job, self.commands, self.beat = job, commands, beat
        self.barriers, self.pid = 0, os.getpid()

    def serve(self) -> None:
        """Build, say so, and obey until the parent says finish or closes the pipe."""
        begun, command = perf_counter(), ""
        self.beat.mark("build")
        self.build()
        self._answer({"build_seconds": perf_counter() - begun})
        while command != "finish":
            try:
                command, arguments = self.commands.recv()
            except EOFError:  # the parent closed the pipe; one of the workload's own is its failure
                return
            assert command in COMMANDS
            self._answer(getattr(self, command)(**arguments))
            hook.Turns.stepping = self.beat.steps > 0

    def _answer(self, report: dict[str, Any]) -> None:
        """Say that the command is done, and sleep until the next one. Raises RuntimeError in a copy of the rank."""
        if os.getpid() != self.pid:
            source = self.job.config.sources[-1]
            raise RuntimeError(f"{source} forks, and both processes make its steps: end the new one by os._exit")
        self.beat.mark("asleep")
        self.commands.send_bytes(json.dumps({"report": report}).encode())

    def build(self) -> None:
        """Set up the process and create the workload. None of this is timed as training."""
        config = self.job.config
        if not all(map(in_lab, config.sources)):  # record the settings files that the user's code opens
            hook.FOLDER = str(self.job.folder)
            sys.addaudithook(hook.note_file)
        # NCCL reads its settings when a group's first communicator is made.
        os.environ.update({**IN_ORDER, **os.environ, **self.job.environment, **NCCL[config.exchange.nccl]})
        torch.set_num_threads(self.job.threads)
        if config.freed_memory == "kept":
            _keep_freed_memory()
        torch.manual_seed(config.seed)
        self.cuda = config.device == "cuda"
        self.device = "cpu"
        self.uuid: str | None = None
        if self.cuda:
            index = self.job.device_index
            if config.oversubscribe:  # ranks share the available GPUs
                index %= torch.cuda.device_count()
            self.device = f"cuda:{index}"
            self.uuid = f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
            torch.cuda.set_device(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        if self.job.store:  # private to the ranks of this group
            store = join_store(*self.job.store, seconds=self.job.collective_seconds)
        elif config.world_size == 1:  # needs no disk space
            store = dist.HashStore()  # type: ignore[attr-defined]
        else:
            store = dist.FileStore(str(self.job.folder / "rendezvous"), config.world_size)  # type: ignore[attr-defined]
        dist.init_process_group(
            # NCCL refuses two ranks on one GPU.
            "nccl" if self.cuda and not config.oversubscribe else "gloo",
            store=store,
            rank=self.job.rank,
            world_size=config.world_size,
            timeout=timedelta(seconds=self.job.collective_seconds),
        )
        module, _, function = config.workload.partition(":")
        make = getattr(importlib.import_module(module), function)
        self.clock = clock = PhaseClock(self.beat.mark, self.device)
        # Timed runs do not use the phase clock.
        clocked = {"mark": clock.mark, "span": clock.span, "watch": clock.watch}
        how: dict[str, Any] = clocked if config.purpose == "profile" else {"mark": self.beat.mark}
        how |= {"rank": self.job.rank, "world_size": config.world_size, "threads": self.job.threads}
        self.workload = make_workload(make, config.sources[-1], config, RankContext(device=self.device, **how))
        self.batches = self.workload.batches()
        self._find_gpus()
        self.early = hook.loader_iterators()  # objects that are frozen below cannot be found later
        # Current objects live as long as the rank. Freeze them, or the collector would scan them before every window.
        gc.collect()
        gc.freeze()

    def synchronize(self) -> None:
        for gpu in self.gpus:
            torch.cuda.synchronize(gpu)

    def _find_gpus(self) -> None:
        """Note this rank's own GPU and those where its workload holds something: they are waited for."""
        gpus = range(torch.cuda.device_count() if self.cuda else 0)
        self.gpus = [g for g in gpus if f"cuda:{g}" == self.device or torch.cuda.memory_allocated(g)]

    def window(self, *, settle: int, steps: int) -> dict[str, Any]:
        """Run ``settle`` untimed steps, line up with the other ranks, and time ``steps`` steps."""
        beat, batches, step, now = self.beat, self.batches, self.workload.step, perf_counter
        self._settle(settle, self._step)
        losses, marks, data_seconds = [], [], 0.0
        start = before = now()
        first: Any = cuda_event() if self.cuda else start
        for _ in range(steps):
            beat.mark("data")
            batch = next(batches)
            data_seconds += now() - before
            losses.append(step(batch))
            beat.steps += 1
            before = now()
            marks.append(cuda_event() if self.cuda else before)
        self.synchronize()
        end = now()
        return {
            "host": host_id(),
            "start": start,
            "end": end,
            "step_ends": [first.elapsed_time(m) / 1e3 if self.cuda else m - first for m in marks],
            "data_seconds": data_seconds,
            "losses": [float(loss) for loss in losses],
            "memory": hook.bytes_held(torch.cuda, self.gpus),
        }

    def _settle(self, steps: int, step: Callable[[], Any]) -> None:
        """Collect garbage, make some untimed steps, and line up with the other ranks."""
        gc.collect()
        for _ in range(steps):
            step()
        self._find_gpus()
        self.synchronize()
        self.beat.mark("barrier")
        if self.job.config.world_size > 1:
            dist.barrier()
            self.barriers += 1

    def _step(self) -> Any:
        self.beat.mark("data")
        loss = self.workload.step(next(self.batches))
        self.beat.steps += 1
        return loss

    def advance(self, *, steps: int) -> dict[str, Any]:
        """Train ``steps`` steps with nothing in between that training does not need: such a run supplies no speed."""
        begun = perf_counter()
        losses = [self._step() for _ in range(steps)]
        self.synchronize()
        seconds = perf_counter() - begun  # before losses are copied from the device
        return {"losses": [float(loss) for loss in losses], "seconds": seconds}

    def call(self, *, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """What else the workload can do, on every rank: saving, a held-out loss; its answer must be ready for JSON."""
        self.beat.mark(method)
        return {"answer": getattr(self.workload, method)(**arguments)}

    def set_threads(self, *, count: int) -> dict[str, Any]:
        """Compute with so many threads from here on: the same mathematics, summed in another order."""
        torch.set_num_threads(count)
        return {}

    def witness(self) -> dict[str, Any]:
        self.beat.mark("witness")
        self._check_place()
        if compiled := sys.modules.get("torch._inductor.async_compile"):
            compiled.shutdown_compile_workers()  # which would be awake in the windows of others
        seen = {
            "world_size": dist.get_world_size(),
            "rank": dist.get_rank(),
            "steps": self.beat.steps,
            "collectives": self._collectives(),
            "backend": dist.get_backend(),
            "device": self.device,
            "device_uuid": self.uuid,
            "host": host_id(),
            "cuda": torch.version.cuda if self.cuda else None,
            "threads": torch.get_num_threads(),
            "threads_wait": {name: os.environ.get(name) for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")},
            "freed_memory": freed_memory_seen(),
            "unlisted_modules": unlisted(self.job.modules, self.job.config.sources),
            **({"astray_modules": astray(self.job.tree.apart)} if self.job.tree else {}),
            **self.workload.witness(),
        }
        loaders = {id(loader): loader for loader in (*self.early, *hook.loader_iterators())}.values()
        if loaders and "prefetch_batches" not in seen:  # of a loop of the user's, around a loader of its own
            seen["prefetch_batches"] = sum(loader._num_workers * loader._prefetch_factor for loader in loaders)
        if dist.get_backend() == "nccl":
            seen |= nccl_seen(os.environ)
        if self.cuda:
            free, total = torch.cuda.mem_get_info(self.device)
            seen["device_used_bytes"], seen["device_total_bytes"] = total - free, total
        return seen

    def _check_place(self) -> None:
        """Raise RuntimeError where only GPUs that are not this rank's hold something: its own is what is timed."""
        here = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        gpus = range(torch.cuda.device_count() if here else 0)
        held = [f"cuda:{gpu}" for gpu in gpus if torch.cuda.memory_allocated(gpu)]
        if held and self.device not in held:
            raise RuntimeError(
                f"{self.job.config.sources[-1]} computes on {held[0]}, and its rank on {self.device}: let it take "
                "context.device, or cuda without a number; --device and CUDA_VISIBLE_DEVICES choose what that is"
            )

    def _collectives(self) -> int | None:
        """Collectives that the workload has made, in any group of ranks; None where torch does not tell."""
        with contextlib.suppress(RuntimeError, AttributeError):
            groups: Any = dist.distributed_c10d._world.pg_map
            return int(sum(group._get_sequence_number_for_group() for group in groups)) - self.barriers
        return None

    def loaded(self) -> dict[str, Any]:
        return loaded(self.job.config.sources)._asdict()

    def budget(self, *, settle: int, steps: int, rounds: int) -> dict[str, Any]:
        """Measure the time budget of a step: seconds per step in each phase, the mean over ``rounds``.

        A round is a window of ``steps`` steps as training runs them, then one that waits for the device at each phase
        boundary; ``settle`` steps come before each. Marks cost time, so neither window is used as a speed.
        """
        windows: dict[str, list[dict[str, Any]]] = {"unsynchronised": [], "synchronised": []}
        for _ in range(rounds):
            for variant, measured in windows.items():
                self._settle(settle, self._marked_step)
                before = tree_seconds(psutil.Process().children())  # of loader workers
                self.clock.start(synchronised=variant == "synchronised")
                start = perf_counter()
                for _ in range(steps):
                    self._marked_step()
                self.synchronize()
                window = self.clock.stop(start, perf_counter(), steps)
                used = tree_seconds(psutil.Process().children()) - before
                window["helpers_cpu_seconds"] = max(0.0, used) / steps
                measured.append(window)
        found = {variant: mean(measured) for variant, measured in windows.items()}
        return {**found, "memory": hook.bytes_held(torch.cuda, self.gpus)}

    def _marked_step(self) -> None:
        """One step with a mark at each of its ends: what lies between these and the workload's own is in no phase."""
        mark = self.clock.mark
        mark("data")
        batch = next(self.batches)
        mark(UNNAMED)
        self.workload.step(batch)
        mark(UNNAMED)
        self.beat.steps += 1

    def profile(self, *, traces: list[str], **schedule: int) -> dict[str, Any]:
        """Profile some steps: a run with another purpose, which never supplies a time. ``traces`` has a file a rank."""
        self.clock.tracing = True
        found = profile_steps(self._marked_step, schedule, Path(traces[self.job.rank]), self.cuda)
        self.clock.tracing = False
        return found

    def finish(self) -> dict[str, Any]:
        self.beat.mark("finish")
        seen = self.workload.witness()
        self.workload.close()
        if self.job.config.world_size == 1:
            dist.destroy_process_group()
        return {
            "rank": self.job.rank,
            "steps": self.beat.steps,
            "device": self.device,
            "device_uuid": self.uuid,
            "threads": torch.get_num_threads(),
            **hook.most_bytes_held(torch.cuda, self.gpus),
            "images": seen.get("images"),
            "indices_sha256": str(seen.get("indices_sha256", "")),
        }


class Plain:
    """Anybody's own loop, which brings its data: a generator that yields after a step, or a function of one step."""

    def __init__(self, step: Callable[[], Any], config: RunConfig, context: RankContext) -> None:
        self._step, self.config, self._mark = step, config, context.mark
        self.steps = 0

    def batches(self) -> Iterator[Any]:
        """Nothing: the loop fetches its own data."""
        return itertools.repeat(None)

    def step(self, batch: Any) -> Any:
        """One step; what it gives is its loss if it is a number, and otherwise nothing is known of its loss."""
        del batch
        self._mark("whole step")
        result = self._step()
        self.steps += 1
        if hasattr(result, "detach"):
            return result.detach() if result.numel() == 1 else 0.0
        return result if isinstance(result, int | float) else 0.0

    def witness(self) -> dict[str, Any]:
        """All that can be said of a stranger's loop."""
        return {"images": self.steps * self.config.rank_batch_size}

    def close(self) -> None:
        """The process ends after this; nothing else is known to be open."""


def make_workload(function: Callable[..., Any], name: str, config: RunConfig, context: RankContext) -> Workload:
    """What ``function`` makes, as a workload. Raises TypeError, in one sentence, for anything else."""
    made = call_maker(function, name, config, context)
    if all(hasattr(made, method) for method in ("batches", "step", "witness", "close")):
        workload: Workload = made
        return workload
    step = partial(next, _endless(made, name)) if inspect.isgenerator(made) else made
    if callable(step):
        return Plain(step, config, context)
    if isinstance(made, Training):
        raise TypeError(f"workload {name} returned a Training, which is for ddpm-lab run --workload {name}")
    raise TypeError(
        f"workload {named(name, function)} returned {type(made).__name__}: let it yield after every step, or return a "
        "function that does one step, or a Training"
    )


def _endless(loop: Iterator[Any], name: str) -> Iterator[Any]:
    """What a loop yields; one that is exhausted says how to go on."""
    count = 0
    for count, result in enumerate(loop, 1):  # noqa: B007 - the last one tells how many there were
        yield result
    raise RuntimeError(f"the loop of {name} ended after {count} step{'s' * (count != 1)}: let it go on (while True)")


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h
_PROBE_BYTES, _PROBE_PAGES = 64 * 2**20, 64
"""More than the C library ever keeps by itself, which is blocks of up to 32 MiB; the pages of it that are touched."""


def _keep_freed_memory() -> None:
    """Have this process keep the memory that it frees, for its next step.

    The GNU C library unmaps every large block, and the kernel clears each page again when it is written to: 50,000 page
    faults in a step of the seed network at batch 32 in bf16. Raises Unsupported where this has no effect.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library
        tell = ctypes.CDLL(None).mallopt
        tell(_M_MMAP_MAX, 0)
        tell(_M_TRIM_THRESHOLD, 2**31 - 1)
    if freed_memory_seen() != "kept":
        raise Unsupported("freed_memory 'kept' needs the malloc of the GNU C library, and no LD_PRELOAD: use default")


def freed_memory_seen() -> str:
    """``kept`` or ``default``: whether a large block comes back without page faults, in a gap a bit smaller."""
    faults = []
    for size in (_PROBE_BYTES, _PROBE_BYTES - 2**16):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.empty(size, dtype=torch.uint8)[:: _PROBE_BYTES // _PROBE_PAGES].fill_(1)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return "kept" if faults[1] < _PROBE_PAGES // 4 else "default"


def nccl_seen(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings of NCCL in an environment: by their name in ``NCCL``, and every one that is set."""
    names = [name for name, values in NCCL.items() if values.items() <= environment.items()]
    own = {name: value for name, value in environment.items() if name.startswith("NCCL_")}
    return {"nccl": names[-1], "nccl_environment": own}  # the default, which sets nothing, comes first
