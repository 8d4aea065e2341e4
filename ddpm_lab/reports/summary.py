"""Runs as a table with speed-ups, as people compare jobs, and the settings in which two of them differ."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, geometric_mean
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import grids
from ddpm_lab.explain.bands import S001
from ddpm_lab.files import expanded
from ddpm_lab.record import RunRecord

COLUMNS = ("Job ID", "Configuration", "GPUs", "Nodes", "Time (s)", "Time/Epoch (s)", "Val Loss", "Val Acc")
ACCURACY = "not defined for a DDPM"
UNKNOWN = "unknown"
NOT_CLAIMED = "not claimed"
NO_SUMMARY = "no summary found"
RUNS = "ddpm_lab_runs"
"""The key of the line of JSON that a job prints at its end: a list of summaries."""
APART = "Jobs ran apart: there is no interval, and what else a machine did is part of the ratio."


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What a run tells of itself; None is unknown, and never 0.

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

    @property
    def size(self) -> str:
        """Such as "8 GPUs on 2 nodes"."""
        if self.devices is None:
            return UNKNOWN
        name = f"{self.devices} {'GPU' if self.gpus else 'CPU rank'}{'s' if self.devices > 1 else ''}"
        return f"{name} on {self.nodes} nodes" if (self.nodes or 1) > 1 else name

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
        """Whether its time or loss is known."""
        return self.summary.seconds is not None or self.summary.loss is not None or bool(self.summary.note)

    @property
    def remark(self) -> str:
        """What a reader must know of the row."""
        claimed = f"speed {NOT_CLAIMED}: {self.summary.note}" if self.summary.note else ""
        return "; ".join(text for text in (claimed, self.note) if text)

    def cells(self) -> dict[str, Any]:
        """Values by column."""
        run = self.summary
        name = run.configuration or (run.size if self.found else NO_SUMMARY)
        values = (run.job_id, name, run.gpus, run.nodes, run.seconds, run.epoch_seconds, run.loss, ACCURACY)
        more = {"Steps": run.steps, "Ranks": run.ranks, "GPU-Util (%)": run.gpu_percent, "Log": self.log}
        return {**dict(zip(COLUMNS, values, strict=True)), **more, "Note": self.remark or None}


def grid(rows: Sequence[Row]) -> list[list[str]]:
    """The table for people, with steps, logs and notes where they tell rows apart."""
    cells = [row.cells() for row in rows]
    steps, notes = (any(c[name] is not None for c in cells) for name in ("Steps", "Note"))
    shown = {"Steps": steps, "Log": len({c["Log"] for c in cells}) > 1, "Note": notes}
    names = [*COLUMNS, *(name for name, is_shown in shown.items() if is_shown)]
    return [names, *([_text(name, c[name]) for name in names] for c in cells)]


def _text(column: str, value: Any) -> str:
    if value is None:
        return "" if column == "Note" else UNKNOWN
    if isinstance(value, float):
        return f"{value:,.2f}" if column != "Val Loss" else format(value, ".4f" if value >= 0.01 else ".4g")
    return str(value)


def plain(rows: Sequence[Row]) -> list[list[Any]]:
    """The table for a CSV file: all columns, bare numbers, empty where unknown."""
    cells = [row.cells() for row in rows]
    return [list(cells[0]), *(["" if v is None else v for v in c.values()] for c in cells)] if cells else [[*COLUMNS]]


# --- speed-ups -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The runs of one configuration at one size, and what they gain over a single device.

    ``times`` are seconds of each run, or of an epoch. ``evidence`` says what the speed-up rests on, or why there is
    none; ``rating`` names its efficiency.
    """

    configuration: str | None
    gpu: bool
    devices: int
    nodes: int
    times: tuple[float, ...]
    speed_up: float | None = None
    evidence: str = ""
    rating: str = ""

    @property
    def name(self) -> str:
        """The configuration and its size."""
        size = Summary(gpus=self.devices if self.gpu else 0, ranks=self.devices, nodes=self.nodes).size
        return f"{self.configuration} ({size})" if self.configuration else size

    @property
    def efficiency(self) -> float | None:
        """Parallel efficiency: the speed-up over the number of devices."""
        return None if self.speed_up is None else self.speed_up / self.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedUps:
    """Sizes beside each other, timed over a run or an epoch; ``notes`` say how, where and when."""

    per_epoch: bool
    sizes: tuple[Scaling, ...]
    notes: tuple[str, ...] = ()


