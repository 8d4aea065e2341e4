"""Runs as a table with speed-ups, as people compare jobs, and the settings in which two of them differ.

A job of ``scripts/slurm.sh`` leaves its log ``slurm-N.out`` and its results ``slurm-N/`` side by side; at its end it
prints its runs into the log as one line of JSON.
"""

import dataclasses
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, OWN, PEER_WORKLOADS, TRAINING, RunConfig
from ddpm_lab.declared import reader
from ddpm_lab.explain import phrases
from ddpm_lab.explain import table as tables
from ddpm_lab.explain.bands import S001
from ddpm_lab.explain.comparisons import PROJECTED_IMAGES, Comparison
from ddpm_lab.explain.selection import Study
from ddpm_lab.files import LEDGER, content, expanded, writing
from ddpm_lab.ledger import Ledger
from ddpm_lab.output import say
from ddpm_lab.plan import scaling
from ddpm_lab.questions import multi_gpu
from ddpm_lab.record import Amount, Count, Machine, RunRecord, crowded_sets
from ddpm_lab.training.run_folder import name_of, trained

LOGS = "slurm-*.out"
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
TRAINED = (DDPM, TRAINING, OWN, PEER_WORKLOADS)
"""How the lab's workloads that train are named; of all others those of its own have no epochs and losses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A run, or a log in which none was found; None is unknown, and never 0.

    ``seconds`` is the time spent in training steps, ``epoch_seconds`` that of 50,000 images, ``loss`` the lowest
    held-out loss of ``steps`` steps, ``gpu_percent`` the mean utilisation of its GPUs. ``log`` is where it was read: a
    file, a run's folder or a ledger. ``speed_up`` is over a single device, ``efficiency`` that over the number of
    devices, ``rating`` its name. ``hardware`` is the GPU or the processor that computed, where that is known. ``note``
    is what a reader must know of it.
    """

    job_id: str | None = None
    configuration: str | None = None
    gpus: Count | None = None
    ranks: Count | None = None
    nodes: Count | None = None
    seconds: Amount | None = None
    epoch_seconds: Amount | None = None
    loss: Amount | None = None
    gpu_percent: Amount | None = None
    steps: Count | None = None
    speed_up: Amount | None = None
    efficiency: Amount | None = None
    rating: str = ""
    hardware: str = ""
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
        kind = "GPU" if self.gpus else "CPU rank"
        name = f"{self.devices} {kind}{'s' * (self.devices > 1)}"
        return f"{name} on {self.nodes} nodes" if (self.nodes or 1) > 1 else name

    @property
    def found(self) -> bool:
        return not self.note.startswith(NO_SUMMARY)

    def as_json(self) -> dict[str, Any]:
        """Plain values; a loss that is not finite becomes None, since JSON has no such number."""
        return tables.values(dataclasses.asdict(self))

    @property
    def name(self) -> str:
        """What was trained, or at least on what."""
        return self.configuration or (self.size if self.found else NO_SUMMARY)

    @property
    def accuracy(self) -> str:
        return ACCURACY


# --- where summaries come from ---------------------------------------------------------------------------------------


def of_training(config: RunConfig, folder: Path, gpu_percent: float | None, machine: Machine | None = None) -> Summary:
    """The summary of a training run from its folder: all its steps, and the speed of those in its last settings."""
    steps, seconds, of_step, best = trained(folder, config.global_batch_size)
    epoch = None if math.isnan(of_step) else PROJECTED_IMAGES * of_step / config.global_batch_size
    known = {"loss": best, "gpu_percent": gpu_percent, "steps": steps, "job_id": os.environ.get("SLURM_JOB_ID")}
    return _summary(config, machine, seconds=seconds, epoch_seconds=epoch, **known)


