"""What other processes take of the cores: which are free, and waiting for a quiet moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import measuring_lock, others
from ddpm_lab.measure.hardware import CpuClock


def free(monkeypatch: pytest.MonkeyPatch, *taken: float | None, cores: int = 4) -> tuple[int, int]:
    """Free cores where others take so much second after second, the last for ever; and how many were watched."""
    monkeypatch.setattr(others, "usable_cores", lambda: cores)
    seconds: list[float] = []

    def sample(wanted: float) -> float | None:
        assert wanted == 1.0
        seconds.append(wanted)
        return taken[min(len(seconds), len(taken)) - 1]

    return others.free_cores(sample), len(seconds)


@pytest.mark.parametrize(
    ("taken", "found"),
    [
        ((0.0,), (4, 3)),  # quiet: three seconds suffice
        ((0.24,), (4, 3)),
        ((0.25,), (4, 10)),
        ((0.0, 0.0, 0.3, 0.0), (4, 10)),
        ((0.49,), (4, 10)),
        ((0.5,), (3, 10)),  # half a core counts as taken
        ((1.49,), (3, 10)),
        ((1.5,), (2, 10)),
        ((1.0, 1.0, 1.0, 1.0, 1.0, 0.0), (3, 10)),  # the mean of ten seconds
        ((1.0, 1.0, 1.0, 1.0, 0.0), (4, 10)),
        ((3.2,), (1, 10)),
        ((4.0,), (1, 10)),  # one is always left
        ((64.0,), (1, 10)),
        ((None,), (4, 1)),  # unknown
        ((2.0, None), (4, 2)),
    ],
)
def test_free_cores_are_those_that_others_leave(
    monkeypatch: pytest.MonkeyPatch, taken: tuple[float | None, ...], found: tuple[int, int]
) -> None:
    assert free(monkeypatch, *taken) == found


def test_what_others_take_is_watched_and_not_where_tests_measure_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([CpuClock(10.0, 4.0, 0.0), CpuClock(11.0, 4.5, 0.0)])
    moments = iter([100.0, 100.25])
    slept: list[float] = []
    monkeypatch.setattr(CpuClock, "read", lambda: next(readings))
    monkeypatch.setattr(others, "time", SimpleNamespace(monotonic=lambda: next(moments), sleep=slept.append))
    monkeypatch.delenv(measuring_lock.VARIABLE, raising=False)
    assert others.others_cores(0.2) == pytest.approx(0.5 / 0.25)
    assert slept == [0.2]
    monkeypatch.setenv(measuring_lock.VARIABLE, "")
    assert others.others_cores(0.2) is None


@pytest.mark.parametrize(
    ("loads", "settings", "waited"),
    [
        ([1.0, 0.3, 0.2], {}, 0.6),  # two threads on two cores leave a quarter of a core to others
        ([0.25, 0.24], {}, 0.4),
        ([1.0] * 100, {}, others.QUIET_SECONDS),
        ([1.25, 1.24], {"threads": 1}, 0.4),
        ([1.0] * 100, {"world_size": 4, "global_batch_size": 32, "oversubscribe": True}, 0.0),
        ([1.0] * 100, {"device": "cuda"}, 0.0),
        ([None], {}, 0.2),
    ],
)
def test_a_set_waits_a_little_for_a_quiet_moment(
    monkeypatch: pytest.MonkeyPatch, loads: list[float | None], settings: dict[str, object], waited: float
) -> None:
    seen: Iterator[float | None] = iter(loads)
    now = [50.0]
    said: list[str] = []

    def others_cores(seconds: float) -> float | None:
        now.append(now[-1] + seconds)
        return next(seen)

    monkeypatch.setattr(others, "time", SimpleNamespace(monotonic=lambda: now[-1]))
    monkeypatch.setattr(others, "others_cores", others_cores)
    others.await_quiet(RunConfig(**settings), 2, said.append)  # type: ignore[arg-type]
    assert now[-1] - 50 == pytest.approx(waited, abs=0.21 if waited == others.QUIET_SECONDS else 1e-6)
    assert len(said) == len(now) - 1 - (0 < waited < others.QUIET_SECONDS)


def test_a_watch_says_after_a_minute_how_many_cores_were_free(monkeypatch: pytest.MonkeyPatch) -> None:
    now, taken = [0.0], list[float | None]([0.0])
    clock = SimpleNamespace(read=lambda: SimpleNamespace(others_cores=lambda *_: taken[0]))
    monkeypatch.setattr(others, "CpuClock", clock)
    monkeypatch.setattr(others, "side_by_side", lambda: False)
    monkeypatch.setattr(others, "usable_cores", lambda: 4)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    watch = others.CoreWatch()
    found = []
    for at, takes in (
        (59, 4.0),
        (60, 1.2),
        (119, 0.0),
        (120, 1.4),
        (180, 0.0),
        (240, 0.1),
        (300, None),
        (360, 9.0),
        (420, 9.0),
    ):
        now[0], taken[0] = float(at), takes
        found.append(watch.free())
    assert found == [None, None, None, 3, None, 4, None, None, 1]
