"""Where the lost scaling went: the step of all ranks beside the ideal, split into losses that were each switched off.

For equal images n ranks should take 1/n of one rank's time, T(1) / n. What they take longer, L = T(n) - T(1) / n, is
the sum of: what exchange and loading each cost (the step with it less the step without it, beyond that share of
T(1) / n which one rank pays too); what is left with both off, which is the smaller batch of a rank, its fewer threads,
the others beside it, and the straggler; and the interaction, which is what switching off both at once gains more or
less than switching off each. A step of the lab's trainer has no work that rank 0 alone does: what rank 0 does alone, a
checkpoint or a grid of images, lies between steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ddpm_lab import plan
from ddpm_lab.config import ExchangeConfig
from ddpm_lab.explain import phrases, stats
from ddpm_lab.explain.answer import MEANING
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.bars import bars
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import MECHANISM_ONLY
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.table import Table, one_family, without_constant
from ddpm_lab.plan import Family
from ddpm_lab.record import RunRecord, crowded, seconds_by_turn, set_log_ratio
from ddpm_lab.training.setting import Setup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNRELIABLE = 1 / 3
"""Share of the loss above which an interaction makes the split unreliable."""
STRAGGLER = "slowest rank"
TOTAL, INTERACTION, LOSS = "sum of the parts", "interaction", "loss"
IDEAL, MEASURED, ALL_OFF = "ideal", "measured", "exchange, loading off"
_WAIT = "seconds that the other ranks wait for the slowest"

Times = Mapping[str, float]
"""Seconds of a step of each configuration of a set, by its label; or the factor that each is counted with."""


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
    alone = ExchangeConfig(enabled=False)
    still: dict[str, Any] = {"loader": "still", "loader_workers": 0}
    small = replace(one, **still, global_batch_size=many.rank_batch_size)
    rows = [
        (setup.ranks_label(most), many),
        (plan.NO_EXCHANGE, replace(many, exchange=alone)),
        (plan.ALL_OFF, replace(many, **still, exchange=alone)),
        (plan.READY_BATCHES, replace(many, **still)),
        (plan.ONE_RANK, one),
        (plan.ONE_SMALL, small),
    ]
    if one.device == "cpu":
        rows.append((plan.ONE_SMALL_THREADS, replace(small, threads=many.rank_threads(setup.usable_cores))))
    return Family(
        name=f"{setup.family_name(-negative, most)}{plan.LOST}",
        baseline=replace(one, **still),
        baseline_label=plan.ONE_OFF,
        candidates=tuple(rows),
        together=True,
    )


# --- the split --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(stats.Interval):
    """A part of the loss, or a time that it is computed from: mean seconds of a step over ``sets``, NaN if unknown."""

    name: str
    how: str
    sets: int = 0
    note: str = ""

    @property
    def known(self) -> bool:
        """Whether it was measured."""
        return not math.isnan(self.value)

    @property
    def resolved(self) -> bool:
        """True if the interval of enough sets leaves 0 out; a straggler must also be identified."""
        named = self.name != STRAGGLER or bool(self.note)
        return named and self.sets >= stats.LEAST_SETS and (self.low > 0 or self.high < 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The lost scaling of one piece of work: the parts of the loss, and the ``others`` that the table shows.

    ``doubt`` says why no loss is claimed, whatever the numbers; it is empty where one may be.
    """

    family: str
    batch: int
    parts: tuple[Part, ...]
    others: tuple[Part, ...]
    doubt: str

    def __getitem__(self, name: str) -> Part:
        """Return what is called ``name``."""
        return next(p for p in (*self.parts, *self.others) if p.name == name)

    @property
    def reliable(self) -> bool:
        """Whether the interaction is at most a third of the loss."""
        return not abs(self[INTERACTION].value) > UNRELIABLE * abs(self[LOSS].value)

    @property
    def claimed(self) -> bool:
        """Whether a loss is shown."""
        return not self.doubt and self[LOSS].low > 0

    @property
    def largest(self) -> list[Part]:
        """The parts that are losses, the largest first."""
        return sorted((p for p in self.parts if p.resolved and p.value > 0), key=lambda p: -p.value)


