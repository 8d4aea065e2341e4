"""Does a configuration learn as well as its baseline? Equivalence of held-out losses, paired by seed.

Both sides of a pair begin with the same weights and see the same images, timesteps and noise in the same order, so that
what a seed is worth to both drops out of the difference.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from ddpm_lab.config import DDPM, TRAINING, RunConfig
from ddpm_lab.record import RunRecord

IDENTICAL = "identical"
NOT_WORSE = "not worse"
WORSE = "worse"
NOT_ENOUGH = "not enough data"
NOT_MEASURED = "not measured"
DIVERGED = "diverged"

LEVEL = 0.90
"""Of the interval: its upper end beyond the margin is the one-sided test of equivalence at 5 %."""
LEAST_SEEDS = 5
"""With fewer seeds the difference is shown and no verdict is given: their spread, and so the margin, is not known."""
MOST_SEEDS = 1000
HARDLY = 0.98
"""With more than this share of its untrained loss left a baseline has learned too little for anything to cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """The verdict on a configuration's held-out loss, and what it rests on.

    ``difference`` is the configuration's loss less the baseline's, mean over seeds, with its 90 % interval ``low`` to
    ``high``; ``margin`` is the largest difference that counts as none. ``seeds_needed`` is None where no number of them
    would show that the configuration is not worse, or where it is shown.
    """

    verdict: str
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    margin: float = math.nan
    seeds: int = 0
    seeds_needed: int | None = None
    reason: str = ""
    pairs: tuple[tuple[RunRecord, RunRecord], ...] = ()
    """The trials that were compared, the baseline's first: all of one extent, in the order of their seeds."""


def equivalence(differences: npt.ArrayLike, margin: float) -> Equivalence:
    """Student's t interval of the mean of paired differences of the loss, against a margin set beforehand.

    *Not worse*: the upper end of the 90 % interval is below the margin. *Worse*: the lower end is above 0 and the upper
    end is not below the margin. Otherwise *not enough data*, with the number of seeds that would do at this mean and
    spread. Fewer than five seeds give no verdict.
    """
    values = np.asarray(differences, dtype=float)
    n = len(values)
    if n == 0:
        return Equivalence(verdict=NOT_MEASURED)
    mean = float(values.mean())
    if n == 1:  # from which no margin can be known
        return Equivalence(verdict=NOT_ENOUGH, difference=mean, margin=margin, seeds=1, seeds_needed=LEAST_SEEDS)
    if not margin > 0:  # nor a number at all
        return Equivalence(verdict=NOT_ENOUGH, difference=mean, seeds=n, reason="the baseline leaves no margin")
    spread = float(values.std(ddof=1))
    half = _half(n, spread)
    found = Equivalence(verdict=NOT_ENOUGH, difference=mean, low=mean - half, high=mean + half, margin=margin, seeds=n)
    if n >= LEAST_SEEDS and found.high < margin:
        return dataclasses.replace(found, verdict=NOT_WORSE)
    if n >= LEAST_SEEDS and found.low > 0:
        return dataclasses.replace(found, verdict=WORSE)
    enough = (k for k in range(max(n + 1, LEAST_SEEDS), MOST_SEEDS + 1) if mean + _half(k, spread) < margin)
    return dataclasses.replace(found, seeds_needed=next(enough, None))


def _half(n: int, spread: float) -> float:
    return float(special.stdtrit(n - 1, (1 + LEVEL) / 2)) * spread / math.sqrt(n)


def margin_of(final: npt.ArrayLike, before: npt.ArrayLike) -> float:
    """The smaller of two standard deviations of the baseline's final losses over seeds, and its gain at the end.

    ``before`` are its losses 5 % of the images earlier. The standard deviation is the lower 95 % confidence bound of
    the one that n seeds show (chi-square): with the estimate itself a difference of two true ones would be called none
    in every third case. NaN for fewer than two seeds.
    """
    last, earlier = np.asarray(final, dtype=float), np.asarray(before, dtype=float)
    n = len(last)
    if n < 2:
        return math.nan
    spread = float(last.std(ddof=1)) * math.sqrt((n - 1) / float(special.chdtri(n - 1, 0.05)))
    return float(min(2 * spread, max(0.0, (earlier - last).mean())))


