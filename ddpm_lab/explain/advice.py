"""What to change next in a configuration, ranked by what was measured of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pandas as pd

from ddpm_lab.changes import NO_EXCHANGE, batch_sizes, changes
from ddpm_lab.config import ExchangeConfig, RunConfig
from ddpm_lab.explain import batch_sizes as sizes
from ddpm_lab.explain import change_phrases, compiling, decisions, phrases, quality, sentences, stats, straggler
from ddpm_lab.explain.bands import S002 as TARGETS
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.subject import Subject, subject
from ddpm_lab.plan import WEAK
from ddpm_lab.record import set_log_ratio

FASTER, DERIVED = decisions.FASTER, "derived"
NOT_RESOLVED, NOT_MEASURED = decisions.INCONCLUSIVE, "not measured"
_TIERS = {FASTER: 0, DERIVED: 0, NOT_RESOLVED: 1, NOT_MEASURED: 2}
SLOWER, WORSE, NO_GAIN, FAILED = decisions.SLOWER, "worse quality", "no gain", "failed"

_BESIDE = {"precision", "loader", "loader_workers", "compile", "kernels", "freed_memory"}
"""In which another baseline may differ for what was measured from it to be worth telling."""


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
    def recommended_at_all(self) -> bool:
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
    return tuple(sorted((a for a in considered(study) if a.recommended_at_all), key=lambda a: a.rank))


def declined(study: Study) -> tuple[Advice, ...]:
    """Changes that are of no use here, as far as is known."""
    return tuple(a for a in considered(study) if not a.recommended_at_all)


def considered(study: Study) -> list[Advice]:
    """Every change that was measured against the configuration in question, or that its machine could run."""
    about = subject(study)
    if about is None:
        return []
    machine, config = about.profile.machine, about.config
    ranks = len(machine.gpus) if config.device == "cuda" else machine.usable_cores
    offered = {
        **changes(config, usable_cores=machine.usable_cores, most_ranks=ranks),
        **batch_sizes(config),
    }
    known = measured(study, about)
    names = {other.run_id: name for name, other in offered.items()}
    found = [_of_row(study, about, row, names.get(run_id, "")) for run_id, row in known.items()]
    found += [
        _unmeasured(study, about, other, name)
        for name, other in offered.items()
        if other.run_id not in known and other.exchange.enabled
    ]
    return found + ([_slow_rank(study, about)] if config.world_size > 1 else [])


def measured(study: Study, about: Subject) -> dict[str, Comparison]:
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


def _base(study: Study, about: Subject, other: RunConfig, name: str) -> Advice:
    """What is known of a change before anything was measured; without a ``name`` it has no command of its own."""
    before, after = change_phrases.settings(other, about.config)
    judged = quality.Trials.of(study).verdict(about.config, other, about.profile.code_version)
    return Advice(
        title=change_phrases.title(other, about.config),
        status=WORSE if judged.verdict == quality.WORSE else NOT_MEASURED,
        current=before,
        recommended=after,
        rationale=change_phrases.rationale(about, other),
        evidence="",
        command=change_phrases.command(study, about.config, *([name] if name else [])),
        quality=_judged(about, other, judged),
        config=other,
        share=change_phrases.share(about, other),
    )


def _judged(about: Subject, other: RunConfig, found: quality.Equivalence) -> str:
    """The verdict on quality with what it rests on; of another batch also what equal images do not say."""
    said = quality.full(found)
    if other.global_batch_size == about.config.global_batch_size:
        return said
    return f"{said}. {sizes.CAVEAT}".removesuffix(".")


def _of_row(study: Study, about: Subject, row: Comparison, name: str) -> Advice:
    """What was measured of a change."""
    base = _base(study, about, row.config, name)
    if not row.sets:
        return replace(base, status=FAILED, evidence=phrases.failure(row))
    told = f"Measured in {row.family}: {phrases.ratio(row)} ({phrases.evidence(row)}{_noise(study, row)})"
    if not row.resolved:
        told += f"; {phrases.outcome(row)}"
    if row.config.compile != "off" and about.config.compile == "off":
        told += f". {compiling.sentence(study, row).removesuffix('.')}"
    return replace(
        base,
        status=WORSE if base.status == WORSE else _status(row),
        evidence=told,
        ratio=row.ratio.value,
        low=float(row.ratio.low),
        high=float(row.ratio.high),
    )


def _noise(study: Study, row: Comparison) -> str:
    """The repeated baseline after a semicolon; of sets too few for an interval its ratio alone."""
    if (floor := sentences.noise(row)) or (again := twin(study, row)) is None:
        return floor
    return f"; the present settings against themselves read {phrases.ratio(again)}"


def twin(study: Study, row: Comparison) -> Comparison | None:
    """The baseline against itself in a row's sets; None where it has no speed."""
    mine = ("twin", row.experiment, row.family, row.baseline_id)
    every = (r for r in comparisons(study) if (r.role, r.experiment, r.family, r.baseline_id) == mine)
    return next((r for r in every if r.sets), None)


def _status(row: Comparison) -> str:
    if row.resolved:
        return row.verdict
    return NO_GAIN if row.sets >= decisions.LEAST_SETS and row.ratio.high < 1 + row.resolution else NOT_RESOLVED


def _unmeasured(study: Study, about: Subject, other: RunConfig, name: str) -> Advice:
    """Why a change was not measured, and what it was worth elsewhere."""
    told = "Not measured against the present settings"
    mine = ("note", name, about.config.run_id)
    notes = [r for r in comparisons(study) if (r.role, r.label, r.baseline_id) == mine]
    told += "".join(f"; {r.reason}" for r in notes[-1:])
    if near := _elsewhere(study, about, other):
        where = phrases.settings(near.baseline)
        told += f"; from other ones ({where}) it reads {phrases.ratio(near)} ({phrases.evidence(near)})"
    return replace(_base(study, about, other, name), evidence=told)


def _elsewhere(study: Study, about: Subject, other: RunConfig) -> Comparison | None:
    """The same change, measured from another configuration of this network, batch and code."""
    wanted = {name: new for name, (new, _) in other.differences(about.config).items()}
    rows = [r for r in comparisons(study) if r.sets and r.code_version == about.profile.code_version]
    for row in rows:
        if row.role != "candidate" or WEAK in row.family or row.loader_alone:
            continue
        made = {name: new for name, (new, _) in row.config.differences(row.baseline).items()}
        if made == wanted and row.baseline.differences(about.config).keys() <= _BESIDE:
            return row
    return None


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


def table(study: Study) -> pd.DataFrame:
    """What was measured to be worth changing as strings, one row a change, in the order of ``advice``; may be empty."""
    rows = [
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
    return pd.DataFrame(rows)
