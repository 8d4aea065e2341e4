"""The machine is read as it is: affinity, quotas, visible GPUs, and what others take."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ddpm_lab.measure import hardware
from ddpm_lab.measure.hardware import CpuClock, Gpu


def test_cores_are_those_the_affinity_allows() -> None:
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{one}}})\n"
        "from ddpm_lab.measure.hardware import usable_cores; print(usable_cores())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "1"
    assert 1 <= hardware.usable_cores() <= len(os.sched_getaffinity(0))


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Sixteen cores, and the cgroup files that the test puts into the dictionary instead of the machine's own."""
    files: dict[str, str] = {}
    real = Path.read_text

    def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
        name = str(path)
        if name.startswith(("/sys/fs/cgroup", "/proc/self/cgroup")):
            if name not in files:
                raise FileNotFoundError(name)
            return files[name]
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    yield files
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "400000 100000\n"}, 4),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "6400000 100000\n"}, 16),
        (
            {  # the tightest of the groups above holds
                "/proc/self/cgroup": "0::/user/job\n",
                "/sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
                "/sys/fs/cgroup/user/cpu.max": "300000 100000\n",
                "/sys/fs/cgroup/cpu.max": "800000 100000\n",
            },
            3,
        ),
        (
            {
                "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "500000\n",
                "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            5,
        ),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 16),
        ({"/proc/self/cgroup": "nonsense\n", "/sys/fs/cgroup/cpu.max": "nonsense\n"}, 16),
    ],
)
def test_cores_are_cut_by_the_quota(cgroup: dict[str, str], files: dict[str, str], cores: int) -> None:
    cgroup.update(files)
    assert hardware.usable_cores() == cores


CARDS = tuple(Gpu(name, f"GPU-{uuid}", 80 << 30) for name, uuid in (("A", "aa11"), ("B", "ab22"), ("C", "cc33")))


@pytest.mark.parametrize(
    ("value", "names"),
    [
        (None, "ABC"),
        ("0", "A"),
        ("2,0", "CA"),
        ("GPU-cc33,GPU-aa11", "CA"),
        ("GPU-c", "C"),
        ("GPU-a", ""),  # fits two
        ("", ""),
        ("-1", ""),
        ("0,-1,2", "A"),  # the list ends where it is wrong, as for CUDA
        ("1, 2", "BC"),
        ("7", ""),
    ],
)
def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch, value: str | None, names: str) -> None:
    monkeypatch.setattr(hardware, "_nvidia", lambda: (CARDS, "600.1"))
    monkeypatch.setattr(hardware, "package_version", lambda _: "2.15.0+cu130")
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert "".join(g.name for g in hardware.gpus()) == names
    machine = hardware.machine()
    assert machine.gpus == tuple(names)
    assert machine.driver == ("600.1" if names else None)
    assert machine.torch == "2.15"
    assert hardware.environment().gpu_uuids == tuple(g.uuid for n in names for g in CARDS if g.name == n)


def test_a_torch_without_cuda_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_nvidia", lambda: (CARDS, "600.1"))
    monkeypatch.setattr(hardware, "package_version", lambda _: "2.15.0+cpu")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert hardware.gpus() == ()
    assert hardware.machine().driver is None


def test_without_the_nvml_binding_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Card X, GPU-1, 81559, 600.1'\necho 'Card Y, GPU-2, 1024, 600.1'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    hardware._nvidia.cache_clear()
    try:
        gpus, driver = hardware._nvidia()
        assert [(g.name, g.uuid, g.memory_bytes) for g in gpus] == [
            ("Card X", "GPU-1", 81559 << 20),
            ("Card Y", "GPU-2", 1 << 30),
        ]
        assert driver == "600.1"
        hardware._nvidia.cache_clear()
        tool.write_text("#!/bin/sh\necho 'No devices were found' >&2\nexit 6\n")
        assert hardware._nvidia() == ((), None)
    finally:
        hardware._nvidia.cache_clear()


def test_the_environment_is_complete_and_dated() -> None:
    found = hardware.environment()
    assert found.machine == hardware.machine()
    assert found.machine.cpu
    assert found.machine.python == "{}.{}".format(*sys.version_info)
    assert set(found.packages) >= {"torch", "numpy", "pillow"}
    assert all(found.packages.values())
    assert found.ram_bytes
    assert found.ram_bytes > 1 << 28
    moment = datetime.fromisoformat(found.date)
    assert moment.tzinfo is not None
    assert abs(moment.timestamp() - time.time()) < 60


SPIN = "import time\nprint('go', flush=True)\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"


def others_beside(command: list[str]) -> float:
    """Cores that a second of watching ascribes to others while ``command`` runs."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pid = process.stdout.readline()
            before, begun = CpuClock.read(), time.monotonic()
            time.sleep(0.8)
            after, seconds = CpuClock.read(), time.monotonic() - begun
        finally:
            process.kill()
            if pid.strip().isdigit():
                os.kill(int(pid), 9)
    return before.others_cores(after, seconds)


def test_a_busy_stranger_is_seen_and_a_busy_child_is_not() -> None:
    mine = others_beside([sys.executable, "-c", SPIN])
    # An orphan belongs to init: a stranger, as far as this process can tell.
    orphan = (
        "import os, time\npid = os.fork()\nif pid: print(pid, flush=True); os._exit(0)\nwhile True: time.monotonic()"
    )
    stranger = others_beside([sys.executable, "-c", orphan])
    assert stranger - mine > 0.4, "one core, less what the machine's other processes changed meanwhile"


def test_the_clock_never_reports_less_than_nothing() -> None:
    now = CpuClock(busy_seconds=10.0, own_seconds=5.0, stolen_seconds=0.0)
    assert now.others_cores(CpuClock(11.0, 6.5, 0.0), 1.0) == 0.0
    assert now.others_cores(CpuClock(14.0, 6.0, 0.0), 2.0) == 1.5