def compare(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord]) -> Equivalence:
    """The verdict on ``candidate``'s trials against ``baseline``'s, paired by seed.

    Only trials of one extent count: those with the most held-out draws that both have, of them the longest. Without
    held-out losses the final weights of equal seeds decide: identical or not. Where a baseline's loss stopped being
    finite there is no verdict.
    """
    for size in sorted({extent(r) for r in candidate}, reverse=True):
        ours, base = (
            {r.config.seed: r for r in side if extent(r) == size and r.status in ("ok", DIVERGED)}
            for side in (candidate, baseline)
        )
        seeds = sorted(ours.keys() & base.keys())
        if not seeds:
            continue
        if lost := [seed for seed in sorted(base) if base[seed].status == DIVERGED]:
            return Equivalence(
                verdict=NOT_ENOUGH, seeds=len(seeds), reason=f"the baseline diverged with seed {lost[0]}"
            )
        if lost := [seed for seed in seeds if ours[seed].status == DIVERGED]:
            return Equivalence(verdict=WORSE, seeds=len(seeds), reason=f"diverged with seed {lost[0]}")
        pairs = tuple((base[seed], ours[seed]) for seed in seeds)
        if all(_sha(a) == _sha(b) for a, b in pairs):
            steps = f"after {(pairs[0][0].quality or {})['steps']:,} steps"
            same = Equivalence(verdict=IDENTICAL, difference=0.0, low=0.0, high=0.0, seeds=len(seeds), reason=steps)
            return dataclasses.replace(same, pairs=pairs if final_loss(pairs[0][0]) is not None else ())
        if any(final_loss(r) is None for pair in pairs for r in pair):
            continue
        margin = margin_of([_loss_at(r, 1.0) for r in base.values()], [_loss_at(r, 0.95) for r in base.values()])
        found = equivalence([_loss_at(b, 1.0) - _loss_at(a, 1.0) for a, b in pairs], margin)
        first, last = (float(np.mean([_loss_at(a, share) for a, _ in pairs])) for share in (0.0, 1.0))
        if found.verdict == NOT_WORSE and last > HARDLY * first:
            reason = f"the baseline has hardly learned: loss {first:.3g} to {last:.3g}"
            found = dataclasses.replace(found, verdict=NOT_ENOUGH, reason=reason)
        return dataclasses.replace(found, pairs=pairs)
    return Equivalence(verdict=NOT_MEASURED)


def final_loss(record: RunRecord) -> float | None:
    """Held-out loss of a trial's averaged weights at its end; None where only its weights were looked at."""
    looks = (record.quality or {}).get("held_out") or []
    return float(looks[-1]["loss"]) if looks else None


def _loss_at(record: RunRecord, share: float) -> float:
    """Held-out loss after a share of the images, between two looks by a straight line."""
    images, losses = curve(record)
    return float(np.interp(share * images[-1], images, losses))


def curve(record: RunRecord) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Images of each look at a trial (n,), and the held-out losses (n,)."""
    looks = (record.quality or {})["held_out"]
    return np.array([h["images"] for h in looks], float), np.array([h["loss"] for h in looks], float)


def _sha(record: RunRecord) -> str:
    assert record.quality is not None
    return str(record.quality["weights_sha256"])


def extent(record: RunRecord) -> tuple[int, int]:
    """Draws of noise that a trial's held-out losses are of, and its images: losses of other draws are not compared."""
    return int(record.config.option("draws", 0)), int(record.config.option("images", 0))


def images_to_reach(record: RunRecord, target: float) -> float:
    """Images after which a trial's held-out loss was first at most ``target``, between two looks by a straight line.

    Infinite where it never was.
    """
    looks = (record.quality or {}).get("held_out") or []
    if looks and looks[0]["loss"] <= target:
        return float(looks[0]["images"])
    for a, b in pairwise(looks):
        if b["loss"] <= target:
            share = (a["loss"] - target) / (a["loss"] - b["loss"])
            return float(a["images"] + share * (b["images"] - a["images"]))
    return math.inf