def of_records(records: Iterable[RunRecord]) -> list[Summary]:
    """One summary for each configuration that was timed in sets or trained for its loss.

    Seconds and images of the windows of its sets, but for those that others disturbed; the repeated baseline is no run
    of its own.
    """
    by_run: dict[str, list[RunRecord]] = defaultdict(list)
    every = list(records)
    lost = crowded_sets(every)
    for r in every:
        trains = r.config.workload.startswith(TRAINED) or not r.config.workload.startswith("ddpm_lab.")
        if trains and r.status == "ok" and r.role in ("baseline", "candidate", "quality"):
            by_run[r.run_id].append(dataclasses.replace(r, windows=()) if r.set_id in lost else r)
    found = [(_of_run(run[0].config, run), any(r.set_id in lost for r in run)) for run in by_run.values()]
    return [dataclasses.replace(s, note=phrases.DISTURBED) if busy and s.seconds is None else s for s, busy in found]


def of_study(study: Study, source: str) -> list[Summary]:
    """The runs of a study of ``multi_gpu``, with their paired speed-ups; ``source`` is the ledger."""
    found = [r for r in multi_gpu.scaling_rows(study) if r.role in ("baseline", "candidate")]
    return [dataclasses.replace(_paired(study, r, found), log=source) for r in found]


def _paired(study: Study, row: Comparison, found: Sequence[Comparison]) -> Summary:
    kind = (row.run_id, row.role, row.baseline_id, scaling(row.family))  # a family may be called otherwise by now
    mine = [r for r in study.records if (r.run_id, r.role, r.baseline_id, scaling(r.family)) == kind]
    beside = [r for r in found if r is row or (row.role == "baseline" and r.baseline_id == row.run_id)]
    trials: list[RunRecord] = [pair[r is row] for r in beside for pair in r.equivalence.pairs]
    lost = crowded_sets(study.records)
    quiet = [r for r in mine if row.sets and r.status == "ok" and r.set_id not in lost]
    summary = _of_run(row.config, [*quiet, *trials])
    notes, gain = [summary.note, multi_gpu.layout(row.config)], dict[str, Any]()
    if row.role == "candidate" and row.sets:
        gain = {"speed_up": row.ratio.value, "efficiency": row.ratio.value / row.ranks}
        gain["rating"] = multi_gpu.band(row, S001) if row.answered else phrases.status(row.verdict)
        notes += [f"{phrases.evidence(row.ratio)}, {phrases.outcome(row)}", f"quality {row.quality}"]
    else:
        notes.append(phrases.plural(row.sets, "set") if row.sets else phrases.without_speed(row))
    gain |= {"epoch_seconds": row.projected_seconds if summary.seconds else None, "job_id": _job(mine)}
    return dataclasses.replace(summary, configuration=row.family, note="; ".join(filter(None, notes)), **gain)


def _of_run(config: RunConfig, records: Sequence[RunRecord]) -> Summary:
    windows = [w for r in records for w in r.windows]
    losses = [look["loss"] for r in records for look in (r.quality or {}).get("held_out") or ()]
    busy = [value for w in windows if (value := w.state.get("gpu_utilisation_percent")) is not None]
    claimed = not any(r.mechanism_only for r in records)
    seconds, images = sum(w.seconds for w in windows) if claimed else 0, sum(w.images for w in windows)
    return _summary(
        config,
        records[-1].machine if records else None,
        seconds=seconds or None,
        epoch_seconds=PROJECTED_IMAGES * seconds / images if seconds and images else None,
        loss=min(losses, default=None),
        gpu_percent=fmean(busy) if busy else None,
        note="" if claimed else MECHANISM,
        job_id=_job(records),
    )


def _job(records: Sequence[RunRecord]) -> str | None:
    """The last job that measured."""
    return next((r.environment.slurm_job_id for r in reversed(records) if r.environment.slurm_job_id), None)


def _summary(config: RunConfig, machine: Machine | None, **values: Any) -> Summary:
    kinds = (*(machine.gpus if config.device == "cuda" else ()), machine.cpu) if machine else ("",)
    return Summary(
        hardware=kinds[0],
        configuration=name_of(config),
        gpus=config.world_size if config.device == "cuda" else 0,
        ranks=config.world_size,
        nodes=config.nodes,
        **values,
    )


