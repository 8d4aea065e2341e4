"""What this machine is: read without torch, never guessed; None where it cannot be read."""

import contextlib
import importlib.metadata
import itertools
import os
import platform
import re
import socket
import subprocess
import sys
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from ddpm_lab.declared import parsed
from ddpm_lab.processor import processor
from ddpm_lab.record import Environment, Machine

PACKAGES = ("torch", "torchvision", "numpy", "pillow", "ddpm-lab")
WAYS_OUT = (
    "see that nvidia-smi answers, and install a torch that fits the driver and the GPU "
    "(https://pytorch.org/get-started/locally; CUDA 13 needs driver 580; for older ones, and GPUs before the Turing "
    "generation: make setup TORCH=cu126, or pip install torch torchvision --index-url "
    "https://download.pytorch.org/whl/cu126), or hide the GPU "
    "with CUDA_VISIBLE_DEVICES, or measure the CPU with --device cpu (in a report: -p device cpu)"
)
_ASK_TORCH = (
    "import json, torch; torch.cuda.init(); gpus = range(torch.cuda.device_count()); "
    "cards = map(torch.cuda.get_device_properties, gpus); "
    "print(json.dumps([[card.name, f'GPU-{card.uuid}', card.total_memory] for card in cards])); "
    "print(*min(map(torch.cuda.get_device_capability, gpus)), flush=True); "
    "[(torch.ones(1, device=f'cuda:{i}') + 1).item() for i in gpus]"
)
"""Print what each GPU is, and the lowest compute capability; run a first kernel on each."""
DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""Where a driver shows itself to a process that may use its GPUs."""
IN_ORDER = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Has CUDA number GPUs as NVML does, and not by their speed, unless the environment says otherwise."""
TORCH_SECONDS = 120.0  # how long torch may take for this


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
    """Cores this process may use: its CPU affinity, cut by the quota of its control groups."""
    cores, quota = len(os.sched_getaffinity(0)), cgroup_cores()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_levels(controller: str) -> list[Path]:
    """Folders of this process's control groups, innermost first: of version 2, and of a controller's of version 1."""
    found = list[Path]()
    for line in _lines(Path("/proc/self/cgroup")):
        _, controllers, inside = (*line.split(":", 2), "", "")[:3]
        if not controllers or controller in controllers.split(","):
            node = Path("/sys/fs/cgroup", controllers, inside.lstrip("/"))
            found += [node, *node.parents]
    return list(dict.fromkeys(found))


def cgroup_cores() -> float | None:
    """Cores' worth of CPU time that the tightest enclosing cgroup allows; None without a limit."""
    limits = []
    for level in cgroup_levels("cpu"):
        said = _lines(level / "cpu.max") or [*_lines(level / "cpu.cfs_quota_us"), *_lines(level / "cpu.cfs_period_us")]
        with contextlib.suppress(ValueError):  # no such file, or "max"
            quota, period = (int(word) for line in said for word in line.split())
            limits += [quota / period] * (quota > 0)  # -1 is none
    return min(limits, default=None)


def cgroup_throttled_seconds() -> float | None:
    """Seconds that quotas have held back this process's cgroups so far, added over all of them; None is unknown."""
    lines = [line.split() for level in cgroup_levels("cpu") for line in _lines(level / "cpu.stat")]
    units = {"throttled_usec": 1e-6, "throttled_time": 1e-9}
    found = [int(words[1]) * units[words[0]] for words in lines if words[0] in units]
    return sum(found) if found else None


def available_bytes() -> int:
    """Main memory that can be used without swapping, cut by what the enclosing cgroups leave."""
    found = [int(psutil.virtual_memory().available)]
    versions = ("max", "current", "inactive_file"), ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
    for level, (limit, usage, dropped) in itertools.product(cgroup_levels("memory"), versions):
        with contextlib.suppress(OSError, ValueError, KeyError):  # such a level sets no limit
            most, taken = (int((level / f"memory.{name}").read_text()) for name in (limit, usage))
            said = dict(line.split() for line in _lines(level / "memory.stat"))
            found.append(max(0, most - taken + int(said[dropped])))  # which the kernel drops
    return min(found)


def oom_kills() -> int:
    """Processes that the kernel has ended for want of memory so far, of the machine or of a cgroup; 0 where unknown."""
    # Counted before the process is killed, so that whoever sees its end sees the count.
    found = (line.split()[1] for line in _lines(Path("/proc/vmstat")) if line.startswith("oom_kill "))
    return int(next(found, 0))


def _lines(file: Path) -> list[str]:
    """The lines of a file; none where it cannot be read."""
    try:
        return file.read_text().splitlines()
    except OSError:
        return []


def _gpu(handle: Any) -> Gpu:
    memory = ask_nvml("nvmlDeviceGetMemoryInfo", handle)  # unknown where shared with the CPU, or of a MIG device's card
    return Gpu(
        ask_nvml("nvmlDeviceGetName", handle) or "NVIDIA GPU",
        ask_nvml("nvmlDeviceGetUUID", handle),
        None if memory is None else int(memory.total),
    )


