"""Statistics of paired comparisons: plain functions of arrays, each with its formula.

The unit is the *set*. Turns within a set are averaged and never counted as repeats: they share a process, its memory
layout and its neighbours, so an interval over turns is several times too narrow.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from ddpm_lab import plan

LEVEL, RESOLUTION, LEAST_SETS = 0.95, plan.RESOLUTION, plan.LEAST_SETS

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A value with the ends of its 95 % interval, which are NaN where it has none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    @property
    def exists(self) -> bool:
        return not math.isnan(self.low)

    @property
    def ends(self) -> tuple[float, float]:
        return self.low, self.high

    @property
    def inverse(self) -> Self:
        return replace(self, value=1 / self.value, low=1 / self.high, high=1 / self.low)

    def times(self, factor: float) -> "Interval":
        return Interval(value=factor * self.value, low=factor * self.low, high=factor * self.high)

    @property
    def apart(self) -> float:
        """How far an interval that excludes 1 reaches from it, as a ratio above 1; 1 of any other."""
        return max(self.high, 1 / self.low) if self.exists and not self.contains(1) else 1.0

    def contains(self, x: float) -> bool:
        """Whether ``x`` lies within the interval; False without one."""
        return self.low <= x <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(Interval):
    """A geometric mean over ``sets``, and the p-value against 1; NaN where sets do not suffice.

    ``standard_error`` is of the mean log ratio.
    """

    p: float
    sets: int
    standard_error: float = math.nan

    @property
    def half_width(self) -> float:
        """Half the width of the interval of the log ratio; infinite where sets do not suffice for one."""
        return (math.log(self.high) - math.log(self.low)) / 2 if self.exists else math.inf

    @property
    def resolves(self) -> float:
        """The smallest relative difference that such an interval always answers for, whatever the truth is.

        Wherever it lies, an interval of half-width h = ln(1 + X) / 2 excludes 1 or lies within 1 / (1 + X) to 1 + X.
        """
        return math.expm1(2 * self.half_width)


MOST_PRIOR_DF = 4.0
"""The most that the spread of other comparisons may count for: see ``Spread``."""
LEAST_OTHERS = 3
"""Other comparisons that are needed to say anything of their spread."""
TWIN_SCALE = math.sqrt(3 / 4)
"""A twin's log ratio times this scatters as a candidate's does.

Between equal groups the variance of b - t is 2 in units of a group's, that of (b + t) / 2 - c is 3 / 2.
"""


class Spread(NamedTuple):
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

    known = (values[np.isfinite(values)] for values in map(np.asarray, others))
    samples = [values for values in known if len(values) > 1 and np.ptp(values) > 0]
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

    if spread is None or not spread.variance or special.fdtrc(df, spread.df, variance / spread.variance) < 1 - LEVEL:
        return variance, 0.0
    return (spread.df * spread.variance + df * variance) / (spread.df + df), spread.df


def t_quantile(df: float, probability: float = (1 + LEVEL) / 2) -> float:
    from scipy import special

    return float(special.stdtrit(df, probability))


def estimate(logs: npt.ArrayLike, spread: Spread | None = None) -> Estimate:
    """Geometric mean exp(m) of the n ``logs``, one a set, with the interval exp(m +- t(0.975, df) s / sqrt(n)).

    s^2 is the variance over sets, steadied by the ``spread`` of other comparisons where there is one (a moderated t);
    df is n - 1 and what the spread adds. p is two-sided, of m = 0. Values that are not finite are left out. Interval
    and p are NaN for one set, everything is NaN for none.
    """
    from scipy import special

    values = np.asarray(logs, dtype=float)
    values = values[np.isfinite(values)]
    n = len(values)
    mean = float(values.mean()) if n else math.nan
    if n < 2:
        return Estimate(value=exp(mean), p=math.nan, sets=n)
    variance, added = steadied(float(values.var(ddof=1)), n - 1, spread)
    df, error = n - 1 + added, math.sqrt(variance / n)
    half = t_quantile(df) * error
    # Without any spread the t statistic is infinite, or undefined where the mean is zero too.
    statistic = abs(mean) / error if error > 0 else math.inf if mean else 0.0
    p, low, high = 2 * float(special.stdtr(df, -statistic)), exp(mean - half), exp(mean + half)
    return Estimate(value=exp(mean), low=low, high=high, p=p, sets=n, standard_error=error)


def exp(log: float) -> float:
    """The exponential, held to what can be divided by and drawn: no ratio of seconds is beyond 1e130."""
    return math.exp(min(max(log, -300.0), 300.0))


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


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) adjusted p-values: of k sorted ones, the i-th (from 1) is max over j <= i of (k - j + 1) p_j.

    They keep the chance of any false call among k comparisons at the level of one. NaN is not counted and stays NaN.
    """
    adjusted, largest = [math.nan] * len(p_values), 0.0
    order = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i])
    for rank, i in enumerate(order):
        adjusted[i] = largest = max(largest, min(1.0, (len(order) - rank) * p_values[i]))
    return adjusted


def quotient_interval(numerator: Interval, denominator: Interval) -> tuple[float, float]:
    """Interval of a / b, independent and positive: MOVER (Donner & Zou 2012).

    A value without an interval counts as known. The upper end is infinite where b may be as low as 0.
    """
    a, b = numerator.value, denominator.value
    (a_low, a_high), (b_low, b_high) = (i.ends if i.exists else (i.value, i.value) for i in (numerator, denominator))
    below, above = a_low * (2 * a - a_low), a_high * (2 * a - a_high)
    # What is zero where both are known may come out of the rounding as less.
    low = below / (a * b + math.sqrt(max(0.0, (a * b) ** 2 - below * b_high * (2 * b - b_high))))
    if not b_low > 0:
        return low, math.inf
    scale = b_low * (2 * b - b_low)
    return low, (a * b + math.sqrt(max(0.0, (a * b) ** 2 - above * scale))) / scale


