"""A leak is named with its size and place; memory that settles, jumps or is unknown is none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import records as make
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import findings, machine_state
from ddpm_lab.explain.frames import Study
from ddpm_lab.own_settings import OWN
from ddpm_lab.record import RunRecord

MIB = 2**20
OWN_CONFIG = RunConfig(workload=OWN, options=(("make", "mine:make"), ("parameters", 9)), loader="files")
SEEN = {"ranks": [{"rank": 0, "place": "mine.py, line 12"}]}


def held(record: RunRecord, memory: Callable[[int], float | None], kind: str = "rss_bytes") -> RunRecord:
    windows = tuple(dataclasses.replace(w, state={kind: memory(w.turn)}) for w in record.windows)
    return dataclasses.replace(record, windows=windows, witness=SEEN)


def study(memory: Callable[[int], float | None], kind: str = "rss_bytes", turns: int = 12) -> Study:
    bf16 = dataclasses.replace(OWN_CONFIG, precision="bf16")
    found = make.sets({"bf16": (bf16, 1.2)}, baseline=OWN_CONFIG, turns=turns)
    return make.study([held(r, memory if r.role == "candidate" else lambda _: 300 * MIB, kind) for r in found])


@pytest.mark.parametrize("kind", ["rss_bytes", "allocated_bytes"])
def test_a_leak_is_told_with_its_numbers_and_its_line(kind: str) -> None:
    found = study(lambda turn: (300 + 3 * turn) * MIB, kind)
    assert [one.record.label for one in machine_state.leaks(found)] == ["bf16"]
    steps = sum(w.steps + 2 for w in machine_state.leaks(found)[0].record.windows[1:])
    text = machine_state.leaking(found)
    what = machine_state.KINDS[kind]
    assert text == (
        f" mine:make (mine.py, line 12) leaks memory: with bf16 a rank holds 33 MiB more {what} after 12 "
        f"windows than after the first, about {33 * 1024 / steps:.3g} KiB a step."
    ).replace(f"{33 * 1024 / steps:.3g}", text.split("about ")[1].split(" KiB")[0])
    assert float(text.split("about ")[1].split(" KiB")[0].replace(",", "")) == pytest.approx(
        33 * 1024 / steps, rel=0.01
    )
    assert text in findings.finding(found).claim


@pytest.mark.parametrize(
    ("memory", "turns"),
    [
        (lambda turn: (300 + 3 * min(turn, 5)) * MIB, 12),  # settles
        (lambda turn: (300 + 50 * (turn > 6)) * MIB, 12),  # jumps once
        (lambda turn: (300 + 0.1 * turn) * MIB, 12),  # too little to matter
        (lambda turn: None if turn == 4 else (300 + 9 * turn) * MIB, 12),  # unknown in between
        (lambda turn: (300 + 90 * turn) * MIB, 2),  # too few windows to tell
    ],
)
def test_other_growth_is_none(memory: Callable[[int], float | None], turns: int) -> None:
    assert machine_state.leaking(study(memory, turns=turns)) == ""


@given(st.lists(st.floats(-20, 20), min_size=12, max_size=12))
def test_noise_around_a_level_is_no_leak(noise: Sequence[float]) -> None:
    level = np.array(noise) + 300
    grew = np.diff(level) > 0
    record = held(make.sets({}, baseline=OWN_CONFIG, count=1, turns=12)[0], lambda turn: float(level[turn]) * MIB)
    assert (machine_state.leak(record) is None) == (grew.mean() < 0.9 or level[-1] - level[0] < 8)


def test_one_odd_set_of_many_is_no_leak() -> None:
    first, *others = make.sets({}, baseline=OWN_CONFIG, count=6, turns=12)
    grows = held(first, lambda turn: (300 + 5 * turn) * MIB)
    assert machine_state.leaking(make.study([grows, *(held(r, lambda _: 300 * MIB) for r in others)])) == ""
    assert machine_state.leaking(make.study([grows]))
