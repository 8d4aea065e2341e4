"""What else this machine does: what others take, one measurement at a time, and the machine while a group works.

Numbers of processes stay inside this module.
"""

import contextlib
import errno
import operator
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Self

import psutil

from ddpm_lab.measure.hardware import ask_nvml, cgroup_throttled_seconds, gpu_handle, usable_cores
from ddpm_lab.record import CROWDED_CORES

FREE_SECONDS = 3.0  # how long is looked which cores are free, and again twice as long: a burst passes
MINUTE = 60.0

LOCK_VARIABLE = "DDPM_LAB_MEASURING_LOCK"  # another name of the lock; empty: tests, which measure side by side
_LOOK_SECONDS = 1.0
_holding: list[socket.socket] = []


class CpuClock(NamedTuple):
    """CPU seconds used so far, or between two readings: by this process's own, by anybody on its cores, and stolen.

    None is unknown, as in containers that number their own. Nor is it known what others take where a cgroup's quota
    leaves fewer cores.
    """

    moment: float
    own: float
    busy: float | None
    stolen: float | None
    limited: bool = False

    @classmethod
    def read(cls) -> "CpuClock":
        """Read now. One's own are this process and those that torchrun has started beside it, with all below them."""
        in_job = "TORCHELASTIC_RUN_ID" in os.environ
        own = tree_seconds(psutil.Process(os.getppid()).children() if in_job else [psutil.Process()])
        cores = os.sched_getaffinity(0)
        busy, stolen = _core_seconds(cores) or (None, None)
        limited = usable_cores() < len(cores)  # then most of what is stolen from all of them is stolen from others
        return cls(time.monotonic(), own, busy, None if limited else stolen, limited)

    def until(self, later: "CpuClock") -> "CpuClock":
        """What was used from this reading to a later one; its ``moment`` is how many seconds that took."""
        busy, stolen = difference(self.busy, later.busy), difference(self.stolen, later.stolen)
        known = later._replace(busy=busy, stolen=stolen, limited=self.limited or later.limited)
        return known._replace(moment=later.moment - self.moment, own=later.own - self.own)

    @property
    def others_cores(self) -> float | None:
        """Between two readings: how many cores others kept busy."""
        return None if self.busy is None or self.limited else max(0.0, (self.busy - self.own) / self.moment)