def speed_ups(rows: Sequence[Row]) -> SpeedUps:
    """What several devices gain over one in jobs that ran apart.

    The baseline ran on one device of the same kind (GPU, or CPU rank) and has the same configuration, or (weak
    scaling) that with the batch of each device. Runs over different numbers of epochs are compared by the time of an
    epoch, and not at all where a log does not tell it.
    """
    runs = [row.summary for row in rows if row.summary.seconds and row.summary.devices]
    per_epoch = len({s.epochs for s in runs}) > 1 and all(s.epoch_seconds for s in runs)
    groups: dict[tuple[str | None, bool, int, int], list[Summary]] = {}
    for s in runs:
        groups.setdefault((s.configuration, bool(s.gpus), s.devices or 1, s.nodes or 1), []).append(s)
    sizes: dict[Scaling, set[float | None]] = {
        Scaling(
            configuration=name,
            gpu=gpu,
            devices=devices,
            nodes=nodes,
            times=tuple((s.epoch_seconds if per_epoch else s.seconds) or math.nan for s in mine),
        ): {None if per_epoch else s.epochs for s in mine}
        for (name, gpu, devices, nodes), mine in groups.items()
    }
    return SpeedUps(per_epoch=per_epoch, sizes=tuple(_compared(one, sizes) for one in sizes), notes=(APART,))


def _compared(one: Scaling, sizes: Mapping[Scaling, set[float | None]]) -> Scaling:
    """A size with its speed-up over the baseline among ``sizes``, which map to the epochs of their runs."""
    if one.devices == 1:
        return one
    per_device = re.sub(r"\bbatch (\d+)\b", lambda m: f"batch {int(m[1]) / one.devices:g}", one.configuration or "")
    lone = [s for s in sizes if s.devices == 1 and s.gpu == one.gpu]
    same = [s for s in lone if s.configuration == one.configuration]
    base = next(iter(same or [s for s in lone if s.configuration == per_device]), None)
    if base is None:
        ran = "; ".join(s.configuration or UNKNOWN for s in lone)
        kind = "GPU" if one.gpu else "CPU rank"
        why = f"no run of this configuration on a single {kind}" + (f", only: {ran}" if ran else "")
        return dataclasses.replace(one, evidence=why)
    if sizes[base] != sizes[one] or len(sizes[one]) > 1:
        return dataclasses.replace(one, evidence="other numbers of epochs, and not every log tells the time of one")
    evidence = "" if same else "weak scaling: each device has the batch of one"
    ratio = geometric_mean(base.times) / geometric_mean(one.times)
    return dataclasses.replace(one, speed_up=ratio, evidence=evidence, rating=S001.name(ratio / one.devices))


def speed_up_block(found: SpeedUps) -> list[str]:
    """The speed-up block as lines of text; empty where there is nothing to compare."""
    compared = [one for one in found.sizes if one.devices > 1]
    baselines = [one for one in found.sizes if one.devices == 1]
    if not compared:
        return []
    unit = "seconds per epoch" if found.per_epoch else "seconds"
    lines = []
    for base in baselines:
        which = f"; {base.configuration}" if len(baselines) > 1 and base.configuration else ""
        lines.append(f"Baseline (Single {'GPU' if base.gpu else 'CPU rank'}{which}): {_mean(base, unit)}")
    for one in compared:
        lines += ["", f"{one.name}:", f"  Average time: {_mean(one, unit)}"]
        if one.speed_up is None or one.efficiency is None:
            lines.append(f"  Speed-up: {UNKNOWN} ({one.evidence})")
            continue
        lines.append(f"  Speed-up: {one.speed_up:.2f}x" + (f" ({one.evidence})" if one.evidence else ""))
        lines.append(f"  Parallel efficiency: {100 * one.efficiency:.1f} % ({one.rating})")
    return [*lines, "", *found.notes]


def _mean(one: Scaling, unit: str) -> str:
    return f"{fmean(one.times):,.2f} {unit}" + (f" (mean of {len(one.times)} jobs)" if len(one.times) > 1 else "")


def as_values(rows: Sequence[Row], found: Sequence[SpeedUps]) -> dict[str, Any]:
    """Rows and speed-ups as plain values."""
    sizes = [one for each in found for one in each.sizes]
    return {
        "runs": [{"log": row.log, **row.summary.as_json(), "found": row.found, "remark": row.remark} for row in rows],
        "accuracy": ACCURACY,
        "per_epoch": all(one.per_epoch for one in found),
        "speed_ups": [{**dataclasses.asdict(s), "name": s.name, "efficiency": s.efficiency} for s in sizes],
        "notes": [note for one in found for note in one.notes],
    }


