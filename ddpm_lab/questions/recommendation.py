"""Which settings should be used here? What a search found, measured again step by step, or the best measured change.

A search's answer is a list of steps, each with its gain over the step before and the verdict on the quality of all
changes so far. Without a search it is the ranked list of every question's changes, each against its own baseline; the
bottleneck report ranks the changes of one configuration in the same list.
"""

import json
import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddpm_lab import files
from ddpm_lab.config import DDPM, OWN, RunConfig
from ddpm_lab.explain import answer as shared
from ddpm_lab.explain import charts, findings, machine_state, phrases, quality, stats
from ddpm_lab.explain.answer import Answer, View
from ddpm_lab.explain.charts import Figure, Panel, bars, forest
from ddpm_lab.explain.comparisons import Comparison, comparisons, shown
from ddpm_lab.explain.findings import ANSWERED, Finding, about, plain
from ddpm_lab.explain.selection import RECOMMENDATION, Study, once
from ddpm_lab.explain.table import Table, without_constant
from ddpm_lab.files import NOT_IN_FILES, settings_text
from ddpm_lab.plan import SEARCH, WEAK, Cell, Question, Space, usual_network
from ddpm_lab.questions.search import observations
from ddpm_lab.record import RunRecord, moment
from ddpm_lab.training.setting import usual_settings

QUESTION = Question(title="Which settings should I use on this machine?", file="06_recommendation", asked=False)

FILE = "recommended.toml"
STEPS = 800_000  # of a full training of the baseline: the steps of Ho et al. (2020) on CIFAR-10
USUAL_SIZE = 32  # pixels of a side, of CIFAR-10
UNTRIED = "quality not shown"  # status of an answer that trials would complete


# --- changes, each with its measured gain, the verdict on its quality, and a command ----------------------------------

