"""Which sets an experiment lacks, how many turns and sets answer a comparison best, and what fits into the time.

``between`` and ``within`` are standard deviations of one group's log time, from set to set and from turn to turn.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, fmean, variance

from ddpm_lab.config import RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure.held import Held, Members
from ddpm_lab.plan import LEAST_SETS, RESOLUTION, USUAL_TURNS, Experiment, Family, Plan
from ddpm_lab.record import TWIN, RunRecord, crowded, turn_log_ratios

PLACE_SECONDS = 3.0  # forecast for one configuration in one set, until one has been measured
TRIES = 2  # number of attempts in a run at something whose failure may be temporary

WITHIN, BETWEEN = 0.10, 0.03  # prior scatter within and between sets: windows of 0.2 s on a shared machine
PRIOR_SETS = 10  # weight of the prior scatter, in sets
RECENT_RECORDS = 100  # number of records of a machine that its scatter is estimated from
VARIANCE_OF_CANDIDATE, VARIANCE_OF_TWIN = 1.5, 2.0  # of log ratios to both baselines and between these; a group's is 1
LEAST_TURNS, MOST_TURNS = 4, 60  # fewer are not balanced, more take too long to repeat
WISHED_SETS = 6  # turns are limited so that time remains for this many sets, since fewer give wide intervals

Row = tuple[str, RunConfig]  # A candidate of a family and its label


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How much to measure: sets per comparison, cold compiles per compiled configuration, and until when.

    With ``seconds`` the time gives the sets, unless ``exact`` asks for just ``sets``; ``sets_to_come`` says from the
    log ratios so far how many are to come until they resolve ``resolution``, of at most ``sets``. ``decided``
    comparisons (run ids of baseline and configuration) get no more, nor does any that was shown without ``further``.
    """

    plan: Plan
    sets: int
    cold_compiles: int = 0
    exact: bool = False
    further: bool = True
    decided: Collection[tuple[str, str]] = ()
    resolution: float = RESOLUTION
    seconds: float = math.inf
    sets_to_come: Callable[[Sequence[float]], int] | None = None


