"""The answer to a question: a headline, a line of evidence, and notes on what limits them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from ddpm_lab.explain import (
    batch_sizes,
    budget,
    compiling,
    decisions,
    limits,
    links,
    machine_state,
    operators,
    peers,
    phrases,
    quality,
    samples,
    scaling,
    sentences,
    trained,
)
from ddpm_lab.explain.comparisons import COMPARED, MECHANISM_ONLY, QUALITY, Comparison, comparisons
from ddpm_lab.explain.frames import ALL_REDUCE, CLAIMS, RECOMMENDATION, Study, once
from ddpm_lab.explain.questions import claims, recommendation
from ddpm_lab.explain.stats import Interval
from ddpm_lab.plan import FORMATS, LIMITS, TUNED, WHOLE_QUESTION, WITH_TRIALS

FAILED = "failed"
ANSWERED = "answered"
NOT_EXPLAINED = "not explained"
_SOUND = ("ok", "left out")
"""Statuses of a record that did not fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to a question, as every page, notebook, table and command shows it.

    ``headline`` is short enough for a title, ``evidence`` one line on what it rests on, and ``notes`` are sentences on
    what limits it. ``verdict`` is that of the comparison that the headline is about. ``status`` is answered,
    inconclusive, too few sets, failed, not measured, or not explained. ``sets`` are those behind the comparison; ratio
    and interval are NaN without one, and so is the interval of the repeated baseline (``noise_low``, ``noise_high``).
    ``way_out`` is the command that would give an answer where there is none, with its minutes. ``published`` records
    came with the checkout.
    """

    experiment: str
    question: str
    headline: str
    evidence: str = ""
    notes: tuple[str, ...] = ()
    verdict: str
    status: str
    hardware: str
    date: str
    published: bool = False
    sets: int = 0
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    noise_low: float = math.nan
    noise_high: float = math.nan
    quality: str = f"quality {QUALITY}"
    way_out: str = ""

    @property
    def claim(self) -> str:
        """The finding as one text."""
        how = "Published records, not measured here but" if self.published else "Measured"
        known = self.hardware and (self.notes or self.status != quality.NOT_MEASURED)
        where = f"{how} on {self.hardware}, {self.date}; {self.quality}." if known else ""
        return " ".join(filter(None, (f"{self.headline}.", self.evidence, *self.notes, where)))

    @property
    def speed(self) -> str:
        """Ratio, interval and sets, such as "1.62 (1.55 to 1.69), 6 sets"; a dash where nothing was compared."""
        if not self.sets:
            return phrases.DASH
        ratio = Interval(value=self.ratio, low=self.low, high=self.high)
        return f"{phrases.times(ratio)}, {phrases.plural(self.sets, 'set')}"


@once
def finding(study: Study) -> Finding:
    """The answer that the records of a study give to its question."""
    if study.experiment == RECOMMENDATION:
        return _recommendation(study)
    if not study.records:
        how = f"The command that measures it: ddpm-lab run {study.experiment}."
        return _plain(study, "Nothing is measured yet", quality.NOT_MEASURED, how)
    if study.experiment == ALL_REDUCE and (answer := links.answer(study)) is not None:
        found = _plain(study, answer[0], ANSWERED, *machine_state.warnings(study), evidence=answer[1])
        return replace(found, verdict="measured", quality="no training, so no quality")
    return _OWN.get(study.experiment, _comparison)(study)


def _plain(study: Study, headline: str, status: str, *notes: str, evidence: str = "") -> Finding:
    """A finding about no comparison; empty notes are dropped."""
    return Finding(
        experiment=study.experiment,
        question=phrases.QUESTIONS.get(study.experiment, study.experiment),
        headline=headline,
        evidence=evidence.strip(),
        notes=tuple(filter(None, map(str.strip, notes))),
        verdict=status,
        status=status,
        hardware=study.hardware,
        date=study.date,
        published=study.published,
    )


def _about(study: Study, row: Comparison, headline: str, *notes: str, evidence: str = "") -> Finding:
    """A finding about one comparison."""
    as_written = (row.label,) if study.experiment == "compare" else ("bf16", "fp", "tf32")
    return replace(
        _plain(
            study,
            headline if headline.startswith(as_written) else phrases.begun(headline),
            ANSWERED if row.answered else row.verdict,
            *notes,
            evidence=evidence or sentences.evidence(row),
        ),
        verdict=row.verdict,
        sets=row.sets,
        ratio=row.ratio.value,
        low=row.ratio.low,
        high=row.ratio.high,
        noise_low=row.noise.low,
        noise_high=row.noise.high,
        quality=f"quality {row.quality}",
    )


def _comparison(study: Study) -> Finding:
    rows = scaling.rows(study) if study.experiment == scaling.EXPERIMENT else comparisons(study)
    others = [r for r in rows if r.role not in ("baseline", "twin")]
    measured = [r for r in others if r.sets]
    candidates = [r for r in measured if not r.loader_alone] or measured
    notes = _notes(study, rows)
    if study.experiment == "exchange":
        candidates = [r for r in candidates if sentences.trains(r)]
    if study.experiment == peers.EXPERIMENT:
        candidates = [r for r in candidates if not r.family.startswith(LIMITS)]
        if not candidates and (found := _alone(study, others, notes)) is not None:
            return found
    if not candidates:
        return _nothing_to_compare(study, rows, others, notes)
    if study.experiment == peers.EXPERIMENT and (nearest := peers.lead(study)) is not None:
        return _about(study, nearest, peers.headline(nearest), peers.evidence(study), *notes)
    lead = sentences.lead(candidates)
    own = []
    if study.experiment == scaling.EXPERIMENT:
        own.append(scaling.efficiencies(study, candidates, lead))
    elif study.experiment == "torch_compile":
        own.append(compiling.sentence(study, lead))
    elif study.experiment == "exchange":
        own += exposed_communication(rows)
    harmed = [_named(r, rows) for r in candidates if r is not lead and r.equivalence.verdict == quality.WORSE]
    own += [f"Worse in quality: {phrases.joined(harmed)}."] if harmed else []
    way_out = sentences.way_out(lead, own_images=study.own_images)
    return replace(_about(study, lead, sentences.headline(lead), *own, *notes), way_out=way_out)


def _named(row: Comparison, rows: Sequence[Comparison]) -> str:
    """The label of a row, with its family where there are several."""
    return f"{row.label} of {row.family}" if len({r.family for r in rows}) > 1 else row.label


def _listed(kind: str, items: Iterable[tuple[str, str]]) -> str:
    """Such as "Failed: fp16 and tf32 (no GPU); compiled (no compiler)."; empty without ``items`` (name, reason)."""
    by_reason: dict[str, list[str]] = {}
    for name, why in dict.fromkeys(items):
        by_reason.setdefault(why, []).append(name)
    told = [phrases.joined(names) + (f" ({why})" if why else "") for why, names in by_reason.items()]
    return f"{kind}: {'; '.join(told)}." if told else ""


def _notes(study: Study, rows: Sequence[Comparison]) -> tuple[str, ...]:
    """What every comparison is shown with: what failed or was left out, faults of training, and the machine."""
    largest = batch_sizes.sentence(study) if study.experiment == batch_sizes.EXPERIMENT else ""
    machine = (machine_state.unknown(study), *machine_state.warnings(study))
    return (largest, *left_over(rows), trained.unsound(study), untrained(study), lost(study, rows), *machine)


def left_over(rows: Sequence[Comparison]) -> tuple[str, str, str]:
    """Name the configurations without a speed, and why: those that failed, were left out, or have none to claim."""
    lacking = [r for r in rows if r.role != "twin" and not r.sets and not r.mechanism_only]
    mechanism = [(r.label, "") for r in rows if r.mechanism_only and r.role != "twin"]
    failed = [(_named(r, rows), phrases.failure(r)) for r in lacking if r.status not in _SOUND]
    left_out = [(_named(r, rows), r.reason) for r in lacking if r.status == "left out"]
    return (
        _listed("Failed", failed),
        _listed("Left out", left_out),
        _listed(MECHANISM_ONLY.capitalize(), mechanism),
    )


def untrained(study: Study) -> str:
    """Name the configurations that were not trained for quality as often as was planned, and why."""
    notes = [r for r in study.records if r.role == "note" and r.config.purpose == "quality"]
    lacking = [
        r
        for r in notes
        if not any(t.run_id == r.run_id and quality.speaks_for(t, r.code_version) for t in study.trials)
    ]
    return _listed("Not trained as planned", ((r.label, str(r.reason)) for r in lacking))


def lost(study: Study, rows: Sequence[Comparison]) -> str:
    """Name the configurations that failed in some sets beside those that they were measured in, and why."""
    have = {r.run_id for r in rows if r.sets}
    failed = [r for r in study.records if r.role in COMPARED and r.status not in _SOUND and r.run_id in have]
    sets = phrases.plural(len({r.set_id for r in failed}), "set")
    return _listed(f"Lost in {sets}", ((r.label, phrases.failed(r.status, r.reason)) for r in failed))


def exposed_communication(rows: Sequence[Comparison]) -> list[str]:
    """How much shorter a step is where ranks exchange nothing: a note for each family."""
    told = []
    for row in rows:
        if row.role != "candidate" or sentences.trains(row) or not row.sets:
            continue
        if row.resolved:
            shorter, low, high = (100 * (1 - 1 / v) for v in (row.ratio.value, *row.ratio.ends))
            span = "" if math.isnan(low) else f" ({low:.1f} to {high:.1f} %)"
            text = f"{shorter:.1f} % shorter{span}: exposed communication"
        else:
            text = f"not called shorter (ratio {phrases.ratio(row)}, {phrases.evidence(row)})"
        told.append(f"Without exchange a step of {row.family} is {text}.")
    return told


def _alone(study: Study, others: Sequence[Comparison], notes: Sequence[str]) -> Finding | None:
    """The answer to ``peers`` where no other trainer runs here, or where only the machine's peaks were asked for."""
    rivals = [r for r in others if not r.family.startswith(LIMITS)]
    peaks = f"Peaks of this machine: {known}" if (known := limits.peaks(study)) else ""
    unable = [r.label for r in rivals if r.status == "unsupported" and not r.label.endswith((TUNED, FORMATS))]
    if unable and all(r.status in ("unsupported", "left out") for r in rivals):
        headline = f"No other trainer can run here: {phrases.joined(list(dict.fromkeys(unable)))}"
        return _plain(study, headline, FAILED, peers.evidence(study), f"{peaks}." if peaks else "", *notes)
    return replace(_plain(study, peaks, ANSWERED, *notes), verdict="measured") if peaks and not rivals else None


