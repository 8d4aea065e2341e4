"""What all answers of a machine come to: the changes that were called faster and cost no quality, and together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, OWN, RunConfig
from ddpm_lab.explain import decisions, phrases, quality, sentences
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import RECOMMENDATION, Study
from ddpm_lab.plan import SEARCH, TOGETHER, WEAK

GOOD, HARMED = (quality.IDENTICAL, quality.NOT_WORSE), (quality.SLIGHTLY, quality.WORSE)
"""Verdicts on quality with which a change may be recommended, and those that settle that it may not."""
_BESIDE = ("peers", "quality", "claims", "compare", "calibrate", "batch_size", SEARCH, RECOMMENDATION)
"""Questions whose comparisons are no changes of a training: other trainers, other work, or answers of their own."""
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


def _on_fast_ground(rows: list[Comparison]) -> list[Comparison]:
    """Without changes that were measured in a number format which is not faster itself: their gain is no gain."""
    slow = {c.config.precision for c in rows if c.experiment == "amp" and c.verdict != decisions.FASTER}
    return [c for c in rows if c.baseline.precision not in slow]


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
    changes = [c for c in _on_fast_ground(measured(study)) if usable(c)]
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
    together = [c for c in comparisons(study) if c.family.endswith(TOGETHER) and c.role == "candidate" and c.sets]
    ground = _on_fast_ground(rows)
    good = [c for c in ground if usable(c)]
    faster = [c for c in ground if c.verdict == decisions.FASTER and c not in good]
    untried = [c for c in faster if c.equivalence.verdict not in HARMED]
    lost = [c for c in rows if c.verdict == decisions.FASTER and c not in ground]
    unknown = [c for c in rows if not c.answered and c.primary]
    detail = _detail(rows, ground, lost)
    for best in reversed(together):
        if best.verdict == decisions.FASTER and (parts := _parts(best, good)):
            gain = f"{phrases.difference(best.ratio.value)} together{sentences.with_cores(best)}"
            short = f"Use {best.label}: {gain}, {_quality(parts)}"
            return Answer(headline=short, detail=f"{sentences.evidence(best)} {detail}", status=ANSWERED, row=best)
    if good:
        best = max(good, key=lambda c: c.ratio.value)
        gain = f"{phrases.difference(best.ratio.value)} than {best.baseline_label}{sentences.with_cores(best)}"
        short = f"Use {best.label}: {gain.replace('as fast than', 'as fast as')}, {_quality([best])}"
        return Answer(headline=short, detail=f"{sentences.evidence(best)} {detail}", status=ANSWERED, row=best)
    if untried:
        best = max(untried, key=lambda c: c.ratio.value)
        short = f"{sentences.compared(best)}; quality {best.quality}"
        return Answer(headline=short, detail=detail, status=UNTRIED, row=best, way_out=_judge(study, best))
    if all(c.verdict == decisions.TOO_FEW for c in rows):
        return Answer(
            headline="Too few sets to recommend anything",
            detail=detail,
            status=decisions.TOO_FEW,
            way_out="make report",
        )
    how = sentences.way_out(unknown[0], own_images=study.own_images) if unknown else ""
    why = "what is faster here costs quality" if faster else "nothing measured here is faster"
    if lost and not faster:
        why = f"the only gains are {_only_in(lost)}"
    short = f"Keep the defaults: {why}"
    status = decisions.INCONCLUSIVE if len(unknown) == len([c for c in rows if c.primary]) else ANSWERED
    if unknown:
        short += f", and {phrases.plural(len(unknown), 'question')} {'is' if len(unknown) == 1 else 'are'} open"
    return Answer(headline=short, detail=detail, status=status, way_out=how)


def _quality(changes: list[Comparison]) -> str:
    words = dict.fromkeys(c.quality for c in changes)
    return f"quality {phrases.joined(list(words))}"


def _only_in(lost: Sequence[Comparison]) -> str:
    formats = list(dict.fromkeys(c.baseline.precision for c in lost))
    return f"in {phrases.joined(formats)}, which {'is' if len(formats) == 1 else 'are'} itself not faster"


def _judge(study: Study, c: Comparison) -> str:
    """The command that judges the quality of a change; empty where trials cannot."""
    if c.equivalence.reason == quality.NO_LOSS_KNOWN:
        return ""
    return f"{sentences.command(c, own_images=study.own_images)} --seeds 8"


def _detail(rows: list[Comparison], ground: list[Comparison], lost: list[Comparison]) -> str:
    """What was recommended and what was not, and why, in a few sentences."""
    faster = [c for c in ground if c.verdict == decisions.FASTER]
    told = []
    for words, chosen in (
        ("Faster, and not worse", [c for c in faster if usable(c)]),
        *((f"Faster, and {word}", [c for c in faster if c.equivalence.verdict == word]) for word in HARMED),
        (
            "Faster; quality not shown to be as good",
            [c for c in faster if c.equivalence.verdict not in (*GOOD, *HARMED)],
        ),
        (f"Faster {_only_in(lost)}", lost),
        ("Slower", [c for c in rows if c.verdict == decisions.SLOWER]),
        ("No difference", [c for c in rows if c.verdict == decisions.SAME]),
        ("Not answered", [c for c in rows if not c.answered]),
    ):
        if chosen:
            named = [f"{c.label} ({phrases.ratio_with_interval(c)})" for c in chosen]
            told.append(f"{words}: {phrases.joined(list(dict.fromkeys(named)))}.")
    return " ".join(told)


def table(study: Study) -> pd.DataFrame:
    """Every change of a training step that was measured, each against its own baseline in the same sets."""
    rows = [
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
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["Change", "Speed", "Verdict"])
