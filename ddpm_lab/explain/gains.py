"""What all answers of a machine come to: the changes that were called faster and cost no quality, and together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, OWN, RunConfig
from ddpm_lab.explain import decisions, phrases, quality, sentences
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import RECOMMENDATION, Study
from ddpm_lab.explain.table import Table
from ddpm_lab.plan import SEARCH, TOGETHER, WEAK

GOOD, HARMED = (quality.IDENTICAL, quality.NOT_WORSE), (quality.SLIGHTLY, quality.WORSE)
"""Verdicts on quality with which a change may be recommended, and those that settle that it may not."""
_BESIDE = ("peers", "quality", "claims", "compare", "calibrate", "batch_size", SEARCH, RECOMMENDATION)
"""Questions whose comparisons are no changes of a training: other trainers, other work, or answers of their own."""
_SLOW_ITSELF = ", which is itself not faster"
_USABLE, _NOT_SHOWN = "Faster, and not worse", "Faster; quality not shown to be as good"
_TOLD = (_USABLE, *(f"Faster, and {word}" for word in HARMED), _NOT_SHOWN, "Faster in", "Slower", "No difference")
"""Groups of changes, in the order they are told; what is not answered comes last."""
ANSWERED, UNTRIED = "answered", "quality not shown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What to use: the headline, what it rests on, the comparison that it is about, and how to learn more."""

    headline: str
    detail: str
    status: str
    row: Comparison | None = None
    way_out: str = ""


def measured(study: Study) -> list[Comparison]:
    """Comparisons of single changes of a training step, those with sets, the primary ones first."""
    found = [
        c
        for c in comparisons(study)
        if c.role == "candidate" and c.sets and c.experiment not in _BESIDE and not c.loader_alone
        if c.config.workload in (DDPM, OWN) and c.config.exchange.enabled and WEAK not in c.family
    ]
    return sorted(found, key=lambda c: not c.primary)


def usable(c: Comparison) -> bool:
    """Whether a change may be recommended: called faster, and its quality known not to be worse."""
    return c.verdict == decisions.FASTER and c.equivalence.verdict in GOOD


def _slow_formats(rows: Sequence[Comparison]) -> set[str]:
    """Number formats that are not faster themselves: a gain that was measured in one of them is no gain."""
    return {c.config.precision for c in rows if c.experiment == "amp" and c.verdict != decisions.FASTER}


def _groups(rows: Sequence[Comparison]) -> dict[str, list[Comparison]]:
    """The changes by what is known of them, in the order they are told."""
    slow = _slow_formats(rows)

    def group(c: Comparison) -> str:
        if c.verdict != decisions.FASTER:
            return {decisions.SLOWER: "Slower", decisions.SAME: "No difference"}.get(c.verdict, "Not answered")
        if c.baseline.precision in slow:
            return f"Faster in {c.baseline.precision}{_SLOW_ITSELF}"
        if c.equivalence.verdict in GOOD:
            return _USABLE
        return f"Faster, and {c.equivalence.verdict}" if c.equivalence.verdict in HARMED else _NOT_SHOWN

    found: dict[str, list[Comparison]] = {}
    for c in rows:
        found.setdefault(group(c), []).append(c)
    place = {name: next((i for i, begun in enumerate(_TOLD) if name.startswith(begun)), len(_TOLD)) for name in found}
    return {name: found[name] for name in sorted(found, key=place.__getitem__)}


def _parts(together: Comparison, good: Sequence[Comparison]) -> list[Comparison]:
    """The changes that a combination joins; none where one of them is not among the ``good``, or it learns worse."""
    wanted, told = together.config.differences(together.baseline), set[str]()
    parts = []
    for c in good:
        new = c.config.differences(c.baseline)
        if all(wanted.get(name) == values for name, values in new.items()):
            parts.append(c)
            told |= new.keys()
    return parts if told == wanted.keys() and together.equivalence.verdict not in HARMED else []


def combination(study: Study) -> tuple[RunConfig, str, RunConfig, str] | None:
    """Baseline and the changes that may be recommended, together, with their labels; None for fewer than two.

    The changes of one baseline's questions are applied to that of the first; what cannot be combined is left out.
    """
    changes = _groups(measured(study)).get(_USABLE, [])
    if len(changes) < 2:
        return None
    base = next((c.baseline for c in changes if c.experiment == "amp"), changes[0].baseline)
    config, labels = base, list[str]()
    for c in changes:
        new = {name: getattr(c.config, name) for name in c.config.differences(c.baseline)}
        same = all(getattr(c.baseline, name) == getattr(base, name) for name in (*new, "loader"))
        if not same or any(getattr(config, name) != getattr(base, name) for name in new):
            continue
        try:
            config = dataclasses.replace(config, **new)
        except ConfigError:
            continue
        labels.append(c.label)
    return (base, phrases.settings(base), config, ", ".join(labels)) if len(labels) > 1 else None


