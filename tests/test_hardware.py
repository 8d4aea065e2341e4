"""The machine is read as it is: affinity, quotas, visible GPUs, and what others take."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
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
        if name.startswith(("/sys/fs/cgroup", "/proc/self/cgroup", "/proc/stat")):
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
        (
            {  # a job's own group, as a scheduler makes it
                "/proc/self/cgroup": "5:cpuset:/\n4:cpu,cpuacct:/user/job\n",
                "/sys/fs/cgroup/cpu/user/job/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/user/cpu.cfs_quota_us": "600000\n",
                "/sys/fs/cgroup/cpu/user/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
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


def old_nvml(gpus: list[dict[str, Any] | None], migs: dict[str, dict[str, Any]], driver: bytes | None) -> Any:
    """NVML as an old binding shows it: bytes instead of str, and an error for whatever is not known."""

    def by_index(index: int) -> dict[str, Any]:
        handle = gpus[index]
        if handle is None:
            raise RuntimeError("NVML_ERROR_NO_PERMISSION")
        return handle

    def by_uuid(uuid: object) -> dict[str, Any]:
        if not isinstance(uuid, bytes):
            raise TypeError("bytes expected")
        return migs[uuid.decode()]

    def driver_version() -> bytes:
        if driver is None:
            raise RuntimeError("NVML_ERROR_UNKNOWN")
        return driver

    def shut_down() -> None:
        calls.append("shutdown")
        raise RuntimeError("NVML_ERROR_UNKNOWN")

    calls: list[str] = []
    return SimpleNamespace(
        calls=calls,
        nvmlInit=lambda: calls.append("init"),
        nvmlShutdown=shut_down,
        nvmlDeviceGetCount=lambda: len(gpus),
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=by_uuid,
        nvmlDeviceGetName=lambda handle: handle["name"],
        nvmlDeviceGetUUID=lambda handle: handle["uuid"],
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=handle["total"]),
        nvmlSystemGetDriverVersion=driver_version,
    )


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes an NVML with the given GPUs, MIG devices and driver the one that is read."""

    def make(*gpus: dict[str, Any] | None, driver: bytes | None = b"600.1", **migs: dict[str, Any]) -> Any:
        found = old_nvml(list(gpus), {f"MIG-{uuid}": device for uuid, device in migs.items()}, driver)
        monkeypatch.setitem(sys.modules, "pynvml", found)
        return found

    monkeypatch.setattr(hardware, "package_version", lambda _: "2.15.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    caches = (hardware._nvidia, hardware._mig_device)
    for cached in caches:
        cached.cache_clear()
    yield make
    for cached in caches:
        cached.cache_clear()


def test_an_old_nvml_binding_is_read(nvml: Callable[..., Any]) -> None:
    nvml({"name": b"Card X", "uuid": b"GPU-1", "total": 1 << 30}, {"name": "Card Y", "uuid": "GPU-2", "total": 2 << 30})
    assert hardware.gpus() == (Gpu("Card X", "GPU-1", 1 << 30), Gpu("Card Y", "GPU-2", 2 << 30))
    assert hardware.machine().driver == "600.1"
    json.dumps(dataclasses.asdict(hardware.environment()))


def test_what_nvml_does_not_know_is_none_and_the_rest_is_kept(nvml: Callable[..., Any]) -> None:
    seen = nvml({"name": "Shared", "uuid": "GPU-1"}, None, {"total": 1 << 30}, driver=None)
    # The second belongs to somebody else's job: CUDA does not count it.
    assert hardware.gpus() == (Gpu("Shared", "GPU-1", None), Gpu("NVIDIA GPU", None, 1 << 30))
    assert hardware.machine().driver is None
    assert hardware.environment().gpu_uuids == ("GPU-1",)
    assert seen.calls.count("init") == seen.calls.count("shutdown") > 0


@pytest.mark.parametrize("value", ["GPU-2", "GPU-", "nonsense", "1"])
def test_a_gpu_without_a_readable_uuid_can_be_chosen_by_number(
    nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    nvml({"name": "A", "uuid": "GPU-1", "total": 1}, {"name": "B", "total": 1})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert [g.name for g in hardware.gpus()] == {"1": ["B"], "GPU-": ["A"]}.get(value, [])


def test_a_mig_device_is_the_one_gpu(nvml: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    card = {"name": b"Card X", "uuid": b"GPU-1", "total": 8 << 30}
    nvml(card, known={"name": b"Card X MIG 1g", "uuid": b"MIG-known", "total": 1 << 30})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-known,MIG-other")
    assert hardware.gpus() == (Gpu("Card X MIG 1g", "MIG-known", 1 << 30),)
    for unknown in ("MIG-other", "MIG-GPU-1/3/0"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", unknown)
        assert hardware.gpus() == (Gpu("NVIDIA GPU", unknown, None),)
        assert hardware.machine().gpus == ("NVIDIA GPU",)
        assert hardware.environment().gpu_uuids == (unknown,)


def test_a_sentence_of_nvidia_smi_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    card = "Card X, GPU-1, [N/A], 600.1"
    found = (Gpu("Card X", "GPU-1", None),)
    said = {"No devices were found": (), card: found, f"{card}\nUnable to read the second card": found}
    try:
        for line, gpus in said.items():
            tool.write_text(f"#!/bin/sh\necho '{line}'\n")
            tool.chmod(0o755)
            hardware._nvidia.cache_clear()
            assert hardware._nvidia()[0] == gpus
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


def others_beside(command: list[str]) -> float | None:
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


@pytest.mark.alone
@pytest.mark.slow
def test_a_busy_stranger_is_seen_and_a_busy_child_is_not() -> None:
    mine = others_beside([sys.executable, "-c", SPIN])
    if mine is None:
        pytest.skip("a CPU quota holds here: what others take is unknown")
    # An orphan belongs to init: a stranger, as far as this process can tell.
    orphan = (
        "import os, time\npid = os.fork()\nif pid: print(pid, flush=True); os._exit(0)\nwhile True: time.monotonic()"
    )
    stranger = others_beside([sys.executable, "-c", orphan])
    assert stranger is not None
    assert stranger - mine > 0.4, "one core, less what the machine's other processes changed meanwhile"


def test_a_child_that_has_ended_is_no_stranger() -> None:
    code = "import time\nwhile time.process_time() < 0.5: pass"
    before = CpuClock.read()
    subprocess.run([sys.executable, "-c", code], check=True)
    after = CpuClock.read()
    assert after.own_seconds - before.own_seconds >= 0.45


# Ticks of user, nice, system, idle, iowait, irq, softirq, steal, guest (part of user), guest_nice
STAT = (
    "cpu  9999 0 0 0 0 0 0 999 0 0\ncpu0 {0} 0 0 9 9 0 0 {1} 0 0\ncpu1 1 1 1 9 9 1 1 {2} 1 0\n"
    "cpu4 {3} 0 0 9 9 0 0 {4} 0 0\nintr 1 2 3\n"
)


def test_only_the_cores_of_this_process_count(cgroup: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Core 0 is a neighbour's; cores 2 and 3 are switched off, so core 4 is third in the list."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4})
    tick = 1 / os.sysconf("SC_CLK_TCK")
    cgroup["/proc/stat"] = STAT.format(0, 0, 2, 100, 3)
    before = CpuClock.read()
    assert before.busy_seconds == pytest.approx(105 * tick)
    assert before.stolen_seconds == pytest.approx(5 * tick)
    cgroup["/proc/stat"] = STAT.format(7000, 7000, 2, 400, 10)
    after = dataclasses.replace(CpuClock.read(), own_seconds=before.own_seconds)
    assert before.others_cores(after, 2.0) == pytest.approx(150 * tick)
    assert before.stolen(after) == pytest.approx(7 * tick)


@pytest.mark.parametrize(
    "files",
    [
        {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "400000 100000\n"},
        {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "500000\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
    ],
)
def test_under_a_quota_the_share_of_others_is_unknown(
    cgroup: dict[str, str], monkeypatch: pytest.MonkeyPatch, files: dict[str, str]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    cgroup |= {**files, "/proc/stat": STAT.format(1, 1, 1, 1, 1)}
    now = CpuClock.read()
    assert now.others_cores(now, 1.0) is None
    assert now.stolen(now) == 0.0
    cgroup |= {"/sys/fs/cgroup/cpu.max": "max 100000\n", "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n"}
    free = CpuClock.read()
    assert free.others_cores(free, 1.0) == 0.0
    assert free.others_cores(now, 1.0) is None


@pytest.mark.parametrize("stat", [None, "nonsense", "cpux 1\n", "cpu0 1 2\n", STAT.format(1, 1, 1, 1, 1)])
def test_cores_that_the_kernel_does_not_show_are_unknown(cgroup: dict[str, str], stat: str | None) -> None:
    cgroup |= {} if stat is None else {"/proc/stat": stat}
    now = CpuClock.read()  # sixteen cores, as far as the affinity says
    assert now.others_cores(now, 1.0) is None
    assert now.stolen(now) is None


def test_the_clock_never_reports_less_than_nothing() -> None:
    now = CpuClock(busy_seconds=10.0, own_seconds=5.0, stolen_seconds=0.0)
    assert now.others_cores(CpuClock(11.0, 6.5, 0.0), 1.0) == 0.0
    assert now.others_cores(CpuClock(14.0, 6.0, 0.0), 2.0) == 1.5


@pytest.mark.parametrize(
    ("files", "seconds"),
    [
        ({}, None),
        ({"/proc/self/cgroup": "0::/job\n", "/sys/fs/cgroup/job/cpu.stat": "usage_usec 9\n"}, None),
        ({"/proc/self/cgroup": "0::/job\n", "/sys/fs/cgroup/job/cpu.stat": "nr_throttled 2\nthrottled_usec 0\n"}, 0.0),
        (
            {
                "/proc/self/cgroup": "0::/user/job\n",
                "/sys/fs/cgroup/user/job/cpu.stat": "throttled_usec 1500000\n",
                "/sys/fs/cgroup/user/cpu.stat": "throttled_usec 500000\n",
                "/sys/fs/cgroup/cpu.stat": "usage_usec 9\n",
            },
            2.0,
        ),
        ({"/sys/fs/cgroup/cpu/cpu.stat": "nr_periods 1\nnr_throttled 1\nthrottled_time 250000000\n"}, 0.25),
        ({"/sys/fs/cgroup/cpu/cpu.stat": "nonsense\n"}, None),
    ],
)
def test_time_that_a_quota_took_is_read_from_every_level(
    cgroup: dict[str, str], files: dict[str, str], seconds: float | None
) -> None:
    cgroup |= files
    assert hardware.cgroup_throttled_seconds() == (None if seconds is None else pytest.approx(seconds))