GOOD, OPEN = (quality.IDENTICAL, quality.NOT_WORSE), (quality.NOT_MEASURED, quality.NOT_ENOUGH)
"""Verdicts on quality with which a change may be recommended, and those that trials may still turn into one."""
OTHER_WORK = ("peers", "claims", "compare", "calibrate", "batch_size")
"""Questions whose comparisons are no changes of a training: other trainers, or other work."""
SEARCHED = (SEARCH, RECOMMENDATION)
_BESIDE = (*OTHER_WORK, *SEARCHED)
FASTER, SLOWER, INCONCLUSIVE, NOT_MEASURED = stats.FASTER, stats.SLOWER, stats.INCONCLUSIVE, "not measured"
NO_GAIN, WORSE, FAILED = "no gain", "worse quality", "failed"
_TIERS = {FASTER: 0, INCONCLUSIVE: 1, NOT_MEASURED: 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change of a configuration, from ``current`` to ``recommended`` settings, and what is known of it.

    ``status`` is faster, inconclusive or not measured, or why it is not recommended: slower, no gain, worse quality,
    failed; ``verdict`` is what its comparison is called. ``ratio`` is the time of ``against`` for equal work over the
    changed one's, with its 95 % interval, NaN where unknown. ``command`` measures it. ``share`` is that of a step in
    the phases that it acts on, ``rationale`` why it may help, and ``evidence`` what is known of it, where there is a
    time budget. A ``usable`` one is faster, and not worse in quality.
    """

    title: str
    against: str
    current: str
    recommended: str
    status: str
    verdict: str
    quality: str
    command: str
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    share: float = 0.0
    rationale: str = ""
    evidence: str = ""
    usable: bool = False

    @property
    def listed(self) -> bool:
        """Whether it is worth applying or measuring, as far as is known."""
        return self.status in _TIERS

    @property
    def rank(self) -> tuple[int, float]:
        """What is faster first, by its lower end; what was not measured by its share; last what seems slower."""
        tier = len(_TIERS) if self.ratio <= 1 else _TIERS.get(self.status, len(_TIERS))
        return tier, -next(x for x in (self.low, self.ratio, self.share) if not math.isnan(x))

    @property
    def expected(self) -> str:
        """Such as "1.48 (1.39 to 1.59)"; a dash where it was not measured."""
        if math.isnan(self.ratio):
            return phrases.DASH
        return phrases.times(stats.Interval(value=self.ratio, low=self.low, high=self.high))


def change(
    row: Comparison | None, config: RunConfig, base: RunConfig, judged: quality.Equivalence, **known: Any
) -> Change:
    """The change from ``base`` to ``config``, by its comparison if there is one, and the verdict on its quality."""
    status = NOT_MEASURED if row is None else FAILED
    verdict = NOT_MEASURED if row is None else phrases.outcome(row)
    if row is not None and row.sets:
        useless = row.sets >= stats.LEAST_SETS and row.ratio.high < 1 + row.resolution
        status = row.verdict if row.resolved else NO_GAIN if useless else INCONCLUSIVE
        known |= {"ratio": row.ratio.value, "low": float(row.ratio.low), "high": float(row.ratio.high)}
    status = WORSE if judged.verdict == quality.WORSE and status != FAILED else status
    known |= {"current": _as_written(base, config), "recommended": _as_written(config, base)}
    known |= {"verdict": verdict, "quality": quality.sentence(judged)}
    return Change(status=status, **known)


def _as_written(one: RunConfig, other: RunConfig) -> str:
    """The settings of one that another does not have, as a file has them: ``precision = "fp32"``."""
    theirs = {**other.flat, "data": one.data}
    changed = ((n, v) for n, v in one.flat.items() if n not in theirs or theirs[n] != v)  # options may be on one side
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in changed)


def changes_table(found: Sequence[Change]) -> Table:
    """One row a change: what it is, its measured gain, the verdict on speed and on quality, and the command."""
    rows = [
        {
            "Change": a.title,
            "Setting": a.recommended,
            "Against": a.against,
            "Speed": a.expected,
            "Verdict": a.verdict,
            "Quality": a.quality,
            "May be used": "yes" if a.usable else "no",
            "Command": a.command or phrases.DASH,
        }
        for a in found
    ]
    return without_constant(rows, {"Against": None})


def single(c: Comparison) -> bool:
    """Whether a comparison is of one change of a training step, for equal work, whose speed may be claimed."""
    training = c.role == "candidate" and not (c.loader_alone or c.mechanism_only) and c.config.exchange.enabled
    return training and WEAK not in c.family


def measured(study: Study) -> list[Comparison]:
    """Return the comparisons, with sets, of single changes of what is ``_shown``, the primary ones first."""
    work = _shown(study)
    return sorted((c for c in _every(study) if _work(c.baseline) == work), key=lambda c: not c.primary)


@once
def _every(study: Study) -> list[Comparison]:
    found = [c for c in comparisons(study) if single(c) and c.sets and c.experiment not in _BESIDE]
    # The lab's own trainer uses loaders that are faster, and have no workers.
    found = [c for c in found if c.config.workload == OWN or (c.config.workload == DDPM and c.experiment != "workers")]
    found = [c for c in found if c.config.global_batch_size == c.baseline.global_batch_size]
    others = {(c.baseline_id, c.run_id) for c in found if c.experiment != "quality"}  # which may ask the same once more
    return all_cores_first(c for c in found if c.experiment != "quality" or (c.baseline_id, c.run_id) not in others)


def all_cores_first(rows: Iterable[Comparison]) -> list[Comparison]:
    """Return comparisons without those with fewer cores that all cores have answered."""
    rows = list(rows)
    whole = {(c.baseline_id, c.run_id) for c in rows if c.answered and not c.baseline.threads}
    ids = [tuple(replace(config, threads=0).run_id for config in (c.baseline, c.config)) for c in rows]
    return [c for c, same in zip(rows, ids, strict=True) if not c.baseline.threads or same not in whole]


@once
def _shown(study: Study) -> tuple[str, str, int] | None:
    """Return the one network, or training of the user's, device and size that an answer is about; None without a gain.

    A GPU's go first, then the network that a report measures by default, then the latest.
    """
    works = {_work(c.baseline) for c in _every(study)} | {_work(r.config) for r in _spaces(study)}
    last = {work: max(moment(r.date) for r in study.records if _work(r.config) == work) for work in works}
    return max(works, key=lambda w: (w[1] == "cuda", w[0] == usual_network(w[1]), last[w]), default=None)


def _spaces(study: Study) -> list[RunRecord]:
    """Return what searches could choose from whose winner was measured again; where nothing else is known, of all."""
    every = [r for r in study.records if r.role == "space" and r.space is not None]
    again = {_family_of(r) for r in study.records if (r.role, r.status) == ("baseline", "ok")}
    done = [r for r in every if _family_of(r) in again]
    return done if done or _every(study) else every


def _family_of(record: RunRecord) -> tuple[str, str, str | None]:
    return record.experiment, record.family, record.baseline_id


def _work(config: RunConfig) -> tuple[str, str, int]:
    return config.work_name, config.device, config.image_size


def _for(config: RunConfig) -> str:
    """Return for which network and size settings are recommended, where a report measures others by itself."""
    network = "" if config.is_own or config.network == usual_network(config.device) else f" for {config.network}"
    return network + f" at {config.image_size}x{config.image_size}" * (config.image_size != USUAL_SIZE)


def faster(rows: Sequence[Comparison], verdicts: Sequence[str]) -> list[Comparison]:
    """Return the changes called faster, with one of these verdicts on quality.

    The number format and the ranks that they build on must be faster themselves, with such a verdict or a good one.
    """
    able, known = [c for c in rows if c.verdict == FASTER and c.equivalence.verdict in verdicts], (*GOOD, *verdicts)
    return [c for c in able if all(b.verdict == FASTER and b.equivalence.verdict in known for b in _beneath(c, rows))]


def _beneath(change: Comparison, rows: Sequence[Comparison]) -> list[Comparison]:
    """Return what is known of a change's number format and ranks: of the same work, else of any on its device."""
    base, names = change.baseline, ("workload", "network", "world_size", "global_batch_size")
    found = list[Comparison]()
    for experiment, name in (("amp", "precision"), ("multi_gpu", "world_size")):
        known = [c for c in rows if (c.experiment, c.config.device) == (experiment, base.device)]
        known = [c for c in known if getattr(c.config, name) == getattr(base, name)]
        found += [c for c in known if all(getattr(c.config, n) == getattr(base, n) for n in names)] or known
    return found


# --- what they come to ------------------------------------------------------------------------------------------------


def _of_changes(study: Study, rows: Sequence[Comparison]) -> Finding:
    """Return the fastest change that may be used; else the fastest that is not judged yet, else none."""
    notes = (_failed(study), *machine_state.warnings(study))
    several = len({c.baseline.global_batch_size for c in rows}) > 1

    def where(c: Comparison, text: str = "") -> str:
        batch, held = f" at batch {c.batch}", c.config.precision
        narrow = held == c.baseline.precision != "fp32" and f"{held} training" not in text
        unit = "GPU" if c.config.device == "cuda" else "rank"
        ranks = f" on {phrases.plural(c.ranks, unit)}" * (c.ranks == c.baseline.world_size > 1)
        return _for(c.baseline) + f" in {held}" * narrow + ranks + batch * (several and batch not in text)

    if not rows:
        return _nothing(study)
    if good := faster(rows, GOOD):
        best = max(good, key=lambda c: c.ratio.value)
        gain = f"{phrases.difference(best.ratio.value)} than {best.baseline_label}".replace("fast than", "fast as")
        headline = f"Use {best.label}{where(best)}: {gain}{findings.with_cores(best)}, quality {best.quality}"
        return replace(about(study, best, headline, *notes), status=ANSWERED)
    if untried := faster(rows, OPEN):
        best = max(untried, key=lambda c: c.ratio.value)
        difference = findings.difference(best)
        headline = f"{difference}{where(best, difference)}; quality {best.quality}"
        return replace(about(study, best, headline, *notes), status=UNTRIED, way_out=_to_learn_more(study, best))
    if all(c.verdict == stats.TOO_FEW for c in rows):
        return plain(study, "Too few sets to recommend anything", stats.TOO_FEW, *notes, way_out=_again(study, rows))
    leading = [c for c in rows if c.primary] or rows
    unknown = [c for c in leading if not c.answered]
    able = unknown or [c for c in rows if not (c.answered or c.ratio.high < 1 + c.resolution)]
    why = "nothing is known to be faster yet" if able else "no change that was measured is faster"
    if any(c.verdict == FASTER for c in rows):
        why = "what is faster here costs quality, or builds on what is not known to be faster"
    headline = f"Keep the defaults{_for(rows[0].baseline)}: {why}"
    status = stats.INCONCLUSIVE if len(unknown) == len(leading) else ANSWERED
    return plain(study, headline, status, *notes, way_out=_to_learn_more(study, able[0]) if able else "")


def _failed(study: Study) -> str:
    """Return a note on the changes of what is shown that failed in some of their sets, or in all; empty without any."""
    work = _shown(study)
    able = [c for c in comparisons(study) if single(c) and c.failed_sets and c.experiment not in _BESIDE]
    lost = [c for c in able if work in (None, _work(c.baseline))]
    return findings.listed("Failed", ((f"{c.label} in {phrases.plural(c.failed_sets, 'set')}", c.reason) for c in lost))


def _nothing(study: Study) -> Finding:
    """Where no change has a speed: whether others disturbed every set, of a search those of its last family."""
    last = _last_search(study)
    late = replace(study, records=last[1] or study.records) if last else study
    able = [c for c in comparisons(late) if (single(c) and c.experiment not in _BESIDE) or c.experiment in SEARCHED]
    if any(c.disturbed_sets for c in able) and not any(c.sets for c in able if c.role == "candidate"):
        way_out = _search_command(study, last[0]) if last else _again(study)
        return plain(late, findings.ALL_DISTURBED, stats.TOO_FEW, *machine_state.warnings(late), way_out=way_out)
    tried = "No change of a step has a measured speed" if study.records else "Nothing is measured"
    return plain(study, f"{tried} yet on this machine", quality.NOT_MEASURED, _failed(study), way_out=_again(study))


def _again(study: Study, rows: Sequence[Comparison] = ()) -> str:
    """The command that answers every question of the work that is shown, or was measured last."""
    able = [r for r in study.records if r.experiment not in _BESIDE and not r.mechanism_only]
    last = max(able, key=lambda r: moment(r.date), default=None)
    config = rows[0].baseline if rows else last.config if last else RunConfig()
    words = ["ddpm-lab report", *findings.work_of(config, usual_network(config.device))]
    words += ["-p image_size", str(config.image_size)] * (config.image_size != USUAL_SIZE)
    where = findings.where_of(study if last else replace(study, records=()), config)
    return " ".join([*words, *("-p device" if word == "--device" else word for word in where)])


def _to_learn_more(study: Study, c: Comparison) -> str:
    """Return the command that answers a comparison, or judges the quality of a change that is faster; else nothing."""
    if c.verdict == stats.FASTER and c.equivalence.verdict in OPEN:
        able = c.experiment not in ("bottleneck", "workers")
        return findings.judging(study, findings.command_of(study, c), c.baseline) if able else ""
    return findings.way_out_of(study, c)


def _changes_figure(study: Study, rows: Sequence[Comparison], said: Finding) -> Figure:
    """Every change of a training step that was measured, each against its own baseline, the fastest first."""
    if not rows:
        return charts.message(said.headline, phrases.context(study), said.claim)
    several = len({(c.family, c.label) for c in rows}) > len({c.label for c in rows})
    fastest_first = sorted(rows, key=lambda c: -c.ratio.value)
    named = [shared.row(c, f"{c.label} ({c.family if several else c.baseline_label})") for c in fastest_first]
    return forest(
        [Panel(rows=named, reference=1)],
        title=said.headline,
        context=phrases.context(study),
        note=f"In brackets: what it is compared with, in the same sets. {shared.POINTS}",
        label="speed relative to the baseline (above 1 is faster)",
    )


def _changes(study: Study, rows: Sequence[Comparison]) -> list[Change]:
    """Return every measured change of a training step against its own baseline, those that may be used first."""
    usable, found = faster(rows, GOOD), []
    for c in rows:
        known = {"title": c.label, "against": f"{c.baseline_label} ({c.family})", "usable": c in usable}
        found.append(change(c, c.config, c.baseline, c.equivalence, command=_to_learn_more(study, c), **known))
    return sorted(found, key=lambda a: (not a.usable, a.rank))


# --- what a search found ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One configuration on the way from the baseline to what was found.

    ``row`` compares it with the baseline, with the verdict on the quality of all changes so far; ``gain`` compares it
    with the step before, in the same sets.
    """

    label: str
    cell: Cell
    row: Comparison
    gain: Comparison


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recommendation:
    """What a search found: ``steps``, the baseline first, of which those up to step ``count`` are recommended.

    Up to step ``reach`` they are as fast as they must be; where that is more, trials do not say yet what they cost.
    ``study`` holds the sets that measured them again; ``tried`` says what its ``short_sets`` tried,
    and what was left out or failed.
    """

    study: Study
    steps: tuple[Step, ...]
    count: int
    reach: int
    space: Space
    short_sets: int
    tried: str

    @property
    def best(self) -> Step:
        """What is recommended: the last of its steps, or the baseline."""
        return self.steps[self.count]


def _last_search(study: Study) -> tuple[Space, tuple[RunRecord, ...]] | None:
    """What the last search of what is ``_shown`` could choose from, and the sets that measured again what it found."""
    work = _shown(study)
    spaces = [r for r in _spaces(study) if _work(r.config) == work]
    if (last := max(spaces, key=lambda r: moment(r.date), default=None)) is None:
        return None
    again = (r for r in study.records if _family_of(r) == _family_of(last) and r.role != "space")
    return Space.from_dict(last.config, last.space or {}), tuple(again)


@once
def recommendation(study: Study) -> Recommendation | None:
    """Return what the last search in a study of all experiments found; None without one that was measured again."""
    if (last := _last_search(study)) is None:
        return None
    space, mine = last
    fresh, roles = replace(study, records=mine), ("baseline", "twin", "candidate")
    base, twin, rows = ([r for r in comparisons(fresh) if r.role == role and r.sets] for role in roles)
    if not (base and twin) or space.cells.get(space.start) != space.baseline:
        return None
    searched = [r for r in study.records if r.experiment == SEARCH and r.baseline_id == space.baseline.run_id]
    found = observations(searched, space.baseline.run_id)
    trials = quality.Trials((*study.trials, *study.other_trials), study.published_trials)
    unchanged = replace(base[0], equivalence=quality.Equivalence(verdict=quality.IDENTICAL))
    baseline = Step(label="baseline", cell=space.start, row=unchanged, gain=unchanged)
    steps = _steps(fresh, space, baseline, rows, trials)
    count = _as_far_as(steps, GOOD)
    failed = [r for r in (*searched, *mine) if r.role == "candidate" and r.status != "ok"]
    names = {config.run_id for cell, config in space.cells.items() if cell != space.start}
    seen = {run_id for logs in found for run_id, log in logs.items() if math.isfinite(log)} & names
    every, short = phrases.plural(len(names), "combination"), phrases.plural(len(found), "short set")
    tried = [f"The search tried {len(seen)} of {every} in {short}.", findings.listed("Left out", space.left_out)]
    tried += [findings.listed("Failed", ((r.label, phrases.failure(r)) for r in failed))]
    return Recommendation(
        study=fresh,
        steps=steps,
        count=count,
        reach=max(count, _as_far_as(steps, OPEN)),
        space=space,
        short_sets=len(found) if seen else 0,
        tried=" ".join(filter(None, tried)),
    )


def _steps(
    study: Study, space: Space, baseline: Step, rows: Sequence[Comparison], trials: quality.Trials
) -> tuple[Step, ...]:
    """Return the baseline and what was measured, by the number of changes, each against the one before in its sets."""
    cells = {config.run_id: cell for cell, config in space.cells.items()}
    known = sorted((r for r in rows if r.run_id in cells), key=lambda r: sum(map(bool, cells[r.run_id])))
    looks = shown(known, study.looks)
    order = looks[-1][1]
    logs = [dict.fromkeys(order, 0.0), *(dict(r.logs) for r in known)]  # of the baseline and its twin, and of each row
    over = [[b.get(s, math.nan) - a.get(s, math.nan) for s in order] for a, b in pairwise(logs)]
    decided = stats.decided(over, [len(sets) for _, sets in looks], resolution=study.resolution)
    found = [baseline]
    for row, decision in zip(known, decided, strict=True):
        last, cell = found[-1], cells[row.run_id]
        if row.equivalence.verdict == quality.NOT_MEASURED:  # what learns the very same is as good as the step before
            same = trials.verdict(last.row.config, row.config, row.code_version).verdict == quality.IDENTICAL
            unknown = quality.Equivalence(verdict=quality.NOT_MEASURED)
            row = replace(row, equivalence=last.row.equivalence if same else unknown)  # noqa: PLW2901
        gain = replace(row, ratio=decision.estimate, verdict=decision.word) if len(known) > 1 else row
        found.append(Step(label=space.changed(cell, last.cell), cell=cell, row=row, gain=gain))
    return tuple(found)


def _as_far_as(steps: Sequence[Step], verdicts: Sequence[str]) -> int:
    """Return how many steps end in the last one that is faster than all that may be used before it.

    Its quality has one of these ``verdicts``. A step between that gains nothing by itself does not end them.
    """
    last = 0
    for i, step in enumerate(steps[1:], 1):
        before, row = dict(steps[last].row.logs), step.row
        gain = stats.estimate([log - before.get(each, math.nan) for each, log in row.logs]) if last else row.ratio
        faster = step.gain.verdict == stats.FASTER if last == i - 1 else gain.low > 1
        if faster and row.verdict == stats.FASTER and row.equivalence.verdict in verdicts:
            last = i
    return last


def _of_search(found: Recommendation) -> Finding:
    where, base = found.study, found.space.baseline
    rest = (found.tried, *machine_state.warnings(where))
    if len(found.steps) == 1:
        if lost := next((r for r in where.records if r.role == "candidate"), None):
            failed = f"Keep the baseline{_for(base)}: {lost.label}, fastest in the search, failed when measured again"
            return plain(where, failed, FAILED, *rest, way_out=_search_command(where, found.space))
        if found.short_sets < stats.LEAST_SETS:
            none = f"Nothing faster is found yet{_for(base)}, in {phrases.plural(found.short_sets, 'short set')}"
            return plain(where, none, stats.TOO_FEW, *rest, way_out=_search_command(where, found.space))
        return plain(where, f"Keep the baseline{_for(base)}: a search found nothing faster", ANSWERED, *rest)
    step = found.steps[found.count or found.reach or -1]
    row, judged = step.row, step.row.equivalence
    words, faster = found.space.changed(step.cell), phrases.difference(row.ratio.value) + findings.with_cores(row)
    if found.count:
        headline = f"Use {words}{_for(base)}: {faster}, quality {row.quality}"
    elif found.reach:
        yet = " yet" * (judged.verdict == quality.NOT_MEASURED)
        headline = f"{words}{_for(base)}: {faster}; quality {row.quality}{yet}"
    elif row.verdict == stats.FASTER:
        headline = f"Keep the baseline{_for(base)}: {words} is faster, and its quality is {row.quality}"
    else:
        headline = f"Nothing to use yet{_for(base)}: {words} against the baseline is {phrases.outcome(row)}"
    against = f"{phrases.work(base)}, {phrases.settings(base)}, batch {base.global_batch_size}"
    again = f"Measured again after the search, against {against}."
    finding = about(where, row, headline, again, f"Quality: {quality.sentence(judged, basis=True)}.", *rest)
    status = ANSWERED if found.count else UNTRIED if found.reach else finding.status
    if not (found.count or found.reach or row.answered):
        return replace(finding, way_out=_search_command(where, found.space))
    way_out = findings.judging(where, _search_command(where, found.space), base) if found.reach > found.count else ""
    return replace(finding, status=status, way_out=way_out)


def _search_command(study: Study, space: Space) -> str:
    """The command that goes on with a search."""
    base = space.baseline
    words = ["ddpm-lab recommend", *findings.work_of(base)]
    words += ["--preset", space.preset] * (space.preset == "full")
    words += ["--image-size", str(base.image_size)] * (base.image_size != USUAL_SIZE)
    words += [f"--batch-size {base.global_batch_size}"]
    words += [f"--only {shlex.quote(name + '=' + ','.join(keys))}" for name, keys in space.only]
    return " ".join([*words, *findings.where_of(study, base)])


def steps_table(found: Recommendation) -> Table:
    """One row for the baseline and each step."""
    return [
        {
            "Configuration": f"{'+ ' * (i > 0)}{step.label}",
            "Against the step before": phrases.times(step.gain.ratio) if i and step.gain.sets else phrases.DASH,
            "Verdict": step.gain.verdict if i else phrases.DASH,
            "Against the baseline": phrases.times(step.row.ratio) if i else phrases.DASH,
            "Sets": str(step.row.sets),
            "Quality": step.row.quality if i else phrases.DASH,
            "Recommended": "yes" if i == found.count else "",
        }
        for i, step in enumerate(found.steps)
    ]


def _steps_figure(found: Recommendation) -> Figure:
    """Speed after each change, beginning where the one before ends."""
    said, context = _of_search(found).headline, phrases.context(found.study)
    if len(found.steps) == 1:
        return charts.message(said, context, found.tried)
    rows = []
    for i, (last, s) in enumerate(pairwise(found.steps), 1):
        used = i <= found.count or not found.count
        colour = shared.COLOURS.get(s.gain.verdict, charts.OPEN) if used else charts.OPEN
        rows.append(replace(shared.row(s.row, f"+ {s.label}"), start=last.row.ratio.value, colour=colour, dots=()))
    if found.count > 1:
        rows.append(replace(shared.row(found.best.row, "recommended"), start=1.0, colour=charts.SOFT, dots=()))
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


# --- the answer -------------------------------------------------------------------------------------------------------


def answer(study: Study) -> Answer:
    """Return what a search found, by the sets that measured it again, or what all questions came to.

    Headline, figure and table are of one source, whichever answers; the other one is a further view.
    """
    searched, rows = recommendation(study), measured(study)
    found = of_all = _of_changes(study, rows)
    figure, table = lambda: _changes_figure(study, rows, of_all), lambda: changes_table(_changes(study, rows))
    views = list[View]()
    if searched:
        usable = found.sets and found.status == ANSWERED
        base, most = searched.space.baseline.run_id, searched.best.row.ratio.high
        # Which a search that was held to some settings, or of earlier code, may not have tried.
        better = [c for c in faster(rows, GOOD) if c.baseline_id == base and c.ratio.low > most]
        steps, again = lambda: _steps_figure(searched), "What the search found, measured again step by step."
        if not better if searched.count else ((searched.reach or not rows) and not usable):
            every = "Every change that was measured, each against its own baseline in the same sets."
            views.append(View(caption=every, name="changes", figure=figure if rows else None, table=table))
            found, figure, table = _of_search(searched), steps, lambda: steps_table(searched)
        else:
            if searched.reach:  # which the file of settings is about
                more = _of_search(searched)
                found = replace(found, notes=(f"The search: {more.headline}.", *found.notes), way_out=more.way_out)
            views.append(View(caption=again, name="search", figure=steps, table=lambda: steps_table(searched)))
    elif rows and _last_search(study) and (lost := _nothing(study)).headline == findings.ALL_DISTURBED:
        found = replace(
            found, notes=(f"The search has {phrases.within(lost.headline)}.", *found.notes), way_out=lost.way_out
        )
    return Answer(study=study, finding=found, figure=figure, table=table, views=views)


def write_settings(study: Study) -> Path | None:
    """Write what the last search in a study recommends as TOML; None without a search, or of the user's own training.

    Where nothing was shown to be faster and not worse, the file leaves the settings for speed to ``train``. The steps
    are those of a training of STEPS steps of the baseline. Raises OSError if the folder cannot be written.
    """
    found = recommendation(study)
    if found is None or found.best.row.config.is_own:  # which ddpm-lab train does not train
        return None
    config = found.best.row.config
    elsewhere = () if Path(config.data).is_dir() else ("data", "data_sha256")
    dropped = (*NOT_IN_FILES, *elsewhere, "threads")  # as many as are free when it trains
    if not found.count:
        dropped = (*dropped, *usual_settings(config.device), "compile_mode")
    values = {name: value for name, value in config.as_dict().items() if name not in dropped}
    values["train"] = {"steps": max(1, STEPS * found.space.baseline.global_batch_size // config.global_batch_size)}
    comments = [
        _of_search(found).headline + "; settings for speed are left to train" * (not found.count),
        f"Measured on {found.study.hardware}, {found.study.date}, by ddpm-lab recommend.",
        "Give it to: ddpm-lab train --config recommended.toml --output-dir FOLDER",
    ]
    path = study.output_dir / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    files.replace(path, "".join(f"# {' '.join(line.split())}\n" for line in comments) + settings_text(values))
    return path
