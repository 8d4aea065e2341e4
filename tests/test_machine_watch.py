"""The machine during a window: read apart from it, true where it is read, None where it is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from ddpm_lab.measure import machine_watch
from ddpm_lab.measure.machine_watch import Watch

RANK, STRANGER = 5_000_001, 5_000_002  # above the largest process id that Linux gives
GIB = 2**30


def test_without_a_gpu_nothing_runs_meanwhile() -> None:
    threads = threading.active_count()
    with Watch({}) as watch:
        assert threading.active_count() == threads
        used = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - used < 0.02
    assert not any(name.startswith("gpu") for name in watch.state)


def test_the_host_is_read_as_it_is() -> None:
    with Watch({}) as watch:
        end = time.monotonic() + 0.4
        while time.monotonic() < end:
            pass
    state = watch.state
    assert state["watched_seconds"] == pytest.approx(0.4, abs=0.15)
    memory = psutil.virtual_memory()
    assert state["ram_used_bytes"] == pytest.approx(memory.total - memory.available, rel=0.3)
    if (busy := state["cpu_utilisation_percent"]) is not None:
        assert 70 / len(os.sched_getaffinity(0)) < busy <= 100, "one core worked all the time"


class Card:
    """A GPU as NVML tells of it; a value of None raises what a device says of what it does not know."""

    def __init__(self, **values: Any) -> None:
        self.watts = 100.0
        self.values: dict[str, Any] = {
            "utilisation": 90,
            "used": 12 * GIB,
            "clocks": {1: 1980, 2: 2619},
            "temperature": 61,
            "reasons": 0x4,
            "power": 250_000,
            "energy": True,
            "processes": {RANK: 2 * GIB},
            "shares": [(RANK, 80)],
            **values,
        }
        self.samples = 0

    def ask(self, name: str) -> Any:
        if self.values[name] is None:
            raise RuntimeError("Not Supported")
        return self.values[name]


class Nvml:
    """The binding, for cards by their UUID."""

    def __init__(self, **cards: Card) -> None:
        self.cards = {uuid.replace("_", "-"): card for uuid, card in cards.items()}

    def nvmlInit(self) -> None:  # noqa: N802 - NVML's names
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:  # noqa: N802
        return self.cards[uuid]

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> Any:  # noqa: N802
        card.samples += 1
        return SimpleNamespace(gpu=card.ask("utilisation"))

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:  # noqa: N802
        return SimpleNamespace(used=card.ask("used"))

    def nvmlDeviceGetClockInfo(self, card: Card, kind: int) -> int:  # noqa: N802
        return int(card.ask("clocks")[kind])

    def nvmlDeviceGetTemperature(self, card: Card, sensor: int) -> int:  # noqa: N802
        assert sensor == 0
        return int(card.ask("temperature"))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: Card) -> int:  # noqa: N802
        return int(card.ask("reasons"))

    def nvmlDeviceGetPowerUsage(self, card: Card) -> int:  # noqa: N802
        return int(card.ask("power"))

    def nvmlDeviceGetTotalEnergyConsumption(self, card: Card) -> float:  # noqa: N802
        card.ask("energy")
        return 1e3 * card.watts * time.monotonic()

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in card.ask("processes").items()]

    def nvmlDeviceGetProcessUtilization(self, card: Card, since: int) -> list[Any]:  # noqa: N802
        assert abs(since / 1e6 - time.time()) < 60
        return [SimpleNamespace(pid=pid, smUtil=share) for pid, share in card.ask("shares")]


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    machine_watch.nvml_device.cache_clear()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What is found of cards in a window of 0.3 s, in which a rank works on each."""

    def watch(seconds: float = 0.3, **cards: Card) -> dict[str, Any]:
        monkeypatch.setitem(sys.modules, "pynvml", Nvml(**cards))
        monkeypatch.setattr(machine_watch, "FIRST_SECONDS", 0.1)
        with Watch(dict.fromkeys((uuid.replace("_", "-") for uuid in cards), RANK)) as watch:
            time.sleep(seconds)
        return watch.state

    return watch


def test_a_gpu_is_sampled_while_it_works(watched: Any) -> None:
    card = Card()
    state = watched(GPU_1=card)
    assert card.samples == 1, "once in the window: the next one is a second later, and the end needs none"
    assert state["gpu_utilisation_percent"] == 90
    assert (state["gpu_clock_mhz"], state["gpu_clock_min_mhz"], state["gpu_memory_clock_mhz"]) == (1980, 1980, 2619)
    assert state["gpu_temperature_celsius"] == 61
    assert state["gpu_throttle_reasons"] == 0x4
    assert state["gpu_memory_used_bytes"] == 12 * GIB
    assert state["gpu_power_watts"] == pytest.approx(100, rel=0.01), "by the energy counter"
    assert state["gpu_energy_joules"] == pytest.approx(100 * state["watched_seconds"], rel=0.1)
    assert not [t for t in threading.enumerate() if t.name == "ddpm_lab machine state"]