def show(
    rows: Sequence[Row],
    found: Sequence[SpeedUps],
    *,
    csv: str | None = None,
    markdown: str | None = None,
    as_json: bool = False,
) -> None:
    """Print the table and the speed-up blocks, or JSON, and write the files that are asked for.

    Raises ConfigError if one cannot be written.
    """
    blocks = [block for one in found if (block := speed_up_block(one))]
    text = "\n".join([grids.markdown(grid(rows)), *(f"```text\n{chr(10).join(block)}\n```\n" for block in blocks)])
    for option, name, content in (("--csv", csv, grids.csv_text(plain(rows))), ("--markdown", markdown, text)):
        if name is not None:
            try:
                expanded(name).write_text(content, newline="")
            except OSError as error:
                raise ConfigError(f"{option}: cannot write {name}: {error.strerror}") from error
    if as_json:
        print(json.dumps(as_values(rows, found), indent=1, allow_nan=False))
        return
    grids.show(grid(rows))
    for block in blocks:
        print("", *block, sep="\n")


# --- what differs ----------------------------------------------------------------------------------------------------

HOW = (
    *("device", "world_size", "nodes", "oversubscribe", "threads", "accumulation", "precision", "channels_last"),
    *("compile", "compile_mode", "implementation", "kernels", "freed_memory", "optimizer.adam", "optimizer.ema"),
    *("loader", "loader_workers", "read_loss"),
    *("exchange.bucket_view", "exchange.static_graph", "exchange.bucket_mb", "exchange.hook", "exchange.nccl"),
)
"""Settings of how a network is trained, which a benchmark varies: all others say what is trained."""
LENGTH = "train.steps"
WHERE = ("machine", "torch", "code version", "images", "turns and windows")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run as it is compared: its settings, and what is known of where and how long it ran."""

    name: str
    config: RunConfig
    circumstances: Mapping[str, str | int] = field(default_factory=dict)


def of_record(name: str, record: RunRecord) -> Run:
    """A record's run, with the machine, the code and the data that it was measured with."""
    machine = f"{record.machine.name} ({record.machine.key})"
    values = (machine, record.machine.torch, record.code_version, record.data_name, record.plan.key)
    return Run(name=name, config=record.config, circumstances=dict(zip(WHERE, values, strict=True)))


def differences(one: Run, other: Run) -> dict[str, tuple[Any, Any]]:
    """The values of every setting that differs; circumstances only where both sides know theirs."""
    sides = settings(one.config), settings(other.config)
    known = [name for name in one.circumstances if name in other.circumstances]
    pairs = {name: (sides[0].get(name), sides[1].get(name)) for name in dict.fromkeys([*sides[0], *sides[1]])}
    pairs |= {name: (one.circumstances[name], other.circumstances[name]) for name in known}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def settings(config: RunConfig) -> dict[str, Any]:
    """Settings by name, such as ``optimizer.learning_rate``, but for the place of the images."""
    values = config.as_dict().items()
    nested = {f"{table}.{k}": v for table, inner in values if isinstance(inner, dict) for k, v in inner.items()}
    return {name: v for name, v in values if not isinstance(v, dict) and name != "data"} | nested


def unexpected(found: Mapping[str, Any], only: Sequence[str] | None) -> list[str]:
    """What differs and should not: all but ``only``, or, if it is None, all but how the same network is trained.

    Raises ConfigError for a name that is no setting; a table's name stands for all that is in it.
    """
    known = {*settings(RunConfig()), *WHERE, LENGTH}
    tables = {name.partition(".")[0] for name in known if "." in name}
    for name in only or ():
        if name not in known | tables and not name.startswith("options."):
            raise ConfigError(f"--only has {name!r}, which is no setting: give names such as world_size,precision")
    allowed = HOW if only is None else only
    return [name for name in found if name not in allowed and (only is None or name.partition(".")[0] not in allowed)]


def difference_lines(one: Run, other: Run, only: Sequence[str] | None) -> list[str]:
    """What differs as a table, and whether only what should differ does."""
    found = differences(one, other)
    wrong = unexpected(found, only)
    if not found:
        return ["Nothing differs: both do the same work."]
    rows = [[name, *map(_short, pair), "no" if name in wrong else "yes"] for name, pair in found.items()]
    lines = grids.plain_text([["Setting", one.name, other.name, "May differ"], *rows])
    may = "how the network is trained" if only is None else ", ".join(only) or "nothing"
    lines.append(f"May differ: {may}. Should not differ: {', '.join(wrong) or 'nothing that does'}.")
    if any(name not in HOW and name not in WHERE for name in found):
        lines.append("They are different trainings: their losses do not compare.")
    return lines


def _short(value: Any) -> str:
    text = "\N{EN DASH}" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:12]}\N{HORIZONTAL ELLIPSIS}"
