"""The machine as it is: affinity, quotas, visible GPUs, what others take; None for what is unknown."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ddpm_lab.measure import hardware, machine_watch
from ddpm_lab.measure.hardware import CpuClock, Gpu
from ddpm_lab.measure.machine_watch import Utilisation, Watch


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
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            {  # the tightest of the groups above holds
                "/proc/self/cgroup": "0::/user/job\n",
                "/sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
                "/sys/fs/cgroup/user/cpu.max": "350000 100000\n",
                "/sys/fs/cgroup/cpu.max": "800000 100000\n",
            },
            3,
        ),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 16),
        (
            {  # version 1, a job's own group, as a scheduler makes it
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


def test_under_a_quota_the_share_of_others_is_unknown(cgroup: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    cgroup |= {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "500000\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}
    cgroup["/proc/stat"] = STAT.format(1, 1, 1, 1, 1)
    now = CpuClock.read()
    assert now.others_cores(now, 1.0) is None
    assert (now.busy(now), now.stolen(now)) == (0.0, 0.0)
    cgroup["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "-1\n"
    free = CpuClock.read()
    assert free.others_cores(free, 1.0) == 0.0
    assert free.others_cores(now, 1.0) is None


@pytest.mark.parametrize("stat", [None, "cpux 1\n", "cpu0 1 2\n", STAT.format(1, 1, 1, 1, 1)])
def test_cores_that_the_kernel_does_not_show_are_unknown(cgroup: dict[str, str], stat: str | None) -> None:
    cgroup |= {} if stat is None else {"/proc/stat": stat}
    now = CpuClock.read()  # sixteen cores, as far as the affinity says
    assert now.others_cores(now, 1.0) is None
    assert now.stolen(now) is None


@pytest.mark.parametrize(
    ("files", "seconds"),
    [
        ({}, None),
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
    ],
)
def test_time_that_a_quota_took_is_read_from_every_level(
    cgroup: dict[str, str], files: dict[str, str], seconds: float | None
) -> None:
    cgroup |= files
    assert hardware.cgroup_throttled_seconds() == (None if seconds is None else pytest.approx(seconds))


RANK, STRANGER = 5_000_001, 5_000_002  # above the largest process id that Linux gives
GIB = 2**30
CARDS = tuple(Gpu(name, f"GPU-{uuid}", 80 << 30) for name, uuid in (("A", "aa11"), ("B", "ab22"), ("C", "cc33")))
OTHERS = ("gpu_others", "gpu_others_bytes", "gpu_others_changed_bytes", "gpu_others_percent")


class Card:
    """A GPU as NVML tells of it; a value of None raises what a device says of what it does not know."""

    def __init__(self, **values: Any) -> None:
        self.watts = 100.0
        self.values: dict[str, Any] = {
            **{"name": "Card", "uuid": "GPU-1", "total": 80 * GIB, "utilisation": 90, "used": 12 * GIB},
            **{"clocks": {1: 1980, 2: 2619}, "temperature": 61, "reasons": 0x4, "power": 250_000, "energy": True},
            **{"processes": {RANK: 2 * GIB}, "shares": [(RANK, 80)], **values},
        }
        self.samples = 0

    def ask(self, name: str) -> Any:
        if self.values[name] is None:
            raise RuntimeError("Not Supported")
        return self.values[name]


def planted_nvml(*cards: Card | None, driver: str | None = "600.1") -> Any:
    """The binding, for cards of which None belongs to somebody else's job."""

    def utilisation(card: Card) -> Any:
        card.samples += 1
        return SimpleNamespace(gpu=card.ask("utilisation"))

    def by_index(index: int) -> Card:
        if (card := cards[index]) is None:
            raise RuntimeError("NVML_ERROR_NO_PERMISSION")
        return card

    def running(card: Card) -> list[Any]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.ask("processes").items()]

    return SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: driver,
        nvmlDeviceGetCount=lambda: len(cards),
        nvmlDeviceGetHandleByIndex=by_index,
        nvmlDeviceGetHandleByUUID=lambda uuid: {c.values["uuid"]: c for c in cards if c}[uuid],
        nvmlDeviceGetName=lambda card: card.ask("name"),
        nvmlDeviceGetUUID=lambda card: card.ask("uuid"),
        nvmlDeviceGetMemoryInfo=lambda card: SimpleNamespace(used=card.ask("used"), total=card.ask("total")),
        nvmlDeviceGetUtilizationRates=utilisation,
        nvmlDeviceGetClockInfo=lambda card, kind: card.ask("clocks")[kind],
        nvmlDeviceGetTemperature=lambda card, sensor: {0: card.ask("temperature")}[sensor],
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda card: card.ask("reasons"),
        nvmlDeviceGetPowerUsage=lambda card: card.ask("power"),
        nvmlDeviceGetTotalEnergyConsumption=lambda card: card.ask("energy") and 1e3 * card.watts * time.monotonic(),
        nvmlDeviceGetComputeRunningProcesses=running,
        nvmlDeviceGetProcessUtilization=lambda card, since: [
            SimpleNamespace(pid=pid, smUtil=share)
            for pid, share in card.ask("shares")
            if abs(since / 1e6 - time.time()) < 60
        ],
    )


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes an NVML with the given cards the one that is read."""

    def plant(*cards: Card | None, **values: Any) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", planted_nvml(*cards, **values))
        forget()

    def forget() -> None:
        for cached in (hardware._nvml, hardware.gpu_handle, hardware._nvidia):
            cached.cache_clear()

    monkeypatch.setattr(hardware, "package_version", lambda _: "2.15.0+cu130")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield plant
    forget()


# --- which there are -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "names"),
    [(None, "ABC"), ("2,0", "CA"), ("GPU-c", "C"), ("GPU-a", ""), ("", ""), ("0,-1,2", "A"), ("1, 2", "BC")],
)
def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch, value: str | None, names: str) -> None:
    """A list ends where it is wrong, as for CUDA; the beginning of a UUID has to fit one alone."""
    monkeypatch.setattr(hardware, "_nvidia", lambda: (CARDS, "600.1"))
    monkeypatch.setattr(hardware, "package_version", lambda _: "2.15.0+cu130")
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    machine = hardware.machine()
    assert machine.gpus == tuple(names)
    assert machine.driver == ("600.1" if names else None)
    assert hardware.environment().gpu_uuids == tuple(g.uuid for n in names for g in CARDS if g.name == n)
    monkeypatch.setattr(hardware, "package_version", lambda _: "2.15.0+cpu")
    assert (hardware.gpus(), hardware.machine().driver) == ((), None), "a torch without CUDA sees none"


def test_what_nvml_does_not_know_is_none_and_the_rest_is_kept(
    plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(Card(name="A", total=None), None, Card(name=None, uuid=None, total=GIB), driver=None)
    nameless = Gpu("NVIDIA GPU", None, GIB)
    assert hardware.gpus() == (Gpu("A", "GPU-1", None), nameless)
    assert hardware.machine().driver is None
    assert hardware.environment().gpu_uuids == ("GPU-1",)
    json.dumps(dataclasses.asdict(hardware.environment()))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert hardware.gpus() == (nameless,)


def test_a_mig_device_is_the_one_gpu(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(Card(), Card(name="Card MIG 1g", uuid="MIG-known", total=GIB))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-known,MIG-other")
    assert hardware.gpus() == (Gpu("Card MIG 1g", "MIG-known", GIB),)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-GPU-1/3/0")
    assert hardware.gpus() == (Gpu("NVIDIA GPU", "MIG-GPU-1/3/0", None),)


# --- what they do ----------------------------------------------------------------------------------------------------


def test_without_a_gpu_nothing_runs_meanwhile_and_the_host_is_read() -> None:
    threads = threading.active_count()
    with Watch({}) as watch:
        assert threading.active_count() == threads
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            pass
    state = watch.state
    assert not any(name.startswith("gpu") for name in state)
    assert state["watched_seconds"] == pytest.approx(0.4, abs=0.15)
    memory = psutil.virtual_memory()
    assert state["ram_used_bytes"] == pytest.approx(memory.total - memory.available, rel=0.3)
    if (busy := state["cpu_utilisation_percent"]) is not None:
        assert 70 / len(os.sched_getaffinity(0)) < busy <= 100, "one core worked all the time"


@pytest.fixture
def watched(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What is found of cards in a window of 0.2 s, in which a rank works on each."""

    def watch(*cards: Card, seconds: float = 0.2) -> dict[str, Any]:
        for number, card in enumerate(cards):
            card.values["uuid"] = f"GPU-{number}"
        plant(*cards)
        with Watch({card.values["uuid"]: RANK for card in cards}) as watch:
            time.sleep(seconds)
        assert not [t for t in threading.enumerate() if t.name == "ddpm_lab machine state"]
        return watch.state

    monkeypatch.setattr(machine_watch, "FIRST_SECONDS", 0.1)
    return watch