def test_samples_come_at_their_period_and_are_averaged(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_watch, "PERIOD_SECONDS", 0.2)
    card = Card()
    found: list[int] = []

    def rising(*_: Any) -> int:
        found.append(1000 + 100 * len(found))
        return found[-1]

    monkeypatch.setattr(Nvml, "nvmlDeviceGetClockInfo", rising)
    state = watched(0.8, GPU_1=card)
    assert 2 <= card.samples <= 4
    clocks = found[::2]
    assert state["gpu_clock_mhz"] == pytest.approx(sum(clocks) / len(clocks))
    assert state["gpu_clock_min_mhz"] == min(clocks) < state["gpu_clock_mhz"]


def test_a_window_shorter_than_the_first_pause_has_one_sample(watched: Any) -> None:
    card = Card()
    assert watched(0.0, GPU_1=card)["gpu_clock_mhz"] == 1980
    assert card.samples == 1


def test_gpus_of_a_group_are_one(watched: Any) -> None:
    second = Card(utilisation=50, clocks={1: 1500, 2: 2619}, temperature=70, reasons=0x20, used=20 * GIB)
    state = watched(GPU_1=Card(), GPU_2=second)
    assert state["gpu_utilisation_percent"] == 70
    assert state["gpu_clock_min_mhz"] == 1500
    assert state["gpu_temperature_celsius"] == 70
    assert state["gpu_throttle_reasons"] == 0x24
    assert state["gpu_power_watts"] == pytest.approx(200, rel=0.01)
    assert state["gpu_memory_used_bytes"] == 20 * GIB, "of the fullest card"


NOTHING = dict.fromkeys(Card().values)


def test_what_a_card_does_not_tell_is_unknown_and_never_zero(watched: Any) -> None:
    state = watched(GPU_1=Card(**NOTHING))
    gpu = {name: value for name, value in state.items() if name.startswith("gpu")}
    assert len(gpu) >= 13
    assert set(gpu.values()) == {None}
    both = watched(GPU_1=Card(), GPU_3=Card(**NOTHING))
    assert both["gpu_power_watts"] is None, "half of the power is not the group's"


def test_without_an_energy_counter_power_is_that_of_the_samples(watched: Any) -> None:
    state = watched(GPU_1=Card(energy=None))
    assert state["gpu_power_watts"] == 250
    assert state["gpu_energy_joules"] is None


def test_a_machine_without_nvml_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    threads = threading.active_count()
    with Watch({"GPU-1": RANK}) as watch:
        assert threading.active_count() == threads
    assert watch.state["gpu_utilisation_percent"] is None
    assert watch.state["gpu_others"] is None


def test_a_mig_device_is_found_under_the_name_that_torch_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(MIG_1=Card()))
    with Watch({"GPU-1": RANK}) as watch:
        pass
    assert watch.state["gpu_clock_mhz"] == 1980


def test_other_processes_are_counted_and_not_named(watched: Any) -> None:
    processes = {RANK: 2 * GIB, STRANGER: 3 * GIB, STRANGER + 1: GIB}
    state = watched(GPU_1=Card(processes=processes, shares=[(RANK, 60), (STRANGER, 30), (STRANGER, 20)]))
    # The rank of this test is no real child: it counts too.
    assert state["gpu_others"] == 3
    assert state["gpu_others_bytes"] == 6 * GIB
    assert state["gpu_others_percent"] == 60 + 25
    assert state["gpu_others_changed_bytes"] == 0
    assert str(STRANGER) not in json.dumps(state)
    assert "GPU-1" not in json.dumps(state)


def test_ones_own_sleeping_groups_are_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "30"]) as asleep:
        try:
            card = Card(processes={asleep.pid: GIB, os.getpid(): GIB}, shares=[(asleep.pid, 90)])
            monkeypatch.setitem(sys.modules, "pynvml", Nvml(GPU_1=card))
            with Watch({"GPU-1": asleep.pid}) as watch:
                pass
        finally:
            asleep.kill()
    assert [watch.state[f"gpu_others{n}"] for n in ("", "_bytes", "_changed_bytes", "_percent")] == [0, 0, 0, 0]


def test_a_stranger_that_comes_changes_the_memory_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(shares=[])
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(GPU_1=card))
    with Watch({"GPU-1": RANK}) as watch:
        card.values["processes"] = {RANK: 2 * GIB, STRANGER: 3 * GIB}
    assert watch.state["gpu_others_changed_bytes"] == 3 * GIB
    assert watch.state["gpu_others_percent"] is None, "NVML has no sample of anybody"


@pytest.mark.parametrize("processes", [{}, {7: 2 * GIB}])
def test_where_nvml_does_not_list_the_rank_itself_others_are_unknown(watched: Any, processes: dict[int, int]) -> None:
    """In a container with process numbers of its own the rank goes by another one."""
    state = watched(GPU_1=Card(processes=processes))
    assert {state[f"gpu_others{n}"] for n in ("", "_bytes", "_changed_bytes", "_percent")} == {None}
    assert state["gpu_clock_mhz"] == 1980


def test_memory_that_nvml_does_not_tell_is_unknown(watched: Any) -> None:
    state = watched(GPU_1=Card(processes={RANK: None, STRANGER: None}))
    assert (state["gpu_others"], state["gpu_others_bytes"]) == (2, None)


def test_a_group_that_fails_leaves_no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(GPU_1=Card()))
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="planted"), Watch({"GPU-1": RANK}):
        raise RuntimeError("planted")
    assert threading.active_count() == threads
