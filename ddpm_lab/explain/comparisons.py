"""Turn records into comparisons: one row for each configuration of a family, with ratio, interval and verdict."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from ddpm_lab.config import LOADER_ALONE, OWN_LOADER, RunConfig
from ddpm_lab.explain import quality, stats
from ddpm_lab.explain.quality import Equivalence
from ddpm_lab.explain.selection import Study, once
from ddpm_lab.plan import LOST, scaling
from ddpm_lab.record import TWIN, RunRecord, crowded_sets, moment, seconds_by_turn, set_log_ratio

PROJECTED_IMAGES = 50_000
MECHANISM_ONLY = "mechanism tested, speed not claimed"
QUALITY = quality.NOT_MEASURED
COMPARED = ("baseline", TWIN, "candidate", "note")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One configuration of a family compared with its baseline. Values that do not exist are NaN.

    ``ratio`` is the baseline's time for equal work divided by the configuration's, over the sets that count; for the
    baseline itself it is 1 without an interval. ``logs`` lists (set id, log ratio) of these sets, followed by sets that
    were measured after the verdict; ``noise`` is the ratio of the family's twin. ``p`` is the p-value, adjusted over
    all secondary comparisons with the same baseline unless this is the primary one, and ``level`` its threshold.
    ``why`` gives the reason if the verdict differs from what the interval alone suggests. ``images_per_second`` is the
    geometric mean of the sets' medians. ``set_seconds`` is the duration of a set with baseline, twin and this
    configuration. ``baseline`` is the baseline's configuration, or this one if there is no baseline.
    """

    experiment: str
    family: str
    baseline: RunConfig
    baseline_id: str
    baseline_label: str
    role: str
    label: str
    primary: bool
    run_id: str
    config: RunConfig
    code_version: str
    status: str
    reason: str
    failed_sets: int
    disturbed_sets: int
    mechanism_only: bool
    turns: int
    ratio: stats.Estimate
    logs: tuple[tuple[str, float], ...]
    resolution: float
    set_seconds: float
    images_per_second: float
    peak_memory_bytes: float
    peak_rss_bytes: float
    noise: stats.Interval = field(default_factory=lambda: stats.Interval(value=1.0))
    p: float = math.nan
    level: float = math.nan
    verdict: str = ""
    why: str = ""
    equivalence: Equivalence = field(default_factory=lambda: Equivalence(verdict=QUALITY))

    @property
    def sets(self) -> int:
        """The number of sets that the ratio is computed from, or for a baseline, its speed."""
        return self.ratio.sets

    @property
    def all_sets(self) -> stats.Estimate:
        """The ratio over all sets that count, including those after the answer; the verdict does not use it."""
        return stats.estimate([log for _, log in self.logs])

    @property
    def efficiency(self) -> stats.Interval:
        return self.ratio.times(self.baseline.world_size / self.config.world_size)

    @property
    def resolved(self) -> bool:
        return self.verdict in (stats.FASTER, stats.SLOWER)

    @property
    def answered(self) -> bool:
        return self.verdict in stats.ANSWERS

    @property
    def sets_needed(self) -> float:
        """Estimated number of sets that ``resolution`` needs at the scatter so far; NaN if that is unknown."""
        return float(stats.sets_to_resolve([log for _, log in self.logs], self.resolution) or math.nan)

    @property
    def minutes_needed(self) -> float:
        """Estimated minutes for the sets that are still needed; NaN if that is unknown."""
        return max(self.sets_needed - self.sets, 0.0) * self.set_seconds / 60  # max in this order returns NaN for NaN

    @property
    def quality(self) -> str:
        return quality.sentence(self.equivalence)

    @property
    def ranks(self) -> int:
        return self.config.world_size

    @property
    def batch(self) -> int:
        return self.config.global_batch_size

    @property
    def step_seconds(self) -> float:
        return self.batch / self.images_per_second

    @property
    def projected_seconds(self) -> float:
        return PROJECTED_IMAGES / self.images_per_second

    @property
    def loader_alone(self) -> bool:
        return self.config.workload in (LOADER_ALONE, OWN_LOADER)

    @property
    def scaling(self) -> str | None:
        return scaling(self.family)