# --- jobs ------------------------------------------------------------------------------------------------------------


def tell(runs: Iterable[Summary]) -> None:
    """In a SLURM job, print the runs as one line of JSON to stderr; ``read_log`` reads it back."""
    if "SLURM_JOB_ID" in os.environ:
        say(json.dumps({RUNS: [run.as_json() for run in runs]}), error=True)


def read_log(log: Path) -> list[Summary]:
    """The runs in the log of a job, or one without numbers that notes its last line. Raises OSError."""
    lines = content(log).decode(errors="replace").splitlines()
    runs = [run for line in lines for run in _runs(line)]
    if not runs:
        said = [line for line in lines if line.strip() and not line.startswith("srun: ")]  # it hides what has failed
        last = said[-1].strip()[:200] if said else "none"
        runs = [Summary(job_id=log.stem.removeprefix("slurm-"), note=f"{NO_SUMMARY}; its last line: {last}")]
    return [dataclasses.replace(r, log=str(log)) for r in runs]


def _runs(line: str) -> list[Summary]:
    """The runs in a line of a log; none if it is another line, damaged or cut off."""
    try:
        values, _ = json.JSONDecoder().raw_decode(line, line.index(f'{{"{RUNS}": '))
        return list(reader(tuple[Summary, ...])(values[RUNS], RUNS))
    except (ValueError, TypeError, RecursionError):
        return []


