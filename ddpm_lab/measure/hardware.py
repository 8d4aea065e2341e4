"""What this machine is and what it was doing: read, never guessed; None where it cannot be read.

Nothing here imports torch, because the parent that measures stays light; a GPU is read through NVML.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import platform
import socket
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from ddpm_lab.processor import processor
from ddpm_lab.record import Environment, Machine

PACKAGES = ("torch", "torchvision", "numpy", "pillow", "ddpm-lab")
UNNAMED = "NVIDIA GPU"
"""A GPU whose name could not be read."""


@cache
def _nvml() -> Any:
    """NVML, which stays open, since opening it takes long; None where there is no driver or no binding."""
    try:
        import pynvml  # noqa: PLC0415 - optional on a bare node

        pynvml.nvmlInit()
    except Exception:
        return None
    return pynvml


def ask_nvml(name: str, *arguments: Any) -> Any:
    """What the function ``name`` of NVML says; None for whatever a device or a user may not know."""
    try:
        return None if None in arguments else getattr(_nvml(), name)(*arguments)
    except Exception:  # NVML raises its own family of errors
        return None


@cache
def gpu_handle(uuid: str) -> Any:
    """The handle of a GPU or MIG device, or None; torch writes the UUID of a MIG device as that of a GPU."""
    handle = ask_nvml("nvmlDeviceGetHandleByUUID", uuid)
    return ask_nvml("nvmlDeviceGetHandleByUUID", uuid.replace("GPU-", "MIG-")) if handle is None else handle


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU, or one MIG device; ``uuid`` as NVML writes it (GPU-..., MIG-...). None could not be read."""

    name: str
    uuid: str | None
    memory_bytes: int | None


def usable_cores() -> int:
    """Cores this process may use: its CPU affinity, cut by the cgroup's quota (v2 and v1)."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    return max(1, min(cores, int(quota))) if quota is not None else cores


def cgroup_levels(v1_controller: str) -> tuple[list[Path], list[Path]]:
    """Folders of this process's control groups, innermost first: of version 2, and of a controller of version 1."""
    v1 = Path("/sys/fs/cgroup", v1_controller)
    unified, levels = [], [v1]
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            hierarchy, controllers, folder = line.split(":", 2)
            if hierarchy == "0":
                node = Path("/sys/fs/cgroup") / folder.lstrip("/")
                unified += [node, *node.parents]
            elif v1_controller in controllers.split(","):
                node = v1 / folder.lstrip("/")
                levels += [node, *node.parents]
    return unified, list(dict.fromkeys(levels))


