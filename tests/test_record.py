"""What two records of a set say of each other."""

from __future__ import annotations

import dataclasses
import math

import pytest
import records as make
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.config import RunConfig
from ddpm_lab.record import RunRecord, Window, burst_log, set_log_ratio

SECONDS = st.lists(st.tuples(st.floats(0.2, 5.0), st.floats(0.2, 5.0)), min_size=1, max_size=8)


def window(turn: int, seconds: float, *, images: int = 10, dropped: bool = False) -> Window:
    base = make.sets({}, count=1, turns=1)[0].windows[0]
    return dataclasses.replace(base, turn=turn, seconds=seconds, images=images, dropped=dropped)


def record(*windows: Window) -> RunRecord:
    return make.record(RunConfig(), windows=windows)


def of(seconds: list[float]) -> RunRecord:
    return record(*(window(turn, value) for turn, value in enumerate(seconds)))


@given(SECONDS, st.floats(0.01, 100))
def test_what_slows_both_sides_of_a_turn_alike_changes_nothing(pairs: list[tuple[float, float]], scale: float) -> None:
    base, other = (list(side) for side in zip(*pairs, strict=True))
    scales = [scale ** (i / len(pairs)) for i in range(len(pairs))]
    drifting = [[s * v for s, v in zip(scales, side, strict=True)] for side in (base, other)]
    plain = set_log_ratio(of(base), of(other))
    assert set_log_ratio(of(drifting[0]), of(drifting[1])) == pytest.approx(plain, abs=1e-9)
    assert set_log_ratio(of(other), of(base)) == pytest.approx(-plain, abs=1e-9)


def test_it_is_the_median_over_turns_and_positive_where_the_other_is_faster() -> None:
    assert set_log_ratio(of([1.0, 2.0]), of([0.5, 1.0])) == pytest.approx(math.log(2))
    assert set_log_ratio(of([1.0, 1.0]), of([0.5, 2.0])) == pytest.approx(0)


def test_a_turn_that_a_neighbour_began_in_does_not_decide() -> None:
    assert set_log_ratio(of([1.0] * 6), of([1.0, 1.0, 9.0, 1.0, 1.0, 1.0])) == 0


def test_windows_far_slower_than_most_are_bursts() -> None:
    assert burst_log(of([1.0] * 6)) == pytest.approx(0)
    assert burst_log(of([1.0, 1.0, 1.0, 5.0])) == pytest.approx(math.log(2))
    assert burst_log(record(window(0, 1.0), window(1, 9.0, dropped=True))) == pytest.approx(0)
    assert math.isnan(burst_log(record()))


def test_equal_work_is_what_is_compared() -> None:
    assert set_log_ratio(record(window(0, 1.0)), record(window(0, 1.0, images=20))) == pytest.approx(math.log(2))


def test_turns_count_that_both_sides_have_undisturbed() -> None:
    base = record(window(0, 1.0), window(1, 9.0, dropped=True), window(2, 1.0), window(3, 1.0))
    other = record(window(0, 0.5), window(1, 1.0), window(2, 7.0, dropped=True), window(4, 1.0))
    assert set_log_ratio(base, other) == pytest.approx(math.log(2))
    assert math.isnan(set_log_ratio(base, record(window(3, math.nan), window(4, 1.0))))
    assert math.isnan(set_log_ratio(base, record(window(0, 1.0, images=0))))
    assert math.isnan(set_log_ratio(record(), other))
