"""A rank on this host, as its parent holds it: started fresh, told, heard, watched, and ended without a trace."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ddpm_lab.measure.process import BEAT, THREADING, Heartbeat, RankJob, kill, rank_main, start_ticks

PRELOAD = (
    *("torch", "torch._dynamo", "torch.distributed", "torch.utils.data", "numpy", "PIL.Image"),
    *("ddpm_lab.measure.rank", "ddpm_lab.model.train", "ddpm_lab.model.own", "ddpm_lab.model.training"),
    "ddpm_lab.measure.preload",
)
"""What the fork server imports once. It must start no thread and touch no device."""

LEFT = "left"
"""What is heard of a rank that will say no more."""
LOG_CHARACTERS = 4000


class Life(NamedTuple):
    """A rank's last sign of life: how long ago, steps done, marks made, what it was about to do; how long it is frozen.

    ``frozen_seconds`` is above 0 while the process is stopped by a signal or a debugger.
    """

    silent_seconds: float
    steps: int
    marks: int
    phase: str
    frozen_seconds: float = 0.0


class Ending(NamedTuple):
    """How a rank ended: the error that it reported, or how its process left; ``time`` is of this host's clock."""

    status: str
    message: str
    detail: str
    reported: bool
    time: float


@contextlib.contextmanager
def _fresh_start(path: list[str]) -> Iterator[None]:
    """What a starting process inherits: the Python path, the lab's threading environment, and no ``__main__``.

    multiprocessing hands the path on before it unpickles anything, so that a rank finds even the lab itself there; it
    would run the parent's main module again in every rank; ranks need none of it, and a script without a
    ``__main__`` guard would start itself over and over.
    """
    real, before, here = sys.modules["__main__"], dict(os.environ), sys.path
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path = path
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.update({name: value for name, value in THREADING.items() if name not in os.environ})
    try:
        yield
    finally:
        sys.modules["__main__"], sys.path = real, here
        for name in THREADING.keys() - before.keys():
            os.environ.pop(name, None)


class LocalRank:
    """A rank's process, and its pipe, heartbeat and files in the group's folder."""

    host = ""
    unheard = False

    def __init__(self, job: RankJob, start_method: str) -> None:
        self.job = job
        context = multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            multiprocessing.set_forkserver_preload(list(PRELOAD))
        beat = job.folder / f"rank{job.rank}.beat"
        beat.write_bytes(BEAT.pack(time.monotonic(), 0, 0, b"start"))
        self._beat = Heartbeat(beat)
        self._pipe, theirs = context.Pipe()
        end, self._lifeline = context.Pipe(duplex=False)
        self._error: dict[str, Any] | None = None
        self._stopped_since: float | None = None
        # Set up, so that a start that fails midway can be cleared away like any other.
        self._process: Any = None
        try:
            name = f"ddpm_lab rank {job.rank}"
            self._process = context.Process(target=rank_main, args=(job, theirs, end), name=name)  # type: ignore[attr-defined]
            with _fresh_start(job.tree.path if job.tree else sys.path):
                self._process.start()
            self._started = start_ticks(self._process.pid)
        finally:
            theirs.close()
            end.close()

    @property
    def pid(self) -> int:
        """The process's number."""
        return int(self._process.pid)

    @property
    def ears(self) -> list[Any]:
        """What becomes ready when the rank speaks or ends, for ``multiprocessing.connection.wait``."""
        return [self._pipe, self._process.sentinel]

    def tell(self, command: str, arguments: dict[str, Any]) -> None:
        """Give the rank a command. One that died is found when it is listened to, with its reason."""
        self._beat.touch()
        with contextlib.suppress(OSError):
            self._pipe.send((command, arguments))

    def hear(self) -> str | None:
        """The word that the rank has said, ``LEFT`` if it will say no more, None if it is still at it."""
        with contextlib.suppress(EOFError, OSError):
            if not self._pipe.poll():
                return None if self._process.is_alive() or self._pipe.poll() else LEFT
            said = self._pipe.recv()
            if isinstance(said, dict):
                self._error = said
                return LEFT
            return str(said)
        self._process.join(1)  # for its exit code
        return LEFT

    def life(self) -> Life:
        """The rank's last sign of life."""
        beat, now = self._beat.read(), time.monotonic()
        if not _stopped(self.pid):
            self._stopped_since = None
        elif self._stopped_since is None:
            self._stopped_since = now
        frozen = 0.0 if self._stopped_since is None else now - self._stopped_since
        return Life(now - beat.seconds, beat.steps, beat.marks, beat.phase, frozen)

    def ending(self) -> Ending | None:
        """How the rank ended; None of one that lives, or left in order."""
        if self._error is None:
            with contextlib.suppress(EOFError, OSError):
                while self._error is None and self._pipe.poll():
                    said = self._pipe.recv()
                    self._error = said if isinstance(said, dict) else None
        if self._error:
            return Ending(
                self._error["status"], self._error["message"], self._error["traceback"], True, self._error["time"]
            )
        code = self._process.exitcode
        if not code:
            return None
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return Ending("crashed", how, self.log(), False, time.monotonic())

    def report(self, name: str) -> dict[str, Any]:
        """What the rank wrote under ``name``."""
        found: dict[str, Any] = json.loads(self.path(name).read_text())
        return found

    def path(self, name: str) -> Path:
        """The file of a report."""
        return self.job.folder / f"rank{self.job.rank}.{name}.json"

    def log(self) -> str:
        """The end of what the rank printed."""
        with contextlib.suppress(OSError):
            return (self.job.folder / f"rank{self.job.rank}.log").read_text(errors="replace")[-LOG_CHARACTERS:]
        return ""

    def stack(self) -> str:
        """The log with the stacks of the rank's threads as they are now, which it can write unless it is frozen."""
        kill(os.kill, self.pid, self._started, signal.SIGUSR1)
        time.sleep(0.3)  # faulthandler writes them to the log
        return self.log()

    def kill(self) -> None:
        """Kill the rank and its process group."""
        if self._process is not None and (self._process.is_alive() or self._process.exitcode is None):
            kill(os.kill, self.pid, self._started)
            kill(os.killpg, self.pid, self._started)

    def close(self) -> None:
        """See the killed rank off, and whatever it had started."""
        if self._process is not None and self._process.pid is not None:
            self._process.join(10)
            # The leader is gone; what it started may still stand in its process group.
            kill(os.killpg, self.pid, self._started)
            with contextlib.suppress(ValueError):
                self._process.close()
        for end in (self._pipe, self._lifeline):
            end.close()


def _stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger; a rank's own state says so even while it builds."""
    with contextlib.suppress(OSError, IndexError):
        return Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    return False
