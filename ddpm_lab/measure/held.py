"""What the ledger already holds of a question."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from operator import attrgetter
from typing import Any

from ddpm_lab.config import CHECK, DDPM, TRAINING, OptimizerConfig, RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.plan import Experiment, Plan, Trial
from ddpm_lab.record import LASTING, TWIN, RunRecord, crowded, gradient_fault, seconds_by_turn, set_log_ratio

COMPARED = ("baseline", TWIN, "candidate")
TRIAL_SECONDS, COMPILE_SECONDS = 30.0, 60.0  # forecasts, until a similar one has been measured
Members = dict[str, RunRecord]  # A set's records by role, those of candidates by run id


class Held:
    """Records of one experiment, machine, code, plan and data; sets that others disturbed count where ``disturbed``."""

    def __init__(self, records: Iterable[RunRecord] = (), *, disturbed: bool = False) -> None:
        self.records, self.disturbed = list(records), disturbed
        self._crowded: dict[tuple[str, int], bool] = {}  # by set and its members so far

    def completed(self, *roles: str, **fields: object) -> list[RunRecord]:
        """Records in some roles of what ran to its end, whose ``fields`` have these values."""
        done = (r for r in self.records if r.status == "ok" and r.role in roles)
        return [r for r in done if all(getattr(r, name) == value for name, value in fields.items())]

    def settled(self, run_id: str, *roles: str) -> bool:
        """Whether something that is measured alone is here, or a reason why there can be none."""
        return any((r.run_id, r.status in ("ok", *LASTING)) == (run_id, True) for r in self.records if r.role in roles)

    def noted(self, record: RunRecord) -> bool:
        """Whether the same note is here already."""
        same = attrgetter("role", "family", "label", "baseline_id", "reason", "cohort")
        return any(same(r) == same(record) for r in self.records if r.role == "note")

    @property
    def lasting(self) -> set[str]:
        """Run ids that fail here in a way that another try would meet again."""
        return {r.run_id for r in self.records if r.status in LASTING}

    @property
    def any(self) -> bool:
        """Whether anything was completed. A trial alone answers nothing: no row could stand beside it."""
        alone = self.completed("profile", "largest") or self.completed("cold", compile_cache="cold")
        return bool(alone) or any(self.sets(base) for base in {r.baseline_id for r in self.completed("baseline")})

    # Sets

    def sets(self, baseline_id: str, *run_ids: str, family: str = "") -> dict[str, Members]:
        """Sets that count with a baseline, its twin and these configurations, in order; only of a ``family``."""
        found: dict[str, Members] = defaultdict(dict)
        for r in self.completed(*COMPARED, baseline_id=baseline_id):
            if family in ("", r.family):
                found[r.set_id][r.run_id if r.role == "candidate" else r.role] = r
        wanted = {"baseline", TWIN, *run_ids} - {baseline_id}
        return {i: members for i, members in found.items() if wanted <= members.keys() and not self._busy(i, members)}

    def _busy(self, set_id: str, members: Members) -> bool:
        key = (set_id, len(members))
        if not self.disturbed and key not in self._crowded:
            self._crowded[key] = crowded(list(members.values()))
        return not self.disturbed and self._crowded[key]

    def met(self, baseline_id: str, run_id: str) -> bool:
        """Whether anything is held of a comparison: a set, a failure, or a note that it was left out."""
        return any((r.baseline_id, r.run_id) == (baseline_id, run_id) for r in self.records)

    def log_ratios(self, baseline_id: str, run_id: str) -> list[float]:
        """The log ratio of each set that counts; of the baseline its twin's. Its time is the mean of the two."""
        pair = (TWIN,) if run_id == baseline_id else (run_id, TWIN)
        sets = self.sets(baseline_id, run_id).values()
        return [set_log_ratio(s["baseline"], *(s[role] for role in pair)) for s in sets]

    def evaluated(self, baseline_id: str) -> dict[str, Any]:
        """What an answer about a baseline rests on now, as a record keeps it: sets that count, and their log ratios."""
        others = {r.run_id for r in self.completed("candidate", baseline_id=baseline_id)}
        ratios = {run_id: self.log_ratios(baseline_id, run_id) for run_id in sorted(others)}
        ratios[TWIN] = self.log_ratios(baseline_id, baseline_id)
        rounded = {name: [round(v, 6) for v in values if math.isfinite(v)] for name, values in ratios.items() if values}
        return {"sets": list(self.sets(baseline_id)), "log_ratios": rounded}

    def looked(self, baseline_id: str) -> set[str]:
        """The sets of a baseline that an answer shown so far rested on."""
        looks = self.completed("look", baseline_id=baseline_id)
        return {set_id for r in looks for set_id in (r.look or {"sets": ()})["sets"]}

    # What things cost

    def place_seconds(self, baseline_id: str) -> float | None:
        """What one configuration in one set with this baseline took, by its stages; None where nothing is held."""
        seen = [sum(r.stages.values()) for r in self.completed(*COMPARED, baseline_id=baseline_id) if r.windows]
        return statistics.fmean(seen) if seen else None

    @property
    def compile_seconds(self) -> list[float]:
        return [r.stages["compile"] for r in self.completed("cold", compile_cache="cold") if "compile" in r.stages]

    def cold_compiles(self, run_id: str) -> int:
        """Compiles of a configuration from empty caches."""
        return len(self.completed("cold", compile_cache="cold", run_id=run_id))

    # Trials

    def trials_to_come(self, wanted: Iterable[Trial]) -> list[Trial]:
        """Those of ``wanted`` that are neither here, nor known to fail or to be wrong."""
        lasting = self.lasting
        asked = [t for t in wanted if not self.trained(t) and not self.unsound(t)]
        return [t for t in asked if t.config.run_id not in lasting]

    def trained(self, trial: Trial) -> bool:
        """Whether a trial is here, and with it the FID that is asked for."""
        found = [(r.quality or {}).get("fid") or {} for r in self.completed("quality", run_id=trial.config.run_id)]
        said = [(one["inception_sha256"], one["images"]) for one in found if "fid" in one]
        return bool(found) if trial.fid is None else (trial.fid.sha256, trial.fid.images) in said

    def unsound(self, trial: Trial) -> str:
        """Why a trial's gradient check failed; empty where it did not, or where its baseline's did too."""
        checks = [(r.config, (r.quality or {}).get("gradients")) for r in self.records if r.role == "check"]
        faults = {_gradient_of(config): gradient_fault(found, layers=False) for config, found in checks if found}
        return "" if faults.get(_gradient_of(trial.baseline)) else faults.get(_gradient_of(trial.config), "")

    def trial_seconds(self, trial: Trial) -> float | None:
        """What a trial takes: as one with another seed did, else its images at the speed that sets have shown."""
        alike = [r for r in self.completed("quality") if _without_seed(r.config) == _without_seed(trial.config)]
        if alike:
            return sum(alike[-1].stages.values())
        timed = self.completed(*COMPARED, run_id=trial.timed.run_id) if trial.timed else []
        speeds = [seconds for r in timed if (seconds := seconds_by_turn(r).values())]
        compiling = COMPILE_SECONDS if trial.config.compile != "off" else 0.0
        return statistics.median(speeds[-1]) * float(trial.config.option("images", 0)) + compiling if speeds else None

    def forecast_of_trials(self, trials: Iterable[Trial]) -> float:
        """Seconds of ``trials``; of those that nothing is known of as long as usual."""
        return sum(TRIAL_SECONDS if (known := self.trial_seconds(trial)) is None else known for trial in trials)


