"""Where the lost scaling went: the step of all ranks beside the ideal, split into losses that were each switched off.

For equal images n ranks should take 1/n of one rank's time, T(1) / n. What they take longer, L = T(n) - T(1) / n, is
the sum of: what exchange and loading each cost (the step with it less the step without it, beyond that share of
T(1) / n which one rank pays too); what is left with both off, which is the smaller batch of a rank, its fewer threads,
the others beside it, and the straggler; and the interaction, which is what switching off both at once gains more or
less than switching off each. A step of the lab's trainer has no work that rank 0 alone does.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpm_lab import plan
from ddpm_lab.explain import decisions, phrases, stats, straggler
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.bars import bars
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import MECHANISM_ONLY
from ddpm_lab.explain.figure_ratios import MEANING
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.table import Table, one_family, without_constant
from ddpm_lab.record import RunRecord, crowded, seconds_by_turn, set_log_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

UNRELIABLE = 1 / 3
"""Share of the loss above which an interaction makes the split unreliable."""
STRAGGLER = "slowest rank"
_WAIT = "seconds that the other ranks wait for the slowest"
_RANK_ZERO = "work of rank 0 alone"

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
        """True if resolved and positive; a straggler must also be identified."""
        return self.seconds.resolved and self.seconds.value > 0 and (self.name != STRAGGLER or bool(self.note))

    @property
    def gained(self) -> bool:
        """True if resolved and negative, which a straggler never is."""
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

    @property
    def largest(self) -> list[Part]:
        """The parts that are losses, the largest first."""
        return sorted((p for p in self.parts if p.lost), key=lambda p: -p.seconds.value)


# --- the split --------------------------------------------------------------------------------------------------------


def splits(study: Study) -> list[Split]:
    """The lost scaling of each family that was measured for it."""
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for r in study.records:
        if r.family.endswith(plan.LOST) and r.role in ("baseline", "candidate", "note"):
            groups.setdefault((r.family, r.baseline_id), []).append(r)
    return [found for records in groups.values() if (found := _split(records, study.records)) is not None]


def _split(records: Sequence[RunRecord], every: Sequence[RunRecord]) -> Split | None:
    """The split of a family's records; ``every`` holds the profile of all ranks too."""
    sets = _sets(records)
    many = next((r for r in records if r.role == "candidate" and r.config.world_size > 1), None)
    if many is None or not sets:
        return None
    n, off = many.config.world_size, (plan.NO_EXCHANGE, plan.READY_BATCHES, plan.ALL_OFF)
    trained = next((r for r in records if r.config.world_size == n and r.label not in off), many)
    label, times = trained.label, [_times(found) for found in sets]
    alone = [found[plan.ALL_OFF] for found in sets if plan.ALL_OFF in found]
    for t, share in zip((t for t in times if plan.ALL_OFF in t), straggler.excess_shares(alone), strict=True):
        t[_WAIT] = share * t[plan.ALL_OFF]
    terms = _terms(label, n, cpu=many.config.device == "cpu")
    loss = _over(times, lambda t: t[label] - t[plan.ONE_RANK] / n)
    doubt = ""
    if any(r.mechanism_only for r in records):
        doubt = MECHANISM_ONLY
    elif loss.known and loss.sets < decisions.LEAST_SETS:
        doubt = f"{phrases.plural(loss.sets, 'set')} only: a claim needs {decisions.LEAST_SETS}"
    slowest = "" if doubt else straggler.named(alone)
    parts = tuple(
        Part(
            name=term.name,
            how=term.how,
            # The two that need all of it off rest on a choice, of the slowest among the ranks.
            seconds=_over(times, term.seconds, n if plan.ALL_OFF in term.needs else 1),
            note=_lacking(records, term.needs) or (slowest if term.name == STRAGGLER else ""),
        )
        for term in terms
    )
    communication = _communication([r for r in every if r.run_id == replace(trained.config, purpose="profile").run_id])
    return Split(
        family=many.family.removesuffix(plan.LOST),
        unit=phrases.plural(n, "GPU" if many.config.device == "cuda" else "rank"),
        ranks=n,
        batch=many.config.global_batch_size,
        ideal=_over(times, lambda t: t[plan.ONE_RANK] / n),
        measured=_over(times, lambda t: t[label]),
        loss=loss,
        parts=parts,
        total=_over(times, lambda t: sum(term.seconds(t) for term in terms)),
        interaction=_over(times, lambda t: t[label] - t[plan.ONE_RANK] / n - sum(term.seconds(t) for term in terms)),
        all_off=_over(times, lambda t: t[plan.ALL_OFF]),
        communication=communication,
        overlapped=_overlapped(communication, parts[0].seconds),
        doubt=doubt,
    )


class _Term(NamedTuple):
    """A part of the loss: how it is measured, the configurations that it needs, and its seconds in a set."""

    name: str
    how: str
    needs: tuple[str, ...]
    seconds: Callable[[Times], float]


