"""Statistics of paired comparisons: plain functions of arrays, each with its formula.

The unit is the *set*. Turns within a set are averaged and never counted as repeats: they share a process, its memory
layout and its neighbours, so an interval over turns is several times too narrow.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

LEVEL = 0.95
LEAST_SETS = 6
"""With fewer sets a ratio is shown and no verdict is given."""
RESOLUTION = 0.03
"""Smallest relative difference that a comparison is asked to find, unless another is given."""

FASTER = "faster"
SLOWER = "slower"
NOT_RESOLVED = "not resolved"
NOT_TRUSTED = "instrument not trusted here"
BURSTS = f"{NOT_RESOLVED} (bursts)"
"""A verdict that windows far slower than most, which the median leaves out, would turn."""

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A geometric mean over sets with its 95 % interval and the p-value against 1; NaN where sets do not suffice."""

    value: float
    low: float
    high: float
    p: float
    sets: int


def geometric_estimate(logs: npt.ArrayLike) -> Estimate:
    """Geometric mean exp(m), m the mean of the n ``logs``, with its interval exp(m +- t(0.975, n-1) s / sqrt(n)).

    s is the standard deviation over sets. The p-value is the two-sided one of m = 0. Values that are not finite are
    left out. Interval and p-value are NaN for one set, everything is NaN for none.
    """
    values = np.asarray(logs, dtype=float)
    values = values[np.isfinite(values)]
    n = len(values)
    if n == 0:
        return Estimate(value=math.nan, low=math.nan, high=math.nan, p=math.nan, sets=0)
    mean = float(values.mean())
    if n == 1:
        return Estimate(value=math.exp(mean), low=math.nan, high=math.nan, p=math.nan, sets=1)
    error = float(values.std(ddof=1)) / math.sqrt(n)
    half = float(special.stdtrit(n - 1, (1 + LEVEL) / 2)) * error
    # Without any spread the t statistic is infinite, or undefined where the mean is zero too.
    statistic = abs(mean) / error if error > 0 else math.inf if mean else 0.0
    p = 2 * float(special.stdtr(n - 1, -statistic))
    return Estimate(value=math.exp(mean), low=math.exp(mean - half), high=math.exp(mean + half), p=p, sets=n)


def throughput_estimate(images_per_second: npt.ArrayLike) -> Estimate:
    """Geometric mean over sets of each set's median images per second, with its Student's t interval on the logs.

    Geometric, so that two throughputs stand in the ratio that the paired comparison finds. The p-value means nothing.
    """
    values = np.asarray(images_per_second, dtype=float)
    return geometric_estimate(np.log(values[np.isfinite(values) & (values > 0)]))