class Shortfall:
    """What an experiment lacks by what is ``held``; once ``timed``, the time says how many sets there are."""

    def __init__(self, experiment: Experiment, target: Target, held: Held, ledger: Ledger, machine_key: str) -> None:
        self.experiment, self.target, self.held = experiment, target, held
        self.costs: dict[str, list[float]] = {}
        self.failed: Counter[str] = Counter()
        self.timed = False
        self._ledger, self._machine_key = ledger, machine_key

    @cached_property
    def scatter(self) -> tuple[float, float]:
        """Standard deviations of turns in a set and of sets, from the twins of this machine's latest quiet sets."""
        here = [r for r in self._ledger.read()[0] if r.machine.key == self._machine_key]
        sets: dict[str, Members] = defaultdict(dict)
        for r in [r for r in here if r.role in ("baseline", TWIN)][-RECENT_RECORDS:]:
            if r.windows:
                sets[r.set_id][r.role] = r
        pairs = [s for s in sets.values() if len(s) > 1 and not crowded(list(s.values()))]
        return variances([turn_log_ratios(s["baseline"], s[TWIN]) for s in pairs])

    def progress_of(self, family: Family, config: RunConfig) -> tuple[int, int]:
        """Sets of a comparison that count, and of these those that no answer shown so far rested on."""
        base = family.baseline.run_id
        if family.together:
            able = [c.run_id for _, c in family.candidates if not self.hopeless(c)]
            sets = self.held.sets(base, *able, family=family.name)
        else:
            sets = self.held.sets(base, config.run_id)
        return len(sets), len(sets.keys() - self.held.looked(base))

    def turns(self, family: Family) -> int:
        """Turns of a family's earlier sets, crowded ones too, which every further one has; 0 before the first."""
        found, compared = self.held.completed("candidate", TWIN, baseline_id=family.baseline.run_id), _members(family)
        return max((r.plan.turns for r in found if r.run_id in {c.run_id for _, c in compared}), default=0)

    def count_failures(self, records: Sequence[RunRecord]) -> None:
        """Note what failed in a set; what is unsupported, or finds no memory, is left to the next run."""
        for run_id, status in {(r.run_id, r.status) for r in records if r.status != "ok"}:
            self.failed[run_id] += TRIES if status in ("unsupported", "oom") else 1

    def hopeless(self, config: RunConfig) -> bool:
        """Whether a configuration is not tried again: its failure lasts, or this run has met it often enough."""
        return config.run_id in self.held.lasting or self.failed[config.run_id] >= TRIES

    def missing(self, family: Family, config: RunConfig) -> int:
        """Sets of a comparison still to come; where sets have all candidates, as many as any of these lacks."""
        if self.hopeless(config) or self.hopeless(family.baseline):
            return 0
        target, beside = self.target, [c for _, c in family.candidates if family.together and not self.hopeless(c)]
        pairs = [(family.baseline.run_id, c.run_id) for c in beside or [config]]
        have, new = self.progress_of(family, config)
        most = max(0, (1 if family.mechanism else target.sets) - have)
        if family.mechanism or target.exact:
            return most
        if target.sets_to_come:
            return min(most, max(target.sets_to_come(self.held.log_ratios(*pair)) for pair in pairs)) if most else 0
        decided = have > new and all(pair in target.decided for pair in pairs)
        looked = any(self.held.looked(f.baseline.run_id) for f in self.experiment.families)
        met = not target.further and looked and all(self.held.met(*pair) for pair in pairs)
        if decided or (met and not 0 < have < LEAST_SETS):
            return 0
        enough = target.sets
        if self.timed:  # what resolves the usual difference by the scatter of this machine; without candidates, a speed
            turns, effect = self.turns(family) or USUAL_TURNS, RESOLUTION
            if new >= LEAST_SETS and not family.together:  # whose candidates are compared with each other too
                effect = effect_to_resolve(self.held.log_ratios(*pairs[0]))
            enough = sets_that_resolve(effect, turns, *self.scatter) if family.candidates else LEAST_SETS
        return max(0, enough - new)

    def wanted(self, family: Family) -> list[Row]:
        """Candidates of the next set, which lack most; of a family without candidates the twin."""
        lacking = [(self.missing(family, c), label, c) for label, c in _members(family)]
        lacking.sort(key=lambda row: -row[0])
        # So that all end with equally many.
        least = 1 if self.target.sets_to_come else max(1, lacking[0][0])
        return [(label, c) for missing, label, c in lacking if missing >= least][: family.at_once]

    def sets_missing(self, families: Sequence[Family]) -> int:
        """About how many sets are to come."""
        counts = [(f, sorted((self.missing(f, c) for _, c in _members(f)), reverse=True)) for f in families]
        return sum(sum(missing[:: f.at_once]) for f, missing in counts)

    def next(self, families: Sequence[Family]) -> tuple[Family, list[Row]] | None:
        """The first family with the fewest new sets: all grow at one pace."""
        lacking = [(f, wanted) for f in families if (wanted := self.wanted(f))]
        return min(lacking, key=lambda job: min(self.progress_of(job[0], c)[1] for _, c in job[1]), default=None)

    def compiles(self, family: Family, config: RunConfig) -> int:
        """Compiles from empty caches that are missing."""
        if config.compile == "off" or self.hopeless(config) or family.mechanism:
            return 0
        return max(0, self.target.cold_compiles - self.held.cold_compiles(config.run_id))

    def set_seconds(self, family: Family, candidates: int) -> float:
        """Forecast of one set with so many candidates, by what the latest of its family took."""
        if family.name in self.costs:
            place = self.costs[family.name][-1]
        else:
            others = max((cost for costs in self.costs.values() for cost in costs), default=PLACE_SECONDS)
            place = self.held.place_seconds(family.baseline.run_id) or others
        return (candidates + 2) * place

    def forecast(self, families: Sequence[Family]) -> float:
        """Seconds of all sets that are to come."""
        return sum(self.sets_missing([f]) * self.set_seconds(f, min(len(f.candidates), f.at_once)) for f in families)

    def fit(
        self, families: Sequence[Family], seconds: float, fewest: int
    ) -> tuple[list[Family], list[tuple[Family, Row]]]:
        """Leave candidates out, the last first, until the least sets of others fit; ``fewest`` stay in a family."""
        families, left_out = list(families), list[tuple[Family, Row]]()
        while not (math.isinf(seconds) or self.target.exact):
            short = {f.name: self._short(f) for f in families}
            cut = [f for f in families if short[f.name] and len(f.candidates) > fewest]
            if not cut or self.least_seconds(families) <= seconds:
                break
            longest = max(reversed(cut), key=lambda f: len(short[f.name]))
            row = short[longest.name][-1][1]
            left_out.append((longest, row))
            kept = tuple(other for other in longest.candidates if other != row)
            place = families.index(longest)
            families[place : place + 1] = [dataclasses.replace(longest, candidates=kept)] if kept else []
        return families, left_out

    def least_seconds(self, families: Sequence[Family]) -> float:
        """Forecast of the least sets that families still lack."""
        lacking = [(f, short) for f in families if (short := self._short(f))]
        return sum(max(lack for lack, _ in short) * self.set_seconds(f, len(short)) for f, short in lacking)

    def _short(self, family: Family) -> list[tuple[int, Row]]:
        """Candidates that still get sets and have fewer than the least, with how many they lack."""
        least = 1 if family.mechanism else LEAST_SETS
        rows = [(least - self.progress_of(family, row[1])[0], row) for row in family.candidates]
        return [(lack, row) for lack, row in rows if lack > 0 and self.missing(family, row[1])]


