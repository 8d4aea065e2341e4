"""The recommendation of a search: what measuring again gave, step by step; in words, in tables and as settings.

One list of steps, each a change with its gain, its interval and the verdict on its quality: headline, tables, the
figure's bars and the file of settings are all made from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise, takewhile
from pathlib import Path

from ddpm_lab import files
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import decisions, gains, phrases, quality, sentences, stats
from ddpm_lab.explain.bayesian import SIMPLER, Belief, admissible, believe, observations
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import Study, once
from ddpm_lab.explain.table import Table, without_constant
from ddpm_lab.plan import SEARCH
from ddpm_lab.record import LedgerError, RunRecord
from ddpm_lab.settings_file import OWN, settings_text
from ddpm_lab.space import BATCH, Cell, Space

FILE = "recommended.toml"
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recommendation:
    """What a search found: ``steps`` from the baseline on, of which the first ``count`` are recommended.

    The first ``reach`` are as fast as they must be; where that is more, trials do not say yet what they cost.
    ``study`` holds the sets that measured them again.
    """

    study: Study
    baseline: Comparison
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
    cells = {config.run_id: cell for cell, config in space.cells.items()}
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


def next_change(found: Recommendation) -> tuple[str, str] | None:
    """The change of one setting that may gain most over the steps so far, and its command; None where none may."""
    if not found.search_sets:
        return None
    belief, space, done = found.belief, found.space, found.steps[: found.reach]
    here = done[-1].cell if done else space.start
    closed = {space.start, *belief.lost, *(s.cell for s in found.steps if s.judged.verdict == quality.WORSE)}
    closed |= {s.cell for s in done} | {
        s.cell for s in found.steps[found.reach : found.reach + 1] if not s.gain.value > math.exp(SIMPLER)
    }
    batch = [i for i, name in enumerate(space.settings) if name == BATCH]
    other_batch = {c for c in belief.cells if c not in found.among and any(c[i] for i in batch)}
    near = [c for c in belief.cells if sum(a != b for a, b in zip(c, here, strict=True)) == 1]
    open_ = [c for c in near if c not in closed and (c in found.among or c in other_batch)]
    best = max(open_, key=lambda c: belief.expected_gain(c, here), default=here)
    if belief.expected_gain(best, here) < SIMPLER:
        return None
    options = _tries(space, best, here) + " --any-batch --seeds 8" * (best in other_batch)
    return space.changed(best, here), command(found, options)


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


def training_images(found: Recommendation) -> int:
    """Images of the full training that is projected."""
    return found.study.train_images or STEPS * found.space.baseline.global_batch_size


def training_seconds(found: Recommendation, row: Comparison, compile_seconds: float = 0.0) -> float:
    """Of a full training at a measured speed; compiling counts once, and where unknown not at all."""
    once = 0.0 if math.isnan(compile_seconds) else compile_seconds
    return once + training_images(found) / row.images_per_second


# In words


def answer(found: Recommendation) -> tuple[str, str, Comparison | None]:
    """What is recommended in one line, and with all that it rests on; and the row that it is about, None for none."""
    short = _headline(found)
    lead = None if found.told is None else replace(found.told.row, equivalence=found.told.judged)
    return short, f"{short}. {_evidence(found)}", lead


def _headline(found: Recommendation) -> str:
    step = found.told
    if step is None:
        return "Keep the baseline: a search found nothing faster"
    words = found.space.changed(step.cell, found.space.start)
    faster = phrases.difference(step.row.ratio.value)
    if found.count:
        return f"Use {words}: {faster}, quality {step.quality}"
    if found.reach:
        return f"{words}: {faster}; quality {step.quality}{' yet' * (step.judged.verdict == quality.NOT_MEASURED)}"
    if step.row.verdict == decisions.FASTER:
        return f"Keep the baseline: {words} is faster, and its quality is {step.quality}"
    return f"Nothing to use yet: {words} against the baseline is {phrases.outcome(step.row)}"


def _evidence(found: Recommendation) -> str:
    """The ratio, each step, the quality, the search and what to try next, in sentences."""
    base = found.space.baseline
    plain = f"the baseline ({phrases.settings(base)}, batch {base.global_batch_size})"
    pieces = []
    if found.told is not None:
        shown = found.told.row
        pieces.append(
            f"Measured again after the search, {shown.label} against {plain} reads {phrases.ratio(shown)} "
            f"({phrases.evidence(shown)}{sentences.noise(shown)})."
        )
        pieces.append(_quality(found, found.told))
    change = next_change(found)
    following = "The next change to try is {}: {}." if change else "No single change is worth trying next."
    return " ".join([*pieces, _tried(found), following.format(*change or ())])


def _quality(found: Recommendation, step: Step) -> str:
    """The verdict on a step's quality, that on faster ones after it, and the command that judges what is open."""
    text, judged = f"Quality: {quality.full(step.judged)}", step.judged
    if found.reach > found.count > 0:
        last = found.steps[found.reach - 1]
        faster, judged = phrases.difference(last.row.ratio.value), last.judged
        text += f"; {found.space.changed(last.cell, found.space.start)}: {faster}, quality {last.quality}"
    if judged.verdict in OPEN and judged.reason != quality.NO_LOSS_KNOWN:
        text += f"; {command(found, '--seeds 8')} measures it"
    return f"{text}."