def answer(study: Study) -> Answer:
    """The recommendation: the combination that was measured and is faster, else the best single change, else none."""
    rows = measured(study)
    if not rows:
        how = "ddpm-lab report"
        return Answer(headline="Nothing is measured yet on this machine", detail="", status="not measured", way_out=how)
    groups = _groups(rows)
    detail = " ".join(f"{words}: {_named(chosen)}." for words, chosen in groups.items())
    good = groups.get(_USABLE, [])
    for best in reversed([c for c in comparisons(study) if c.family.endswith(TOGETHER) and c.role == "candidate"]):
        if best.sets and best.verdict == decisions.FASTER and (parts := _parts(best, good)):
            return _use(best, f"{phrases.difference(best.ratio.value)} together", parts, detail)
    if good:
        best = max(good, key=lambda c: c.ratio.value)
        than = f"{phrases.difference(best.ratio.value)} than {best.baseline_label}"
        return _use(best, than.replace("as fast than", "as fast as"), [best], detail)
    if untried := groups.get(_NOT_SHOWN):
        best = max(untried, key=lambda c: c.ratio.value)
        short = f"{sentences.compared(best)}; quality {best.quality}"
        return Answer(headline=short, detail=detail, status=UNTRIED, row=best, way_out=_judge(study, best))
    if all(c.verdict == decisions.TOO_FEW for c in rows):
        short = "Too few sets to recommend anything"
        return Answer(headline=short, detail=detail, status=decisions.TOO_FEW, way_out="make report")
    return _keep(rows, detail, study)


def _use(best: Comparison, gain: str, parts: Sequence[Comparison], detail: str) -> Answer:
    judged = phrases.joined(list(dict.fromkeys(c.quality for c in parts)))
    short = f"Use {best.label}: {gain}{sentences.with_cores(best)}, quality {judged}"
    return Answer(headline=short, detail=f"{sentences.evidence(best)} {detail}", status=ANSWERED, row=best)


def _keep(rows: Sequence[Comparison], detail: str, study: Study) -> Answer:
    """Nothing measured may be used: why, and how many questions are open."""
    slow = _slow_formats(rows)
    faster = [c for c in rows if c.verdict == decisions.FASTER]
    formats = list(dict.fromkeys(c.baseline.precision for c in faster))
    why = "what is faster here costs quality" if faster else "nothing measured here is faster"
    if faster and slow.issuperset(formats):
        why = f"the only gains are in {phrases.joined(formats)}{_SLOW_ITSELF}"
    primary = [c for c in rows if c.primary]
    unknown = [c for c in primary if not c.answered]
    short = f"Keep the defaults: {why}"
    if unknown:
        short += f", and {phrases.plural(len(unknown), 'question')} {'is' if len(unknown) == 1 else 'are'} open"
    return Answer(
        headline=short,
        detail=detail,
        status=decisions.INCONCLUSIVE if len(unknown) == len(primary) else ANSWERED,
        way_out=sentences.way_out(unknown[0], own_images=study.own_images) if unknown else "",
    )


def _judge(study: Study, c: Comparison) -> str:
    """The command that judges the quality of a change; empty where trials cannot."""
    if c.equivalence.reason == quality.NO_LOSS_KNOWN:
        return ""
    return f"{sentences.command(c, own_images=study.own_images)} --seeds 8"


def _named(chosen: Sequence[Comparison]) -> str:
    return phrases.joined(list(dict.fromkeys(f"{c.label} ({phrases.ratio_with_interval(c)})" for c in chosen)))


def table(study: Study) -> Table:
    """Every change of a training step that was measured, each against its own baseline in the same sets."""
    return [
        {
            "Change": c.label,
            "Against": f"{c.baseline_label} ({c.family})",
            "Speed": phrases.ratio_with_interval(c),
            "Verdict": phrases.outcome(c),
            "Quality": c.quality,
            "May be recommended": "yes" if usable(c) else "no",
            "To learn more": sentences.way_out(c, own_images=study.own_images) or phrases.DASH,
        }
        for c in sorted(measured(study), key=lambda c: (not usable(c), -c.ratio.value))
    ]
