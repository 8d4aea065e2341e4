"""What the configurations of a family have learned in their trials, and how long each takes to the same loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from ddpm_lab.explain import phrases, quality, stats
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import scaled
from ddpm_lab.record import RunRecord

TARGET_SHARE = 0.9
"""The target is the loss that the baseline has reached on average after this share of its images."""

Row = dict[str, Any]
Pairs = tuple[tuple[RunRecord, RunRecord], ...]
Array = npt.NDArray[np.float64]


def families(study: Study) -> list[list[Row]]:
    """Families of which trials exist: each its baseline's row, then those of its candidates."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in comparisons(study).to_dict("records"):
        if row["role"] in ("baseline", "candidate"):
            found.setdefault((row["family"], row["baseline_id"]), []).append({str(k): v for k, v in row.items()})
    return [rows for rows in found.values() if rows[0]["role"] == "baseline" and images_of(rows[1:])]


def pairs_of(row: Row, images: int) -> Pairs:
    """The trials behind a row's verdict, the baseline's first; none if they were trained on fewer ``images``."""
    pairs: Pairs = row["equivalence"].pairs if row["equivalence"] is not None else ()
    return pairs if pairs and pairs[0][0].config.option("images", 0) == images else ()


def images_of(rows: Sequence[Row]) -> int:
    """Images of the longest trials that any verdict rests on; 0 without any."""
    pairs = [r["equivalence"].pairs for r in rows if r["equivalence"] is not None and r["equivalence"].pairs]
    return max((int(p[0][0].config.option("images", 0)) for p in pairs), default=0)


def baseline_trials(rows: Sequence[Row]) -> list[RunRecord]:
    """The baseline's trials that the verdicts of ``rows`` rest on, in the order of their seeds."""
    images = images_of(rows)
    by_seed = {a.config.seed: a for r in rows for a, _ in pairs_of(r, images)}
    return [by_seed[seed] for seed in sorted(by_seed)]


def held_out(records: Sequence[RunRecord], at: Array) -> Array:
    """Held-out loss of each trial after so many images (trials, n), between its looks by straight lines."""
    return np.array([np.interp(at, *quality.curve(r)) for r in records])


def training(records: Sequence[RunRecord], images: int, points: int) -> Array:
    """Training loss of each trial (trials, points): the mean over as many equal shares of its first ``images``."""
    found = []
    for record in records:
        batch, losses = record.config.global_batch_size, np.array((record.quality or {})["losses"], float)
        share = ((np.arange(len(losses)) + 0.5) * batch * points / images).astype(int)
        inside = share < points
        counts = np.bincount(share[inside], minlength=points)
        found.append(np.bincount(share[inside], losses[inside], minlength=points) / counts)
    return np.array(found)


def target(rows: Sequence[Row]) -> float:
    """The held-out loss to be reached; NaN where the baseline has no trials."""
    records = baseline_trials(rows)
    return float(held_out(records, np.array([TARGET_SHARE * images_of(rows)])).mean()) if records else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How long a configuration trains until a held-out loss is reached: images of its trials over its speed.

    ``seconds`` is the mean over seeds with its 95 % interval, over seeds and over sets. ``times`` is how many times as
    long as the baseline it takes, paired by seed and by set, with its 95 % interval. NaN is unknown. ``lost`` of the
    ``seeds`` never got there: then ``times_low`` holds all the same, from the images that they were trained on. ``row``
    has the speed, and the verdict on these trials.
    """

    row: Row
    seeds: int
    lost: int
    seconds: float = math.nan
    low: float = math.nan
    high: float = math.nan
    times: float = math.nan
    times_low: float = math.nan
    times_high: float = math.nan

    @property
    def label(self) -> str:
        """The configuration's name."""
        return str(self.row["label"])

    @property
    def arrives(self) -> bool:
        """Whether every seed reached the loss, and the speed is known."""
        return not math.isnan(self.seconds)

    def words(self) -> str:
        """Such as "12 s (11 to 13 s)", "not reached (3 of 8 seeds)"; a dash where nothing is known."""
        if self.lost:
            return f"not reached ({self.lost} of {phrases.plural(self.seeds, 'seed')})"
        if not self.arrives:
            return phrases.DASH
        span = "" if math.isnan(self.low) else f" ({phrases.seconds(self.low)} to {phrases.seconds(self.high)})"
        return f"{phrases.seconds(self.seconds)}{span}"

    def compared(self) -> str:
        """Such as "1.22 times as long (1.18 to 1.26)"."""
        row = {"ratio": self.times, "low": self.times_low, "high": self.times_high}
        span = phrases.interval(row)
        return f"{phrases.ratio(row)} times as long" + (f" ({span})" if span else "")


def tried(study: Study, rows: Sequence[Row]) -> list[Row]:
    """The baseline's row and those of candidates with trials on as many images as any.

    A larger batch whose learning rate was tried scaled with it has a second row: its speed is the same.
    """
    lead, images = rows[0], images_of(rows[1:])
    trials = quality.Trials(study.trials)
    found = [lead]
    for row in rows[1:]:
        if pairs_of(row, images):
            found.append(row)
        if row["config"].global_batch_size > lead["config"].global_batch_size:
            other = trials.verdict(lead["config"], scaled(row["config"], lead["config"]), row["code_version"])
            if pairs := pairs_of(again := {**row, "equivalence": other}, images):
                found.append({**again, "label": pairs[0][1].label})
    return found