def _tried(found: Recommendation) -> str:
    """What the search tried, and what it did not and why."""
    belief, space = found.belief, found.space
    ours = [c for c in belief.cells if c != space.start]
    seen = [c for c in ours if belief.sets.get(c)]
    text = f"The search tried {len(seen)} of {phrases.plural(len(ours), 'combination')} in "
    text += f"{phrases.plural(found.search_sets, 'short set')}."
    open_ = [c for c in found.among if not belief.sets.get(c) and c not in (space.start, *belief.lost)]
    if open_ and seen:
        text += f" {phrases.plural(len(open_), 'allowed combination')} {'is' if len(open_) == 1 else 'are'} untried."
    if untried := _untried(found):
        text += f" Not tried: {phrases.joined(untried)}."
    if space.left_out:
        text += f" Left out: {phrases.joined([f'{label} ({reason})' for label, reason in space.left_out])}."
    if found.failures:
        text += f" Failed: {phrases.joined(list(found.failures))}."
    return text


def _untried(found: Recommendation) -> list[str]:
    """Values that no set has had, each with the reason."""
    lines = []
    for place, (name, values) in enumerate(found.space.settings.items()):
        for i, value in enumerate(values[1:], 1):
            having = [c for c in found.belief.cells if c[place] == i]
            if not having or any(found.belief.sets.get(c) or c in found.belief.lost for c in having):
                continue
            chosen = any(c in found.among for c in having)
            why = "did not fit into the time" if chosen else "another batch is another training"
            lines.append(f"{value.label} ({why if chosen or name == BATCH else 'worse in quality'})")
    return lines


def table(found: Recommendation) -> Table:
    """One row for the baseline and each step; a full training is a projection of the measured speed."""
    rows, compiling = [], 0.0
    for i, (label, row, step) in enumerate(
        [("baseline", found.baseline, None), *((f"+ {s.label}", s.row, s) for s in found.steps)]
    ):
        gain = step.gain if step and step.gain.sets else None
        compiling += step.cold_seconds if step else 0.0
        rows.append(
            {
                "Configuration": label,
                "Against the step before": phrases.times(gain) if gain else phrases.DASH,
                "Verdict": step.verdict if step else phrases.DASH,
                "Against the baseline": phrases.ratio_with_interval(row) if step else phrases.DASH,
                "Images/s": phrases.significant(row.images_per_second),
                "Step": phrases.seconds(row.step_seconds),
                "Peak memory": phrases.peak_memory(row),
                "Sets": str(row.sets),
                "Quality": step.quality if step else phrases.DASH,
                f"{training_images(found):,} images": phrases.seconds(training_seconds(found, row, compiling)),
                "Compiling pays off": _pays_off(step),
                "Recommended": "yes" if i == found.count else "",
            }
        )
    return without_constant(rows, {"Compiling pays off": [phrases.DASH]})


def _pays_off(step: Step | None) -> str:
    """After how many steps a cold compile is earned back; a dash where nothing new is compiled."""
    if step is None or not step.cold_seconds:
        return phrases.DASH
    if math.isnan(step.cold_seconds):
        return "compile time unknown"
    return f"after {phrases.significant(step.pays_off_steps)} steps" if step.gain.value > 1 else "never"


def tried_table(found: Recommendation) -> Table:
    """What the search tried: each combination with its speed by what all sets say, most likely fastest first."""
    belief, space = found.belief, found.space
    cells = sorted((c for c in belief.sets if c != space.start), key=lambda c: -belief.mean[belief.index[c]])
    rows = []
    for cell in cells:
        mean, spread = belief.gain(cell, space.start)
        value, low, high = (math.exp(mean + side * spread) for side in (0, -1.96, 1.96))
        rows.append(
            {
                "Configuration": space.changed(cell, space.start),
                "In the search, of the baseline's speed": phrases.times(
                    stats.Interval(value=value, low=low, high=high)
                ),
                "Short sets": str(belief.sets[cell]),
                "May be chosen": "yes" if cell in found.among else "no",
            }
        )
    return rows


# As settings


def write_settings(study: Study) -> Path | None:
    """Write what the last search in a study recommends into its output folder; None where there was no search.

    Nor is one written of the user's own training, whose settings the answer names.

    Where nothing was shown to be faster and not worse that is the baseline. The steps are those of the projected
    training. Raises LedgerError if the folder cannot be written.
    """
    found = recommendation(study)
    if found is None or found.config.is_own:  # which ddpm-lab train does not train
        return None
    here = Path(found.config.data).is_dir()
    values = {name: value for name, value in found.config.as_dict().items() if name not in OWN}
    if not here:  # the images of the machine that measured are not on this one
        values = {name: value for name, value in values.items() if name not in ("data", "data_sha256")}
    steps = max(1, training_images(found) // found.config.global_batch_size)
    told = [
        answer(found)[0] + ", so these are the settings of the baseline" * (not found.count),
        f"Measured on {found.study.hardware}, {found.study.date}, by ddpm-lab recommend.",
        "Give it to: ddpm-lab train --config recommended.toml --output-dir FOLDER",
    ]
    text = "".join(f"# {' '.join(line.split())}\n" for line in told) + settings_text(
        {**values, "train": {"steps": steps}}
    )
    path = study.output_dir / FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, text)
    except OSError as error:
        raise LedgerError(f"cannot write {path}: {error.strerror}; choose another --output-dir") from error
    return path
