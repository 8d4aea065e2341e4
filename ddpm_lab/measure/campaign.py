"""Measure what an experiment still lacks: which sets are missing, in which order, and what fits into the time.

Every set is appended to the ledger when it is complete, so that a run can be killed at any moment and goes on where it
stopped, at the cost of one unfinished set.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpm_lab.config import Experiment, Family, Plan, RunConfig
from ddpm_lab.ledger import LASTING, Ledger, RunRecord
from ddpm_lab.measure.hardware import environment
from ddpm_lab.measure.progress import Progress
from ddpm_lab.measure.seat import Instrument, Member
from ddpm_lab.measure.sets import measure_alone, measure_set

SETS_FOR_A_VERDICT = 6
PLACE_SECONDS = 5.0
"""Forecast for one configuration in one set, until the first set has shown better."""
COMPILE_SECONDS = 60.0
MOST_CANDIDATES = 5

Cohort = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How much to measure: sets per comparison, cold compiles per compiled configuration, and until when."""

    plan: Plan
    sets: int
    cold_compiles: int
    seconds: float | None = None


class Campaign:
    """The measuring of one experiment; ``measured_sets`` counts what it added to the ledger."""

    def __init__(
        self, experiment: Experiment, target: Target, instrument: Instrument, ledger: Ledger, traces: Path
    ) -> None:
        self.experiment, self.target, self.instrument = experiment, target, instrument
        self.ledger, self.traces = ledger, traces
        self.machine_key = environment().machine.key
        self.known = self._mine(ledger.read()[0])
        self.measured_sets = 0
        self.begun = time.monotonic()
        self.costs: dict[str, list[float]] = {}
        self.lasting = {r.run_id for r in self.known if r.status in LASTING}
        self.hopeless: set[str] = set()

    def run(self, progress: Progress) -> None:
        """Measure what is missing, as far as the time allows."""
        self._note_left_out()
        for family_label, label, config in self.experiment.profiles:
            self._profile(family_label, label, config, progress)
        for family in self.experiment.families:
            for label, config in family.candidates:
                self._cold_compiles(family, label, config, progress)
        families = list(self.experiment.families)
        total, done = self._sets_missing(families), 0
        while job := self._next(families):
            family, candidates = job
            left = self.seconds_left()
            if left is not None and left < self._set_seconds(family, len(candidates)) and done:
                break
            places = f"set {done + 1} of {total}"
            forecast = self._forecast(families)
            progress.prefix = f"{places}, {_words(forecast)} left;"
            progress.always(f"{family.name}: starting")
            self._measure(family, candidates)
            done += 1
            if left is not None and done == len([f for f in families if self._wanted(f)]):
                families = self._fit(families)
                total = done + self._sets_missing(families)
        unfinished = self._sets_missing(families)
        progress.prefix = ""
        if unfinished:
            progress.always(f"{unfinished} sets did not fit into the time")

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
        profiles = sum(not self._has_profile(c) for _, _, c in self.experiment.profiles)
        return self._forecast(list(self.experiment.families)) + compiles * COMPILE_SECONDS + profiles * PLACE_SECONDS

    # What the ledger has

    def _cohort(self, config: RunConfig) -> Cohort:
        return (self.machine_key, self.instrument.code.key, config.data_sha256, self.target.plan.key)

    def _mine(self, records: Sequence[RunRecord]) -> list[RunRecord]:
        """Records of this machine, code, data and plan."""
        data = {c.data_sha256 for c in self.experiment.configurations}
        key = (self.machine_key, self.instrument.code.key, self.target.plan.key)
        return [r for r in records if r.cohort[:2] + r.cohort[3:] == key and r.config.data_sha256 in data]

    def _sets_with(self, family: Family, config: RunConfig) -> int:
        """Complete sets of this family's baseline and twin that hold ``config``."""
        sets: dict[str, set[tuple[str, str]]] = {}
        for r in self.known:
            mine = r.experiment == self.experiment.name and r.baseline_id == family.baseline.run_id
            if r.set_id and mine and r.status == "ok":
                sets.setdefault(r.set_id, set()).add((r.role, r.run_id))
        base = family.baseline.run_id
        role = "twin" if config.run_id == base else "candidate"
        return sum({("baseline", base), ("twin", base), (role, config.run_id)} <= held for held in sets.values())

    def _missing(self, family: Family, config: RunConfig) -> int:
        if config.run_id in self.lasting | self.hopeless or family.baseline.run_id in self.lasting | self.hopeless:
            return 0
        wanted = 1 if family.mechanism else self.target.sets
        return max(0, wanted - self._sets_with(family, config))

    def _wanted(self, family: Family) -> list[tuple[str, RunConfig]]:
        """Candidates that lack sets; of a family without candidates the twin."""
        members = family.candidates or ((family.baseline_label, family.baseline),)
        most = max(self._missing(family, c) for _, c in members)
        # Those that lack most come first, so that all end with equally many.
        return [(label, c) for label, c in members if self._missing(family, c) == most and most][:MOST_CANDIDATES]

    def _sets_missing(self, families: Sequence[Family]) -> int:
        """About how many sets are to come."""
        total = 0
        for family in families:
            members = family.candidates or ((family.baseline_label, family.baseline),)
            counts = sorted((self._missing(family, c) for _, c in members), reverse=True)
            total += sum(counts[::MOST_CANDIDATES])
        return total

    def _next(self, families: Sequence[Family]) -> tuple[Family, list[tuple[str, RunConfig]]] | None:
        """The family that lacks most sets, so that all grow at the same pace."""
        ranked = sorted(families, key=lambda f: -max((self._missing(f, c) for _, c in self._wanted(f)), default=0))
        wanted = self._wanted(ranked[0]) if ranked else []
        return (ranked[0], wanted) if wanted else None

    # How long it takes

    def _set_seconds(self, family: Family, candidates: int) -> float:
        places = candidates + 2
        if family.name in self.costs:
            return places * self.costs[family.name][-1]
        seen = [
            sum(r.stages.values())
            for r in self.known
            if r.set_id and r.windows and r.baseline_id == family.baseline.run_id
        ]
        known = [cost for costs in self.costs.values() for cost in costs]
        return places * (sum(seen) / len(seen) if seen else max(known, default=PLACE_SECONDS))

    def _forecast(self, families: Sequence[Family]) -> float:
        return sum(
            self._sets_missing([f]) * self._set_seconds(f, min(len(f.candidates), MOST_CANDIDATES)) for f in families
        )

    def _fit(self, families: list[Family]) -> list[Family]:
        """Leave candidates out, the last ones first, until six sets fit into the time or each family has one left."""
        enough = min(self.target.sets, SETS_FOR_A_VERDICT)
        while True:
            left = self.seconds_left()
            assert left is not None
            need = sum(
                max(0, enough - self.target.sets + self._sets_missing([f])) * self._set_seconds(f, len(f.candidates))
                for f in families
            )
            longest = max(families, key=lambda f: len(f.candidates), default=None)
            if need <= left or longest is None or len(longest.candidates) < 2:
                return families
            (label, config), kept = longest.candidates[-1], longest.candidates[:-1]
            self._note(longest.name, label, config, longest.baseline, "did not fit into the time that was given")
            families[families.index(longest)] = dataclasses.replace(longest, candidates=kept)

    # Doing it

    def _append(self, records: list[RunRecord]) -> None:
        self.ledger.append(records)
        self.known += records

    def _measure(self, family: Family, candidates: list[tuple[str, RunConfig]]) -> None:
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
        # A failure that may pass is tried again by the next run, not by this one.
        self.hopeless |= {r.run_id for r in records if r.status != "ok"}

    def _has_profile(self, config: RunConfig) -> bool:
        return any(
            r.role == "profile" and r.run_id == config.run_id and (r.status == "ok" or r.status in LASTING)
            for r in self.known
        )

    def _profile(self, family: str, label: str, config: RunConfig, progress: Progress) -> None:
        if self._has_profile(config):
            return
        progress.prefix = ""
        stem = f"{self.experiment.name}-{config.run_id}"
        self.traces.mkdir(parents=True, exist_ok=True)
        record = measure_alone(
            self.instrument,
            experiment=self.experiment.name,
            family=family,
            plan=self.target.plan,
            member=Member("profile", label, config),
            traces=[self.traces / f"{stem}-rank{rank}.json.gz" for rank in range(config.world_size)],
        )
        self._append([record])
        self.measured_sets += 1

    def _compiles_missing(self, family: Family, config: RunConfig) -> int:
        if config.run_id in self.lasting or family.mechanism:
            return 0
        have = sum(
            r.role == "cold" and r.run_id == config.run_id and r.status == "ok" and r.compile_cache == "cold"
            for r in self.known
        )
        return max(0, self.target.cold_compiles - have)

    def _cold_compiles(self, family: Family, label: str, config: RunConfig, progress: Progress) -> None:
        """Compile from empty caches, alone: a cost of its own, and it fills the cache that the sets start from."""
        if config.compile == "off":
            return
        missing = self._compiles_missing(family, config)
        for i in range(missing):
            progress.prefix = f"cold compile {i + 1} of {missing};"
            record = measure_alone(
                self.instrument,
                experiment=self.experiment.name,
                family=family.name,
                plan=self.target.plan,
                member=Member("cold", label, config),
            )
            record = dataclasses.replace(record, baseline_id=family.baseline.run_id)
            self._append([record])
            self.measured_sets += 1
            if record.status != "ok":
                (self.lasting if record.status in LASTING else self.hopeless).add(config.run_id)
                return

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
        same = (record.family, record.label, record.baseline_id, record.reason, record.cohort)
        if not any((r.family, r.label, r.baseline_id, r.reason, r.cohort) == same for r in self.known):
            self._append([record])


def _words(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 90 else f"about {seconds / 60:.0f} min"