def ways(study: Study, rows: Sequence[Row]) -> list[Way]:
    """The ways of a family's configurations to its target, the baseline's first."""
    loss, images = target(rows[1:]), images_of(rows[1:])
    lead, *others = tried(study, rows)
    own = tuple((r, r) for r in baseline_trials(rows[1:]))
    return [way(lead, own, loss), *(way(row, pairs_of(row, images), loss) for row in others)]


def way(row: Row, pairs: Pairs, loss: float) -> Way:
    """The way of a configuration with trials ``pairs``, the baseline's first, to a held-out ``loss``."""
    base, ours = (np.array([quality.images_to_reach(pair[side], loss) for pair in pairs]) for side in (0, 1))
    lost = np.isinf(ours)
    found: dict[str, Any] = {"row": row, "seeds": len(pairs), "lost": int(lost.sum())}
    if not len(pairs) or not row["sets"]:
        return Way(**found)
    if row["role"] == "baseline":
        found["times"] = 1.0
    elif np.isfinite(base).all() and not math.isnan(row["ratio"]):
        # Who did not arrive needs at least what it was trained on: a bound from below.
        least = np.where(lost, [quality.curve(b)[0][-1] for _, b in pairs], ours)
        mean, half = _mean(np.log(least / base))
        times = math.exp(mean) / row["ratio"]
        # Both parts are independent, so that the halves of their intervals add up as squares do.
        up, down = math.log(row["high"] / row["ratio"]), math.log(row["ratio"] / row["low"])
        found["times_low"] = times / math.exp(math.hypot(half, up))
        if not lost.any():
            found |= {"times": times, "times_high": times * math.exp(math.hypot(half, down))}
    if lost.any():
        return Way(**found)
    rate = (row["images_per_second"], row["images_per_second_low"], row["images_per_second_high"])
    mean, half = _mean(ours)
    found["seconds"] = mean / rate[0]
    if not math.isnan(half + rate[1]):
        found["low"], found["high"] = stats.quotient_interval((mean, mean - half, mean + half), rate)
    return Way(**found)


def _mean(values: Array) -> tuple[float, float]:
    """Mean, and half of its 95 % interval by Student's t; NaN for one value."""
    n = len(values)
    if n < 2:
        return float(values.mean()), math.nan
    return float(values.mean()), float(special.stdtrit(n - 1, (1 + stats.LEVEL) / 2) * values.std(ddof=1) / n**0.5)


def fastest(found: Sequence[Way], loss: float) -> str:
    """Who gets to a loss in the least time, such as "fastest to loss 0.4600: batch 8"; empty where nobody does."""
    arrived = [w for w in found if w.arrives]
    if not arrived or arrived[0] is not found[0]:
        return ""
    lead, best, to = found[0], min(arrived, key=lambda w: w.seconds), f"loss {loss:.4f}"
    most = 1.0 if best is lead else best.times_high
    if any(w.lost and not w.times_low > most for w in found):  # with more images it might have been first
        to += " of those that reached it"
    if best is not lead:
        return f"fastest to {to}: {best.label}" if most < 1 else f"which is fastest to {to} is not resolved"
    if all(w.times_low > 1 for w in arrived[1:]):
        return f"fastest to {to}: {lead.label}"
    return f"none is shown to be faster to {to} than {lead.label}"


def _fastest_per_image(found: Sequence[Way]) -> str:
    others = [w.row for w in found[1:]]
    if faster := [r for r in others if r["verdict"] == stats.FASTER]:
        return f"fastest per image: {max(faster, key=lambda r: r['ratio'])['label']}"
    if all(r["verdict"] == stats.SLOWER for r in others):
        return f"fastest per image: {found[0].label}"
    return "which is fastest per image is not resolved"


def answer(found: Sequence[Way], loss: float) -> str:
    """Who is fastest per image and to a loss, and how long each takes; empty where the baseline's time is unknown."""
    if not found or not found[0].arrives:
        return ""
    both = f"{_fastest_per_image(found)}; {fastest(found, loss)}"
    told = [f"{found[0].label} takes {found[0].words()}"]
    for one in found[1:]:
        if one.lost:
            told.append(f"{one.label} did not reach it with {one.lost} of {phrases.plural(one.seeds, 'seed')}")
        elif one.arrives:
            beside = "" if math.isnan(one.times) else f", {one.compared()}"
            told.append(f"{one.label} takes {one.words()}{beside}")
    where = f"where {found[0].label} is after {100 * TARGET_SHARE:.0f} % of its images"
    text = f"To the held-out loss of {loss:.4f}, {where}: {'; '.join(told)} (95 % intervals over seeds and sets)."
    return f"{both[0].upper()}{both[1:]}. {text}"