def work_of(config: RunConfig, *, loosely: bool = False) -> str:
    """What tells trained configurations apart: everything but the purpose, the seed and where the images lie.

    ``loosely`` leaves out how images are loaded, which changes nothing, and how often the averaged weights are moved:
    trials are short and move them at every step.
    """
    same: dict[str, Any] = {"purpose": "timing", "seed": 0, "data": "", "oversubscribe": False}
    same["options"] = config.own_options
    if config.workload == TRAINING:
        same["workload"] = DDPM
    if loosely and config.loader != "still":  # which repeats one batch
        same |= {"loader": "packed", "loader_workers": 0}
        same["optimizer"] = dataclasses.replace(config.optimizer, ema_every=1)
    return dataclasses.replace(config, **same).run_id


class Trials:
    """The trials that speak for a study's configurations."""

    def __init__(self, records: Sequence[RunRecord]) -> None:
        self._exact: dict[str, list[RunRecord]] = {}
        self._by_work: dict[str, list[RunRecord]] = {}
        for r in records:
            self._exact.setdefault(work_of(r.config), []).append(r)
            if r.config.optimizer.ema_every == 1:  # one kind of averaging, on both sides of a pair
                self._by_work.setdefault(work_of(r.config, loosely=True), []).append(r)

    def verdict(self, baseline: RunConfig, candidate: RunConfig, code_version: str) -> Equivalence:
        """The verdict on a configuration, from trials of the very code that ``code_version`` names.

        Where the configurations themselves were not tried, trials count whose loader and averaging are others, on both
        sides alike: that a loader changes nothing is shown by trials of its own.
        """
        found = Equivalence(verdict=NOT_MEASURED)
        for loosely, known in ((False, self._exact), (True, self._by_work)):
            base, ours = work_of(baseline, loosely=loosely), work_of(candidate, loosely=loosely)
            if base == ours or (loosely and baseline.optimizer.ema_every != candidate.optimizer.ema_every):
                continue
            found = compare(*([r for r in known.get(key, ()) if speaks_for(r, code_version)] for key in (base, ours)))
            if found.verdict != NOT_MEASURED:
                return found
        return found


def speaks_for(record: RunRecord, code_version: str) -> bool:
    """Whether a trial was made with the very trainer that ``code_version`` holds, among whatever else."""
    found = record.quality or {}
    return code_version in (record.code_version, found.get("trainer"), *found.get("codes", ()))


def sentence(found: Equivalence) -> str:
    """A verdict in a few words, for tables: ``not worse (8 seeds)``."""
    if found.verdict == NOT_MEASURED:
        return NOT_MEASURED
    if found.reason:
        return f"{found.verdict} ({found.reason})"
    seeds = f"{found.seeds} seed{'s' if found.seeds != 1 else ''}"
    need = f", {found.seeds_needed} would do" if found.seeds_needed else ""
    return f"{found.verdict} ({seeds}{need})"


def full(found: Equivalence) -> str:
    """A verdict with what it rests on: ``not worse (8 seeds; loss +0.0001 (-0.0001 to +0.0003), margin 0.006)``."""
    said, rests_on = sentence(found), evidence(found)
    return f"{said.removesuffix(')')}; loss {rests_on})" if rests_on and not found.reason else said


def interval(found: Equivalence) -> str:
    """The difference of the loss with its 90 % interval; empty without an interval."""
    return "" if math.isnan(found.low) else f"{found.difference:+.2g} ({found.low:+.2g} to {found.high:+.2g})"


def evidence(found: Equivalence) -> str:
    """Difference, interval and margin of a verdict; empty without an interval or, as of the identical, a margin."""
    return "" if math.isnan(found.low + found.margin) else f"{interval(found)}, margin {found.margin:.2g}"
