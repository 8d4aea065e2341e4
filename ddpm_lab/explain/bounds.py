"""The configuration in question with its time budget, and what that allows a change of it to gain at most."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import budget as bd
from ddpm_lab.explain import limits, phrases
from ddpm_lab.explain.budget import Budget
from ddpm_lab.explain.comparisons import Row, comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import LIMITS
from ddpm_lab.record import RunRecord

SHARED_CORES = "the ranks would share the cores that the present ones already use, so the time budget bounds nothing"
_COMPUTE = ("forward", "backward")
ACTS_ON = {
    "loader": ("data", "copy"),
    "loader_workers": ("data",),
    "exchange": ("communication",),
    "optimizer": ("optimizer", "EMA"),
    **dict.fromkeys(("precision", "compile", "kernels", "channels_last"), _COMPUTE),
    "freed_memory": ("data", *_COMPUTE, "optimizer", "EMA"),
}
"""Phases that a setting can make shorter: what it gains is at most what they take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The configuration in question: its profile with a time budget, and its speed where sets measured it."""

    config: RunConfig
    profile: RunRecord
    taken: Budget
    speed: Row | None

    @property
    def step_seconds(self) -> float:
        """Seconds of its step: over sets, or where there are none, those of the time budget."""
        return float(self.speed["step_seconds"]) if self.speed else self.taken.running.step_seconds


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
    speeds = [r for r in comparisons(study) if r["sets"] and (r["role"], r["run_id"], r["code_version"]) == same]
    speed = max(speeds, key=lambda r: r["sets"], default=None)
    return Subject(config=config, profile=record, taken=taken, speed=speed)


def bound(study: Study, about: Subject, other: RunConfig) -> float:
    """How many times as fast a change can make a step at most: its phases take no time at all, or n GPUs 1/n.

    What leaves less than a twentieth of the step bounds nothing. For computing in the same format also what the
    machine's peaks allow, where they were measured. NaN where nothing bounds it: such as for another batch, of which a
    single budget says nothing.
    """
    line, changed = about.taken.running, other.differences(about.config).keys()
    if "world_size" in changed:
        gain = other.world_size / about.config.world_size
        return gain if gain > 1 and not shares_cores(about, other) else math.nan
    phases = {phase for name in changed for phase in ACTS_ON.get(name, ())}
    if not phases or not about.taken.explained or changed & {"global_batch_size", "read_loss"}:
        return math.nan
    rest = 1 - sum(line.phases.get(phase, 0.0) for phase in phases) / line.step_seconds
    most = 1 / rest if rest >= 0.05 else math.nan
    if phases != set(_COMPUTE) or "precision" in changed or (peak := roofline(study, about)) is None:
        return most
    return peak.headroom if math.isnan(most) else min(most, peak.headroom)


def shares_cores(about: Subject, other: RunConfig) -> bool:
    """Whether a change splits the cores that the present ranks already use among more ranks."""
    return other.device == "cpu" and other.world_size > about.config.world_size


def roofline(study: Study, about: Subject) -> limits.Roofline | None:
    """How far the present step is from its machine's peaks; None where these, or its speed, were not measured."""
    same = tuple(r for r in study.records if r.family.startswith(LIMITS))
    return limits.roofline(replace(study, records=same), about.speed)


def rationale(about: Subject, other: RunConfig) -> str:
    """Why the change may help, by the time budget."""
    line, changed = about.taken.running, other.differences(about.config).keys()
    if "world_size" in changed:
        exchange = f", which is {bd.percent(line.share('communication'))} of a step"
        if other.world_size < about.config.world_size:
            return f"One rank exchanges nothing{exchange}, and computes all of the batch itself"
        return f"{other.world_size} ranks share the batch, and exchange gradients for it"
    if "global_batch_size" in changed:
        return "What a step costs whatever its batch is shared by another number of images"
    phases = {phase for name in changed for phase in ACTS_ON.get(name, ())}
    if not phases:
        return "No phase of the time budget shows it"
    names = phrases.joined([bd.LONG.get(p, p) for p in line.phases if p in phases]) or "phases that take no time"
    share = sum(line.phases.get(phase, 0.0) for phase in phases) / line.step_seconds
    return f"It acts on {names}: {bd.percent(share)} of a step"


def without_slowest(taken: Budget) -> float:
    """A step's time over what it would be if the rank that computes longest computed as long as the next."""
    ordered = sorted(
        (line.share(bd.COMPUTE) * line.step_seconds, line.step_seconds)
        for line in (taken.running, *taken.others.values())
    )
    (usual, _), (longest, step) = ordered[-2:]
    return step / (step - (longest - usual))