def _cgroup_quota() -> float | None:
    """Cores' worth of CPU time that the tightest enclosing cgroup allows, or None without a limit."""
    limits = []
    for level in itertools.chain(*cgroup_levels("cpu")):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            quota, period = (level / "cpu.max").read_text().split()
            limits.append(int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            if (quota_v1 := int((level / "cpu.cfs_quota_us").read_text())) > 0:
                limits.append(quota_v1 / int((level / "cpu.cfs_period_us").read_text()))
    return min(limits) if limits else None


def cgroup_throttled_seconds() -> float | None:
    """Seconds that quotas have held back this process's cgroups so far, added over all of them; None is unknown."""
    found = []
    for level in itertools.chain(*cgroup_levels("cpu")):
        with contextlib.suppress(OSError, ValueError):
            said = dict(line.split() for line in (level / "cpu.stat").read_text().splitlines())
            units = {"throttled_usec": 1e-6, "throttled_time": 1e-9}  # version 2, version 1
            found += [int(said[name]) * unit for name, unit in units.items() if name in said]
    return sum(found) if found else None


def _visible(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    """Apply CUDA_VISIBLE_DEVICES, by index or UUID, in its order; the list ends at the first entry that fails."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(gpus)
    entries = [entry.strip() for entry in wanted.split(",")]
    if gpus and entries[0].startswith("MIG-"):
        # CUDA shows a process one MIG device, whatever follows.
        return (replace(_gpu(gpu_handle(entries[0])), uuid=entries[0]),)
    chosen: list[Gpu] = []
    for entry in entries:
        match = [g for i, g in enumerate(gpus) if entry == str(i) or (entry and g.uuid and g.uuid.startswith(entry))]
        if len(match) != 1:
            break
        chosen.append(match[0])
    return tuple(chosen)


def _gpu(handle: Any) -> Gpu:
    memory = ask_nvml("nvmlDeviceGetMemoryInfo", handle)  # unknown where shared with the CPU, or of a MIG device's card
    return Gpu(
        ask_nvml("nvmlDeviceGetName", handle) or UNNAMED,
        ask_nvml("nvmlDeviceGetUUID", handle),
        None if memory is None else int(memory.total),
    )


@cache
def _nvidia() -> tuple[tuple[Gpu, ...], str | None]:
    """Every GPU of the machine that this user may use, and the driver version."""
    # NVML also counts GPUs that a scheduler keeps from this process: it has no handle for them, and CUDA no number.
    handles = [ask_nvml("nvmlDeviceGetHandleByIndex", i) for i in range(ask_nvml("nvmlDeviceGetCount") or 0)]
    return tuple(_gpu(h) for h in handles if h is not None), ask_nvml("nvmlSystemGetDriverVersion")


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that torch would see in this process; none if the installed torch cannot use CUDA."""
    return () if "+cpu" in package_version("torch") else listed_gpus()


def listed_gpus() -> tuple[Gpu, ...]:
    """The GPUs that NVML lists for this process, whether torch can use them or not: ``gpu_trouble`` says."""
    return _visible(list(_nvidia()[0]))


def package_version(package: str) -> str:
    """Installed version of a distribution, or the empty string."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine() -> Machine:
    """The machine as the comparison sees it."""
    minor = ".".join(package_version("torch").split("+")[0].split(".")[:2])
    return Machine(
        cpu=processor(),
        usable_cores=usable_cores(),
        gpus=tuple(g.name for g in gpus()),
        driver=_nvidia()[1] if gpus() else None,
        torch=minor,
        python=".".join(platform.python_version_tuple()[:2]),
    )


@cache
def _git_commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if (root / ".git").exists():
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
            return done.stdout.strip() or None
    return None


def environment() -> Environment:
    """Everything recorded with a result."""
    return Environment(
        machine=machine(),
        hostname=socket.gethostname() or None,
        python=platform.python_version(),
        packages={name: package_version(name) for name in PACKAGES if package_version(name)},
        cuda=None,
        gpu_uuids=tuple(g.uuid for g in gpus() if g.uuid),
        ram_bytes=psutil.virtual_memory().total,
        kernel=platform.release(),
        slurm_job_id=os.environ.get("SLURM_JOB_ID"),
        git_commit=_git_commit(),
        load_before=os.getloadavg()[0],
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


@dataclass(frozen=True, slots=True)
class CpuClock:
    """CPU seconds used so far: by anybody and by the hypervisor on the cores this process may use, and by its own.

    The first and the last are None, unknown, where the kernel does not show these cores, as in containers that number
    their own. ``limited`` is whether a cgroup gives this process less than the time of its cores: a core that a
    neighbour uses is then not time that this process could have had.
    """

    busy_seconds: float | None
    own_seconds: float
    stolen_seconds: float | None
    limited: bool = False

    @classmethod
    def read(cls, relatives: Sequence[int] = ()) -> CpuClock:
        """Read now. One's own are this process and all its descendants: the fork server, ranks, loader workers.

        So are ``relatives``, other processes of the same job, and their descendants.
        """
        busy, stolen = _core_seconds(os.sched_getaffinity(0)) or (None, None)
        own = 0.0
        for pid in (os.getpid(), *relatives):
            with contextlib.suppress(psutil.Error):
                head = psutil.Process(pid)
                own += sum(map(_used_seconds, (head, *head.children(recursive=True))))
        return cls(busy, own, stolen, _cgroup_quota() is not None)

    def busy(self, later: CpuClock) -> float | None:
        """Seconds that these cores worked between two readings; None is unknown."""
        return difference(self.busy_seconds, later.busy_seconds)

    def stolen(self, later: CpuClock) -> float | None:
        """Seconds that the hypervisor took from these cores between two readings; None is unknown."""
        return difference(self.stolen_seconds, later.stolen_seconds)

    def others_cores(self, later: CpuClock, seconds: float) -> float | None:
        """How many of its cores processes not one's own kept busy between two readings; None is unknown."""
        busy = self.busy(later)
        if busy is None or self.limited or later.limited:
            return None
        return max(0.0, (busy - (later.own_seconds - self.own_seconds)) / seconds)


def difference(before: float | None, after: float | None) -> float | None:
    """``after - before``, or None where one of them is unknown."""
    return None if before is None or after is None else after - before


def _used_seconds(member: psutil.Process) -> float:
    """CPU seconds of a process; children that have ended count with whoever collected them: they were no strangers."""
    with contextlib.suppress(psutil.Error):
        used = member.cpu_times()
        return float(used.user + used.system + used.children_user + used.children_system)
    return 0.0


def _core_seconds(cores: set[int]) -> tuple[float, float] | None:
    """Seconds that ``cores`` were busy and stolen since the machine started, or None if one of them is not shown.

    Read by number: psutil returns a list, in which a core that is switched off shifts all that follow.
    """
    with contextlib.suppress(OSError, ValueError, KeyError):
        lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
        shown = {words[0]: [int(n) for n in words[1:9]] for words in lines if words[0].startswith("cpu")}
        ticks = [sum(column) for column in zip(*(shown[f"cpu{core}"] for core in cores), strict=True)]
        user, nice, system, _idle, _waiting, irq, softirq, steal = (n / os.sysconf("SC_CLK_TCK") for n in ticks)
        return user + nice + system + irq + softirq, steal
    return None