def _terms(label: str, n: int, *, cpu: bool) -> list[_Term]:
    """The parts of the loss of the ``n`` ranks that are labelled so."""
    small = plan.ONE_SMALL_THREADS if cpu else plan.ONE_SMALL
    threads = _Term(
        "fewer threads for a rank",
        "one rank: its share of the threads against all of them",
        (plan.ONE_SMALL, plan.ONE_SMALL_THREADS),
        lambda t: t[plan.ONE_SMALL_THREADS] - t[plan.ONE_SMALL],
    )
    return [
        _Term(
            "exposed communication",
            "exchange of gradients switched off",
            (label, plan.NO_EXCHANGE),
            lambda t: t[label] - t[plan.NO_EXCHANGE],
        ),
        _Term(
            "waiting for data",
            "ready batches in place of the loader, less what one rank waits",
            (label, plan.READY_BATCHES, plan.ONE_RANK, plan.ONE_OFF),
            lambda t: (t[label] - t[plan.READY_BATCHES]) - (t[plan.ONE_RANK] - t[plan.ONE_OFF]) / n,
        ),
        _Term(STRAGGLER, "its own time against the others', nothing exchanged", (plan.ALL_OFF,), lambda t: t[_WAIT]),
        _Term(
            "smaller batch of a rank",
            "one rank: its share of the batch against the whole batch, for equal images",
            (plan.ONE_SMALL,),
            lambda t: t[plan.ONE_SMALL] - t[plan.ONE_OFF] / n,
        ),
        *([threads] if cpu else []),
        _Term(
            "shared memory and cores" if cpu else "shared host and buses",
            "all ranks at once against one alone, nothing exchanged",
            (plan.ALL_OFF, small),
            lambda t: t[plan.ALL_OFF] - t[_WAIT] - t[small],
        ),
    ]


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


def _over(times: Sequence[Times], value: Callable[[Times], float], choices: int = 1) -> Seconds:
    """The mean of a value over the sets that hold what it needs; ``choices`` widen its interval (Bonferroni)."""
    known = []
    for t in times:
        with contextlib.suppress(KeyError):  # a configuration that this set lacks
            if math.isfinite(seconds := value(t)):
                known.append(seconds)
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


def _overlapped(communication: float, exposed: Seconds) -> Seconds:
    """What of the exchange is not exposed, so lies under the backward pass."""
    if math.isnan(communication) or not exposed.known:
        return Seconds(value=math.nan)
    value, high, low = (
        math.nan if math.isnan(seconds) else max(0.0, communication - seconds)
        for seconds in (exposed.value, exposed.low, exposed.high)
    )
    return Seconds(value=value, low=low, high=high, sets=exposed.sets)


# --- sentence, table, figure ------------------------------------------------------------------------------------------


def milliseconds(split: Split, seconds: Seconds, *, sign: bool = False) -> str:
    """Such as "1.20 ms (1.05 to 1.35)", with as many decimals as the step of this split deserves."""
    if not seconds.known:
        return "not measured"
    step = 1e3 * (split.measured.value if split.measured.known else split.all_off.value)
    digits = max(0, 2 - math.floor(math.log10(step))) if step > 0 and math.isfinite(step) else 2
    value, low, high = (
        f"{round(1e3 * x, digits) + 0.0:{'+' if sign else ''}.{digits}f}"  # a zero has no sign of its own
        for x in (seconds.value, seconds.low, seconds.high)
    )
    return f"{value} ms" if math.isnan(seconds.low) else f"{value} ms ({low} to {high})"


def sentence(split: Split) -> str:
    """What is lost, to what, and whether the split holds."""
    if split.doubt == MECHANISM_ONLY:
        return f"{split.unit} for a batch of {split.batch}: {MECHANISM_ONLY}."
    step = f"{split.unit} take {milliseconds(split, split.measured)} for a batch of {split.batch}"
    text = f"{step}; one rank's time divided by {split.ranks} is {milliseconds(split, split.ideal)}."
    if not split.loss.known:
        return f"{text} The loss is not measured."
    lost = milliseconds(split, split.loss)
    if split.doubt:
        return f"{text} {phrases.begun(split.doubt)}, so no loss is claimed; it reads {lost}."
    if not split.loss.low > 0:
        return f"{text} No loss is resolved: {lost}."
    named = [f"{p.name}{f' ({p.note})' if p.note else ''} {milliseconds(split, p.seconds)}" for p in split.largest]
    text += f" Lost: {lost}, of which {phrases.joined(named)}." if named else f" Lost: {lost}; no part is resolved."
    gains = [f"{p.name} {milliseconds(split, p.seconds, sign=True)}" for p in split.parts if p.gained]
    text += f" Gained: {phrases.joined(gains)}." if gains else ""
    if split.overlapped.known:
        text += f" Of the exchange {milliseconds(split, split.overlapped)} more lie under the backward pass."
    if split.interaction.known:
        text += f" The parts add up to all but {milliseconds(split, split.interaction, sign=True)}, their interaction"
        text += "." if split.reliable else ": above a third of the loss, so the split is unreliable."
    return text


