"""What limits a step, and what to change next: verdict, targets, and changes ranked by measured gain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ddpm_lab.config import ExchangeConfig, RunConfig
from ddpm_lab.explain import batch_sizes as sizes
from ddpm_lab.explain import budget as bd
from ddpm_lab.explain import change_phrases, compiling, decisions, phrases, quality, sentences, stats, straggler
from ddpm_lab.explain.bands import S002 as TARGETS
from ddpm_lab.explain.changes import NO_EXCHANGE, batch_sizes, changes
from ddpm_lab.explain.comparisons import PROJECTED_IMAGES, Comparison, comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.subject import Subject, subject
from ddpm_lab.explain.table import Table
from ddpm_lab.plan import WEAK
from ddpm_lab.record import set_log_ratio

FASTER, DERIVED = decisions.FASTER, "derived"
NOT_RESOLVED, NOT_MEASURED = decisions.INCONCLUSIVE, "not measured"
SLOWER, WORSE, NO_GAIN, FAILED = decisions.SLOWER, "worse quality", "no gain", "failed"
_TIERS = {FASTER: 0, DERIVED: 0, NOT_RESOLVED: 1, NOT_MEASURED: 2}
MET, MISSED, UNKNOWN, NO_TARGET = "met", "missed", "not measured", "no target on a CPU"
DIFFERS = 0.10
"""By which a step in sets and in its time budget may differ unsaid."""
TOLD = 3
"""Changes that the summary tells beside the first."""


# --- changes, by what was measured of them ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change of a configuration, from ``current`` to ``recommended``, and what is known of it.

    ``status`` says what the expected speed rests on: faster (measured in sets that take turns), derived (from the own
    times of ranks in such sets), inconclusive, not measured; or why it is not recommended: slower, no gain, worse
    quality, failed. ``ratio`` is the present step's time for equal work over the changed one's, with its 95 %
    interval; NaN is unknown. ``share`` is that of a step in the phases on which the change acts.
    """

    title: str
    status: str
    current: str
    recommended: str
    rationale: str
    evidence: str
    command: str
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    share: float = 0.0
    quality: str = quality.NOT_MEASURED
    config: RunConfig | None = field(default=None, repr=False)

    @property
    def worth_trying(self) -> bool:
        """Whether it is worth applying or measuring."""
        return self.status in _TIERS

    @property
    def sure(self) -> bool:
        """Whether its gain was measured, and is resolved."""
        return self.status in (FASTER, DERIVED)

    @property
    def impact(self) -> str:
        """High, medium or low by the lower end of the interval."""
        return TARGETS.impact(self.low) if self.sure else "unknown"

    @property
    def rank(self) -> tuple[int, float]:
        """Where it stands: what is resolved first, by the lower end of its interval; then what is not.

        What was not measured follows by its share of a step, and last what reads slower and is inconclusive.
        """
        tier = len(_TIERS) if self.ratio <= 1 else _TIERS.get(self.status, len(_TIERS))
        if math.isnan(self.ratio):
            return tier, -self.share
        return tier, -self.ratio if math.isnan(self.low) else -self.low

    @property
    def quality_word(self) -> str:
        """The verdict on quality alone."""
        return self.quality.partition(" (")[0].partition(".")[0]

    def expected(self) -> str:
        """Such as "1.48 times as fast (1.39 to 1.59)"."""
        if math.isnan(self.ratio):
            return NOT_MEASURED
        text = phrases.times(stats.Interval(value=self.ratio, low=self.low, high=self.high), what=" times as fast")
        return f"inconclusive: reads {text}" if self.status == NOT_RESOLVED else text


def advice(study: Study) -> tuple[Advice, ...]:
    """Changes worth applying or measuring, the one with the largest sure gain first; none without a time budget."""
    return tuple(sorted((a for a in considered(study) if a.worth_trying), key=lambda a: a.rank))


def declined(study: Study) -> tuple[Advice, ...]:
    """Changes that are of no use here, as far as is known."""
    return tuple(a for a in considered(study) if not a.worth_trying)


def considered(study: Study) -> list[Advice]:
    """Every change that was measured against the configuration in question, or that its machine could run."""
    about = subject(study)
    if about is None:
        return []
    machine, config = about.profile.machine, about.config
    ranks = len(machine.gpus) if config.device == "cuda" else machine.usable_cores
    offered = {**changes(config, usable_cores=machine.usable_cores, most_ranks=ranks), **batch_sizes(config)}
    known = _measured(study, about)
    names = {other.run_id: name for name, other in offered.items()}
    found = [_of_row(study, about, row, names.get(run_id, "")) for run_id, row in known.items()]
    found += [
        _unmeasured(study, about, other, name)
        for name, other in offered.items()
        if other.run_id not in known and other.exchange.enabled
    ]
    return found + ([_slow_rank(study, about)] if config.world_size > 1 else [])


