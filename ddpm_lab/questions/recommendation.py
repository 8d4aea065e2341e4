"""Which settings should be used here? What a search found, measured again step by step, or the best measured change.

One list of steps, each a change with its gain, its interval and the verdict on its quality: headline, tables, the
figure's bars and the file of settings are all made from it. Without a search the list is that of every question's
changes, each against its own baseline.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from ddpm_lab import files
from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, OWN
from ddpm_lab.explain import answer as shared
from ddpm_lab.explain import decisions, findings, machine_state, phrases, quality, stats
from ddpm_lab.explain.answer import Answer, View
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.bars import bars
from ddpm_lab.explain.charts.forest import forest
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import Comparison, comparisons, shown
from ddpm_lab.explain.findings import ANSWERED, Finding, about, plain
from ddpm_lab.explain.frames import RECOMMENDATION, Study, once
from ddpm_lab.explain.table import Table, without_constant
from ddpm_lab.plan import SEARCH, TOGETHER, WEAK, Family
from ddpm_lab.questions import torch_compile
from ddpm_lab.questions.batch_size import beside as batch_sizes
from ddpm_lab.questions.question import Question
from ddpm_lab.questions.search import SIMPLER, Belief, admissible, believe, observations
from ddpm_lab.record import LedgerError
from ddpm_lab.settings_file import OWN as OF_A_RUN
from ddpm_lab.settings_file import settings_text
from ddpm_lab.space import BATCH, Cell, Space

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = Question(title="Which settings should I use on this machine?", file="06_recommendation", asked=False)

FILE = "recommended.toml"
STEPS = 800_000
"""Of a full training, where nobody says how long it is: the steps of Ho et al. (2020) on CIFAR-10."""
GOOD, OPEN = (quality.IDENTICAL, quality.NOT_WORSE), (quality.NOT_MEASURED, quality.NOT_ENOUGH)
"""Verdicts on quality with which a change may be recommended, and those that trials may still turn into one."""
UNTRIED = "quality not shown"
"""Status of an answer that trials would complete."""
_BESIDE = ("peers", "quality", "claims", "compare", "calibrate", "batch_size", SEARCH, RECOMMENDATION)
"""Questions whose comparisons are no changes of a training: other trainers, other work, or answers of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One configuration on the way from the baseline to what was found.

    ``row`` compares it with the baseline, with the verdict on the quality of all changes so far; ``gain`` compares it
    with the step before, in the same sets. ``compiled`` is what a cold compile costs, None where nothing new compiles.
    """

    label: str
    cell: Cell
    row: Comparison
    gain: Comparison
    compiled: torch_compile.BreakEven | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recommendation:
    """What a search found: ``steps`` from the baseline on, of which the first ``count`` are recommended.

    The first ``reach`` are as fast as they must be; where that is more, trials do not say yet what they cost.
    ``study`` holds the sets that measured them again.
    """

    study: Study
    baseline: Step
    steps: tuple[Step, ...]
    count: int
    reach: int
    space: Space
    belief: Belief
    among: tuple[Cell, ...]
    search_sets: int
    failures: tuple[str, ...]

    @property
    def best(self) -> Step:
        """What is recommended: the last of its steps, or the baseline."""
        return (self.baseline, *self.steps)[self.count]

    @property
    def told(self) -> Step | None:
        """What the answer is about: the last step that is recommended, else that may be once it is judged, else any."""
        return self.steps[(self.count or self.reach) - 1] if self.steps else None

    @property
    def training_images(self) -> int:
        """Images of the full training that is projected."""
        return self.study.train_images or STEPS * self.space.baseline.global_batch_size

    def training_seconds(self, count: int) -> float:
        """Return seconds of a full training after so many steps; each compile counts once, an unknown one never."""
        steps = (self.baseline, *self.steps)[: count + 1]
        cold = [s.compiled.cold_seconds for s in steps if s.compiled and not math.isnan(s.compiled.cold_seconds)]
        return math.fsum(cold) + self.training_images / steps[-1].row.images_per_second


@once
def recommendation(study: Study) -> Recommendation | None:
    """Return what the last search in a study of all experiments found; None without one that was measured again."""
    last = next((r for r in reversed(study.records) if r.role == "space" and r.space is not None), None)
    if last is None:
        return None
    space, whose = Space.from_dict(last.config, last.space or {}), attrgetter("experiment", "family", "baseline_id")
    mine = tuple(r for r in study.records if whose(r) == whose(last) and r.role != "space")
    fresh, roles = replace(study, records=mine), ("baseline", "twin", "candidate")
    base, twin, rows = ([r for r in comparisons(fresh) if r.role == role and r.sets] for role in roles)
    if not (base and twin):
        return None
    searched = [r for r in study.records if r.experiment == SEARCH and r.baseline_id == last.baseline_id]
    found, trials = observations(searched, last.baseline_id), quality.Trials.of(study)
    unchanged = replace(base[0], equivalence=quality.Equivalence(verdict=quality.IDENTICAL))
    baseline = Step(label="baseline", cell=space.start, row=unchanged, gain=unchanged)
    steps = _steps(fresh, space, baseline, rows, trials)
    count = _as_far_as(steps, GOOD)
    broke = [r for r in searched if r.role == "candidate" and r.status != "ok"]
    return Recommendation(
        study=fresh,
        baseline=baseline,
        steps=steps,
        count=count,
        reach=max(count, _as_far_as(steps, OPEN)),
        space=space,
        belief=believe(space, found),
        among=tuple(admissible(space, lambda c: trials.verdict(space.baseline, c, last.code_version).verdict)),
        search_sets=len(found),
        failures=tuple(dict.fromkeys(f"{r.label} ({phrases.failed(r.status, r.reason)})" for r in broke)),
    )


def _steps(
    study: Study, space: Space, baseline: Step, rows: Sequence[Comparison], trials: quality.Trials
) -> tuple[Step, ...]:
    """Return the measured candidates by the number of changes, each compared with the one before in the same sets."""
    cells = {config.run_id: cell for cell, config in space.cells.items()}
    known = sorted((r for r in rows if r.run_id in cells), key=lambda r: sum(map(bool, cells[r.run_id])))
    looks = shown(known, study.looks)
    order = dict.fromkeys(set_id for look in looks for set_id in sorted(look.sets))
    logs = [dict.fromkeys(order, 0.0), *(dict(r.logs) for r in known)]  # of the baseline and its twin, and of each row
    over = [[b.get(s, math.nan) - a.get(s, math.nan) for s in order] for a, b in pairwise(logs)]
    decided = decisions.decided(over, [len(look.sets) for look in looks], resolution=study.resolution)
    found = [baseline]
    for row, decision in zip(known, decided, strict=True):
        last, cell = found[-1], cells[row.run_id]
        if row.equivalence.verdict == quality.NOT_MEASURED:  # what learns the very same is as good as the step before
            same = trials.verdict(last.row.config, row.config, row.code_version).verdict == quality.IDENTICAL
            unknown = quality.Equivalence(verdict=quality.NOT_MEASURED)
            row = replace(row, equivalence=last.row.equivalence if same else unknown)  # noqa: PLW2901
        gain = replace(row, ratio=decision.estimate, verdict=decision.word)
        changed = row.config.differences(last.row.config).keys() & {"compile", "compile_mode"}
        compiled = torch_compile.break_even(study, gain) if row.config.compile != "off" and changed else None
        found.append(Step(label=space.changed(cell, last.cell), cell=cell, row=row, gain=gain, compiled=compiled))
    return tuple(found[1:])


def _as_far_as(steps: Sequence[Step], verdicts: Sequence[str]) -> int:
    """Return how many steps, each called faster, end in the last one whose quality has one of these verdicts."""
    sure = [s.row for s in takewhile(lambda step: step.gain.verdict == decisions.FASTER, steps)]
    able = [i for i, r in enumerate(sure, 1) if r.verdict == decisions.FASTER and r.equivalence.verdict in verdicts]
    return max(able, default=0)


def next_change(found: Recommendation) -> tuple[str, str] | None:
    """Return the change of one setting that may gain most over the steps so far, and its command; None without any."""
    if not found.search_sets:
        return None
    belief, space, done = found.belief, found.space, found.steps[: found.reach]
    here, batch = (found.baseline, *done)[-1].cell, list(space.settings).index(BATCH)
    slower = [s for s in found.steps[found.reach : found.reach + 1] if not s.gain.ratio.value > math.exp(SIMPLER)]
    worse = [s for s in found.steps if s.row.equivalence.verdict == quality.WORSE]
    closed = {space.start, *belief.lost, *(s.cell for s in (*done, *slower, *worse))}
    near = [c for c in space.cells if sum(a != b for a, b in zip(c, here, strict=True)) == 1]
    open_ = [c for c in near if c not in closed and (c in found.among or c[batch])]
    best = max(open_, key=lambda c: belief.expected_gain(c, here), default=here)
    if belief.expected_gain(best, here) < SIMPLER:
        return None
    pairs = zip(space.settings, space.values(here), space.values(best), strict=True)
    held = [f"--only {name}={','.join(dict.fromkeys((a.key, b.key)))}" for name, a, b in pairs]
    options = " ".join(held) + " --any-batch --seeds 8" * (best not in found.among)
    return space.changed(best, here), command(found, options)


def command(found: Recommendation, options: str) -> str:
    """Return the command that goes on from here."""
    base = found.space.baseline
    work = f"--workload {base.work_name}" if base.is_own else f"--network {base.network}"
    batch = "" if "batch=" in options else f"--batch-size {base.global_batch_size}"
    data = "--data DATA" if found.study.own_images and not base.is_own else ""
    return " ".join(filter(None, ("ddpm-lab recommend", options, work, batch, data)))


# --- in words, figures and tables -------------------------------------------------------------------------------------


def answer(study: Study) -> Answer:
    """Return what a search found, by the sets that measured it again, or what all questions came to.

    Headline, figure and table are of one source, whichever answers; the other one is a further view.
    """
    searched, rows = recommendation(study), measured(study)
    found = _of_changes(study, rows)
    largest = "The largest batch that fits, and the speed and memory of each size."
    views = [View(caption=largest, name="batch_size", figure=lambda: batch_sizes(study))]
    figure, table = lambda: changes_figure(study), lambda: changes_table(study)
    if searched:
        tried = "What the search tried, by what all its short sets say."
        views.append(View(caption=tried, table=lambda: tried_table(searched)))
        usable = found.sets and found.status == ANSWERED
        if searched.count or ((searched.reach or not rows) and not usable):
            every = "Every change that was measured, each against its own baseline in the same sets."
            views.append(View(caption=every, name="changes", figure=figure if rows else None, table=table))
            found, figure, table = _of_search(searched), lambda: steps_figure(searched), lambda: steps_table(searched)
        else:
            steps, again = lambda: steps_figure(searched), "What the search found, measured again step by step."
            views.append(View(caption=again, name="search", figure=steps, table=lambda: steps_table(searched)))
    return Answer(study=study, finding=found, figure=figure, table=table, views=views)


def _of_search(found: Recommendation) -> Finding:
    where, step, base, change = found.study, found.told, found.space.baseline, next_change(found)
    following = "The next change to try is {}: {}." if change else "No single change is worth trying next."
    rest = (_tried(found), following.format(*change or ()), *machine_state.warnings(where))
    if step is None:
        return plain(where, "Keep the baseline: a search found nothing faster", ANSWERED, *rest)
    words, faster = found.space.changed(step.cell), phrases.difference(step.row.ratio.value)
    row, judged = step.row, step.row.equivalence
    if found.count:
        headline = f"Use {words}: {faster}, quality {row.quality}"
    elif found.reach:
        headline = f"{words}: {faster}; quality {row.quality}{' yet' * (judged.verdict == quality.NOT_MEASURED)}"
    elif row.verdict == decisions.FASTER:
        headline = f"Keep the baseline: {words} is faster, and its quality is {row.quality}"
    else:
        headline = f"Nothing to use yet: {words} against the baseline is {phrases.outcome(row)}"
    again = f"Measured again after the search, against {phrases.settings(base)}, batch {base.global_batch_size}."
    told = about(where, row, headline, again, f"Quality: {quality.full(judged)}.", *rest)
    status = ANSWERED if found.count else UNTRIED if found.reach else told.status
    open_ = found.reach > found.count and found.steps[found.reach - 1].row.equivalence.reason != quality.NO_LOSS_KNOWN
    return replace(told, status=status, way_out=command(found, "--seeds 8") if open_ else "")


def _tried(found: Recommendation) -> str:
    """Return what the search tried, and what it did not and why."""
    belief, space = found.belief, found.space
    ours = [c for c in space.cells if c != space.start]
    seen = [c for c in ours if belief.sets.get(c)]
    open_ = [c for c in found.among if c in ours and c not in seen and c not in belief.lost]
    text = f"The search tried {len(seen)} of {phrases.plural(len(ours), 'combination')} in "
    text += f"{phrases.plural(found.search_sets, 'short set')}."
    if open_ and seen:
        text += f" {phrases.plural(len(open_), 'allowed combination')} {'is' if len(open_) == 1 else 'are'} untried."
    left_out = [f"{label} ({reason})" for label, reason in space.left_out]
    for kind, items in (("Left out", left_out), ("Failed", list(found.failures))):
        text += f" {kind}: {phrases.joined(items)}." if items else ""
    return text


def steps_table(found: Recommendation) -> Table:
    """One row for the baseline and each step; a full training is a projection of the measured speed."""
    rows, dash = [], phrases.DASH
    for i, step in enumerate((found.baseline, *found.steps)):
        row, gain = step.row, step.gain
        rows.append(
            {
                "Configuration": f"{'+ ' * (i > 0)}{step.label}",
                "Against the step before": phrases.ratio_with_interval(gain) if i and gain.sets else dash,
                "Verdict": gain.verdict if i else dash,
                "Against the baseline": phrases.ratio_with_interval(row) if i else dash,
                "Images/s": phrases.significant(row.images_per_second),
                "Step": phrases.seconds(row.step_seconds),
                "Peak memory": phrases.peak_memory(row),
                "Sets": str(row.sets),
                "Quality": row.quality if i else dash,
                f"{found.training_images:,} images": phrases.seconds(found.training_seconds(i)),
                "Compiling pays off": torch_compile.pays_off(step.compiled, gain) if step.compiled else dash,
                "Recommended": "yes" if i == found.count else "",
            }
        )
    return without_constant(rows, {"Compiling pays off": [dash]})


def steps_figure(found: Recommendation) -> Figure:
    """Speed after each change, beginning where the one before ends; what the search tried where no change is left."""
    said, context = _of_search(found).headline, phrases.context(found.study)
    if not found.steps:
        return forest(
            [Panel(rows=[_bar(found.space.changed(cell), ratio) for cell, ratio in _speeds(found)], reference=1)],
            title=said,
            context=context,
            label="speed in the search, relative to the baseline",
            note="What the search tried, by what all its short sets say, with 95 % intervals. None was faster than the "
            "baseline by enough to be measured again.",
        )
    ends = [1.0, *(step.row.ratio.value for step in found.steps)]
    rows = [
        _bar(f"+ {s.label}", s.row.ratio, start, "" if found.count and i >= found.count else s.gain.verdict)
        for i, (s, start) in enumerate(zip(found.steps, ends, strict=False))
    ]
    if found.count > 1:
        rows.append(replace(_bar("recommended", found.best.row.ratio, 1.0), colour=style.SOFT))
    judged = f" Quality of what is recommended: {found.best.row.quality}." if found.count else ""
    return bars(
        [Panel(rows=rows, reference=1)],
        title=said,
        context=context,
        label="speed relative to the baseline",
        note="Measured again after the search, one change more in each row: the bar goes from the speed before to the "
        "speed after, with its 95 % interval over sets. Blue: the change is faster; orange: slower; grey: no "
        f"difference found, or not recommended.{judged}",
    )


def _bar(name: str, ratio: stats.Interval, start: float = 0.0, verdict: str = "") -> Row:
    colour, text = shared.COLOURS.get(verdict, style.OPEN), shared.numbers(ratio)
    return Row(name=name, value=ratio.value, low=ratio.low, high=ratio.high, start=start, colour=colour, text=text)


def tried_table(found: Recommendation) -> Table:
    """What the search tried: each combination with its speed by what all sets say, most likely fastest first."""
    return [
        {
            "Configuration": found.space.changed(cell),
            "In the search, of the baseline's speed": phrases.times(ratio),
            "Short sets": str(found.belief.sets[cell]),
            "May be chosen": "yes" if cell in found.among else "no",
        }
        for cell, ratio in _speeds(found)
    ]


def _speeds(found: Recommendation) -> list[tuple[Cell, stats.Interval]]:
    """What was tried, the fastest first, with its speed relative to the baseline."""
    belief, start, rows = found.belief, found.space.start, []
    for cell in sorted((c for c in belief.sets if c != start), key=lambda c: -belief.speed(c)):
        mean, spread = belief.gain(cell, start)
        value, low, high = (math.exp(mean + side * spread) for side in (0, -1.96, 1.96))
        rows.append((cell, stats.Interval(value=value, low=low, high=high)))
    return rows


def write_settings(study: Study) -> Path | None:
    """Write what the last search in a study recommends as TOML; None without a search, or of the user's own training.

    Where nothing was shown to be faster and not worse that is the baseline. The steps are those of the projected
    training. Raises LedgerError if the folder cannot be written.
    """
    found = recommendation(study)
    if found is None or found.best.row.config.is_own:  # which ddpm-lab train does not train
        return None
    config = found.best.row.config
    dropped = OF_A_RUN if Path(config.data).is_dir() else (*OF_A_RUN, "data", "data_sha256")  # images of elsewhere
    values = {name: value for name, value in config.as_dict().items() if name not in dropped}
    values["train"] = {"steps": max(1, found.training_images // config.global_batch_size)}
    told = [
        _of_search(found).headline + ", so these are the settings of the baseline" * (not found.count),
        f"Measured on {found.study.hardware}, {found.study.date}, by ddpm-lab recommend.",
        "Give it to: ddpm-lab train --config recommended.toml --output-dir FOLDER",
    ]
    path = study.output_dir / FILE
    with files.writing(path, LedgerError):
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, "".join(f"# {' '.join(line.split())}\n" for line in told) + settings_text(values))
    return path


# --- the changes of all questions -------------------------------------------------------------------------------------


def single(c: Comparison) -> bool:
    """Whether a comparison is of one change of a training step, for equal work, whose speed may be claimed."""
    training = c.role == "candidate" and not (c.loader_alone or c.mechanism_only) and c.config.exchange.enabled
    return training and WEAK not in c.family


def measured(study: Study) -> list[Comparison]:
    """Return the comparisons of single changes of a training step, those with sets, the primary ones first."""
    found = [c for c in comparisons(study) if single(c) and c.sets and c.experiment not in _BESIDE]
    return sorted((c for c in found if c.config.workload in (DDPM, OWN)), key=lambda c: not c.primary)


def _faster(rows: Sequence[Comparison], verdicts: Sequence[str]) -> list[Comparison]:
    """Return the changes called faster, in a number format that is not slower itself, with one of these verdicts."""
    slow = {c.config.precision for c in rows if c.experiment == "amp" and c.verdict != decisions.FASTER}
    return [
        c
        for c in rows
        if c.verdict == decisions.FASTER and c.equivalence.verdict in verdicts and c.baseline.precision not in slow
    ]


def combination(study: Study) -> Family | None:
    """Return the changes that may be recommended, together beside the baseline; None for fewer than two.

    The changes of one baseline's questions are applied to that of the first; what cannot be combined is left out.
    """
    found = _faster(measured(study), GOOD)
    base = next((c.baseline for c in found if c.experiment == "amp"), found[0].baseline if found else None)
    config, labels = base, list[str]()
    for c in found:
        new = {name: getattr(c.config, name) for name in c.config.differences(c.baseline)}
        same = all(getattr(c.baseline, name) == getattr(base, name) for name in (*new, "loader"))
        if config and same and all(getattr(config, name) == getattr(base, name) for name in new):
            with contextlib.suppress(ConfigError):
                config = replace(config, **new)
                labels.append(c.label)
    if base is None or config is None or len(labels) < 2:
        return None
    return Family(
        name=f"{base.work_name}, batch {base.global_batch_size}{TOGETHER}",
        baseline=base,
        baseline_label=phrases.settings(base),
        candidates=((", ".join(labels), config),),
        primary=", ".join(labels),
        together=True,
    )


def _together(study: Study) -> list[Comparison]:
    """Return the combinations that were measured, the latest first."""
    every = [c for c in comparisons(study) if c.family.endswith(TOGETHER) and c.role == "candidate" and c.sets]
    return every[::-1]


def _parts(together: Comparison, good: Sequence[Comparison]) -> list[Comparison]:
    """Return the changes that a faster combination joins; none if one is not ``good``, or it learns worse."""
    wanted = together.config.differences(together.baseline)
    parts = [c for c in good if c.config.differences(c.baseline).items() <= wanted.items()]
    told = {name for c in parts for name in c.config.differences(c.baseline)}
    fine = together.verdict == decisions.FASTER and together.equivalence.verdict in (*GOOD, *OPEN)
    return parts if fine and told == wanted.keys() else []


def _of_changes(study: Study, rows: Sequence[Comparison]) -> Finding:
    """Return what may be used, a measured combination first; else the best change that is not judged yet, else none."""
    if not rows:
        return _status(study, "Nothing is measured yet on this machine", quality.NOT_MEASURED, "ddpm-lab report")
    warnings = machine_state.warnings(study)
    if good := sorted(_faster(rows, GOOD), key=lambda c: -c.ratio.value):
        joined = ((c, parts) for c in _together(study) if (parts := _parts(c, good)))
        best, parts = next(joined, (good[0], good[:1]))
        than = "together" if len(parts) > 1 else f"than {best.baseline_label}"
        faster = f"{phrases.difference(best.ratio.value)} {than}".replace("as fast than", "as fast as")
        judged = phrases.joined(list(dict.fromkeys(c.quality for c in parts)))
        headline = f"Use {best.label}: {faster}{findings.with_cores(best)}, quality {judged}"
        return replace(about(study, best, headline, *warnings), status=ANSWERED)
    if untried := _faster(rows, OPEN):
        best = max(untried, key=lambda c: c.ratio.value)
        found = about(study, best, f"{findings.difference(best)}; quality {best.quality}", *warnings)
        return replace(found, status=UNTRIED, way_out=_to_learn_more(study, best))
    if all(c.verdict == decisions.TOO_FEW for c in rows):
        return _status(study, "Too few sets to recommend anything", decisions.TOO_FEW, "make report")
    formats = list(dict.fromkeys(c.baseline.precision for c in rows if c.verdict == decisions.FASTER))
    why = "what is faster here costs quality" if formats else "nothing measured here is faster"
    if formats and not _faster(rows, [c.equivalence.verdict for c in rows]):
        why = f"the only gains are in {phrases.joined(formats)}, which is itself not faster"
    unknown = [c for c in rows if c.primary and not c.answered]
    headline, verb = f"Keep the defaults: {why}", "is" if len(unknown) == 1 else "are"
    headline += f", and {phrases.plural(len(unknown), 'question')} {verb} open" if unknown else ""
    status = decisions.INCONCLUSIVE if len(unknown) == sum(c.primary for c in rows) else ANSWERED
    return _status(study, headline, status, _to_learn_more(study, unknown[0]) if unknown else "")


def _status(study: Study, headline: str, status: str, way_out: str) -> Finding:
    """Return a finding that no comparison leads."""
    return replace(plain(study, headline, status, *machine_state.warnings(study)), way_out=way_out)


def _to_learn_more(study: Study, c: Comparison) -> str:
    """Return the command that answers a comparison, or judges the quality of a change that is faster; else nothing."""
    if c.verdict == decisions.FASTER and c.equivalence.verdict in OPEN:
        able = c.equivalence.reason != quality.NO_LOSS_KNOWN
        return f"{findings.command_of(c, own_images=study.own_images)} --seeds 8" if able else ""
    return findings.way_out_of(c, own_images=study.own_images)


def changes_table(study: Study) -> Table:
    """Every change of a training step that was measured, each against its own baseline in the same sets."""
    rows = measured(study)
    usable = _faster(rows, GOOD)
    return [
        {
            "Change": c.label,
            "Against": f"{c.baseline_label} ({c.family})",
            "Speed": phrases.ratio_with_interval(c),
            "Verdict": phrases.outcome(c),
            "Quality": c.quality,
            "May be recommended": "yes" if c in usable else "no",
            "To learn more": _to_learn_more(study, c) or phrases.DASH,
        }
        for c in sorted(rows, key=lambda c: (c not in usable, -c.ratio.value))
    ]


def changes_figure(study: Study) -> Figure:
    """Every change of a training step that was measured, each against its own baseline, the fastest first."""
    rows = measured(study)
    said = _of_changes(study, rows)
    if not rows:
        return style.message(said.headline, phrases.context(study), said.claim)
    several = len({(c.family, c.label) for c in rows}) > len({c.label for c in rows})
    shown = [*_together(study), *sorted(rows, key=lambda c: -c.ratio.value)]
    named = [shared.row(c, f"{c.label} ({c.family if several else c.baseline_label})") for c in shown]
    return forest(
        [Panel(rows=named, reference=1)],
        title=said.headline,
        context=phrases.context(study),
        note=f"In brackets: what it is compared with, in the same sets. {shared.POINTS}",
        label="speed relative to the baseline (above 1 is faster)",
    )
