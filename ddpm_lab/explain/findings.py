"""From a study to the sentence that answers its question, computed, and never claiming more than the records show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddpm_lab.explain import (
    batch_sizes,
    budget,
    compiling,
    decisions,
    gains,
    limits,
    links,
    machine_state,
    operators,
    peers,
    phrases,
    quality,
    recommended,
    recommended_words,
    samples,
    scaling,
    sentences,
    stats,
    trained,
)
from ddpm_lab.explain.comparisons import MECHANISM_ONLY, QUALITY, Comparison, comparisons
from ddpm_lab.explain.frames import ALL_REDUCE, CLAIMS, RECOMMENDATION, Study, once
from ddpm_lab.explain.questions import claims
from ddpm_lab.plan import FORMATS, LIMITS, TUNED, WHOLE_QUESTION, WITH_TRIALS

FAILED = "failed"
ANSWERED = "answered"
NOT_EXPLAINED = "not explained"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The answer to a question.

    ``headline`` is short enough for a title; ``claim`` adds the evidence. ``verdict`` is the one of the comparison
    that the claim is about. ``status`` says whether there is an answer: answered, inconclusive, too few sets, failed,
    or not measured. ``sets`` are those behind the comparison; ratio and interval are NaN without one. ``way_out`` is
    the command that would give an answer where there is none, with its minutes.
    """

    experiment: str
    question: str
    headline: str
    claim: str
    verdict: str
    status: str
    hardware: str
    date: str
    sets: int
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    noise_low: float = math.nan
    noise_high: float = math.nan
    quality: str = f"quality {QUALITY}"
    way_out: str = ""

    def evidence(self) -> str:
        """Ratio, interval and sets of the comparison that the answer is about; a dash where it is about none."""
        if not self.sets:
            return "\N{EN DASH}"
        ratio = stats.Interval(value=self.ratio, low=self.low, high=self.high)
        return f"{phrases.times(ratio)}, {phrases.plural(self.sets, 'set')}"


@once
def finding(study: Study) -> Finding:
    """The answer that the records of a study give to its question."""
    if study.experiment == RECOMMENDATION:
        return _recommendation(study)
    if not study.records:
        return _plain(study, "Nothing is measured yet", _how_to(study.experiment), quality.NOT_MEASURED)
    if study.experiment in _OWN:
        return _OWN[study.experiment](study)
    if study.experiment == ALL_REDUCE and (answer := links.answer(study)) is not None:
        short, evidence = answer
        ending = machine_state.busy(study) + _where(study, "no training, so no quality")
        return _plain(study, short, f"{evidence}{ending}", ANSWERED, "measured")
    return _comparison(study)


def _how_to(experiment: str) -> str:
    return f"The command that measures it: ddpm-lab run {experiment}."


def _plain(study: Study, short: str, rest: str, status: str, verdict: str | None = None) -> Finding:
    return Finding(
        experiment=study.experiment,
        question=phrases.QUESTIONS.get(study.experiment, study.experiment),
        headline=short,
        claim=f"{short}. {rest}".strip(),
        verdict=verdict or status,
        status=status,
        hardware=study.hardware,
        date=study.date,
        sets=0,
    )


def _comparison(study: Study) -> Finding:
    rows = scaling.rows(study) if study.experiment == scaling.EXPERIMENT else comparisons(study)
    others = [r for r in rows if r.role not in ("baseline", "twin")]
    measured = [r for r in others if r.sets]
    training = [r for r in measured if not r.loader_alone] or measured
    ending = sentences.left_over(rows) + trained.unsound(study) + sentences.untrained(study)
    ending += sentences.lost(study, rows) + machine_state.unknown(study) + machine_state.busy(study)
    ending += _where(study, sentences.quality(rows, evidence=True))
    if study.experiment == batch_sizes.EXPERIMENT:
        ending = f"{batch_sizes.sentence(study)}{ending}"
    if study.experiment == "exchange":
        training = [r for r in training if sentences.trains(r)]
    if study.experiment == peers.EXPERIMENT:
        training = [r for r in training if not r.family.startswith(LIMITS)]
    if not training and study.experiment == peers.EXPERIMENT and (found := _alone(study, others, ending)) is not None:
        return found
    if not training:
        return _nothing_to_compare(study, rows, others, ending)
    if study.experiment == peers.EXPERIMENT and (nearest := peers.lead(study)) is not None:
        short = peers.headline(nearest)
        text = f"{short}. {peers.evidence(study)}{ending}"
        return _about(study, nearest, short, text, _status(nearest))
    lead = sentences.lead(training)
    short = sentences.headline(lead)
    extra = f" {scaling.efficiencies(study, training, lead)}" if study.experiment == scaling.EXPERIMENT else ""
    extra += sentences.tally(training, lead) + _extra(study, rows, lead) + machine_state.peaks(rows, lead)
    text = f"{short}. {sentences.evidence(lead)}{extra}{ending}"
    return replace(
        _about(study, lead, short, text, _status(lead)), way_out=sentences.way_out(lead, own_images=study.own_images)
    )