def _measured(study: Study, about: Subject) -> dict[str, Comparison]:
    """The row of each configuration that was compared with the one in question, of whichever experiment has most sets.

    Weak scaling compares other work, and ranks that exchange nothing train no network.
    """
    found: dict[str, Comparison] = {}
    for row in comparisons(study):
        mine = row.role == "candidate" and row.baseline_id == about.config.run_id
        if not mine or row.loader_alone or row.mechanism_only or WEAK in row.family:
            continue
        if not row.config.exchange.enabled or row.code_version != about.profile.code_version:
            continue
        if (known := found.get(row.run_id)) is None or row.sets > known.sets:
            found[row.run_id] = row
    return found


def _unmeasured(study: Study, about: Subject, other: RunConfig, name: str) -> Advice:
    """A change before anything was measured, and why it was not; without a ``name`` it has no command of its own."""
    before, after = change_phrases.settings(other, about.config)
    judged = quality.Trials.of(study).verdict(about.config, other, about.profile.code_version)
    said = quality.full(judged)
    if other.global_batch_size != about.config.global_batch_size:
        said = f"{said}. {sizes.CAVEAT}".removesuffix(".")
    mine = ("note", name, about.config.run_id)
    notes = [r.reason for r in comparisons(study) if (r.role, r.label, r.baseline_id) == mine]
    return Advice(
        title=change_phrases.title(other, about.config),
        status=WORSE if judged.verdict == quality.WORSE else NOT_MEASURED,
        current=before,
        recommended=after,
        rationale=change_phrases.rationale(about, other),
        evidence="; ".join(["Not measured against the present settings", *notes[-1:]]),
        command=change_phrases.command(study, about.config, *([name] if name else [])),
        quality=said,
        config=other,
        share=change_phrases.share(about, other),
    )


def _of_row(study: Study, about: Subject, row: Comparison, name: str) -> Advice:
    """What was measured of a change."""
    base = _unmeasured(study, about, row.config, name)
    if not row.sets:
        return replace(base, status=FAILED, evidence=phrases.failure(row))
    told = f"Measured in {row.family}: {phrases.ratio(row)} ({phrases.evidence(row)}{sentences.noise(row)})"
    if row.resolved:
        status = row.verdict
    else:
        told += f"; {phrases.outcome(row)}"
        useless = row.sets >= decisions.LEAST_SETS and row.ratio.high < 1 + row.resolution
        status = NO_GAIN if useless else NOT_RESOLVED
    if row.config.compile != "off" and about.config.compile == "off":
        told += f". {compiling.sentence(study, row).removesuffix('.')}"
    return replace(
        base,
        status=WORSE if base.status == WORSE else status,
        evidence=told,
        ratio=row.ratio.value,
        low=float(row.ratio.low),
        high=float(row.ratio.high),
    )


def _slow_rank(study: Study, about: Subject) -> Advice:
    """What a rank that takes longer on its own costs the others, from their own times where nothing is exchanged."""
    silent = replace(about.config, exchange=ExchangeConfig(enabled=False))
    same = (about.config.run_id, about.profile.code_version, "ok")
    of_sets = [r for r in study.records if (r.baseline_id, r.code_version, r.status) == same and r.windows]
    base = {r.set_id: r for r in of_sets if r.role == "baseline"}
    alone = [r for r in of_sets if r.run_id == silent.run_id and r.set_id in base and not r.mechanism_only]
    known = Advice(
        title="Find out why one rank is slow",
        status=NO_GAIN,
        current="as it is",
        recommended="as fast as the other ranks",
        rationale="Every step lasts as long as its slowest rank",
        evidence="No rank computes clearly longer than the others in the time budget",
        command=change_phrases.command(study, about.config, NO_EXCHANGE),
        quality="not affected",
    )
    if not alone:
        if not about.taken.straggler:
            return known
        return replace(known, status=NOT_MEASURED, evidence=about.taken.straggler)
    logs = [
        -math.log1p(-share * math.exp(-set_log_ratio(base[r.set_id], r)))
        for r, share in zip(alone, straggler.excess_shares(alone), strict=True)
    ]
    found, who = stats.estimate(logs), straggler.named(alone)
    if not who:
        return replace(known, evidence="No rank is shown to be slower than the others where nothing is exchanged")
    return replace(
        known,
        title=f"Find out why {who} is slow",
        status=DERIVED,
        evidence=f"From the ranks' own times in {phrases.plural(found.sets, 'set')} without exchange of gradients",
        ratio=found.value,
        low=found.low,
        high=found.high,
    )


