"""The results of a benchmark as plain rows for JSON and CSV, one for each side of a pair; null is unknown, never 0."""

from __future__ import annotations

import math
from typing import Any

from ddpm_lab.explain import phrases, scaling
from ddpm_lab.explain.bands import S000
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.grids import Grid
from ddpm_lab.explain.pairs import Pair, pairs, recommendation, records_of
from ddpm_lab.explain.stats import Interval
from ddpm_lab.explain.strategy import PARAMETERS

_DIGITS = 6


def rows(study: Study) -> list[dict[str, Any]]:
    """Settings, speed, memory and, of several devices, the speed-up of each side of each pair.

    ``epoch_seconds`` is a projection from measured throughput to 50,000 images. Steps and losses are in the ledger.
    """
    return [
        {**_side(study, pair, row), "side": side, **_gain(pair, of_several=side == "multi")}
        for pair in pairs(study)
        for side, row in (("single", pair.single), ("multi", pair.multi))
        if row is not None
    ]


def grid(found: list[dict[str, Any]]) -> Grid:
    """Rows with their head, for CSV: empty where unknown."""
    return [list(found[0]), *(["" if v is None else v for v in row.values()] for row in found)] if found else [["name"]]


def _side(study: Study, pair: Pair, row: Comparison) -> dict[str, Any]:
    config, records = row.config, records_of(study, row)
    measured = bool(row.sets)
    kind, peak = ("rss", "peak_rss_bytes") if config.device == "cpu" else ("gpu allocated", "peak_memory_bytes")
    last = (records or study.records)[-1]
    return {
        "name": f"{pair.name}, {scaling.layout(config)}",
        "scaling": pair.kind,
        **{name: getattr(row, name) for name in ("run_id", "label", "family")},
        "network": config.network,
        "parameters": PARAMETERS[config.network],
        "data": records[-1].data_name if records else None,
        "image_size": config.image_size,
        "device": config.device,
        "devices": config.world_size,
        "nodes": config.nodes,
        "batch_size_per_device": config.rank_batch_size,
        "global_batch_size": config.global_batch_size,
        **{name: getattr(config, name) for name in ("precision", "compile", "loader", "loader_workers")},
        "status": row.status,
        "reason": row.reason or None,
        "mechanism_only": row.mechanism_only,
        **{name: getattr(row, name) for name in ("sets", "turns", "disturbed_sets")},
        "images_per_second": _number(row.images_per_second if measured else math.nan),
        "step_seconds": _number(row.step_seconds if measured else math.nan),
        "epoch_seconds": _number(row.projected_seconds if measured else math.nan),
        "peak_memory_bytes": _number(getattr(row, peak)),
        "peak_memory_kind": kind,
        "quality": row.quality if row.role == "candidate" else None,
        "machine": last.machine.name,
        "measured": last.date,
        "code_version": row.code_version,
    }


def _gain(pair: Pair, *, of_several: bool) -> dict[str, Any]:
    row = pair.compared if of_several else None
    return {
        **_interval("speedup", row.ratio if row else None),
        **_interval("efficiency", row.efficiency if row else None),
        "band": scaling.band(row, S000) if row is not None and row.answered and row.efficiency.low <= 1 else None,
        "verdict": phrases.status(row.verdict) if row is not None else None,
        "recommendation": recommendation(pair) if of_several and pair.kind == "strong" else None,
        "sets_needed": None if row is None else _number(row.sets_needed),
    }


def _interval(name: str, found: Interval | None) -> dict[str, float | None]:
    ends = (None, None, None) if found is None else (found.value, *found.ends)
    return {f"{name}{end}": _number(value) for end, value in zip(("", "_low", "_high"), ends, strict=True)}


def _number(value: float | None) -> float | None:
    """A number in six digits, which is more than any measurement; null where there is none."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")
