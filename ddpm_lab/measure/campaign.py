"""Measure what an experiment still lacks: which sets are missing, in which order, and what fits into the time.

Every set is appended to the ledger when it is complete, so that a run can be killed at any moment and goes on where it
stopped, at the cost of one unfinished set.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpm_lab.config import CHECK, RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import wrong_ways
from ddpm_lab.measure.gradients import compare_gradients
from ddpm_lab.measure.hardware import environment
from ddpm_lab.measure.held import held_of
from ddpm_lab.measure.largest_batch import largest_batch, search_ended
from ddpm_lab.measure.progress import Progress, lost
from ddpm_lab.measure.seat import Instrument, Member
from ddpm_lab.measure.sets import Work, measure_alone, measure_set, profile_alone, warm_up_alone
from ddpm_lab.measure.trial import work_of
from ddpm_lab.measure.trials import COMPILE_SECONDS, Trials, short_of
from ddpm_lab.plan import Experiment, Family, Plan, Trial
from ddpm_lab.record import RunRecord

SETS_FOR_A_VERDICT = 6
PLACE_SECONDS = 5.0
"""Forecast for one configuration in one set, until the first has shown better."""
SEARCH_SECONDS = 60.0
TRIES = 2
"""A failure that may pass is met so often before a run leaves it to the next run."""
_WRONG = ("wrong", wrong_ways.run_wrong_ways)
_CHECKS: dict[str, tuple[str, Work]] = {CHECK: ("check", compare_gradients), wrong_ways.WORKLOAD: _WRONG}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How much to measure: sets per comparison, cold compiles per compiled configuration, and until when.

    With ``sets_to_come`` the number of sets is not planned: it says from the log ratios so far how many sets are still
    to come until they resolve what was asked for, and ``sets`` is the most.
    """

    plan: Plan
    sets: int
    cold_compiles: int
    seconds: float | None = None
    sets_to_come: Callable[[Sequence[float]], int] | None = None


