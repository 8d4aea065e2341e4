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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import psutil

from ddpm_lab.processor import processor
from ddpm_lab.record import Environment, Machine

PACKAGES = ("torch", "torchvision", "numpy", "pillow", "ddpm-lab")
UNNAMED = "NVIDIA GPU"
"""A GPU whose name could not be read."""
T = TypeVar("T")


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
    unified, v1 = cgroup_levels("cpu")
    for level in unified:
        with contextlib.suppress(OSError, ValueError):
            quota, period = (level / "cpu.max").read_text().split()
            if quota != "max":
                limits.append(int(quota) / int(period))
    for level in v1:
        with contextlib.suppress(OSError, ValueError):
            quota_v1 = int((level / "cpu.cfs_quota_us").read_text())
            if quota_v1 > 0:
                limits.append(quota_v1 / int((level / "cpu.cfs_period_us").read_text()))
    return min(limits) if limits else None


def cgroup_throttled_seconds() -> float | None:
    """Seconds that quotas have held back this process's cgroups so far, added over all of them; None is unknown."""
    found = []
    for level in (level for levels in cgroup_levels("cpu") for level in levels):
        with contextlib.suppress(OSError, ValueError):
            said = dict(line.split() for line in (level / "cpu.stat").read_text().splitlines())
            for name, unit in (("throttled_usec", 1e-6), ("throttled_time", 1e-9)):  # version 2, version 1
                if name in said:
                    found.append(int(said[name]) * unit)
    return sum(found) if found else None


def _visible(gpus: list[Gpu]) -> tuple[Gpu, ...]:
    """Apply CUDA_VISIBLE_DEVICES, by index or UUID, in its order; the list ends at the first entry that fails."""
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(gpus)
    entries = [entry.strip() for entry in wanted.split(",")]
    if gpus and entries[0].startswith("MIG-"):
        return (_mig_device(entries[0]),)  # CUDA shows a process one MIG device, whatever follows
    chosen: list[Gpu] = []
    for entry in entries:
        match = [g for i, g in enumerate(gpus) if entry == str(i) or (entry and g.uuid and g.uuid.startswith(entry))]
        if len(match) != 1:
            break
        chosen.append(match[0])
    return tuple(chosen)


def _text(value: str | bytes) -> str:
    """Older bindings return bytes where newer ones return str."""
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def or_none(read: Callable[..., T], *arguments: Any) -> T | None:
    """What NVML says, or None: it raises its own family of errors for what a device or a user may not know."""
    try:
        return read(*arguments)
    except Exception:
        return None


@contextlib.contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, started; raises whatever it raises where there is no driver or no binding."""
    import pynvml  # noqa: PLC0415 - optional on a bare node

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        or_none(pynvml.nvmlShutdown)


def _read_gpu(nvml: Any, handle: Any) -> Gpu:
    name, uuid = or_none(nvml.nvmlDeviceGetName, handle), or_none(nvml.nvmlDeviceGetUUID, handle)
    # Not known for memory that is shared with the processor, nor to a user who may see only a MIG device of the card.
    memory = or_none(nvml.nvmlDeviceGetMemoryInfo, handle)
    return Gpu(
        UNNAMED if name is None else _text(name),
        None if uuid is None else _text(uuid),
        None if memory is None else int(memory.total),
    )


def handle_of(nvml: Any, uuid: str) -> Any:
    """NVML's handle of a device by its UUID; raises what NVML raises where there is none."""
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    except TypeError:  # older bindings take bytes
        return nvml.nvmlDeviceGetHandleByUUID(uuid.encode())


@cache
def _mig_device(uuid: str) -> Gpu:
    """A MIG device by its UUID, as CUDA_VISIBLE_DEVICES names it."""
    found = None
    with contextlib.suppress(Exception), _nvml() as nvml:
        found = _read_gpu(nvml, handle_of(nvml, uuid))
    return Gpu(found.name if found else UNNAMED, uuid, found.memory_bytes if found else None)


