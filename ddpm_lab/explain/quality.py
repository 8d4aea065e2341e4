"""Does a configuration learn as well as its baseline? Equivalence of held-out losses, paired by seed.

Both sides of a pair begin with the same weights and see the same images, timesteps and noise in the same order, so that
what a seed is worth to both drops out of the difference.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ddpm_lab.config import DDPM, SAME_WEIGHTS, TRAINING, TRIAL_OPTIONS, DiffusionConfig, RunConfig, digest
from ddpm_lab.explain.stats import t_quantile
from ddpm_lab.record import RunRecord

Array = npt.NDArray[np.float64]

IDENTICAL = "identical"
NOT_WORSE = "not worse"
SLIGHTLY = "worse by less than the margin"
WORSE = "worse"
NOT_ENOUGH = "not enough data"
NOT_MEASURED = "not measured"
DIVERGED = "diverged"
GOOD = (IDENTICAL, NOT_WORSE, SLIGHTLY)
"""Verdicts with which a configuration loses less than the margin, if anything."""
DECIDED = (*GOOD, WORSE)

EQUIVALENCE_LEVEL = 0.90
"""Of the interval: its upper end beyond the margin is the one-sided test of equivalence at 5 %."""
LEAST_SEEDS = 5
"""With fewer seeds the difference is shown and no verdict is given: their spread, and so the margin, is not known."""
MOST_SEEDS = 1000
SHOWS_HARM = {"tiny": 0.38, "seed": 0.2}
"""The held-out loss that a baseline must reach before its trials show harm, by network, at 32x32 and the usual loss.

``tiny``: half-way in the logarithm from 0.798, untrained, to 0.183 after 500,000 CIFAR-10 images in batches of 8.
``seed``: 0.152 after 164,000 in batches of 16; planted harm shows at 0.2, which takes 3,000 in batches of 8
(``docs/measured/quality-tiny.json``, ``quality-seed.json``).
"""
NO_LOSS_KNOWN = "no loss is known at which harm shows with this network, image size and objective"
HARDLY = 0.98
"""Other baselines with more than this share of their untrained loss left have learned too little for anything to cost.

With less left the lab's own still show no more than that something is worse; a training of the user's has a verdict.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equivalence:
    """The verdict on a configuration's held-out loss, and what it rests on.

    ``difference`` is the configuration's loss less the baseline's, mean over seeds, with its 90 % interval ``low`` to
    ``high``; ``margin`` is the largest difference that counts as none. ``behind`` and ``margin_behind`` say the same in
    time: how much earlier the baseline had such a loss, as a share of the ``images`` of the trials. ``seeds_needed`` is
    None where no number of them would show that the configuration is not worse, or where it is shown. ``published`` is
    the day of trials that came with the checkout, empty for those of this machine.
    """

    verdict: str
    difference: float = math.nan
    low: float = math.nan
    high: float = math.nan
    margin: float = math.nan
    behind: float = math.nan
    margin_behind: float = math.nan
    images: int = 0
    seeds: int = 0
    seeds_needed: int | None = None
    reason: str = ""
    published: str = ""
    pairs: tuple[tuple[RunRecord, RunRecord], ...] = ()
    """The trials that were compared, the baseline's first: all of one extent, in the order of their seeds.

    None of published ones, which are no part of what was measured here.
    """


_UNKNOWN = Equivalence(verdict=NOT_MEASURED)
_SAME = Equivalence(verdict=IDENTICAL, difference=0.0, low=0.0, high=0.0)


