"""Turns: balanced orders, equal work, and which turns are dropped."""

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.measure.turns import balanced_orders, disturbed_turns, steps_of_windows, turns_of_set
from ddpm_lab.plan import Plan
from ddpm_lab.record import Window


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_a_whole_square_balances_positions_and_neighbours(count: int, seed: int) -> None:
    turns = count if count % 2 == 0 else 2 * count
    orders = balanced_orders(count, turns, seed)
    assert all(sorted(order) == list(range(count)) for order in orders)
    positions = Counter(pair for order in orders for pair in enumerate(order))
    assert positions == {(p, c): turns // count for p in range(count) for c in range(count)}
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert follows == dict.fromkeys(permutations(range(count), 2), turns // count)


def test_sets_have_orders_of_their_own_and_a_set_always_the_same() -> None:
    assert balanced_orders(4, 6, 7) == balanced_orders(4, 6, 7)
    assert len({str(balanced_orders(4, 6, seed)) for seed in range(20)}) > 10


def test_what_one_set_leaves_unbalanced_the_sets_balance_together() -> None:
    firsts = Counter(balanced_orders(5, 1, seed)[0][0] for seed in range(2000))
    assert all(320 < firsts[name] < 480 for name in range(5))  # 400 expected, four standard deviations is 72


@given(
    batches=st.lists(st.sampled_from([1, 6, 16, 32, 48, 128]), min_size=1, max_size=6),
    data=st.data(),
    seconds=st.floats(0.01, 2.0),
    least=st.integers(1, 20),
)
def test_all_configurations_process_the_same_images(
    batches: list[int], data: st.DataObject, seconds: float, least: int
) -> None:
    steps = data.draw(
        st.lists(st.floats(1e-4, 5.0), min_size=len(batches), max_size=len(batches)), label="step seconds"
    )
    prefetch = data.draw(st.lists(st.integers(0, 8), min_size=len(batches), max_size=len(batches)), label="prefetch")
    plan = Plan(window_seconds=seconds, window_steps=least)
    counts = steps_of_windows(plan, batches, steps, prefetch)
    assert len({count * batch for count, batch in zip(counts, batches, strict=True)}) == 1
    fewest = max(least, 20, 10 * max(prefetch)) if max(prefetch) > 1 else least
    assert min(counts) >= fewest


def test_the_fastest_fills_the_window() -> None:
    plan = Plan(window_seconds=0.4, window_steps=5)
    assert steps_of_windows(plan, [32, 32], [0.010, 0.020], [0, 0]) == [40, 40]
    # Half the batch, twice the steps; the images are those that 0.4 s of the fastest take.
    assert steps_of_windows(plan, [32, 16], [0.010, 0.010], [0, 0]) == [40, 80]


def test_every_configuration_does_the_fewest_steps() -> None:
    assert steps_of_windows(Plan(window_seconds=0.1, window_steps=5), [32, 32], [1.0, 2.0], [0, 0]) == [5, 5]


def test_a_prefetch_queue_lengthens_the_window_of_the_whole_set() -> None:
    plan = Plan(window_seconds=0.1, window_steps=5)
    assert steps_of_windows(plan, [32, 32], [0.1, 0.1], [0, 2]) == [20, 20]
    assert steps_of_windows(plan, [32, 32], [0.1, 0.1], [0, 1]) == steps_of_windows(plan, [32, 32], [0.1, 0.1], [0, 0])
    assert steps_of_windows(plan, [32, 32], [0.1, 0.1], [0, 4]) == [40, 40]


def test_long_windows_make_fewer_turns() -> None:
    plan = Plan(turns=12, window_seconds=0.2)
    assert [turns_of_set(plan, seconds) for seconds in (0.1, 0.4, 0.5, math.inf)] == [12, 12, 6, 6]
    assert [turns_of_set(Plan(turns=turns, window_seconds=0.2), 1.0) for turns in (1, 2, 3, 5)] == [1, 2, 2, 2]


def test_the_slowest_window_is_held_to_ten_times_the_planned_one() -> None:
    plan = Plan(window_seconds=0.4, window_steps=5)
    (fast, slow) = steps_of_windows(plan, [32, 32], [0.001, 0.1], [0, 0])
    assert fast == slow == 40  # 400 would fill the fast one's window and take the slow one 40 s
    # The fewest steps come first: a cap must not leave a configuration with too few.
    assert steps_of_windows(plan, [32, 32], [0.001, 3.0], [0, 0]) == [5, 5]


def window(turn: int, *, others: float | None = 0.0, stolen: float | None = None, **state: float | None) -> Window:
    """A window that was watched for half a second; the later the turn, the longer it took."""
    return Window(
        turn=turn,
        position=0,
        start_seconds=0.0,
        seconds=0.4 * (1 + turn),
        images=8,
        steps=1,
        rank_seconds=(0.4,),
        step_seconds=(0.4,),
        data_seconds=(0.0,),
        others_cores=others,
        stolen_seconds=stolen,
        state={"watched_seconds": 0.5, **state},
    )


def dropped(*windows: Window, usable_cores: int = 2) -> set[int]:
    calm = [window(turn) for turn in range(4)]
    return disturbed_turns([*calm, *windows], usable_cores)


def test_a_turn_is_dropped_when_others_took_more_than_a_tenth_of_the_cores() -> None:
    busy = (window(1, others=0.21), window(2, others=0.2))
    assert dropped(*busy) == {1}
    assert dropped(*busy, usable_cores=8) == set()
    assert disturbed_turns([], usable_cores=2) == set()


def test_one_disturbed_window_drops_the_turn_of_all() -> None:
    assert disturbed_turns([window(0, others=0.0), window(0, others=2.0), window(1), window(2)], 2) == {0}


def test_a_turn_is_dropped_when_the_hypervisor_took_more_than_a_tenth_of_the_core_time() -> None:
    # Half a second on two cores is a core second.
    assert dropped(window(1, stolen=0.11), window(2, stolen=0.1)) == {1}
    old = replace(window(3, stolen=0.4), state={})
    assert dropped(old) == set(), "how long it was watched is unknown"


def test_a_turn_is_dropped_when_others_use_the_gpu() -> None:
    assert dropped(window(1, gpu_others_percent=11.0), window(2, gpu_others_percent=10.0)) == {1}
    # Present and idle disturbs nobody; how busy they are counts before how their memory changed.
    assert dropped(window(1, gpu_others=3.0, gpu_others_bytes=9e9, gpu_others_changed_bytes=0.0)) == set()
    assert dropped(window(1, gpu_others_percent=0.0, gpu_others_changed_bytes=5.0)) == set()
    assert dropped(window(1, gpu_others_percent=None, gpu_others_changed_bytes=5.0)) == {1}


def test_what_is_unknown_drops_nothing_however_long_it_took() -> None:
    unknown = {"gpu_others": None, "gpu_others_percent": None, "gpu_others_changed_bytes": None}
    slow = replace(window(1, others=None, **unknown), seconds=1000.0)
    assert dropped(slow) == set()


def test_half_of_the_turns_may_be_dropped_and_not_more() -> None:
    assert dropped(window(0, others=1.0), window(1, others=1.0)) == {0, 1}
    assert dropped(window(0, others=1.0), window(1, others=1.0), window(2, others=1.0)) == set()