@cache
def _nvidia() -> tuple[tuple[Gpu, ...], str | None]:
    """Every GPU of the machine that this user may use, and the driver version."""
    with contextlib.suppress(Exception), _nvml() as nvml:
        # NVML also counts GPUs that a scheduler keeps from this process: it has no handle for them, and CUDA no number.
        handles = [or_none(nvml.nvmlDeviceGetHandleByIndex, i) for i in range(nvml.nvmlDeviceGetCount())]
        driver = or_none(nvml.nvmlSystemGetDriverVersion)
        return tuple(_read_gpu(nvml, h) for h in handles if h is not None), None if driver is None else _text(driver)
    query = ["nvidia-smi", "--query-gpu=name,uuid,memory.total,driver_version", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        shown = subprocess.run(query, capture_output=True, text=True, check=True, timeout=30).stdout
        rows = [[cell.strip() for cell in line.split(",")] for line in shown.splitlines()]
        rows = [row for row in rows if len(row) == 4]  # else a sentence: "No devices were found"
        gpus = tuple(Gpu(name, uuid, int(mib) * 2**20 if mib.isdigit() else None) for name, uuid, mib, _ in rows)
        return gpus, rows[0][3] if rows else None
    return (), None


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
        gpu_uuids=tuple(g.uuid for g in gpus() if g.uuid),
        ram_bytes=psutil.virtual_memory().total,
        kernel=platform.release(),
        slurm_job_id=os.environ.get("SLURM_JOB_ID"),
        git_commit=_git_commit(),
        load_before=load,
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


@dataclass(frozen=True, slots=True)
class CpuClock:
    """CPU seconds used so far: by anybody and by the hypervisor on the cores this process may use, and by its own.

    ``busy_seconds`` is None, unknown, where a cgroup limits this process to less than the time of its cores: a core
    that a neighbour uses is then not time that this process could have had. It and ``stolen_seconds`` are None where
    the kernel does not show these cores, as in containers that number their own.
    """

    busy_seconds: float | None
    own_seconds: float
    stolen_seconds: float | None

    @classmethod
    def read(cls, relatives: Sequence[int] = ()) -> CpuClock:
        """Read now. One's own are this process and all its descendants: the fork server, ranks, loader workers.

        So are ``relatives``, other processes of the same job, and their descendants.
        """
        busy, stolen = core_seconds(os.sched_getaffinity(0)) or (None, None)
        if _cgroup_quota() is not None:
            busy = None
        own = 0.0
        for pid in (os.getpid(), *relatives):
            with contextlib.suppress(psutil.Error):
                head = psutil.Process(pid)
                own += sum(map(_used_seconds, (head, *head.children(recursive=True))))
        return cls(busy, own, stolen)

    def others_cores(self, later: CpuClock, seconds: float) -> float | None:
        """How many of its cores processes not one's own kept busy between two readings; None is unknown."""
        if self.busy_seconds is None or later.busy_seconds is None:
            return None
        used = (later.busy_seconds - self.busy_seconds) - (later.own_seconds - self.own_seconds)
        return max(0.0, used / seconds)

    def stolen(self, later: CpuClock) -> float | None:
        """Seconds that the hypervisor took from these cores between two readings; None is unknown."""
        if self.stolen_seconds is None or later.stolen_seconds is None:
            return None
        return later.stolen_seconds - self.stolen_seconds


def _used_seconds(member: psutil.Process) -> float:
    """CPU seconds of a process; children that have ended count with whoever collected them: they were no strangers."""
    with contextlib.suppress(psutil.Error):
        used = member.cpu_times()
        return float(used.user + used.system + used.children_user + used.children_system)
    return 0.0


def core_seconds(cores: set[int]) -> tuple[float, float] | None:
    """Seconds that ``cores`` were busy and stolen since the machine started, or None if one of them is not shown.

    Read by number: psutil returns a list, in which a core that is switched off shifts all that follow.
    """
    with contextlib.suppress(OSError, ValueError):
        shown = {}
        for line in Path("/proc/stat").read_text().splitlines():
            name, *ticks = line.split()
            if name.startswith("cpu") and name != "cpu":
                shown[int(name[3:])] = [int(n) for n in ticks[:8]]
        if not cores <= shown.keys():
            return None
        columns = [sum(column) / os.sysconf("SC_CLK_TCK") for column in zip(*(shown[c] for c in cores), strict=True)]
        user, nice, system, _idle, _waiting, irq, softirq, steal = columns
        return user + nice + system + irq + softirq, steal
    return None
