"""Runs as the table and the speed-up block that people compare jobs by, whether logs, run folders or records tell."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.explain import grids
from ddpm_lab.explain.bands import S001
from ddpm_lab.files import expanded

COLUMNS = ("Job ID", "Configuration", "GPUs", "Nodes", "Time (s)", "Time/Epoch (s)", "Val Loss", "Val Acc")
ACCURACY = "not defined for a DDPM"
UNKNOWN = "unknown"
NOT_CLAIMED = "not claimed"
NO_SUMMARY = "no summary found"
RUNS = "ddpm_lab_runs"
"""The key of the line of JSON that a job prints at its end: a list of summaries."""
UNTOLD = "The logs do not tell whether all did the same work."
BY_EPOCH = "Compared by the time of an epoch."
APART = "Jobs that ran apart: no interval, and what else a machine did meanwhile is part of the ratio."


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run's last lines say; None is unknown, and never 0.

    ``seconds`` is the time spent in training steps over ``epochs`` passes through the training images, ``loss`` the
    lowest held-out loss of ``steps`` steps, ``gpu_percent`` the mean utilisation of its GPUs. ``note`` says why there
    is no time.
    """

    job_id: str | None = None
    configuration: str | None = None
    gpus: int | None = None
    ranks: int | None = None
    nodes: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    epoch_seconds: float | None = None
    loss: float | None = None
    gpu_percent: float | None = None
    note: str = ""
    steps: int | None = None

    @property
    def devices(self) -> int | None:
        """What trained side by side: GPUs, or the ranks of a run without any."""
        return self.gpus or self.ranks

    def as_json(self) -> dict[str, Any]:
        """Plain values; a loss that is not finite becomes None, since JSON has no such number."""
        values = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A run, or (``summary`` without seconds and loss) a log of which no run could be read.

    ``log`` is where it was read: a file, a run's folder or a ledger.
    """

    log: str
    summary: Summary
    note: str = ""

    @property
    def found(self) -> bool:
        """Whether anything is told of a run's time or loss."""
        return self.summary.seconds is not None or self.summary.loss is not None or bool(self.summary.note)

    @property
    def remark(self) -> str:
        """What a reader must know of the row."""
        claimed = f"speed {NOT_CLAIMED}: {self.summary.note}" if self.summary.note else ""
        return "; ".join(text for text in (claimed, self.note) if text)


def cells(row: Row) -> list[str]:
    """A row of the table, in the order of COLUMNS."""
    told = row.summary
    name = told.configuration or (_sized(told) if row.found else NO_SUMMARY)
    return [
        told.job_id or UNKNOWN,
        name,
        *(UNKNOWN if value is None else str(value) for value in (told.gpus, told.nodes)),
        *(UNKNOWN if value is None else f"{value:,.2f}" for value in (told.seconds, told.epoch_seconds)),
        _loss(told),
        ACCURACY,
    ]


def _loss(told: Summary) -> str:
    """The lowest loss with the length of the training, where that is known: without it losses do not compare."""
    if told.loss is None:
        return UNKNOWN
    text = format(told.loss, ".4f" if told.loss >= 0.01 else ".4g")
    return f"{text} in {told.steps:,} step{'s' * (told.steps > 1)}" if told.steps else text


def grid(rows: Sequence[Row]) -> list[list[str]]:
    """The table, its head first, with a column of remarks where there are any."""
    remarks, logs = any(row.remark for row in rows), len({row.log for row in rows}) > 1
    return [
        [*COLUMNS, *(["Log"] if logs else []), *(["Note"] if remarks else [])],
        *([*cells(row), *([row.log] if logs else []), *([row.remark] if remarks else [])] for row in rows),
    ]


def plain(rows: Sequence[Row]) -> list[list[object]]:
    """The table for a CSV file: bare numbers, empty where unknown; ranks, utilisation and more after."""
    shown: list[list[object]] = [[*COLUMNS, "Ranks", "GPU-Util (%)", "Note", "Log", "Steps"]]
    for row in rows:
        told = row.summary
        numbers = (told.gpus, told.nodes, told.seconds, told.epoch_seconds, told.loss)
        values = ["" if value is None else value for value in numbers]
        busy = "" if told.gpu_percent is None else round(told.gpu_percent, 1)
        ranks = "" if told.ranks is None else told.ranks
        after = [ranks, busy, row.remark, row.log, "" if told.steps is None else told.steps]
        shown.append([told.job_id or "", cells(row)[1], *values, ACCURACY, *after])
    return shown


