"""A group that is a command line of somebody else's: a training script as it stands, which takes its turns unchanged.

The command runs below a guard, which ends all of it. Each of its processes in which an optimizer steps calls back over
a socket (``hook.py``), and sleeps there while others are measured; then all of them are stopped, with threads and
processes of their own that would load data ahead for nothing. Of several ranks all make the same steps in a window, so
none is left waiting in a collective, and a window lasts from the first one's start to the last one's end.
"""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import psutil

from ddpm_lab.config import RunConfig
from ddpm_lab.declared import parsed
from ddpm_lab.measure.code_version import Tree
from ddpm_lab.measure.group import Group, GroupFailed
from ddpm_lab.measure.hardware import oom_kills
from ddpm_lab.measure.hook import opened
from ddpm_lab.measure.others import folded
from ddpm_lab.measure.process import (
    SPIN_COUNT,
    SPIN_VARIABLE,
    Ending,
    Life,
    end_guarded,
    guarded,
    host_id,
    killed_for_memory,
    tail,
    tells_of_memory,
    temporary,
)

HOOK = Path(__file__).with_name("hook.py")
LAUNCHERS = re.compile(
    r"^(?:[^#\n]|(?<!\s)#)*?(?<![\w.-])(?:torchrun|accelerate[-\s]+launch|deepspeed|mpirun|srun|taskset|numactl)(?![\w./-])"
    r"|^[^#\n]*(?:torch\.distributed\.(?:run|launch)|accelerate\.commands\.launch|deepspeed\.launcher)",
    re.MULTILINE,
)
"""What starts several ranks, and says by itself how many threads each has; or says on which cores one is."""
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647"}
"""Have the C library keep what a step frees: a small step's time then scatters a sixth as much between processes."""
LAST_LINES, LAST_CHARACTERS = 3, 400
SIGNALLED = 128  # and the signal is the exit code of a shell whose command was killed
MESSAGE_SECONDS = 5  # after which the rest of a message never comes
EXIT_SECONDS = 3.0  # that a command has to end by itself once one of its ranks has


