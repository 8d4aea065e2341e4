"""What the configurations of a family have learned in their trials, and how long each takes to the same loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpm_lab.explain import phrases, quality, stats
from ddpm_lab.explain.comparisons import Row, comparisons, throughput
from ddpm_lab.explain.comparisons import families as by_family
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import scaled
from ddpm_lab.record import RunRecord

TARGET_SHARE = 0.9
"""The target is the loss that the baseline has reached on average after this share of its images."""

Pairs = tuple[tuple[RunRecord, RunRecord], ...]
Array = npt.NDArray[np.float64]


def families(study: Study) -> list[list[Row]]:
    """Families of which trials exist: each its baseline's row, then those of its candidates."""
    found = by_family(r for r in comparisons(study) if r["role"] in ("baseline", "candidate"))
    return [rows for rows in found if rows[0]["role"] == "baseline" and images_of(rows[1:])]


def pairs_of(row: Row, extent: tuple[int, int]) -> Pairs:
    """The trials behind a row's verdict, the baseline's first; none if they are of another ``extent``."""
    pairs: Pairs = row["equivalence"].pairs if row["equivalence"] is not None else ()
    return pairs if pairs and quality.extent(pairs[0][0]) == extent else ()


def extent_of(rows: Sequence[Row]) -> tuple[int, int]:
    """The largest ``quality.extent`` of trials that any verdict rests on; zeros without any."""
    pairs = [r["equivalence"].pairs for r in rows if r["equivalence"] is not None and r["equivalence"].pairs]
    return max((quality.extent(p[0][0]) for p in pairs), default=(0, 0))


def images_of(rows: Sequence[Row]) -> int:
    """Images of those trials; 0 without any."""
    return extent_of(rows)[1]


def baseline_trials(rows: Sequence[Row]) -> list[RunRecord]:
    """The baseline's trials that the verdicts of ``rows`` rest on, in the order of their seeds."""
    extent = extent_of(rows)
    by_seed = {a.config.seed: a for r in rows for a, _ in pairs_of(r, extent)}
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

    @property
    def bounds(self) -> tuple[float, float]:
        """The ends of ``times``, wider by what windows that a median leaves out may add; 1 for the baseline."""
        if self.row["role"] == "baseline":
            return 1.0, 1.0
        bursts = self.row["bursts"]
        return self.times_low * min(1.0, bursts), self.times_high * max(1.0, bursts)

    @property
    def doubt(self) -> str:
        """Why nobody can be called faster or slower by it, such as "3 seeds"; empty where its interval decides."""
        few = phrases.plural(self.seeds, "seed") if self.seeds < quality.LEAST_SEEDS else ""
        return _doubt(self.row) or (few and f"{few} with {self.label}")

    def words(self) -> str:
        """Such as "12 s (11 to 13 s)", "not reached (3 of 8 seeds)"; a dash where nothing is known."""
        if self.lost:
            return f"not reached ({self.lost} of {phrases.plural(self.seeds, 'seed')})"
        if not self.arrives:
            return phrases.DASH
        return phrases.with_interval(phrases.seconds, self.seconds, self.low, self.high)

    def compared(self) -> str:
        """Such as "1.22 times as long (1.18 to 1.26)"."""
        return phrases.times(self.times, self.times_low, self.times_high, what=" times as long")


def tried(study: Study, rows: Sequence[Row]) -> list[Row]:
    """The baseline's row and those of candidates with trials of the same extent.

    A larger batch whose learning rate was tried scaled with it has a second row: its speed is the same.
    """
    lead, extent = rows[0], extent_of(rows[1:])
    trials = quality.Trials(study.trials)
    found = [lead]
    for row in rows[1:]:
        if pairs_of(row, extent):
            found.append(row)
        if row["config"].global_batch_size > lead["config"].global_batch_size:
            other = trials.verdict(lead["config"], scaled(row["config"], lead["config"]), row["code_version"])
            if pairs := pairs_of(again := {**row, "equivalence": other}, extent):
                found.append({**again, "label": pairs[0][1].label})
    return found


