"""Which sets an experiment lacks, in which order they are measured, how long they take, and what fits into the time."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import turn_plan
from ddpm_lab.measure.held import Held
from ddpm_lab.plan import USUAL_TURNS, Experiment, Family, Plan
from ddpm_lab.record import RunRecord

LEAST_SETS = 4
"""Fewer sets give no verdict."""
PLACE_SECONDS = 3.0
"""Forecast for one configuration in one set, until the first has shown better."""
RESOLUTION = 0.03
"""The smallest relative difference that a comparison is asked to find, unless another is given."""
TRIES = 2
"""A failure that may pass is met so often before a run leaves it to the next run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How much to measure: sets per comparison, cold compiles per compiled configuration, and until when.

    With ``seconds`` a comparison has as many sets as its time gives, unless ``exact`` asks for just ``sets``. With
    ``sets_to_come`` the number of sets is not planned: it says from the log ratios so far how many sets are still to
    come until they resolve ``resolution``, and ``sets`` is the most. ``decided`` are comparisons, each the run ids of
    baseline and configuration, that have an answer which was shown: they get no more sets, and nor does any other
    without ``further``.
    """

    plan: Plan
    sets: int
    cold_compiles: int
    exact: bool = False
    further: bool = True
    decided: Collection[tuple[str, str]] = ()
    resolution: float = RESOLUTION
    seconds: float | None = None
    sets_to_come: Callable[[Sequence[float]], int] | None = None


class Shortfall:
    """What an experiment lacks by what is ``held``; ``costs`` are seconds of a configuration in each set of a family.

    ``scatter`` finds the standard deviations of turns within a set and of sets on this machine.
    """

    def __init__(
        self, experiment: Experiment, target: Target, held: Held, scatter: Callable[[], tuple[float, float]]
    ) -> None:
        self.experiment, self.target, self.held, self.scatter = experiment, target, held, scatter
        self.costs: dict[str, list[float]] = {}
        self.failed: Counter[str] = Counter()
        self.planned: dict[str, int] = {}
        """Sets of each family beyond those that an answer rested on before."""

    def plan_sets(self, families: Sequence[Family], seconds: float) -> None:
        """Plan as many sets of each family as ``seconds`` give: the same number for all, and at least the least."""
        if math.isinf(seconds) or not self._by_time:
            return
        rows = [
            (f, [self.progress_of(f, c)[1] for _, c in _members(f) if not self.closed(f, c)], self.enough(f))
            for f in families
        ]
        planned = LEAST_SETS
        while planned < max((enough for _, new, enough in rows if new), default=0):
            if sum(self.seconds_until(f, new, min(planned + 1, enough)) for f, new, enough in rows) > seconds:
                break
            planned += 1
        self.planned |= {f.name: min(planned, enough) for f, _, enough in rows}

    @property
    def _by_time(self) -> bool:
        return not (self.target.exact or self.target.sets_to_come)

    def progress_of(self, family: Family, config: RunConfig) -> tuple[int, int]:
        """Sets of a comparison that count, and of these those that no answer shown so far rested on."""
        base = family.baseline.run_id
        if family.together:
            able = [c.run_id for _, c in family.candidates if not self.hopeless(c)]
            sets = self.held.sets(base, *able, family=family.name)
        else:
            sets = self.held.sets(base, config.run_id)
        return len(sets), len(sets.keys() - self.held.looked(base))

    def enough(self, family: Family) -> int:
        """Sets that resolve the usual difference by the scatter of this machine: more are not worth their time.

        What compares nothing needs the least.
        """
        if not family.candidates:
            return LEAST_SETS
        turns = max((self.held.turns(family.baseline.run_id, c.run_id) for _, c in family.candidates), default=0)
        within, between = self.scatter()
        return turn_plan.sets_that_resolve(RESOLUTION, turns or USUAL_TURNS, within, between)

    def plan_of(self, family: Family, candidates: Sequence[tuple[str, RunConfig]]) -> Plan:
        """The plan of a set, with the turns of the earlier ones of the same comparison, else of others beside it."""
        base = family.baseline.run_id
        turns = max(self.held.turns(base, c.run_id) for _, c in candidates)
        turns = turns or max(self.held.turns(base, c.run_id) for _, c in _members(family))
        return dataclasses.replace(self.target.plan, turns=turns) if turns else self.target.plan

    def count_failures(self, records: Sequence[RunRecord]) -> None:
        """A crash or a hang may pass and is tried again at once; what is not supported is left to the next run."""
        for run_id, status in {(r.run_id, r.status) for r in records if r.status != "ok"}:
            self.failed[run_id] += TRIES if status == "unsupported" else 1

    def hopeless(self, config: RunConfig) -> bool:
        """Whether a configuration is not tried again: its failure lasts, or this run has met it often enough."""
        return config.run_id in self.held.lasting or self.failed[config.run_id] >= TRIES

    def closed(self, family: Family, config: RunConfig) -> bool:
        """Whether a comparison gets no more sets, whatever time there is.

        Without ``further`` also where no set of it is held: an answer that was shown told why.
        """
        if self.hopeless(config) or self.hopeless(family.baseline):
            return True
        have, new = self.progress_of(family, config)
        if family.mechanism or not self._by_time:
            return family.mechanism and have > 0
        if have > new and (family.baseline.run_id, config.run_id) in self.target.decided:
            return True
        looked = any(self.held.looked(f.baseline.run_id) for f in self.experiment.families)
        return not self.target.further and looked and self.held.met(family.baseline.run_id, config.run_id)

    def missing(self, family: Family, config: RunConfig) -> int:
        """Sets still to come."""
        if self.closed(family, config):
            return 0
        have, new = self.progress_of(family, config)
        if family.mechanism:
            return 1
        if self._by_time:
            return max(0, self.planned.get(family.name, self.target.sets) - new)
        missing = max(0, self.target.sets - have)
        if missing and self.target.sets_to_come:
            return min(missing, self.target.sets_to_come(self.held.log_ratios(family.baseline.run_id, config.run_id)))
        return missing

    def wanted(self, family: Family) -> list[tuple[str, RunConfig]]:
        """Candidates that lack sets; of a family without candidates the twin."""
        lacking = [(self.missing(family, c), label, c) for label, c in _members(family)]
        most = max(missing for missing, _, _ in lacking)
        if self.target.sets_to_come is None:
            # Those that lack most come first, so that all end with equally many.
            lacking = [row for row in lacking if row[0] == most]
        lacking.sort(key=lambda row: -row[0])
        return [(label, c) for missing, label, c in lacking if missing][: family.at_once]

    def sets_missing(self, families: Sequence[Family]) -> int:
        """About how many sets are to come."""
        total = 0
        for family in families:
            counts = sorted((self.missing(family, c) for _, c in _members(family)), reverse=True)
            total += sum(counts[:: family.at_once])
        return total

    def next(self, families: Sequence[Family]) -> tuple[Family, list[tuple[str, RunConfig]]] | None:
        """The first family that lacks most sets, so that all grow at one pace."""
        lacking = [(f, wanted) for f in families if (wanted := self.wanted(f))]
        return max(lacking, key=lambda job: self.missing(job[0], job[1][0][1]), default=None)

    def compiles(self, family: Family, config: RunConfig) -> int:
        """Compiles from empty caches that are missing."""
        if self.hopeless(config) or family.mechanism:
            return 0
        return max(0, self.target.cold_compiles - self.held.cold_compiles(config.run_id))

    def set_seconds(self, family: Family, candidates: int) -> float:
        """Forecast of one set with so many candidates, by what the latest of its family took."""
        places = candidates + 2
        if family.name in self.costs:
            return places * self.costs[family.name][-1]
        known = [cost for costs in self.costs.values() for cost in costs]
        seen = self.held.place_seconds(family.baseline.run_id)
        return places * (max(known, default=PLACE_SECONDS) if seen is None else seen)

    def seconds_until(self, family: Family, have: Sequence[int], wanted: int) -> float:
        """Seconds until each of some comparisons, which ``have`` so many sets, has as many as are ``wanted``."""
        lacks = sorted((wanted - sets for sets in have if sets < wanted), reverse=True)
        groups = [lacks[i : i + family.at_once] for i in range(0, len(lacks), family.at_once)]
        return sum(group[0] * self.set_seconds(family, len(group)) for group in groups)

    def forecast(self, families: Sequence[Family]) -> float:
        """Seconds of all sets that are to come."""
        return sum(self.sets_missing([f]) * self.set_seconds(f, min(len(f.candidates), f.at_once)) for f in families)

    def fit(
        self, families: Sequence[Family], seconds: float, fewest: int
    ) -> tuple[list[Family], list[tuple[Family, str, RunConfig]]]:
        """Leave candidates out, the last ones first, until the least sets of all others fit into the time.

        ``fewest`` candidates stay in each family that had some. Returns what stays and what does not.
        """
        families, left_out = list(families), list[tuple[Family, str, RunConfig]]()
        while not (math.isinf(seconds) or self.target.exact):
            short = {f.name: self._short(f) for f in families}
            need = sum(
                self.seconds_until(f, [self.progress_of(f, c)[0] for _, c in short[f.name]], _least_sets(f))
                for f in families
            )
            cut = [f for f in families if short[f.name] and len(f.candidates) > fewest]
            if need <= seconds or not cut:
                break
            longest = max(reversed(cut), key=lambda f: len(short[f.name]))
            label, config = short[longest.name][-1]
            left_out.append((longest, label, config))
            kept = tuple(row for row in longest.candidates if row != (label, config))
            place = families.index(longest)
            families[place : place + 1] = [dataclasses.replace(longest, candidates=kept)] if kept else []
        return families, left_out

    def _short(self, family: Family) -> list[tuple[str, RunConfig]]:
        """Candidates that still get sets and have fewer than the least."""
        least = _least_sets(family)
        return [
            (label, c)
            for label, c in family.candidates
            if self.progress_of(family, c)[0] < least and not self.closed(family, c)
        ]


def _least_sets(family: Family) -> int:
    return 1 if family.mechanism else LEAST_SETS


def _members(family: Family) -> Sequence[tuple[str, RunConfig]]:
    """The candidates; of a family without any the baseline, which is compared with its twin."""
    return family.candidates or ((family.baseline_label, family.baseline),)
