"""The results of a benchmark as values: JSON by a published schema, and rows for CSV.

The schema is ``ddpm_lab/schemas/benchmark_results_1.json``. A number that is not known is null, and never 0.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ddpm_lab import __version__
from ddpm_lab.explain import machine_state, phrases, scaling
from ddpm_lab.explain.bands import S000
from ddpm_lab.explain.comparisons import PROJECTED_IMAGES, Row, resolved, throughput
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.grids import Grid
from ddpm_lab.explain.pairs import Pair, means, pairs, recommendation, records_of
from ddpm_lab.explain.strategy import PARAMETERS
from ddpm_lab.record import RunRecord

VERSION = 1
SIDES = ("single", "multi")
_DIGITS = 6


def document(study: Study, *, side: str | None = None, ledger: str = "") -> dict[str, Any]:
    """The results as plain values; with ``side`` (single or multi) those of one side alone.

    ``ledger`` says where the records lie that all of it comes from.
    """
    found = pairs(study)
    last = study.records[-1] if study.records else None
    moments = sorted((r.date for r in study.records), key=datetime.fromisoformat)
    return {
        "schema": f"ddpm_lab benchmark_results {VERSION}",
        "lab_version": __version__,
        "code_versions": sorted({r.code_version for r in study.records}),
        "measured": {"first": moments[0], "last": moments[-1]} if moments else None,
        "ledger": ledger or None,
        "environment": None if last is None else _environment(last),
        "machine_busy": machine_state.busy(study).strip() or None,
        "epoch_images": PROJECTED_IMAGES,
        "epoch_note": "epoch_seconds are a projection from measured throughput",
        "configurations": [
            _configuration(study, pair, name)
            for pair in found
            for name in SIDES
            if side in (None, name) and _of(pair, name)
        ],
        "comparisons": [] if side else [_comparison(pair) for pair in found if pair.single and pair.multi],
        "geometric_means": []
        if side
        else [
            {"devices": m.devices, "batches": m.batches, "speedup": _interval(m.value, m.low, m.high)}
            for m in means(found)
        ],
    }


def _of(pair: Pair, side: str) -> Row | None:
    return pair.single if side == "single" else pair.multi


def _environment(record: RunRecord) -> dict[str, Any]:
    told, machine = record.environment, record.environment.machine
    return {
        "machine": machine.name,
        "cpu": machine.cpu,
        "usable_cores": machine.usable_cores,
        "ram_bytes": told.ram_bytes,
        "gpus": list(machine.gpus),
        "gpu_uuids": list(told.gpu_uuids),
        "driver": machine.driver,
        **{name: getattr(told, name) for name in ("cuda", "python", "packages", "kernel", "hostname")},
        **{name: getattr(told, name) for name in ("slurm_job_id", "git_commit")},
    }


def _configuration(study: Study, pair: Pair, side: str) -> dict[str, Any]:
    row = _of(pair, side)
    assert row is not None
    config = row["config"]
    records = records_of(study, row)
    measured = bool(row["sets"])
    kind, peak = ("rss", "peak_rss_bytes") if config.device == "cpu" else ("gpu allocated", "peak_memory_bytes")
    rate, low, high = throughput(row) if measured else (math.nan,) * 3
    return {
        "name": f"{pair.name}, {scaling.layout(config)}",
        "scaling": pair.kind,
        "side": side,
        **{name: row[name] for name in ("run_id", "label", "family")},
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
        "status": row["status"],
        "reason": row["reason"] or None,
        "mechanism_only": bool(row["mechanism_only"]),
        **{name: int(row[name]) for name in ("sets", "turns", "turns_dropped")},
        "images_per_second": _interval(rate, low, high),
        "step_seconds": _number(row["step_seconds"] if measured else math.nan),
        "epoch_seconds": _interval(*(PROJECTED_IMAGES / value for value in (rate, high, low))),
        "peak_memory_bytes": _number(row[peak]),
        "peak_memory_kind": kind,
        "quality": str(row["quality"]) if row["role"] == "candidate" else None,
        "runs": [_run(r) for r in records if r.windows],
    }


def _run(record: RunRecord) -> dict[str, Any]:
    """One set: every step's time and rank 0's losses, of disturbed turns too, which are named."""
    steps = [s for w in record.windows for s in w.step_seconds]
    return {
        "set_id": record.set_id,
        "date": record.date,
        "status": record.status,
        "warmup_steps": record.warmup_steps,
        "dropped_turns": sorted(w.turn for w in record.windows if w.dropped),
        "images": sum(w.images for w in record.windows),
        "seconds": _number(sum(w.seconds for w in record.windows)),
        "median_step_seconds": _number(statistics.median(steps) if steps else math.nan),
        "step_seconds": [_number(s) for s in steps],
        "losses": [_number(loss) for loss in record.ranks[0].losses] if record.ranks else [],
    }


def _comparison(pair: Pair) -> dict[str, Any]:
    row = pair.compared
    ratio, efficiency, floor = (
        (math.nan,) * 3 if row is None else tuple(row[name] for name in names)
        for names in (
            ("ratio", "low", "high"),
            ("efficiency", "efficiency_low", "efficiency_high"),
            ("ratio", "noise_low", "noise_high"),
        )
    )
    return {
        "scaling": pair.kind,
        "batch_size": pair.batch,
        "devices": pair.multi["ranks"] if pair.multi else None,
        "speedup": _interval(*ratio),
        "efficiency": _interval(*efficiency),
        "band": scaling.band(row, S000) if row is not None and resolved(row) and row["efficiency_low"] <= 1 else None,
        "verdict": phrases.status(row["verdict"]) if row is not None else None,
        "recommendation": recommendation(pair) if pair.kind == "strong" else None,
        "sets": 0 if row is None else int(row["sets"]),
        "sets_needed": None if row is None else _number(row["sets_needed"]),
        "noise_floor": None if row is None or math.isnan(floor[1]) else [_number(v) for v in floor[1:]],
        "quality": str(pair.multi["quality"]) if pair.multi else None,
    }


def _interval(value: float, low: float, high: float) -> dict[str, float | None]:
    return {"value": _number(value), "low": _number(low), "high": _number(high)}


def _number(value: float | None) -> float | None:
    """A number in six digits, which is more than any measurement; null where there is none."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")


