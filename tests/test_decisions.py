"""Verdicts, looks, twins, and how many sets resolve what: hand-worked cases."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from ddpm_lab.explain import stats

ROUND = np.array([0.01, -0.01, 0.012, -0.012, 0.008, -0.008, 0.01, -0.01])


def word(logs: object, level: float = 0.035) -> str:
    found = stats.estimate(np.asarray(logs, dtype=float))
    return stats.verdict(found, found.p, level)


def test_the_first_word_that_holds() -> None:
    for logs, expected in (
        (ROUND[:4], stats.SAME),
        (ROUND[:4] * 3, stats.INCONCLUSIVE),
        (0.5 + ROUND[:4], stats.FASTER),
        (-0.5 + ROUND[:4], stats.SLOWER),
        (0.01 + ROUND[:4] / 10, stats.FASTER),  # a difference below the resolution is one too
        (0.5 + ROUND[:3], stats.TOO_FEW),
        ([], stats.TOO_FEW),
    ):
        assert word(logs) == expected


def test_the_levels_of_all_looks_add_up_to_five_percent() -> None:
    levels = [stats.level_of_look(k) for k in range(1, 60)]
    assert levels[:4] == pytest.approx([0.035, 0.0075, 0.00375, 0.001875])
    assert sum(levels) == pytest.approx(0.05)


def test_what_was_called_stays_called() -> None:
    logs = np.concatenate([0.1 + ROUND[:4], -0.3 + ROUND[:4]])
    assert stats.decided([logs], [8])[0].word == stats.INCONCLUSIVE
    (found,) = stats.decided([logs], [2, 4, 8])  # a look at too few sets is none
    assert (found.word, found.look, found.level, found.estimate.sets) == (stats.FASTER, 1, 0.035, 4)
    assert found.estimate == stats.estimate(logs[:4])


@given(st.floats(-0.5, 0.5), st.floats(1e-4, 0.3))
def test_an_interval_answers_what_it_resolves_wherever_it_lies(middle: float, half: float) -> None:
    within = abs(middle) + half <= math.log1p(stats.resolves(half)) * (1 + 1e-12)
    assert abs(middle) > half or within


def test_a_look_costs_only_what_it_tested() -> None:
    """Two candidates, one measured after the other: the second is at its first look, whatever was shown before it."""
    none = np.full(4, np.nan)
    first = np.concatenate([0.02 + 3 * ROUND[:4], none, 0.02 + 3 * ROUND[:4]])
    second = np.concatenate([none, 0.05 + ROUND[:4], none])
    alone, beside = stats.decided([first, second], [4, 8])
    assert (alone.look, alone.level, alone.word) == (1, 0.035, stats.INCONCLUSIVE)
    assert (beside.look, beside.level) == (1, 0.035)
    assert beside.p == pytest.approx(2 * stats.estimate(second[4:8]).p)
    again, same = stats.decided([first, second], [4, 8, 12])
    assert (again.look, again.level, again.estimate.sets) == (2, stats.level_of_look(2), 8)
    assert same == beside, "the third look had nothing new of it"
    few = stats.decided([np.concatenate([ROUND[:2], none, ROUND[2:4]])], [2, 6, 8])
    assert [(d.look, d.word) for d in few] == [(1, stats.SAME)], "a look at two sets is none"


def test_at_different_looks_none_is_called_by_a_call_that_was_not_made() -> None:
    """A p of 0.6 % at a second look is not enough of two; of the other 2.5 % at a first would be of one alone."""

    def of(p: float, sets: int) -> list[float]:
        """Log ratios of ``sets`` whose p-value is ``p``."""
        spread = np.resize([1.0, -1.0], sets)
        t = float(special.stdtrit(sets - 1, 1 - p / 2))
        return list(spread + t * spread.std(ddof=1) / math.sqrt(sets))

    dear, cheap = of(0.006, 8), of(0.025, 4)
    found = stats.decided([np.array(dear), np.array([*[math.nan] * 4, *cheap])], [4, 8])
    assert [d.look for d in found] == [2, 1]
    assert [d.word for d in found] == [stats.INCONCLUSIVE, stats.INCONCLUSIVE]
    (alone,) = stats.decided([np.array([*[math.nan] * 4, *cheap])], [4, 8])
    assert alone.word == stats.FASTER


def test_sets_that_resolve_an_effect_are_the_fewest_that_do() -> None:
    logs = np.random.default_rng(5).normal(0, 0.03, 12)
    needed = stats.sets_to_resolve(logs, 0.05)
    assert needed is not None
    halves = [special.stdtrit(n - 1, 0.975) * logs.std(ddof=1) / math.sqrt(n) for n in (needed - 1, needed)]
    assert math.exp(2 * halves[1]) <= 1.05 < math.exp(2 * halves[0])
    found = [stats.sets_to_resolve(values, most=50) for values in ([0.1], [0.1] * 6, [-9.0, 9.0])]
    assert found == [None, stats.LEAST_SETS, None]


def test_the_width_ends_measuring_from_the_eighth_set_on_and_never_the_ratio() -> None:
    assert stats.sets_to_come(ROUND / 10) == 0
    assert stats.sets_to_come(0.5 + ROUND / 10) == 0
    assert stats.sets_to_come(ROUND[:6] / 10) == 2
    assert stats.sets_to_come(10 * ROUND) == stats.sets_to_come(0.5 + 10 * ROUND) > 20
    assert stats.sets_to_come([]) == stats.LEAST_TO_STOP


def test_twins_of_all_questions_are_tested_together() -> None:
    assert stats.twins_differ([0.5, 0.0019, 0.3, math.nan, 0.8, 0.9])
    assert not stats.twins_differ([0.5, 0.0021, 0.3, math.nan, 0.8, 0.9])
    assert not stats.twins_differ([])
