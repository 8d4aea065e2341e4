"""What this machine is and what it was doing: read, never guessed; None where it cannot be read.

Nothing here imports torch, because the parent that measures stays light; a GPU is read through NVML, or through
``nvidia-smi`` where the Python binding is missing.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path

import psutil

from ddpm_lab.ledger import Environment, Machine

PACKAGES = ("torch", "torchvision", "numpy", "pillow", "ddpm-lab")


@dataclass(frozen=True, slots=True)
class Gpu:
    """One visible GPU; ``uuid`` as NVML writes it (GPU-...)."""

    name: str
    uuid: str
    memory_bytes: int


def usable_cores() -> int:
    """Cores this process may use: its CPU affinity, cut by the cgroup's quota (v2 and v1)."""
    cores = len(os.sched_getaffinity(0))
    quota = _cgroup_quota()
    return max(1, min(cores, int(quota))) if quota is not None else cores


def _cgroup_quota() -> float | None:
    """Cores' worth of CPU time that the tightest enclosing cgroup allows, or None without a limit."""
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            hierarchy, _, folder = line.split(":", 2)
            if hierarchy == "0":
                node = Path("/sys/fs/cgroup") / folder.lstrip("/")
                for level in (node, *node.parents):
                    with contextlib.suppress(OSError, ValueError):
                        quota, period = (level / "cpu.max").read_text().split()
                        if quota != "max":
                            limits.append(int(quota) / int(period))
    with contextlib.suppress(OSError, ValueError):
        v1 = Path("/sys/fs/cgroup/cpu")
        quota_v1 = int((v1 / "cpu.cfs_quota_us").read_text())
        if quota_v1 > 0:
            limits.append(quota_v1 / int((v1 / "cpu.cfs_period_us").read_text()))
    return min(limits) if limits else None


def _visible(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    """Apply CUDA_VISIBLE_DEVICES, by index or UUID, in its order; the list ends at the first entry that fails."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for entry in (e.strip() for e in wanted.split(",")):
        match = [g for i, g in enumerate(gpus) if entry == str(i) or (entry and g.uuid.startswith(entry))]
        if len(match) != 1:
            break
        chosen.append(match[0])
    return tuple(chosen)


@cache
def _nvidia() -> tuple[tuple[Gpu, ...], str | None]:
    """Every GPU of the machine, and the driver version."""
    with contextlib.suppress(Exception):  # NVML raises its own family of errors; any of them means: not readable
        import pynvml  # noqa: PLC0415 - optional on a bare node

        pynvml.nvmlInit()
        try:
            gpus = []
            for i in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(i)
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle).total
                gpus.append(Gpu(pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle), int(memory)))
            return tuple(gpus), pynvml.nvmlSystemGetDriverVersion()
        finally:
            pynvml.nvmlShutdown()
    query = ["nvidia-smi", "--query-gpu=name,uuid,memory.total,driver_version", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        lines = (
            subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout.strip().splitlines()
        )
        rows = [[cell.strip() for cell in line.split(",")] for line in lines]
        return tuple(Gpu(r[0], r[1], int(r[2]) * 2**20) for r in rows), rows[0][3] if rows else None
    return (), None


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that torch would see in this process; none if the installed torch cannot use CUDA."""
    if "+cpu" in package_version("torch"):
        return ()
    return _visible(list(_nvidia()[0]))


def package_version(package: str) -> str:
    """Installed version of a distribution, or the empty string."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


@cache
def cpu_model() -> str:
    """The processor's name as the kernel gives it."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return " ".join(line.partition(":")[2].split())
    return platform.machine()


def machine() -> Machine:
    """The machine as the comparison sees it."""
    minor = ".".join(package_version("torch").split("+")[0].split(".")[:2])
    return Machine(
        cpu=cpu_model(),
        usable_cores=usable_cores(),
        gpus=tuple(g.name for g in gpus()),
        driver=_nvidia()[1] if gpus() else None,
        torch=minor,
        python=".".join(platform.python_version_tuple()[:2]),
    )


def _git_commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    return None


def environment() -> Environment:
    """Everything recorded with a result."""
    load: float | None = None
    with contextlib.suppress(OSError):
        load = os.getloadavg()[0]
    return Environment(
        machine=machine(),
        hostname=socket.gethostname() or None,
        python=platform.python_version(),
        packages={name: package_version(name) for name in PACKAGES if package_version(name)},
        cuda=None,
        gpu_uuids=tuple(g.uuid for g in gpus()),
        ram_bytes=psutil.virtual_memory().total,
        kernel=platform.release(),
        slurm_job_id=os.environ.get("SLURM_JOB_ID"),
        git_commit=_git_commit(),
        load_before=load,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


@dataclass(frozen=True, slots=True)
class CpuClock:
    """CPU seconds used so far by the whole machine, by one's own processes, and stolen by the hypervisor."""

    busy_seconds: float
    own_seconds: float
    stolen_seconds: float

    @classmethod
    def read(cls) -> CpuClock:
        """Read now. One's own are this process and all its descendants: the fork server, ranks, loader workers."""
        times = psutil.cpu_times()
        busy = times.user + times.nice + times.system + times.irq + times.softirq
        own = 0.0
        me = psutil.Process()
        for member in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used = member.cpu_times()
                own += used.user + used.system
        return cls(busy, own, times.steal)

    def others_cores(self, later: CpuClock, seconds: float) -> float:
        """Cores that processes not one's own kept busy between two readings."""
        used = (later.busy_seconds - self.busy_seconds) - (later.own_seconds - self.own_seconds)
        return max(0.0, used / seconds)
