"""A rank's process, seen from both sides: what the parent tells it, how it is watched, how it ends.

A rank cannot outlive its parent: a thread waits on a pipe whose only write end the parent holds and kills the rank's
whole process group (loader workers and compilers too) at end of file. What a rank measures goes to files, written
atomically; the pipe carries only words, and what went wrong, which a full disk must not hide. Nothing here imports
torch until the rank runs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import mmap
import multiprocessing
import os
import pickle
import signal
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from ddpm_lab.config import RunConfig, digest
from ddpm_lab.measure.code_version import PACKAGE, Tree, is_library
from ddpm_lab.workload import Unsupported

THREADING = {"GOMP_SPINCOUNT": "10000"}
"""How OpenMP threads wait for each other, unless the user has said otherwise: briefly awake, then asleep.

By default they spin for milliseconds, and a step of two threads slows down manyfold as soon as a neighbour wants one of
the cores. It must be in the environment before torch is imported, and it is the same for every configuration."""

BEAT = struct.Struct("<dqq24s")  # monotonic seconds, steps done, marks made, what the rank is about to do


class Store(NamedTuple):
    """A part of the store that torchrun serves for its job: address, port, and what the keys begin with."""

    address: str
    port: int
    prefix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """What the parent tells a rank at its start.

    ``threads`` are the rank's own compute threads, ``device_index`` the number of its GPU on its host; ``modules`` the
    hashes of modules that it may load beside the lab and libraries. Ranks of several processes of torchrun meet in a
    ``store``; without one they meet in the folder. The sources of a revision lie in a ``tree``.
    """

    config: RunConfig
    rank: int
    folder: Path
    threads: int
    collective_seconds: float
    modules: Mapping[str, str]
    environment: dict[str, str] = field(default_factory=dict)
    device_index: int = 0
    store: Store | None = None
    tree: Tree | None = None


class Beat(NamedTuple):
    """A rank's last sign of life: monotonic seconds, steps done, marks made so far, and what it was about to do."""

    seconds: float
    steps: int
    marks: int
    phase: str


class Heartbeat:
    """A memory-mapped file in which a rank says what it is about to do; the parent reads it without disturbing it."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), BEAT.size)
        self.steps = 0
        self.marks = 0

    def mark(self, phase: str) -> None:
        """Note the time and the phase; about a microsecond."""
        self.marks += 1
        self._write(Beat(time.monotonic(), self.steps, self.marks, phase))

    def touch(self) -> None:
        """The parent's mark: from now on silence counts. A sleeping rank's own last mark is old."""
        self._write(self.read()._replace(seconds=time.monotonic()))

    def _write(self, beat: Beat) -> None:
        # In one copy: pack_into would clear the bytes first, and a reader in between would see a rank silent for ever.
        self._map[:] = BEAT.pack(beat.seconds, beat.steps, beat.marks, beat.phase.encode()[:24])

    def read(self) -> Beat:
        """What the rank said last; read until two looks agree, since the rank may be writing."""
        before = self._map[:]
        while (now := self._map[:]) != before:
            before = now
        seconds, steps, marks, phase = BEAT.unpack(now)
        return Beat(seconds, steps, marks, phase.rstrip(b"\0").decode(errors="replace"))


def rank_main(job: RankJob, commands: Connection, lifeline: Connection) -> None:
    """Entry point of a rank's process: build, then serve commands until told to finish."""
    if job.tree and job.tree.package != PACKAGE:
        _rank_main_of(job, commands, lifeline)
    os.setpgid(0, 0)
    # As in a training script of one's own. With the start method that this rank inherits, each lock that a library
    # makes (tqdm does, when torch compiles) would be a named semaphore, and this process, which is killed or leaves
    # by os._exit, would leave it behind.
    multiprocessing.set_start_method(None, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    log = os.open(job.folder / f"rank{job.rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)
    beat = Heartbeat(job.folder / f"rank{job.rank}.beat")
    said: str | dict[str, Any] = "finished"
    try:
        from ddpm_lab.measure.rank import Rank  # noqa: PLC0415 - torch belongs to the rank, not to its parent

        Rank(job, commands, beat).serve()
    except Unsupported as error:
        said = _error("unsupported", str(error))
    except BaseException as error:
        said = _error("oom" if _out_of_memory(error) else "crashed", _one_line(error))
    with contextlib.suppress(OSError):
        commands.send(said)
    # The lab's processes are isolated; their interpreters hold nothing that is worth an orderly exit, and a
    # library's exit handler must not keep a group alive.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # as of a disk that is full
            stream.flush()
    os._exit(isinstance(said, dict))


def _rank_main_of(job: RankJob, commands: Connection, lifeline: Connection) -> None:
    """Be a rank of a revision's own lab: this one was there before, since the fork server holds it."""
    told = pickle.dumps(job)
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE.name]:
        del sys.modules[name]
    importlib.import_module(__name__).rank_main(pickle.loads(told), commands, lifeline)  # which does not return


def _die_with_parent(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv_bytes()
    os.killpg(0, signal.SIGKILL)


def _error(status: str, message: str) -> dict[str, Any]:
    return {"status": status, "message": message, "time": time.monotonic(), "traceback": traceback.format_exc()}


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (f"{type(error).__name__}: {text}"[:400] if text else type(error).__name__) + _where(error)


def _where(error: BaseException) -> str:
    """The last line of the user's own code that an error passed through, in brackets; empty where there is none."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_library(frame.filename) and not Path(frame.filename).is_relative_to(PACKAGE)
    ]
    # A syntax error names the line of a file that was never run.
    known = [f"{Path(f.filename).name}, line {f.lineno}" for f in own if Path(f.filename).is_file()]
    return f" ({known[-1]})" if known and known[-1] not in str(error) else ""


def _out_of_memory(error: BaseException) -> bool:
    text = str(error)
    # cuBLAS and cuDNN, which allocate for themselves, speak of their status.
    known = "out of memory" in text.lower() or "DefaultCPUAllocator" in text or "STATUS_ALLOC_FAILED" in text
    return isinstance(error, MemoryError) or known


def report(job: RankJob, name: str, values: dict[str, Any]) -> None:
    """Write a result file atomically: it is either absent or whole."""
    final = job.folder / f"rank{job.rank}.{name}.json"
    partial = final.with_suffix(".partial")
    partial.write_text(json.dumps(values))
    partial.replace(final)


def host_id() -> str:
    """Twelve hexadecimal digits that tell hosts apart: those of one network and one boot of a kernel are one host."""
    parts = [str(Path("/proc/self/ns/net").readlink()), Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
    return digest(parts)


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since the machine did: with its number it names one process for good."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # Field 22; the name before it (field 2) is in parentheses and may hold anything.
        return int(Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    return None


def kill(send: Callable[[int, int], None], pid: int, started: int | None, number: int = signal.SIGKILL) -> None:
    """Signal a process or its group (``send``), unless its pid has passed on to a process that started later.

    The kernel gives no pid away while a group of that number has members: a group whose leader is gone is the rank's.
    """
    now = start_ticks(pid)
    if now is None or now == started:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)