def test_a_gpu_is_sampled_while_it_works(watched: Callable[..., dict[str, Any]]) -> None:
    state = watched(card := Card())
    assert card.samples == 1, "once in the window: the next one is a second later, and the end needs none"
    assert state["gpu_utilisation_percent"] == 90
    assert (state["gpu_clock_mhz"], state["gpu_clock_min_mhz"], state["gpu_memory_clock_mhz"]) == (1980, 1980, 2619)
    assert (state["gpu_temperature_celsius"], state["gpu_throttle_reasons"]) == (61, 0x4)
    assert state["gpu_memory_used_bytes"] == 12 * GIB
    assert state["gpu_power_watts"] == pytest.approx(100, rel=0.01), "by the energy counter"
    assert state["gpu_energy_joules"] == pytest.approx(100 * state["watched_seconds"], rel=0.1)
    assert watched(short := Card(), seconds=0.0)["gpu_clock_mhz"] == 1980
    assert short.samples == 1


def test_gpus_of_a_group_are_one(watched: Callable[..., dict[str, Any]]) -> None:
    second = Card(utilisation=50, clocks={1: 1500, 2: 2619}, temperature=70, reasons=0x20, used=20 * GIB)
    state = watched(Card(), second)
    assert state["gpu_utilisation_percent"] == 70
    assert state["gpu_clock_min_mhz"] == 1500
    assert (state["gpu_temperature_celsius"], state["gpu_throttle_reasons"]) == (70, 0x24)
    assert state["gpu_power_watts"] == pytest.approx(200, rel=0.01)
    assert state["gpu_memory_used_bytes"] == 20 * GIB, "of the fullest card"