def unsplit(study: Study) -> str:
    """Which ranks were compared and not split, and how to ask for that; empty where all are split, or none."""
    found = {split.ranks for split in splits(study)}
    compared = {r.config.world_size: r.label for r in study.records if r.role == "candidate" and plan.scaling(r.family)}
    others = sorted(compared.keys() - found) if found else []
    if not others:
        return ""
    labels = phrases.joined([compared[n] for n in others])
    return f"not split: {labels}; --world-sizes {' or '.join(f'1,{n}' for n in others)} does that"


def headline(found: Sequence[Split]) -> str:
    """What scaling was lost to, where one split is resolved and reliable; else the question."""
    parts = found[0].largest if len(found) == 1 and not found[0].doubt else []
    if not parts or not found[0].reliable or not found[0].loss.low > 0:
        return "Where the lost scaling went"
    return f"Lost to {phrases.joined([p.name for p in parts])}"


def as_values(study: Study) -> list[dict[str, Any]]:
    """Each split as plain values: the work, the sentence, and the rows of its table."""
    return [{"family": split.family, "sentence": sentence(split), "parts": _table([split])} for split in splits(study)]


def table(study: Study) -> Table:
    """One row a part: how it was measured, its seconds in a step, and its share of the loss."""
    return _table(splits(study))


def _table(shown: Sequence[Split]) -> Table:
    return without_constant(one_family([row for split in shown for row in _rows(split)]), {"Note": [""]})


def _rows(split: Split) -> list[dict[str, str]]:
    """The rows of a split's table: those of the loss have a share of it."""
    rows: list[tuple[str, str, Seconds, str, bool]] = [
        ("ideal", f"one rank's time divided by {split.ranks}", split.ideal, "", False),
        *((p.name, p.how, p.seconds, p.note or _below_zero(split, p), True) for p in split.parts),
        (_RANK_ZERO, "none in this step: every rank does the same", Seconds(value=0.0), "", False),
        ("sum of the parts", "", split.total, "", True),
        ("interaction", "the loss less the sum", split.interaction, "" if split.reliable else "split unreliable", True),
        ("loss", "measured less ideal", split.loss, split.doubt, False),
        ("measured", f"{split.unit} as they train", split.measured, "", False),
        ("exchange, loading off", f"{split.unit}, all of these off together", split.all_off, "", False),
        ("overlapped communication", "the exchange in a profile, less what is exposed", split.overlapped, "", False),
    ]
    claimed = not split.doubt and split.loss.low > 0
    return [
        {
            "Family": split.family,
            "Part": name,
            "How it is measured": how,
            "Time in a step": milliseconds(split, seconds) if name != _RANK_ZERO else "0",
            "Share of the loss": f"{100 * seconds.value / split.loss.value:.0f} %"
            if lossy and claimed and seconds.known
            else phrases.DASH,
            "Sets": str(seconds.sets) if seconds.sets else phrases.DASH,
            "Note": note,
        }
        for name, how, seconds, note, lossy in rows
    ]


def _below_zero(split: Split, part: Part) -> str:
    """What a time below zero says: a gain where it is resolved, and else no known difference from none."""
    if not part.seconds.value < 0:
        return ""
    return "a gain" if part.gained and not split.doubt else "below zero: inconclusive"


def figure(study: Study) -> Figure | None:
    """Ideal step, each part of the loss where the one before ends, and the measured step; None without any."""
    found = [split for split in splits(study) if split.loss.known and split.total.known]
    if not found:
        return None
    records = tuple(r for r in study.records if r.family.endswith(plan.LOST))
    return bars(
        [
            Panel(
                heading=f"{split.family}, batch {split.batch}{f' ({split.doubt})' if split.doubt else ''}",
                rows=[
                    _bar(split, "ideal", split.ideal, style.SOFT, whole=True),
                    *(
                        _bar(split, p.name, p.seconds, style.BAD if p.lost else style.GOOD if p.gained else style.OPEN)
                        for p in split.parts
                    ),
                    _bar(split, "interaction", split.interaction, style.OPEN),
                    _bar(split, "measured", split.measured, style.SOFT, whole=True),
                ],
            )
            for split in found
        ],
        title=headline(found),
        context=phrases.context(replace(study, records=records), batch=False),
        label="milliseconds for a batch",
        steps=True,
        note="Each part is what a step gains where it alone is switched off, with its 95 % interval over sets; the "
        "interaction is what all together gain more or less. Ideal: one rank's time divided by the number of ranks. "
        f"{MEANING}",
    )


def _bar(split: Split, name: str, seconds: Seconds, colour: str, *, whole: bool = False) -> Row:
    """A bar in milliseconds; parts whose interval holds 0 are grey."""
    value, low, high = (1e3 * x for x in (seconds.value, seconds.low, seconds.high))
    text = milliseconds(split, seconds, sign=not whole)
    return Row(name=name, value=value, low=low, high=high, colour=colour, text=text, whole=whole)
