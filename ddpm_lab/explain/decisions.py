"""Verdicts of comparisons, and when to stop measuring.

A question has one primary comparison, fixed before it is measured, and others that are secondary. The primary is tested
on its own, the secondary ones together (Holm 1979); a baseline and its twin are in neither.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddpm_lab import plan
from ddpm_lab.explain.stats import LEVEL, RESOLUTION, Estimate, Spread, estimate, holm, t_quantile

LEAST_SETS = plan.LEAST_SETS
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
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
    first answer (faster, slower, same) stays, whatever later sets say; without one it is what the last look says. Looks
    at fewer than LEAST_SETS sets test nothing and cost nothing. ``spreads`` has one for each look and
    comparison. A primary comparison is given alone.
    """
    by_look = spreads or [[None] * len(log_ratios)] * len(looks)
    counts = [(n, s) for n, s in zip(looks, by_look, strict=True) if n >= LEAST_SETS]
    counts = counts or list(zip(looks, by_look, strict=True))[-1:]
    found: list[Decision] = []
    for look, (count, of_look) in enumerate(counts, 1):
        estimates = [
            estimate(np.asarray(values, dtype=float)[:count], spread)
            for values, spread in zip(log_ratios, of_look, strict=True)
        ]
        level, adjusted = level_of_look(look), holm([e.p if e.sets >= LEAST_SETS else math.nan for e in estimates])
        now = [
            Decision(word=verdict(e, p, level, resolution), look=look, level=level, estimate=e, p=p)
            for e, p in zip(estimates, adjusted, strict=True)
        ]
        found = [old if old.word in ANSWERS else new for old, new in zip(found or now, now, strict=True)]
    return found


def resolves(half_width: float) -> float:
    """Return the smallest difference that an interval of log ratios always answers: exp(2 h) - 1.

    Wherever it lies, an interval of half-width h = ln(1 + X) / 2 excludes 1 or lies within 1 / (1 + X) to 1 + X.
    """
    return math.expm1(2 * half_width)


def resolvable(spread: float, sets: int) -> float:
    """Return what ``sets`` resolve if log ratios scatter by ``spread``; infinite below LEAST_SETS."""
    if sets < LEAST_SETS:
        return math.inf
    return resolves(t_quantile(sets - 1) * spread / math.sqrt(sets))


def sets_to_resolve(
    log_ratios: npt.ArrayLike, effect: float = RESOLUTION, spread: Spread | None = None, most: int = 10_000
) -> int | None:
    """Return the number of sets that resolve ``effect`` at the scatter so far: see ``resolves``.

    The smallest n >= 4 with t(0.975, n - 1 + d0) s / sqrt(n) <= ln(1 + effect) / 2, d0 and s those of ``estimate``.
    None if fewer than two sets tell the spread, or if more than ``most`` sets would be needed.
    """
    now = estimate(log_ratios, spread)
    if now.sets < 2:
        return None
    deviation, added = now.standard_error * math.sqrt(now.sets), now.df - (now.sets - 1)

    def narrow(n: int) -> bool:
        return t_quantile(n - 1 + added) * deviation / math.sqrt(n) <= math.log1p(effect) / 2

    # The half-width falls with the number of sets, so the first that is narrow enough is found by halving.
    found = LEAST_SETS + bisect_left(range(LEAST_SETS, most + 1), True, key=narrow)
    return found if found <= most else None


def sets_to_come(log_ratios: npt.ArrayLike, effect: float = RESOLUTION, spread: Spread | None = None) -> int:
    """Return how many more sets a comparison needs to resolve ``effect``: the width decides, never the ratio.

    0 as soon as the interval is narrow enough, after LEAST_TO_STOP sets or more.
    """
    now = estimate(log_ratios, spread)
    if now.sets >= LEAST_TO_STOP and resolves(now.half_width) <= effect:
        return 0
    needed = sets_to_resolve(log_ratios, effect, spread) or LEAST_TO_STOP
    return max(1, LEAST_TO_STOP - now.sets, needed - now.sets)


def twins_differ(p_values: Sequence[float]) -> bool:
    """True if any twin of all questions of a machine differs, at 1 % in all (Holm); NaN is not counted."""
    return any(p < TWINS_LEVEL for p in holm(p_values))


def beyond_twin(found: Estimate, twin: Estimate) -> bool:
    """True if an effect may be called, given the twin of its question.

    Where the twin's 95 % interval excludes 1, only effects whose log ratio is larger, in size, than its far end.
    """
    if math.isnan(twin.low) or twin.low <= 1 <= twin.high:
        return True
    return abs(math.log(found.value)) > max(abs(math.log(twin.low)), abs(math.log(twin.high)))