def _nothing_to_compare(
    study: Study, rows: Sequence[Comparison], others: Sequence[Comparison], notes: Sequence[str]
) -> Finding:
    """The finding of a study none of whose candidates has a speed: why, and what would give one."""
    bases = [r for r in rows if r.role == "baseline"]
    failed = [r for r in others if not r.mechanism_only and r.status not in _SOUND]
    hidden = [r for r in others if r.mechanism_only]
    unusable = [r for r in bases if not r.sets and not r.mechanism_only]
    few = next((r for r in bases if r.config.device == "cpu" and r.config.threads), None)  # the others were taken
    status, about = FAILED, None
    if (whole := next((r for r in rows if r.label == WHOLE_QUESTION), None)) is not None:
        status, notes = quality.NOT_MEASURED, (f"{whole.reason}.",)
        headline = f"Left out: this cannot be asked of {whole.config.work_name}"
    elif any(r.disturbed_sets for r in others or rows):
        status, about = decisions.TOO_FEW, (others or rows)[0]
        headline = "No answer yet: other processes disturbed every set"
    elif bases and len(unusable) == len(bases):
        headline = f"The baseline failed, so nothing can be compared: {unusable[0].label}"
    elif failed:
        headline = f"Every candidate failed: {_labels(failed)}"
    elif hidden:
        status, notes = MECHANISM_ONLY, ()
        headline = f"{MECHANISM_ONLY.capitalize()}: {_labels(hidden)}"
    elif (last := next((r for r in reversed(study.records) if r.status not in _SOUND), None)) is not None:
        # A compile from empty caches, a search, or a twin: none of them is a row.
        notes = (f"{phrases.failed(last.status, last.reason)}.", *notes)
        headline = f"Nothing can be compared, since {last.label} failed"
    elif few is None:
        status, headline = quality.NOT_MEASURED, "Nothing to compare with the baseline was measured"
    else:
        status, about, cores = quality.NOT_MEASURED, few, few.config.threads * few.config.node_size
        free = f"{phrases.plural(cores, 'core')} {'was' if cores == 1 else 'were'} free"
        headline = f"Not measured: {free}, and every candidate needs more"
    way_out = sentences.command(about, own_images=study.own_images) if about else ""
    return replace(_plain(study, headline, status, *notes), way_out=way_out)