def test_what_a_card_does_not_tell_is_unknown_and_never_zero(watched: Callable[..., dict[str, Any]]) -> None:
    nothing = dict.fromkeys(Card().values)
    gpu = {name: value for name, value in watched(Card(**nothing)).items() if name.startswith("gpu")}
    assert len(gpu) >= 13
    assert set(gpu.values()) == {None}
    assert watched(Card(), Card(**nothing))["gpu_power_watts"] is None, "half of the power is not the group's"
    state = watched(Card(energy=None))
    assert (state["gpu_power_watts"], state["gpu_energy_joules"]) == (250, None)
    assert watched(Card(processes={RANK: None, STRANGER: None}))["gpu_others_bytes"] is None


def test_a_machine_without_nvml_is_unknown(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    hardware._nvml.cache_clear()
    assert hardware.gpus() == ()
    threads = threading.active_count()
    with Watch({"GPU-1": RANK}) as watch:
        assert threading.active_count() == threads
    assert {watch.state[name] for name in ("gpu_utilisation_percent", *OTHERS)} == {None}
    with Utilisation(["GPU-1"]) as use:
        pass
    assert use.percent is None


def test_other_processes_are_counted_and_not_named(watched: Callable[..., dict[str, Any]]) -> None:
    processes = {RANK: 2 * GIB, STRANGER: 3 * GIB, STRANGER + 1: GIB}
    state = watched(Card(processes=processes, shares=[(RANK, 60), (STRANGER, 30), (STRANGER, 20)]))
    # The rank of this test is no real child: it counts too.
    assert [state[name] for name in OTHERS] == [3, 6 * GIB, 0, 60 + 25]
    assert str(STRANGER) not in json.dumps(state)


def test_ones_own_sleeping_groups_are_no_others(plant: Callable[..., None]) -> None:
    with subprocess.Popen(["sleep", "30"]) as asleep:
        plant(Card(processes={asleep.pid: GIB, os.getpid(): GIB}, shares=[(asleep.pid, 90)]))
        with Watch({"GPU-1": asleep.pid}) as watch:
            pass
        asleep.kill()
    assert [watch.state[name] for name in OTHERS] == [0, 0, 0, 0]


def test_a_stranger_that_comes_changes_the_memory_of_others(plant: Callable[..., None]) -> None:
    plant(card := Card(shares=[]))
    with Watch({"GPU-1": RANK}) as watch:
        card.values["processes"] = {RANK: 2 * GIB, STRANGER: 3 * GIB}
    assert watch.state["gpu_others_changed_bytes"] == 3 * GIB
    assert watch.state["gpu_others_percent"] is None, "NVML has no sample of anybody"


def test_where_nvml_does_not_list_the_rank_itself_others_are_unknown(watched: Callable[..., dict[str, Any]]) -> None:
    """In a container with process numbers of its own the rank goes by another one."""
    state = watched(Card(processes={7: 2 * GIB}))
    assert {state[name] for name in OTHERS} == {None}
    assert state["gpu_clock_mhz"] == 1980


def test_a_group_that_fails_leaves_no_sampler(plant: Callable[..., None]) -> None:
    plant(Card())
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="planted"), Watch({"GPU-1": RANK}):
        raise RuntimeError("planted")
    assert threading.active_count() == threads


def test_utilisation_is_the_mean_over_samples(plant: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_watch, "UTILISATION_SECONDS", 0.01)
    card = Card(uuid="one", utilisation=40)
    plant(card, Card(uuid="silent", utilisation=None))
    with Utilisation(["one", "silent", "gone"]) as watch:
        for utilisation, until in ((40, 10), (60, 20)):
            card.values["utilisation"] = utilisation
            while card.samples < until:
                time.sleep(0.001)
    assert watch.percent == pytest.approx(50, abs=3)
    seen = card.samples
    time.sleep(0.05)
    assert card.samples == seen, "it goes on after its run"