@once
def comparisons(study: Study) -> tuple[Comparison, ...]:
    """Return a comparison for each configuration of each family, including twins, failures and what was left out."""
    found: list[Comparison] = []
    unasked = {(r.experiment, r.baseline_id, r.run_id) for r in study.unasked}
    # Parts of the lost scaling are not compared (see lost_scaling); notes on trials need no row of their own.
    rows = (r for r in (*study.records, *study.unasked) if r.role in COMPARED and r.config.purpose != "quality")
    ordered = sorted((r for r in rows if not r.family.endswith(LOST)), key=lambda r: r.experiment)
    for _, group in groupby(ordered, key=lambda r: r.experiment):
        compared = [c for family in _by_baseline(list(group)) for c in _compare_family(family, study.resolution)]
        # Whoever asks again for the best of many gets the answer of whoever asks for all of them.
        judged = _with_verdicts(compared, study.looks)
        found += [c for c in judged if (c.experiment, c.baseline_id, c.run_id) not in unasked]
    trials = quality.Trials((*study.trials, *study.other_trials), study.published_trials)
    return tuple(
        replace(c, equivalence=trials.verdict(c.baseline, c.config, c.code_version))
        if c.role == "candidate" and c.baseline.run_id == c.baseline_id
        else c
        for c in found
    )


def families(compared: Iterable[Comparison]) -> list[list[Comparison]]:
    """Group comparisons by family and baseline, in order."""
    found: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for c in compared:
        found[c.family, c.baseline_id].append(c)
    return [*found.values()]


def _with_verdicts(compared: Sequence[Comparison], looks: Sequence[RunRecord]) -> list[Comparison]:
    """Return the comparisons of one experiment with verdicts on speed; ``looks`` are those at all of its questions.

    Each baseline is a question of its own: results for another network or batch do not change its answer.
    """
    groups: dict[object, list[Comparison]] = defaultdict(list)
    for c in compared:
        if c.role == "candidate":
            groups[id(c) if c.primary else c.baseline_id].append(c)
    found = {id(c): d for group in groups.values() for c, d in zip(group, _tested_together(group, looks), strict=True)}
    return [_with_verdict(c, found.get(id(c)), compared) for c in compared]


def shown(compared: Sequence[Comparison], looks: Sequence[RunRecord]) -> list[tuple[float, list[str]]]:
    """Return the looks at these comparisons in order, as (time, all sets that had been shown by then).

    Sets that no look has tested yet, for example because there were too few, are added as one look at infinity.
    """
    groups = [{set_id for set_id, _ in c.logs} for c in compared]
    every, known, found = set[str]().union(*groups), dict[str, None](), list[tuple[float, list[str]]]()
    by_time: dict[float, set[str]] = defaultdict(set)
    for r in looks:
        by_time[moment(r.date)] |= every.intersection((r.look or {}).get("sets", ()))
    for when, sets in sorted(by_time.items()):
        if sets - known.keys():
            known |= dict.fromkeys(sorted(sets))
            found.append((when, [*known]))
    late = set[str]().union(*(sets for sets in groups if len(sets & known.keys()) < stats.LEAST_SETS))
    if not found or late - known.keys():
        found.append((math.inf, [*(known | dict.fromkeys(sorted(late)))]))
    return found


def _tested_together(group: Sequence[Comparison], looks: Sequence[RunRecord]) -> list[stats.Decision]:
    """Return the decisions on comparisons that are tested together, based on the sets that were shown so far."""
    answers = shown(group, looks)
    logs = [np.array([dict(c.logs).get(set_id, math.nan) for set_id in answers[-1][1]]) for c in group]
    spreads = [[_spread(c, looks, when) for c in group] for when, _ in answers]
    return stats.decided(logs, [len(sets) for _, sets in answers], spreads, group[0].resolution)


