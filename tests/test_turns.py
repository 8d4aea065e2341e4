"""Turns: balanced orders and equal work."""

from collections import Counter
from itertools import pairwise, permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.measure.turns import balanced_orders, steps_of_windows
from ddpm_lab.plan import Plan


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


def test_the_slowest_window_is_held_to_ten_times_the_planned_one() -> None:
    plan = Plan(window_seconds=0.4, window_steps=5)
    (fast, slow) = steps_of_windows(plan, [32, 32], [0.001, 0.1], [0, 0])
    assert fast == slow == 40  # 400 would fill the fast one's window and take the slow one 40 s
    # The fewest steps come first: a cap must not leave a configuration with too few.
    assert steps_of_windows(plan, [32, 32], [0.001, 3.0], [0, 0]) == [5, 5]
