"""Which windows a set has: their order and length, and how many turns and sets answer a comparison best.

``between`` and ``within`` are standard deviations of one group's log time, from set to set and from turn to turn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import NormalDist, fmean, variance

from ddpm_lab.plan import Plan

WITHIN, BETWEEN = 0.10, 0.03  # assumed: what windows of 0.2 s show on a machine that others share
PRIOR_SETS = 10  # for so many sets the values that are assumed count beside those that are measured
CANDIDATE, TWIN = 1.5, 2.0  # variance of a comparison with both baselines, and of these two, in a group's
LEAST_TURNS, MOST_TURNS = 4, 60  # fewer are not balanced, more last too long to be repeated
WISHED_SETS = 6  # A set has no more turns than leave time for so many sets: of fewer a confidence interval is wide


def balanced_orders(count: int, turns: int, seed: int) -> list[list[int]]:
    """Orders of ``count`` configurations over ``turns`` turns: rows of a Williams square (Williams 1949).

    Over a whole square each stands at every position and follows every other equally often. ``seed`` (the set's own)
    shuffles rows and names, so that what one set leaves unbalanced the sets together do not.
    """
    rng = random.Random(seed)
    zigzag = [(i + 1) // 2 if i % 2 else count - i // 2 for i in range(count)]
    rows = [[(step + shift) % count for step in zigzag] for shift in range(count)]
    if count % 2:  # an odd square is balanced for who goes before only together with its mirror image
        rows += [row[::-1] for row in rows]
    rng.shuffle(rows)
    names = list(range(count))
    rng.shuffle(names)
    return [[names[i] for i in rows[turn % len(rows)]] for turn in range(turns)]


def steps_of_windows(
    plan: Plan, batch_sizes: Sequence[int], step_seconds: Sequence[float], prefetch_batches: Sequence[int]
) -> list[int]:
    """Steps of a timed window for each configuration of a set, so that all process the same number of images.

    The fastest configuration fills ``plan.window_seconds`` and every one does ``plan.window_steps`` steps; where loader
    workers prefetch, at least 20 steps and ten times the prefetch queue. The slowest window is held to about ten times
    ``plan.window_seconds`` unless the fewest steps already take longer: a ratio that large needs no long window.
    """
    least = plan.window_steps
    if any(count > 1 for count in prefetch_batches):  # one batch ahead is made for each one that is taken
        least = max(least, 20, 10 * max(prefetch_batches))
    unit = math.lcm(*batch_sizes)
    pairs = list(zip(batch_sizes, step_seconds, strict=True))
    needed = max(b * max(least, math.ceil(plan.window_seconds / s)) for b, s in pairs)
    floor = max(b * least for b in batch_sizes)
    slowest = max(s / b for b, s in pairs)  # seconds per image
    affordable = max(floor, 10 * plan.window_seconds / slowest)
    images = math.ceil(min(needed, affordable) / unit) * unit
    return [images // b for b in batch_sizes]


def variances(twins: Sequence[Sequence[float]]) -> tuple[float, float]:
    """``within`` and ``between`` of a machine: one-way random effects, by moments (Searle, Variance Components, 1992).

    ``twins`` are each set's log ratios of baseline and twin by turn, whose true mean is zero: the mean of T turns has
    the variance 2 (B + W / T). What is assumed counts as ``PRIOR_SETS`` sets more; sets of one turn say nothing.
    """
    known = [turns for turns in twins if len(turns) > 1]
    within = PRIOR_SETS * WITHIN**2 + sum((len(v) - 1) * variance(v) for v in known) / TWIN
    between = PRIOR_SETS * BETWEEN**2 + sum(fmean(v) ** 2 - variance(v) / len(v) for v in known) / TWIN
    turns = sum(len(v) - 1 for v in known)
    return math.sqrt(within / (PRIOR_SETS + turns)), math.sqrt(max(0.0, between / (PRIOR_SETS + len(known))))


def best_turns(
    start_seconds: float, turn_seconds: float, within: float, between: float, seconds: float = math.inf
) -> int:
    """Turns that narrow an interval most for the time (Cochran, Sampling Techniques, two-stage sampling).

    sqrt(start / turn) * within / between; fewer where ``seconds`` would not be enough for ``WISHED_SETS`` sets.
    """
    best = math.sqrt(start_seconds / turn_seconds) * within / between if between else MOST_TURNS
    room = (seconds / WISHED_SETS - start_seconds) / turn_seconds
    return max(LEAST_TURNS, int(min(round(best), MOST_TURNS, room)))


def sets_that_resolve(effect: float, turns: int, within: float, between: float) -> int:
    """Sets whose expected 95 % interval answers for this relative difference whatever the truth is.

    It then either excludes 1 or lies within 1 / (1 + effect) to 1 + effect: half of its width is half of the effect.
    Student's t widens the interval of n sets about as if there were 2.4 fewer.
    """
    error = NormalDist().inv_cdf(0.975) * math.sqrt(CANDIDATE * (between**2 + within**2 / turns))
    return max(4, math.ceil(2.4 + (2 * error / math.log1p(effect)) ** 2))