_RANK_ZERO = Part(name="work of rank 0 alone", how="none in this step: every rank does the same", value=0.0)


def splits(study: Study) -> list[Split]:
    """Return the lost scaling of each family that was measured for it."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for r in study.records:
        if r.family.endswith(plan.LOST) and r.role in ("baseline", "candidate", "note"):
            groups.setdefault((r.family, r.baseline_id), []).append(r)
    return [found for records in groups.values() if (found := _split(records)) is not None]


def _split(records: Sequence[RunRecord]) -> Split | None:
    """Split the loss of a family."""
    sets = _sets(records)
    off = (plan.NO_EXCHANGE, plan.READY_BATCHES, plan.ALL_OFF)
    trained = next((r for r in records if r.config.world_size > 1 and r.label not in off), None)
    if trained is None or not sets:
        return None
    many, n, cpu = trained.label, trained.config.world_size, trained.config.device == "cpu"
    unit = phrases.plural(n, "rank" if cpu else "GPU")
    times = [_times(found) for found in sets]
    alone = [found[plan.ALL_OFF] for found in sets if plan.ALL_OFF in found]
    for t, share in zip((t for t in times if plan.ALL_OFF in t), excess_shares(alone), strict=True):
        t[_WAIT] = share * t[plan.ALL_OFF]
    terms = _terms(many, n, cpu=cpu)
    total, loss = _sum(*(counted for *_, counted in terms)), {many: 1, plan.ONE_RANK: -1 / n}
    others = [
        _part(times, TOTAL, "", total),
        _part(times, INTERACTION, "the loss less the sum", _sum(loss, {k: -factor for k, factor in total.items()})),
        measured := _part(times, LOSS, "measured less ideal", loss),
        _part(times, IDEAL, f"one rank's time divided by {n}", {plan.ONE_RANK: 1 / n}),
        _part(times, MEASURED, f"{unit} as they train", {many: 1}),
        _part(times, ALL_OFF, f"{unit}, all of these off together", {plan.ALL_OFF: 1}),
    ]
    doubt = ""
    if any(r.mechanism_only for r in records):
        doubt = MECHANISM_ONLY
    elif 0 < measured.sets < stats.LEAST_SETS:
        doubt = f"{phrases.plural(measured.sets, 'set')} only: a claim needs {stats.LEAST_SETS}"
    slowest = "" if doubt else slowest_rank(alone)
    parts = []
    for name, how, counted in terms:
        note = _lacking(records, counted) or (slowest if name == STRAGGLER else "")
        # What needs the wait rests on a choice, of the slowest among the ranks.
        parts.append(replace(_part(times, name, how, counted, n if _WAIT in counted else 1), note=note))
    return Split(
        family=trained.family.removesuffix(plan.LOST),
        batch=trained.config.global_batch_size,
        parts=tuple(parts),
        others=tuple(others),
        doubt=doubt,
    )


def _terms(many: str, n: int, *, cpu: bool) -> list[tuple[str, str, Times]]:
    """Name each part of the loss of the ``n`` ranks called ``many``, how it is measured, and the seconds it counts."""
    small = plan.ONE_SMALL_THREADS if cpu else plan.ONE_SMALL
    how = "one rank: its share of the threads against all of them"
    threads = ("fewer threads for a rank", how, {plan.ONE_SMALL: -1, plan.ONE_SMALL_THREADS: 1})
    loading = {many: 1, plan.READY_BATCHES: -1, plan.ONE_RANK: -1 / n, plan.ONE_OFF: 1 / n}
    batch = "one rank: its share of the batch against the whole batch, for equal images"
    shared = "shared memory and cores" if cpu else "shared host and buses"
    beside = "all ranks at once against one alone, nothing exchanged"
    return [
        ("exposed communication", "exchange of gradients switched off", {many: 1, plan.NO_EXCHANGE: -1}),
        ("waiting for data", "ready batches in place of the loader, less what one rank waits", loading),
        (STRAGGLER, "its own time against the others', nothing exchanged", {_WAIT: 1}),
        ("smaller batch of a rank", batch, {plan.ONE_SMALL: 1, plan.ONE_OFF: -1 / n}),
        *([threads] if cpu else []),
        (shared, beside, {plan.ALL_OFF: 1, _WAIT: -1, small: -1}),
    ]


def _sum(*terms: Times) -> Times:
    """Add up factors; a factor of 0 stays, since all must be measured."""
    total: dict[str, float] = {}
    for counted in terms:
        for label, factor in counted.items():
            total[label] = total.get(label, 0.0) + factor
    return total


def _sets(records: Sequence[RunRecord]) -> list[dict[str, RunRecord]]:
    """Records with a speed by set and label; sets that are crowded, or without their baseline, have none."""
    found: dict[str, dict[str, RunRecord]] = {}
    for r in records:
        if r.role in ("baseline", "candidate") and r.status == "ok" and r.windows and not r.mechanism_only:
            found.setdefault(r.set_id, {})[r.label] = r
    whole = [members for members in found.values() if plan.ONE_OFF in members and len(members) > 1]
    return [members for members in whole if not crowded(list(members.values()))]


def _times(found: Mapping[str, RunRecord]) -> dict[str, float]:
    """Seconds of a step of each configuration: its ratio to the baseline, paired by turn, times the baseline's."""
    base = found[plan.ONE_OFF]
    of_image = statistics.median(seconds_by_turn(base).values()) if seconds_by_turn(base) else math.nan
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
    return Part(name=name, how=how, value=mean, low=mean - half, high=mean + half, sets=len(known))


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
    own, others, logs = _rank_seconds(records)
    slowest = (logs.sum(axis=0) - logs).argmax(axis=1, keepdims=True)
    excess = np.take_along_axis(own - others, slowest, axis=1)[:, 0]
    return [float(share) for share in excess / own.max(axis=1)]


