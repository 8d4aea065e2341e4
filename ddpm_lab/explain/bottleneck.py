"""What a time budget comes to: its verdict, its targets with their status, and the summary of a bottleneck report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ddpm_lab.explain import advice as adv
from ddpm_lab.explain import budget as bd
from ddpm_lab.explain import phrases
from ddpm_lab.explain.advice import Advice
from ddpm_lab.explain.bands import S002 as TARGETS
from ddpm_lab.explain.comparisons import PROJECTED_IMAGES
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.subject import Subject, subject

HOW = "ddpm-lab bottleneck"
DIFFERS = 0.10
"""By which a step in sets and in its time budget may differ unsaid."""
MET, MISSED, UNKNOWN, NO_TARGET = "met", "missed", "not measured", "no target on a CPU"
TOLD = 3
"""Changes that the summary tells beside the first."""
LONG = {bd.TRANSFER: "memory transfer", bd.OTHER: "phases of the workload's own"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target of the table, what is reached, and its status: met, missed, not measured, or no target on a CPU."""

    name: str
    target: str
    now: str
    status: str


def summary(study: Study) -> list[str]:
    """The executive summary, one sentence each; where there is no time budget, how to measure one."""
    about = subject(study)
    if about is None:
        return [f"No time budget is recorded: {HOW} measures one."]
    found = adv.advice(study)
    told = [verdict(about), f"{speed(about)}."]
    if found:
        told.append(f"{'First recommendation' if found[0].sure else 'First to be measured'}: {_first(found[0])}.")
    else:
        told.append("Nothing that was measured would make it faster.")
    if about.speed and (again := adv.twin(study, about.speed)) is not None:
        told.append(
            f"The present settings against themselves read {phrases.ratio(again)} "
            f"({phrases.evidence(again)}); what is no further from 1 is not told apart from no gain."
        )
    told += _measured(study, found)
    table = targets(study, about, found)
    missed = [t.name for t in table if t.status == MISSED]
    unknown = [t.name for t in table if t.status == UNKNOWN]
    count = sum(t.status != NO_TARGET for t in table)
    text = f"{sum(t.status == MET for t in table)} of {phrases.plural(count, 'target')} are met"
    text += f"; missed: {phrases.joined(missed)}" if missed else ""
    told.append(f"{text}; not measured: {phrases.joined(unknown)}." if unknown else f"{text}.")
    if about.taken.disturbance:
        told.append(f"{about.taken.disturbance}.")
    return told


def _measured(study: Study, found: Sequence[Advice]) -> list[str]:
    """What was measured beside the first change, since somebody asked for it: a few by name."""
    others = [a for a in (*found[1:], *adv.declined(study)) if math.isfinite(a.ratio)]
    if not others:
        return []
    named = [f"{phrases.within(a.title)}, {a.expected().removeprefix('inconclusive: ')}: {a.status}" for a in others]
    more = [f"{len(named) - TOLD} more in the table of changes"] if len(named) > TOLD else []
    return [f"Measured too: {'; '.join([*named[:TOLD], *more])}."]


def verdict(about: Subject) -> str:
    """What limits the step, in one sentence, by the classes of its phases."""
    line = about.taken.running
    if not about.taken.explained:
        return f"{bd.headline(about.taken)}: no bottleneck is named."
    shares = {kind: line.share(kind) for kind in (bd.IO, bd.TRANSFER, bd.COMPUTE, bd.OTHER)}
    most = max(shares, key=lambda kind: shares[kind])
    compute, io = shares[bd.COMPUTE], shares[bd.IO]
    told = f"compute share {bd.percent(compute)} ({TARGETS.compute_name(compute)})"
    told += f", I/O {bd.percent(io)} ({TARGETS.io_name(io)})"
    if most == bd.IO:
        text = f"The step is limited by I/O: {told}"
    elif most == bd.COMPUTE:
        beside = (
            "" if io < TARGETS.io else f", and waiting for data is above its target (below {bd.percent(TARGETS.io)})"
        )
        text = f"The step is limited by compute: {told}{beside}"
    else:
        text = f"The step is limited by {LONG.get(most, most)}, {bd.percent(shares[most])} of it: {told}"
    return f"{text}. {about.taken.straggler}." if about.taken.straggler else f"{text}."


