"""What the ledger already holds of a question, indexed, so that a ledger of many thousand records is searched once."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable

from ddpm_lab.config import CHECK, DDPM, TRAINING, RunConfig
from ddpm_lab.gradient_bounds import failure
from ddpm_lab.ledger import Head, Ledger
from ddpm_lab.optimizer_settings import OptimizerConfig
from ddpm_lab.plan import Experiment, Fid, Plan
from ddpm_lab.record import LASTING, RunRecord, kept_seconds, set_log_ratio


class Held:
    """Records of one experiment, machine, code version, plan and data."""

    def __init__(self, records: Iterable[RunRecord] = ()) -> None:
        self.lasting: set[str] = set()
        """Run ids that fail here in a way that another try would meet again."""
        # baseline -> set -> (role, run id) -> what it did
        self._sets: dict[str, dict[str, dict[tuple[str, str], RunRecord]]] = defaultdict(lambda: defaultdict(dict))
        self._profiles: set[str] = set()
        self._trials: dict[str, float] = {}
        self._fids: set[tuple[str, str, int]] = set()  # run id, hash of the Inception, images
        self._checks: set[str] = set()
        self._faults: dict[str, str] = {}  # what computes a gradient -> why its check failed, or nothing
        self._cold: Counter[str] = Counter()
        self.compile_seconds: list[float] = []
        """What each compile from empty caches took."""
        self._notes: set[tuple[object, ...]] = set()
        self.searched: list[RunRecord] = []
        """Sizes that were tried in search of the largest batch, and how the searches ended."""
        self._seconds: dict[str, list[float]] = defaultdict(list)
        self.add(records)

    def add(self, records: Iterable[RunRecord]) -> None:
        """Take up more records."""
        for r in records:
            if r.role == "note":
                self._notes.add(note_key(r))
                continue
            if r.role in ("search", "largest"):
                self.searched.append(r)
            if r.status in LASTING:
                self.lasting.add(r.run_id)
            if r.role == "profile" and (r.status == "ok" or r.status in LASTING):
                self._profiles.add(r.run_id)
            elif r.role in ("check", "wrong") and (r.status == "ok" or r.status in LASTING):
                self._checks.add(r.run_id)
                if answer := (r.quality or {}).get("gradients"):
                    self._faults[_gradient_of(r.config)] = failure(answer)
            elif r.role == "quality" and r.status == "ok":
                self._trials[r.run_id] = sum(r.stages.values())
                if "fid" in (found := (r.quality or {}).get("fid", {})):
                    self._fids.add((r.run_id, found["inception_sha256"], found["images"]))
            elif r.role == "cold" and r.status == "ok" and r.compile_cache == "cold":
                self._cold[r.run_id] += 1
                self.compile_seconds += [r.stages["compile"]] if "compile" in r.stages else []
            elif r.role in ("baseline", "twin", "candidate") and r.status == "ok":
                self._sets[r.baseline_id][r.set_id][r.role, r.run_id] = r
                if r.windows:
                    self._seconds[r.baseline_id].append(sum(r.stages.values()))

    def sets(self, baseline_id: str, run_id: str) -> int:
        """Complete sets, with baseline and twin, that hold a configuration."""
        return len(self._complete(baseline_id, run_id))

    def sets_together(self, family: str, baseline_id: str, run_ids: Iterable[str]) -> int:
        """Complete sets of a family that hold all of these configurations."""
        wanted = {("baseline", baseline_id), ("twin", baseline_id), *(("candidate", run_id) for run_id in run_ids)}
        sets = self._sets.get(baseline_id, {}).values()
        return sum(wanted <= held.keys() and held["baseline", baseline_id].family == family for held in sets)

    def log_ratios(self, baseline_id: str, run_id: str) -> list[float]:
        """The log ratio of each complete set in the order they were measured; for the baseline its twin's."""
        pairs = self._complete(baseline_id, run_id)
        return [set_log_ratio(baseline, other) for baseline, other in pairs]

    def _complete(self, baseline_id: str, run_id: str) -> list[tuple[RunRecord, RunRecord]]:
        base, twin = ("baseline", baseline_id), ("twin", baseline_id)
        asked = twin if run_id == baseline_id else ("candidate", run_id)
        sets = self._sets.get(baseline_id, {}).values()
        return [(held[base], held[asked]) for held in sets if {base, twin, asked} <= held.keys()]

    def place_seconds(self, baseline_id: str) -> float | None:
        """What one configuration in one set with this baseline took, by its stages; None where nothing is held."""
        seen = self._seconds.get(baseline_id)
        return sum(seen) / len(seen) if seen else None

    def profiled(self, run_id: str) -> bool:
        """Whether a configuration's profile is here, or a reason why there can be none."""
        return run_id in self._profiles

    def checked(self, run_id: str) -> bool:
        """Whether a check of a configuration, or its wrong ways, are here, or a reason why there can be none."""
        return run_id in self._checks

    def unsound(self, config: RunConfig) -> str:
        """Why the gradient check of a configuration failed; empty where it did not, or where there is none."""
        return self._faults.get(_gradient_of(config), "") if self._faults else ""

    def trained(self, run_id: str, fid: Fid | None = None) -> bool:
        """Whether a trial is here, and with it the FID that is asked for."""
        return run_id in self._trials and (fid is None or (run_id, fid.sha256, fid.images) in self._fids)

    def trial_seconds(self, run_id: str) -> float | None:
        """What a trial took; None where it is not here."""
        return self._trials.get(run_id)

    def image_seconds(self, run_id: str) -> float | None:
        """Seconds of an image in the latest set of a configuration; None where it has no windows."""
        for sets in self._sets.values():
            for held in reversed(sets.values()):
                for (_, found), record in held.items():
                    if found == run_id and (seconds := kept_seconds(record).values()):
                        return statistics.median(seconds)
        return None

    def cold_compiles(self, run_id: str) -> int:
        """Compiles of a configuration from empty caches."""
        return self._cold[run_id]

    def noted(self, record: RunRecord) -> bool:
        """Whether the same note is here already."""
        return note_key(record) in self._notes

    @property
    def any(self) -> bool:
        """Whether anything was completed: a whole set, a profile, a cold compile or a search that found something.

        A trial alone answers nothing: without a speed there is no row that it could stand beside.
        """
        sets = (roles for family in self._sets.values() for roles in family.values())
        whole = any({"baseline", "twin"} <= {role for role, _ in roles} for roles in sets)
        found = any(r.role == "largest" and r.status == "ok" for r in self.searched)
        return whole or found or bool(self._profiles - self.lasting) or bool(self._cold)