def _labels(rows: Sequence[Comparison]) -> str:
    return phrases.joined(list(dict.fromkeys(r.label for r in rows)))


def _claims(study: Study) -> Finding:
    headline, decided = claims.answer(study)
    found = _plain(study, headline, ANSWERED, decided, *machine_state.warnings(study))
    return replace(found, verdict="judged", quality="quality in the table, where a claim is about it")


def _trained(study: Study) -> Finding:
    """What each setting costs in quality; the one named first is the fastest that is not worse."""
    rows = trained.rows(study)
    if not any(r.equivalence.seeds for r in rows):
        return _comparison(study)
    headline, lead = trained.headline(rows)
    notes = (trained.evidence(rows), trained.unsound(study), untrained(study), *machine_state.warnings(study))
    fid = f"FID: {samples.fid_sentence(trained.fids(study))}."
    found = _about(study, lead, headline, *notes, trained.elsewhere(study), fid, evidence=trained.method(study).strip())
    return replace(found, status=ANSWERED if trained.answered(rows) else quality.NOT_ENOUGH)


def _profile(study: Study) -> Finding:
    record = operators.latest_profile(study.records)
    if record is None:
        failed = next((r for r in reversed(study.records) if r.status != "ok"), None)
        if failed is None:
            how = "The command that measures it: ddpm-lab run profile."
            return _plain(study, "No profile was recorded", quality.NOT_MEASURED, how)
        why = f"{failed.label}: {phrases.failed(failed.status, failed.reason)}."
        return _plain(study, "The profile failed", FAILED, why)
    if (taken := budget.budget(record)) is not None:
        mechanism = f"{MECHANISM_ONLY.capitalize()}." if record.mechanism_only else ""
        status, verdict = (ANSWERED, "profiled") if taken.explained else (NOT_EXPLAINED, NOT_EXPLAINED)
        found = _plain(study, budget.headline(taken), status, mechanism, evidence=f"{budget.evidence(taken)}.")
        return replace(found, verdict=verdict)
    if not operators.operators(record):
        return _plain(study, "The profile holds no operator time", FAILED)
    headline, text = operators.shares(record)
    return replace(_plain(study, headline, ANSWERED, evidence=f"{text}."), verdict="profiled")