def geometric_mean(ratios: npt.ArrayLike) -> float:
    """exp(mean(ln r)): the mean of ratios that inverts when baseline and configuration change places."""
    values = np.asarray(ratios, dtype=float)
    return float(np.exp(np.log(values).mean())) if values.size else math.nan


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p-values: of k sorted ones, the i-th (from 1) is max over j <= i of (k - j + 1) p_j.

    They keep the chance of any false call among k comparisons at the level of one. NaN is not counted and stays NaN.
    """
    adjusted = [math.nan] * len(p_values)
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    largest = 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def called(estimate: Estimate, p_adjusted: float) -> bool:
    """Whether the comparison finds a difference: at least six sets and an adjusted p-value below 0.05."""
    return estimate.sets >= LEAST_SETS and p_adjusted < 1 - LEVEL


def verdict(estimate: Estimate, p_adjusted: float, comparisons: int) -> str:
    """faster, slower or not resolved; the last says so where only the correction for ``comparisons`` prevents it."""
    if called(estimate, p_adjusted):
        return FASTER if estimate.value > 1 else SLOWER
    if estimate.sets >= LEAST_SETS and not estimate.low <= 1 <= estimate.high:
        return f"{NOT_RESOLVED} (corrected for {comparisons} comparisons)"
    return NOT_RESOLVED


def sets_to_resolve(log_ratios: npt.ArrayLike, effect: float = RESOLUTION, most: int = 10_000) -> int | None:
    """Sets after which the interval's half-width is at most half the effect, at the spread observed so far.

    The smallest n >= 6 with t(0.975, n-1) s / sqrt(n) <= ln(1 + effect) / 2: a true difference of ``effect`` is then
    found in some 97 % of cases when it is the only comparison. None if fewer than two sets tell the spread, or if more
    than ``most`` sets would be needed.
    """
    values = np.asarray(log_ratios, dtype=float)
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return None
    spread = float(values.std(ddof=1))
    # The half-width falls with the number of sets, so the first that is narrow enough is found by halving.
    found = bisect_left(
        range(LEAST_SETS, most + 1),
        True,
        key=lambda n: bool(special.stdtrit(n - 1, (1 + LEVEL) / 2) * spread / math.sqrt(n) <= math.log1p(effect) / 2),
    )
    return LEAST_SETS + found if LEAST_SETS + found <= most else None


NARROW_IN_A_ROW = 3
"""Sets after which the interval must have been narrow enough before measuring stops."""


def sets_to_come(log_ratios: npt.ArrayLike, effect: float = RESOLUTION) -> int:
    """Sets that a comparison still needs to resolve ``effect``; 0 when it may stop.

    It may stop when, after each of the last three sets, the interval's half-width was at most half the effect and there
    were at least six sets: the width decides, never the ratio. A single look would stop too often on a spread that is
    small by luck: simulated with normal noise of 0.5 to 6 % between sets and an effect of 3 %, the intervals cover
    93.5-95 % (with a single look 92.3-95 %).
    """
    values = np.asarray(log_ratios, dtype=float)
    values = values[np.isfinite(values)]
    least = LEAST_SETS + NARROW_IN_A_ROW - 1
    looks = [values[: len(values) - i] for i in range(NARROW_IN_A_ROW)]
    if len(values) >= least and all(half_width(look) <= math.log1p(effect) / 2 for look in looks):
        return 0
    needed = sets_to_resolve(values, effect) or least
    return max(1, least - len(values), needed - len(values))


def half_width(log_ratios: npt.ArrayLike, comparisons: int = 1) -> float:
    """Half the width of the 95 % interval of the mean log ratio; infinite for fewer than two sets.

    Of one of several ``comparisons`` that was chosen, it is as much wider as Bonferroni's correction asks.
    """
    values = np.asarray(log_ratios, dtype=float)
    n = len(values)
    if n < 2:
        return math.inf
    return float(special.stdtrit(n - 1, 1 - (1 - LEVEL) / 2 / comparisons) * values.std(ddof=1) / math.sqrt(n))


def mean_and_half(values: npt.ArrayLike, comparisons: int = 1) -> tuple[float, float]:
    """Mean, and half of its 95 % interval as ``half_width`` has it, but NaN for a single value."""
    half = half_width(values, comparisons)
    return float(np.asarray(values, dtype=float).mean()), half if math.isfinite(half) else math.nan


def smallest_effect(spread: float, sets: int) -> float:
    """The smallest relative difference that so many sets resolve, at a spread of log ratios: half-width = effect / 2.

    Infinite for fewer than six sets.
    """
    if sets < LEAST_SETS:
        return math.inf
    return math.expm1(2 * float(special.stdtrit(sets - 1, (1 + LEVEL) / 2)) * spread / math.sqrt(sets))


def quotient_interval(
    numerator: tuple[float, float, float], denominator: tuple[float, float, float]
) -> tuple[float, float]:
    """Interval of a / b from value, low and high of each, independent and positive: MOVER (Donner & Zou 2012).

    A value without bounds (NaN) counts as known. The upper end is infinite where b may be as low as 0.
    """
    (a, a_low, a_high), (b, b_low, b_high) = (
        (v, v, v) if math.isnan(low) or math.isnan(high) else (v, low, high)
        for v, low, high in (numerator, denominator)
    )
    below, above = a_low * (2 * a - a_low), a_high * (2 * a - a_high)
    # What is zero where both are known may come out of the rounding as less.
    low = below / (a * b + math.sqrt(max(0.0, (a * b) ** 2 - below * b_high * (2 * b - b_high))))
    if not b_low > 0:
        return low, math.inf
    scale = b_low * (2 * b - b_low)
    return low, (a * b + math.sqrt(max(0.0, (a * b) ** 2 - above * scale))) / scale


def break_even_steps(cost_seconds: float, baseline_step_seconds: float, ratio: float) -> float:
    """Steps after which a one-time cost is earned back: cost / (baseline step - step), step = baseline step / ratio.

    Infinite where the configuration is not faster (ratio <= 1), NaN where a value is unknown.
    """
    if any(math.isnan(v) for v in (cost_seconds, baseline_step_seconds, ratio)):
        return math.nan
    saved = baseline_step_seconds * (1 - 1 / ratio)
    return cost_seconds / saved if saved > 0 else math.inf