def _status(row: Comparison) -> str:
    return ANSWERED if row.answered else row.verdict


def _alone(study: Study, others: Sequence[Comparison], ending: str) -> Finding | None:
    """Of this trainer beside others, where these cannot run here, or where nothing but the machine was asked for."""
    rivals = [r for r in others if not r.family.startswith(LIMITS)]
    peaks = f"Peaks of this machine: {known}" if (known := limits.peaks(study)) else ""
    unable = [r.label for r in rivals if r.status == "unsupported"]
    away = [label for label in unable if not label.endswith((TUNED, FORMATS))]
    if away and all(r.status in ("unsupported", "left out") for r in rivals):
        told = " ".join(text for text in (peers.evidence(study), f"{peaks}." if peaks else "") if text)
        short = f"No other trainer can run here: {phrases.joined(list(dict.fromkeys(away)))}"
        return _plain(study, short, f"{told}{ending}".strip(), FAILED)
    return _plain(study, peaks, ending.strip(), ANSWERED, "measured") if peaks and not rivals else None


def _claims(study: Study) -> Finding:
    ending = machine_state.busy(study) + _where(study, "quality where a claim is about it")
    short, decided = claims.answer(study)
    found = _plain(study, short, f"{decided}{ending}", ANSWERED, "judged")
    return replace(found, quality="quality in the table, where a claim is about it")


def _trained(study: Study) -> Finding:
    """What each setting costs in quality; the one named first is the fastest that is not worse."""
    rows = trained.rows(study)
    judged = [r for r in rows if r.equivalence.seeds]
    if not judged:
        return _comparison(study)
    short, lead = trained.headline(rows)
    ending = f"{trained.unsound(study)}{sentences.untrained(study)}"
    ending += f"{machine_state.busy(study)} {trained.method(study)}{trained.elsewhere(study)}"
    ending += f" FID: {samples.fid_sentence(trained.fids(study))}."
    ending += _where(study, sentences.quality(rows))
    status = ANSWERED if trained.answered(rows) else quality.NOT_ENOUGH
    return _about(study, lead, short, f"{short}. {trained.evidence(rows)}{ending}", status)


def _about(study: Study, row: Comparison, short: str, text: str, status: str) -> Finding:
    named = (row.label,) if study.experiment == "compare" else ("bf16", "fp", "tf32")  # as their owner wrote it
    short, text = (t if t.startswith(named) else phrases.begun(t) for t in (short, text))
    found = replace(
        _plain(study, short, "", status, row.verdict),
        claim=text,
        sets=row.sets,
        ratio=row.ratio.value,
        low=row.ratio.low,
        high=row.ratio.high,
        noise_low=row.noise.low,
        noise_high=row.noise.high,
    )
    return replace(found, quality=f"quality {row.quality}")


def _extra(study: Study, rows: Sequence[Comparison], lead: Comparison) -> str:
    """What an experiment says beside the ratio."""
    if study.experiment == "torch_compile":
        return f" {compiling.sentence(study, lead)}"
    if study.experiment == "exchange":
        return sentences.exposed_communication(rows)
    if study.experiment == "workers":
        size = lead.config.image_size
        shown = [r for r in rows if r.sets and r.role != "twin" and r.config.image_size == size]
        alone = [r for r in shown if r.loader_alone]
        trained = [r for r in shown if not r.loader_alone]
        if alone and trained:
            rates = phrases.joined([f"{phrases.throughput(r)} with {r.label}" for r in alone])
            most = max(trained, key=lambda r: r.images_per_second)
            return f" The loader alone delivers {rates}, where training takes at most {phrases.throughput(most)}."
    return ""


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


def _where(study: Study, judged: str = f"quality {QUALITY}") -> str:
    measured = "Published records, not measured here but" if study.published else "Measured"
    return f" {measured} on {study.hardware}, {study.date}; {judged}."