def _spread(c: Comparison, looks: Sequence[RunRecord], when: float) -> stats.Spread | None:
    """Return the scatter to expect, from the machine's other comparisons that were shown before ``when``."""
    latest = {(r.experiment, r.baseline_id): r for r in looks if moment(r.date) <= when}
    return stats.spread_of(
        np.asarray(logs) * (stats.TWIN_SCALE if run_id == TWIN else 1)
        for r in latest.values()
        for run_id, logs in (r.look or {}).get("log_ratios", {}).items()
        if (r.baseline_id, run_id) != (c.baseline_id, c.run_id)
    )


def _with_verdict(c: Comparison, decision: stats.Decision | None, compared: Sequence[Comparison]) -> Comparison:
    """Return a comparison with its verdict, and with the reason if its interval alone would suggest another one."""
    if c.mechanism_only:
        return replace(c, verdict=MECHANISM_ONLY)
    if c.role in ("baseline", TWIN) and c.sets:
        return replace(c, verdict="baseline")
    if not c.sets or decision is None:
        return replace(c, verdict="no result" if c.status == "ok" else c.status)
    ratio, word, why = decision.estimate, decision.word, ""
    mine = (TWIN, c.family, c.baseline_id)
    twin = dict(next((t.logs for t in compared if (t.role, t.family, t.baseline_id) == mine), ()))
    repeated = [twin.get(set_id, math.nan) for set_id, _ in c.logs]
    # If the twin's interval excludes 1, both in the sets of the answer and in all sets so far, only effects larger than
    # its far end are accepted.
    apart = min(stats.estimate(logs).apart for logs in (repeated[: ratio.sets], repeated))
    if word in (stats.FASTER, stats.SLOWER) and max(ratio.value, 1 / ratio.value) <= apart:
        word, why = stats.INCONCLUSIVE, "no larger than what the repeated baseline differs by"
    elif word == stats.SAME and apart > 1 + c.resolution:
        word, why = stats.INCONCLUSIVE, "the repeated baseline differs by more"
    elif word == stats.INCONCLUSIVE and not ratio.contains(1):
        why = f"p = {decision.p:.2g}, and {100 * decision.level:.2g} % is needed"
    return replace(c, ratio=ratio, p=decision.p, level=decision.level, verdict=word, why=why)


def repeats_itself(looks: Sequence[RunRecord]) -> bool:
    """Return whether all twins of a machine agree with their baselines, tested together at a level of 1 %."""
    latest = {(r.experiment, r.baseline_id): (r.look or {}).get("log_ratios", {}).get(TWIN, []) for r in looks}
    return not stats.twins_differ([stats.estimate(logs).p for logs in latest.values() if len(logs) >= stats.LEAST_SETS])