def equivalence(differences: npt.ArrayLike, margin: float) -> Equivalence:
    """Student's t interval of the mean of paired differences of the loss, against a margin set beforehand.

    *Not worse*: the upper end of the 90 % interval is below the margin, and the lower end is not above 0; *worse by
    less than the margin*: it is. *Worse*: the lower end is above 0 and the upper end is not below the margin. Otherwise
    *not enough data*, with the number of seeds that would do at this mean and spread. Fewer than five seeds give no
    verdict.
    """
    values = np.asarray(differences, dtype=float)
    n = len(values)
    mean = float(values.mean())
    if n == 1:  # from which no margin can be known
        return Equivalence(verdict=NOT_ENOUGH, difference=mean, margin=margin, seeds=1, seeds_needed=LEAST_SEEDS)
    if not margin > 0:  # nor a number at all
        return Equivalence(verdict=NOT_ENOUGH, difference=mean, seeds=n, reason="the baseline leaves no margin")
    spread = float(values.std(ddof=1))
    half = _half(n, spread)
    found = Equivalence(verdict=NOT_ENOUGH, difference=mean, low=mean - half, high=mean + half, margin=margin, seeds=n)
    if n >= LEAST_SEEDS and found.high < margin:
        return replace(found, verdict=SLIGHTLY if found.low > 0 else NOT_WORSE)
    if n >= LEAST_SEEDS and found.low > 0:
        return replace(found, verdict=WORSE)
    enough = (k for k in range(max(n + 1, LEAST_SEEDS), MOST_SEEDS + 1) if mean + _half(k, spread) < margin)
    return replace(found, seeds_needed=next(enough, None))


def _half(n: int, spread: float) -> float:
    return t_quantile(n - 1, (1 + EQUIVALENCE_LEVEL) / 2) * spread / math.sqrt(n)


def margin_of(final: npt.ArrayLike, before: npt.ArrayLike) -> float:
    """The smaller of two standard deviations of the baseline's final losses over seeds, and its gain at the end.

    ``before`` are its losses 5 % of the images earlier. Both are lower 95 % confidence bounds of what n seeds show
    (chi-square, Student's t): with the estimates themselves a true difference as large as the margin would be called
    none in a tenth to two fifths of the cases. NaN for fewer than two seeds.
    """
    gains = np.asarray(before, dtype=float) - np.asarray(final, dtype=float)
    if (n := len(gains)) < 2:
        return math.nan
    return float(min(_spread_margin(final), max(0.0, gains.mean() - _half(n, float(gains.std(ddof=1))))))


def _spread_margin(final: npt.ArrayLike) -> float:
    from scipy import special

    last = np.asarray(final, dtype=float)
    return 2 * float(last.std(ddof=1)) * math.sqrt((len(last) - 1) / float(special.chdtri(len(last) - 1, 0.05)))