def slowest_rank(records: Sequence[RunRecord]) -> str:
    """Such as "rank 12 on cuda:4 of host 2"; empty where no rank is shown to be slower than the others.

    Student's t over sets of ln(its seconds / the mean of the others'), with Bonferroni's correction over ranks.
    """
    if len(records) < stats.LEAST_SETS:
        return ""
    logs = _rank_seconds(records)[-1]
    rank = int(logs.mean(axis=0).argmax())
    found = stats.estimate(logs[:, rank])
    slower = found.value > 1 and logs.shape[1] * found.p < 1 - stats.LEVEL
    return f"rank {rank}{_place(rank, records)}" if slower else ""


def _rank_seconds(records: Sequence[RunRecord]) -> tuple[stats.Array, stats.Array, stats.Array]:
    """Seconds of a step by set and rank, those of the others in the mean, and the logarithm of their ratio.

    A rank's own seconds are from the barrier before a window to its own end: the median over turns.
    """
    turns = [[np.array(w.rank_seconds) / w.steps for w in r.windows] for r in records]
    own = np.array([np.median(of_set, axis=0) for of_set in turns])
    others = (own.sum(axis=1, keepdims=True) - own) / (own.shape[1] - 1)
    return own, others, np.log(own / others)


def _place(rank: int, records: Sequence[RunRecord]) -> str:
    """Such as " on cuda:4 of host 2", where it was the same in every set; else empty."""
    hosts: dict[str, int] = {}
    places = set()
    for record in records:
        host_of = {own["rank"]: own["host"] for own in record.witness.get("ranks") or [] if own.get("host")}
        for host in host_of.values():
            hosts.setdefault(host, len(hosts) + 1)
        device = next((own.device for own in record.ranks if own.rank == rank), "")
        words = [device] if device.startswith("cuda") else []
        words += [f"host {hosts[host_of[rank]]}"] if rank in host_of and record.config.nodes > 1 else []
        places.add(" of ".join(words))
    return f" on {place}" if len(places) == 1 and (place := places.pop()) else ""


