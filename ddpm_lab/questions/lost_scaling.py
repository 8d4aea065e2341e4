"""Where the lost scaling went: the step of all ranks beside the ideal, split into losses that were each switched off.

For equal images n ranks should take 1/n of one rank's time, T(1) / n. What they take longer, L = T(n) - T(1) / n, is
the sum of: what exchange and loading each cost (the step with it less the step without it, beyond that share of
T(1) / n which one rank pays too); what is left with both off, which is the smaller batch of a rank, its fewer threads,
the others beside it, and the straggler; and the interaction, which is what switching off both at once gains more or
less than switching off each. A step of the lab's trainer has no work that rank 0 alone does: what rank 0 does alone, a
checkpoint or a grid of images, lies between steps.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ddpm_lab import plan
from ddpm_lab.config import ExchangeConfig
from ddpm_lab.explain import phrases, stats
from ddpm_lab.explain.comparisons import MECHANISM_ONLY
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.table import Table, without_constant
from ddpm_lab.plan import Family
from ddpm_lab.record import RunRecord, crowded, seconds_by_turn, set_log_ratio
from ddpm_lab.training.setting import Setup

UNRELIABLE = 1 / 3  # share of the loss above which an interaction makes the split unreliable
STRAGGLER = "slowest rank"
INTERACTION, LOSS, IDEAL, MEASURED = "interaction", "loss", "ideal", "measured"
_WAIT = "seconds that the other ranks wait for the slowest"

Times = Mapping[str, float]
"""Seconds of a step of each configuration of a set, by its label; or the factor that each is counted with."""
Terms = list[tuple[str, str, Times]]  # names, how each is measured, and the seconds that it counts


def lost_scaling(
    setup: Setup, ranks: Sequence[int], batches: Sequence[int], settings: Mapping[str, Any]
) -> Family | None:
    """Configurations of strong scaling for the most of ``ranks`` that can share a batch, the smallest; None without.

    With all ranks: as they train, without exchange of gradients, with batches that are ready, and with all of these
    off. With one rank: as it trains, with ready batches, with the batch of a rank, and on a CPU with its threads too.
    The baseline is one rank with all of it off: what it does, the others do too.
    """
    # Ranks that share a core show no speed, and so no loss: they are split only where nothing else was asked for.
    shared = [(n <= setup.most_ranks, n, -batch) for n in ranks for batch in batches if batch % n == 0]
    if not shared:
        return None
    _, most, negative = max(shared)
    one, many = (setup.config(global_batch_size=-negative, world_size=n, **settings) for n in (1, most))
    still: dict[str, Any] = {"loader": "still", "loader_workers": 0}
    apart, base = replace(many, exchange=ExchangeConfig(enabled=False)), replace(one, **still)
    small = replace(base, global_batch_size=many.rank_batch_size)
    rows = {
        setup.ranks_label(most): many,
        plan.NO_EXCHANGE: apart,
        plan.ALL_OFF: replace(apart, **still),
        plan.READY_BATCHES: replace(many, **still),
        plan.ONE_RANK: one,
        plan.ONE_SMALL: small,
    }
    if one.device == "cpu":
        rows[plan.ONE_SMALL_THREADS] = replace(small, threads=many.rank_threads(setup.usable_cores))
    format_ = f", {one.precision}" * (one.precision != setup.plain_precision)
    name, candidates = f"{setup.family_name(-negative, most)}{format_}{plan.LOST}", tuple(rows.items())
    return Family(name=name, baseline=base, baseline_label=plan.ONE_OFF, candidates=candidates, together=True)


# --- the split --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(stats.Interval):
    """A part of the loss, or a time that it is computed from: mean seconds of a step over ``sets``, NaN if unknown."""

    name: str
    how: str
    sets: int = 0
    note: str = ""

    @property
    def resolved(self) -> bool:
        """True if the interval of enough sets leaves 0 out; a straggler must also be identified."""
        named = self.name != STRAGGLER or bool(self.note)
        return named and self.sets >= stats.LEAST_SETS and (self.low > 0 or self.high < 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The lost scaling of one piece of work: the ``parts`` of the loss, and ``every`` row of the table by its name.

    ``doubt`` says why no loss is claimed, whatever the numbers; it is empty where one may be.
    """

    family: str
    parts: tuple[Part, ...]
    every: Mapping[str, Part]
    doubt: str

    def __getitem__(self, name: str) -> Part:
        return self.every[name]

    @property
    def reliable(self) -> bool:
        """Whether the interaction is at most a third of the loss."""
        return not abs(self[INTERACTION].value) > UNRELIABLE * abs(self[LOSS].value)

    @property
    def claimed(self) -> bool:
        return not self.doubt and self[LOSS].low > 0

    @property
    def largest(self) -> list[Part]:
        """The parts that are losses, the largest first."""
        return sorted((p for p in self.parts if p.resolved and p.value > 0), key=lambda p: -p.value)


