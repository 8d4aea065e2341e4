"""The recommendation of a search: what measuring again gave, step by step, what it costs, and what to try next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise, takewhile
from statistics import fmean

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import decisions, gains, phrases, quality, stats
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import Study, once
from ddpm_lab.explain.machine_state import joules_per_image
from ddpm_lab.plan import SEARCH
from ddpm_lab.record import RunRecord
from ddpm_lab.search import SIMPLER, Belief, admissible, believe, observations
from ddpm_lab.space import BATCH, Cell, Space

STEPS = 800_000
"""Of a full training, where nobody says how long it is: the steps of Ho et al. (2020) on CIFAR-10."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One configuration on the way from the baseline to what was found.

    ``row`` compares it with the baseline, ``gain`` with the step before, in the same sets, with the ``verdict`` on
    that. ``judged`` is the verdict on the quality of all changes so far. A compiled step took ``cold_seconds`` to
    compile, NaN where that is not known, and earns it back after ``pays_off_steps``.
    """

    label: str
    cell: Cell
    row: Comparison
    gain: stats.Estimate
    verdict: str
    judged: quality.Equivalence
    cold_seconds: float = 0.0
    pays_off_steps: float = 0.0

    @property
    def config(self) -> RunConfig:
        """The whole configuration."""
        config: RunConfig = self.row.config
        return config

    @property
    def quality(self) -> str:
        """The verdict in a few words."""
        return quality.sentence(self.judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """A change that may be worth trying, and the command; ``again`` is what sets after the search say, if any do."""

    label: str
    again: Step | None
    command: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recommendation:
    """What a search found: ``steps`` from the baseline on, of which the first ``count`` are recommended.

    The first ``reach`` are as fast as they must be; where that is more, trials do not say yet what they cost.
    ``study`` holds the sets that measured them again, ``twin`` the baseline against itself there.
    """

    study: Study
    baseline: Comparison
    twin: Comparison
    steps: tuple[Step, ...]
    count: int
    reach: int
    space: Space
    belief: Belief
    among: tuple[Cell, ...]
    search_sets: int
    failures: tuple[str, ...]

    @property
    def best(self) -> Comparison:
        """The row of what is recommended: the last of its steps, or the baseline."""
        return self.steps[self.count - 1].row if self.count else self.baseline

    @property
    def cell(self) -> Cell:
        """What is recommended, in the space."""
        return self.steps[self.count - 1].cell if self.count else self.space.start

    @property
    def told(self) -> Step | None:
        """What the answer is about: the last step that is recommended, else that may be once it is judged, else any."""
        return self.steps[(self.count or self.reach) - 1] if self.steps else None

    @property
    def judged(self) -> quality.Equivalence:
        """The verdict on its quality."""
        same = quality.Equivalence(verdict=quality.IDENTICAL, reason="nothing is changed")
        return self.steps[self.count - 1].judged if self.count else same

    @property
    def config(self) -> RunConfig:
        """What is recommended."""
        config: RunConfig = self.best.config
        return config


@once
def recommendation(study: Study) -> Recommendation | None:
    """The answer of the last search in a study of all experiments; None without one that was measured again."""
    told = [r for r in study.records if r.role == "space" and r.space is not None]
    if not told:
        return None
    last = told[-1]
    space = Space.from_dict(last.config, last.space or {})
    whose = (last.experiment, last.family, last.baseline_id)
    mine = [r for r in study.records if (r.experiment, r.family, r.baseline_id) == whose and r.role != "space"]
    fresh = replace(study, records=tuple(mine))
    of_role = {
        role: [r for r in comparisons(fresh) if r.role == role and r.sets] for role in ("baseline", "twin", "candidate")
    }
    if not (of_role["baseline"] and of_role["twin"]):
        return None
    searched = [r for r in study.records if r.experiment == SEARCH and r.baseline_id == last.baseline_id]
    found = observations(searched, last.baseline_id)
    trials = quality.Trials.of(study)
    among = admissible(space, lambda c: trials.verdict(space.baseline, c, last.code_version).verdict)
    steps = _steps(fresh, space, of_role["candidate"], trials)
    count = _as_far_as(steps, gains.GOOD)
    broke = [r for r in searched if r.role == "candidate" and r.status != "ok"]
    failures = [f"{r.label} ({phrases.failed(r.status, r.reason)})" for r in broke]
    return Recommendation(
        study=fresh,
        baseline=of_role["baseline"][0],
        twin=of_role["twin"][0],
        steps=steps,
        count=count,
        reach=max(count, _as_far_as(steps, OPEN)),
        space=space,
        belief=believe(space, found),
        among=tuple(among),
        search_sets=len(found),
        failures=tuple(dict.fromkeys(failures)),
    )


def _steps(study: Study, space: Space, rows: Sequence[Comparison], trials: quality.Trials) -> tuple[Step, ...]:
    """The measured candidates by the number of their changes, each compared with the one before in the same sets."""
    cells = {config.run_id: cell for cell, config in space.cells().items()}
    known = sorted((r for r in rows if r.run_id in cells), key=lambda r: sum(map(bool, cells[r.run_id])))
    order, looks = _shown(known, study.looks)
    logs = [dict.fromkeys(order, 0.0), *(dict(r.logs) for r in known)]  # of the baseline and its twin, and of each row
    over = [[b.get(s, math.nan) - a.get(s, math.nan) for s in order] for a, b in pairwise(logs)]
    found: list[Step] = []
    for row, decision in zip(known, decisions.decided(over, looks, resolution=study.resolution), strict=True):
        last = found[-1].cell if found else space.start
        cell, gain = cells[row.run_id], decision.estimate
        previous = found[-1].config if found else space.baseline
        cold, pays_off = _compiling(study, row, gain, previous)
        found.append(
            Step(
                label=space.changed(cell, last),
                cell=cell,
                row=row,
                gain=gain,
                verdict=decision.word,
                judged=_judged(row, trials, previous, found),
                cold_seconds=cold,
                pays_off_steps=pays_off,
            )
        )
    return tuple(found)


def _shown(rows: Sequence[Comparison], looks: Sequence[RunRecord]) -> tuple[list[str], list[int]]:
    """The sets of some rows in the order they were shown, and how many of them each answer rested on.

    Without a record of any answer all of them are one.
    """
    every = dict.fromkeys(set_id for r in rows for set_id, _ in r.logs)
    order, counts = dict[str, None](), [0]
    for look in sorted(looks, key=lambda r: datetime.fromisoformat(r.date)):
        order |= dict.fromkeys(s for s in (look.look or {}).get("sets", ()) if s in every)
        counts += [len(order)] * (len(order) > counts[-1])
    return (list(order), counts[1:]) if order else (list(every), [len(every)])


def _judged(row: Comparison, trials: quality.Trials, before: RunConfig, steps: Sequence[Step]) -> quality.Equivalence:
    """The verdict against the baseline, or that of the step before where this one is shown to learn the very same."""
    if row.equivalence.verdict != quality.NOT_MEASURED:
        return row.equivalence
    same = trials.verdict(before, row.config, row.code_version)
    if same.verdict == quality.IDENTICAL:
        return steps[-1].judged if steps else same
    return quality.Equivalence(verdict=quality.NOT_MEASURED)


def _compiling(study: Study, row: Comparison, gain: stats.Estimate, before: RunConfig) -> tuple[float, float]:
    """Seconds of a cold compile, and the steps after which they are earned back; 0 where nothing new is compiled."""
    config = row.config
    if config.compile == "off" or (config.compile, config.compile_mode) == (before.compile, before.compile_mode):
        return 0.0, 0.0
    cold = [r.stages["compile"] for r in study.records if r.run_id == row.run_id and r.compile_cache == "cold"]
    seconds = stats.geometric_mean(cold)
    return seconds, stats.break_even_steps(seconds, row.step_seconds * gain.value, gain.value)


OPEN = (quality.NOT_MEASURED, quality.NOT_ENOUGH)
"""Verdicts on quality that trials may still turn into one that lets a step be recommended."""


def _as_far_as(steps: Sequence[Step], verdicts: Sequence[str]) -> int:
    """How many steps, each called faster, end in the last one whose quality has one of these verdicts."""
    sure = takewhile(lambda step: step.verdict == decisions.FASTER, steps)
    able = [i for i, s in enumerate(sure, 1) if s.row.verdict == decisions.FASTER and s.judged.verdict in verdicts]
    return max(able, default=0)


def next_change(found: Recommendation) -> Next | None:
    """The change of one setting that may gain most over the steps so far; None where none is expected to."""
    belief, here = found.belief, found.steps[found.reach - 1].cell if found.reach else found.space.start
    known = {step.cell for step in found.steps[: found.reach]}
    after = {step.cell: step for step in found.steps[found.reach : found.reach + 1]}
    lost = {step.cell for step in after.values() if not step.gain.value > math.exp(SIMPLER)}
    near = [
        c
        for c in belief.cells
        if sum(a != b for a, b in zip(c, here, strict=True)) == 1 and c not in {*belief.lost, found.space.start}
    ]
    worse = {step.cell for step in found.steps if step.judged.verdict == quality.WORSE}
    other_batch = {c for c in near if found.space.setting(BATCH, c) and c not in found.among}
    open_ = [c for c in near if c not in known | worse | lost and (c in found.among or c in other_batch)]
    if not open_ or not found.search_sets:
        return None
    best = max(open_, key=lambda c: belief.expected_gain(c, here))
    if belief.expected_gain(best, here) < SIMPLER:
        return None
    return Next(
        label=found.space.changed(best, here),
        again=after.get(best),  # measured again too, though not to be recommended
        command=command(found, _tries(found.space, best, here) + " --any-batch --seeds 8" * (best in other_batch)),
    )


def _tries(space: Space, cell: Cell, over: Cell) -> str:
    """The options that hold every setting at what a cell has, but for what another has, which is where to set out."""
    pairs = zip(space.settings, space.values(over), space.values(cell), strict=True)
    return " ".join(f"--only {name}={','.join(dict.fromkeys((a.key, b.key)))}" for name, a, b in pairs)


def command(found: Recommendation, options: str) -> str:
    """The command that goes on from here."""
    base = found.space.baseline
    work = f"--workload {base.work_name}" if base.is_own else f"--network {base.network}"
    words = ["ddpm-lab recommend", options, work]
    words += [] if "batch=" in options else [f"--batch-size {base.global_batch_size}"]
    own = not base.is_own and found.study.own_images
    return " ".join(word for word in (*words, "--data DATA" if own else "") if word)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """A full training at a measured speed: seconds, and joules, NaN where no power was measured."""

    images: int
    seconds: float
    joules: float


def forecast(found: Recommendation, row: Comparison, compile_seconds: float = 0.0) -> Forecast:
    """Time and energy of a full training with a configuration; compiling counts once, and where unknown not at all."""
    images = found.study.train_images or STEPS * found.space.baseline.global_batch_size
    once = 0.0 if math.isnan(compile_seconds) else compile_seconds
    joules = images * _joules_per_image(found.study, row.run_id)
    return Forecast(images=images, seconds=once + images / row.images_per_second, joules=joules)


def _joules_per_image(study: Study, run_id: str) -> float:
    """Of the GPUs of a configuration, from the power that they drew in its windows; NaN where none was measured."""
    windows = [w for r in study.records if r.run_id == run_id and r.status == "ok" for w in r.windows if w.images]
    known = [joules for w in windows if (joules := joules_per_image(w)) is not None]
    return fmean(known) if known and len(known) == len(windows) else math.nan