# --- table, figure ------------------------------------------------------------------------------------------


def _milliseconds(split: Split, part: Part, *, sign: bool = False) -> str:
    """Such as "1.20 ms (1.05 to 1.35)", with as many decimals as the step of this split deserves."""
    if not part.known:
        return "not measured"
    step = 1e3 * (split[MEASURED] if split[MEASURED].known else split[ALL_OFF]).value
    digits = max(0, 2 - math.floor(math.log10(step))) if math.isfinite(step) else 2
    value, low, high = (
        f"{round(1e3 * x, digits) + 0.0:{'+' if sign else ''}.{digits}f}"  # a zero has no sign of its own
        for x in (part.value, *part.ends)
    )
    return f"{value} ms ({low} to {high})" if part.exists else f"{value} ms"


def table(found: Sequence[Split]) -> Table:
    """Return a row for each part: how it was measured, its seconds in a step, and its share of the loss."""
    rows = []
    for split in found:
        notes = {LOSS: split.doubt, INTERACTION: "" if split.reliable else "split unreliable"}
        for p in (*split.parts, _RANK_ZERO, *split.others):
            shared = p is not _RANK_ZERO and (p not in split.others or p.name in (TOTAL, INTERACTION))
            share = 100 * p.value / split[LOSS].value if shared and split.claimed and p.known else None
            gains = "a gain" if p.high < 0 and not split.doubt else "below zero: inconclusive"
            rows.append(
                {
                    "Family": split.family,
                    "Part": p.name,
                    "How it is measured": p.how,
                    "Time in a step": _milliseconds(split, p),
                    "Share of the loss": phrases.DASH if share is None else f"{share:.0f} %",
                    "Sets": str(p.sets) if p.sets else phrases.DASH,
                    "Note": notes.get(p.name, p.note) or (gains if p.value < 0 else ""),
                }
            )
    return without_constant(one_family(rows), {"Note": [""]})


def headline(found: Sequence[Split]) -> str:
    """Say what scaling was lost to, where one split is resolved and reliable; else ask."""
    parts = found[0].largest if len(found) == 1 and found[0].claimed and found[0].reliable else []
    return f"Lost to {phrases.joined([p.name for p in parts])}" if parts else "Where the lost scaling went"


def figure(study: Study) -> Figure | None:
    """Ideal step, each part of the loss where the one before ends, and the measured step; None without any."""
    panels, found = [], [split for split in splits(study) if split[INTERACTION].known]
    for split in found:
        shown = (split[IDEAL], *split.parts, split[INTERACTION], split[MEASURED])
        doubt = f" ({split.doubt})" if split.doubt else ""
        heading = f"{split.family}, batch {split.batch}{doubt}"
        panels.append(Panel(heading=heading, rows=[_bar(split, p) for p in shown]))
    if not panels:
        return None
    records = tuple(r for r in study.records if r.family.endswith(plan.LOST))
    return bars(
        panels,
        title=headline(found),
        context=phrases.context(replace(study, records=records), batch=False),
        label="milliseconds for a batch",
        steps=True,
        note="Each part is what a step gains where it alone is switched off, with its 95 % interval over sets; the "
        "interaction is what all together gain more or less. Ideal: one rank's time divided by the number of ranks. "
        f"{MEANING}",
    )


def _bar(split: Split, p: Part) -> Row:
    """A bar in milliseconds: a part has a colour where it is resolved."""
    whole = p.name in (IDEAL, MEASURED)
    colour = style.SOFT if whole else style.OPEN
    if p in split.parts and p.resolved:
        colour = style.BAD if p.value > 0 else style.GOOD
    value, low, high = (1e3 * x for x in (p.value, *p.ends))
    text = _milliseconds(split, p, sign=not whole)
    return Row(name=p.name, value=value, low=low, high=high, colour=colour, text=text, whole=whole)
