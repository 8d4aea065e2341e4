"""What the machine does while a group works: read by the parent before, after, and of a GPU about once a second.

Nothing here runs in the process that is timed, and without a GPU nothing runs at all while it is timed. Numbers of
processes stay inside this module: a record holds only how many others there were and what they took.
"""

from __future__ import annotations

import itertools
import operator
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from statistics import fmean
from typing import Any

import psutil

from ddpm_lab.measure.hardware import CpuClock, ask_nvml, cgroup_throttled_seconds, difference, gpu_handle

FIRST_SECONDS = 0.25
"""Into a window of 0.4 s, so that a short one has a sample taken while the GPU works."""
PERIOD_SECONDS = 1.0
UTILISATION_SECONDS = 5.0
"""Between two samples of the utilisation of a long run."""

State = dict[str, float | None]
Numbers = Iterable[float]


def _bits(values: Numbers) -> float:
    return float(reduce(operator.or_, map(int, values)))


_FOLDED: dict[str, tuple[str, Callable[[Numbers], float], Callable[[Numbers], float]]] = {
    "gpu_utilisation_percent": ("utilisation", fmean, fmean),
    "gpu_memory_used_bytes": ("memory", max, max),
    "gpu_clock_mhz": ("clock", fmean, fmean),
    "gpu_clock_min_mhz": ("clock", min, min),
    "gpu_memory_clock_mhz": ("memory_clock", fmean, fmean),
    "gpu_temperature_celsius": ("temperature", max, max),
    "gpu_throttle_reasons": ("reasons", _bits, _bits),
}
"""Name in the record: what a sample calls it, how the samples of a GPU become one value, and how GPUs do."""


_OTHERS: dict[str, Callable[[Numbers], float]] = {
    "gpu_others": sum,
    "gpu_others_bytes": sum,
    "gpu_others_changed_bytes": sum,
    "gpu_others_percent": max,
}
"""What other processes took, and how the GPUs of a group become one value."""