def targets(study: Study, about: Subject, found: Sequence[Advice]) -> list[Target]:
    """The targets of the report and what is reached of each."""
    line, low, high = about.taken.running, *TARGETS.memory
    memory, of = _memory(about)
    first = next((a for a in found if a.status == adv.FASTER), None)
    epoch = about.step_seconds * PROJECTED_IMAGES / about.config.global_batch_size
    held = _target(f"memory in use, of {of}", f"{100 * low:.0f} to {bd.percent(high)}", memory, low, high)
    return [
        _target("compute share", f"above {bd.percent(TARGETS.compute)}", line.share(bd.COMPUTE), TARGETS.compute, 1.01),
        _target("I/O share", f"below {bd.percent(TARGETS.io)}", line.share(bd.IO), -1.0, TARGETS.io),
        replace(held, status=NO_TARGET) if about.config.device == "cpu" else held,
        _utilisation(about),
        Target(
            name=f"time of {PROJECTED_IMAGES:,} images",
            target=phrases.seconds(epoch / first.ratio) if first else "no change is known to be faster",
            now=phrases.seconds(epoch),
            status=MISSED if first else MET if _settled(study) else UNKNOWN,
        ),
    ]


def _target(name: str, target: str, value: float, low: float, high: float) -> Target:
    if math.isnan(value):
        return Target(name=name, target=target, now=UNKNOWN, status=UNKNOWN)
    return Target(name=name, target=target, now=bd.percent(value), status=MET if low < value < high else MISSED)


def _settled(study: Study) -> bool:
    """Whether changes were measured, and what was measured is resolved."""
    known = [a.status for a in adv.considered(study) if not math.isnan(a.ratio)]
    return bool(known) and adv.NOT_RESOLVED not in known


def _memory(about: Subject) -> tuple[float, str]:
    """Share of memory in use at the peak, of the fullest card, or of the machine's by all ranks; NaN is unknown."""
    ranks, record = about.profile.ranks, about.profile
    if about.config.device == "cuda":
        totals = [rank.get("device_total_bytes") for rank in record.witness.get("ranks", ())]
        held = [rank.peak_reserved_bytes for rank in ranks]
        known = [h / t for h, t in zip(held, totals, strict=False) if h and t]
        return max(known, default=math.nan), "the card"
    peaks, total = [rank.peak_rss_bytes for rank in ranks], record.environment.ram_bytes
    return (sum(p or 0 for p in peaks) / total if total and peaks and all(peaks) else math.nan), "the machine's"


def _utilisation(about: Subject) -> Target:
    """How busy the device was while the budget was taken; a CPU by what was measured alone, without its neighbours.

    Where these took more than a tenth of the cores nobody knows whether the target would have been met without them.
    """
    values, wanted = (about.profile.profile or {})["budget"], f"above {bd.percent(TARGETS.utilisation)}"
    name, key = ("GPU", "gpu") if about.config.device == "cuda" else ("CPU", "cpu")
    taken = values.get("state", {}).get(f"{key}_utilisation_percent")
    used = math.nan if taken is None else taken / 100
    others, cores = values.get("others_cores"), about.profile.environment.machine.usable_cores
    if key == "gpu" or math.isnan(used):
        return _target(f"{name} utilisation", wanted, used, TARGETS.utilisation, 1.01)
    if others is None:
        now = f"{bd.percent(used)} with other processes, whose share is unknown"
        return Target(name=f"{name} utilisation", target=wanted, now=now, status=UNKNOWN)
    found = _target(f"{name} utilisation", wanted, max(0.0, used - others / cores), TARGETS.utilisation, 1.01)
    if others <= bd.DISTURBED * cores:
        return found
    now = f"{found.now}; other processes took {others:.1f} of {phrases.plural(cores, 'core')}"
    return replace(found, now=now, status=MET if found.status == MET else UNKNOWN)


def speed(about: Subject) -> str:
    """How long a step takes, and on what that rests."""
    batch = phrases.plural(about.config.global_batch_size, "image")
    text = f"A step of {batch} takes {phrases.seconds(about.step_seconds)}"
    if about.speed:
        text = f"{text} ({phrases.throughput(about.speed)}, {phrases.plural(about.speed.sets, 'set')})"
        times = about.step_seconds / about.taken.running.step_seconds
        if abs(math.log(times)) > math.log1p(DIFFERS):
            text += f", {times:.2f} times as long as while its time budget was taken"
        return text
    rate = phrases.significant(about.config.global_batch_size / about.step_seconds)
    return f"{text} ({rate} images/s by the time budget; no set measured its speed)"


def _first(first: Advice) -> str:
    text = f"{first.title} (`{first.recommended}`), {first.expected()}"
    return f"{text}; quality: {first.quality}" if first.status == adv.FASTER else text
