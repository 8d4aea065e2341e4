"""Where the lost scaling went: the step of all ranks beside the ideal, split into losses that were each switched off.

For equal images n ranks should take 1/n of one rank's time, T(1) / n. What they take longer, L = T(n) - T(1) / n, is
the sum of: what exchange and loading each cost (the step with it less the step without it, beyond that share of
T(1) / n which one rank pays too); what is left with both off, which is the smaller batch of a rank, its fewer threads,
the others beside it, and the slowest rank; and the interaction, which is what switching off both at once gains more or
less than switching off each. A step of the lab's trainer has no work that rank 0 alone does.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ddpm_lab import plan
from ddpm_lab.explain import decisions, phrases, stats, straggler
from ddpm_lab.explain.comparisons import MECHANISM_ONLY
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord, crowded, seconds_by_turn, set_log_ratio

UNRELIABLE = 1 / 3
"""Share of the loss above which an interaction makes the split unreliable."""

Times = Mapping[str, float]
"""Seconds of a step of each configuration of a set, by its label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Seconds of a step: the mean over sets with its 95 % interval (NaN for fewer than two sets)."""

    value: float
    low: float = math.nan
    high: float = math.nan
    sets: int = 0

    @property
    def known(self) -> bool:
        """Whether it was measured."""
        return not math.isnan(self.value)

    @property
    def resolved(self) -> bool:
        """Whether there are sets enough for a claim, and the interval leaves 0 out."""
        return self.sets >= decisions.LEAST_SETS and (self.low > 0 or self.high < 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the loss: its name, how it was measured, its seconds, and what else is to be said of it."""

    name: str
    how: str
    seconds: Seconds
    note: str = ""

    @property
    def lost(self) -> bool:
        """Whether it may be called a loss: it is resolved, and of a slowest rank it is known which one that is."""
        return self.seconds.resolved and self.seconds.value > 0 and (self.name != STRAGGLER or bool(self.note))

    @property
    def gained(self) -> bool:
        """Whether it may be called a gain, which a slowest rank is never."""
        return self.seconds.resolved and self.seconds.value < 0 and self.name != STRAGGLER


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """The lost scaling of one piece of work. ``communication`` are seconds of the exchange itself, in a profile.

    ``doubt`` says why no loss is claimed, whatever the numbers; it is empty where one may be.
    """

    family: str
    unit: str
    ranks: int
    batch: int
    ideal: Seconds
    measured: Seconds
    loss: Seconds
    parts: tuple[Part, ...]
    total: Seconds
    interaction: Seconds
    all_off: Seconds
    communication: float
    overlapped: Seconds
    doubt: str

    @property
    def reliable(self) -> bool:
        """Whether the interaction is at most a third of the loss."""
        return not abs(self.interaction.value) > UNRELIABLE * abs(self.loss.value)