def _members(family: Family) -> Sequence[Row]:
    """The candidates; of a family without any the baseline, which is compared with its twin."""
    return family.candidates or ((family.baseline_label, family.baseline),)


def variances(twins: Sequence[Sequence[float]]) -> tuple[float, float]:
    """``within`` and ``between`` of a machine: one-way random effects, by moments (Searle, Variance Components, 1992).

    ``twins`` are each set's log ratios of baseline and twin by turn, whose true mean is zero: the mean of T turns has
    the variance 2 (B + W / T). What is assumed counts as ``PRIOR_SETS`` sets more; sets of one turn say nothing.
    """
    known = [turns for turns in twins if len(turns) > 1]
    within = PRIOR_SETS * WITHIN**2 + sum((len(v) - 1) * variance(v) for v in known) / VARIANCE_OF_TWIN
    between = PRIOR_SETS * BETWEEN**2 + sum(fmean(v) ** 2 - variance(v) / len(v) for v in known) / VARIANCE_OF_TWIN
    turns = sum(len(v) - 1 for v in known)
    return math.sqrt(within / (PRIOR_SETS + turns)), math.sqrt(max(0.0, between / (PRIOR_SETS + len(known))))


def best_turns(
    start_seconds: float, turn_seconds: float, within: float, between: float, seconds: float = math.inf
) -> int:
    """Turns that narrow an interval most for the time (Cochran, Sampling Techniques, two-stage sampling).

    sqrt(start / turn) * within / between; fewer where ``seconds`` would not be enough for ``WISHED_SETS`` sets.
    """
    best = math.sqrt(start_seconds / turn_seconds) * within / between if between else MOST_TURNS
    room = (seconds / WISHED_SETS - start_seconds) / turn_seconds
    return max(LEAST_TURNS, int(min(round(best), MOST_TURNS, room)))


def effect_to_resolve(log_ratios: Sequence[float]) -> float:
    """The relative difference that sets are to resolve: the usual one, or a quarter of the one that they found so far.

    A large difference is known well enough sooner: the rest of the time is for other comparisons.
    """
    return max(RESOLUTION, abs(fmean(log_ratios)) / 4)


def sets_that_resolve(effect: float, turns: int, within: float, between: float) -> int:
    """Sets whose expected 95 % interval answers for this relative difference whatever the truth is.

    It then either excludes 1 or lies within 1 / (1 + effect) to 1 + effect: half of its width is half of the effect.
    Student's t widens the interval of n sets about as if there were 2.4 fewer.
    """
    error = NormalDist().inv_cdf(0.975) * math.sqrt(VARIANCE_OF_CANDIDATE * (between**2 + within**2 / turns))
    return max(LEAST_SETS, math.ceil(2.4 + (2 * error / math.log1p(effect)) ** 2))
