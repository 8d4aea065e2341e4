"""Runs as a table with speed-ups, as people compare jobs, and the settings in which two of them differ."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, OWN, TRAINING, RunConfig
from ddpm_lab.data.folder import DataError
from ddpm_lab.explain import table as tables
from ddpm_lab.explain.bands import S001
from ddpm_lab.files import expanded, writing
from ddpm_lab.measure import hardware
from ddpm_lab.measure.machine_watch import Watch
from ddpm_lab.record import RunRecord
from ddpm_lab.training.run_folder import name_of, train_count, trained

COLUMNS = {
    **{"Job ID": "job_id", "Configuration": "name", "GPUs": "gpus", "Nodes": "nodes", "Time (s)": "seconds"},
    **{"Time/Epoch (s)": "epoch_seconds", "Val Loss": "loss", "Val Acc": "accuracy", "Speed-up": "speed_up"},
    **{"Efficiency": "efficiency", "Rating": "rating", "Steps": "steps", "Ranks": "ranks"},
    **{"GPU-Util (%)": "gpu_percent", "Log": "log", "Note": "note"},
}
"""Columns of the table with the names of their values."""
ACCURACY = "not defined for a DDPM"
UNKNOWN = "unknown"
NO_SUMMARY = "no summary found"
MECHANISM = "speed not claimed: more ranks than cores, or CPU ranks on a GPU machine"
RUNS = "ddpm_lab_runs"
"""The key of the line of JSON that a job prints at its end: a list of summaries."""
TRAINED = (DDPM, TRAINING, OWN, "ddpm_lab.training.peers:")
"""How the lab's workloads that train are named; of all others those of its own have no epochs and losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run, or a log in which none was found; None is unknown, and never 0.

    ``seconds`` is the time spent in training steps over ``epochs`` passes through the training images, ``loss`` the
    lowest held-out loss of ``steps`` steps, ``gpu_percent`` the mean utilisation of its GPUs. ``log`` is where it was
    read: a file, a run's folder or a ledger. ``speed_up`` is over a single device, ``efficiency`` that over the number
    of devices, ``rating`` its name. ``note`` is what a reader must know of it.
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
    steps: int | None = None
    speed_up: float | None = None
    efficiency: float | None = None
    rating: str = ""
    note: str = ""
    log: str = ""

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

    @property
    def found(self) -> bool:
        """Whether it ran: its time or loss is known, or its speed is not claimed."""
        return self.seconds is not None or self.loss is not None or MECHANISM in self.note

    def as_json(self) -> dict[str, Any]:
        """Plain values; a loss that is not finite becomes None, since JSON has no such number."""
        values = dataclasses.asdict(self)
        return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}

    @property
    def name(self) -> str:
        """What was trained, or at least on what."""
        return self.configuration or (self.size if self.found else NO_SUMMARY)

    @property
    def accuracy(self) -> str:
        """A column that people look for."""
        return ACCURACY


# --- where summaries come from ---------------------------------------------------------------------------------------


def tell(runs: Iterable[Summary]) -> None:
    """In a SLURM job, print the runs as one line of JSON to stderr; ``ddpm-lab collect`` reads it back."""
    if "SLURM_JOB_ID" in os.environ:
        print(json.dumps({RUNS: [run.as_json() for run in runs]}), file=sys.stderr, flush=True)


def of_training(config: RunConfig, folder: Path, gpu_percent: float | None) -> Summary:
    """The summary of a training run from its folder: all its steps, those of earlier starts included."""
    steps, seconds, best = trained(folder, config.global_batch_size)
    try:
        epochs = steps * config.global_batch_size / train_count(config)
    except DataError:  # a run that is looked at later, when its images are gone
        epochs = None
    return _summary(config, seconds=seconds, epochs=epochs, loss=best, gpu_percent=gpu_percent, steps=steps)


