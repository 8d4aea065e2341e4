"""Statistics against simulation, hand-worked cases and invariants."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from ddpm_lab.explain import stats


def set_log_ratios(base: stats.Array, other: stats.Array) -> stats.Array:
    """One value a set: the median over its turns."""
    values: stats.Array = np.median(np.log(base / other), axis=-1)
    return values


FINITE = st.floats(min_value=0.2, max_value=5.0)


def simulated(rng: np.random.Generator, sets: int, turns: int, ratio: float) -> tuple[stats.Array, stats.Array]:
    """Seconds per image of two configurations: shared drift with autocorrelation, own noise by set and by window."""
    drift = np.zeros(sets * turns)
    shocks = rng.normal(0, 0.05, sets * turns)
    for i in range(1, sets * turns):
        drift[i] = 0.95 * drift[i - 1] + shocks[i]
    shared = drift.reshape(sets, turns)
    base = 0.01 * np.exp(shared + rng.normal(0, 0.02, (sets, turns)))
    own = rng.normal(0, 0.03, (sets, 1))
    other = 0.01 / ratio * np.exp(shared + own + rng.normal(0, 0.02, (sets, turns)))
    return base, other


@pytest.mark.parametrize("sets", [6, 12])
def test_interval_covers_the_planted_ratio(sets: int) -> None:
    rng = np.random.default_rng(sets)
    runs = 4000
    covered = 0
    for _ in range(runs):
        estimate = stats.geometric_estimate(set_log_ratios(*simulated(rng, sets, 6, 1.03)))
        covered += estimate.low <= 1.03 <= estimate.high
    assert 0.93 <= covered / runs <= 0.97


def test_interval_over_pooled_turns_would_not_cover() -> None:
    """The fault that the unit of a set avoids: turns counted as repeats."""
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(500):
        base, other = simulated(rng, 6, 6, 1.03)
        estimate = stats.geometric_estimate(np.log(base / other).ravel())
        covered += estimate.low <= 1.03 <= estimate.high
    assert covered / 500 < 0.85


def test_identical_groups_are_rarely_called_different() -> None:
    """Four comparisons that are all null: any false call in at most some 5 % of experiments."""
    rng = np.random.default_rng(3)
    runs = 1500
    calls = 0
    for _ in range(runs):
        estimates = [stats.geometric_estimate(set_log_ratios(*simulated(rng, 6, 4, 1.0))) for _ in range(4)]
        adjusted = stats.holm([e.p for e in estimates])
        calls += any(stats.called(e, p) for e, p in zip(estimates, adjusted, strict=True))
    assert calls / runs <= 0.06


def test_planted_effect_is_found_at_the_number_of_sets_that_is_said_to_resolve_it() -> None:
    rng = np.random.default_rng(4)
    wide = set_log_ratios(*simulated(rng, 200, 6, 1.0))
    needed = stats.sets_to_resolve(wide, 0.05)
    assert needed is not None
    found = 0
    for _ in range(300):
        estimate = stats.geometric_estimate(set_log_ratios(*simulated(rng, needed, 6, 1 / 1.05)))
        found += stats.verdict(estimate, estimate.p, 1) == stats.SLOWER
    assert found / 300 > 0.9


def test_estimate_equals_scipy() -> None:
    logs = np.array([0.02, 0.05, -0.01, 0.04, 0.03, 0.01])
    ours = stats.geometric_estimate(logs)
    test = scipy_stats.ttest_1samp(logs, 0.0)
    interval = test.confidence_interval(0.95)
    assert ours.p == pytest.approx(float(test.pvalue))
    assert (ours.low, ours.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))


@given(st.lists(st.tuples(FINITE, FINITE), min_size=2, max_size=10))
def test_swapping_the_sides_inverts_the_ratio(pairs: list[tuple[float, float]]) -> None:
    a, b = (np.array(side)[:, None] for side in zip(*pairs, strict=True))
    forward = stats.geometric_estimate(set_log_ratios(a, b))
    backward = stats.geometric_estimate(set_log_ratios(b, a))
    assert forward.value == pytest.approx(1 / backward.value)
    assert forward.low == pytest.approx(1 / backward.high)
    assert forward.p == pytest.approx(backward.p)


def test_holm_by_hand() -> None:
    # Holm 1979: sorted 0.01, 0.02, 0.03, 0.6 times 4, 3, 2, 1 and made non-decreasing.
    assert stats.holm([0.03, 0.01, math.nan, 0.6, 0.02]) == pytest.approx(
        [0.06, 0.04, math.nan, 0.6, 0.06], nan_ok=True
    )
    assert stats.holm([0.9, 0.8]) == [1.0, 1.0]
    assert stats.holm([]) == []


def test_one_set_has_a_ratio_and_no_interval() -> None:
    estimate = stats.geometric_estimate([math.log(1.5)])
    assert estimate.value == pytest.approx(1.5)
    assert math.isnan(estimate.low)
    assert math.isnan(estimate.p)
    assert stats.sets_to_resolve([0.1]) is None
    assert math.isnan(stats.geometric_estimate([]).value)


def test_a_verdict_needs_six_sets() -> None:
    logs = np.array([0.5, 0.51, 0.49, 0.5, 0.505])
    five, six = stats.geometric_estimate(logs), stats.geometric_estimate([*logs, 0.495])
    assert stats.verdict(five, five.p, 1) == stats.NOT_RESOLVED
    assert stats.verdict(six, six.p, 1) == stats.FASTER


def test_verdict_says_where_only_the_correction_prevents_it() -> None:
    logs = np.array([0.01, 0.06, 0.05, 0.0, 0.055, 0.03])
    estimate = stats.geometric_estimate(logs)
    assert estimate.low > 1
    assert stats.verdict(estimate, 5 * estimate.p, 5) == "not resolved (corrected for 5 comparisons)"
    assert stats.verdict(estimate, estimate.p, 1) == stats.FASTER


def test_no_spread() -> None:
    assert stats.geometric_estimate([0.5] * 6).p == 0.0
    assert stats.geometric_estimate([0.0] * 6).p == 1.0
    assert stats.sets_to_resolve([0.1] * 6) == stats.LEAST_SETS
    assert stats.sets_to_resolve([-9.0, 9.0], most=50) is None


def test_geometric_mean_of_a_ratio_and_its_inverse_is_one() -> None:
    assert stats.geometric_mean([4.0, 0.25]) == pytest.approx(1.0)


def test_break_even() -> None:
    # 100 ms become 80 ms: 20 ms saved a step, so 30 s are earned back in 1,500 steps.
    assert stats.break_even_steps(30.0, 0.1, 1.25) == pytest.approx(1500)
    assert stats.break_even_steps(30.0, 0.1, 0.9) == math.inf
    assert math.isnan(stats.break_even_steps(math.nan, 0.1, 1.25))


def test_a_quotient_of_which_one_side_is_known_has_the_ends_of_the_other() -> None:
    known = (30.0, math.nan, math.nan)
    assert stats.quotient_interval(known, (0.02, 0.015, 0.03)) == pytest.approx((1000, 2000))
    assert stats.quotient_interval((30.0, 20.0, 40.0), (0.02, 0.02, 0.02)) == pytest.approx((1000, 2000))
    assert stats.quotient_interval(known, (0.02, -0.001, 0.05)) == pytest.approx((600, math.inf))
    for known_b in np.linspace(0.001, 1, 200):  # the difference of two equal products may round to less than nothing
        assert stats.quotient_interval((0.3,) * 3, (known_b,) * 3) == pytest.approx((0.3 / known_b,) * 2, rel=1e-6)


def test_the_interval_of_a_quotient_covers_it() -> None:
    """Few and many values on each side, as compile times and set ratios are."""
    rng = np.random.default_rng(0)
    for few, many, spread in ((2, 6, 0.05), (3, 6, 0.05), (3, 12, 0.02), (3, 12, 0.1)):
        hits = 0
        for _ in range(1500):
            a = stats.geometric_estimate(np.log(30) + rng.normal(0, spread, few))
            b = stats.geometric_estimate(np.log(0.02) + rng.normal(0, 0.05, many))
            low, high = stats.quotient_interval((a.value, a.low, a.high), (b.value, b.low, b.high))
            hits += low <= 1500 <= high
        assert 0.93 <= hits / 1500 <= 0.985, (few, many, spread)


# --- stopping when the interval is narrow enough ---------------------------------------------------------------------


def stopped(rng: np.random.Generator, spread: float, ratio: float, effect: float) -> stats.Estimate:
    """What a comparison reads that stops by the rule: normal noise between sets, at most 120 sets."""
    logs = rng.normal(math.log(ratio), spread, 120)
    count = stats.LEAST_SETS
    while count < len(logs) and (to_come := stats.sets_to_come(logs[:count], effect)):
        # Where many are still to come the width is not looked at set by set: it cannot be narrow before.
        count = min(len(logs), count + max(1, to_come // 2))
    return stats.geometric_estimate(logs[:count])


@pytest.mark.parametrize("spread", [0.005, 0.015, 0.03])
def test_a_comparison_that_stops_by_its_width_covers_and_finds_the_effect(spread: float) -> None:
    rng = np.random.default_rng(int(spread * 1000))
    runs, effect = 1500, 0.03
    nulls = [stopped(rng, spread, 1.0, effect) for _ in range(runs)]
    found = [stopped(rng, spread, 1 + effect, effect) for _ in range(runs)]
    covered = [e.low <= ratio <= e.high for es, ratio in ((nulls, 1.0), (found, 1 + effect)) for e in es]
    assert 0.93 <= np.mean(covered) <= 0.97
    assert np.mean([stats.called(e, e.p) for e in nulls]) <= 0.07
    assert np.mean([stats.called(e, e.p) and e.value > 1 for e in found]) >= 0.9
    assert min(e.sets for e in nulls) >= stats.LEAST_SETS + stats.NARROW_IN_A_ROW - 1


def test_the_width_decides_and_never_the_ratio() -> None:
    logs = np.array([0.001, -0.002, 0.0, 0.002, -0.001, 0.001, 0.0, -0.001])
    assert stats.sets_to_come(logs, 0.03) == 0
    assert stats.sets_to_come(logs + 0.5, 0.03) == 0
    assert stats.sets_to_come(logs[:7], 0.03) == 1
    assert stats.sets_to_come(30 * logs, 0.03) > 0
    assert stats.sets_to_come(30 * logs + 0.5, 0.03) == stats.sets_to_come(30 * logs, 0.03)
    assert stats.sets_to_come([], 0.03) == stats.LEAST_SETS + stats.NARROW_IN_A_ROW - 1
    assert stats.sets_to_come([0.0, math.nan, 0.1], 0.03) > 5


def test_the_smallest_effect_is_what_the_sets_resolve() -> None:
    rng = np.random.default_rng(5)
    logs = rng.normal(0, 0.02, 12)
    spread = float(logs.std(ddof=1))
    effect = stats.smallest_effect(spread, len(logs))
    assert stats.half_width(logs) == pytest.approx(math.log1p(effect) / 2)
    assert stats.sets_to_resolve(logs, effect * 1.001) == 12
    assert stats.smallest_effect(spread, 5) == math.inf
    assert stats.half_width([0.1]) == math.inf


# --- noise recorded on a real machine ---------------------------------------------------------------------------------

NOISE: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "noise.json").read_text())


def replayed(rng: np.random.Generator, ratio: float, kind: str) -> stats.Estimate:
    """A comparison of five minutes whose noise is recorded: blocks of neighbouring sets.

    Each block keeps its order, and is mirrored or not, as if baseline and twin had changed places.
    """
    noise = NOISE[kind]
    count, length = noise["sets"], 4
    logs: list[float] = []
    while len(logs) < count:
        run = np.log(noise["null_ratios"][rng.integers(len(noise["null_ratios"]))])
        start = rng.integers(len(run) - length + 1)
        logs += list(rng.choice([-1, 1]) * run[start : start + length])
    return stats.geometric_estimate(math.log(ratio) + np.array(logs[:count]))


def verdicts(rng: np.random.Generator, kind: str) -> tuple[list[str], list[stats.Estimate], list[stats.Estimate]]:
    """What 1,500 comparisons call 3 % more work, their estimates of it, and those of the baseline against itself."""
    nulls = [replayed(rng, 1.0, kind) for _ in range(1500)]
    planted = [replayed(rng, 1 / 1.03, kind) for _ in range(1500)]
    called = []
    for pair in zip(planted, nulls, strict=True):
        adjusted = stats.holm([e.p for e in pair])
        called.append(stats.verdict(pair[0], adjusted[0], 2))
    return called, planted, nulls


def test_on_recorded_noise_three_percent_is_found_and_nothing_is_not() -> None:
    called, planted, nulls = verdicts(np.random.default_rng(5), "quiet")
    assert np.mean([word == stats.SLOWER for word in called]) >= 0.9
    assert np.mean([stats.called(e, e.p) for e in nulls]) <= 0.06
    assert 0.93 <= np.mean([e.low <= 1 / 1.03 <= e.high for e in planted]) <= 0.97


def test_on_noise_beside_other_jobs_less_is_found_and_nothing_wrong() -> None:
    called, _, nulls = verdicts(np.random.default_rng(6), "busy")
    assert np.mean([word == stats.FASTER for word in called]) <= 0.01
    assert np.mean([stats.called(e, e.p) for e in nulls]) <= 0.06
