"""What was seen of wrong ways to measure, beside the sets of the same experiment, and how their numbers are compared.

Wrong ways are records with the role "wrong": what they read stands in the profile, and no speed is taken from them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ddpm_lab.explain import phrases, stats
from ddpm_lab.explain.comparisons import COMPARED, Comparison, comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.stats import Estimate
from ddpm_lab.record import RunRecord, crowded

WRONG = "wrong"


class Seen:
    """What the records of a study say: what wrong ways answered, by label and way, and rows of the sets by label.

    Where several networks or batches were measured, those of the baseline that came last.
    """

    def __init__(self, study: Study) -> None:
        self.study = study
        last = next((r.baseline_id for r in reversed(study.records) if r.role in ("baseline", WRONG)), "")
        self.wrong = [r for r in study.records if (r.role, r.status, r.baseline_id) == (WRONG, "ok", last)]
        rows = [row for row in comparisons(study) if row.baseline_id == last]
        self.rows = {r.label: r for r in rows if r.role == "candidate" and r.sets}
        self.base = next((r for r in rows if r.role == "baseline" and r.sets), None)
        self.twin = next((r for r in rows if r.role == "twin" and r.sets), None)
        self.cuda = any(r.config.device == "cuda" for r in study.records)

    def of(self, way: str, label: str = "fp32") -> list[Mapping[str, Any]]:
        """What a way answered in each repeat, by the seeds of the repeats."""
        return [answer for _, answer in sorted(self._of(way, label).items())]

    def _of(self, way: str, label: str) -> dict[int, Mapping[str, Any]]:
        found = {r.config.seed: _answers(r) for r in self.wrong if r.label == label}
        return {seed: answers[way] for seed, answers in found.items() if way in answers}

    def pairs(self, way: str, label: str, other: str) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
        """The answers of two configurations in the same repeat."""
        ours, theirs = self._of(way, label), self._of(way, other)
        return [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]

    def starting(self) -> list[float]:
        """Seconds from the start of a process to its first step, in each repeat."""
        mine = sorted((r for r in self.wrong if r.label == "fp32"), key=lambda r: r.config.seed)
        return [r.stages.get("start", 0.0) + r.stages.get("build", 0.0) for r in mine if "fresh" in _answers(r)]

    def step(self, row: Comparison) -> Estimate:
        """Seconds of a step of a configuration in the sets that count, with the interval that their spread gives."""
        members = [r for r in self.study.records if r.baseline_id == row.baseline_id and r.role in COMPARED]
        mine = [r for r in members if (r.role, r.run_id) == (row.role, row.run_id) and r.windows]
        quiet = [r for r in mine if not crowded([m for m in members if m.set_id == r.set_id])]
        return over([row.batch * statistics.median(w.seconds_per_image for w in r.windows) for r in quiet])

    @property
    def narrow(self) -> str:
        """The reduced precision that is measured."""
        return next((name for name in ("bf16", "fp16") if name in {r.label for r in self.wrong} | self.rows.keys()), "")

    @property
    def larger(self) -> Comparison | None:
        """The row of the larger batch."""
        return next((row for label, row in self.rows.items() if label.startswith("batch ")), None)

    @property
    def two(self) -> Comparison | None:
        """The row of two ranks."""
        return next((row for row in self.rows.values() if row.ranks == 2), None)


def _answers(record: RunRecord) -> Mapping[str, Any]:
    return (record.profile or {}).get("wrong_ways", {})  # type: ignore[no-any-return]


def over(values: Sequence[float]) -> Estimate:
    """Geometric mean of repeats with its 95 % interval."""
    return stats.estimate(np.log([v for v in values if v > 0]))


def quotient(wrong: Estimate, right: Estimate) -> Estimate:
    """A wrong number over the right one, each with its interval."""
    if math.isnan(wrong.value) or math.isnan(right.value):
        return dataclasses.replace(wrong, value=math.nan)
    ends = (math.nan, math.nan)
    if not math.isnan(wrong.low):  # of a single repeat nobody knows the spread
        ends = stats.quotient_interval(*((e.value, e.low, e.high) for e in (wrong, right)))
    return Estimate(value=wrong.value / right.value, low=ends[0], high=ends[1], p=math.nan, sets=wrong.sets)


def plain(value: float) -> str:
    """A number of two or three digits, however small."""
    return phrases.significant(value, 2 if value < 1 else 3)