class Watch:
    """The machine while a group works: a context, entered while the group sleeps and left when its work is done.

    ``others_cores`` is how many cores other processes kept busy meanwhile, ``stolen_seconds`` what the hypervisor took.
    ``state`` holds ``watched_seconds`` (settle steps included), ``cpu_utilisation_percent`` of the cores this process
    may use, ``ram_used_bytes`` of the machine, ``cgroup_throttled_seconds``, and for the group's GPUs
    ``gpu_utilisation_percent``, ``gpu_memory_used_bytes``, ``gpu_clock_mhz``, ``gpu_clock_min_mhz``,
    ``gpu_memory_clock_mhz``, ``gpu_temperature_celsius`` (the hottest), ``gpu_throttle_reasons`` (the bits that NVML
    documents as nvmlClocksThrottleReason), ``gpu_power_watts`` and ``gpu_energy_joules`` (all of them together), and of
    other processes on them ``gpu_others`` (how many), ``gpu_others_bytes``, ``gpu_others_changed_bytes`` (how far their
    memory grew or shrank meanwhile) and ``gpu_others_percent`` (of the multiprocessors' time). None is unknown.

    Args:
        gpus: UUID of each GPU that the group uses, and the process id of the rank on it.
        relatives: other processes of this job on this host, which are no strangers, and nor are their descendants.
    """

    def __init__(self, gpus: Mapping[str, int], relatives: Sequence[int] = ()) -> None:
        self.others_cores: float | None = None
        self.stolen_seconds: float | None = None
        self.state: State = {}
        self._gpus = [_Gpu(uuid, pid) for uuid, pid in gpus.items()]
        self._relatives = relatives
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None

    def __enter__(self) -> Watch:
        self._throttled = cgroup_throttled_seconds()
        self._clock, self._begun = CpuClock.read(self._relatives), time.monotonic()
        for gpu in self._gpus:
            gpu.begin()
        if any(gpu.known for gpu in self._gpus):
            self._sampler = threading.Thread(target=self._sample, name="ddpm_lab machine state", daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for gpu in self._gpus:
            gpu.end()
        seconds = time.monotonic() - self._begun
        clock, throttled = CpuClock.read(self._relatives), cgroup_throttled_seconds()
        if self._sampler is not None:
            self._sampler.join()
        self.others_cores, self.stolen_seconds = self._clock.others_cores(clock, seconds), self._clock.stolen(clock)
        busy, memory = self._clock.busy(clock), psutil.virtual_memory()
        share = None if busy is None else busy / seconds / len(os.sched_getaffinity(0))
        state: State = {
            "watched_seconds": seconds,
            "cpu_utilisation_percent": None if share is None else min(100.0, 100 * share),
            "ram_used_bytes": memory.total - memory.available,
            "cgroup_throttled_seconds": difference(self._throttled, throttled),
            **(_gpu_state(self._gpus) if self._gpus else {}),
        }
        self.state = {name: None if value is None else round(value, 3) for name, value in state.items()}

    def _sample(self) -> None:
        for pause in itertools.chain([FIRST_SECONDS], itertools.repeat(PERIOD_SECONDS)):
            if self._stop.wait(pause):
                return
            for gpu in self._gpus:
                gpu.sample()


def _over(values: Iterable[float | None], fold: Callable[[Numbers], float], *, whole: bool = True) -> float | None:
    """``values`` as one; unknown if none is known or, where it takes the ``whole`` of them, if one is not."""
    found = list(values)
    known = [value for value in found if value is not None]
    return fold(known) if known and (not whole or len(known) == len(found)) else None


def _gpu_state(gpus: list[_Gpu]) -> State:
    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    others = [gpu.others(own) for gpu in gpus]
    state: State = {
        name: _over([_over([s[source] for s in gpu.samples], within, whole=False) for gpu in gpus], across)
        for name, (source, within, across) in _FOLDED.items()
    }
    state["gpu_power_watts"] = _over([gpu.watts for gpu in gpus], sum)
    state["gpu_energy_joules"] = _over([gpu.joules for gpu in gpus], sum)
    return state | {name: _over([o[name] for o in others], fold) for name, fold in _OTHERS.items()}


class _Gpu:
    """One GPU of a group, as NVML tells of it while the group works."""

    def __init__(self, uuid: str, pid: int) -> None:
        self.pid, self._handle = pid, gpu_handle(uuid)
        self.known = self._handle is not None
        self.samples: list[dict[str, float | None]] = []
        self.watts: float | None = None
        self.joules: float | None = None
        self._processes: list[dict[int, int | None] | None] = []

    def _read(self, name: str, *arguments: Any) -> Any:
        return ask_nvml(f"nvmlDeviceGet{name}", self._handle, *arguments)

    def begin(self) -> None:
        """Read what is compared with its value at the end."""
        self._processes.append(self._running())
        self._since = time.time()
        self._energy, self._begun = self._read("TotalEnergyConsumption"), time.monotonic()

    def sample(self) -> None:
        """Read what holds at this moment."""
        utilisation, memory = self._read("UtilizationRates"), self._read("MemoryInfo")
        reasons, milliwatts = self._read("CurrentClocksEventReasons"), self._read("PowerUsage")
        self.samples.append(
            {
                "utilisation": None if utilisation is None else float(utilisation.gpu),
                "memory": None if memory is None else float(memory.used),
                "clock": self._read("ClockInfo", 1),  # NVML_CLOCK_SM
                "memory_clock": self._read("ClockInfo", 2),  # NVML_CLOCK_MEM
                "temperature": self._read("Temperature", 0),  # NVML_TEMPERATURE_GPU
                # The older name of the same.
                "reasons": self._read("CurrentClocksThrottleReasons") if reasons is None else reasons,
                "power": None if milliwatts is None else milliwatts / 1e3,
            }
        )
        self._processes.append(self._running())

    def end(self) -> None:
        """Read again what was read at the beginning, as soon as the work is done; a sample too if there is none."""
        millijoules, now = difference(self._energy, self._read("TotalEnergyConsumption")), time.monotonic()
        if not self.samples:
            self.sample()
        self.joules = None if millijoules is None else millijoules / 1e3
        watts = _over([s["power"] for s in self.samples], fmean, whole=False)
        self.watts = watts if self.joules is None else self.joules / (now - self._begun)

    def others(self, own: set[int]) -> State:
        """What processes that are not one's ``own`` had of the GPU."""
        self._processes.append(self._running())
        listed = [processes for processes in self._processes if processes is not None]
        # NVML numbers processes as the host does. Where it does not list the rank itself, as in a container with
        # numbers of its own, nobody can say which of the listed are others.
        if len(listed) < len(self._processes) or any(self.pid not in processes for processes in listed):
            return dict.fromkeys(_OTHERS)
        others = [{pid: used for pid, used in processes.items() if pid not in own} for processes in listed]
        held = [_over(found.values(), sum) if found else 0 for found in others]
        return {
            "gpu_others": max(map(len, others)),
            "gpu_others_bytes": _over(held, max),
            "gpu_others_changed_bytes": _over(held, lambda values: max(values) - min(values)),
            "gpu_others_percent": self._taken(own) if any(others) else 0,
        }

    def _taken(self, own: set[int]) -> float | None:
        """Percent of the multiprocessors' time that others took; unknown where no process's share is known."""
        shares: dict[int, list[float]] = {}
        for sample in self._read("ProcessUtilization", int(self._since * 1e6)) or ():
            shares.setdefault(sample.pid, []).append(float(sample.smUtil))
        return min(100.0, sum(fmean(found) for pid, found in shares.items() if pid not in own)) if shares else None

    def _running(self) -> dict[int, int | None] | None:
        """Bytes of GPU memory by process."""
        processes = self._read("ComputeRunningProcesses")
        return None if processes is None else {p.pid: p.usedGpuMemory for p in processes}


class Utilisation:
    """The mean utilisation of GPUs over a run of any length: a context, whose ``percent`` is None where unknown."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self._handles = [handle for uuid in uuids if (handle := gpu_handle(uuid)) is not None]
        self._means: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="ddpm_lab utilisation", daemon=True)

    def __enter__(self) -> Utilisation:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def percent(self) -> float | None:
        """Mean over samples and GPUs so far."""
        return fmean(self._means) if self._means else None

    def _sample(self) -> None:
        while self._handles and not self._stop.wait(UTILISATION_SECONDS):
            read = [ask_nvml("nvmlDeviceGetUtilizationRates", handle) for handle in self._handles]
            if known := [float(rates.gpu) for rates in read if rates is not None]:
                self._means.append(fmean(known))