def tree_seconds(heads: Iterable[psutil.Process]) -> float:
    """CPU seconds that processes have used so far, with all their descendants."""
    used = 0.0
    for head in heads:
        with contextlib.suppress(psutil.Error):
            for member in (head, *head.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    # User and system, its own and of its children that have ended: they were no strangers either.
                    used += sum(member.cpu_times()[:4])
    return used


def difference(before: float | None, after: float | None) -> float | None:
    """``after - before``, or None where one of them is unknown."""
    return None if before is None or after is None else after - before


def _core_seconds(cores: set[int]) -> tuple[float, float] | None:
    """Seconds that ``cores`` were busy and stolen since the machine started; None if one of them is not listed."""
    listed = psutil.cpu_times(percpu=True)
    # With a core switched off, each behind it would be taken for the one before.
    if max(cores) >= len(listed) or f"cpu{len(listed) - 1} " not in Path("/proc/stat").read_text():
        return None
    times = [listed[core] for core in cores]
    return sum(t.user + t.nice + t.system + t.irq + t.softirq for t in times), sum(t.steal for t in times)


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
    if others is not None and others >= CROWDED_CORES:  # less is what any machine does by itself
        others = others_cores(2 * seconds)
    return _left(usable_cores(), others or 0.0)


def fair_cores(free: int) -> int:
    """Cores to train with where so many are free: at least half of all, so that of two trainings neither starves."""
    return max(free, usable_cores() // 2)


def _left(cores: int, taken: float) -> int:
    return max(1, cores - int(taken + 0.5))


class CoreWatch:
    """How many cores other processes leave free from minute to minute."""

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


# One measurement at a time: two that measure at once on a core are both wrong. Whoever measures on one holds its name
# among Linux's abstract sockets: all users share them, without files or permissions, and the kernel lets go of those of
# a process that is killed. Jobs on other cores of a node do not wait for each other.


def side_by_side() -> bool:
    """Whether processes measure at once, as tests do: what others take is then no disturbance, and not looked at."""
    return os.environ.get(LOCK_VARIABLE) == ""


@contextlib.contextmanager
def measuring(say: Callable[[str], None]) -> Iterator[bool]:
    """Hold the cores of this process; True where another one had to end first."""
    if _holding or side_by_side():
        yield False
        return
    name, waited = os.environ.get(LOCK_VARIABLE, "ddpm_lab-measuring"), False
    try:
        for core in sorted(os.sched_getaffinity(0)):  # in a fixed order, to avoid deadlocks
            _holding.append(lock := socket.socket(socket.AF_UNIX))
            while _is_taken(lock, f"\0{name}-{core}"):
                if not waited:
                    say("another process measures on this machine: waiting until it ends")
                waited = True
                time.sleep(_LOOK_SECONDS)
        yield waited
    finally:
        while _holding:
            _holding.pop().close()


def _is_taken(lock: socket.socket, name: str) -> bool:
    """Whether another process has a name, which else is the lock's; of a kernel without such names nobody has."""
    try:
        lock.bind(name)
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


# The machine while a group works

FIRST_SECONDS = 0.25  # into a window of 0.4 s, so that a short one has a sample taken while the GPU works
PERIOD_SECONDS = 1.0  # between samples

State = dict[str, float | None]
Fold = Callable[[Iterable[float]], float]


def _all_bits(values: Iterable[float]) -> float:
    return float(reduce(operator.or_, map(int, values)))


_SAMPLED: dict[str, tuple[Fold, Callable[[Any], float], str, tuple[int, ...]]] = {
    "gpu_utilisation_percent": (fmean, lambda rates: float(rates.gpu), "UtilizationRates", ()),
    "gpu_memory_used_bytes": (max, lambda memory: float(memory.used), "MemoryInfo", ()),
    "gpu_clock_mhz": (fmean, int, "ClockInfo", (1,)),  # NVML_CLOCK_SM
    "gpu_clock_min_mhz": (min, int, "ClockInfo", (1,)),
    "gpu_memory_clock_mhz": (fmean, int, "ClockInfo", (2,)),  # NVML_CLOCK_MEM
    "gpu_temperature_celsius": (max, int, "Temperature", (0,)),  # NVML_TEMPERATURE_GPU
    "gpu_throttle_reasons": (_all_bits, int, "CurrentClocksEventReasons", ()),
    "gpu_power_watts": (fmean, lambda milliwatts: milliwatts / 1e3, "PowerUsage", ()),
}
"""How the samples of a GPU become one value, how a sample is made of what NVML says, and what NVML is asked for."""
_OTHERS: dict[str, Fold] = {
    "gpu_others": sum,  # processes
    "gpu_others_bytes": sum,
    "gpu_others_changed_bytes": sum,  # how far their memory grew or shrank meanwhile
    "gpu_others_percent": max,  # of the multiprocessors' time
}
_OF_GROUP = {name: fold for name, (fold, *_) in _SAMPLED.items()}
_OF_GROUP |= {"gpu_power_watts": sum, "gpu_energy_joules": sum, **_OTHERS}
"""How the values of a group's GPUs become one."""


class Watch:
    """The machine while a group works: a context, entered while the group sleeps and left when its work is done.

    ``others_cores`` is how many cores other processes kept busy meanwhile, ``stolen_seconds`` what the hypervisor took.
    ``state`` holds ``watched_seconds`` (settle steps included), ``cpu_utilisation_percent`` of the cores this process
    may use, ``ram_used_bytes`` of the machine, ``cgroup_throttled_seconds``, and what ``_OF_GROUP`` names. None is
    unknown. ``gpus`` are the rank's process id by UUID.
    """

    def __init__(self, gpus: Mapping[str, int]) -> None:
        self.others_cores: float | None = None
        self.stolen_seconds: float | None = None
        self.state: State = {}
        self._gpus = [_Gpu(uuid, pid) for uuid, pid in gpus.items()]
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="ddpm_lab machine state", daemon=True)

    def __enter__(self) -> Self:
        self._throttled, self._clock = cgroup_throttled_seconds(), CpuClock.read()
        for gpu in self._gpus:
            gpu.begin()
        if any(gpu.known for gpu in self._gpus):
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for gpu in self._gpus:
            gpu.end()
        use = self._clock.until(CpuClock.read())
        if self._sampler.ident is not None:
            self._sampler.join()
        self.others_cores, self.stolen_seconds = use.others_cores, use.stolen
        memory, cores = psutil.virtual_memory(), len(os.sched_getaffinity(0))
        state: State = {
            "watched_seconds": use.moment,
            "cpu_utilisation_percent": None if use.busy is None else min(100.0, 100 * use.busy / use.moment / cores),
            "ram_used_bytes": memory.total - memory.available,
            "cgroup_throttled_seconds": difference(self._throttled, cgroup_throttled_seconds()),
        }
        if self._gpus:
            own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
            found = [gpu.state(own) for gpu in self._gpus]
            state |= {name: folded(fold, [gpu[name] for gpu in found]) for name, fold in _OF_GROUP.items()}
        self.state = {name: None if value is None else round(value, 3) for name, value in state.items()}

    def _sample(self) -> None:
        pause = FIRST_SECONDS
        while not self._stop.wait(pause):
            for gpu in self._gpus:
                gpu.sample()
            pause = PERIOD_SECONDS


def folded(fold: Fold, values: Iterable[float | None]) -> float | None:
    """``values`` as one; unknown if there is none, or one of them is unknown."""
    found = list(values)
    known = [value for value in found if value is not None]
    return fold(known) if known and len(known) == len(found) else None


class _Gpu:
    """One GPU of a group, as NVML tells of it while the group works."""

    def __init__(self, uuid: str, pid: int) -> None:
        self._pid, self._handle = pid, gpu_handle(uuid)
        self.known = self._handle is not None
        self._samples: dict[str, list[float]] = {name: [] for name in _SAMPLED}
        self._processes: list[dict[int, int | None] | None] = []  # bytes of GPU memory by process, of each look

    def _read(self, name: str, *arguments: Any) -> Any:
        return ask_nvml(f"nvmlDeviceGet{name}", self._handle, *arguments)

    def _look_at_processes(self) -> None:
        found = self._read("ComputeRunningProcesses")
        self._processes.append(None if found is None else {p.pid: p.usedGpuMemory for p in found})

    def begin(self) -> None:
        """Read what is compared with its value at the end."""
        self._look_at_processes()
        self._since = time.time()
        self._energy, self._begun = self._read("TotalEnergyConsumption"), time.monotonic()

    def sample(self) -> None:
        """Read what holds at this moment."""
        for name, (_, value, question, arguments) in _SAMPLED.items():
            if (said := self._read(question, *arguments)) is not None:
                self._samples[name].append(value(said))
        self._look_at_processes()

    def end(self) -> None:
        """Read again what was read at the beginning, as soon as the work is done; a sample too if there is none."""
        self._energy = difference(self._energy, self._read("TotalEnergyConsumption"))
        self._seconds = time.monotonic() - self._begun
        if len(self._processes) < 2:
            self.sample()
        self._look_at_processes()

    def state(self, own: set[int]) -> State:
        """What was found of this GPU; ``own`` are process ids that are no others."""
        state: State = {name: fold(v) if (v := self._samples[name]) else None for name, (fold, *_) in _SAMPLED.items()}
        joules = None if self._energy is None else self._energy / 1e3
        state |= {"gpu_energy_joules": joules} | ({} if joules is None else {"gpu_power_watts": joules / self._seconds})
        return state | self._others(own)

    def _others(self, own: set[int]) -> State:
        """What processes that are not one's ``own`` had of the GPU."""
        listed = [processes for processes in self._processes if processes is not None]
        # NVML numbers processes as the host does. Where it does not list the rank itself, as in a container with
        # numbers of its own, nobody can say which of the listed are others.
        if len(listed) < len(self._processes) or any(self._pid not in processes for processes in listed):
            return dict.fromkeys(_OTHERS)
        others = [{pid: used for pid, used in processes.items() if pid not in own} for processes in listed]
        held = [folded(sum, found.values()) if found else 0 for found in others]
        return {
            "gpu_others": max(map(len, others)),
            "gpu_others_bytes": folded(max, held),
            "gpu_others_changed_bytes": folded(lambda values: max(values) - min(values), held),
            "gpu_others_percent": self._taken(own) if any(others) else 0,
        }

    def _taken(self, own: set[int]) -> float | None:
        """Percent of the multiprocessors' time that others took; unknown where no process's share is known."""
        shares: dict[int, list[float]] = defaultdict(list)
        for sample in self._read("ProcessUtilization", int(self._since * 1e6)) or ():
            shares[sample.pid].append(float(sample.smUtil))
        return min(100.0, sum(fmean(found) for pid, found in shares.items() if pid not in own)) if shares else None