def of_records(records: Iterable[RunRecord], images: Mapping[str, int]) -> list[Summary]:
    """One summary for each configuration that was timed in sets or trained for its loss.

    Seconds and images of the windows of its sets; the repeated baseline is no run of its own. ``images`` says by their
    ``data_sha256`` how many images an epoch has.
    """
    by_run: dict[str, list[RunRecord]] = defaultdict(list)
    for r in records:
        trains = r.config.workload.startswith(TRAINED) or not r.config.workload.startswith("ddpm_lab.")
        if trains and r.status == "ok" and r.role in ("baseline", "candidate", "quality"):
            by_run[r.run_id].append(r)
    return [of_run(r[0].config, r, images.get(r[0].config.data_sha256)) for r in by_run.values()]


def of_run(config: RunConfig, records: Sequence[RunRecord], epoch: int | None) -> Summary:
    """The summary of records of one configuration; ``epoch`` is the number of images in one, where it is known."""
    windows = [w for r in records for w in r.windows]
    losses = [look["loss"] for r in records for look in (r.quality or {}).get("held_out") or ()]
    busy = [value for w in windows if (value := w.state.get("gpu_utilisation_percent")) is not None]
    images, epoch = sum(w.images for w in windows), epoch or config.option("samples", None)
    claimed = not any(r.mechanism_only for r in records)
    return _summary(
        config,
        seconds=sum(w.seconds for w in windows) if windows and claimed else None,
        epochs=images / epoch if images and epoch else None,
        loss=min(losses, default=None),
        gpu_percent=fmean(busy) if busy else None,
        note="" if claimed else MECHANISM,
    )


def _summary(config: RunConfig, *, seconds: float | None, epochs: float | None, **values: Any) -> Summary:
    return Summary(
        job_id=os.environ.get("SLURM_JOB_ID"),
        configuration=name_of(config),
        gpus=config.world_size if config.device == "cuda" else 0,
        ranks=config.world_size,
        nodes=config.nodes,
        epochs=epochs,
        seconds=seconds,
        epoch_seconds=seconds / epochs if seconds and epochs else None,
        **values,
    )


def watched(config: RunConfig) -> Watch:
    """A watch over the GPUs that a run uses on this host."""
    gpus = hardware.gpus()[: config.node_size] if config.device == "cuda" else ()
    return Watch({gpu.uuid: 0 for gpu in gpus if gpu.uuid})


# --- the table -------------------------------------------------------------------------------------------------------


def compared(runs: Sequence[Summary]) -> list[Summary]:
    """The runs, with what several devices gain over one in jobs that ran apart.

    The baseline ran on one device of the same kind (GPU, or CPU rank) and has the same configuration, or (weak
    scaling) that with the batch of each device. Runs over different numbers of epochs are compared by the time of an
    epoch, and not at all where a log does not tell it.
    """
    alone: dict[tuple[bool, str], list[Summary]] = defaultdict(list)
    for run in runs:
        if run.seconds and run.devices == 1:
            alone[bool(run.gpus), run.configuration or ""].append(run)
    return [_gain(run, alone) if run.seconds and (run.devices or 1) > 1 else run for run in runs]


def _gain(run: Summary, alone: Mapping[tuple[bool, str], Sequence[Summary]]) -> Summary:
    gpu, name, devices = bool(run.gpus), run.configuration or "", run.devices or 1
    base, told = alone.get((gpu, name), ()), "jobs ran apart, so without an interval"
    if not base:
        per_device = re.sub(r"\bbatch (\d+)\b", lambda m: f"batch {int(m[1]) / devices:g}", name)
        base, told = alone.get((gpu, per_device), ()), f"weak scaling; {told}"
    every = (run, *base)
    times = [each.seconds if len({r.epochs for r in every}) == 1 else each.epoch_seconds for each in every]
    known = [time for time in times if time]
    gain: dict[str, Any] = {}
    if not base:
        told = f"no run of this configuration on a single {'GPU' if gpu else 'CPU rank'}"
    elif len(known) < len(times):
        told = "other numbers of epochs than on a single device, and not every log tells the time of one"
    else:
        ratio = geometric_mean(known[1:]) / known[0]
        gain = {"speed_up": ratio, "efficiency": ratio / devices, "rating": S001.name(ratio / devices)}
    return dataclasses.replace(run, note="; ".join(filter(None, [run.note, told])), **gain)


