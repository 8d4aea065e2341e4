"""Orders, lengths and numbers of windows, and the noise that these follow from, against sets that were recorded."""

import math
from collections import Counter
from itertools import pairwise, permutations
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import sets, shortfall
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.measure.sets import Instrument, Member, Seat, balanced_orders, steps_of_windows
from ddpm_lab.measure.shortfall import best_turns, sets_that_resolve
from ddpm_lab.plan import Plan


@given(count=st.integers(1, 7), seed=st.integers(0, 2**24))
def test_a_whole_square_balances_positions_and_neighbours(count: int, seed: int) -> None:
    turns = count if count % 2 == 0 else 2 * count
    orders = balanced_orders(count, turns, seed)
    assert all(sorted(order) == list(range(count)) for order in orders)
    positions = Counter(pair for order in orders for pair in enumerate(order))
    assert positions == {(p, c): turns // count for p in range(count) for c in range(count)}
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert follows == dict.fromkeys(permutations(range(count), 2), turns // count)


configurations = st.tuples(st.sampled_from([1, 6, 16, 32, 48, 128]), st.floats(1e-4, 5.0), st.integers(0, 8))


@given(rows=st.lists(configurations, min_size=1, max_size=6), least=st.integers(1, 20))
def test_all_configurations_process_the_same_images(rows: list[tuple[int, float, int]], least: int) -> None:
    batches, steps, fewest = (list(values) for values in zip(*rows, strict=True))
    counts = steps_of_windows(Plan(window_steps=least), batches, steps, fewest)
    assert len({count * batch for count, batch in zip(counts, batches, strict=True)}) == 1
    assert min(counts) >= max(least, *fewest)


def test_the_fastest_fills_the_window_and_the_slowest_is_held_to_ten_times_it() -> None:
    plan = Plan(window_seconds=0.4, window_steps=5)
    assert steps_of_windows(plan, [32, 32], [0.010, 0.020], [0, 0]) == [40, 40]
    assert steps_of_windows(plan, [32, 16], [0.010, 0.010], [0, 0]) == [40, 80], "the images of the fastest in 0.4 s"
    assert steps_of_windows(plan, [32, 32], [0.001, 0.1], [0, 0]) == [40, 40], "400 would take the slow one 40 s"
    assert steps_of_windows(plan, [32, 32], [0.001, 3.0], [0, 0]) == [5, 5], "no cap leaves one with too few"
    assert steps_of_windows(plan, [32, 32], [0.1, 0.1], [0, 40]) == [40, 40], "a queue lengthens the whole set's"
    assert steps_of_windows(plan, [250, 256], [2.0, 2.0], [0, 0]) == [5, 5], "128 and 125 would take four minutes"


def half_width(sets: int, turns: int, within: float, between: float) -> float:
    """Of a 95 % interval of a comparison, by scipy's quantile of Student's t."""
    variance = shortfall.VARIANCE_OF_CANDIDATE * (between**2 + within**2 / turns)
    return float(special.stdtrit(sets - 1, 0.975)) * math.sqrt(variance / sets)


def test_turns_narrow_the_interval_most_for_the_time() -> None:
    for start, turn, within, between in ((1, 0.5, 0.1, 0.03), (20, 0.5, 0.1, 0.03), (6, 1, 0.05, 0.02)):
        turns = best_turns(start, turn, within, between)
        widths = [  # of the many sets of a long time
            half_width(int(1e5 / (start + t * turn)), t, within, between) for t in (turns // 2, turns, 2 * turns)
        ]
        assert min(widths) == widths[1]
    assert best_turns(20, 0.5, 0.1, 0.0) == shortfall.MOST_TURNS
    assert best_turns(1e-3, 0.5, 0.1, 0.1) == shortfall.LEAST_TURNS
    assert 6 * (10 + 0.5 * best_turns(10, 0.5, 0.1, 0.01, 120)) <= 120, "six sets fit into the time"
    assert best_turns(10, 0.5, 0.1, 0.03, 12) == shortfall.LEAST_TURNS


@given(effect=st.floats(0.01, 0.1), turns=st.integers(4, 60), within=st.floats(0.01, 0.2), between=st.floats(0, 0.1))
def test_so_many_sets_resolve_an_effect(effect: float, turns: int, within: float, between: float) -> None:
    sets = sets_that_resolve(effect, turns, within, between)
    assert sets >= 4
    assert half_width(sets, turns, within, between) <= 1.05 * math.log1p(effect) / 2
    assert sets < 6 or half_width(sets - 2, turns, within, between) > math.log1p(effect) / 2


def test_windows_outlast_what_loader_workers_hold_ready() -> None:
    def steps_of(prefetch_batches: int) -> int:
        config = SimpleNamespace(global_batch_size=8)
        how: dict[str, Any] = {"failure": None, "warm_step_seconds": 0.5, "config": config, "member": "it"}
        seat: Any = SimpleNamespace(prefetch_batches=prefetch_batches, **how)
        of: Any = SimpleNamespace(seats=[seat], plan=Plan())
        return sets._Set._steps(of)["it"]  # type: ignore[index]

    assert list(map(steps_of, (0, 1, 2, 4, 16))) == [1, 1, 4, 8, 32]


@pytest.mark.parametrize(("nodes", "settles"), [(1, [10, 2]), (2, [10, 10])])
def test_a_window_comes_after_what_workers_prefetched_meanwhile(
    instrument: Instrument, nodes: int, settles: list[int]
) -> None:
    """In the start, and on other hosts, where they are not stopped, between turns too."""
    settled = list[int]()

    def window(**asked: Any) -> NoReturn:
        settled.append(asked["settle"])
        raise GroupFailed("crashed", "heard enough")

    files = RunConfig(loader="files", loader_workers=1, world_size=nodes, nodes=nodes)
    seat = Seat(Member("candidate", "files", files), Plan(), instrument)
    seat.group = cast("Any", SimpleNamespace(window=window, pids=()))
    seat.witness, seat.warm_step_seconds = [{"prefetch_batches": 2}], 0.5
    for turn in range(2):
        with pytest.raises(GroupFailed):
            seat.window(turn, 0, 4)
    assert settled == settles
