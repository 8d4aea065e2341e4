"""The machine as it is: affinity, quotas, visible GPUs, and what torch can do with them; None for what is unknown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from planted_gpus import GIB, Card, Plant

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure import hardware
from ddpm_lab.measure.hardware import Gpu, gpu_trouble
from ddpm_lab.training import setting

CPU = "/sys/fs/cgroup/cpu"
JOB = {  # version 2, of which the tightest of the groups above holds
    "/proc/self/cgroup": "0::/user/job\n",
    "/sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
    "/sys/fs/cgroup/user/cpu.max": "350000 100000\n",
    "/sys/fs/cgroup/cpu.max": "800000 100000\n",
    "/sys/fs/cgroup/user/job/cpu.stat": "throttled_usec 1500000\n",
    "/sys/fs/cgroup/user/cpu.stat": "throttled_usec 500000\n",
    "/sys/fs/cgroup/cpu.stat": "usage_usec 9\n",
}
JOB_V1 = {  # version 1, a job's own group, as a scheduler makes it
    "/proc/self/cgroup": "5:cpuset:/\n4:cpu,cpuacct:/user/job\n",
    f"{CPU}/user/job/cpu.cfs_quota_us": "-1\n",
    f"{CPU}/user/cpu.cfs_quota_us": "600000\n",
    f"{CPU}/user/cpu.cfs_period_us": "100000\n",
    f"{CPU}/user/cpu.stat": "nr_periods 1\nnr_throttled 1\nthrottled_time 250000000\n",
}


def test_cores_are_cut_by_the_quota_and_what_it_took_is_read_from_every_level(machine_files: dict[str, str]) -> None:
    """Of sixteen cores; the cores that are left, and the seconds of which a quota held the process back."""
    half = {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "50000 100000\n"}
    nonsense = {"/proc/self/cgroup": "nonsense\n", "/sys/fs/cgroup/cpu.max": "nonsense\n"}
    for files, found in ((JOB, (3, 2.0)), (JOB_V1, (6, 0.25)), (half, (1, None)), (nonsense, (16, None))):
        machine_files.clear()
        machine_files.update(files)
        assert (hardware.usable_cores(), hardware.cgroup_throttled_seconds()) == found, files


def test_only_visible_gpus_count(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list ends where it is wrong, as for CUDA; the beginning of a UUID has to fit one alone."""
    uuids = {"A": "GPU-aa11", "B": "GPU-ab22", "C": "GPU-cc33"}
    plant(*(Card(name, uuid=uuid) for name, uuid in uuids.items()))
    assert "".join(hardware.machine().gpus) == "ABC"
    cases = {"2,0": "CA", "GPU-c": "C", "GPU-a": "", "": "", "0,-1,2": "A", "1, 2": "BC"}
    for value, names in cases.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        found = hardware.environment()
        assert (found.machine.gpus, found.machine.driver) == (tuple(names), "600.1" if names else None), value
        assert found.gpu_uuids == tuple(uuids[name] for name in names)
        assert abs(datetime.fromisoformat(found.date) - datetime.now(UTC)).total_seconds() < 60
    monkeypatch.setattr(hardware, "package_version", lambda _: "2.15.0+cpu")
    assert (hardware.gpus(), hardware.machine().driver) == ((), None), "a torch without CUDA sees none"