def compare(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord]) -> Equivalence:
    """Return the verdict on the candidate's quality, from trials that are paired with the baseline's by seed.

    Only trials of one extent are used: the one with the most held-out draws on both sides, and among these the longest
    that gives a verdict, so that starting longer trials does not withdraw a verdict. Without held-out losses, equal
    final weights give the verdict "identical", and anything else gives none. There is no verdict either if a baseline
    diverged or has not trained enough to show harm. If the loss that shows harm is unknown, only "worse" is possible.
    """
    found, undecided = _UNKNOWN, None
    for size in sorted({extent(r) for r in candidate}, reverse=True):
        ours, base = (
            {r.config.seed: r for r in side if extent(r) == size and r.status in ("ok", DIVERGED)}
            for side in (candidate, baseline)
        )
        seeds = sorted(ours.keys() & base.keys())
        if not seeds:
            continue
        if lost := [seed for seed in sorted(base) if base[seed].status == DIVERGED]:
            reason = f"the baseline diverged with seed {lost[0]}"
            return Equivalence(verdict=NOT_ENOUGH, seeds=len(seeds), reason=reason)
        if lost := [seed for seed in seeds if ours[seed].status == DIVERGED]:
            return Equivalence(verdict=WORSE, seeds=len(seeds), reason=f"diverged with seed {lost[0]}")
        pairs = tuple((base[seed], ours[seed]) for seed in seeds)
        steps = f"after {(pairs[0][0].quality or {})['steps']:,} steps"
        if all(len({(r.quality or {})["weights_sha256"] for r in pair}) == 1 for pair in pairs):
            shown = pairs if final_loss(pairs[0][0]) is not None else ()
            return replace(_SAME, seeds=len(seeds), reason=steps, images=size[1], pairs=shown)
        if any(final_loss(r) is None for pair in pairs for r in pair):
            found = Equivalence(
                verdict=NOT_ENOUGH,
                seeds=len(seeds),
                reason=f"other weights {steps}, and held-out losses were not compared",
            )
            continue
        known = [r for r in base.values() if final_loss(r) is not None]  # including trials without a partner
        final = _losses_at(known, 1.0)
        margin = margin_of(final, _losses_at(known, 0.95))
        first, second = ([pair[side] for pair in pairs] for side in (0, 1))
        differences = _losses_at(second, 1.0) - _losses_at(first, 1.0)
        found = equivalence(differences, margin)
        # If the baseline no longer improves, the margin is 0, but a difference beyond its seeds' spread is still worse.
        if margin == 0 and (beside_seeds := equivalence(differences, _spread_margin(final))).verdict == WORSE:
            found = beside_seeds
        config, reason = first[0].config, _too_short(first)
        if not reason and found.verdict in GOOD and not (config.is_own or shows_harm(config)):
            reason = NO_LOSS_KNOWN
        if reason:
            found = replace(found, verdict=NOT_ENOUGH, seeds_needed=None, reason=reason)
        behind, margin_behind = (_behind(pairs, loss) for loss in (found.difference, found.margin))
        found = replace(found, pairs=pairs, images=size[1], behind=behind, margin_behind=margin_behind)
        if found.verdict in DECIDED:
            return found
        undecided = undecided or found
    return undecided or found


def _too_short(base: Sequence[RunRecord]) -> str:
    """Why a baseline's trials end before they would show harm; empty where they do not."""
    first, last = (float(_losses_at(base, share).mean()) for share in (0.0, 1.0))
    if needed := shows_harm(base[0].config):
        return f"the trial ends before the loss {needed:g} that shows harm" if last > needed else ""
    return f"the baseline has hardly learned: loss {first:.3g} to {last:.3g}" if last > HARDLY * first else ""


def shows_harm(config: RunConfig) -> float:
    """The held-out loss at which a configuration's trials show harm; 0 where none is known."""
    usual = not config.is_own and config.image_size == 32 and config.diffusion == DiffusionConfig()
    return SHOWS_HARM.get(config.network, 0.0) if usual else 0.0


def _behind(pairs: Sequence[tuple[RunRecord, RunRecord]], loss: float) -> float:
    """How much earlier the baseline, on average, had its final loss and so much more, as a share of the images.

    Below 0 for a loss that is less: so much earlier the other one had the baseline's.
    """
    side = [pair[loss < 0] for pair in pairs]
    images, _ = curve(side[0]) if side else ((0,), ())
    if math.isnan(loss) or not images[-1]:
        return math.nan
    losses = np.mean([np.interp(images, *curve(r)) for r in side], axis=0)
    above = np.flatnonzero(losses >= losses[-1] + abs(loss))
    if not len(above):
        return math.copysign(1.0, loss)
    i = int(above[-1])
    near = slice(i, i + 2)
    had = float(np.interp(-losses[-1] - abs(loss), -losses[near], images[near]))
    return math.copysign(1 - had / float(images[-1]), loss)


def final_loss(record: RunRecord) -> float | None:
    """Held-out loss of a trial's averaged weights at its end; None where only its weights were looked at."""
    looks = (record.quality or {}).get("held_out") or []
    return float(looks[-1]["loss"]) if looks else None