def table(study: Study) -> Table:
    """What was measured to be worth changing as strings, one row a change, in the order of ``advice``; may be empty."""
    return [
        {
            "Change": a.title,
            "Setting": a.recommended,
            "Expected speed": a.expected(),
            "Status": a.status,
            "Quality": a.quality_word,
            "Command": a.command,
        }
        for a in advice(study)
        if not math.isnan(a.ratio)
    ]


# --- verdict, targets, summary ----------------------------------------------------------------------------------------


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
        return ["No time budget is recorded: ddpm-lab bottleneck measures one."]
    found = advice(study)
    told = [verdict(about), f"{speed(about)}."]
    if found:
        first = found[0]
        kind = "First recommendation" if first.sure else "First to be measured"
        judged = f"; quality: {first.quality}" * (first.status == FASTER)
        told.append(f"{kind}: {first.title} (`{first.recommended}`), {first.expected()}{judged}.")
    else:
        told.append("Nothing that was measured would make it faster.")
    if about.speed and (again := _repeated(study, about.speed)) is not None:
        told.append(
            f"The present settings against themselves read {phrases.ratio(again)} "
            f"({phrases.evidence(again)}); differences inside this range are noise."
        )
    others = [a for a in (*found[1:], *declined(study)) if math.isfinite(a.ratio)]
    named = [f"{phrases.within(a.title)}, {a.expected().removeprefix('inconclusive: ')}: {a.status}" for a in others]
    more = [f"{len(named) - TOLD} more in the report"] if len(named) > TOLD else []
    told += [f"Measured too: {'; '.join([*named[:TOLD], *more])}."] if named else []
    rows = [t for t in targets(study, about, found) if t.status != NO_TARGET]
    text = f"{sum(t.status == MET for t in rows)} of {phrases.plural(len(rows), 'target')} are met"
    for status in (MISSED, UNKNOWN):
        names = [t.name for t in rows if t.status == status]
        text += f"; {status}: {phrases.joined(names)}" if names else ""
    return [*told, f"{text}.", *([f"{about.taken.disturbance}."] if about.taken.disturbance else [])]


def _repeated(study: Study, row: Comparison) -> Comparison | None:
    """The baseline against itself in a row's sets; None where it has no speed."""
    mine = ("twin", row.experiment, row.family, row.baseline_id)
    every = (r for r in comparisons(study) if (r.role, r.experiment, r.family, r.baseline_id) == mine)
    return next((r for r in every if r.sets), None)


def verdict(about: Subject) -> str:
    """What limits the step, in one sentence, by the classes of its phases."""
    line = about.taken.running
    if not about.taken.explained:
        return f"{bd.headline(about.taken)}: no bottleneck is named."
    compute, io = line.share(bd.COMPUTE), line.share(bd.IO)
    most = max((bd.IO, bd.TRANSFER, bd.COMPUTE, bd.OTHER), key=line.share)
    told = f"compute share {bd.percent(compute)} ({TARGETS.compute_name(compute)})"
    told += f", I/O {bd.percent(io)} ({TARGETS.io_name(io)})"
    if most == bd.COMPUTE and io >= TARGETS.io:
        told += f", and waiting for data is above its target (below {bd.percent(TARGETS.io)})"
    names = {bd.TRANSFER: "memory transfer", bd.OTHER: "phases of the workload's own"}
    what = f"{names[most]}, {bd.percent(line.share(most))} of it" if most in names else most
    slow = f" {about.taken.straggler}." if about.taken.straggler else ""
    return f"The step is limited by {what}: {told}.{slow}"


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


def targets(study: Study, about: Subject, found: Sequence[Advice]) -> list[Target]:
    """The targets of the report and what is reached of each."""
    line, low, high = about.taken.running, *TARGETS.memory
    memory, of = _memory(about)
    first = next((a for a in found if a.status == FASTER), None)
    known = [a.status for a in considered(study) if not math.isnan(a.ratio)]
    settled = bool(known) and NOT_RESOLVED not in known
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
            status=MISSED if first else MET if settled else UNKNOWN,
        ),
    ]


def _target(name: str, target: str, value: float, low: float, high: float) -> Target:
    if math.isnan(value):
        return Target(name=name, target=target, now=UNKNOWN, status=UNKNOWN)
    return Target(name=name, target=target, now=bd.percent(value), status=MET if low < value < high else MISSED)


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