class Campaign:
    """The measuring of one experiment; ``measured_sets`` counts what it added to the ledger."""

    def __init__(
        self,
        experiment: Experiment,
        target: Target,
        instrument: Instrument,
        ledger: Ledger,
        traces: Path,
        *,
        trials: Instrument | None = None,
    ) -> None:
        self.experiment, self.target, self.instrument = experiment, target, instrument
        self.for_trials = trials or instrument
        self.ledger, self.traces = ledger, traces
        self.machine_key = environment().machine.key
        codes = (instrument.code.key, self.for_trials.code.key)
        self.held = held_of(ledger, experiment, target.plan, machine_key=self.machine_key, codes=codes)
        self.trials = Trials(experiment.trials, self.held)
        self.measured_sets = 0
        self.begun = time.monotonic()
        self.costs: dict[str, list[float]] = {}
        self.failed: Counter[str] = Counter()

    def run(self, progress: Progress) -> None:
        """Measure what is missing, as far as the time allows; the budget begins to count now."""
        self.begun = time.monotonic()
        self._note_left_out()
        for check in self.experiment.checks:
            if not self.held.checked(check.config.run_id):
                role, work = _CHECKS[check.config.workload]
                member = Member(role, check.label, check.config)
                whose = {"baseline_id": check.baseline.run_id, "code_version": self.instrument.code.key}  # of the sets
                self._alone(check.family, member, work=work, by=self.for_trials, **whose)
        for family_label, label, config in self.experiment.profiles:
            self._profile(family_label, label, config, progress)
        for family in self.experiment.families:
            for label, config in family.candidates:
                self._cold_compiles(family, label, config, progress)
        families = [self._within_memory(family, progress) for family in self.experiment.families]
        total, done, fitted = self._sets_missing(families), 0, False
        while job := self._next(families):
            family, candidates = job
            left = self.seconds_left()
            if left is not None and left < self._set_seconds(family, len(candidates)) and done:
                break
            forecast = self._forecast(families)
            progress.prefix = f"set {done + 1} of {max(total, done + 1)},"
            progress.expect(forecast if left is None else min(forecast, left))
            progress.always(f"{family.name}: starting")
            records, done = self.measure(family, candidates), done + 1
            if told := lost(records, self._hopeless):
                progress.stay(told)
                total = done + self._sets_missing(families)
            # What fits is decided once, when the cost of every family is known.
            known = (f.name in self.costs or f.last or not self._wanted(f) for f in families)
            if left is not None and not fitted and all(known):
                families, fitted = self._fit(families), True
                total = done + self._sets_missing(families)
        self._train(families, progress)
        if unfinished := self._sets_missing(families):
            progress.done(f"{unfinished} set{'s' if unfinished > 1 else ''} did not fit into the time")

    def seconds_left(self) -> float | None:
        """Seconds of the budget that are left, or None without one."""
        return None if self.target.seconds is None else self.target.seconds - (time.monotonic() - self.begun)

    def forecast(self) -> float:
        """Seconds that all that is missing will take, from what earlier sets took where there are any."""
        compiles = sum(
            self._compiles_missing(f, c)
            for f in self.experiment.families
            for _, c in f.candidates
            if c.compile != "off"
        )
        profiles = sum(not self.held.profiled(c.run_id) for _, _, c in self.experiment.profiles)
        searches = sum(
            bool(f.search_up_to) and not search_ended(self.held.searched, f.baseline) for f in self.experiment.families
        )
        trials = self.trials.seconds(self.trials.missing())
        alone = compiles * COMPILE_SECONDS + profiles * PLACE_SECONDS + searches * SEARCH_SECONDS + trials
        return self._forecast(list(self.experiment.families)) + alone

    # What the ledger lacks

    def _hopeless(self, config: RunConfig) -> bool:
        """Whether a configuration is not tried again: its failure lasts, or this run has met it often enough."""
        return config.run_id in self.held.lasting or self.failed[config.run_id] >= TRIES

    def _missing(self, family: Family, config: RunConfig, least: int | None = None) -> int:
        """Sets still to come; with ``least``, until there are so many."""
        if self._hopeless(config) or self._hopeless(family.baseline):
            return 0
        wanted = 1 if family.mechanism else self.target.sets
        if family.together:
            able = [c.run_id for _, c in family.candidates if not self._hopeless(c)]
            have = self.held.sets_together(family.name, family.baseline.run_id, able)
        else:
            have = self.held.sets(family.baseline.run_id, config.run_id)
        missing = max(0, (wanted if least is None else min(least, wanted)) - have)
        if least is None and missing and self.target.sets_to_come and not family.mechanism:
            return min(missing, self.target.sets_to_come(self.held.log_ratios(family.baseline.run_id, config.run_id)))
        return missing

    def _wanted(self, family: Family) -> list[tuple[str, RunConfig]]:
        """Candidates that lack sets; of a family without candidates the twin."""
        members = family.candidates or ((family.baseline_label, family.baseline),)
        lacking = [(self._missing(family, c), label, c) for label, c in members]
        most = max(missing for missing, _, _ in lacking)
        if self.target.sets_to_come is None:
            # Those that lack most come first, so that all end with equally many.
            lacking = [row for row in lacking if row[0] == most]
        lacking.sort(key=lambda row: -row[0])
        return [(label, c) for missing, label, c in lacking if missing][: family.at_once]

    def _sets_missing(self, families: Sequence[Family], least: int | None = None) -> int:
        """About how many sets are to come."""
        total = 0
        for family in families:
            members = family.candidates or ((family.baseline_label, family.baseline),)
            counts = sorted((self._missing(family, c, least) for _, c in members), reverse=True)
            total += sum(counts[:: family.at_once])
        return total

    def _next(self, families: Sequence[Family]) -> tuple[Family, list[tuple[str, RunConfig]]] | None:
        """The first family that lacks most sets, so that all grow at one pace; those measured last after all others."""
        lacking = [(f, wanted) for f in families if (wanted := self._wanted(f))]
        return min(lacking, key=lambda job: (job[0].last, -self._missing(job[0], job[1][0][1])), default=None)

    # How long it takes

    def _set_seconds(self, family: Family, candidates: int) -> float:
        places = candidates + 2
        if family.name in self.costs:
            return places * self.costs[family.name][-1]
        known = [cost for costs in self.costs.values() for cost in costs]
        seen = self.held.place_seconds(family.baseline.run_id)
        return places * (max(known, default=PLACE_SECONDS) if seen is None else seen)

    def _forecast(self, families: Sequence[Family]) -> float:
        return sum(self._sets_missing([f]) * self._set_seconds(f, min(len(f.candidates), f.at_once)) for f in families)

    def _fit(self, families: list[Family]) -> list[Family]:
        """Leave candidates out, the last ones first, until six sets fit into the time or each family has one left."""
        while True:
            left = self.seconds_left() or 0.0
            due = [f for f in families if not f.last]
            need = sum(
                self._sets_missing([f], SETS_FOR_A_VERDICT) * self._set_seconds(f, len(f.candidates)) for f in due
            )
            longest = max(due, key=lambda f: len(f.candidates), default=None)
            if need <= left or longest is None or len(longest.candidates) < 2:
                return families
            (label, config), kept = longest.candidates[-1], longest.candidates[:-1]
            self._note(longest.name, label, config, longest.baseline, "did not fit into the time that was given")
            families[families.index(longest)] = dataclasses.replace(longest, candidates=kept)

    # Doing it

    def _append(self, records: list[RunRecord], by: Instrument | None = None) -> None:
        (by or self.instrument).code.check_unchanged()
        self.ledger.append(records)
        self.held.add(records)

    def measure(self, family: Family, candidates: Sequence[tuple[str, RunConfig]]) -> list[RunRecord]:
        """Measure one set of a family and append its records, which it returns."""
        members = [
            Member("baseline", family.baseline_label, family.baseline),
            Member("twin", f"{family.baseline_label} again", family.baseline),
            *(Member("candidate", label, c) for label, c in candidates if c.run_id != family.baseline.run_id),
        ]
        begun = time.monotonic()
        records = measure_set(
            self.instrument,
            experiment=self.experiment.name,
            family=family.name,
            plan=self.target.plan,
            members=members,
        )
        self._append(records)
        self.measured_sets += 1
        self.costs.setdefault(family.name, []).append((time.monotonic() - begun) / len(members))
        self._count_failures(records)
        return records

    def _count_failures(self, records: Sequence[RunRecord]) -> None:
        """A crash or a hang may pass and is tried again at once; what is not supported is left to the next run."""
        for run_id, status in {(r.run_id, r.status) for r in records if r.status != "ok"}:
            self.failed[run_id] += TRIES if status == "unsupported" else 1

    def _alone(
        self, family: str, member: Member, *, work: Work = warm_up_alone, by: Instrument | None = None, **told: str
    ) -> RunRecord:
        """Measure one group on its own and append its record, with the fields that only the experiment can tell."""
        record = measure_alone(
            by or self.instrument,
            experiment=self.experiment.name,
            family=family,
            plan=self.target.plan,
            member=member,
            work=work,
        )
        self._append([record := dataclasses.replace(record, **told)], by)  # type: ignore[arg-type]
        self.measured_sets += 1
        return record

    def _train(self, families: Sequence[Family], progress: Progress) -> None:
        """Train for quality what has a speed, as far as the time allows."""
        compared = [c for f in families if f.candidates for c in (f.baseline, *(c for _, c in f.candidates))]
        wanted = self.trials.of({c.run_id for c in compared if not self._hopeless(c)})

        def train(trial: Trial) -> None:
            member, told = Member("quality", trial.label, trial.config), {"baseline_id": trial.baseline.run_id}
            self._alone(trial.family, member, work=work_of(trial), by=self.for_trials, **told)

        left = self.trials.run(self.trials.missing(wanted), progress, self.seconds_left, train)
        for trial, reason in (*self.trials.unsound(wanted), *short_of(wanted, left)):
            self._note(trial.family, trial.label, trial.config, trial.baseline, reason)

    def _profile(self, family: str, label: str, config: RunConfig, progress: Progress) -> None:
        if self.held.profiled(config.run_id):
            return
        progress.prefix = ""
        stem = f"{self.experiment.name}-{config.run_id}"
        self.traces.mkdir(parents=True, exist_ok=True)
        traces = [self.traces / f"{stem}-rank{rank}.json.gz" for rank in range(config.world_size)]
        self._alone(family, Member("profile", label, config), work=profile_alone(traces))

    def _compiles_missing(self, family: Family, config: RunConfig) -> int:
        if self._hopeless(config) or family.mechanism:
            return 0
        return max(0, self.target.cold_compiles - self.held.cold_compiles(config.run_id))

    def _cold_compiles(self, family: Family, label: str, config: RunConfig, progress: Progress) -> None:
        """Compile from empty caches, alone: a cost of its own, and it fills the cache that the sets start from."""
        if config.compile == "off":
            return
        missing = self._compiles_missing(family, config)
        for i in range(missing):
            progress.prefix = f"cold compile {i + 1} of {missing};"
            record = self._alone(family.name, Member("cold", label, config), baseline_id=family.baseline.run_id)
            if record.status != "ok":
                self.failed[config.run_id] = TRIES  # a compile is long: it is not repeated within a run
                return

    def _within_memory(self, family: Family, progress: Progress) -> Family:
        """The family without candidates that do not fit, once the largest batch that does has been searched, alone."""
        if not family.search_up_to:
            return family
        progress.prefix = "the largest batch that fits;"

        def attempt(member: Member) -> RunRecord:
            # It belongs to every family that does this work, whatever sizes that compares.
            return self._alone(family.name, member, set_id="", baseline_id="")

        known = search_ended(self.held.searched, family.baseline)
        ended = largest_batch(family, self.held.searched, attempt, self.seconds_left)
        if ended is None:
            return family
        if known is None or (known.run_id, known.label) != (ended.run_id, ended.label):
            self._append([ended])
        largest = ended.config.global_batch_size if ended.status == "ok" else 0
        reason = f"larger than {largest:,}, where the search ended"
        for label, config in family.candidates:
            if config.global_batch_size > largest:
                self._note(family.name, label, config, family.baseline, reason)
        kept = tuple(row for row in family.candidates if row[1].global_batch_size <= largest)
        return dataclasses.replace(family, candidates=kept)

    def _note_left_out(self) -> None:
        for family_label, label, reason in self.experiment.left_out:
            family = next((f for f in self.experiment.families if f.name == family_label), None)
            baseline = family.baseline if family else self.experiment.configurations[0]
            self._note(family_label, label, None, baseline, reason)

    def _note(self, family: str, label: str, config: RunConfig | None, baseline: RunConfig, reason: str) -> None:
        """A row for what is not measured, once. Without a configuration of its own it carries the baseline's."""
        record = RunRecord(
            set_id="",
            experiment=self.experiment.name,
            family=family,
            role="note",
            label=label,
            config=config or baseline,
            baseline_id=baseline.run_id,
            plan=self.target.plan,
            environment=environment(),
            code_version=self.instrument.code.key,
            data_name=self.instrument.data_name,
            status="left out",
            reason=reason,
        )
        if not self.held.noted(record):
            self._append([record])
