"""A group: the ranks of one configuration in one set, started fresh, watched, and gone without a trace.

The parent sleeps while ranks work. It judges each rank by its own heartbeat, not by a collective's time-out, so that
it can name the rank that hangs, and what it was doing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from ddpm_lab.checks import choice
from ddpm_lab.config import START_METHODS, RunConfig
from ddpm_lab.measure.process import BEAT, THREADING, Heartbeat, RankJob, kill, rank_main, start_ticks

PRELOAD = ("torch", "torch._dynamo", "torch.distributed", "torch.utils.data", "numpy", "PIL.Image")
"""What the fork server imports once. It must start no thread and touch no device."""

OWNER = "owner"
"""File in a group's folder that says whose it is, locked while the parent lives."""

Progress = Callable[[str], None]


class GroupFailed(RuntimeError):  # noqa: N818 - an outcome that becomes a row
    """A configuration that could not be measured: its status, one sentence of reason, and the rank's own traceback."""

    def __init__(self, status: str, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.status, self.reason, self.detail = status, reason, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a rank may show no sign of life, in seconds: while it builds, compiles and warms up; at the end.

    A timed window is limited by ``max(window_seconds, 20 x the warm step)``.
    """

    build_seconds: float = 600.0
    window_seconds: float = 10.0
    finish_seconds: float = 20.0


@contextlib.contextmanager
def _fresh_start() -> Iterator[None]:
    """What a starting process inherits: the lab's threading environment, and no ``__main__``.

    multiprocessing would run the parent's main module again in every rank; ranks need none of it, and a script
    without a ``__main__`` guard would start itself over and over.
    """
    real, before = sys.modules["__main__"], dict(os.environ)
    sys.modules["__main__"] = types.ModuleType("__main__")
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.update({name: value for name, value in THREADING.items() if name not in os.environ})
    try:
        yield
    finally:
        sys.modules["__main__"] = real
        for name in THREADING.keys() - before.keys():
            os.environ.pop(name, None)


def _identity() -> dict[str, Any]:
    """Who this process is, told apart from processes of the same number on other hosts and in other containers."""
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": str(Path("/proc/self/ns/pid").readlink()),
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
    }


def _claim(folder: Path) -> int:
    """Mark a folder as this process's own; the lock on the returned descriptor ends when the process does."""
    new = folder / "owner.new"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody will ever get one, and all stay away
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with contextlib.suppress(OSError):  # no /proc: an empty mark, which proves nothing
        os.write(descriptor, json.dumps(_identity()).encode())
    new.rename(folder / OWNER)  # locked before anybody can see it
    return descriptor


def _abandoned(folder: Path) -> bool:
    """Whether a folder is proved to be this user's, made on this boot in this pid namespace, by a process now gone."""
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return False
    with (folder / OWNER).open("r+") as file:
        owner, here = json.load(file), _identity()
        if any(owner[name] != here[name] for name in ("boot", "pid_namespace")):
            return False
        if owner["start_ticks"] is None or start_ticks(int(owner["pid"])) == owner["start_ticks"]:
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the owner lives
    return True


def sweep(parent: Path | None = None) -> None:
    """Remove the folders of groups whose parent was killed before it could; those of unknown origin stay."""
    for folder in (parent or Path(tempfile.gettempdir())).glob("ddpm_lab.*.*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if _abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)


class Group:
    """The ranks of one configuration. Use as a context manager: leaving it kills whatever is left."""

    def __init__(
        self,
        config: RunConfig,
        *,
        threads: int,
        modules: tuple[str, ...],
        environment: dict[str, str],
        start_method: str = "forkserver",
        limits: Limits | None = None,
        progress: Progress = lambda _: None,
    ) -> None:
        choice("start_method", start_method, START_METHODS)
        self.config = config
        self.limits = limits or Limits()
        self.progress = progress
        self.started = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(prefix=f"ddpm_lab.{os.getpid()}."))
        self._lock: int | None = _claim(self.folder)
        self._windows = 0
        context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            multiprocessing.set_forkserver_preload(list(PRELOAD))
        self._pipes: list[connection.Connection] = []
        self._lifelines: list[connection.Connection] = []
        self._beats: list[Heartbeat] = []
        self._processes: list[Any] = []
        self._started: dict[int, int | None] = {}
        environment = {"GLOO_SOCKET_IFNAME": "lo", **environment}
        try:
            for rank in range(config.world_size):
                beat = self.folder / f"rank{rank}.beat"
                beat.write_bytes(BEAT.pack(time.monotonic(), 0, 0, b"start"))
                self._beats.append(Heartbeat(beat))
                ours, theirs = context.Pipe()
                end, lifeline = context.Pipe(duplex=False)
                self._pipes.append(ours)
                self._lifelines.append(lifeline)
                job = RankJob(
                    config=config,
                    rank=rank,
                    folder=self.folder,
                    threads=threads,
                    collective_seconds=self.limits.build_seconds,
                    modules=modules,
                    environment=environment,
                )
                process = context.Process(target=rank_main, args=(job, theirs, end), name=f"ddpm_lab rank {rank}")  # type: ignore[attr-defined]
                with _fresh_start():
                    process.start()
                self._processes.append(process)
                self._started[process.pid] = start_ticks(process.pid)
                theirs.close()
                end.close()
            self._wait("built", self.limits.build_seconds, "building")
        except BaseException:
            self.kill()
            raise
        self.start_seconds = time.monotonic() - self.started

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks."""
        return [p.pid for p in self._processes]

    def window(self, *, settle: int, steps: int, limit: float, stage: str) -> list[dict[str, Any]]:
        """Run a window on every rank; ``limit`` is the longest silence of a rank, in seconds."""
        self._tell("window", {"settle": settle, "steps": steps})
        self._wait("done", limit, stage)
        self._windows += 1
        return self._reports(f"window{self._windows}")

    def witness(self) -> list[dict[str, Any]]:
        """What each rank says of itself."""
        self._tell("witness", {})
        self._wait("done", self.limits.build_seconds, "reading the witness")
        return self._reports("witness")

    def budget(self, *, settle: int, steps: int, rounds: int, limit: float) -> list[dict[str, Any]]:
        """Take each rank's time budget; ``limit`` is the longest silence of a rank, in seconds."""
        self._tell("budget", {"settle": settle, "steps": steps, "rounds": rounds})
        self._wait("done", limit, "taking the time budget")
        return self._reports("budget")

    def profile(self, traces: list[Path], **plan: int) -> list[dict[str, Any]]:
        """Profile on every rank; one trace file for each."""
        for pipe, trace in zip(self._pipes, traces, strict=True):
            with contextlib.suppress(OSError):
                pipe.send(("profile", {**plan, "trace": str(trace)}))
        self._wait("done", self.limits.build_seconds, "profiling")
        return self._reports("profile")

    def advance(self, steps: int, limit: float) -> list[dict[str, Any]]:
        """Train ``steps`` steps on every rank; each reports its mean loss of every step, and its seconds."""
        self._tell("advance", {"steps": steps})
        self._wait("done", limit, "training")
        return self._reports("advance")

    def call(self, method: str, limit: float, **arguments: Any) -> list[Any]:
        """Call a method of the workload on every rank, and return their answers."""
        self._tell("call", {"method": method, "arguments": arguments})
        self._wait("done", limit, f"in {method}")
        return [report["answer"] for report in self._reports("call")]

    def finish(self) -> list[dict[str, Any]]:
        """End the ranks in order and return their summaries."""
        self._tell("finish", {})
        self._wait("finished", self.limits.finish_seconds, "finishing")
        summaries = self._reports("summary")
        self.kill()
        return summaries

    def build_seconds(self) -> float:
        """The slowest rank's seconds from its first statement to a built workload."""
        return max(float(r["build_seconds"]) for r in self._reports("build"))

    def kill(self) -> None:
        """Kill whatever is left of the group, loader workers and compilers included, and remove its folder."""
        for process in self._processes:
            if process.is_alive() or process.exitcode is None:
                kill(os.kill, process.pid, self._started.get(process.pid))
                kill(os.killpg, process.pid, self._started.get(process.pid))
        for process in self._processes:
            process.join(10)
        for process in self._processes:
            # The leader is gone; what it started may still stand in its process group.
            kill(os.killpg, process.pid, self._started.get(process.pid))
            with contextlib.suppress(ValueError):
                process.close()
        for end in (*self._pipes, *self._lifelines):
            end.close()
        self._processes, self._pipes, self._lifelines = [], [], []
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _tell(self, command: str, arguments: dict[str, Any]) -> None:
        for beat, pipe in zip(self._beats, self._pipes, strict=True):
            beat.touch()
            with contextlib.suppress(OSError):  # a rank that died is found by _wait, with its reason
                pipe.send((command, arguments))

    def _reports(self, name: str) -> list[dict[str, Any]]:
        return [
            json.loads((self.folder / f"rank{rank}.{name}.json").read_text()) for rank in range(self.config.world_size)
        ]

    def _wait(self, word: str, limit: float, stage: str) -> None:
        """Sleep until every rank has said ``word``; raise GroupFailed for one that fails, dies or falls silent."""
        pending = dict(enumerate(self._pipes))
        begun = shown = time.monotonic()
        while pending:
            sentinels = {p.sentinel: rank for rank, p in enumerate(self._processes) if rank in pending}
            ready = connection.wait([*pending.values(), *sentinels], timeout=0.5)
            for rank, pipe in list(pending.items()):
                if pipe in ready:
                    with contextlib.suppress(EOFError, OSError):
                        said = pipe.recv()
                        if said == word:
                            del pending[rank]
                            continue
                    self._fail(stage)
            if any(sentinels.get(s, -1) in pending for s in ready if isinstance(s, int)):
                self._fail(stage)
            now = time.monotonic()
            if pending and all(now - self._beats[r].read().seconds > limit for r in pending):
                self._hung(pending, limit, stage)
            if now - shown >= 2:
                shown = now
                self.progress(f"{stage}, {now - begun:.0f} s")

    def _doing(self, rank: int) -> str:
        beat = self._beats[rank].read()
        return f"{beat.phase!r} of step {beat.steps + 1}"

    def _fail(self, stage: str) -> None:
        """Name the rank that failed first: one that was killed or left without a word, else the earliest error.

        The others often fail a moment later, because their collective broke; give every report time to arrive.
        """
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline and any(p.is_alive() for p in self._processes):
            time.sleep(0.05)
        errors = {}
        for rank, process in enumerate(self._processes):
            file, code = self.folder / f"rank{rank}.error.json", process.exitcode
            if file.exists():
                errors[rank] = json.loads(file.read_text())
            elif code:
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                raise GroupFailed("crashed", f"rank {rank} {how} in {self._doing(rank)}", self._log(rank))
        if not errors:
            raise GroupFailed("crashed", f"a rank ended without a report while {stage}", self._log(0))
        rank = min(errors, key=lambda r: float(errors[r]["time"]))
        error = errors[rank]
        if error["status"] == "unsupported":
            raise GroupFailed("unsupported", error["message"])
        raise GroupFailed(error["status"], f"rank {rank}: {error['message']}", error["traceback"])

    def _hung(self, pending: dict[int, Any], limit: float, stage: str) -> None:
        """Name the rank that is furthest behind, since all ranks make the same marks. The others wait for it."""
        rank = min(pending, key=lambda r: self._beats[r].read().marks)
        pid = self._processes[rank].pid
        kill(os.kill, pid, self._started[pid], signal.SIGUSR1)
        time.sleep(0.3)  # faulthandler writes the stack to the rank's log
        raise GroupFailed(
            "timed out",
            f"rank {rank} showed no sign of life for {limit:.0f} s while {stage}, in {self._doing(rank)}",
            self._log(rank),
        )

    def _log(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return (self.folder / f"rank{rank}.log").read_text(errors="replace")[-4000:]
        return ""
