"""What the machine does while a group works, read from planted GPUs; None for what is unknown, never 0."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from planted_gpus import GIB, RANK, STRANGER, Card, Plant

from ddpm_lab.measure import machine_watch
from ddpm_lab.measure.machine_watch import Watch

OTHERS = ("gpu_others", "gpu_others_bytes", "gpu_others_changed_bytes", "gpu_others_percent")
Watched = Callable[..., dict[str, Any]]


def test_without_a_gpu_nothing_runs_meanwhile_and_the_host_is_read(plant: Plant) -> None:
    plant()
    for gpus in ({}, {"GPU-1": RANK}):
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

    monkeypatch.setattr(machine_watch, "FIRST_SECONDS", 0.05)
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
    state = watched(Card())
    assert state["gpu_power_watts"] == pytest.approx(100, rel=0.01), "by the energy counter"
    assert state["gpu_energy_joules"] == pytest.approx(100 * state["watched_seconds"], rel=0.1)
    second = Card(utilisation=50, clocks={1: 1500, 2: 2619}, temperature=70, reasons=0x20, used=20 * GIB)
    state = watched(Card(), second)
    both = {"gpu_utilisation_percent": 70, "gpu_clock_min_mhz": 1500, "gpu_temperature_celsius": 70}
    both |= {"gpu_throttle_reasons": 0x24, "gpu_memory_used_bytes": 20 * GIB}
    assert {name: state[name] for name in both} == both
    assert state["gpu_power_watts"] == pytest.approx(200, rel=0.01)


def test_what_a_card_does_not_tell_is_unknown_and_never_zero(watched: Watched) -> None:
    nothing = dict.fromkeys(Card().values)
    gpu = {name: value for name, value in watched(Card(**nothing)).items() if name.startswith("gpu")}
    assert len(gpu) >= 13
    assert set(gpu.values()) == {None}
    assert watched(Card(), Card(**nothing))["gpu_power_watts"] is None, "half of the power is not the group's"
    state = watched(Card(energy=None))
    assert (state["gpu_power_watts"], state["gpu_energy_joules"]) == (250, None)
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
