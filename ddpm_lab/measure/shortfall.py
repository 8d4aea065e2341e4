"""What the ledger holds of an experiment, what it lacks, which turns and sets answer best, and what fits the time.

``between`` and ``within`` are standard deviations of one group's log time, from set to set and from turn to turn.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import attrgetter
from statistics import NormalDist, fmean, median, variance
from typing import Any

from ddpm_lab.config import CHECK, DDPM, TRAINING, OptimizerConfig, RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.plan import LEAST_SETS, RESOLUTION, USUAL_TURNS, Experiment, Family, Plan, Trial
from ddpm_lab.record import (
    LASTING,
    TWIN,
    RunRecord,
    crowded,
    gradient_fault,
    seconds_by_turn,
    set_log_ratio,
    turn_log_ratios,
)

COMPARED = ("baseline", TWIN, "candidate")
PLACE_SECONDS = 3.0  # forecast for one configuration in one set, until one has been measured
TRIAL_SECONDS, COMPILE_SECONDS = 30.0, 60.0  # forecasts, until a similar one has been measured
TRIES = 2  # number of attempts in a run at something whose failure may be temporary

WITHIN, BETWEEN = 0.10, 0.03  # prior scatter within and between sets: windows of 0.2 s on a shared machine
PRIOR_SETS = 10  # weight of the prior scatter, in sets
RECENT_RECORDS = 100  # number of records of a machine that its scatter is estimated from
VARIANCE_OF_CANDIDATE, VARIANCE_OF_TWIN = 1.5, 2.0  # of log ratios to both baselines and between these; a group's is 1
LEAST_TURNS, MOST_TURNS = 4, 60  # fewer are not balanced, more take too long to repeat
WISHED_SETS = 6  # turns are limited so that time remains for this many sets, since fewer give wide intervals

Row = tuple[str, RunConfig]  # A candidate of a family and its label
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
        return fmean(seen) if seen else None

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
        return median(speeds[-1]) * float(trial.config.option("images", 0)) + compiling if speeds else None

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
        here = [
            r for r in self._ledger.read()[0] if r.machine.key == self._machine_key and r.role in ("baseline", TWIN)
        ]
        recent = Held(r for r in here[-RECENT_RECORDS:] if r.windows)
        pairs = [s for base in dict.fromkeys(r.baseline_id for r in recent.records) for s in recent.sets(base).values()]
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
        known = {(r.baseline_id, r.run_id) for r in self.held.records}  # by a set, a failure, or a note
        met = not target.further and looked and known.issuperset(pairs)
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