@cache
def _nvidia() -> tuple[tuple[Gpu, ...], str | None]:
    """Every GPU of the machine that this user may use, and the driver version.

    Without NVML, those that torch sees: neither its library nor its binding is a part of torch.
    """
    if _nvml() is None:
        return _ask_torch()[2] if any(map(os.path.exists, DRIVERS)) else (), None
    # NVML also counts GPUs that a scheduler keeps from this process: it has no handle for them, and CUDA no number.
    handles = [ask_nvml("nvmlDeviceGetHandleByIndex", i) for i in range(ask_nvml("nvmlDeviceGetCount") or 0)]
    return tuple(_gpu(h) for h in handles if h is not None), ask_nvml("nvmlSystemGetDriverVersion")


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that torch would see in this process; none if the installed torch cannot use CUDA."""
    return () if "+cpu" in package_version("torch") else _visible()


def _visible() -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES names, by index or UUID; the list ends at the first entry that fails."""
    found, wanted = _nvidia()[0], os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or _nvml() is None:  # torch has chosen by then
        return found
    entries = [entry.strip() for entry in wanted.split(",")]
    if found and entries[0].startswith("MIG-"):  # CUDA shows a process one MIG device, whatever follows
        return (replace(_gpu(gpu_handle(entries[0])), uuid=entries[0]),)
    chosen: list[Gpu] = []
    for entry in entries:
        match = [g for i, g in enumerate(found) if entry == str(i) or (entry and g.uuid and g.uuid.startswith(entry))]
        if len(match) != 1:
            break
        chosen += match
    return tuple(chosen)


@cache
def package_version(package: str) -> str:
    """Installed version of a distribution, or the empty string."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def machine() -> Machine:
    """The machine as the comparison sees it."""
    torch = ".".join(package_version("torch").split("+")[0].split(".")[:2])
    python = ".".join(platform.python_version_tuple()[:2])
    cpu, cores, cards = processor(), usable_cores(), tuple(g.name for g in gpus())
    driver = _nvidia()[1] if cards else None
    return Machine(cpu=cpu, usable_cores=cores, gpus=cards, driver=driver, torch=torch, python=python)


@cache
def _git_commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if (root / ".git").exists():
            return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True, timeout=10).strip() or None
    return None


def environment() -> Environment:
    """Everything recorded with a result."""
    return Environment(
        machine=machine(),
        hostname=socket.gethostname() or None,
        python=platform.python_version(),
        packages={name: version for name in PACKAGES if (version := package_version(name))},
        cuda=None,
        gpu_uuids=tuple(g.uuid for g in gpus() if g.uuid),
        ram_bytes=psutil.virtual_memory().total,
        kernel=platform.release(),
        slurm_job_id=os.environ.get("SLURM_JOB_ID"),
        git_commit=_git_commit(),
        load_before=os.getloadavg()[0],
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
    )


def gpu_trouble() -> str:
    """Why torch cannot use the GPUs that NVML lists, and the ways out, in one sentence; empty without such trouble."""
    if not (cards := _visible()) or not (error := _ask_torch()[1]):
        return ""
    names, driver = ", ".join(dict.fromkeys(card.name for card in cards)), _nvidia()[1] or "unknown"
    if cuda := ask_nvml("nvmlSystemGetCudaDriverVersion_v2"):
        driver += f", which is for CUDA up to {cuda // 1000}.{cuda % 1000 // 10}"
    return f"torch {package_version('torch')} cannot use {names} with driver {driver}: {error}; {WAYS_OUT}"


def least_capability() -> tuple[int, int] | None:
    """The lowest compute capability of the GPUs that torch sees; None where it sees none."""
    return _ask_torch()[0] if gpus() else None


@cache
def _ask_torch() -> tuple[tuple[int, int] | None, str, tuple[Gpu, ...]]:
    """The lowest compute capability, or torch's error, and the GPUs that it sees.

    It is asked once, in a process of its own, since that wakes CUDA.
    """
    how: dict[str, Any] = {"capture_output": True, "text": True, "env": IN_ORDER | os.environ}
    try:
        done = subprocess.run([sys.executable, "-P", "-c", _ASK_TORCH], check=False, timeout=TORCH_SECONDS, **how)
    except subprocess.TimeoutExpired:
        return None, f"it did not answer within {TORCH_SECONDS:.0f} s", ()
    *_, listed, capability = ["", "0 0", *str(done.stdout).splitlines()]
    major, minor = map(int, capability.split())
    cards = tuple(Gpu(*card) for card in parsed(listed)) if major else ()
    # The first sentence of the error: what CUDA adds on further lines is for those who debug kernels.
    said = re.search(r"^[\w.]*(?:Error|Exception): (.+?)(?:\. |$)", done.stderr, re.MULTILINE)
    error = said[1] if said else f"the process that asked it ended with {done.returncode}"
    # A GPU that others fill or hold may not be wanted; a rank on it says so.
    fine = not done.returncode or "out of memory" in error or "busy" in error
    return (major, minor) if major else None, "" if fine else error, cards
