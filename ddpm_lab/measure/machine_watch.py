"""What the machine does while a group works, read by the parent; numbers of processes stay inside this module."""

from __future__ import annotations

import itertools
import operator
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from statistics import fmean
from typing import Any

import psutil

from ddpm_lab.measure.hardware import ask_nvml, cgroup_throttled_seconds, gpu_handle
from ddpm_lab.measure.others import CpuClock, difference

FIRST_SECONDS = 0.25  # into a window of 0.4 s, so that a short one has a sample taken while the GPU works
PERIOD_SECONDS, LATER_SECONDS, EARLY_SAMPLES = 1.0, 5.0, 120  # between samples, later, and after how many

State = dict[str, float | None]
Fold = Callable[[Iterable[float]], float]


_SAMPLED: dict[str, Fold] = {
    "gpu_utilisation_percent": fmean,
    "gpu_memory_used_bytes": max,
    "gpu_clock_mhz": fmean,
    "gpu_clock_min_mhz": min,
    "gpu_memory_clock_mhz": fmean,
    "gpu_temperature_celsius": max,
    "gpu_throttle_reasons": lambda values: float(reduce(operator.or_, map(int, values))),  # NVML's bits
}
"""How the samples of a GPU become one value, and those of a group's GPUs."""
_OTHERS: dict[str, Fold] = {
    "gpu_others": sum,  # processes
    "gpu_others_bytes": sum,
    "gpu_others_changed_bytes": sum,  # how far their memory grew or shrank meanwhile
    "gpu_others_percent": max,  # of the multiprocessors' time
}
_OF_GROUP: dict[str, Fold] = {**_SAMPLED, "gpu_power_watts": sum, "gpu_energy_joules": sum, **_OTHERS}
"""How the values of a group's GPUs become one."""


class Watch:
    """The machine while a group works: a context, entered while the group sleeps and left when its work is done.

    ``others_cores`` is how many cores other processes kept busy meanwhile, ``stolen_seconds`` what the hypervisor took.
    ``state`` holds ``watched_seconds`` (settle steps included), ``cpu_utilisation_percent`` of the cores this process
    may use, ``ram_used_bytes`` of the machine, ``cgroup_throttled_seconds``, and what ``_OF_GROUP`` names. None is
    unknown. ``gpus`` are the rank's process id by UUID; ``relatives`` other processes of this job on this host.
    """

    def __init__(self, gpus: Mapping[str, int], relatives: Sequence[int] = ()) -> None:
        self.others_cores: float | None = None
        self.stolen_seconds: float | None = None
        self.state: State = {}
        self._gpus = [_Gpu(uuid, pid) for uuid, pid in gpus.items()]
        self._relatives = relatives
        self._stop = threading.Event()
        self._sampler = threading.Thread(target=self._sample, name="ddpm_lab machine state", daemon=True)

    def __enter__(self) -> Watch:
        self._throttled, self._clock = cgroup_throttled_seconds(), CpuClock.read(self._relatives)
        for gpu in self._gpus:
            gpu.begin()
        if any(gpu.known for gpu in self._gpus):
            self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for gpu in self._gpus:
            gpu.end()
        use = self._clock.until(CpuClock.read(self._relatives))
        if self._sampler.ident is not None:
            self._sampler.join()
        self.others_cores, self.stolen_seconds = use.others_cores, use.stolen
        share, memory = None, psutil.virtual_memory()
        if use.busy is not None:
            share = min(100.0, 100 * use.busy / use.seconds / len(os.sched_getaffinity(0)))
        throttled = difference(self._throttled, cgroup_throttled_seconds())
        state: State = {"watched_seconds": use.seconds, "cpu_utilisation_percent": share}
        state |= {"ram_used_bytes": memory.total - memory.available, "cgroup_throttled_seconds": throttled}
        if self._gpus:
            own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
            found = [gpu.state(own) for gpu in self._gpus]
            state |= {name: folded(fold, [gpu[name] for gpu in found]) for name, fold in _OF_GROUP.items()}
        self.state = {name: None if value is None else round(value, 3) for name, value in state.items()}

    def _sample(self) -> None:
        periods = (itertools.repeat(PERIOD_SECONDS, EARLY_SAMPLES), itertools.repeat(LATER_SECONDS))
        for pause in itertools.chain([FIRST_SECONDS], *periods):
            if self._stop.wait(pause):
                return
            for gpu in self._gpus:
                gpu.sample()


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
        self._samples: list[State] = []
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
        utilisation, memory = self._read("UtilizationRates"), self._read("MemoryInfo")
        clock, milliwatts = self._read("ClockInfo", 1), self._read("PowerUsage")  # NVML_CLOCK_SM
        reasons = self._read("CurrentClocksEventReasons")
        if reasons is None:
            reasons = self._read("CurrentClocksThrottleReasons")  # its older name
        self._samples.append(
            {
                "gpu_utilisation_percent": None if utilisation is None else float(utilisation.gpu),
                "gpu_memory_used_bytes": None if memory is None else float(memory.used),
                "gpu_clock_mhz": clock,
                "gpu_clock_min_mhz": clock,
                "gpu_memory_clock_mhz": self._read("ClockInfo", 2),  # NVML_CLOCK_MEM
                "gpu_temperature_celsius": self._read("Temperature", 0),  # NVML_TEMPERATURE_GPU
                "gpu_throttle_reasons": reasons,
                "gpu_power_watts": None if milliwatts is None else milliwatts / 1e3,
            }
        )
        self._look_at_processes()

    def end(self) -> None:
        """Read again what was read at the beginning, as soon as the work is done; a sample too if there is none."""
        self._energy = difference(self._energy, self._read("TotalEnergyConsumption"))
        self._seconds = time.monotonic() - self._begun
        if not self._samples:
            self.sample()
        self._look_at_processes()

    def state(self, own: set[int]) -> State:
        """What was found of this GPU; ``own`` are process ids that are no others."""
        folds = _SAMPLED | {"gpu_power_watts": fmean}
        known = {name: [v for sample in self._samples if (v := sample[name]) is not None] for name in folds}
        state: State = {name: fold(known[name]) if known[name] else None for name, fold in folds.items()}
        joules = None if self._energy is None else self._energy / 1e3
        if joules is not None:
            state["gpu_power_watts"] = joules / self._seconds
        return state | {"gpu_energy_joules": joules} | self._others(own)

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