def append_new(logs: Sequence[Path], path: Path) -> int:
    """Append the records of jobs that a ledger does not hold yet; how many there were.

    May be called while the jobs run, and again. Raises LedgerError, or OSError, if the ledger cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    held = {_text(r) for r in Ledger(path).read()[0]}
    new: dict[str, RunRecord] = {}
    for log in logs:
        records, damaged = Ledger(log.with_suffix("") / LEDGER).read()
        say(*damaged, error=True)
        new |= {text: r for r in records if (text := _text(r)) not in held}
    if new:
        Ledger(path).append(new.values())
    return len(new)


def _text(record: RunRecord) -> str:
    return json.dumps(record.as_dict(), sort_keys=True)


# --- the table -------------------------------------------------------------------------------------------------------


def compared(runs: Sequence[Summary]) -> list[Summary]:
    """The runs, with what several devices gain over one in jobs that ran apart.

    The baseline ran on one device of the same kind, a GPU or a rank of a processor, and has the same configuration.
    """
    alone: dict[tuple[bool, str, str], list[float]] = defaultdict(list)
    for run in runs:
        if run.epoch_seconds and run.devices == 1:
            alone[bool(run.gpus), run.hardware, run.configuration or ""].append(run.epoch_seconds)
    return [_gain(run, alone) if run.epoch_seconds and (run.devices or 1) > 1 else run for run in runs]


def _gain(run: Summary, alone: Mapping[tuple[bool, str, str], Sequence[float]]) -> Summary:
    gpu, devices, gain = bool(run.gpus), run.devices or 1, dict[str, Any]()
    times = alone.get((gpu, run.hardware, run.configuration or ""))
    device = ("GPU" if gpu else "CPU rank") + " of this kind" * bool(run.hardware)
    note = "not paired, so without an interval" if times else f"no run of this configuration on a single {device}"
    if times and run.epoch_seconds:
        ratio = geometric_mean(times) / run.epoch_seconds
        rating = multi_gpu.BEYOND if round(ratio / devices, 2) > 1 else S001.name(ratio / devices)
        gain = {"speed_up": ratio, "efficiency": ratio / devices, "rating": rating}
    return dataclasses.replace(run, note="; ".join(filter(None, [run.note, note])), **gain)


def grid(runs: Sequence[Summary]) -> tables.Table:
    """The table for people; what several devices gain is told below it (``speed_up_lines``)."""
    names = [*COLUMNS][:8]
    names += ["Log"] if len({run.log for run in runs}) > 1 else []
    names += ["Note"] if any(run.note for run in runs) else []
    return [{name: _text_of(name, getattr(run, COLUMNS[name])) for name in names} for run in runs]


def _text_of(column: str, value: Any) -> str:
    if value is None:
        return UNKNOWN
    if column == "Val Loss":
        return format(value, ".4f" if value >= 0.01 else ".4g")
    return f"{value:,.2f}" if isinstance(value, float) else str(value)


def speed_up_lines(runs: Sequence[Summary]) -> list[str]:
    """Return the lines of the speed-up analysis: the time of each baseline, and the gain from more devices."""
    several = [r for r in runs if r.speed_up and r.efficiency]
    bases = [r for r in runs if several and r.devices == 1 and r.seconds]
    lines = [f"Baseline ({r.size}, {r.name}): {r.seconds:,.2f} seconds" for r in bases]
    for r in several:
        source = ", by S001" if r.rating in dict(S001.table) else ""
        rating = f"; {r.rating}{source}" if r.rating else ""
        gain = f"speed-up {r.speed_up:.2f}x, efficiency {100 * (r.efficiency or 0):.1f} %"
        lines.append(f"{r.size}, {r.name}: {gain}{rating}")
    return [*lines, "An epoch is 50,000 images: its time is projected from that of the steps."]


def show(runs: Sequence[Summary], *, csv: str | None = None, as_json: bool = False) -> None:
    """Print the table, or JSON, and write the file that is asked for. Raises ConfigError if it cannot be written."""
    table = tables.csv_text([{name: getattr(run, field) for name, field in COLUMNS.items()} for run in runs])
    if csv is not None:
        with writing(expanded(csv), option="--csv"):
            expanded(csv).write_text(table, encoding="utf-8", newline="")
    if as_json:
        values = {"runs": [{**run.as_json(), "found": run.found} for run in runs], "accuracy": ACCURACY}
        say(*json.dumps(values, indent=1, allow_nan=False).split("\n"))
    else:
        tables.show(grid(runs))
        say("", *speed_up_lines(runs))


# --- what differs ----------------------------------------------------------------------------------------------------

LENGTH = "train.steps"


def differences(one: tuple[RunConfig, Any], other: tuple[RunConfig, Any]) -> dict[str, tuple[Any, Any]]:
    """What differs between two runs by name, such as ``optimizer.learning_rate``, but for the place of the images.

    Each comes with its steps; where one does not say how many (None), the length is not compared.
    """
    a, b = ({**config.flat, LENGTH: steps} for config, steps in (one, other))
    aside = ("data", *([] if a[LENGTH] and b[LENGTH] else [LENGTH]))
    return {n: (a.get(n), b.get(n)) for n in {**a, **b} if n not in aside and a.get(n) != b.get(n)}


def unexpected(found: Mapping[str, Any], only: Sequence[str]) -> list[str]:
    """What differs but for ``only``; a table's name stands for all in it. Raises ConfigError for one that is none."""
    known = {*RunConfig().flat, LENGTH} - {"data"}
    tables = {name.partition(".")[0] for name in known if "." in name}
    for name in only:
        if name not in known | tables and not name.startswith("options."):
            raise ConfigError(f"--only has {name!r}, which is no setting: give names such as world_size,precision")
    return [name for name in found if not {name, name.partition(".")[0]} & {*only}]


def difference_lines(names: Sequence[str], found: Mapping[str, tuple[Any, Any]], wrong: Sequence[str]) -> list[str]:
    """What differs between two runs as a table, and what of it should not."""
    if not found:
        return ["Nothing differs: both do the same work."]
    one, other = names[0], names[1] if names[1] != names[0] else f"{names[1]} (second)"
    rows = [{"Setting": name, one: str(a)[:60], other: str(b)[:60]} for name, (a, b) in found.items()]
    return [*tables.plain(rows).splitlines(), *([f"Should not differ: {', '.join(wrong)}."] if wrong else [])]