def rows(results: Mapping[str, Any]) -> Grid:
    """One row for each configuration of a document, for CSV: bare numbers, empty where unknown."""
    gains = {(c["scaling"], c["batch_size"], c["devices"]): c for c in results["comparisons"]}
    shown: list[list[object]] = []
    head: list[str] = []
    for one in results["configurations"]:
        batch = one["batch_size_per_device"] if one["scaling"] == "weak" else one["global_batch_size"]
        gain = gains.get((one["scaling"], batch, one["devices"])) if one["side"] == "multi" else None
        cells = {k: v for k, v in one.items() if not isinstance(v, dict | list)}
        for name in ("images_per_second", "epoch_seconds"):
            cells |= _flat(name, one[name])
        for name in ("speedup", "efficiency"):
            cells |= _flat(name, gain[name] if gain else {"value": None, "low": None, "high": None})
        cells |= {name: gain[name] if gain else None for name in ("verdict", "recommendation")}
        environment = results["environment"] or {}
        cells |= {"machine": environment.get("machine"), "measured": (results["measured"] or {}).get("last")}
        head = list(cells)
        shown.append(["" if value is None else value for value in cells.values()])
    return [head, *shown] if shown else [["name"]]


def _flat(name: str, interval: Mapping[str, Any]) -> dict[str, Any]:
    return {name: interval["value"], f"{name}_low": interval["low"], f"{name}_high": interval["high"]}
