"""What two records of a set say of each other, and which sets do not count."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import records as make
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.config import RunConfig
from ddpm_lab.record import RunRecord, Window, crowded, set_log_ratio, turn_log_ratios

BOTH_CORES = RunConfig()
SECONDS = st.lists(st.tuples(st.floats(0.2, 5.0), st.floats(0.2, 5.0)), min_size=1, max_size=8)


def window(turn: int, seconds: float, *, images: int = 10, **changes: Any) -> Window:
    base = make.sets({}, count=1, turns=1)[0].windows[0]
    return dataclasses.replace(base, turn=turn, seconds=seconds, images=images, **changes)


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


def test_it_is_the_mean_over_turns_and_positive_where_the_other_is_faster() -> None:
    assert set_log_ratio(of([1.0, 2.0]), of([0.5, 1.0])) == pytest.approx(math.log(2))
    assert set_log_ratio(of([1.0, 1.0]), of([0.5, 2.0])) == pytest.approx(0)
    assert set_log_ratio(of([1.0] * 4), of([1.0, 1.0, 1.0, 16.0])) == pytest.approx(-math.log(2))


def test_the_twin_makes_the_baseline_the_mean_of_two_logarithms() -> None:
    base, twin, other = of([1.0, 2.0]), of([4.0, 2.0]), of([1.0, 1.0])
    assert set_log_ratio(base, other) == pytest.approx(math.log(2) / 2)
    assert set_log_ratio(base, other, twin) == pytest.approx(math.log(2))
    assert turn_log_ratios(base, other, twin) == pytest.approx([math.log(2), math.log(2)])
    only_second = record(window(1, 2.0))
    assert turn_log_ratios(base, other, only_second) == pytest.approx([math.log(2)]), "a turn that all have"


def test_equal_work_is_what_is_compared() -> None:
    assert set_log_ratio(record(window(0, 1.0)), record(window(0, 1.0, images=20))) == pytest.approx(math.log(2))


def test_turns_count_that_both_sides_have() -> None:
    base = record(window(0, 1.0), window(1, 9.0), window(3, 1.0))
    other = record(window(0, 0.5), window(2, 7.0), window(4, 1.0))
    assert set_log_ratio(base, other) == pytest.approx(math.log(2))
    assert math.isnan(set_log_ratio(base, record(window(3, math.nan), window(4, 1.0))))
    assert math.isnan(set_log_ratio(base, record(window(0, 1.0, images=0))))
    assert math.isnan(set_log_ratio(record(), other))


# --- which sets do not count: two usable cores, unless a test says otherwise -----------------------------------------


def loaded(*loads: float | None, config: RunConfig = BOTH_CORES, **changes: Any) -> RunRecord:
    """A record whose turns had so much taken by others."""
    windows = [window(turn, 1.0, others_cores=load, **changes) for turn, load in enumerate(loads)]
    return make.record(config, windows=tuple(windows))


@pytest.mark.parametrize(
    ("threads", "taken", "crowds"),
    [
        (0, 0.25, True),  # as many threads as cores
        (0, 0.249, False),
        (1, 1.25, True),
        (1, 1.249, False),
        (2, 0.25, True),
        (2, 0.249, False),
    ],
)
def test_a_turn_is_crowded_when_threads_and_others_exceed_the_cores_by_a_quarter(
    threads: int, taken: float, crowds: bool
) -> None:
    assert crowded([loaded(taken, config=RunConfig(threads=threads))]) == crowds


def test_threads_of_all_ranks_count() -> None:
    ranks = RunConfig(world_size=2, global_batch_size=32, threads=1)
    assert crowded([loaded(0.25, config=ranks)])
    assert not crowded([loaded(1.2, config=dataclasses.replace(ranks, world_size=1))])


@pytest.mark.parametrize(
    ("full", "turns", "crowds"), [(1, 5, False), (2, 5, True), (2, 10, False), (3, 10, True), (1, 4, True)]
)
def test_a_set_does_not_count_with_more_than_a_fifth_of_its_turns_crowded(full: int, turns: int, crowds: bool) -> None:
    assert crowded([loaded(*[1.0] * full, *[0.0] * (turns - full))]) == crowds


def test_a_turn_is_judged_by_the_mean_over_its_windows() -> None:
    assert crowded([loaded(0.5), loaded(0.0)])
    assert not crowded([loaded(0.49), loaded(0.0)])
    assert not crowded([loaded(0.0, 1.0, 0.0, 0.0, 0.0), loaded(0.0, 1.0, 0.0, 0.0, 0.0)])


def test_what_the_hypervisor_took_counts_too() -> None:
    watched = {"watched_seconds": 0.5}
    assert crowded([loaded(0.0, stolen_seconds=0.125, state=watched)])
    assert not crowded([loaded(0.0, stolen_seconds=0.124, state=watched)])
    assert crowded([loaded(0.125, stolen_seconds=0.0625, state=watched)])
    assert not crowded([loaded(0.0, stolen_seconds=9.0)]), "how long it was watched is unknown"


def test_load_that_is_unknown_and_ranks_that_share_cores_crowd_nothing_however_long_it_takes() -> None:
    assert not crowded([loaded(None, None)])
    assert not crowded([loaded(9.0, config=RunConfig(world_size=4, global_batch_size=32, oversubscribe=True))])
    assert not crowded([record(window(0, 1e6, others_cores=0.0), window(1, 1e-6, others_cores=0.0))])
    assert not crowded([])
    assert not crowded([record()])


@pytest.mark.parametrize(
    ("state", "crowds"),
    [
        ({"gpu_others_percent": 10.0}, True),
        ({"gpu_others_percent": 9.9}, False),
        # Present and idle disturbs nobody; how busy they are counts before how their memory changed.
        ({"gpu_others": 3.0, "gpu_others_bytes": 9e9, "gpu_others_changed_bytes": 0.0}, False),
        ({"gpu_others_percent": 0.0, "gpu_others_changed_bytes": 5.0}, False),
        ({"gpu_others_percent": None, "gpu_others_changed_bytes": 5.0}, True),
        ({"gpu_others_percent": None, "gpu_others_changed_bytes": None}, False),
    ],
)
def test_a_gpu_is_crowded_by_another_process_that_computes_on_it(state: dict[str, float | None], crowds: bool) -> None:
    on_gpu = RunConfig(device="cuda")
    assert crowded([loaded(9.0, config=on_gpu, state=state)]) == crowds
    assert not crowded([loaded(0.0, config=BOTH_CORES, state=state)]), "a CPU's set does not care"