def splits(study: Study) -> list[Split]:
    """Return the lost scaling of each family that was measured for it."""
    groups = defaultdict[tuple[str, str], list[RunRecord]](list)
    for r in study.records:
        if r.family.endswith(plan.LOST) and r.role in ("baseline", "candidate", "note"):
            groups[r.family, r.baseline_id].append(r)
    return [found for records in groups.values() if (found := _split(records)) is not None]


def _split(records: Sequence[RunRecord]) -> Split | None:
    off = (plan.NO_EXCHANGE, plan.READY_BATCHES, plan.ALL_OFF)
    trained = next((r for r in records if r.config.world_size > 1 and r.label not in off), None)
    sets = _sets(records)
    if trained is None or not sets:
        return None
    n, times = trained.config.world_size, [_times(found) for found in sets]
    alone = [found[plan.ALL_OFF] for found in sets if plan.ALL_OFF in found]
    for t, share in zip((t for t in times if plan.ALL_OFF in t), excess_shares(alone), strict=True):
        t[_WAIT] = share * t[plan.ALL_OFF]
    losses, others = _terms(trained)
    found = [_part(times, *term) for term in others]
    measured, doubt = next(p.sets for p in found if p.name == LOSS), ""
    if any(r.mechanism_only for r in records):
        doubt = MECHANISM_ONLY
    elif 0 < measured < stats.LEAST_SETS:
        doubt = f"{phrases.plural(measured, 'set')} only: a claim needs {stats.LEAST_SETS}"
    slowest, parts = "" if doubt else slowest_rank(alone), []
    for name, how, counted in losses:
        note = _lacking(records, counted) or (slowest if name == STRAGGLER else "")
        # A loss is put down to some of several parts; what needs the wait rests on a choice among the ranks too.
        choices = len(losses) * (n if _WAIT in counted else 1)
        parts.append(replace(_part(times, name, how, counted, choices), note=note))
    no_work = Part(name="work of rank 0 alone", how="none in this step: every rank does the same", value=0.0)
    every = {p.name: p for p in (*parts, no_work, *found)}
    family = trained.family.removesuffix(plan.LOST)
    return Split(family=family, parts=tuple(parts), every=every, doubt=doubt)


