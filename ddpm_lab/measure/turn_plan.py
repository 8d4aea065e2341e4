"""How many sets, and how many turns in each, answer a comparison best in the time that there is.

Of the noise of one group's log time, ``between`` is what differs from set to set and ``within`` what differs from turn
to turn, both as standard deviations, without what slows all groups of a turn alike. A comparison with the mean of
baseline and twin has 3 / 2 of a group's variance, a baseline against its twin twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

WITHIN, BETWEEN = 0.10, 0.03
"""Where no set of a machine is known: what windows of 0.2 s show on a machine that others share."""
CANDIDATE, TWIN = 1.5, 2.0
"""Variance of a comparison with the mean of two baselines, and of a baseline against its twin, in a group's."""
PRIOR_SETS = 10
"""For so many sets the values that are assumed count beside those that are measured."""


def variances(
    twins: Sequence[npt.ArrayLike], candidates: Sequence[Sequence[npt.ArrayLike]] = ()
) -> tuple[float, float]:
    """``within`` and ``between`` from all recorded sets of a machine: one-way random effects, by moments.

    Args:
        twins: for each set the log ratios of baseline and twin in its turns; their true mean is zero.
        candidates: for each comparison, for each of its sets, the log ratios in its turns of candidate and mean of
            baseline and twin. Their mean is unknown, so that only what differs between its sets counts.

    With W = within^2 and B = between^2, the mean of a set of T turns has the variance k (B + W / T), k as above. W is
    the pooled variance within sets over k; B is what the squares of the sets' means leave once each set's own variance
    within it, over T, is taken off, since windows of long steps scatter less. What is assumed where no set is known
    counts as PRIOR_SETS sets more. A set needs two turns.
    """
    kinds = [(TWIN, 0, [np.asarray(v, dtype=float) for v in twins])]
    kinds += [(CANDIDATE, 1, [np.asarray(v, dtype=float) for v in sets]) for sets in candidates]
    within, within_df = PRIOR_SETS * WITHIN**2, float(PRIOR_SETS)
    between, between_df = PRIOR_SETS * BETWEEN**2, float(PRIOR_SETS)
    for factor, fitted, sets in kinds:
        within += sum(float(((v - v.mean()) ** 2).sum()) for v in sets) / factor
        within_df += sum(len(v) - 1 for v in sets)
        if len(sets) > fitted:
            means, share = np.array([v.mean() for v in sets]), 1 - fitted / len(sets)
            between += float(((means - fitted * means.mean()) ** 2).sum()) / factor
            between -= share * sum(float(v.var(ddof=1)) / len(v) for v in sets) / factor
            between_df += share * len(sets)
    return math.sqrt(within / within_df), math.sqrt(max(0.0, between / between_df))


def half_width(sets: int, turns: int, within: float, between: float, df_prior: float = 0.0) -> float:
    """Half-width to expect of a 95 % interval of a log ratio: t(n - 1 + d0) sqrt(3 / 2 (B + W / T) / n)."""
    error = math.sqrt(CANDIDATE * (between**2 + within**2 / turns) / sets)
    return student_t(sets - 1 + df_prior) * error


def plan_of_sets(
    seconds: float,
    start_seconds: float,
    turn_seconds: float,
    *,
    within: float = WITHIN,
    between: float = BETWEEN,
    df_prior: float = 0.0,
    least: int = 4,
    wished: int = 6,
    least_turns: int = 2,
    most_turns: int = 100,
) -> tuple[int, int]:
    """Sets and turns whose interval is narrowest in the time; a set takes start_seconds + turns * turn_seconds.

    Both count all groups of a set. There are at least ``wished`` sets where these fit with ``least_turns`` turns, else
    as many as fit, which may be fewer than the ``least`` that a verdict needs: then there is no point in starting, and
    least * (start_seconds + least_turns * turn_seconds) would do. ``df_prior`` are the degrees of freedom that the
    spread of other comparisons will add.
    """
    fit = int(seconds / (start_seconds + least_turns * turn_seconds) + 1e-9)
    if fit < least:
        return fit, least_turns

    def turns_of(sets: int) -> int:
        return min(most_turns, int((seconds / sets - start_seconds) / turn_seconds + 1e-9))

    plans = [(sets, turns_of(sets)) for sets in range(min(wished, fit), fit + 1)]
    return min(plans, key=lambda plan: half_width(plan[0], plan[1], within, between, df_prior))


def student_t(df: float, probability: float = 0.975) -> float:
    """Quantile of Student's t, within 0.2 % for three degrees of freedom and more (Abramowitz & Stegun 26.7.5).

    For planning where scipy is not installed; intervals are computed with scipy.
    """
    x = NormalDist().inv_cdf(probability)
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + sum(term / df**power for power, term in enumerate(terms, 1))


def best_turns(start_seconds: float, turn_seconds: float, within: float, between: float) -> int:
    """Turns that narrow an interval most for the time, over many sets: sqrt(start / turn) * within / between."""
    if not between:
        return MOST_TURNS
    return min(MOST_TURNS, max(LEAST_TURNS, round(math.sqrt(start_seconds / turn_seconds) * within / between)))


def sets_that_resolve(effect: float, turns: int, within: float, between: float, most: int = 200) -> int:
    """The fewest sets whose expected interval answers for this relative difference whatever the truth is.

    It then either excludes 1 or lies within 1 / (1 + effect) to 1 + effect: half of its width is half of the effect.
    """
    for sets in range(4, most):
        if half_width(sets, turns, within, between) <= math.log1p(effect) / 2:
            return sets
    return most


LEAST_TURNS, MOST_TURNS = 4, 60
"""Of a set: fewer than the least are not balanced, and more than the most last too long to be repeated."""
