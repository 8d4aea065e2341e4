"""The machine and its processor as they are, what they do while a group works; None for what is unknown, never 0."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import util
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Call
from planted_gpus import GIB, RANK, STRANGER, Card, Plant

from ddpm_lab import processor
from ddpm_lab.checks import ConfigError
from ddpm_lab.cli.check import NEEDED, Item, checkup
from ddpm_lab.measure import hardware, others
from ddpm_lab.measure.hardware import Gpu, gpu_trouble
from ddpm_lab.measure.others import Watch
from ddpm_lab.training import setting

JOB = {  # of which the tightest of the groups above holds
    "/proc/self/cgroup": "0::/user/job\n",
    "/sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
    "/sys/fs/cgroup/user/cpu.max": "350000 100000\n",
    "/sys/fs/cgroup/cpu.max": "800000 100000\n",
    "/sys/fs/cgroup/user/job/cpu.stat": "throttled_usec 1500000\n",
    "/sys/fs/cgroup/user/cpu.stat": "throttled_usec 500000\n",
    "/sys/fs/cgroup/cpu.stat": "usage_usec 9\n",
}
FIRST_VERSION = {  # in a container, which has the folder of its own group at the top
    "/proc/self/cgroup": "9:name=systemd:/pod\n3:cpu,cpuacct:/pod\n0::/\n",
    "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
    "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "/sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us": "-1\n",
    "/sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n",
    "/sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_throttled 2\nthrottled_time 1500000000\n",
}


def test_cores_are_cut_by_the_quota_and_what_it_took_is_read_from_every_level(machine_files: dict[str, str]) -> None:
    """Of sixteen cores; the cores that are left, and the seconds of which a quota held the process back."""
    half = {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "50000 100000\n"}
    nonsense = {"/proc/self/cgroup": "nonsense\n", "/sys/fs/cgroup/cpu.max": "nonsense\n"}
    for files, found in ((JOB, (3, 2.0)), (FIRST_VERSION, (2, 1.5)), (half, (1, None)), (nonsense, (16, None))):
        machine_files.clear()
        machine_files.update(files)
        assert (hardware.usable_cores(), hardware.cgroup_throttled_seconds()) == found, files


def test_kills_for_want_of_memory_are_counted_where_the_kernel_tells(machine_files: dict[str, str]) -> None:
    for text, found in {"oom_kill_other 9\noom_kill 3\nswap_ra 4\n": 3, "nr_free_pages 7\n": 0}.items():
        machine_files["/proc/vmstat"] = text
        assert hardware.oom_kills() == found


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
import os, types, numpy
open({asked!r}, "a").write(os.environ["CUDA_DEVICE_ORDER"])
def init():
    if {error!r}:
        raise RuntimeError({error!r})
def ones(size, device):
    if {broken!r}:
        raise RuntimeError({broken!r} + "\\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1")
    return numpy.ones(size)
def properties(i):
    return types.SimpleNamespace(name=f"card {{i}}", uuid=f"uuid-{{i}}", total_memory=1 << 33)
cuda = types.SimpleNamespace(
    init=init, device_count=lambda: {count}, get_device_capability=lambda i: {capabilities}[i],
    get_device_properties=properties,
)
"""
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver."
CAPABILITIES = {"T4": (7, 5), "V100": (7, 0), "L40": (8, 9)}
Install = Callable[..., Path]