def _terms(trained: RunRecord) -> tuple[Terms, Terms]:
    """Return the parts of the loss of the ranks that ``trained``, and the other rows of the table."""
    many, n, cpu = trained.label, trained.config.world_size, trained.config.device == "cpu"
    ranks = phrases.plural(n, "rank" if cpu else "GPU")
    small = plan.ONE_SMALL_THREADS if cpu else plan.ONE_SMALL
    how = "one rank: its share of the threads against all of them"
    threads: Times = {plan.ONE_SMALL: -1, plan.ONE_SMALL_THREADS: 1}
    loading = {many: 1, plan.READY_BATCHES: -1, plan.ONE_RANK: -1 / n, plan.ONE_OFF: 1 / n}
    batch = "one rank: its share of the batch against the whole batch, for equal images"
    shared = "shared memory and cores" if cpu else "shared host and buses"
    beside = "all ranks at once against one alone, nothing exchanged"
    losses: Terms = [
        ("exposed communication", "exchange of gradients switched off", {many: 1, plan.NO_EXCHANGE: -1}),
        ("waiting for data", "ready batches in place of the loader, less what one rank waits", loading),
        (STRAGGLER, "its own time against the others', nothing exchanged", {_WAIT: 1}),
        ("smaller batch of a rank", batch, {plan.ONE_SMALL: 1, plan.ONE_OFF: -1 / n}),
        *([("fewer threads for a rank", how, threads)] if cpu else []),
        (shared, beside, {plan.ALL_OFF: 1, _WAIT: -1, small: -1}),
    ]
    loss: Times = {many: 1, plan.ONE_RANK: -1 / n}
    rest = dict(loss)  # a factor of 0 stays, since all must be measured
    for label, factor in (item for *_, counted in losses for item in counted.items()):
        rest[label] = rest.get(label, 0.0) - factor
    others: Terms = [
        (INTERACTION, "the loss less the sum of the parts", rest),
        (LOSS, "measured less ideal", loss),
        (IDEAL, f"one rank's time divided by {n}", {plan.ONE_RANK: 1 / n}),
        (MEASURED, f"{ranks} as they train", {many: 1}),
    ]
    return losses, others


def _sets(records: Sequence[RunRecord]) -> list[dict[str, RunRecord]]:
    """Records with a speed by set and label; sets that are crowded, or without their baseline, have none."""
    found = defaultdict[str, dict[str, RunRecord]](dict)
    for r in records:
        if r.status == "ok" and r.windows and not r.mechanism_only:
            found[r.set_id][r.label] = r
    whole = [members for members in found.values() if plan.ONE_OFF in members and len(members) > 1]
    return [members for members in whole if not crowded(list(members.values()))]


def _times(found: Mapping[str, RunRecord]) -> dict[str, float]:
    """Seconds of a step of each configuration: its ratio to the baseline, paired by turn, times the baseline's."""
    base = found[plan.ONE_OFF]
    of_image = statistics.median(seconds_by_turn(base).values() or [math.nan])
    return {
        label: of_image * math.exp(-set_log_ratio(base, r)) * r.config.global_batch_size for label, r in found.items()
    }


def _part(times: Sequence[Times], name: str, how: str, counted: Times, choices: int = 1) -> Part:
    """The mean over the sets that hold all that is ``counted``; ``choices`` widen its interval (Bonferroni)."""
    whole = [t for t in times if counted.keys() <= t.keys()]
    known = [s for t in whole if math.isfinite(s := sum(factor * t[label] for label, factor in counted.items()))]
    if not known:
        return Part(name=name, how=how, value=math.nan)
    mean, n, half = statistics.fmean(known), len(known), math.nan
    if n > 1:
        half = stats.t_quantile(n - 1, 1 - (1 - stats.LEVEL) / 2 / choices) * statistics.stdev(known) / math.sqrt(n)
    return Part(name=name, how=how, value=mean, low=mean - half, high=mean + half, sets=n)


def _lacking(records: Sequence[RunRecord], counted: Times) -> str:
    """Why a part is not measured: the last word on the first of its configurations that never ran."""
    ran = {r.label for r in records if r.status == "ok" and r.windows}
    for label in (plan.ALL_OFF if label == _WAIT else label for label in counted):
        if label not in ran:
            last = next((r for r in reversed(records) if r.label == label), None)
            return f"not measured: {label}" + (f" ({last.reason})" if last else "")
    return ""


# --- the slowest rank -------------------------------------------------------------------------------------------------