def _nothing_to_compare(study: Study, rows: Sequence[Comparison], others: Sequence[Comparison], ending: str) -> Finding:  # noqa: PLR0911 - each return is a reason
    if (whole := next((r for r in rows if r.label == WHOLE_QUESTION), None)) is not None:
        short = f"Left out: this cannot be asked of {whole.config.work_name}"
        return _plain(study, short, f"{whole.reason}.", quality.NOT_MEASURED)
    if any(r.disturbed_sets for r in others or rows):
        short = "No answer yet: in every set other processes took the cores that it needed"
        typed = sentences.command(others[0] if others else rows[0], own_images=study.own_images)
        return replace(_plain(study, short, ending.strip(), decisions.TOO_FEW), way_out=typed)
    bases = [r for r in rows if r.role == "baseline"]
    failed_base = [r for r in bases if not r.sets and not r.mechanism_only]
    failed = [r for r in others if not r.mechanism_only and r.status not in ("ok", "left out")]
    if bases and len(failed_base) == len(bases):
        short = f"The baseline failed, so nothing can be compared: {failed_base[0].label}"
        return _plain(study, short, ending.strip(), FAILED)
    if failed or any(r.mechanism_only for r in others):
        hidden = [r for r in others if r.mechanism_only]
        names = phrases.joined(list(dict.fromkeys(r.label for r in failed or hidden)))
        if failed:
            return _plain(study, f"Every candidate failed: {names}", ending.strip(), FAILED)
        return _plain(study, f"{MECHANISM_ONLY.capitalize()}: {names}", _where(study).strip(), MECHANISM_ONLY)
    lost = next((r for r in reversed(study.records) if r.status not in ("ok", "left out")), None)
    if lost is not None:  # a compile from empty caches, a search, or a twin: none of them is a row
        reason = phrases.failed(lost.status, lost.reason)
        return _plain(study, f"Nothing can be compared, since {lost.label} failed", f"{reason}.{ending}", FAILED)
    few = next((r for r in bases if r.config.device == "cpu" and r.config.threads), None)  # the others were taken
    if few is None:
        short = "Nothing to compare with the baseline was measured"
        return _plain(study, short, ending.strip(), quality.NOT_MEASURED)
    cores = few.config.threads * few.config.node_size
    free = f"{phrases.plural(cores, 'core')} {'was' if cores == 1 else 'were'} free"
    short = f"Not measured: {free}, and every candidate needs more"
    found = _plain(study, short, ending.strip(), quality.NOT_MEASURED)
    return replace(found, way_out=sentences.command(few, own_images=study.own_images))


def _profile(study: Study) -> Finding:
    record = operators.latest_profile(study.records)
    if record is None:
        failed = next((r for r in reversed(study.records) if r.status != "ok"), None)
        if failed is None:
            return _plain(study, "No profile was recorded", _how_to("profile"), quality.NOT_MEASURED)
        why = phrases.failed(failed.status, failed.reason)
        return _plain(study, "The profile failed", f"{failed.label}: {why}.{_where(study)}", FAILED)
    if (taken := budget.budget(record)) is not None:
        mechanism = f" {MECHANISM_ONLY.capitalize()}." if record.mechanism_only else ""
        text = f"{budget.evidence(taken)}.{mechanism}{_where(study)}"
        status, verdict = (ANSWERED, "profiled") if taken.explained else (NOT_EXPLAINED, NOT_EXPLAINED)
        return _plain(study, budget.headline(taken), text, status, verdict)
    if operators.classes(record).empty:
        return _plain(study, "The profile holds no operator time", _where(study).strip(), FAILED)
    short, text = operators.shares(record)
    return _plain(study, short, f"{text}.{_where(study)}", ANSWERED, "profiled")


_OWN = {"profile": _profile, trained.EXPERIMENT: _trained, CLAIMS: _claims}
"""Questions whose answer is no comparison of speeds."""


def _recommendation(study: Study) -> Finding:
    """What a search found, by the sets that measured it again; without one what all questions came to."""
    searched = recommended.recommendation(study)
    if searched is None or (not searched.reach and gains.measured(study)):
        return _combined(study)
    if not searched.count and gains.answer(study).status == ANSWERED and gains.answer(study).row:
        return _combined(study)  # which may be used now
    where = replace(study, records=searched.study.records)
    short, text, lead = recommended_words.answer(searched)
    text += f"{machine_state.busy(where)} Measured on {where.hardware}, {where.date}."
    if lead is None:
        return _plain(where, short, text.removeprefix(f"{short}. "), ANSWERED)
    if searched.count or not searched.reach:
        return _about(where, lead, short, text, ANSWERED if searched.count else _status(lead))
    way_out = recommended.command(searched, "--seeds 8")
    return replace(_about(where, lead, short, text, gains.UNTRIED), way_out=way_out)


def _combined(study: Study) -> Finding:
    """What the answers to all questions come to together."""
    found = gains.answer(study)
    text = f"{found.headline}. {found.detail}{machine_state.busy(study)} Measured on {study.hardware}, {study.date}."
    if found.row is None:
        return replace(_plain(study, found.headline, "", found.status), claim=text, way_out=found.way_out)
    return replace(_about(study, found.row, found.headline, text, found.status), way_out=found.way_out)
