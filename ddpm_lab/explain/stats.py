"""Statistics of paired comparisons: plain functions of arrays, each with its formula.

The unit is the *set*. Turns within a set are averaged and never counted as repeats: they share a process, its memory
layout and its neighbours, so an interval over turns is several times too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt

from ddpm_lab import plan

LEVEL, RESOLUTION = 0.95, plan.RESOLUTION

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with the ends of its 95 % interval, which are NaN where it has none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def exists(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)

    @property
    def ends(self) -> tuple[float, float]:
        """The lower and the upper end."""
        return self.low, self.high

    @property
    def inverse(self) -> Self:
        """The interval of 1 / value."""
        return replace(self, value=1 / self.value, low=1 / self.high, high=1 / self.low)

    def contains(self, x: float) -> bool:
        """Whether ``x`` lies within the interval; False without one."""
        return self.low <= x <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Interval):
    """A geometric mean over ``sets``, and the p-value against 1; NaN where sets do not suffice.

    ``standard_error`` is of the mean log ratio; ``df`` are the degrees of freedom of Student's t, a ``Spread``'s too.
    """

    p: float
    sets: int
    standard_error: float = math.nan
    df: float = math.nan

    @property
    def half_width(self) -> float:
        """Half the width of the interval of the log ratio; infinite where sets do not suffice for one."""
        return (math.log(self.high) - math.log(self.low)) / 2 if self.exists else math.inf


MOST_PRIOR_DF = 4.0
"""The most that the spread of other comparisons may count for: see ``Spread``."""
LEAST_OTHERS = 3
"""Other comparisons that are needed to say anything of their spread."""
TWIN_SCALE = math.sqrt(3 / 4)
"""A twin's log ratio times this scatters as a candidate's does.

Between equal groups the variance of b - t is 2 in units of a group's, that of (b + t) / 2 - c is 3 / 2.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """What other comparisons say of a variance over sets: a typical value, and the degrees of freedom that it is worth.

    ``df`` is at most 4. By simulation, intervals of 4 to 12 sets then cover 94.4 to 96.7 % of truths where comparisons
    differ in their spread by factors up to exp(0.8 z), z normal, and 2 to 20 others are known; with 10 it was as little
    as 92.6 % before comparisons that scatter more than others kept their own spread. See ``tests/test_coverage.py``.
    """

    variance: float
    df: float


def spread_of(others: Iterable[npt.ArrayLike]) -> Spread | None:
    """The prior of a moderated t (Smyth 2004, section 6.2) from the log ratios of each other comparison.

    With s_g^2 and d_g the variance of comparison g over its sets and its degrees of freedom, and
    e_g = ln s_g^2 - digamma(d_g / 2) + ln(d_g / 2):
    trigamma(d0 / 2) = variance of the e_g - mean of trigamma(d_g / 2), ln s0^2 = mean of the e_g + digamma(d0 / 2) -
    ln(d0 / 2). Where the variances differ by no more than chance d0 is infinite; it is held to MOST_PRIOR_DF. None if
    fewer than LEAST_OTHERS comparisons have two sets. Twins are to be multiplied by TWIN_SCALE before.
    """
    from scipy import special

    samples = [values for values in map(_finite, others) if len(values) > 1 and np.ptp(values) > 0]
    if len(samples) < LEAST_OTHERS:
        return None
    half = np.array([(len(values) - 1) / 2 for values in samples])
    logs = np.log([values.var(ddof=1) for values in samples]) - special.digamma(half) + np.log(half)
    excess = float(logs.var(ddof=1) - special.polygamma(1, half).mean())
    if excess <= 0:
        return Spread(variance=float(np.exp(logs.mean())), df=MOST_PRIOR_DF)
    d0 = 2 * _inverse_trigamma(excess)
    variance = math.exp(float(logs.mean() + special.digamma(d0 / 2)) - math.log(d0 / 2))
    return Spread(variance=variance, df=min(d0, MOST_PRIOR_DF))


def steadied(variance: float, df: float, spread: Spread | None) -> tuple[float, float]:
    """Posterior variance (d0 s0^2 + d s^2) / (d0 + d), and the degrees of freedom that the spread added to it.

    A comparison that scatters more than the others (F test at 5 %) keeps its own variance: the others do not speak for
    one that was disturbed, and an interval made narrower by them would cover a truth too rarely.
    """
    from scipy import special

    if spread is None or special.fdtrc(df, spread.df, variance / spread.variance) < 1 - LEVEL:
        return variance, 0.0
    return (spread.df * spread.variance + df * variance) / (spread.df + df), spread.df


def t_quantile(df: float, probability: float = (1 + LEVEL) / 2) -> float:
    """Return the quantile of Student's t with ``df`` degrees of freedom."""
    from scipy import special

    return float(special.stdtrit(df, probability))


def estimate(logs: npt.ArrayLike, spread: Spread | None = None) -> Estimate:
    """Geometric mean exp(m) of the n ``logs``, one a set, with the interval exp(m +- t(0.975, df) s / sqrt(n)).

    s^2 is the variance over sets, steadied by the ``spread`` of other comparisons where there is one (a moderated t);
    df is n - 1 and what the spread adds. p is two-sided, of m = 0. Values that are not finite are left out. Interval
    and p are NaN for one set, everything is NaN for none.
    """
    from scipy import special

    values = _finite(logs)
    n = len(values)
    mean = float(values.mean()) if n else math.nan
    if n < 2:
        return Estimate(value=math.exp(mean), p=math.nan, sets=n)
    variance, added = steadied(float(values.var(ddof=1)), n - 1, spread)
    df, error = n - 1 + added, math.sqrt(variance / n)
    half = t_quantile(df) * error
    # Without any spread the t statistic is infinite, or undefined where the mean is zero too.
    statistic = abs(mean) / error if error > 0 else math.inf if mean else 0.0
    p, low, high = 2 * float(special.stdtr(df, -statistic)), math.exp(mean - half), math.exp(mean + half)
    return Estimate(value=math.exp(mean), low=low, high=high, p=p, sets=n, standard_error=error, df=df)


def _finite(logs: npt.ArrayLike) -> Array:
    values = np.asarray(logs, dtype=float)
    finite: Array = values[np.isfinite(values)]
    return finite


def _inverse_trigamma(x: float) -> float:
    """Argument at which trigamma is x, by Newton's method on 1 / trigamma, which is convex (Smyth 2004, appendix)."""
    from scipy import special

    y = 0.5 + 1 / x
    for _ in range(50):
        value = float(special.polygamma(1, y))
        step = value * (1 - value / x) / float(special.polygamma(2, y))
        y += step
        if abs(step) < 1e-10 * y:
            break
    return y


def geometric_mean(ratios: npt.ArrayLike) -> float:
    """exp(mean(ln r)): the mean of ratios that inverts when baseline and configuration change places."""
    values = np.asarray(ratios, dtype=float)
    return float(np.exp(np.log(values).mean())) if values.size else math.nan


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p-values: of k sorted ones, the i-th (from 1) is max over j <= i of (k - j + 1) p_j.

    They keep the chance of any false call among k comparisons at the level of one. NaN is not counted and stays NaN.
    """
    adjusted, largest = [math.nan] * len(p_values), 0.0
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    for rank, i in enumerate(order):
        adjusted[i] = largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
    return adjusted


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
