"""The ranked list of changes: each with its measured gain and interval, the verdict on its quality, and a command.

The recommendation lists the changes of all questions, each against its own baseline; the bottleneck report those of one
configuration.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, OWN, RunConfig
from ddpm_lab.explain import phrases, quality, stats
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.selection import RECOMMENDATION, Study
from ddpm_lab.explain.table import Table, without_constant
from ddpm_lab.plan import SEARCH, TOGETHER, WEAK, Family
from ddpm_lab.questions.profile import TARGETS, named

GOOD, OPEN = (quality.IDENTICAL, quality.NOT_WORSE), (quality.NOT_MEASURED, quality.NOT_ENOUGH)
"""Verdicts on quality with which a change may be recommended, and those that trials may still turn into one."""
_BESIDE = ("peers", "quality", "claims", "compare", "calibrate", "batch_size", SEARCH, RECOMMENDATION)
"""Questions whose comparisons are no changes of a training: other trainers, other work, or answers of their own."""
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
    def impact(self) -> str:
        """High, medium or low by the lower end of the interval; unknown unless it is faster."""
        return named(self.low, TARGETS.impacts) if self.status == FASTER else "unknown"

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


def table(found: Sequence[Change]) -> Table:
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
    return without_constant(rows, {"Against": {a.against for a in found[:1]}})


def single(c: Comparison) -> bool:
    """Whether a comparison is of one change of a training step, for equal work, whose speed may be claimed."""
    training = c.role == "candidate" and not (c.loader_alone or c.mechanism_only) and c.config.exchange.enabled
    return training and WEAK not in c.family


def measured(study: Study) -> list[Comparison]:
    """Return the comparisons of single changes of a training step, those with sets, the primary ones first."""
    found = [c for c in comparisons(study) if single(c) and c.sets and c.experiment not in _BESIDE]
    return sorted((c for c in found if c.config.workload in (DDPM, OWN)), key=lambda c: not c.primary)


def faster(rows: Sequence[Comparison], verdicts: Sequence[str]) -> list[Comparison]:
    """Return the changes called faster, in a number format that is not slower itself, with one of these verdicts."""
    slow = {c.config.precision for c in rows if c.experiment == "amp" and c.verdict != FASTER}
    return [
        c
        for c in rows
        if c.verdict == FASTER and c.equivalence.verdict in verdicts and c.baseline.precision not in slow
    ]


def combination(study: Study) -> Family | None:
    """Return the changes that may be recommended, together beside the baseline; None for fewer than two.

    The changes of one baseline's questions are applied to that of the first; what cannot be combined is left out.
    """
    found = faster(measured(study), GOOD)
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


def together(study: Study) -> list[Comparison]:
    """Return the combinations that were measured, the latest first."""
    every = [c for c in comparisons(study) if c.family.endswith(TOGETHER) and c.role == "candidate" and c.sets]
    return every[::-1]


def parts_of(together: Comparison, good: Sequence[Comparison]) -> list[Comparison]:
    """Return the changes that a faster combination joins; none if one is not ``good``, or it learns worse."""
    wanted = together.config.differences(together.baseline)
    parts = [c for c in good if c.config.differences(c.baseline).items() <= wanted.items()]
    told = {name for c in parts for name in c.config.differences(c.baseline)}
    fine = together.verdict == FASTER and together.equivalence.verdict in (*GOOD, *OPEN)
    return parts if fine and told == wanted.keys() else []
