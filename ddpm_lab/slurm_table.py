"""What logs say, as the table and the speed-up block that people compare jobs by."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Any

from ddpm_lab.explain.bands import S001
from ddpm_lab.slurm_logs import NO_SUMMARY, Row
from ddpm_lab.summary_lines import Summary
from ddpm_lab.summary_lines import as_json as summary_json

COLUMNS = ("Job ID", "Configuration", "GPUs", "Nodes", "Time (s)", "Time/Epoch (s)", "Val Loss", "Val Acc")
ACCURACY = "not defined for a DDPM"
UNKNOWN = "unknown"


def cells(row: Row) -> list[str]:
    """A row of the table, in the order of COLUMNS."""
    told = row.summary
    name = told.configuration or (_sized(told) if row.found else NO_SUMMARY)
    return [
        told.job_id or UNKNOWN,
        name,
        *(UNKNOWN if value is None else str(value) for value in (told.gpus, told.nodes)),
        *(UNKNOWN if value is None else f"{value:,.2f}" for value in (told.seconds, told.epoch_seconds)),
        UNKNOWN if told.loss is None else (f"{told.loss:.4f}" if told.loss >= 0.01 else f"{told.loss:.4g}"),
        ACCURACY,
    ]


def plain(row: Row) -> list[object]:
    """A row for a CSV file: the columns with bare numbers, empty where unknown; utilisation, remark and log after."""
    told = row.summary
    numbers = (told.gpus, told.nodes, told.seconds, told.epoch_seconds, told.loss)
    shown = ["" if value is None else value for value in numbers]
    busy = "" if told.gpu_percent is None else round(told.gpu_percent, 1)
    return [told.job_id or "", cells(row)[1], *shown, ACCURACY, busy, row.remark, row.log]


def as_json(rows: Sequence[Row], found: SpeedUps) -> dict[str, Any]:
    """Rows and speed-ups as plain values."""
    runs = [{"log": row.log, **summary_json(row.summary), "found": row.found, "remark": row.remark} for row in rows]
    sizes = [
        {
            "configuration": one.name,
            "devices": one.devices,
            "nodes": one.nodes,
            "seconds": list(one.times),
            "speed_up": one.speed_up,
            "efficiency": one.efficiency,
            "band": None if one.efficiency is None else S001.name(one.efficiency),
            "missing": one.missing or None,
        }
        for one in (*found.baselines, *found.compared)
    ]
    return {"runs": runs, "accuracy": ACCURACY, "per_epoch": found.per_epoch, "speed_ups": sizes}


def _sized(told: Summary) -> str:
    """A name for a run that gives none."""
    if told.devices is None:
        return UNKNOWN
    kind = "GPU" if told.gpus else "CPU rank"
    name = f"{told.devices} {kind}{'s' if told.devices > 1 else ''}"
    return f"{name} on {told.nodes} nodes" if (told.nodes or 1) > 1 else name


def table(rows: Sequence[Row]) -> list[str]:
    """The table as lines of text, with a column of remarks where there are any."""
    remarks = any(row.remark for row in rows)
    grid = [[*COLUMNS, *(["Note"] if remarks else [])]]
    grid += [[*cells(row), *([row.remark] if remarks else [])] for row in rows]
    widths = [max(len(line[i]) for line in grid) for i in range(len(grid[0]))]
    told = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in grid]
    return [told[0], "-+-".join("-" * width for width in widths), *told[1:]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The jobs of one configuration at one size: mean seconds; the speed-up is a ratio of geometric means.

    ``missing`` says why there is no speed-up.
    """

    configuration: str | None
    gpu: bool
    devices: int
    nodes: int
    times: tuple[float, ...]
    speed_up: float | None = None
    missing: str = ""

    @property
    def seconds(self) -> float:
        """Mean over the jobs."""
        return fmean(self.times)

    @property
    def efficiency(self) -> float | None:
        """Parallel efficiency: the speed-up over the number of devices."""
        return None if self.speed_up is None else self.speed_up / self.devices

    @property
    def size(self) -> str:
        """What it ran on."""
        return _sized(Summary(gpus=self.devices if self.gpu else 0, ranks=self.devices, nodes=self.nodes))

    @property
    def name(self) -> str:
        """The configuration and its size, each once."""
        if self.configuration is None or self.size.partition(" on ")[0].lower() in self.configuration.lower():
            return self.configuration or self.size
        return f"{self.configuration} ({self.size})"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUps:
    """Baselines on one device, what is compared with them, and whether times are of an epoch or of a whole run."""

    per_epoch: bool
    baselines: tuple[Scaling, ...]
    compared: tuple[Scaling, ...]


def speed_ups(rows: Sequence[Row]) -> SpeedUps:
    """What several devices gain over one, by configuration.

    A baseline ran on one device of the same kind (GPU, or CPU rank) under the same name; where a kind has only one
    baseline, it is everybody's. Runs over different numbers of epochs are compared by the time of an epoch.
    """
    told = [row.summary for row in rows if row.summary.seconds and row.summary.devices]
    per_epoch = len({s.epochs for s in told}) > 1 and all(s.epoch_seconds for s in told)
    groups: dict[tuple[str | None, bool, int, int], list[float]] = {}
    for s in told:
        seconds = s.epoch_seconds if per_epoch else s.seconds
        assert s.devices
        assert seconds
        groups.setdefault((s.configuration, bool(s.gpus), s.devices, s.nodes or 1), []).append(seconds)
    sizes = [
        Scaling(configuration=name, gpu=gpu, devices=devices, nodes=nodes, times=tuple(times))
        for (name, gpu, devices, nodes), times in groups.items()
    ]
    baselines = tuple(one for one in sizes if one.devices == 1)
    compared = tuple(_against(one, [b for b in baselines if b.gpu == one.gpu]) for one in sizes if one.devices > 1)
    return SpeedUps(per_epoch=per_epoch, baselines=baselines, compared=compared)


def _against(one: Scaling, baselines: Sequence[Scaling]) -> Scaling:
    same = [b for b in baselines if b.configuration == one.configuration] or list(baselines)
    if len(same) == 1:
        ratio = geometric_mean(same[0].times) / geometric_mean(one.times)
        return dataclasses.replace(one, speed_up=ratio)
    kind = "GPU" if one.gpu else "CPU rank"
    many = f"{len(same)} configurations ran on a single {kind}, and none is this one"
    return dataclasses.replace(one, missing=many if same else f"no run on a single {kind}")


def speed_up_block(found: SpeedUps) -> list[str]:
    """The speed-up block as lines of text; empty where there is nothing to compare."""
    if not found.compared:
        return []
    unit = "seconds per epoch" if found.per_epoch else "seconds"
    lines = []
    for base in found.baselines:
        kind = f"Single {'GPU' if base.gpu else 'CPU rank'}"
        which = f"; {base.configuration}" if len(found.baselines) > 1 and base.configuration else ""
        lines.append(f"Baseline ({kind}{which}): {_mean(base, unit)}")
    for one in found.compared:
        lines += ["", f"{one.name}:", f"  Average time: {_mean(one, unit)}"]
        if one.speed_up is None or one.efficiency is None:
            lines.append(f"  Speed-up: {UNKNOWN} ({one.missing})")
            continue
        lines.append(f"  Speed-up: {one.speed_up:.2f}x")
        lines.append(f"  Parallel efficiency: {100 * one.efficiency:.1f} % ({S001.name(one.efficiency)})")
    return lines


def _mean(one: Scaling, unit: str) -> str:
    return f"{one.seconds:,.2f} {unit}" + (f" (mean of {len(one.times)} jobs)" if len(one.times) > 1 else "")
