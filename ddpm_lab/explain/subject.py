"""The configuration in question with its time budget, its speed and its machine's peaks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import budget as bd
from ddpm_lab.explain import limits
from ddpm_lab.explain.budget import Budget
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import LIMITS
from ddpm_lab.record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The configuration in question: its profile with a time budget, and its speed where sets measured it."""

    config: RunConfig
    profile: RunRecord
    taken: Budget
    speed: Comparison | None

    @property
    def step_seconds(self) -> float:
        """Seconds of its step: over sets, or where there are none, those of the time budget."""
        return self.speed.step_seconds if self.speed else self.taken.running.step_seconds


def subject(study: Study) -> Subject | None:
    """What a study's latest time budget is about; one that was taken for this question goes first."""
    found = [(r, taken) for r in study.records if r.role == "profile" and (taken := bd.budget(r)) is not None]
    order = ("bottleneck", "profile")
    if not found:
        return None
    of = next((name for name in order if any(r.experiment == name for r, _ in found)), found[-1][0].experiment)
    record, taken = next(pair for pair in reversed(found) if pair[0].experiment == of)
    config = replace(record.config, purpose="timing")
    same = ("baseline", config.run_id, record.code_version)
    speeds = [r for r in comparisons(study) if r.sets and (r.role, r.run_id, r.code_version) == same]
    speed = max(speeds, key=lambda r: r.sets, default=None)
    return Subject(config=config, profile=record, taken=taken, speed=speed)


def roofline(study: Study, about: Subject) -> limits.Roofline | None:
    """How far the present step is from its machine's peaks; None where these, or its speed, were not measured."""
    same = tuple(r for r in study.records if r.family.startswith(LIMITS))
    return limits.roofline(replace(study, records=same), about.speed)
