"""What the ledger already holds of a question, indexed, so that a ledger of many thousand records is searched once."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ddpm_lab.config import CHECK, DDPM, TRAINING, RunConfig
from ddpm_lab.gradient_bounds import fault
from ddpm_lab.ledger import Head, Ledger
from ddpm_lab.optimizer_settings import OptimizerConfig
from ddpm_lab.plan import Experiment, Fid, Plan
from ddpm_lab.record import LASTING, TWIN, RunRecord, crowded, seconds_by_turn, set_log_ratio


class Held:
    """Records of one experiment, machine, code version, plan and data."""

    def __init__(self, records: Iterable[RunRecord] = (), *, disturbed: bool = False) -> None:
        self.disturbed = disturbed
        """Whether sets count that other processes disturbed: where nothing is called they are as good as others."""
        self.lasting: set[str] = set()
        """Run ids that fail here in a way that another try would meet again."""
        # baseline -> set -> (role, run id) -> what it did
        self._sets: dict[str, dict[str, dict[tuple[str, str], RunRecord]]] = defaultdict(lambda: defaultdict(dict))
        self._looked: dict[str, set[str]] = defaultdict(set)  # baseline -> sets
        self._met: set[tuple[str, str]] = set()  # baseline, candidate
        self._quiet: dict[tuple[str, int], bool] = {}  # set, its members -> whether it counts
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
            self._met.add((r.baseline_id, r.run_id))
            if r.role == "note":
                self._notes.add(note_key(r))
                continue
            if r.role == "look":
                self._looked[r.baseline_id].update((r.look or {})["sets"])
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
                    self._faults[_gradient_of(r.config)] = fault(answer, layers=False)
            elif r.role == "quality" and r.status == "ok":
                self._add_trial(r)
            elif r.role == "cold" and r.status == "ok" and r.compile_cache == "cold":
                self._cold[r.run_id] += 1
                self.compile_seconds += [r.stages["compile"]] if "compile" in r.stages else []
            elif r.role in ("baseline", "twin", "candidate") and r.status == "ok":
                self._sets[r.baseline_id][r.set_id][r.role, r.run_id] = r
                if r.windows:
                    self._seconds[r.baseline_id].append(sum(r.stages.values()))

    def _add_trial(self, r: RunRecord) -> None:
        self._trials[r.run_id] = sum(r.stages.values())
        if "fid" in (found := (r.quality or {}).get("fid", {})):
            self._fids.add((r.run_id, found["inception_sha256"], found["images"]))

    def sets(self, baseline_id: str, run_id: str) -> int:
        """How many ``set_ids`` there are."""
        return len(self._complete(baseline_id, run_id))

    def set_ids(self, baseline_id: str, run_id: str) -> set[str]:
        """Complete sets, with baseline and twin, that hold a configuration and count."""
        return set(self._complete(baseline_id, run_id))

    def sets_together(self, family: str, baseline_id: str, run_ids: Iterable[str]) -> set[str]:
        """Complete sets of a family that hold all of these configurations and count."""
        wanted = {("baseline", baseline_id), ("twin", baseline_id), *(("candidate", run_id) for run_id in run_ids)}
        return {
            set_id
            for set_id, held in self._sets.get(baseline_id, {}).items()
            if wanted <= held.keys() and held["baseline", baseline_id].family == family and self._counts(set_id, held)
        }

    def met(self, baseline_id: str, run_id: str) -> bool:
        """Whether anything is held of a comparison: a set, a failure, or a note that it was left out."""
        return (baseline_id, run_id) in self._met

    def log_ratios(self, baseline_id: str, run_id: str) -> list[float]:
        """The log ratio of each complete set that counts, in the order they were measured; of the baseline its twin's.

        The baseline's time is the mean of its own and its twin's.
        """
        if run_id == baseline_id:
            return [set_log_ratio(base, twin) for base, twin, _ in self._complete(baseline_id, run_id).values()]
        return [set_log_ratio(base, other, twin) for base, twin, other in self._complete(baseline_id, run_id).values()]

    def evaluated(self, baseline_id: str) -> dict[str, Any]:
        """What an answer about a baseline rests on now, as a record keeps it: sets that count, and their log ratios."""
        others = {
            run_id for held in self._sets.get(baseline_id, {}).values() for role, run_id in held if role == "candidate"
        }
        ratios = {run_id: self.log_ratios(baseline_id, run_id) for run_id in sorted(others)}
        ratios[TWIN] = self.log_ratios(baseline_id, baseline_id)
        rounded = {name: [round(v, 6) for v in values if math.isfinite(v)] for name, values in ratios.items() if values}
        return {"sets": list(self._complete(baseline_id, baseline_id)), "log_ratios": rounded}

    def looked(self, baseline_id: str) -> set[str]:
        """The sets of a baseline that an answer shown so far rested on."""
        return self._looked.get(baseline_id, set())

    def turns(self, baseline_id: str, run_id: str) -> int:
        """Turns of a comparison's sets, crowded ones too: every further set has as many; 0 before the first."""
        for held in self._sets.get(baseline_id, {}).values():
            for (_, found), record in held.items():
                if found == run_id and (run_id != baseline_id or len(held) == 2):
                    return record.plan.turns
        return 0

    def _complete(self, baseline_id: str, run_id: str) -> dict[str, tuple[RunRecord, RunRecord, RunRecord]]:
        """Baseline, twin and the configuration of each set that holds all three and counts."""
        base, twin = ("baseline", baseline_id), ("twin", baseline_id)
        asked = twin if run_id == baseline_id else ("candidate", run_id)
        return {
            set_id: (held[base], held[twin], held[asked])
            for set_id, held in self._sets.get(baseline_id, {}).items()
            if {base, twin, asked} <= held.keys() and self._counts(set_id, held)
        }

    def _counts(self, set_id: str, members: Mapping[tuple[str, str], RunRecord]) -> bool:
        key = (set_id, len(members))
        if key not in self._quiet:
            self._quiet[key] = self.disturbed or not crowded(list(members.values()))
        return self._quiet[key]

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
                    if found == run_id and (seconds := seconds_by_turn(record).values()):
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
        """Whether anything was completed: a set that counts, a profile, a cold compile, a search that found something.

        A trial alone answers nothing: without a speed there is no row that it could stand beside.
        """
        whole = any(self._complete(base, base) for base in self._sets)
        found = any(r.role == "largest" and r.status == "ok" for r in self.searched)
        return whole or found or bool(self._profiles - self.lasting) or bool(self._cold)


def held_of(
    ledger: Ledger,
    experiment: Experiment,
    plan: Plan,
    *,
    machine_key: str,
    codes: tuple[str, str],
    disturbed: bool = False,
) -> Held:
    """What a ledger holds of an experiment on a machine, and its trials, whichever question made them.

    ``codes`` are the keys of the code of its sets and of its trials; of a trial the plan of a set is no part.
    ``disturbed`` counts disturbed sets too.
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

    return Held(filter(counts, found), disturbed=disturbed)


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
