"""Other processes on these cores: what they take, waiting until they take less, and one measurement at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.hardware import cgroup_cores, usable_cores
from ddpm_lab.record import CROWDED_CORES

QUIET_SECONDS, SAMPLE_SECONDS = 5.0, 0.2  # how long a set waits for a quiet moment at most, and each look for one takes
QUIET_CORES = 0.25  # less than this is what any machine does by itself
FREE_SECONDS = 3.0  # how long is looked which cores are free, and again twice as long: a burst passes
MINUTE = 60.0

LOCK_VARIABLE = "DDPM_LAB_MEASURING_LOCK"  # another lock file; empty: tests, which measure side by side
_SLOT = 16  # bytes of a core, which hold the process id of whoever measures there
_LOOK_SECONDS = 1.0
_holding = False


class CpuUse(NamedTuple):
    """What was used of these cores between two readings: CPU seconds, and cores by others; None is unknown."""

    seconds: float
    busy: float | None
    stolen: float | None
    others_cores: float | None


class CpuClock(NamedTuple):
    """CPU seconds used so far: by this process's own, and on its cores by anybody and the hypervisor.

    None is unknown, as in containers that number their own. Nor is it known what others take under a cgroup's limit.
    """

    moment: float
    own: float
    busy: float | None
    stolen: float | None
    limited: bool = False

    @classmethod
    def read(cls, relatives: Sequence[int] = ()) -> CpuClock:
        """Read now. One's own are this process and ``relatives``, of the same job, with all their descendants."""
        own = 0.0
        for pid in (os.getpid(), *relatives):
            with contextlib.suppress(psutil.Error):
                head = psutil.Process(pid)
                own += sum(map(_used_seconds, (head, *head.children(recursive=True))))
        busy, stolen = _core_seconds(os.sched_getaffinity(0)) or (None, None)
        return cls(time.monotonic(), own, busy, stolen, cgroup_cores() is not None)

    def until(self, later: CpuClock) -> CpuUse:
        """What was used from this reading to a later one."""
        seconds = later.moment - self.moment
        others: float | None = None
        busy, stolen = difference(self.busy, later.busy), difference(self.stolen, later.stolen)
        if busy is not None and not self.limited and not later.limited:
            others = max(0.0, (busy - (later.own - self.own)) / seconds)
        return CpuUse(seconds, busy, stolen, others)


def difference(before: float | None, after: float | None) -> float | None:
    """``after - before``, or None where one of them is unknown."""
    return None if before is None or after is None else after - before


def _used_seconds(member: psutil.Process) -> float:
    """CPU seconds of a process; children that have ended count with whoever collected them: they were no strangers."""
    with contextlib.suppress(psutil.Error):
        return sum(member.cpu_times()[:4])  # user and system, its own and of its children
    return 0.0


def _core_seconds(cores: set[int]) -> tuple[float, float] | None:
    """Seconds that ``cores`` were busy and stolen since the machine started; None if one of them is not shown."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
        shown = {words[0]: [int(n) for n in words[1:9]] for words in lines if words[0].startswith("cpu")}
        ticks = [sum(column) for column in zip(*(shown[f"cpu{core}"] for core in cores), strict=True)]
        user, nice, system, _idle, _waiting, irq, softirq, steal = (n / os.sysconf("SC_CLK_TCK") for n in ticks)
        return user + nice + system + irq + softirq, steal
    return None


def others_cores(seconds: float) -> float | None:
    """Cores that processes not of this one's family keep busy, from now on for so long; None is unknown."""
    if side_by_side():
        return None
    before = CpuClock.read()
    time.sleep(seconds)
    return before.until(CpuClock.read()).others_cores


def free_cores(seconds: float = FREE_SECONDS) -> int:
    """Usable cores that other processes leave free; a core counts as taken from a half on, and one is always left."""
    others = others_cores(seconds)
    if others is not None and others >= QUIET_CORES:
        others = others_cores(2 * seconds)
    return _left(usable_cores(), others or 0.0)


def fair_cores(free: int) -> int:
    """Cores to train with where so many are free: at least half of all, so that of two trainings neither starves."""
    return max(free, usable_cores() // 2)


def _left(cores: int, taken: float) -> int:
    return max(1, cores - int(taken + 0.5))


class CoreWatch:
    """How many cores other processes leave free, from what they take while one's own work."""

    def __init__(self) -> None:
        self._before: int | None = None
        self._clock = CpuClock.read()

    def free(self) -> int | None:
        """The cores that were free over each of the last two minutes; None where these differ, or it is not known."""
        if time.monotonic() - self._clock.moment < MINUTE:
            return None
        now, before = CpuClock.read(), self._before
        others = None if side_by_side() else self._clock.until(now).others_cores
        self._clock, self._before = now, None if others is None else _left(usable_cores(), others)
        return self._before if self._before == before else None


def await_quiet(config: RunConfig, cores: int, say: Callable[[str], None]) -> None:
    """Wait a little while other processes want the cores of a configuration's ranks, ``cores`` being usable."""
    allowed = cores + CROWDED_CORES - config.rank_threads(cores) * config.node_size
    ends = time.monotonic() + QUIET_SECONDS
    while config.device == "cpu" and not config.oversubscribe and time.monotonic() < ends:
        others = others_cores(SAMPLE_SECONDS)
        if others is None or others < allowed:
            return
        say("waiting for a quiet moment")


# One measurement at a time: two that measure at once on a core are both wrong. Each core that this process may use is a
# range of bytes in one file for each user, so that jobs that share a node on other cores do not wait for each other.
# The kernel lets go of the locks of a process that is killed.


def side_by_side() -> bool:
    """Whether processes measure at once, as tests do: what others take is then no disturbance, and not looked at."""
    return os.environ.get(LOCK_VARIABLE) == ""


@contextlib.contextmanager
def measuring(say: Callable[[str], None]) -> Iterator[bool]:
    """Hold the cores of this process; True where another one, which ``say`` names, had to end first."""
    global _holding  # noqa: PLW0603 - locks of this kind belong to the whole process
    # Not in the home folder, which several machines may share.
    usual = Path(tempfile.gettempdir(), f"ddpm_lab-measuring-{os.getuid()}.lock")
    descriptor = None
    if not _holding:
        with contextlib.suppress(OSError):
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(os.environ.get(LOCK_VARIABLE, usual), flags, 0o600)
    if descriptor is None:
        yield False
        return
    try:
        waited = _take(descriptor, say)
        _holding = True
        yield waited
    finally:
        _holding = False
        os.close(descriptor)  # lets go of the locks


def _take(descriptor: int, say: Callable[[str], None]) -> bool:
    """Lock the cores, in one order, so that two that want the same ones never wait in a circle."""
    waited = False
    for start in (core * _SLOT for core in sorted(os.sched_getaffinity(0))):
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, _SLOT, start)
                break
            except (BlockingIOError, PermissionError):
                if not waited:
                    waited = True
                    who = os.pread(descriptor, _SLOT, start).strip(b"\0 ").decode(errors="replace")
                    say(f"process {who or 'unknown'} measures on this machine: waiting until it ends")
                time.sleep(_LOOK_SECONDS)
            except OSError:
                return waited  # a file system without locks
        with contextlib.suppress(OSError):  # a full disk: then nobody is told who it is
            os.pwrite(descriptor, str(os.getpid()).encode().ljust(_SLOT), start)
    return waited
