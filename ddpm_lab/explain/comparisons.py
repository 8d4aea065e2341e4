"""Records to comparisons: one row for each configuration of a family, with ratio, interval and verdict."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from ddpm_lab.config import LOADER_ALONE, RunConfig
from ddpm_lab.explain import quality, stats
from ddpm_lab.explain.frames import Study, once
from ddpm_lab.own_settings import OWN_LOADER
from ddpm_lab.plan import LOST
from ddpm_lab.record import RunRecord, burst_log, kept_seconds, set_log_ratio

PROJECTED_IMAGES = 50_000
MECHANISM_ONLY = "mechanism tested, speed not claimed"
QUALITY = quality.NOT_MEASURED
COMPARED = ("baseline", "twin", "candidate", "note")
Row = dict[str, Any]
"""One configuration beside its baseline: see ``comparisons``."""


def comparisons(study: Study) -> list[Row]:
    """One row for each configuration of each family: baseline, null twin, candidates, and what failed or was left out.

    ``ratio`` is the baseline's time for equal work divided by the configuration's, with its 95 % interval over sets;
    ``p_holm`` is adjusted over all comparisons of the experiment, the twins among them. ``noise_low`` and
    ``noise_high`` are the interval of the family's twin. ``images_per_second`` is the geometric mean over sets of the
    set medians; ``projected_seconds`` is a projection of it to 50,000 images. ``set_ratios`` holds one ratio a set;
    ``bursts`` is how many times as much windows far slower than most add to its time as to the baseline's.
    ``estimate`` holds ratio, interval, p-value and sets together. Values that do not exist are NaN: records whose
    mechanism alone was tested have no speed here.
    """
    return [dict(row) for row in _comparisons(study)]


@once
def _comparisons(study: Study) -> list[Row]:
    rows: list[Row] = []
    trials = quality.Trials(study.trials)
    # The parts of the lost scaling are no answers to be compared: see lost_scaling. What is noted of a trial is no row:
    # its configuration has one of its own.
    compared = (r for r in study.records if r.role in COMPARED and r.config.purpose != "quality")
    ordered = sorted((r for r in compared if not r.family.endswith(LOST)), key=lambda r: r.experiment)
    for _, group in groupby(ordered, key=lambda r: r.experiment):
        block = judged(list(group), study.resolution)
        _weigh(block, trials)
        rows += block
    return rows


def families(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows by family and baseline, in order."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["family"], row["baseline_id"]), []).append(row)
    return list(found.values())


def throughput(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Images per second of a row, with the ends of their interval (NaN without one)."""
    return row["images_per_second"], row["images_per_second_low"], row["images_per_second_high"]


def resolved(row: Mapping[str, Any]) -> bool:
    """Whether a comparison has an answer: faster, or slower."""
    return row["verdict"] in (stats.FASTER, stats.SLOWER)


def judged(records: Sequence[RunRecord], resolution: float) -> list[Row]:
    """Rows of the families of one experiment, all of roles that are COMPARED, each with its verdict on speed."""
    rows = [row for family in _families(records) for row in _family_rows(family, resolution)]
    _judge(rows)
    return rows


