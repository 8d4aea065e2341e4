"""The lab's own trainer beside others: its ratios turned round, so that they say how many times as fast it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddpm_lab.config import DDPM
from ddpm_lab.explain import decisions, limits, phrases, sentences
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import Study, rank_zero
from ddpm_lab.explain.table import Table, without_constant
from ddpm_lab.plan import BOTH_FP32, FORMATS, LEVERS, LIMITS, OURS, SAMPLING, TUNED
from ddpm_lab.record import RunRecord

EXPERIMENT = "peers"
_NONE = phrases.DASH
_TIMES = " \N{MULTIPLICATION SIGN}"


def rows(study: Study) -> list[Comparison]:
    """Every other trainer, turned round: ``ratio`` is the time it takes for equal images divided by this trainer's.

    The names of those that are measured in fp32 against fp32 say so, and of those beside whom the trainer had another
    network or batch than beside most, which. Trainers without a speed come too.
    """
    base, found = own(study), []
    for row in comparisons(study):
        if row.role not in ("candidate", "note") or not _is_rival(row.family):
            continue
        named = replace(row, label=row.label + (_kind(row.family) or _elsewhere(row, base)))
        found.append(_turned(named) if row.sets else named)
    return found


def _kind(family: str) -> str:
    """What is compared there, where it is not training in the trainer's own precision."""
    return next((kind for kind in (BOTH_FP32, SAMPLING, LEVERS) if family.endswith(kind)), "")


def _elsewhere(row: Comparison, base: Comparison | None) -> str:
    """Network and batch of a row, where they are not those that this trainer is described with."""
    work = (row.config.network, row.batch)
    here = base is None or work == (base.config.network, base.batch)
    return "" if here else f", on {work[0]} at batch {work[1]}"


def levers(study: Study) -> list[Comparison]:
    """Each setting put back alone, as it was measured: below 1 the trainer's own choice is faster."""
    return [r for r in comparisons(study) if r.family.endswith(LEVERS) and r.role == "candidate"]


def own(study: Study) -> Comparison | None:
    """The lab's own trainer, as the baseline of the others; of several networks or batches that of most others."""
    trained = [r for r in comparisons(study) if _is_rival(r.family) and not _kind(r.family)]
    others = Counter(r.family for r in trained if r.role == "candidate" and r.sets)
    mine = [r for r in trained if r.role == "baseline" and r.sets]
    return max(mine, key=lambda r: others[r.family], default=None)


def _baselines(study: Study) -> dict[tuple[str, str], Comparison]:
    """The lab's own trainer as the baseline of each family in which it has a speed, by family and baseline."""
    mine = [r for r in comparisons(study) if r.role == "baseline" and r.sets and _is_rival(r.family)]
    return {(r.family, r.baseline_id): r for r in mine}


def drawn(study: Study, rows: Sequence[Comparison]) -> Study:
    """The study of the families that rows belong to: what is said beside them is of these alone."""
    wanted = {(r.baseline_id, _kind(r.family)) for r in rows}
    records = [r for r in study.records if _is_rival(r.family) or r.family.endswith(LEVERS)]
    return replace(study, records=tuple(r for r in records if (r.baseline_id, _kind(r.family)) in wanted))


def _is_rival(family: str) -> bool:
    return not family.endswith(LEVERS) and not family.startswith(LIMITS)


def is_peer(row: Comparison) -> bool:
    """Whether a row compares training as both sides do it best: neither fp32 alone, nor sampling."""
    return bool(row.sets) and BOTH_FP32 not in row.label and SAMPLING not in row.label


def step_of(row: Comparison) -> int:
    """How far a trainer was tuned: 0 as it comes, 1 in this trainer's formats, 2 all that its users could change."""
    return 2 if TUNED in row.label else int(FORMATS in row.label)


def _turned(row: Comparison) -> Comparison:
    words = {decisions.FASTER: decisions.SLOWER, decisions.SLOWER: decisions.FASTER}
    return replace(
        row,
        ratio=row.ratio.inverse,
        noise=row.noise.inverse,
        logs=tuple((set_id, -log) for set_id, log in row.logs),
        verdict=words.get(row.verdict, row.verdict),
    )


def lead(study: Study) -> Comparison | None:
    """The primary comparison; where that is missing the trainer that comes nearest, so that the claim holds for all."""
    measured = [r for r in rows(study) if is_peer(r)]
    primary = [r for r in measured if r.primary]
    return min(primary or measured, key=lambda r: r.ratio.value, default=None)


def headline(other: Comparison) -> str:
    """Such as "This trainer is 50 % faster than the published code, tuned"."""
    mine = replace(other, label="this trainer", baseline_label=other.label, experiment=EXPERIMENT)
    return phrases.begun(sentences.headline(mine))