def ways(study: Study, rows: Sequence[Row]) -> list[Way]:
    """The ways of a family's configurations to its target, the baseline's first."""
    loss, extent = target(rows[1:]), extent_of(rows[1:])
    lead, *others = tried(study, rows)
    own = tuple((r, r) for r in baseline_trials(rows[1:]))
    return [way(lead, own, loss), *(way(row, pairs_of(row, extent), loss) for row in others)]


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
        mean, half = stats.mean_and_half(np.log(least / base))
        times = math.exp(mean) / row["ratio"]
        # Both parts are independent, so that the halves of their intervals add up as squares do.
        up, down = math.log(row["high"] / row["ratio"]), math.log(row["ratio"] / row["low"])
        found["times_low"] = times / math.exp(math.hypot(half, up))
        if not lost.any():
            found |= {"times": times, "times_high": times * math.exp(math.hypot(half, down))}
    if lost.any():
        return Way(**found)
    rate = throughput(row)
    mean, half = stats.mean_and_half(ours)
    found["seconds"] = mean / rate[0]
    if not math.isnan(half + rate[1]):
        found["low"], found["high"] = stats.quotient_interval((mean, mean - half, mean + half), rate)
    return Way(**found)


def fastest(found: Sequence[Way], loss: float) -> str:
    """Who gets to a loss in the least time, such as "fastest to loss 0.4600: batch 8"; empty where nobody does.

    Somebody is named only if the whole interval of its time lies below that of every other, and if nothing withholds a
    verdict: an instrument that is not trusted, too few sets or seeds, bursts.
    """
    arrived = [w for w in found if w.arrives]
    if not arrived or arrived[0] is not found[0]:
        return ""
    best, to = min(arrived, key=lambda w: w.times), f"loss {loss:.4f}"
    beside = [w for w in found if w is not best and (best.doubt or w.doubt or not best.bounds[1] < w.bounds[0])]
    if any(w.lost for w in beside):  # with more images it might have been first
        to += " of those that reached it"
    rivals = [w for w in beside if w.arrives]
    untrusted = next((w.doubt for w in found if w.row["verdict"] == stats.NOT_TRUSTED), "")
    doubt = untrusted or next((w.doubt for w in (best, *rivals) if w.doubt), "")
    if not rivals and not doubt:
        return f"fastest to {to}: {best.label}"
    return f"which is fastest to {to} is not resolved{_between([w.label for w in (best, *rivals)], doubt)}"


def _doubt(row: Row) -> str:
    """Why a speed has no verdict, whatever its interval; empty where that decides."""
    if row["verdict"] == stats.NOT_TRUSTED:
        return stats.NOT_TRUSTED
    if row["verdict"] == stats.BURSTS:
        return f"bursts with {row['label']}"
    return f"{phrases.plural(int(row['sets']), 'set')} with {row['label']}" if row["sets"] < stats.LEAST_SETS else ""


def _between(labels: Sequence[str], doubt: str) -> str:
    pair = f" between {phrases.joined(labels)}" if len(labels) > 1 else ""
    return pair + (f" ({doubt})" if doubt else "")


def _fastest_per_image(found: Sequence[Way]) -> str:
    # A scaled learning rate changes no speed: it has the row of its batch.
    others = list({w.row["run_id"]: w.row for w in reversed(found[1:]) if w.row["sets"]}.values())
    if faster := [r for r in others if r["verdict"] == stats.FASTER]:
        best = max(faster, key=lambda r: r["ratio"])
        least = best["low"] / max(1.0, best["bursts"])
        rivals = [r for r in others if r is not best and (_doubt(r) or not r["high"] / min(1.0, r["bursts"]) < least)]
        if not rivals:
            return f"fastest per image: {best['label']}"
        doubt = next((_doubt(r) for r in rivals if _doubt(r)), "")
        labels = [r["label"] for r in (best, *rivals)]
        return f"which is fastest per image is not resolved{_between(labels, doubt)}"
    if others and all(r["verdict"] == stats.SLOWER for r in others):
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
    return f"{phrases.begun(both)}. {text}"
