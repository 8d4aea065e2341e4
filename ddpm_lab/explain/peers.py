"""The lab's own trainer beside others: its ratios turned round, so that they say how many times as fast it is."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from ddpm_lab.config import DDPM
from ddpm_lab.explain import limits, phrases, stats
from ddpm_lab.explain.comparisons import Row, comparisons, resolved
from ddpm_lab.explain.frames import Study, rank_zero
from ddpm_lab.plan import BOTH_FP32, FORMATS, LEVERS, LIMITS, OURS, SAMPLING, TUNED
from ddpm_lab.record import RunRecord

EXPERIMENT = "peers"
_NONE = phrases.DASH
_TIMES = " \N{MULTIPLICATION SIGN}"


def rows(study: Study) -> list[Row]:
    """Every other trainer, turned round: ``ratio`` is the time it takes for equal images divided by this trainer's.

    The names of those that are measured in fp32 against fp32 say so, and of those beside whom the trainer had another
    network or batch than beside most, which. Trainers without a speed come too.
    """
    base, found = own(study), []
    for row in comparisons(study):
        if row["role"] not in ("candidate", "note") or not _is_rival(row["family"]):
            continue
        row["name"] = row["label"] + (_kind(row["family"]) or _elsewhere(row, base))
        found.append(_turned(row) if row["sets"] else row)
    return found


def _kind(family: str) -> str:
    """What is compared there, where it is not training in the trainer's own precision."""
    return next((kind for kind in (BOTH_FP32, SAMPLING, LEVERS) if family.endswith(kind)), "")


def _elsewhere(row: Row, base: Row | None) -> str:
    """Network and batch of a row, where they are not those that this trainer is described with."""
    work = (row["config"].network, row["batch"])
    here = base is None or work == (base["config"].network, base["batch"])
    return "" if here else f", on {work[0]} at batch {work[1]}"


def levers(study: Study) -> list[Row]:
    """Each setting put back alone, as it was measured: below 1 the trainer's own choice is faster."""
    return [r for r in comparisons(study) if r["family"].endswith(LEVERS) and r["role"] == "candidate"]


def levers_with_kernels(study: Study) -> list[str]:
    """The levers that put the joined kernels back too, as their configurations say: labels did not always."""
    base = {r["family"]: r["config"] for r in comparisons(study) if r["role"] == "baseline"}
    changed = {
        r["label"]: set(base[r["family"]].differences(r["config"])) for r in levers(study) if r["family"] in base
    }
    return [label for label, names in changed.items() if "kernels" in names and len(names) > 1]


def own(study: Study) -> Row | None:
    """The lab's own trainer, as the baseline of the others; of several networks or batches that of most others."""
    trained = [r for r in comparisons(study) if _is_rival(r["family"]) and not _kind(r["family"])]
    others = Counter(r["family"] for r in trained if r["role"] == "candidate" and r["sets"])
    mine = [r for r in trained if r["role"] == "baseline" and r["sets"]]
    return max(mine, key=lambda r: others[r["family"]], default=None)


def _baselines(study: Study) -> dict[tuple[str, str], Row]:
    """The lab's own trainer as the baseline of each family in which it has a speed, by family and baseline."""
    mine = [r for r in comparisons(study) if r["role"] == "baseline" and r["sets"] and _is_rival(r["family"])]
    return {(r["family"], r["baseline_id"]): r for r in mine}


def drawn(study: Study, rows: Sequence[Row]) -> Study:
    """The study of the families that rows belong to: what is said beside them is of these alone."""
    wanted = {(r["baseline_id"], _kind(r["family"])) for r in rows}
    records = [r for r in study.records if _is_rival(r.family) or r.family.endswith(LEVERS)]
    return replace(study, records=tuple(r for r in records if (r.baseline_id, _kind(r.family)) in wanted))


def _is_rival(family: str) -> bool:
    return not family.endswith(LEVERS) and not family.startswith(LIMITS)


def is_peer(row: Mapping[str, Any]) -> bool:
    """Whether a row compares training as both sides do it best: neither fp32 alone, nor sampling."""
    return bool(row["sets"]) and BOTH_FP32 not in row["name"] and SAMPLING not in row["name"]


def step_of(row: Mapping[str, Any]) -> int:
    """How far a trainer was tuned: 0 as it comes, 1 in this trainer's formats, 2 all that its users could change."""
    return 2 if TUNED in row["name"] else int(FORMATS in row["name"])