def splits(study: Study) -> list[Split]:
    """The lost scaling of each family that was measured for it."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for r in study.records:
        if r.family.endswith(plan.LOST) and r.role in ("baseline", "candidate", "note"):
            groups.setdefault((r.family, r.baseline_id), []).append(r)
    return [found for records in groups.values() if (found := _split(records, study.records)) is not None]


def _doubt(records: Sequence[RunRecord], loss: Seconds) -> str:
    if any(r.mechanism_only for r in records):
        return MECHANISM_ONLY
    if loss.known and loss.sets < decisions.LEAST_SETS:
        return f"{phrases.plural(loss.sets, 'set')} only: a claim needs {decisions.LEAST_SETS}"
    return ""


def _split(records: Sequence[RunRecord], beside: Sequence[RunRecord]) -> Split | None:
    sets = _sets(records)
    many = next((r for r in records if r.role == "candidate" and r.config.world_size > 1), None)
    if many is None or not sets:
        return None
    n = many.config.world_size
    off = (plan.NO_EXCHANGE, plan.READY_BATCHES, plan.ALL_OFF)
    all_ranks = next((r for r in records if r.config.world_size == n and r.label not in off), many).label
    trained = next((r for r in records if r.label == all_ranks), many).config
    times = [_times(found) for found in sets]
    all_off = [(t, found[plan.ALL_OFF]) for t, found in zip(times, sets, strict=True) if plan.ALL_OFF in found]
    alone = [r for _, r in all_off]
    for (t, _), share in zip(all_off, straggler.excess_shares(alone), strict=True):
        t[_WAIT] = share * t[plan.ALL_OFF]

    def over_sets(value: Callable[[Times], float], choices: int = 1) -> Seconds:
        found = []
        for t in times:
            with contextlib.suppress(KeyError):  # a configuration that this set lacks
                found.append(value(t))
        return _estimate(found, choices)

    ranks = phrases.plural(n, "GPU" if many.config.device == "cuda" else "rank")
    terms = _terms(all_ranks, n, sets)
    loss = over_sets(lambda t: t[all_ranks] - t[plan.ONE_RANK] / n)
    doubt = _doubt(records, loss)
    slowest = "" if doubt else straggler.named(alone)
    parts = tuple(
        Part(
            name=name,
            how=how,
            # The two that need all of it off rest on a choice, of the slowest among the ranks.
            seconds=over_sets(value, n if plan.ALL_OFF in labels else 1),
            note=_lacking(records, labels) or (slowest if name == STRAGGLER else ""),
        )
        for name, how, labels, value in terms
    )
    communication = _communication([r for r in beside if r.run_id == replace(trained, purpose="profile").run_id])
    return Split(
        family=many.family.removesuffix(plan.LOST),
        unit=ranks,
        ranks=n,
        batch=many.config.global_batch_size,
        ideal=over_sets(lambda t: t[plan.ONE_RANK] / n),
        measured=over_sets(lambda t: t[all_ranks]),
        loss=loss,
        parts=parts,
        total=over_sets(lambda t: sum(value(t) for *_, value in terms)),
        interaction=over_sets(lambda t: t[all_ranks] - t[plan.ONE_RANK] / n - sum(value(t) for *_, value in terms)),
        all_off=over_sets(lambda t: t[plan.ALL_OFF]),
        communication=communication,
        overlapped=_under(communication, parts[0].seconds),
        doubt=doubt,
    )


STRAGGLER = "slowest rank"
_WAIT = "seconds that the other ranks wait for the slowest"
Term = tuple[str, str, tuple[str, ...], Callable[[Times], float]]


def _terms(all_ranks: str, n: int, sets: Sequence[Mapping[str, RunRecord]]) -> list[Term]:
    """The parts of the loss: name, how it is measured, the configurations that it needs, and its seconds in a set."""
    cpu = any(r.config.device == "cpu" for found in sets for r in found.values())
    small = plan.ONE_SMALL_THREADS if cpu else plan.ONE_SMALL
    found: list[Term] = [
        (
            "exposed communication",
            "exchange of gradients switched off",
            (all_ranks, plan.NO_EXCHANGE),
            lambda t: t[all_ranks] - t[plan.NO_EXCHANGE],
        ),
        (
            "waiting for data",
            "ready batches in place of the loader, less what one rank waits",
            (all_ranks, plan.READY_BATCHES, plan.ONE_RANK, plan.ONE_OFF),
            lambda t: (t[all_ranks] - t[plan.READY_BATCHES]) - (t[plan.ONE_RANK] - t[plan.ONE_OFF]) / n,
        ),
        (STRAGGLER, "its own time against the others', nothing exchanged", (plan.ALL_OFF,), lambda t: t[_WAIT]),
        (
            "smaller batch of a rank",
            "one rank: its share of the batch against the whole batch, for equal images",
            (plan.ONE_SMALL,),
            lambda t: t[plan.ONE_SMALL] - t[plan.ONE_OFF] / n,
        ),
    ]
    if cpu:
        found.append(
            (
                "fewer threads for a rank",
                "one rank: its share of the threads against all of them",
                (plan.ONE_SMALL, plan.ONE_SMALL_THREADS),
                lambda t: t[plan.ONE_SMALL_THREADS] - t[plan.ONE_SMALL],
            )
        )
    shared = "shared memory and cores" if cpu else "shared host and buses"
    found.append(
        (
            shared,
            "all ranks at once against one alone, nothing exchanged",
            (plan.ALL_OFF, small),
            lambda t: t[plan.ALL_OFF] - t[_WAIT] - t[small],
        )
    )
    return found


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


def _estimate(values: Sequence[float], choices: int) -> Seconds:
    known = [v for v in values if math.isfinite(v)]
    if not known:
        return Seconds(value=math.nan)
    mean, half = stats.mean_and_half(known, choices)
    return Seconds(value=mean, low=mean - half, high=mean + half, sets=len(known))


def _lacking(records: Sequence[RunRecord], labels: Sequence[str]) -> str:
    """Why a part is not measured: the last word on the first of its configurations that never ran."""
    ran = {r.label for r in records if r.status == "ok" and r.windows}
    for label in labels:
        if label not in ran:
            last = next((r for r in reversed(records) if r.label == label), None)
            return f"not measured: {label} ({last.reason})" if last else f"not measured: {label}"
    once = sum(r.label == plan.ALL_OFF and bool(r.windows) and not r.mechanism_only for r in records) == 1
    return "needs a second set" if once and plan.ALL_OFF in labels else ""


def _communication(records: Sequence[RunRecord]) -> float:
    """Seconds of a step that gradients take from rank to rank, of the rank that waits least for others; NaN unknown."""
    profile = next((r.profile for r in reversed(records) if r.profile), None) or {}
    ranks = (profile.get("budget") or {}).get("ranks") or []
    spans = [rank["unsynchronised"]["spans"].get("communication") for rank in ranks]
    return min((span["seconds"] for span in spans if span), default=math.nan)


def _under(communication: float, exposed: Seconds) -> Seconds:
    """What of the exchange is not exposed, so lies under the backward pass."""
    if math.isnan(communication) or not exposed.known:
        return Seconds(value=math.nan)
    value, high, low = (
        math.nan if math.isnan(seconds) else max(0.0, communication - seconds)
        for seconds in (exposed.value, exposed.low, exposed.high)
    )
    return Seconds(value=value, low=low, high=high, sets=exposed.sets)
