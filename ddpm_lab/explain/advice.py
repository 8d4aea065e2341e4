"""What to change next in a configuration, ranked: by what was measured of it, else by what its time budget allows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pandas as pd

from ddpm_lab.changes import NO_EXCHANGE, batch_sizes, changes
from ddpm_lab.config import RunConfig
from ddpm_lab.exchange_settings import ExchangeConfig
from ddpm_lab.explain import batch_sizes as sizes
from ddpm_lab.explain import bounds, change_phrases, compiling, learned, phrases, quality, sentences, stats, straggler
from ddpm_lab.explain.bands import S002 as TARGETS
from ddpm_lab.explain.bounds import Subject, subject
from ddpm_lab.explain.comparisons import Row, comparisons, resolved
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import WEAK
from ddpm_lab.record import set_log_ratio

FASTER, DERIVED, BOUND = stats.FASTER, "derived", "bound"
NOT_RESOLVED, NOT_MEASURED = stats.NOT_RESOLVED, "not measured"
_TIERS = {FASTER: 0, DERIVED: 0, BOUND: 1, NOT_RESOLVED: 2, NOT_MEASURED: 3}
SLOWER, WORSE, NO_GAIN, FAILED = stats.SLOWER, "worse quality", "no gain", "failed"

_BESIDE = {"precision", "loader", "loader_workers", "compile", "kernels", "freed_memory"}
"""In which another baseline may differ for what was measured from it to be worth telling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One change of a configuration, from ``current`` to ``recommended``, and what is known of it.

    ``status`` says what the expected speed rests on: faster (measured in sets that take turns), derived (from the own
    times of ranks in such sets), bound (the most that the time budget allows; nothing was measured), not resolved, not
    measured; or why it is not recommended: slower, no gain, worse quality, failed. ``ratio`` is the present step's time
    for equal work over the changed one's, with its 95 % interval; ``most`` is the bound. NaN is unknown.
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
    most: float = math.nan
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
        """High, medium or low by the lower end of the interval; of a bound "at most" that."""
        if self.sure:
            return TARGETS.impact(self.low)
        return f"at most {TARGETS.impact(self.most)}" if self.status == BOUND else "unknown"

    @property
    def rank(self) -> tuple[int, float]:
        """Where it stands: what is resolved first, by the lower end of its interval; then bounds; then the rest.

        What reads slower, and is not resolved, comes after what was not measured at all.
        """
        gain = self.most if self.status == BOUND else self.ratio if math.isnan(self.low) else self.low
        tier = len(_TIERS) if self.ratio <= 1 else _TIERS.get(self.status, len(_TIERS))
        return tier, 0.0 if math.isnan(gain) else -gain

    @property
    def quality_word(self) -> str:
        """The verdict on quality alone."""
        return self.quality.partition(" (")[0].partition(".")[0]

    def expected(self) -> str:
        """Such as "1.48 times as fast (1.39 to 1.59)", or "at most 2.5 times as fast: a bound, not measured"."""
        if self.status == BOUND:
            return f"at most {phrases.significant(self.most)} times as fast: a bound, not measured"
        if math.isnan(self.ratio):
            return NOT_MEASURED
        text = phrases.times(self.ratio, self.low, self.high, what=" times as fast")
        return f"not resolved: reads {text}" if self.status == NOT_RESOLVED else text


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


def measured(study: Study, about: Subject) -> dict[str, Row]:
    """The row of each configuration that was compared with the one in question, of whichever experiment has most sets.

    Weak scaling compares other work, and ranks that exchange nothing train no network.
    """
    found: dict[str, Row] = {}
    for row in comparisons(study):
        mine = row["role"] == "candidate" and row["baseline_id"] == about.config.run_id
        if not mine or row["loader_alone"] or row["mechanism_only"] or WEAK in row["family"]:
            continue
        if not row["config"].exchange.enabled or row["code_version"] != about.profile.code_version:
            continue
        if (known := found.get(row["run_id"])) is None or row["sets"] > known["sets"]:
            found[row["run_id"]] = row
    return found


def _base(study: Study, about: Subject, other: RunConfig, name: str) -> Advice:
    """What is known of a change before anything was measured; without a ``name`` it has no command of its own."""
    before, after = change_phrases.settings(other, about.config)
    judged = quality.Trials(study.trials).verdict(about.config, other, about.profile.code_version)
    return Advice(
        title=change_phrases.title(other, about.config),
        status=WORSE if judged.verdict == quality.WORSE else NOT_MEASURED,
        current=before,
        recommended=after,
        rationale=bounds.rationale(about, other),
        evidence="",
        command=change_phrases.command(study, about.config, *([name] if name else [])),
        quality=_judged(study, about, other, judged),
        config=other,
    )