def _losses_at(records: Iterable[RunRecord], share: float) -> Array:
    """Held-out loss of each trial after a share of its images, between two looks by a straight line."""
    curves = map(curve, records)
    return np.array([np.interp(share * images[-1], images, losses) for images, losses in curves])


def curve(record: RunRecord) -> tuple[Array, Array]:
    """Images of each look at a trial (n,), and the held-out losses (n,)."""
    looks = (record.quality or {})["held_out"]
    return np.array([h["images"] for h in looks], float), np.array([h["loss"] for h in looks], float)


def extent(record: RunRecord) -> tuple[int, int]:
    """Draws of noise that a trial's held-out losses are of, and its images: losses of other draws are not compared."""
    return int(record.config.option("draws", 0)), int(record.config.option("images", 0))


def work_of(config: RunConfig, *, loosely: bool = False, anywhere: bool = False) -> str:
    """What tells trained configurations apart: everything but the purpose, the seed and where the images lie.

    ``loosely`` leaves out what does not change what is learned: SAME_WEIGHTS, and the threads, which change roundings
    alone; ``anywhere`` the images besides. What agrees then is network, image size, kind of device, number format,
    kernels, memory format, compiling, ranks and their exchange, batch and micro-batches, optimizer with the average of
    the weights, diffusion, and the revision if one is named.
    """
    left_out = {"purpose", "seed", "data", "oversubscribe"}
    if (loosely or anywhere) and config.loader != "still":  # which repeats one batch
        left_out |= {*SAME_WEIGHTS, "threads"}
    if anywhere:
        left_out.add("data_sha256")
    workload = DDPM if config.workload == TRAINING else config.workload
    options = {name: value for name, value in config.options if name not in TRIAL_OPTIONS}
    values = {**config.chosen, "options": options, "workload": workload}
    return digest({name: value for name, value in values.items() if name not in left_out})


class Trials:
    """The trials that speak for a study's configurations: those of its machine, on any images, and published ones.

    Quality belongs to the mathematics and not to the machine: a verdict on real images serves where ``work_of`` agrees
    ``anywhere``, whatever the images, the machine and the version of the code. One's own come before published ones,
    and those on the very images first.
    """

    def __init__(self, records: Sequence[RunRecord], published: Sequence[RunRecord] = ()) -> None:
        self._exact: dict[str, list[RunRecord]] = {}
        self._by_work: dict[str, list[RunRecord]] = {}
        for r in records:
            self._exact.setdefault(work_of(r.config), []).append(r)
            self._by_work.setdefault(work_of(r.config, loosely=True), []).append(r)
        self._own, self._published = _on_real_images(records), _on_real_images(published)

    def verdict(self, baseline: RunConfig, candidate: RunConfig, code_version: str) -> Equivalence:
        """The verdict on a configuration, from trials of the very code that ``code_version`` names, or published ones.

        Where the configurations themselves were not tried, trials count that differ from them, on both sides, in what
        does not change what is learned; what differs in that alone, and in no trial, is identical. A published verdict
        counts where this machine's trials give none.
        """
        found = _UNKNOWN
        for loosely, known in ((False, self._exact), (True, self._by_work)):
            base, ours = work_of(baseline, loosely=loosely), work_of(candidate, loosely=loosely)
            if base != ours and found.verdict not in DECIDED:
                sides = ([r for r in known.get(key, ()) if speaks_for(r, code_version)] for key in (base, ours))
                judged = compare(*sides)
                found = found if judged.verdict == NOT_MEASURED else judged
        if base == ours:
            alike = (baseline.workload, baseline.threads) == (DDPM, candidate.threads)
            return replace(_SAME, reason="the same arithmetic") if alike and found.verdict == NOT_MEASURED else found
        if found.verdict in DECIDED:
            return found
        own = [{k: g for k, g in self._own.items() if (k[2] == baseline.data_sha256) is same} for same in (True, False)]
        # What is called by one name, and was judged in other code, may be another training of the user's.
        mine = [replace(_elsewhere(each, baseline, candidate), published="") for each in own[baseline.is_own :]]
        for elsewhere in (*mine, _elsewhere(self._published, baseline, candidate)):
            if found.verdict not in DECIDED and (elsewhere.verdict in DECIDED or found.verdict == NOT_MEASURED):
                found = elsewhere
        return found