class _Peer:
    """A process in which an optimizer steps, as a group knows its ranks."""

    def __init__(self, link: connection.Connection) -> None:
        self._link, self.ears = link, [link]
        self.report: dict[str, Any] = {}
        self.ending: Ending | None = None
        self.steps = 1
        self._heard = time.monotonic()

    def hear(self) -> bool:
        """Whether there is an answer; what else is said is nothing but a sign of life. At its end it has an ending."""
        said = {}
        try:
            if self._link.poll():
                said = parsed(self._link.recv_bytes())
                self._heard = time.monotonic()
        except (EOFError, OSError, ValueError):  # or it is none of ours
            self.ending = Ending("crashed", "ended", "", time.monotonic())
        self.report = said or self.report
        return bool(said)

    def tell(self, command: str, arguments: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        with contextlib.suppress(OSError):
            self._link.send_bytes(json.dumps({"command": command, **arguments}).encode())

    def life(self) -> Life:
        return Life(time.monotonic() - self._heard, self.steps, 0, "")

    def kill(self) -> None:
        """Its guard does."""

    def close(self) -> None:
        self._link.close()


def files_named(command: str, folder: Path) -> list[Path]:
    """The files that a command line names."""
    words: list[str] = []
    with contextlib.suppress(ValueError):  # the shell will say what is wrong with it
        words = [word.rpartition("=")[2] for word in shlex.split(command)]
    return [folder / word for word in words if os.path.isfile(folder / word)]  # noqa: PTH113 - any word, however long


def texts_of(command: str, folder: Path) -> list[str]:
    """A command, and the texts of the shell scripts that it names."""
    named = [file for file in files_named(command, folder) if file.suffix != ".py" and file.stat().st_size < 100_000]
    return [command, *(file.read_text(errors="replace") for file in named)]


def sets_threads(command: str, folder: Path) -> bool:
    """Whether a launcher of ranks, or a choice of cores, is in a command, or in a shell script that it names."""
    return any(map(LAUNCHERS.search, texts_of(command, folder)))


class CommandGroup(Group):
    """The processes of one command line; of several ranks it reports as if they were one, the slowest.

    It runs in the working folder, or in the first one of a ``tree``. What it prints is appended to ``log``. ``read``
    has the files of settings that it opened before its first step. Raises GroupFailed where it ends, or ``limits`` are
    over, before a step of an optimizer.
    """

    _ranks: list[Any]  # each a _Peer
    _process: subprocess.Popen[bytes] | None = None

    def _start(self, threads: int, **how: Any) -> list[dict[str, Any]]:
        self.log: Path = how["log"]
        tree: Tree | None = how.get("tree")
        self._optimizer = self.config.option("optimizer", "") or "a torch optimizer"
        self._strangers: list[_Peer] = []  # that have not made a step, or are not to be told to
        self._oom_kills = oom_kills()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        shutil.copyfile(HOOK, self.folder / "sitecustomize.py")
        self._listener.bind(str(self.folder / "turns"))
        self._listener.listen(256)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._printed_before = output.tell()
            folder = tree.folders[0] if tree else None
            environment = self._environment(self.config, threads, Path(folder or ""))
            self._process = guarded(["sh", "-c", self.config.command], output, cwd=folder, env=environment)
        return self._first_steps()

    def _environment(self, config: RunConfig, threads: int, folder: Path) -> dict[str, str]:
        path = filter(None, (str(self.folder), os.environ.get("PYTHONPATH")))
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        found |= {"DDPM_LAB_TURNS": str(self.folder), "DDPM_LAB_OPTIMIZER": config.option("optimizer", "")}
        if config.option("as_is", False):
            return found
        found |= temporary(self.folder)
        if not sets_threads(config.command, folder):
            found["OMP_NUM_THREADS"] = str(threads)
        return {**KEPT, SPIN_VARIABLE: SPIN_COUNT, **found}

    def _first_steps(self) -> list[dict[str, Any]]:
        """Wait until every rank has made its first step."""
        found: dict[int, _Peer] = {}
        limit = self.limits.build_seconds
        for ready, awake in self._looks("before its first step", list):
            for peer in [peer for peer in self._strangers if peer.report]:
                if found.setdefault(peer.report["rank"], peer) is peer:  # else it sleeps from here on
                    self._strangers.remove(peer)
            if found and len(found) >= found[min(found)].report["world_size"]:
                break
            if not ready and self._process and self._process.poll() is not None:
                self._fail()
            if awake > limit:
                more = (
                    "it has to be Python, started without -I, -E or -S, that imports torch (where it compiles, 2.3 or "
                    "newer), and keeps PYTHONPATH"
                )
                if self.config.option("optimizer", ""):
                    more += f"; {self._optimizer} has to be the class of an optimizer that steps"
                how = f"no step of {self._optimizer} in {self.limits.describe(limit)}: {more}{self._last()}"
                raise GroupFailed("timed out", how)
        self._ranks = [found[rank] for rank in sorted(found)]
        self._pid = self._ranks[0].report["pid"]
        self.read = opened(self.folder, "r")
        return []

    @property
    def pids(self) -> list[int]:
        """The process id of the first rank."""
        return [self._pid]

    def _looks(self, stage: str, ears: Callable[[], list[Any]]) -> Iterator[tuple[list[Any], float]]:
        """Hear those too that come and make a step, which none may once all ranks are known."""

        def all_ears() -> list[Any]:
            return [self._listener, *ears(), *(ear for peer in self._strangers for ear in peer.ears)]

        for ready, awake in super()._looks(stage, all_ears):
            if self._listener in ready:
                caller = self._listener.accept()[0]
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", MESSAGE_SECONDS, 0))
                self._strangers.append(_Peer(connection.Connection(caller.detach())))
            for peer in [*self._strangers]:
                if (peer.hear() or peer.report) and self._ranks:  # it would sleep while the others train
                    several = "several of its processes make steps, of which torch.distributed knows nothing"
                    raise GroupFailed("crashed", f"{several}: only one could be measured{self._last()}")
                if peer.ending:
                    self._strangers.remove(peer)
                    peer.close()
            if self._process and (self._process.poll() or 0) < 0:  # of the command itself its guard tells
                self._fail()
            yield ready, awake

    def window(self, *, settle: int, steps: int, limit: float, stage: str) -> list[dict[str, Any]]:
        """Have every rank make ``settle`` untimed and ``steps`` timed steps; ``limit`` is the longest silence."""
        reports = self.ask("window", limit, stage, settle=settle, steps=steps)
        self._pause()
        for peer in self._ranks:
            peer.steps += settle + steps
        start = min(report["start"] for report in reports)
        ends = zip(*([r["start"] + end for end in r["step_ends"]] for r in reports), strict=True)
        skipped = max(report["skipped"] for report in reports)
        memory = {kind: folded(max, [r["memory"][kind] for r in reports]) for kind in reports[0]["memory"]}
        window: dict[str, Any] = {"host": host_id(), "start": start, "end": max(report["end"] for report in reports)}
        window |= {"step_ends": [max(moments) - start for moments in ends], "losses": [0.0] * steps}
        window |= {"state": {"skipped_steps": float(skipped)} if skipped else {}}
        return [{**window, "data_seconds": 0.0, "memory": memory}]

    def witness(self) -> list[dict[str, Any]]:
        """What the first rank says of itself; ``files`` then has those of its modules that are in no library."""
        seen = super().witness()[0]
        self.files: list[str] = seen.pop("files")
        return [{**seen, "rank": 0, "host": host_id(), "steps": self._ranks[0].steps}]

    def finish(self) -> list[dict[str, Any]]:
        """End the command, and return one summary, with the most memory of a rank."""
        seen = self.witness()[0]
        said = super().finish()
        peaks = {name: max((s[name] for s in said if s[name] is not None), default=None) for name in said[0]}
        fields = {name: seen[name] for name in ("rank", "device", "device_uuid", "threads")}
        return [{**fields, **peaks, "images": None, "indices_sha256": ""}]

    def _pause(self) -> None:
        assert self._process is not None
        with contextlib.suppress(psutil.Error):  # the guard was killed
            self._paused.stop(psutil.Process(self._process.pid).children())  # it goes on itself

    def _silent(self, behind: dict[int, Life], limit: float) -> NoReturn:
        del behind  # they wait for each other
        which = self.config.option("optimizer", "") or "the first optimizer"
        silent = f"made no step of {which} for {limit:.0f} s while {self._stage}"
        raise GroupFailed("timed out", f"{silent}{self._last()}")

    def _fail(self) -> NoReturn:
        """Say how the command ended. Raises GroupFailed."""
        steps = self._ranks[0].steps if self._ranks else 0
        where = f"after {steps} steps or more, while {self._stage}" if steps else f"before a step of {self._optimizer}"
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(EXIT_SECONDS)
        code = self._process.returncode
        how = "one of its ranks ended" if code is None else f"ended with exit code {code}"
        if code and code < 0:
            how = f"its guard, a process of the lab, was killed by {signal.Signals(-code).name}"
        with contextlib.suppress(ValueError):
            how = f"was killed by {signal.Signals((code or 0) - SIGNALLED).name}"
        printed = self._printed()
        advice = ": give it more steps or epochs" if steps and not code and "Traceback" not in printed else ""
        if killed := killed_for_memory(f"{how} {printed}", self._oom_kills):
            how += " for want of memory"
        status = "oom" if killed or tells_of_memory(printed) else "crashed"
        raise GroupFailed(status, f"{how} {where}{advice}{self._last()}", printed)

    def _logs(self) -> Iterable[Path]:
        return [self.log]

    def _printed(self) -> str:
        return tail(self.log, self._printed_before)

    def _last(self) -> str:
        """The last lines that it printed, for the end of a sentence."""
        lines = [line.strip() for line in self._printed().splitlines() if line.strip()]
        return f"; it printed last: {' / '.join(lines[-LAST_LINES:])[-LAST_CHARACTERS:]}" if lines else ""

    def kill(self) -> None:
        """Kill every process of the command, and remove the folder."""
        if self._process is not None:
            end_guarded(self._process)
            self._paused.kill()
            self._process = None
        for peer in self._strangers:
            peer.close()
        self._listener.close()
        super().kill()