@pytest.fixture
def install(plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes an NVML that lists GPUs, and a torch that fails on them as it is told; a file counts who asked it."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(*names: str, driver: str = "600.1", error: str = "", broken: str = "", code: str = TORCH) -> Path:
        plant(*(Card(name, uuid=f"GPU-{name}") for name in names), driver=driver)
        told: dict[str, Any] = {"error": error, "broken": broken, "asked": str(tmp_path / "asked")}
        told |= {"count": len(names), "capabilities": [CAPABILITIES[name] for name in names]}
        (tmp_path / "torch.py").write_text(code.format(**told))
        return tmp_path / "asked"

    return make


def test_why_torch_cannot_use_a_gpu_and_the_ways_out_are_one_sentence(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = install("L40", "T4")
    assert (gpu_trouble(), setting.usual_device(None), hardware.least_capability()) == ("", "cuda", (7, 5))
    assert asked.read_text() == "PCI_BUS_ID", "once, and in the order of NVML"
    install("T4", broken="CUDA error: out of memory")
    assert gpu_trouble() == "", "others fill it"
    rows: list[tuple[dict[str, str], float, str]] = [
        (
            {"error": OLD, "driver": "535.1"},
            60,
            f"T4, V100 with driver 535.1, which is for CUDA up to 12.2: {OLD.partition('.')[0]};",
        ),
        ({"broken": NO_KERNEL}, 60, f"T4, V100 with driver 600.1, which is for CUDA up to 12.2: {NO_KERNEL};"),
        ({"code": "raise ImportError('no libcudart')"}, 60, "no libcudart;"),
        ({"code": "import os\nos._exit(3)"}, 60, "ended with 3;"),
        ({"code": "import time\ntime.sleep(60)"}, 0.2, "within 0 s;"),
    ]
    for told, seconds, words in rows:
        install("T4", "V100", **told)
        monkeypatch.setattr(hardware, "TORCH_SECONDS", seconds)
        sentence = gpu_trouble()
        assert words in sentence
        assert "--device cpu" in sentence
    with pytest.raises(ConfigError, match="cannot use T4"):
        setting.usual_device(None)
    assert setting.usual_device("cpu") == "cpu"
    install("T4", error="Torch not compiled with CUDA enabled")
    monkeypatch.setattr(hardware, "package_version", lambda _: "2.15.0+cpu")
    monkeypatch.setattr(hardware, "TORCH_SECONDS", 60)
    assert hardware.gpus() == ()
    with pytest.raises(ConfigError, match=r"cpu cannot use T4 .* not compiled with CUDA enabled;"):
        setting.usual_device(None)


def test_without_nvml_the_gpus_are_those_that_torch_sees(
    install: Install, plant: Plant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = install("L40", "T4")
    plant()
    assert (hardware.gpus(), asked.exists()) == ((), False), "without a driver torch is not asked"
    plant()
    monkeypatch.setattr(hardware, "DRIVERS", (str(tmp_path),))
    assert hardware.gpus() == tuple(Gpu(f"card {i}", f"GPU-uuid-{i}", 1 << 33) for i in (0, 1))
    assert (setting.usual_device(None), hardware.machine().driver) == ("cuda", None)


OTHERS = ("gpu_others", "gpu_others_bytes", "gpu_others_changed_bytes", "gpu_others_percent")
Watched = Callable[..., dict[str, Any]]


def test_without_a_gpu_nothing_runs_meanwhile_and_the_host_is_read(plant: Plant) -> None:
    plant()
    groups: list[dict[str, int]] = [{}, {"GPU-1": RANK}]
    for gpus in groups:
        threads = threading.active_count()
        with Watch(gpus) as watch:
            assert threading.active_count() == threads
            end = time.monotonic() + 0.4
            while time.monotonic() < end:
                pass
        state = watch.state
        assert {value for name, value in state.items() if name.startswith("gpu")} == ({None} if gpus else set())
        assert state["watched_seconds"] == pytest.approx(0.4, abs=0.15)
        memory = psutil.virtual_memory()
        assert state["ram_used_bytes"] == pytest.approx(memory.total - memory.available, rel=0.3)
        if (busy := state["cpu_utilisation_percent"]) is not None:
            assert 70 / len(os.sched_getaffinity(0)) < busy <= 100, "one core worked all the time"


@pytest.fixture
def watched(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """What is found of cards in a window of 0.1 s, in which a rank works on each."""

    def watch(*cards: Card, seconds: float = 0.1) -> dict[str, Any]:
        for number, card in enumerate(cards):
            card.values["uuid"] = f"GPU-{number}"
        plant(*cards)
        with Watch({card.values["uuid"]: RANK for card in cards}) as watch:
            time.sleep(seconds)
        assert not [t for t in threading.enumerate() if t.name == "ddpm_lab machine state"]
        return watch.state

    monkeypatch.setattr(others, "FIRST_SECONDS", 0.05)
    return watch


def test_a_gpu_is_sampled_while_it_works_and_those_of_a_group_are_one(watched: Watched) -> None:
    one = {
        **{"gpu_utilisation_percent": 90, "gpu_clock_mhz": 1980, "gpu_clock_min_mhz": 1980},
        **{"gpu_memory_clock_mhz": 2619, "gpu_temperature_celsius": 61, "gpu_throttle_reasons": 0x4},
        **{"gpu_memory_used_bytes": 12 * GIB},
    }
    for seconds in (0.1, 0.0):
        state = watched(card := Card(), seconds=seconds)
        assert {name: state[name] for name in one} == one
        assert card.samples == 1, "in the window, or at its end: the next one is a second later"
    state = watched(Card(), seconds=0.3)
    assert state["gpu_power_watts"] == pytest.approx(100, rel=0.01), "by the energy counter"
    second = Card(utilisation=50, clocks={1: 1500, 2: 2619}, temperature=70, reasons=0x20, used=20 * GIB)
    state = watched(Card(), second)
    both = {"gpu_utilisation_percent": 70, "gpu_clock_min_mhz": 1500, "gpu_temperature_celsius": 70}
    both |= {"gpu_throttle_reasons": 0x24, "gpu_memory_used_bytes": 20 * GIB}
    assert {name: state[name] for name in both} == both
    assert state["gpu_power_watts"] == pytest.approx(200, rel=0.01)


def test_what_a_card_does_not_tell_is_unknown_and_never_zero(watched: Watched) -> None:
    nothing = dict.fromkeys(Card().values)
    gpu = {name: value for name, value in watched(Card(**nothing)).items() if name.startswith("gpu")}
    assert len(gpu) >= 12
    assert set(gpu.values()) == {None}
    assert watched(Card(), Card(**nothing))["gpu_power_watts"] is None, "half of the power is not the group's"
    assert watched(Card(energy=None))["gpu_power_watts"] == 250
    assert watched(Card(processes={RANK: None, STRANGER: None}))["gpu_others_bytes"] is None
    # In a container with process numbers of its own the rank goes by another one.
    state = watched(Card(processes={7: 2 * GIB}))
    assert {state[name] for name in OTHERS} == {None}


def test_other_processes_are_counted_and_not_named_and_ones_own_are_none(watched: Watched, plant: Plant) -> None:
    processes = {RANK: 2 * GIB, STRANGER: 3 * GIB, STRANGER + 1: GIB}
    state = watched(Card(processes=processes, shares=[(RANK, 60), (STRANGER, 30), (STRANGER, 20)]))
    # The rank of this test is no real child: it counts too.
    assert [state[name] for name in OTHERS] == [3, 6 * GIB, 0, 60 + 25]
    assert str(STRANGER) not in json.dumps(state)
    plant(card := Card(shares=[]))
    with Watch({"GPU-1": RANK}) as watch:
        card.values["processes"] = {RANK: 2 * GIB, STRANGER: 3 * GIB}
    assert watch.state["gpu_others_changed_bytes"] == 3 * GIB, "one came"
    assert watch.state["gpu_others_percent"] is None, "NVML has no sample of anybody"
    with subprocess.Popen(["sleep", "30"]) as asleep:
        plant(Card(processes={asleep.pid: GIB, os.getpid(): GIB}, shares=[(asleep.pid, 90)]))
        with Watch({"GPU-1": asleep.pid}) as watch:
            pass
        asleep.kill()
    assert [watch.state[name] for name in OTHERS] == [0, 0, 0, 0]


def items(output: Path) -> dict[str, Item]:
    return {item.name: item for item in checkup(output)}


def test_this_machine_can_run_the_lab_and_nothing_is_changed(tmp_path: Path, call: Call) -> None:
    found = items(tmp_path / "not" / "there")
    assert list(tmp_path.iterdir()) == []
    assert all(found[name].present for name in NEEDED)
    assert all(item.detail and item.adds and "\n" not in item.detail + item.adds for item in found.values())
    code, out, _ = call("check", "--output-dir", tmp_path, "--json")
    assert (code, json.loads(out)["can_run"]) == (0, True)
    assert call("check", "--output-dir", tmp_path)[1].endswith("The lab can run here.\n")
    code, _, said = call("check", "--minutes", "3")
    assert (code, "--minutes has no effect there" in said) == (2, True), "not accepted and ignored"


def test_what_is_missing_is_named_with_what_it_would_add(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *a: None if name in ("torch", "PIL") else real(name, *a))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(hardware, "usable_cores", lambda: 1)
    monkeypatch.setattr(hardware, "gpus", tuple)
    found = items(tmp_path)
    assert [found[name].present for name in ("torch", "PIL", "torch.compile")] == [False] * 3
    assert "make setup" in found["torch"].adds
    assert "apt install g++" in found["torch.compile"].detail
    assert not found["two ranks"].present
    cards = (Gpu("Card X", "GPU-1", 80 << 30), Gpu("Card Y", "GPU-2", 24 << 30))
    monkeypatch.setattr(hardware, "gpus", lambda: cards)
    monkeypatch.setenv("CC", "no-such-compiler")
    found = items(tmp_path)
    assert "apt install gcc" in found["torch.compile"].detail, "Triton's"
    assert (found["NVIDIA GPU"].present, found["NVIDIA GPU"].detail) == (True, "Card X (80 GiB), Card Y (24 GiB)")


def test_a_name_that_every_generation_has_is_told_by_family_and_model() -> None:
    names = {
        "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\nmodel\t\t: 9\n": "AMD EPYC (family 26, model 2)",
        "cpu family\t: 6\nmodel\t\t: 143\nmodel name\t: Intel(R) Xeon(R)  8481C CPU\n": "Intel(R) Xeon(R) 8481C CPU",
        "cpu family: 6\nmodel: 79\nmodel name: Intel(R) Xeon(R) CPU @ 2.20GHz\n": (
            "Intel(R) Xeon(R) CPU @ 2.20GHz (family 6, model 79)"
        ),
        "processor\t: 0\nHardware\t: BCM2835\n": "BCM2835",
        "processor\t: 0\nBogoMIPS\t: 100.00\n": "",
    }
    assert {cpuinfo: processor.name_in(cpuinfo) for cpuinfo in names} == names


def test_processors_and_gpus_get_the_number_format_that_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    intel = "vendor_id: GenuineIntel\nflags: avx2 avx512_bf16"
    cases = {"flags: avx2 avx512_bf16": "bf16", "flags: avx2 avx512f": "fp32", "Features: bf16": "bf16"}
    cases |= {intel: "fp32", f"{intel} amx_bf16": "bf16"}
    for flags, precision in cases.items():
        monkeypatch.setattr(processor, "_cpuinfo", lambda text=flags: f"processor: 0\n{text}\n")
        for known in (processor.multiplies_bf16, processor.favours_bf16):
            known.cache_clear()
        assert setting.usual_settings("cpu")["precision"] == precision
    for known in (processor.multiplies_bf16, processor.favours_bf16):
        known.cache_clear()
    for capability, usual in (((9, 0), ("bf16", "whole")), ((7, 5), ("fp16", "whole")), ((6, 1), ("fp32", "off"))):
        monkeypatch.setattr(setting, "least_capability", lambda found=capability: found)
        found = setting.usual_settings("cuda")
        assert (found["precision"], found["compile"]) == usual
    monkeypatch.setenv("CC", "nogcc")
    monkeypatch.setattr(setting, "least_capability", lambda: (9, 0))
    assert setting.usual_settings("cuda")["compile"] == "off", "as in an image without a C compiler"


@pytest.mark.slow
def test_kernels_compiled_for_an_older_processor_compute_the_same(tmp_path: Path) -> None:
    """Every test of the kernels again, with a compiler that leaves out the instructions of a newer one."""
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -mno-avx512f -mno-avx512bf16\n')
    compiler.chmod(0o755)
    environment = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/test_kernels.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