# --- verdicts, and when to stop measuring -----------------------------------------------------------------------------
# A question has one primary comparison, fixed before it is measured, and others that are secondary. The primary is
# tested on its own, the secondary ones of a baseline together (Holm 1979); it and its twin are in neither.

LEAST_TO_STOP = 8
"""Sets after which the width of an interval may end measuring."""

FASTER, SLOWER, SAME = "faster", "slower", "same speed"
INCONCLUSIVE, TOO_FEW = "inconclusive", "too few sets"
ANSWERS = (FASTER, SLOWER, SAME)

FIRST_LOOK = 0.035
TWINS_LEVEL = 0.01


def level_of_look(look: int) -> float:
    """Return the level of the ``look``-th evaluation (from 1): 3.5 %, then half of what is left of 5 %."""
    return FIRST_LOOK if look == 1 else (1 - LEVEL - FIRST_LOOK) / 2 ** (look - 1)


def verdict(found: Estimate, p: float, level: float, resolution: float = RESOLUTION) -> str:
    """Return faster, slower, same, inconclusive or too few sets; ``p`` is adjusted already.

    A difference that is called may be smaller than ``resolution``. Same is what has its whole 95 % interval within
    1 / (1 + resolution) to 1 + resolution.
    """
    if found.sets < LEAST_SETS:
        return TOO_FEW
    if p < level:
        return FASTER if found.value > 1 else SLOWER
    return SAME if 1 / (1 + resolution) <= found.low and found.high <= 1 + resolution else INCONCLUSIVE


class Decision(NamedTuple):
    """A verdict, with the look, level, estimate and adjusted p-value that it rests on."""

    word: str
    look: int
    level: float
    estimate: Estimate
    p: float


def decided(
    log_ratios: Sequence[npt.ArrayLike],
    looks: Sequence[int],
    spreads: Sequence[Sequence[Spread | None]] | None = None,
    resolution: float = RESOLUTION,
) -> list[Decision]:
    """Return the verdicts of comparisons that are tested together, evaluated at ``looks`` sets.

    ``log_ratios`` holds one value a set for each comparison, in the order of measuring, NaN where a set has none. The
    first answer (faster, slower, same) stays, whatever later sets say; without one it is what the last look says. A
    look costs only those comparisons that it tested: with LEAST_SETS or more, and more than at the look before.
    ``spreads`` has one for each look and comparison. A primary comparison is given alone.
    """
    nothing = Decision(word=TOO_FEW, look=0, level=FIRST_LOOK, estimate=estimate([]), p=math.nan)
    found = [nothing] * len(log_ratios)
    for count, of_look in zip(looks, spreads or [[None] * len(log_ratios)] * len(looks), strict=True):
        estimates = [
            estimate(np.asarray(values, dtype=float)[:count], spread)
            for values, spread in zip(log_ratios, of_look, strict=True)
        ]
        tested = [e.sets >= LEAST_SETS and e.sets > d.estimate.sets for e, d in zip(estimates, found, strict=True)]
        mine = [d.look + new for d, new in zip(found, tested, strict=True)]
        # Holm's steps in shares of each comparison's own level, so that none rests on a call that was not made.
        dearer = [FIRST_LOOK / level_of_look(max(look, 1)) for look in mine]
        shares = [e.p * d if e.sets >= LEAST_SETS else math.nan for e, d in zip(estimates, dearer, strict=True)]
        for i, (e, share) in enumerate(zip(estimates, holm(shares), strict=True)):
            if found[i].word not in ANSWERS and e.sets > found[i].estimate.sets:
                p, level = share / dearer[i], FIRST_LOOK / dearer[i]
                word = verdict(e, p, level, resolution)
                found[i] = Decision(word=word, look=mine[i], level=level, estimate=e, p=p)
    return found


def resolvable(spread: float, sets: int) -> float:
    """Return what ``sets`` resolve if log ratios scatter by ``spread``; infinite below LEAST_SETS."""
    return math.inf if sets < LEAST_SETS else math.expm1(2 * t_quantile(sets - 1) * spread / math.sqrt(sets))


def sets_to_resolve(log_ratios: npt.ArrayLike, effect: float = RESOLUTION, most: int = 10_000) -> int | None:
    """Return the smallest number of sets that resolve ``effect`` at the scatter so far: see ``resolvable``.

    None if fewer than two sets tell the scatter, or if more than ``most`` sets would be needed.
    """
    now = estimate(log_ratios)
    if now.sets < 2:
        return None
    deviation = now.standard_error * math.sqrt(now.sets)
    # What is resolved falls with the number of sets, so the first that is small enough is found by halving.
    sets = range(LEAST_SETS, most + 1)
    found = LEAST_SETS + bisect_left(sets, True, key=lambda n: resolvable(deviation, n) <= effect)
    return found if found <= most else None


def sets_to_come(log_ratios: npt.ArrayLike, effect: float = RESOLUTION) -> int:
    """Return how many more sets a comparison needs to resolve ``effect``: the width decides, never the ratio.

    0 as soon as the interval is narrow enough, after LEAST_TO_STOP sets or more.
    """
    now = estimate(log_ratios)
    if now.sets >= LEAST_TO_STOP and now.resolves <= effect:
        return 0
    needed = sets_to_resolve(log_ratios, effect) or LEAST_TO_STOP
    return max(1, LEAST_TO_STOP - now.sets, needed - now.sets)


def twins_differ(p_values: Sequence[float]) -> bool:
    """True if any twin of all questions of a machine differs, at 1 % in all (Holm); NaN is not counted."""
    return any(p < TWINS_LEVEL for p in holm(p_values))