def _sized(told: Summary) -> str:
    """A name for a run that gives none."""
    if told.devices is None:
        return UNKNOWN
    kind = "GPU" if told.gpus else "CPU rank"
    name = f"{told.devices} {kind}{'s' if told.devices > 1 else ''}"
    return f"{name} on {told.nodes} nodes" if (told.nodes or 1) > 1 else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The jobs of one configuration at one size: mean seconds; the speed-up is a ratio of geometric means.

    ``missing`` says why there is no speed-up. Of records the speed-up is the paired one: ``evidence`` is its interval,
    sets and verdict, ``rating`` the band of its efficiency with its interval.
    """

    configuration: str | None
    gpu: bool
    devices: int
    nodes: int
    times: tuple[float, ...]
    speed_up: float | None = None
    missing: str = ""
    evidence: str = ""
    rating: str = ""

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

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "configuration": self.name,
            "devices": self.devices,
            "nodes": self.nodes,
            "seconds": list(self.times),
            "speed_up": self.speed_up,
            "evidence": self.evidence or None,
            "efficiency": self.efficiency,
            "band": None if self.efficiency is None else self.rating or S001.name(self.efficiency),
            "missing": self.missing or None,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUps:
    """Baselines on one device, what is compared with them, and whether times are of an epoch or of a whole run.

    ``notes`` say what holds for all of it: how it was measured, where and when.
    """

    per_epoch: bool
    baselines: tuple[Scaling, ...]
    compared: tuple[Scaling, ...]
    notes: tuple[str, ...] = ()


def speed_ups(rows: Sequence[Row]) -> SpeedUps:
    """What several devices gain over one, where they did equal work.

    A baseline ran on one device of the same kind (GPU, or CPU rank) and did the same: its name is the same, or that
    with the batch of each device instead of all (weak scaling). Runs over different numbers of epochs are compared by
    the time of an epoch, and not at all where a log does not tell it.
    """
    told = [row.summary for row in rows if row.summary.seconds and row.summary.devices]
    named = {s.configuration for s in told if _work(s.configuration, 1)}
    weak = len(named) > len({_work(name, None) for name in named})
    unlike = len({s.epochs for s in told}) > 1
    per_epoch = (unlike or weak) and all(s.epoch_seconds for s in told)
    groups: dict[tuple[str | None, bool, int, int], list[Summary]] = {}
    for s in told:
        assert s.devices
        groups.setdefault((s.configuration, bool(s.gpus), s.devices, s.nodes or 1), []).append(s)
    sizes = {
        Scaling(
            configuration=name,
            gpu=gpu,
            devices=devices,
            nodes=nodes,
            times=tuple((s.epoch_seconds if per_epoch else s.seconds) or math.nan for s in runs),
        ): {s.epochs for s in runs}
        for (name, gpu, devices, nodes), runs in groups.items()
    }
    baselines = tuple(one for one in sizes if one.devices == 1)
    compared = []
    for one, epochs in sizes.items():
        if one.devices == 1:
            continue
        found, base = _against(one, [b for b in baselines if b.gpu == one.gpu])
        if base is not None and not per_epoch and (epochs != sizes[base] or len(epochs) > 1):
            why = "other numbers of epochs, and not every log tells the time of one"
            found = dataclasses.replace(found, speed_up=None, evidence="", missing=why)
        compared.append(found)
    untold = any(one.speed_up is not None and _work(one.configuration, 1) is None for one in compared)
    said = ((APART, True), (BY_EPOCH, per_epoch and compared), (UNTOLD, untold))
    notes = tuple(text for text, is_so in said if is_so)
    return SpeedUps(per_epoch=per_epoch, baselines=baselines, compared=tuple(compared), notes=notes)


def _work(name: str | None, devices: int | None) -> str | None:
    """A configuration without what only its size makes of it; None tells of no work.

    ``devices`` is a number by which its batch is divided; None takes the batch out.
    """
    if name is None or re.fullmatch(r"\d+ (GPU|CPU rank)s?", name):
        return None

    def share(match: re.Match[str]) -> str:
        batch = int(match[1])
        return "batch" if devices is None else f"batch {batch / devices:g}"

    return re.sub(r"\bbatch (\d+)\b", share, name)


def _against(one: Scaling, baselines: Sequence[Scaling]) -> tuple[Scaling, Scaling | None]:
    """A size with its speed-up, and the baseline of that; or with the reason for which it has none."""
    kind, work = "GPU" if one.gpu else "CPU rank", _work(one.configuration, 1)
    same = [b for b in baselines if _work(b.configuration, 1) == work]
    weak = [b for b in baselines if work and _work(b.configuration, 1) == _work(one.configuration, one.devices)]
    for found, evidence in ((same, ""), (weak, "weak scaling: each device has the batch of one")):
        if len(found) == 1:
            ratio = geometric_mean(found[0].times) / geometric_mean(one.times)
            return dataclasses.replace(one, speed_up=ratio, evidence=evidence), found[0]
    many = f"{len(baselines)} configurations ran on a single {kind}, and none is this one"
    if len(baselines) == 1:
        many = f"the run on a single {kind} is of other work: {baselines[0].configuration or 'unknown'}"
    return dataclasses.replace(one, missing=many if baselines else f"no run on a single {kind}"), None


def speed_up_block(found: SpeedUps) -> list[str]:
    """The speed-up block as lines of text; empty where there is nothing to compare."""
    if not found.compared:
        return []
    unit = "seconds per epoch" if found.per_epoch else "seconds"
    lines = []
    for base in found.baselines:
        which = f"; {base.configuration}" if len(found.baselines) > 1 and base.configuration else ""
        lines.append(f"Baseline (Single {'GPU' if base.gpu else 'CPU rank'}{which}): {_mean(base, unit)}")
    for one in found.compared:
        lines += ["", f"{one.name}:", f"  Average time: {_mean(one, unit)}"]
        if one.speed_up is None or one.efficiency is None:
            lines.append(f"  Speed-up: {UNKNOWN} ({one.missing})")
            continue
        lines.append(f"  Speed-up: {one.speed_up:.2f}x" + (f" ({one.evidence})" if one.evidence else ""))
        lines.append(f"  Parallel efficiency: {100 * one.efficiency:.1f} % ({one.rating or S001.name(one.efficiency)})")
    return [*lines, "", *found.notes] if found.notes else lines


def _mean(one: Scaling, unit: str) -> str:
    return f"{one.seconds:,.2f} {unit}" + (f" (mean of {len(one.times)} jobs)" if len(one.times) > 1 else "")


def as_values(rows: Sequence[Row], found: Sequence[SpeedUps]) -> dict[str, Any]:
    """Rows and speed-ups as plain values."""
    return {
        "runs": [{"log": row.log, **row.summary.as_json(), "found": row.found, "remark": row.remark} for row in rows],
        "accuracy": ACCURACY,
        "per_epoch": all(one.per_epoch for one in found),
        "speed_ups": [size.as_json() for one in found for size in (*one.baselines, *one.compared)],
        "notes": [note for one in found for note in one.notes],
    }


def markdown(rows: Sequence[Row], found: Sequence[SpeedUps]) -> str:
    """The table and the speed-up blocks as Markdown."""
    blocks = [f"```text\n{chr(10).join(block)}\n```\n" for one in found if (block := speed_up_block(one))]
    return "\n".join([grids.markdown(grid(rows)), *blocks])


def show(
    rows: Sequence[Row],
    found: Sequence[SpeedUps],
    *,
    csv: str | None = None,
    to_markdown: str | None = None,
    as_json: bool = False,
) -> None:
    """Print the table and the speed-up blocks, or JSON, and write the files that are asked for.

    Raises ConfigError if one cannot be written.
    """
    for option, name, text in (
        ("--csv", csv, grids.csv_text(plain(rows))),
        ("--markdown", to_markdown, markdown(rows, found)),
    ):
        if name is not None:
            try:
                expanded(name).write_text(text, newline="")
            except OSError as error:
                raise ConfigError(f"{option}: cannot write {name}: {error.strerror}") from error
    if as_json:
        print(json.dumps(as_values(rows, found), indent=1, allow_nan=False))
        return
    grids.show(grid(rows))
    for one in found:
        if block := speed_up_block(one):
            print("", *block, sep="\n")