def _turned(row: Row) -> Row:
    words = {stats.FASTER: stats.SLOWER, stats.SLOWER: stats.FASTER}
    return {
        **row,
        "ratio": 1 / row["ratio"],
        "low": 1 / row["high"],
        "high": 1 / row["low"],
        "noise_low": 1 / row["noise_high"],
        "noise_high": 1 / row["noise_low"],
        "set_ratios": tuple(1 / r for r in row["set_ratios"]),
        "verdict": words.get(row["verdict"], row["verdict"]),
    }


def lead(study: Study) -> Row | None:
    """The trainer that comes nearest, in equal precision or not: the claim is about it, so that it holds for all."""
    measured = [r for r in rows(study) if is_peer(r)]
    return min(measured, key=lambda r: r["ratio"]) if measured else None


def headline(study: Study, nearest: Mapping[str, Any]) -> str:
    """Such as "This trainer is 1.72 times as fast as the nearest of 6 others (diffusers, tuned)"."""
    count = sum(is_peer(r) for r in rows(study))
    others = f"the nearest of {count} others ({nearest['name']})" if count > 1 else str(nearest["name"])
    if not resolved(nearest):
        return f"Not resolved: this trainer against {others} reads {phrases.ratio(nearest)}"
    return f"This trainer is {phrases.ratio(nearest)} times as fast as {others}"


def evidence(study: Study) -> str:
    """Ratios with intervals, as the trainers come and tuned; of more than three the lowest and the highest."""
    told, base = [], own(study)
    measured = [r for r in rows(study) if r["sets"]]
    for words, chosen in (
        ("As they come", [r for r in measured if is_peer(r) and step_of(r) == 0]),
        ("Given bf16 and channels_last", [r for r in measured if step_of(r) == 1]),
        ("Tuned", [r for r in measured if step_of(r) == 2]),
        ("Both in fp32", [r for r in measured if BOTH_FP32 in r["name"]]),
        ("Sampling", [r for r in measured if SAMPLING in r["name"]]),
    ):
        if chosen:
            many = len(chosen) > 3
            told_of = sorted(chosen, key=lambda r: float(r["ratio"]))[:: len(chosen) - 1] if many else chosen
            listed = [
                f"{phrases.ratio(r)} times {r['label'].replace(TUNED, '').replace(FORMATS, '')}"
                f"{'' if words in ('Both in fp32', 'Sampling') else _elsewhere(r, base)} ({phrases.evidence(r)})"
                for r in told_of
            ]
            told.append(f"{words}: {' to '.join(listed) if many else phrases.joined(listed)}.")
    tuned = [r["config"] for r in measured if TUNED in r["name"]]
    if tuned and all((config.device, config.compile) == ("cpu", "off") for config in tuned):
        told.append("Compilation of the others is not tried on a CPU but in full.")
    if base is not None:
        told.append(f"It takes {phrases.throughput(base)} in {base['config'].precision} at batch {base['batch']}.")
    if said := limits.sentence(study, base):
        told.append(said)
    return " ".join(told)


def table(study: Study) -> pd.DataFrame:
    """How many times as fast this trainer is as each other, size, speed, memory, and loss after equal images.

    Before the others of a family stands this trainer as it ran beside them.
    """
    steps = _common_steps(study)
    found = []
    for row in _shown(study):
        records = _records(study, row)
        seen = rank_zero(records[-1]) if records else {}
        measured = bool(row["sets"])
        found.append(
            {
                "Configuration": row["name"],
                "This trainer is": phrases.ratio_with_interval(row, _TIMES)
                if measured and row["role"] == "candidate"
                else _NONE,
                "Verdict": phrases.outcome(row),
                "Images/s": phrases.significant(row["images_per_second"]) if measured else _NONE,
                "Step": phrases.seconds(row["step_seconds"]) if measured else _NONE,
                "Format": str(row["config"].precision) if measured else _NONE,
                "Peak memory": phrases.peak_memory(row) if measured else _NONE,
                "Weights": f"{seen['parameters'] / 1e6:.2f} M" if "parameters" in seen else _NONE,
                "GFLOP/image": _flop(study, row, seen),
                "Loss": _loss(records, steps.get(str(row["family"]), [])),
                "Sets \N{MULTIPLICATION SIGN} turns": f"{row['sets']} \N{MULTIPLICATION SIGN} {row['turns']}",
                "Quality": str(row["quality"]) if measured else _NONE,
                "Note": str(row["reason"]) if not measured else "",
            }
        )
    frame = pd.DataFrame(found)
    if frame.empty:
        return pd.DataFrame(columns=["Configuration", "This trainer is", "Verdict"])
    return frame if frame["Note"].any() else frame.drop(columns="Note")