def grid(runs: Sequence[Summary]) -> tables.Table:
    """The table for people, with its further columns where they tell rows apart."""
    names = [*COLUMNS][:8]
    names += ["Speed-up", "Efficiency", "Rating"] if any(run.speed_up for run in runs) else []
    names += ["Steps"] if any(run.steps for run in runs) else []
    names += ["Log"] if len({run.log for run in runs}) > 1 else []
    names += ["Note"] if any(run.note for run in runs) else []
    return [{name: _text(name, getattr(run, COLUMNS[name])) for name in names} for run in runs]


def _text(column: str, value: Any) -> str:
    if value is None:
        return "" if column in ("Speed-up", "Efficiency") else UNKNOWN
    if column == "Efficiency":
        return f"{100 * value:.1f} %"
    if column == "Val Loss":
        return format(value, ".4f" if value >= 0.01 else ".4g")
    if isinstance(value, float):
        return f"{value:,.2f}" + "x" * (column == "Speed-up")
    return str(value)


def speed_up_lines(runs: Sequence[Summary]) -> list[str]:
    """The speed-up analysis: the time of each baseline, and what several devices gain over one."""
    if not any(run.speed_up for run in runs):
        return []
    lines = [f"Baseline ({r.size}, {r.name}): {r.seconds:,.2f} seconds" for r in runs if r.devices == 1 and r.seconds]
    for r in runs:
        if r.speed_up and r.efficiency:
            rating = f"; {r.rating}, by S001's bands" if r.rating else ""
            lines.append(
                f"{r.size}, {r.name}: speed-up {r.speed_up:.2f}x, efficiency {100 * r.efficiency:.1f} %{rating}"
            )
    if any(r.log.endswith(".jsonl") for r in runs):
        lines.append("Times of an epoch from a ledger are projected from timed steps.")
    return lines


def show(
    runs: Sequence[Summary], *, csv: str | None = None, markdown: str | None = None, as_json: bool = False
) -> None:
    """Print the table, or JSON, and write the files that are asked for. Raises ConfigError if one cannot be written."""
    table = tables.csv_text([{name: getattr(run, field) for name, field in COLUMNS.items()} for run in runs])
    text = tables.markdown(grid(runs)) + "".join(f"\n{tables.literal(line)}\n" for line in speed_up_lines(runs))
    for option, name, content in (("--csv", csv, table), ("--markdown", markdown, text)):
        if name is not None:
            with writing(expanded(name), option=option):
                expanded(name).write_text(content, newline="")
    if as_json:
        values = {"runs": [{**run.as_json(), "found": run.found} for run in runs], "accuracy": ACCURACY}
        print(json.dumps(values, indent=1, allow_nan=False))
    else:
        tables.show(grid(runs))
        print("", *speed_up_lines(runs), sep="\n")


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
    mine, theirs = settings(one.config), settings(other.config)
    pairs = {name: (mine.get(name), theirs.get(name)) for name in (mine | theirs)}
    pairs |= {n: (value, other.circumstances[n]) for n, value in one.circumstances.items() if n in other.circumstances}
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
    allowed = {*(HOW if only is None else only)}
    return [name for name in found if not {name, name.partition(".")[0]} & allowed]


def difference_lines(one: Run, other: Run, only: Sequence[str] | None) -> list[str]:
    """What differs as a table, and whether only what should differ does."""
    found = differences(one, other)
    if not found:
        return ["Nothing differs: both do the same work."]
    wrong = unexpected(found, only)
    second = other.name if other.name != one.name else f"{other.name} (second)"
    rows = [
        {"Setting": name, one.name: str(a)[:60], second: str(b)[:60], "May differ": "no" if name in wrong else "yes"}
        for name, (a, b) in found.items()
    ]
    lines = tables.plain(rows).splitlines()
    may = "how the network is trained" if only is None else ", ".join(only) or "nothing"
    lines.append(f"May differ: {may}. Should not differ: {', '.join(wrong) or 'nothing that does'}.")
    if any(name not in HOW and name not in WHERE for name in found):
        lines.append("They are different trainings: their losses do not compare.")
    return lines