def evidence(study: Study) -> str:
    """Ratios with intervals, as the trainers come and tuned; of more than three the lowest and the highest."""
    told, base = [], own(study)
    measured = [r for r in rows(study) if r.sets]
    for words, chosen in (
        ("As they come", [r for r in measured if is_peer(r) and step_of(r) == 0]),
        ("Given bf16 and channels_last", [r for r in measured if step_of(r) == 1]),
        ("Tuned", [r for r in measured if step_of(r) == 2]),
        ("Both in fp32", [r for r in measured if BOTH_FP32 in r.label]),
        ("Sampling", [r for r in measured if SAMPLING in r.label]),
    ):
        if chosen:
            many = len(chosen) > 3
            told_of = sorted(chosen, key=lambda r: r.ratio.value)[:: len(chosen) - 1] if many else chosen
            listed = [f"{phrases.ratio(r)} times {_name(r)} ({phrases.evidence(r)})" for r in told_of]
            told.append(f"{words}: {' to '.join(listed) if many else phrases.joined(listed)}.")
    tuned = [r.config for r in measured if TUNED in r.label]
    if tuned and all((config.device, config.compile) == ("cpu", "off") for config in tuned):
        told.append("Compilation of the others is not tried on a CPU but in full.")
    if base is not None:
        told.append(f"It takes {phrases.throughput(base)} in {base.config.precision} at batch {base.batch}.")
    if said := limits.sentence(study, base):
        told.append(said)
    return " ".join(told)


def _name(row: Comparison) -> str:
    """The name of a trainer without how it was set."""
    label = row.label
    for kind in (TUNED, FORMATS, BOTH_FP32, SAMPLING):
        label = label.replace(kind, "")
    return label


def table(study: Study) -> Table:
    """How many times as fast this trainer is as each other, size, speed and memory.

    Before the others of a family stands this trainer as it ran beside them.
    """
    found = []
    for row in _shown(study):
        records = _records(study, row)
        seen = rank_zero(records[-1]) if records else {}
        measured = bool(row.sets)
        found.append(
            {
                "Configuration": row.label,
                "This trainer is": phrases.ratio_with_interval(row, _TIMES)
                if measured and row.role == "candidate"
                else _NONE,
                "Verdict": phrases.outcome(row),
                "Images/s": phrases.significant(row.images_per_second) if measured else _NONE,
                "Step": phrases.seconds(row.step_seconds) if measured else _NONE,
                "Format": str(row.config.precision) if measured else _NONE,
                "Peak memory": phrases.peak_memory(row) if measured else _NONE,
                "Weights": f"{seen['parameters'] / 1e6:.2f} M" if "parameters" in seen else _NONE,
                "GFLOP/image": _flop(study, row, seen),
                "Sets \N{MULTIPLICATION SIGN} turns": f"{row.sets} \N{MULTIPLICATION SIGN} {row.turns}"
                if measured
                else _NONE,
                "Quality": row.quality if measured else _NONE,
                "Note": row.reason if not measured else "",
            }
        )
    return without_constant(found, {"Note": [""]})


def _shown(study: Study) -> list[Comparison]:
    base, bases, others = own(study), _baselines(study), rows(study)
    found, twins = [], _twins(study)
    # The family that is described in words comes first, whatever order they were measured in.
    for row in ([base] if base else []) + others:
        if mine := bases.pop((row.family, row.baseline_id), None):
            where = _kind(mine.family) or _elsewhere(mine, base)
            found += [replace(mine, label=f"{OURS} (baseline){where}"), *twins]
            twins = []
        found += [row] if row.role != "baseline" else []
    return found


def lever_table(study: Study) -> Table:
    """What each setting of the trainer is worth here: the trainer's speed with it put back, alone."""
    found = [
        {
            "Configuration": row.label,
            "Speed of the trainer with it": phrases.ratio_with_interval(row) if row.sets else _NONE,
            "Verdict": phrases.outcome(row) if row.sets else phrases.failure(row),
            "Images/s": phrases.significant(row.images_per_second) if row.sets else _NONE,
            "Peak memory": phrases.peak_memory(row) if row.sets else _NONE,
            "Quality": row.quality if row.sets else _NONE,
            **phrases.loss(row),
        }
        for row in levers(study)
    ]
    return without_constant(found, {key: [_NONE] for key in phrases.LOSS})


def _twins(study: Study) -> list[Comparison]:
    twins = [r for r in comparisons(study) if r.role == "twin" and _is_rival(r.family) and r.sets]
    return [replace(r, label=f"{OURS}, repeated", role="candidate") for r in twins[:1]]


def _records(study: Study, row: Comparison) -> list[RunRecord]:
    role = "twin" if row.label.endswith(", repeated") else row.role
    mine = [r for r in study.records if r.run_id == row.run_id and r.family == row.family]
    return [r for r in mine if r.role == role and r.status == "ok"]


def _flop(study: Study, row: Comparison, seen: Mapping[str, Any]) -> str:
    """Of what a row times: a peer and a sampler count their own work, that of the lab's trainer is with the limits."""
    trains = row.config.workload == DDPM
    value = seen.get("flop_per_image") or (limits.flop_per_image(study, row.config) if trains else None)
    return f"{value / 1e9:.2f}" if value else _NONE