def held_of(
    ledger: Ledger, experiment: Experiment, plan: Plan, *, machine_key: str, code: str, disturbed: bool = False
) -> Held:
    """What a ledger holds of an experiment; its trials whichever question made them, with any plan of a set."""
    data = {c.data_sha256 for c in experiment.configurations}
    wanted = {t.config.run_id for t in experiment.trials}

    def mine(r: RunRecord) -> bool:
        machine, version, sha256, plan_key = r.cohort
        if (machine, version) != (machine_key, code) or sha256 not in data:
            return False
        return r.run_id in wanted if r.role == "quality" else (r.experiment, plan_key) == (experiment.name, plan.key)

    return Held(filter(mine, ledger.read()[0]), disturbed=disturbed)


@cache
def _without_seed(config: RunConfig) -> str:
    return dataclasses.replace(config, seed=0).run_id


@cache
def _gradient_of(config: RunConfig) -> str:
    """What computes a configuration's gradient: no matter who asks, how images are loaded, or what is done with it."""
    same: dict[str, object] = {"purpose": "timing", "seed": 0, "loader": "packed", "loader_workers": 0}
    same |= {"optimizer": OptimizerConfig(), "options": config.own_options}
    if config.workload in (CHECK, TRAINING):
        same["workload"] = DDPM
    return dataclasses.replace(config, **same).run_id  # type: ignore[arg-type]
