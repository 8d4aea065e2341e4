"""Measure the missing sets of an experiment, in order, as far as they fit into the time.

Each set is appended to the ledger when it is complete, so a run that is killed loses at most one unfinished set.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, Interrupted
from ddpm_lab.config import CHECK, RunConfig
from ddpm_lab.files import LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import alone, hardware, shortfall
from ddpm_lab.measure.others import free_cores, measuring
from ddpm_lab.measure.sets import Instrument, Member, Slot, Work, measure_alone, measure_set
from ddpm_lab.measure.shortfall import COMPILE_SECONDS, PLACE_SECONDS, TRIES, Row, Shortfall, Target, held_of
from ddpm_lab.plan import LEAST_SETS, NOT_TRAINED, OTHERS, PRIMARY, STAGES, Experiment, Family, by_stage
from ddpm_lab.record import Cohort, RunRecord, crowded

PRIMARY_PART = 0.6  # share of a question's time for its primary comparison, if there are others
TRIALS_PART = 0.5  # largest share of the time that sets leave to the trials that are to come
OVERRUN = 1.5  # a primary comparison may take this many times its share to reach LEAST_SETS
SEARCH_SECONDS = 60.0  # forecast for a search of the largest batch
NO_TIME = "did not fit into the time"
OnCores = Callable[[int], "Campaign"] | None
_CHECKS: dict[str, tuple[str, Work]] = {
    CHECK: ("check", alone.compare_gradients),
    alone.WORKLOAD: ("wrong", alone.run_wrong_ways),
}
"""Role and work of each kind of check, by workload."""


class Campaign:
    """A validated experiment that is ready to be measured. ``target`` says how much, and ``instrument`` how.

    Records are appended to the ledger in the folder ``output``, next to which traces of profiles are saved. ``held``
    has the records of the ledger, old and new, and ``lacks`` what is still missing. ``measured_sets`` counts new sets,
    including those of a first attempt with more cores. ``crowded_out`` means that the machine was too busy for all
    threads. ``on_cores`` plans the same question for a given number of cores; None if the user chose that number.
    """

    def __init__(
        self, experiment: Experiment, target: Target, instrument: Instrument, output: Path, on_cores: OnCores = None
    ) -> None:
        self.experiment, self.target, self.instrument = experiment, target, instrument
        self.output, self.progress, self.on_cores = output, instrument.progress, on_cores
        self.ledger = Ledger(output / LEDGER)
        self.machine_key = hardware.environment().machine.key
        few = target.sets < LEAST_SETS  # no verdict is given
        held = {"machine_key": self.machine_key, "code": instrument.code.key}
        self.held = held_of(self.ledger, experiment, target.plan, disturbed=few, **held)
        self.lacks = Shortfall(experiment, target, self.held, self.ledger, self.machine_key)
        self.measured_sets = 0
        self.crowded_out = False
        self.begun = time.monotonic()
        self._stage_ends, self._stage_families = math.inf, 1

    @property
    def cohort(self) -> Cohort:
        """Machine, code version, data and plan of the records; for data of several image sizes, the first."""
        data = self.experiment.configurations[0].data_sha256
        return (self.machine_key, self.instrument.code.key, data, self.target.plan.key)

    def renewed(self, experiment: Experiment | None = None, **changes: Any) -> "Campaign":
        """Return a copy with the ledger read again, for another experiment if given, and ``changes`` of the target."""
        asked, target = experiment or self.experiment, replace(self.target, **changes)
        return Campaign(asked, target, self.instrument, self.output, self.on_cores)

    def measure(
        self, *, seconds: float | None = None, stages: Sequence[str] = STAGES, look: bool = True, yields: bool = False
    ) -> "Campaign":
        """Measure what the ledger lacks, in ``seconds`` or the planned time, when no other process measures here.

        Returns the campaign that was measured, which uses fewer cores if the machine was too busy for all of them. For
        ``look`` and ``yields``, see ``run``.
        """
        if seconds is None and self.target.seconds == 0:  # a page of a report, which has measured everything already
            if look:
                self.look()
            return self
        made = self
        with measuring(self.progress.always) as waited:
            if waited or seconds is not None:
                made = self.renewed(seconds=self.target.seconds if seconds is None else seconds)
            try:
                made.run(stages=stages, look=look, yields=yields)
            except KeyboardInterrupt as stopped:
                if not self.progress.in_notebook:  # the command line prints its own message
                    raise
                most = made.measured_sets + made.lacks.sets_missing(made.experiment.families)
                raise Interrupted(f"{made.measured_sets} of {most} sets kept; run the cell again") from stopped
            if made.crowded_out and (again := made._on_free_cores()):
                # An answer is worth exceeding the time.
                left = max(made.seconds_left(), (OVERRUN - 1) * made.target.seconds)
                measured = again.measure(seconds=left, stages=stages, look=look)
                measured.measured_sets += made.measured_sets
                return measured
        count = made.measured_sets
        self.progress.done(f"measured {count} set{'s' * (count != 1)} now" if count else "all is measured")
        return made

    def _on_free_cores(self) -> "Campaign | None":
        """Return a campaign for the cores that other processes leave free; None if they are too few or were chosen."""
        config = self.experiment.configurations[0]
        cores = config.rank_threads(hardware.usable_cores()) * config.node_size
        if self.on_cores is None or cores == 1:
            return None
        # Use fewer cores in any case: load that is too small to count as a busy core can still disturb a set.
        free = min(free_cores(), cores - 1)
        self.progress.stay(f"too busy: trying {free} of {cores} cores instead")
        try:
            return self.on_cores(free)
        except ConfigError as error:
            self.progress.stay(str(error))
            return None

    def run(self, *, stages: Sequence[str] = STAGES, look: bool = True, yields: bool = False) -> None:
        """Measure what is missing, as far as the time from now allows. ``look`` records that results are shown.

        With ``yields``, a primary comparison whose ``LEAST_SETS`` do not fit stops after one set, to save time.
        """
        self.begun = time.monotonic()
        families = self._before_sets()
        primary, others = by_stage(families)
        if PRIMARY in stages:
            share = PRIMARY_PART if others and OTHERS in stages else 1.0
            self._measure_stage(primary, share, needed=True, trains=OTHERS in stages, yields=yields)
        if self.crowded_out:
            return  # it is measured again with fewer cores
        if OTHERS in stages:
            self._measure_stage(others, 1.0, needed=False, trains=True)
            self._train(families)
        if look:
            self.look()

    def seconds_left(self) -> float:
        """Return the remaining seconds of the budget; infinite without one."""
        return self.target.seconds - (time.monotonic() - self.begun)

    def missing(self) -> bool:
        """Return whether anything remains to be measured, or any results to be shown."""
        families = self.experiment.families
        new = any(self.held.sets(f.baseline.run_id).keys() - self.held.looked(f.baseline.run_id) for f in families)
        singles = [*self._singles(), *self.held.trials_to_come(self.experiment.trials)]
        return bool((new and self.target.sets >= LEAST_SETS) or self.lacks.sets_missing(families) or singles)

    def least_seconds(self) -> float:
        """Return the forecast for the primary comparison to reach ``LEAST_SETS``; 0 if the machine was too busy."""
        return 0.0 if self.crowded_out else self.lacks.least_seconds(by_stage(self.experiment.families)[0])

    def compiling_seconds(self) -> float:
        """Return the forecast for the missing cold compiles."""
        rows = [(family, config) for family in self.experiment.families for _, config in family.candidates]
        return COMPILE_SECONDS * sum(self.lacks.compiles(*row) for row in rows)

    def forecast(self) -> float:
        """Return the forecast for everything that is missing, based on the durations of any earlier sets."""
        families, trials = self.experiment.families, self.held.trials_to_come(self.experiment.trials)
        searches = [f for f in families if f.search_up_to and not alone.search_ended(self.held.records, f.baseline)]
        profiles = [member for _, member, *_ in self._singles() if member.role == "profile"]  # a check takes seconds
        singles = len(profiles) * PLACE_SECONDS + len(searches) * SEARCH_SECONDS + self.compiling_seconds()
        return self.lacks.forecast(families) + singles + self.held.forecast_of_trials(trials)

    # What is measured alone

    def _before_sets(self) -> list[Family]:
        """Record what is left out, and measure what runs alone. Returns the families without what exceeds memory."""
        for name, label, reason in self.experiment.left_out:
            bases = [f.baseline for f in self.experiment.families if f.name == name]
            self._note(name, label, None, (*bases, *self.experiment.configurations)[0], reason)
        self.progress.prefix = ""
        self.ledger.path.parent.mkdir(parents=True, exist_ok=True)
        for name, member, work, baseline in self._singles():
            self._alone(name, member, work, baseline_id=baseline.run_id)
        for family in self.experiment.families:
            for label, config in family.candidates:
                self._cold_compiles(family, label, config)
        return [self._within_memory(family) for family in self.experiment.families]

    def _singles(self) -> list[tuple[str, Member, Work, RunConfig]]:
        """Return the missing checks and profiles as (family, member, work, baseline)."""
        found = list[tuple[str, Member, Work, RunConfig]]()
        for check in self.experiment.checks:
            role, work = _CHECKS[check.config.workload]
            found.append((check.family, Member(role, check.label, check.config), work, check.baseline))
        for family, label, config in self.experiment.profiles:
            names = [f"{self.experiment.name}-{config.run_id}-rank{rank}.json.gz" for rank in range(config.world_size)]
            work = partial(alone.profile_alone, traces=[self.ledger.path.with_name(name) for name in names])
            found.append((family, Member("profile", label, config), work, config))
        return [row for row in found if not self.held.settled(row[1].config.run_id, row[1].role)]

    def _cold_compiles(self, family: Family, label: str, config: RunConfig) -> None:
        """Measure compiles from empty caches, alone. They also fill the caches that the sets use."""
        missing = self.lacks.compiles(family, config)
        for i in range(missing):
            self.progress.prefix = f"cold compile {i + 1} of {missing};"
            record = self._alone(family.name, Member("cold", label, config), baseline_id=family.baseline.run_id)
            if record.status != "ok":
                self.lacks.failed[config.run_id] = TRIES  # compiling takes long, so it is not tried again in this run
                return

    def _within_memory(self, family: Family) -> Family:
        """Search the largest batch that fits, alone, and return the family without larger candidates."""
        if not family.search_up_to:
            return family
        self.progress.prefix = "the largest batch that fits;"
        # Tries are shared by all families that do the same work, whatever batch sizes they compare.
        attempt = partial(self._alone, family.name, baseline_id="", set_id="")
        known = alone.search_ended(self.held.records, family.baseline)
        ended = alone.largest_batch(family, self.held.records, attempt, self.seconds_left)
        if ended is None:
            return family
        if known is None or (known.run_id, known.label) != (ended.run_id, ended.label):
            self._append([ended])
        largest = ended.config.global_batch_size if ended.status == "ok" else 0
        for label, config in family.candidates:
            if config.global_batch_size > largest:
                reason = f"larger than {largest:,}, where the search ended"
                self._note(family.name, label, config, family.baseline, reason)
        kept = tuple(row for row in family.candidates if row[1].global_batch_size <= largest)
        return replace(family, candidates=kept)

    def _train(self, families: Sequence[Family]) -> None:
        """Train for quality the configurations that have a speed, one by one, until the next trial would not fit."""
        compared = [c for f in families if f.candidates for c in (f.baseline, *(c for _, c in f.candidates))]
        timed = {c.run_id for c in compared if not self.lacks.hopeless(c)}
        wanted = [t for t in self.experiment.trials if t.timed is None or t.timed.run_id in timed]
        to_come = self.held.trials_to_come(wanted)
        count = len(to_come)
        while to_come:
            trial, left, seconds = to_come[0], self.seconds_left(), self.held.forecast_of_trials(to_come)
            if left < (self.held.trial_seconds(trial) or 0.0):
                self.progress.prefix = ""
                self.progress.always(f"{len(to_come)} trials did not fit into the time")
                break
            self.progress.prefix = f"trial {count - len(to_come) + 1} of {count},"
            self.progress.expect(min(left, seconds))
            member = Member("quality", trial.label, trial.config)
            work = partial(alone.train_once, fid=trial.fid)
            self._alone(trial.family, member, work, baseline_id=trial.baseline.run_id)
            del to_come[0]
        for group in dict.fromkeys((t.family, t.label) for t in wanted):
            trials = [t for t in wanted if (t.family, t.label) == group]
            lacking = [t for t in trials if not self.held.trained(t)]
            short = [t for t in lacking if t in to_come]  # of time
            reason = f"{len(short)} of {len(trials)} runs for quality did not fit into the time that was given"
            if lacking and (why := self.held.unsound(lacking[0])):
                short, reason = lacking, f"{NOT_TRAINED}: its gradient check failed ({why})"
            for trial in short[:1]:
                self._note(trial.family, trial.label, trial.config, trial.baseline, reason)

    # Sets

    def _measure_stage(
        self, families: Sequence[Family], share: float, *, needed: bool, trains: bool, yields: bool = False
    ) -> None:
        """Measure sets of ``families`` in ``share`` of the remaining time, without what trials take if it ``trains``.

        If ``needed``, families get ``LEAST_SETS`` sets even if that takes longer. Except in a primary comparison,
        candidates whose least sets do not fit are left out and recorded as such; a needed family keeps at least one.
        """
        start, left = time.monotonic(), self.seconds_left()
        if trains:  # trials come last, and would get nothing where sets can use all the time
            left -= min(
                self.held.forecast_of_trials(self.held.trials_to_come(self.experiment.trials)), TRIALS_PART * left
            )
        end, latest = start + share * left, start + OVERRUN * share * left
        self.lacks.timed = math.isfinite(left)
        self._stage_ends = end
        self._stage_families = max(1, sum(bool(self.lacks.wanted(family)) for family in families))
        primary = any(label == f.primary for f in families for label, _ in f.candidates)
        measured, disturbed = 0, Counter[str]()  # sets of all families, and disturbed ones by family
        while True:
            now = time.monotonic()
            if not (needed and primary):
                families, no_time = self.lacks.fit(families, (latest if needed else end) - now, fewest=int(needed))
                for family, (label, config) in no_time:
                    self._note(family.name, label, config, family.baseline, NO_TIME)
            if (job := self.lacks.next(families)) is None:
                return
            if yields and measured and now + self.lacks.least_seconds(families) > latest:
                return
            family, candidates = job
            have, new = map(min, zip(*(self.lacks.progress_of(family, c) for _, c in candidates), strict=True))
            short = needed and have < LEAST_SETS
            most = min(self.target.sets, new + max(self.lacks.missing(family, c) for _, c in candidates))
            too_disturbed = disturbed[family.name] >= most
            set_ends = now + self.lacks.set_seconds(family, len(candidates))
            out_of_time = set_ends > (latest if short else end) and (measured or not needed)
            if too_disturbed or out_of_time:
                # A single disturbed set among quiet ones when time runs out does not mean that the machine is busy.
                if short and family.baseline.device == "cpu" and disturbed[family.name] > have:
                    self.crowded_out = True
                if not too_disturbed:
                    return
                families = [f for f in families if f.name != family.name]
                continue
            self.progress.prefix = f"set {measured + 1},"
            self.progress.expect(min(self.lacks.forecast(families), end - now))
            self.progress.always(f"{family.name}: starting")
            disturbed[family.name] += self._measure_set(family, candidates)
            measured += 1

    def _measure_set(self, family: Family, candidates: Sequence[Row]) -> bool:
        """Measure one set and report failures. Returns whether the set was disturbed and so does not count."""
        records = self.add_set(family, candidates)
        if failed := [r for r in records if r.status != "ok"]:
            reasons = "; ".join(f"{r.label} {r.status} ({r.reason})" for r in failed)
            hopeless = any(self.lacks.hopeless(r.config) for r in failed)
            self.progress.stay(f"lost: {reasons}; {'not tried again now' if hopeless else 'measured again'}")
        if self.held.disturbed or not crowded(records):
            return False
        self.progress.stay("set disturbed: other processes took the cores it needs; it is measured again")
        return True

    def add_set(self, family: Family, candidates: Sequence[Row]) -> list[RunRecord]:
        """Measure one set of a family, append its records and return them."""
        base, label = family.baseline, family.baseline_label
        members = [Member("baseline", label, base), Member("twin", f"{label} again", base)]
        compared = [row for row in candidates if row[1].run_id != base.run_id]
        members += [Member("candidate", label, c, primary=label == family.primary) for label, c in compared]
        begun, turns = time.monotonic(), self.lacks.turns(family)
        plan = replace(self.target.plan, turns=turns) if turns else self.target.plan
        ends, where = not self.held.disturbed, {"experiment": self.experiment.name, "family": family.name}
        records = measure_set(self.instrument, plan=plan, members=members, turns=self._turns, gives_up=ends, **where)
        self._append(records)
        self.measured_sets += 1
        self.lacks.costs.setdefault(family.name, []).append((time.monotonic() - begun) / len(members))
        self.lacks.count_failures(records)
        return records

    def _turns(self, start_seconds: float, turn_seconds: float) -> int:
        """Return the number of turns for all sets of a comparison, from the durations in its first set."""
        seconds = start_seconds + max(0.0, self._stage_ends - time.monotonic()) / self._stage_families
        seconds = math.inf if self.target.sets_to_come else seconds
        return shortfall.best_turns(start_seconds, turn_seconds, *self.lacks.scatter, seconds)

    # What is appended

    def _append(self, records: list[RunRecord]) -> None:
        self.instrument.code.check_unchanged()
        self.ledger.append(records)
        self.held.records += records

    def _alone(self, family: str, member: Member, work: Work = Slot.open, **changes: str) -> RunRecord:
        """Measure one group on its own, append its record with ``changes`` of fields, and return it."""
        where = {"experiment": self.experiment.name, "family": family}
        record = measure_alone(self.instrument, plan=self.target.plan, member=member, work=work, **where)
        self._append([record := replace(record, **changes)])  # type: ignore[arg-type]
        self.measured_sets += 1
        return record

    def look(self, date: str | None = None) -> None:
        """Record which sets the current results are based on, if any are new. Looks of equal ``date`` count as one."""
        looks = []
        for family in {f.baseline.run_id: f for f in self.experiment.families}.values():
            evaluated = self.held.evaluated(base := family.baseline.run_id)
            if self.target.sets >= LEAST_SETS and not set(evaluated["sets"]) <= self.held.looked(base):
                record = self.unmeasured("look", family.name, family.baseline_label, family.baseline, family.baseline)
                date = date or record.date
                looks.append(replace(record, look=evaluated, environment=replace(record.environment, date=date)))
        if looks:
            self._append(looks)

    def _note(self, family: str, label: str, config: RunConfig | None, baseline: RunConfig, reason: str) -> None:
        """Record once that something is left out; without a configuration, the record has the baseline's."""
        record = self.unmeasured("note", family, label, config or baseline, baseline)
        record = replace(record, status="left out", reason=reason)
        if not self.held.noted(record):
            self._append([record])

    def unmeasured(self, role: str, family: str, label: str, config: RunConfig, baseline: RunConfig) -> RunRecord:
        """Return a record of something that was not run."""
        return RunRecord(
            set_id="",
            experiment=self.experiment.name,
            family=family,
            role=role,
            label=label,
            config=config,
            baseline_id=baseline.run_id,
            plan=self.target.plan,
            environment=hardware.environment(),
            code_version=self.instrument.code.key,
            data_name=self.instrument.data_name,
        )