def _judged(study: Study, about: Subject, other: RunConfig, found: quality.Equivalence) -> str:
    """The verdict on quality with what it rests on; of another batch also what equal images do not say."""
    said = quality.full(found)
    if other.global_batch_size == about.config.global_batch_size:
        return said
    return f"{said}. {sizes.CAVEAT}{_to_the_loss(study, about.config, other)}".removesuffix(".")


def _of_row(study: Study, about: Subject, row: Row, name: str) -> Advice:
    """What was measured of a change."""
    base = _base(study, about, row["config"], name)
    if not row["sets"]:
        return replace(base, status=FAILED, evidence=phrases.failure(row))
    told = f"Measured in {row['family']}: {phrases.ratio(row)} ({phrases.evidence(row)}{_noise(study, row)})"
    if not resolved(row):
        told += f"; {phrases.outcome(row)}"
    if row["config"].compile != "off" and about.config.compile == "off":
        told += f". {compiling.sentence(study, row).removesuffix('.')}"
    return replace(
        base,
        status=WORSE if base.status == WORSE else _status(row),
        evidence=told,
        ratio=float(row["ratio"]),
        low=float(row["low"]),
        high=float(row["high"]),
    )


def _noise(study: Study, row: Row) -> str:
    """The noise floor after a semicolon; of sets too few for an interval what the baseline against itself reads."""
    if (floor := sentences.noise(row)) or (again := twin(study, row)) is None:
        return floor
    return f"; noise floor: the present settings against themselves read {phrases.ratio(again)}"


def twin(study: Study, row: Row) -> Row | None:
    """The baseline against itself in a row's sets; None where it has no speed."""
    mine = ("twin", row["experiment"], row["family"], row["baseline_id"])
    every = (r for r in comparisons(study) if (r["role"], r["experiment"], r["family"], r["baseline_id"]) == mine)
    return next((r for r in every if r["sets"]), None)


def _to_the_loss(study: Study, config: RunConfig, other: RunConfig) -> str:
    """How long another batch takes to the loss of the present one, after a space; empty without trials."""
    for family in learned.families(study):
        if family[0]["run_id"] == config.run_id:
            found = next((w for w in learned.ways(study, family) if w.row["run_id"] == other.run_id), None)
            if found is not None and not math.isnan(found.times):
                return f" To the same held-out loss it takes {found.compared()}."
    return ""


def _status(row: Row) -> str:
    if resolved(row):
        return str(row["verdict"])
    if row["verdict"] == stats.NOT_TRUSTED:
        return NOT_RESOLVED
    return NO_GAIN if row["sets"] >= stats.LEAST_SETS and row["high"] < 1 + row["resolution"] else NOT_RESOLVED


def _unmeasured(study: Study, about: Subject, other: RunConfig, name: str) -> Advice:
    """What the time budget allows a change at most, and what it was worth elsewhere."""
    base, most = _base(study, about, other, name), bounds.bound(study, about, other)
    told = "Not measured against the present settings"
    if bounds.shares_cores(about, other):
        told += f"; {bounds.SHARED_CORES}"
    mine = ("note", name, about.config.run_id)
    notes = [r for r in comparisons(study) if (r["role"], r["label"], r["baseline_id"]) == mine]
    told += "".join(f"; {r['reason']}" for r in notes[-1:])
    if near := _elsewhere(study, about, other):
        where = phrases.settings(near["baseline"])
        told += f"; from other ones ({where}) it reads {phrases.ratio(near)} ({phrases.evidence(near)})"
    if base.status == WORSE or math.isnan(most):
        return replace(base, evidence=told)
    status = BOUND if most >= 1 + study.resolution else NO_GAIN
    return replace(base, status=status, evidence=told, most=most)


def _elsewhere(study: Study, about: Subject, other: RunConfig) -> Row | None:
    """The same change, measured from another configuration of this network, batch and code."""
    wanted = {name: new for name, (new, _) in other.differences(about.config).items()}
    rows = [r for r in comparisons(study) if r["sets"] and r["code_version"] == about.profile.code_version]
    bases = {r["run_id"]: r["config"] for r in rows if r["role"] == "baseline"}
    for row in rows:
        base = bases.get(row["baseline_id"])
        if row["role"] != "candidate" or base is None or WEAK in row["family"] or row["loader_alone"]:
            continue
        made = {name: new for name, (new, _) in row["config"].differences(base).items()}
        if made == wanted and base.differences(about.config).keys() <= _BESIDE:
            return {**row, "baseline": base}
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
        return replace(known, status=BOUND, evidence=about.taken.straggler, most=bounds.without_slowest(about.taken))
    logs = [
        -math.log1p(-share * math.exp(-set_log_ratio(base[r.set_id], r)))
        for r, share in zip(alone, straggler.excess_shares(alone), strict=True)
    ]
    found, who = stats.geometric_estimate(logs), straggler.named(alone)
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
    """What to change next as strings, one row a change, in the order of ``advice``; empty without any."""
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
    ]
    return pd.DataFrame(rows)