def excess_shares(records: Sequence[RunRecord]) -> list[float]:
    """How much longer than the mean of the others the slowest rank takes in each set, as a share of the longest.

    ``records`` are of one configuration without exchange, one a set. Whichever rank is slowest in a set is partly so by
    chance, so the other sets say which it is: NaN where there are none, and 0 on average for identical ranks.
    """
    if len(records) < 2:
        return [math.nan] * len(records)
    own, others = _rank_seconds(records)
    logs = np.log(own / others)
    slowest = (logs.sum(axis=0) - logs).argmax(axis=1, keepdims=True)
    excess = np.take_along_axis(own - others, slowest, axis=1)[:, 0]
    return [float(share) for share in excess / own.max(axis=1)]


def slowest_rank(records: Sequence[RunRecord]) -> str:
    """Such as "rank 12"; empty where no rank is shown to be slower than the others.

    Student's t over sets of ln(its seconds / the mean of the others'), with Bonferroni's correction over ranks.
    """
    if len(records) < stats.LEAST_SETS:
        return ""
    logs = np.log(np.divide(*_rank_seconds(records)))
    rank = int(logs.mean(axis=0).argmax())
    found = stats.estimate(logs[:, rank])
    return f"rank {rank}" if found.value > 1 and logs.shape[1] * found.p < 1 - stats.LEVEL else ""


def _rank_seconds(records: Sequence[RunRecord]) -> tuple[stats.Array, stats.Array]:
    """Seconds of a step by set and rank, and those of the other ranks in the mean.

    A rank's own seconds are from the barrier before a window to its own end: the median over turns.
    """
    own = np.array([np.median([np.array(w.rank_seconds) / w.steps for w in r.windows], axis=0) for r in records])
    return own, (own.sum(axis=1, keepdims=True) - own) / (own.shape[1] - 1)


# --- table -----------------------------------------------------------------------------------------------------------


def _milliseconds(split: Split, part: Part) -> str:
    """Such as "1.20 ms (1.05 to 1.35)", with as many decimals as the step of this split deserves."""
    if math.isnan(part.value):
        return "not measured"
    step = 1e3 * split[MEASURED].value
    digits = max(0, 2 - math.floor(math.log10(step))) if math.isfinite(step) else 2
    ends = (round(1e3 * x, digits) + 0.0 for x in (part.value, *part.ends))  # a zero has no sign of its own
    value, low, high = (f"{x:.{digits}f}" for x in ends)
    return f"{value} ms ({low} to {high})" if part.exists else f"{value} ms"


def table(found: Sequence[Split]) -> Table:
    """Return a row for each part: how it was measured, its seconds in a step, and its share of the loss."""
    rows = []
    for split in found:
        notes = {LOSS: split.doubt, INTERACTION: "" if split.reliable else "split unreliable"}
        for p in split.every.values():
            shared = split.claimed and p.sets and (p in split.parts or p.name == INTERACTION)
            gains = "a gain" if p.high < 0 and not split.doubt else "below zero: inconclusive"
            rows.append(
                {
                    "Family": split.family,
                    "Part": p.name,
                    "How it is measured": p.how,
                    "Time in a step": _milliseconds(split, p),
                    "Share of the loss": f"{100 * p.value / split[LOSS].value:.0f} %" if shared else phrases.DASH,
                    "Sets": str(p.sets) if p.sets else phrases.DASH,
                    "Note": notes.get(p.name, p.note) or (gains if p.value < 0 else ""),
                }
            )
    return without_constant(rows, {"Family": None, "Note": ""})


def headline(found: Sequence[Split]) -> str:
    """Say what scaling was lost to, where one split is resolved and reliable; else ask."""
    parts = found[0].largest if len(found) == 1 and found[0].claimed and found[0].reliable else []
    return f"Lost to {phrases.joined([p.name for p in parts])}" if parts else "Where the lost scaling went"