def held_of(ledger: Ledger, experiment: Experiment, plan: Plan, *, machine_key: str, codes: tuple[str, str]) -> Held:
    """What a ledger holds of an experiment on a machine, and its trials, whichever question made them.

    ``codes`` are the keys of the code of its sets and of its trials; of a trial the plan of a set is no part.
    """
    data = {c.data_sha256 for c in experiment.configurations}
    sets = {(machine_key, codes[0], sha256, plan.key) for sha256 in data}
    trials = {(machine_key, codes[1], sha256) for sha256 in data}
    wanted = {t.config.run_id for t in experiment.trials}

    def mine(head: Head) -> bool:
        if head.role == "quality":
            return bool(wanted) and head.cohort[:3] in trials
        return head.experiment == experiment.name and head.cohort in sets

    found, _ = ledger.read(lambda heads: [h for h in heads if mine(h)])

    def counts(r: RunRecord) -> bool:
        if r.role == "check" and r.quality:
            return bool(r.quality.get("checked_by", r.code_version) == codes[1])
        return r.role != "quality" or r.run_id in wanted

    return Held(filter(counts, found))


def _gradient_of(config: RunConfig) -> str:
    """What computes a configuration's gradient: no matter who asks, how images are loaded, or what is done with it."""
    same: dict[str, object] = {"purpose": "timing", "seed": 0, "loader": "packed", "loader_workers": 0}
    same |= {"optimizer": OptimizerConfig(), "options": config.own_options}
    if config.workload in (CHECK, TRAINING):
        same["workload"] = DDPM
    return dataclasses.replace(config, **same).run_id  # type: ignore[arg-type]


def note_key(record: RunRecord) -> tuple[object, ...]:
    """What makes two notes the same."""
    return (record.family, record.label, record.baseline_id, record.reason, record.cohort)