_OWN: dict[str, Callable[[Study], Finding]] = {
    "profile": _profile,
    trained.EXPERIMENT: _trained,
    CLAIMS: _claims,
}
"""Questions whose answer is no comparison of speeds."""


def _recommendation(study: Study) -> Finding:
    """What a search found, by the sets that measured it again; without one what all questions came to."""
    said, searched = recommendation.answer(study), recommendation.recommendation(study)
    where = replace(study, records=searched.study.records) if searched and said.notes else study
    notes = (*said.notes, *machine_state.warnings(where))
    found = (
        _about(where, said.row, said.headline, *notes)
        if said.row
        else _plain(where, said.headline, said.status, *notes)
    )
    return replace(found, status=said.status, way_out=said.way_out)


def how_to_judge(study: Study) -> str:
    """The command that measures what a question's settings cost in quality; empty where it is known, or none does."""
    found = finding(study)
    able = study.experiment in WITH_TRIALS and study.experiment != peers.EXPERIMENT  # which is about other trainers
    if not able or not found.sets or found.quality != f"quality {QUALITY}":
        return ""
    command = f"ddpm-lab run {study.experiment} --seeds 8"
    last = study.records[-1]
    if last.config.is_own:
        offers = [o for r in study.records for rank in r.witness.get("ranks", ()) for o in rank.get("offers", ())]
        give = "" if "held_out_loss" in offers else "a held_out_loss and then "
        return f"{give}{command} --workload {last.config.work_name}"
    return f"{command}{' --data DATA' * study.own_images}"