def _families(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Records by family and baseline, under names that tell each family from all others.

    A note disappears once its configuration has been measured, by this run or a later one with more time.
    """
    records = [replace(r, family=name) for r, name in zip(records, _names_with_size(records), strict=True)]
    measured = {(r.family, r.run_id) for r in records if r.role in ("baseline", "candidate")}
    labels = {(r.family, r.config.data_sha256, r.label) for r in records if r.role in ("baseline", "candidate")}
    groups: dict[tuple[str, str], list[RunRecord]] = defaultdict(list)
    baselines: dict[str, dict[str, RunConfig]] = defaultdict(dict)
    for r in records:
        if r.role == "baseline":
            baselines[r.family][r.baseline_id] = r.config
    for r in records:
        baseline_id = r.baseline_id
        if r.role == "note":
            # A note without a configuration of its own carries the baseline's.
            own = r.run_id != r.baseline_id
            if (own and (r.family, r.run_id) in measured) or (r.family, r.config.data_sha256, r.label) in labels:
                continue
            known = baselines[r.family]
            if known and baseline_id not in known:
                baseline_id = next(reversed(known))
        groups[r.family, baseline_id].append(r)
    named = []
    for (family, baseline_id), group in groups.items():
        first, mine = next(iter(baselines[family].values()), None), baselines[family].get(baseline_id)
        if first is not None and mine is not None and (words := _differences(mine, first)):
            group = [replace(r, family=f"{family} ({words})") for r in group]  # noqa: PLW2901
        named.append(group)
    return named


def _names_with_size(records: Sequence[RunRecord]) -> list[str]:
    """Names of the records' families; each says its image size where several were measured."""
    several = len({r.config.image_size for r in records}) > 1
    sizes = (f"{r.config.image_size}x{r.config.image_size} pixels" for r in records)
    return [
        f"{r.family}, {size}" if several and size not in r.family else r.family
        for r, size in zip(records, sizes, strict=True)
    ]


def _differences(mine: RunConfig, other: RunConfig) -> str:
    """What tells two baselines apart, such as "seed 3"; of a hash its beginning."""
    words = []
    for name, (value, others) in mine.differences(other).items():
        if isinstance(value, dict):
            changed = {k: v for k, v in value.items() if not isinstance(others, dict) or others.get(k) != v}
            words += [f"{name} {key.replace('_', ' ')} {v}" for key, v in changed.items()]
        elif name == "data_sha256":
            words.append(f"data {value[:8]}")
        else:
            words.append(f"{name.replace('_', ' ')} {value}")
    return ", ".join(words)


def _family_rows(records: Sequence[RunRecord], resolution: float) -> list[Row]:
    """Rows of one family, in the order the configurations first appear: baseline, twin, candidates, notes."""
    dropped: dict[str, set[int]] = defaultdict(set)
    for r in records:
        dropped[r.set_id].update(w.turn for w in r.windows if w.dropped)
    groups: dict[tuple[str, str], list[RunRecord]] = {}
    for r in records:
        # The twin runs the baseline's own configuration: its role tells them apart. A note may have no run of its own.
        key = (r.role, r.label if r.role == "note" else r.run_id)
        groups.setdefault(key, []).append(r)
    ordered = sorted(groups.items(), key=lambda item: COMPARED.index(item[0][0]))
    base = {r.set_id: r for r in records if r.role == "baseline" and _has_speed(r)}
    twins = {r.set_id: r for r in records if r.role == "twin" and _has_speed(r)}
    base_group = next((g for (role, _), g in ordered if role == "baseline"), None)
    rows = [_row(group, base, base_group, dropped, resolution) for _, group in ordered]
    twin = next((row for row in rows if row["role"] == "twin"), None)
    for row, (_, group) in zip(rows, ordered, strict=True):
        row["bursts"] = _bursts(group, base, twins) if row["role"] == "candidate" else 1.0
        row["noise_low"], row["noise_high"] = (twin["low"], twin["high"]) if twin else (math.nan, math.nan)
    return rows


def _row(
    group: Sequence[RunRecord],
    base: dict[str, RunRecord],
    base_group: Sequence[RunRecord] | None,
    dropped: dict[str, set[int]],
    resolution: float,
) -> Row:
    last = group[-1]
    mechanism_only = any(r.mechanism_only for r in group)
    ok = [r for r in group if r.status == "ok"]
    failed = [r for r in group if r.status != "ok"]
    speed = [] if mechanism_only else [r for r in ok if _has_speed(r)]
    pairs = [(base[r.set_id], r) for r in speed if r.set_id in base]
    ratios = [set_log_ratio(*pair) for pair in pairs] if last.role != "baseline" else []
    logs = np.array([log for log in ratios if math.isfinite(log)])
    estimate = stats.geometric_estimate(logs)
    # Without the turns that were disturbed for any configuration of the set.
    kept = [[s for turn, s in kept_seconds(r).items() if turn not in dropped[r.set_id]] for r in speed]
    throughput = stats.throughput_estimate([float(np.median(k)) ** -1 for k in kept if k])
    batch, ranks = last.config.global_batch_size, last.config.world_size
    gain = ranks / base_group[-1].config.world_size if base_group else math.nan
    baseline = last.role == "baseline" and bool(speed)
    return {
        "experiment": last.experiment,
        "family": last.family,
        "baseline_id": last.baseline_id,
        "baseline_label": base_group[-1].label if base_group else "the baseline",
        "role": last.role,
        "label": last.label,
        "run_id": last.run_id,
        "config": last.config,
        "code_version": last.code_version,
        "status": "ok" if ok else last.status,
        "reason": (failed[-1].reason if failed else last.reason) or "",
        "failed_sets": len({r.set_id for r in failed}),
        "mechanism_only": mechanism_only,
        "sets": len(speed) if baseline else estimate.sets,
        "turns": max((len(r.windows) for r in speed), default=0),
        "turns_dropped": sum(len(dropped[r.set_id]) for r in speed),
        "ratio": 1.0 if baseline else estimate.value,
        "low": estimate.low,
        "high": estimate.high,
        "p": estimate.p,
        "set_ratios": tuple(float(v) for v in np.exp(logs)),
        "resolution": resolution,
        "sets_needed": float(stats.sets_to_resolve(logs, resolution) or math.nan),
        "images_per_second": throughput.value,
        "images_per_second_low": throughput.low,
        "images_per_second_high": throughput.high,
        "step_seconds": batch / throughput.value,
        "projected_seconds": PROJECTED_IMAGES / throughput.value,
        "peak_memory_bytes": max((peak(r, "peak_memory_bytes") for r in ok), default=math.nan),
        "peak_rss_bytes": max((peak(r, "peak_rss_bytes") for r in ok), default=math.nan),
        "ranks": ranks,
        "batch": batch,
        "loader_alone": last.config.workload in (LOADER_ALONE, OWN_LOADER),
        "efficiency": 1.0 if baseline else estimate.value / gain,
        "efficiency_low": estimate.low / gain,
        "efficiency_high": estimate.high / gain,
        "quality": QUALITY,
        "equivalence": None,
        "estimate": estimate,
    }


def peak(record: RunRecord, kind: str) -> float:
    """Bytes of the rank that used most, of a ``kind`` that ranks report; NaN where any rank does not know."""
    peaks = [getattr(rank, kind) for rank in record.ranks]
    return float(max(peaks)) if peaks and None not in peaks else math.nan


def _bursts(group: Sequence[RunRecord], base: dict[str, RunRecord], twins: dict[str, RunRecord]) -> float:
    """How many times as much its slowest windows add to a candidate's time as to the baseline's; 1 where none is sure.

    The ratio is one of medians, which leave such windows out. Sure is what Student's t finds at 99 %.
    """
    logs = []
    for record in group:
        same = [r[record.set_id] for r in (base, twins) if record.set_id in r]
        if same and _has_speed(record):
            logs.append(burst_log(record) - float(np.mean([burst_log(r) for r in same])))
    found = stats.geometric_estimate(logs)
    return found.value if found.sets >= stats.LEAST_SETS and found.p < 0.01 else 1.0


def _judge(rows: Sequence[Row]) -> None:
    """Adjust the p-values over the experiment and give each row its verdict."""
    tested = [row for row in rows if row["role"] in ("twin", "candidate") and not math.isnan(row["p"])]
    for row in rows:
        row["p_holm"], row["comparisons"] = math.nan, len(tested)
    for row, p in zip(tested, stats.holm([row["p"] for row in tested]), strict=True):
        row["p_holm"] = p
    trusted = not any(row["role"] == "twin" and stats.called(row["estimate"], row["p_holm"]) for row in tested)
    for row in rows:
        if row["mechanism_only"]:
            row["verdict"] = MECHANISM_ONLY
        elif row["role"] == "baseline" and row["sets"]:
            row["verdict"] = "baseline"
        elif not row["sets"]:
            row["verdict"] = "no result" if row["status"] == "ok" else row["status"]
        elif not trusted:
            row["verdict"] = stats.NOT_TRUSTED
        else:
            row["verdict"] = stats.verdict(row["estimate"], row["p_holm"], len(tested))
            turned = (row["ratio"] - 1) * (row["ratio"] / row["bursts"] - 1) <= 0
            if turned and resolved(row):
                row["verdict"] = stats.BURSTS


def _weigh(rows: Sequence[Row], trials: quality.Trials) -> None:
    """Give each candidate the verdict on its quality."""
    base = {row["baseline_id"]: row["config"] for row in rows if row["role"] == "baseline"}
    for row in rows:
        if row["role"] == "candidate" and row["baseline_id"] in base:
            found = trials.verdict(base[row["baseline_id"]], row["config"], row["code_version"])
            row["equivalence"], row["quality"] = found, quality.sentence(found)


def _has_speed(record: RunRecord) -> bool:
    return record.status == "ok" and bool(record.windows) and not record.mechanism_only