def _shown(study: Study) -> list[Row]:
    base, bases, others = own(study), _baselines(study), rows(study)
    found, twins = [], _twins(study)
    # The family that is described in words comes first, whatever order they were measured in.
    for row in ([base] if base else []) + others:
        if mine := bases.pop((row["family"], row["baseline_id"]), None):
            where = _kind(mine["family"]) or _elsewhere(mine, base)
            found += [{**mine, "name": f"{OURS} (baseline){where}"}, *twins]
            twins = []
        found += [row] if row["role"] != "baseline" else []
    return found


def at_most_table(study: Study) -> pd.DataFrame:
    """What each ratio could be at most, if this trainer ran at the machine's peaks; empty where no limits are known."""
    lines = {key: limits.roofline(study, row) for key, row in _baselines(study).items()}
    found = []
    for row in rows(study) if any(lines.values()) else []:
        line = lines.get((row["family"], row["baseline_id"]))
        if row["sets"]:
            found.append(
                {
                    "Configuration": row["name"],
                    "This trainer is": phrases.ratio_with_interval(row, _TIMES),
                    "Headroom": f"{line.headroom:.1f}{_TIMES}" if line else "no limits measured",
                    "At most here": f"{row['ratio'] * line.headroom:.1f}{_TIMES}" if line else _NONE,
                }
            )
    return pd.DataFrame(found)


def lever_table(study: Study) -> pd.DataFrame:
    """What each setting of the trainer is worth here: the trainer's speed with it put back, alone."""
    found = [
        {
            "Configuration": row["label"],
            "Speed of the trainer with it": phrases.ratio_with_interval(row) if row["sets"] else _NONE,
            "Verdict": phrases.outcome(row) if row["sets"] else phrases.failure(row),
            "Images/s": phrases.significant(row["images_per_second"]) if row["sets"] else _NONE,
            "Peak memory": phrases.peak_memory(row) if row["sets"] else _NONE,
            "Quality": str(row["quality"]) if row["sets"] else _NONE,
            **phrases.loss(row),
        }
        for row in levers(study)
    ]
    frame = pd.DataFrame(found)
    return frame.drop(columns=[c for c in phrases.LOSS if c in frame and frame[c].eq(_NONE).all()])


def _twins(study: Study) -> list[Row]:
    twins = [r for r in comparisons(study) if r["role"] == "twin" and _is_rival(r["family"]) and r["sets"]]
    return [{**r, "name": f"{OURS} (null twin)", "role": "candidate"} for r in twins[:1]]


def _records(study: Study, row: Mapping[str, Any]) -> list[RunRecord]:
    role = "twin" if str(row["name"]).endswith("(null twin)") else row["role"]
    mine = [r for r in study.records if r.run_id == row["run_id"] and r.family == row["family"]]
    return [r for r in mine if r.role == role and r.status == "ok"]


def _flop(study: Study, row: Row, seen: Mapping[str, Any]) -> str:
    """Of what a row times: a peer and a sampler count their own work, that of the lab's trainer is with the limits."""
    trains = row["config"].workload == DDPM
    value = seen.get("flop_per_image") or (limits.flop_per_image(study, row["config"]) if trains else None)
    return f"{value / 1e9:.2f}" if value else _NONE


def _common_steps(study: Study) -> dict[str, list[int]]:
    """By family the last third of the steps that were timed in its every run: there all have seen the same images."""
    timed: dict[str, list[set[int]]] = {}
    for record in study.records:
        trains = _is_rival(record.family) and not record.family.endswith(SAMPLING)
        if trains and record.status == "ok" and record.windows:
            timed.setdefault(record.family, []).append(set(_losses(record)))
    common = {family: sorted(set.intersection(*steps)) for family, steps in timed.items()}
    return {family: steps[-max(1, len(steps) // 3) :] for family, steps in common.items()}


def _losses(record: RunRecord) -> dict[int, float]:
    """Loss of each timed step, by the number of the step in the run: warm-up and settling steps count too."""
    told = iter(record.ranks[0].losses)
    prefetched = int(rank_zero(record).get("prefetch_batches") or 0)
    step, found = record.warmup_steps, {}
    for window in record.windows:
        step += max(record.plan.settle_steps, prefetched)
        for _ in range(window.steps):
            step += 1
            found[step] = next(told, math.nan)
    return found


def _loss(records: Sequence[RunRecord], steps: Sequence[int]) -> str:
    values = [losses[step] for r in records for losses in [_losses(r)] for step in steps if step in losses]
    mean = statistics.fmean(values) if values else math.nan
    return f"{mean:.3f} near step {steps[-1]}" if math.isfinite(mean) else _NONE