_Groups = Mapping[tuple[str, str, str], Mapping[str, Sequence[RunRecord]]]


def _on_real_images(trials: Iterable[RunRecord]) -> _Groups:
    """Trials by what was trained, in a group for each machine, code and images: only such are compared."""
    groups: dict[tuple[str, str, str], dict[str, list[RunRecord]]] = {}
    for r in trials:
        if final_loss(r) is not None and "synthetic" not in r.data_name:
            known = groups.setdefault(r.cohort[:3], {})
            known.setdefault(work_of(r.config, anywhere=True), []).append(r)
    return groups


def _elsewhere(groups: _Groups, baseline: RunConfig, candidate: RunConfig) -> Equivalence:
    """The verdict of trials on other images: a decided one, of these the longest, of equals the latest."""
    base, ours = work_of(baseline, anywhere=True), work_of(candidate, anywhere=True)
    found = []
    for known in groups.values():
        judged = compare(known.get(base, ()), known.get(ours, ()))
        if judged.verdict != NOT_MEASURED:
            found.append(replace(judged, published=max(r.date[:10] for r in known[ours]), pairs=()))
    return max(found, key=lambda f: (f.verdict in DECIDED, f.images, f.published), default=_UNKNOWN)


def speaks_for(record: RunRecord, code_version: str) -> bool:
    """Whether a trial was made with the very trainer that ``code_version`` holds, among whatever else."""
    found = record.quality or {}
    return code_version in (record.code_version, found.get("trainer"), *found.get("codes", ()))


def sentence(found: Equivalence, *, basis: bool = False) -> str:
    """A verdict in a few words: ``not worse after 20,000 images (8 seeds; published 2026-11-22)``.

    With its ``basis`` it has difference, interval and margin too.
    """
    if found.verdict == NOT_MEASURED:
        return NOT_MEASURED
    seeds = f"{found.seeds} seed{'s' * (found.seeds != 1)}"
    need = f", {found.seeds_needed} would do" if found.seeds_needed else ""
    details = [found.reason or f"{seeds}{need}", *([f"published {found.published}"] if found.published else [])]
    if basis and not found.reason and not math.isnan(found.low + found.margin):
        details += [f"loss {difference(found)}", f"margin {margin_words(found)}"]
    return f"{found.verdict}{'' if found.reason else after(found)} ({'; '.join(details)})"


def after(found: Equivalence) -> str:
    """After how many images a verdict holds, after a space: `` after 20,000 images``; empty where no trial says."""
    return f" after {found.images:,} images" if found.images else ""


def difference(found: Equivalence) -> str:
    """The difference of the loss with its 90 % interval, and what it is in images; empty without an interval.

    Such as ``+0.0009 (+0.0004 to +0.0014), 0.5 % of the images behind``.
    """
    if math.isnan(found.low):
        return ""
    side = "behind" if found.behind >= 0 else "ahead"
    late = "" if math.isnan(found.behind) else f", {_percent(found.behind)} of the images {side}"
    return f"{found.difference:+.2g} ({found.low:+.2g} to {found.high:+.2g}){late}"


def margin_words(found: Equivalence) -> str:
    """The margin of a verdict, and what it is in images: ``0.0066, 3.6 % of the images``."""
    share = "" if math.isnan(found.margin_behind) else f", {_percent(found.margin_behind)} of the images"
    return f"{found.margin:.2g}{share}"


def _percent(share: float) -> str:
    return "under 0.1 %" if 0 < abs(share) < 0.001 else f"{float(f'{100 * abs(share):.2g}'):g} %"