def test_what_nvml_does_not_know_is_none_and_a_mig_device_is_the_one_gpu(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(Card("A", total=None), None, Card(None, uuid=None, total=GIB), driver=None)
    nameless = Gpu("NVIDIA GPU", None, GIB)
    assert hardware.gpus() == (Gpu("A", "GPU-1", None), nameless)
    assert (hardware.machine().driver, hardware.environment().gpu_uuids) == (None, ("GPU-1",))
    json.dumps(dataclasses.asdict(hardware.environment()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert hardware.gpus() == (nameless,)
    plant(Card(), Card("Card MIG 1g", uuid="MIG-known", total=GIB))
    for value, found in (
        ("MIG-known,MIG-other", Gpu("Card MIG 1g", "MIG-known", GIB)),
        ("MIG-GPU-1/3/0", Gpu("NVIDIA GPU", "MIG-GPU-1/3/0", None)),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert hardware.gpus() == (found,)


TORCH = """
import json, os, types
told = json.loads(os.environ["TORCH_TELLS"])
with open(os.environ["TORCH_ASKED"], "a") as file:
    file.write("once ")
def init():
    if told["error"]:
        raise RuntimeError(told["error"])
class ones:
    def __init__(self, size, device):
        self.error = told["cards"][int(device.partition(":")[2])][3]
    def __add__(self, other):
        if self.error:
            raise RuntimeError(self.error + "\\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")
        return self
    def item(self):
        return 2
cuda = types.SimpleNamespace(
    init=init, device_count=lambda: len(told["cards"]), get_device_capability=lambda i: told["cards"][i][1:3]
)
"""
SLEEP = "import time\ntime.sleep(60)"
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
T4, V100, L40 = ("T4", 7, 5, ""), ("V100", 7, 0, NO_KERNEL), ("L40", 8, 9, "")
OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver."
Install = Callable[..., Path]


@pytest.fixture
def install(plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes an NVML that lists GPUs, and a torch that fails on them as it is told; a file counts who asked it."""

    def make(*cards: tuple[str, int, int, str], driver: str = "600.1", error: str = "") -> Path:
        plant(*(Card(name, uuid=f"GPU-{name}") for name, *_ in cards), driver=driver)
        monkeypatch.setenv("TORCH_TELLS", json.dumps({"error": error, "cards": cards}))
        monkeypatch.setenv("TORCH_ASKED", str(tmp_path / "asked"))
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site" / "torch.py").write_text(TORCH)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
        return tmp_path / "asked"

    return make


def test_why_torch_cannot_use_a_gpu_and_the_ways_out_are_one_sentence(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install(L40, T4)
    assert (gpu_trouble(), setting.usual_device(None), hardware.least_capability()) == ("", "cuda", (7, 5))
    install(("T4", 7, 5, "CUDA error: out of memory"))
    assert gpu_trouble() == "", "others fill it"
    install(T4, driver="535.1", error=OLD)
    found = [gpu_trouble()]
    install(L40, V100)
    found.append(gpu_trouble())
    for text, seconds in (("raise ImportError('no libcudart')", 60), ("import os\nos._exit(3)", 60), (SLEEP, 0.2)):
        install(T4)
        (tmp_path / "site" / "torch.py").write_text(text)
        monkeypatch.setattr(hardware, "TORCH_SECONDS", seconds)
        found.append(gpu_trouble())
    words = ("T4 with driver 535.1: The NVIDIA driver on your system is too old (found version 12020);",)
    words += (f"L40, V100 with driver 600.1: {NO_KERNEL};", "no libcudart;", "ended with 3;", "within 0 s;")
    for sentence, part in zip(found, words, strict=True):
        assert part in sentence
        assert "--device cpu" in sentence
        assert "\n" not in sentence


def test_torch_is_asked_once_and_only_where_there_is_a_gpu(install: Install, plant: Plant) -> None:
    asked = install(V100)
    for device in (None, "cuda", None):
        with pytest.raises(ConfigError, match="no kernel image"):
            setting.usual_device(device)
    with pytest.raises(ConfigError, match="no kernel image"):
        setting.check_ranks("cuda", 1, 1, 2)
    assert asked.read_text() == "once "
    asked.unlink()
    hardware._ask_torch.cache_clear()
    assert setting.usual_device("cpu") == "cpu"
    setting.check_ranks("cpu", 1, 1, 2)
    plant()
    assert setting.usual_device(None) == "cpu"
    assert not asked.exists()
