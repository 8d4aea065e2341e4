"""Compile caches: who starts from which, and what is removed; and the untimed steps before a window."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

import pytest
from conftest import busy_config

from ddpm_lab.measure.seat import CACHE_DAYS, Instrument, Member, Seat
from ddpm_lab.plan import Plan

COMPILED = dataclasses.replace(busy_config(), compile="whole")


def seat(instrument: Instrument, role: str, key: str = "a" * 12) -> Seat:
    code = dataclasses.replace(instrument.code, key=key)
    return Seat(Member(role, "compiled", COMPILED), Plan(), dataclasses.replace(instrument, code=code))


def start(sitting: Seat) -> Path:
    """Choose the caches as when a group starts, and fill them as the compiler does."""
    environment, filled = sitting._compile_cache()
    assert filled is not None
    inductor = Path(environment["TORCHINDUCTOR_CACHE_DIR"])
    assert not inductor.exists() or (inductor / "kernel").exists()
    inductor.mkdir(exist_ok=True)
    (inductor / "kernel").touch()
    return filled


def test_caches_of_a_cold_compile_are_removed_and_those_that_sets_start_from_stay(instrument: Instrument) -> None:
    first, second, candidate = (seat(instrument, role) for role in ("cold", "cold", "candidate"))
    warm = start(first)
    warm.touch()
    first.close()
    cold = start(second)
    assert cold.parent != warm.parent
    second.close()
    assert not cold.parent.exists()
    assert start(candidate) == warm
    candidate.close()
    assert warm.exists()
    assert [s.compile_cache for s in (first, second, candidate)] == ["cold", "cold", "warm"]


def age(folder: Path, days: float) -> None:
    then = time.time() - days * 86400
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (then, then), follow_symlinks=False)


def test_a_new_code_version_removes_caches_that_nobody_used_for_long(instrument: Instrument) -> None:
    root = instrument.cache / "compile"
    start(seat(instrument, "candidate")).touch()
    old, used, young = (root / (digit * 12) for digit in "123")
    strangers = [root / "notes", root / "ABCDEF012345", root.parent / ("4" * 12), root / "1234"]
    for folder in (old, used, young, *strangers):
        (folder / "run").mkdir(parents=True)
        (folder / "run" / "filled").touch()
        age(folder, CACHE_DAYS + 1)
    age(young, CACHE_DAYS - 1)
    (used / "run" / "filled").touch()
    start(seat(instrument, "candidate"))
    assert old.exists(), "only a new version looks"
    start(seat(instrument, "candidate", "b" * 12))
    assert not old.exists()
    assert all(folder.exists() for folder in (used, young, *strangers, root / ("a" * 12)))


@pytest.mark.parametrize("above", [False, True])
def test_nothing_that_a_link_leads_to_is_removed(instrument: Instrument, tmp_path: Path, above: bool) -> None:
    elsewhere = tmp_path / "elsewhere"
    target = elsewhere / ("1" * 12)
    (target / "run").mkdir(parents=True)
    age(elsewhere, CACHE_DAYS + 1)
    root = instrument.cache / "compile"
    if above:
        instrument.cache.mkdir()
        root.symlink_to(elsewhere)
    else:
        root.mkdir(parents=True)
        (root / target.name).symlink_to(target)
        os.utime(root / target.name, (0, 0), follow_symlinks=False)
    start(seat(instrument, "candidate"))
    assert (target / "run").exists()


@pytest.mark.parametrize(
    ("step_seconds", "prefetch", "settle"),
    [(0.01, 0, 2), (0.05, 0, 2), (0.1, 0, 1), (0.9, 0, 1), (1.0, 0, 0), (20.0, 0, 0), (20.0, 4, 4), (0.01, 8, 8)],
)
def test_long_steps_need_none_to_wake_up_and_prefetched_batches_are_always_used_up(
    instrument: Instrument, step_seconds: float, prefetch: int, settle: int
) -> None:
    sitting = seat(instrument, "candidate")
    sitting.warm_step_seconds, sitting.witness = step_seconds, [{"prefetch_batches": prefetch}]
    assert sitting.settle_steps == settle
    assert sitting.window_seconds(5) == pytest.approx((5 + settle) * step_seconds)