def _by_baseline(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Group records by family and baseline, and rename families so that all names are different.

    Notes on configurations that have since been measured are dropped.
    """
    groups: dict[tuple[str, str], list[RunRecord]] = defaultdict(list)
    baselines: dict[str, dict[str, RunConfig]] = defaultdict(dict)
    measured = {(r.family, r.config.data_sha256, r.label) for r in records if r.role in ("baseline", "candidate")}
    for r in records:
        if r.role == "baseline":
            baselines[r.family][r.baseline_id] = r.config
    for r in records:
        known = baselines[r.family]
        if r.role != "note":
            groups[r.family, r.baseline_id].append(r)
        elif (r.family, r.config.data_sha256, r.label) not in measured:
            mine = r.baseline_id if r.baseline_id in known else next(reversed(known), r.baseline_id)
            groups[r.family, mine].append(r)
    named = []
    for (family, baseline_id), group in groups.items():
        known = baselines[family]
        words = _differences(known[baseline_id], next(iter(known.values()))) if baseline_id in known else ""
        named.append([replace(r, family=f"{family} ({words})") for r in group] if words else group)
    return named


def _differences(mine: RunConfig, other: RunConfig) -> str:
    """Return the settings that distinguish a baseline from another, such as "seed 3", with hashes shortened."""
    theirs = other.flat
    changed = [(name, v) for name, v in mine.flat.items() if name != "data" and theirs.get(name) != v]
    named = [("data", v[:8]) if name == "data_sha256" else (name, v) for name, v in changed]
    return ", ".join(f"{name.replace('.', ' ').replace('_', ' ')} {value}" for name, value in named)


def _compare_family(records: Sequence[RunRecord], resolution: float) -> list[Comparison]:
    """Return the comparisons of one family without verdicts: baseline, twin, candidates and notes, each in order."""
    groups: dict[tuple[str, str], list[RunRecord]] = defaultdict(list)
    for r in records:
        # Only its role distinguishes the twin from the baseline. A note may have no run of its own.
        groups[r.role, r.label if r.role == "note" else r.run_id].append(r)
    ordered = [group for _, group in sorted(groups.items(), key=lambda item: COMPARED.index(item[0][0]))]
    disturbed = crowded_sets(records)
    usable = [r for r in records if r.status == "ok" and not r.mechanism_only and r.set_id not in disturbed]
    by_role = {role: {r.set_id: r for r in usable if r.role == role and r.windows} for role in ("baseline", TWIN)}
    base = next((group[-1] for group in ordered if group[0].role == "baseline"), None)
    found = [_compare(group, by_role, base, disturbed, resolution) for group in ordered]
    noise: stats.Interval = next((c.ratio for c in found if c.role == TWIN), stats.Interval(value=1.0))
    return [replace(c, noise=noise) for c in found]


def _compare(
    group: Sequence[RunRecord],
    by_role: Mapping[str, Mapping[str, RunRecord]],
    base: RunRecord | None,
    disturbed: set[str],
    resolution: float,
) -> Comparison:
    last, mechanism_only = group[-1], any(r.mechanism_only for r in group)
    ok, failed = ([r for r in group if (r.status == "ok") == good] for good in (True, False))
    measured = [] if mechanism_only else [r for r in ok if r.windows]
    speed = [r for r in measured if r.set_id not in disturbed]
    logs = list[tuple[str, float]]()
    for r in speed if last.role != "baseline" else ():
        base_of_set, twin = (by_role[role].get(r.set_id) for role in ("baseline", TWIN))
        if base_of_set and twin:  # a set counts only if it has both
            log = set_log_ratio(base_of_set, r) if r.role == TWIN else set_log_ratio(base_of_set, r, twin)
            logs += [(r.set_id, log)] if math.isfinite(log) else []
    ratio = stats.estimate([log for _, log in logs])
    if last.role == "baseline" and speed:
        ratio = replace(ratio, value=1.0, sets=len(speed))
    rates = [1 / statistics.median(seconds) for r in speed or measured if (seconds := seconds_by_turn(r).values())]
    mine = {r.set_id for r in speed}
    members = [r for held in by_role.values() for set_id, r in held.items() if set_id in mine] + speed
    named = ("experiment", "family", "baseline_id", "role", "label", "run_id", "config", "code_version")
    return Comparison(
        **{name: getattr(last, name) for name in named},
        baseline=(base or last).config,
        baseline_label=base.label if base else "the baseline",
        primary=group[0].primary,  # as it was before it was measured, whatever a later call makes of it
        status="ok" if ok else last.status,
        reason=(failed[-1].reason if failed else last.reason) or "",
        failed_sets=len({r.set_id for r in failed}),
        disturbed_sets=len({r.set_id for r in measured} & disturbed),
        mechanism_only=mechanism_only,
        turns=max((r.plan.turns or len(r.windows) for r in measured), default=0),
        ratio=ratio,
        logs=tuple(logs),
        resolution=resolution,
        set_seconds=sum(sum(r.stages.values()) for r in members) / len(speed) if speed else math.nan,
        images_per_second=statistics.geometric_mean(rates) if rates else math.nan,
        peak_memory_bytes=max((peak(r, "peak_memory_bytes") for r in ok), default=math.nan),
        peak_rss_bytes=max((peak(r, "peak_rss_bytes") for r in ok), default=math.nan),
    )


def peak(record: RunRecord, kind: str) -> float:
    """Return the largest value over ranks of ``kind``, such as "peak_rss_bytes"; NaN if it is unknown for any rank."""
    peaks = [getattr(rank, kind) for rank in record.ranks]
    return float(max(peaks)) if peaks and None not in peaks else math.nan
