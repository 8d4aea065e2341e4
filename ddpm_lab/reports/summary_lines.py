"""What a run tells at its end, from its records or its folder; a SLURM job prints it into its log."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from ddpm_lab.config import CHECK, LOADER_ALONE, SAMPLING, RunConfig
from ddpm_lab.data.folder import DataError
from ddpm_lab.measure import hardware
from ddpm_lab.measure.machine_watch import Watch
from ddpm_lab.record import RunRecord
from ddpm_lab.reports.summary import RUNS, Summary
from ddpm_lab.training.run_folder import name_of, train_count, trained

UNTRAINED = (
    *("ddpm_lab.training.allreduce:", "ddpm_lab.training.limits:", "ddpm_lab.training.planted:"),
    *(LOADER_ALONE, SAMPLING, CHECK),
)
"""Workloads that train nothing, and have no epochs or losses."""
MECHANISM = "more ranks than cores, or CPU ranks on a GPU machine"


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

    Seconds and images of the windows of its sets; the second baseline is the first again. ``images`` says by their
    ``data_sha256`` how many images an epoch has.
    """
    by_run: dict[str, list[RunRecord]] = defaultdict(list)
    for r in records:
        trained = not r.config.workload.startswith(UNTRAINED)
        if trained and r.status == "ok" and r.role in ("baseline", "candidate", "quality"):
            by_run[r.run_id].append(r)
    return [_measured(found, images) for found in by_run.values()]


def _measured(records: list[RunRecord], known: Mapping[str, int]) -> Summary:
    config = records[0].config
    windows = [w for r in records for w in r.windows]
    looks = [look["loss"] for r in records for look in (r.quality or {}).get("held_out") or ()]
    busy = [value for w in windows if (value := w.state.get("gpu_utilisation_percent")) is not None]
    images = sum(w.images for w in windows)
    epoch = known.get(config.data_sha256) or config.option("samples", None)
    return _summary(
        config,
        seconds=sum(w.seconds for w in windows) if windows else None,
        epochs=images / epoch if images and epoch else None,
        loss=min(looks, default=None),
        gpu_percent=fmean(busy) if busy else None,
        note=MECHANISM if any(r.mechanism_only for r in records) else "",
    )


def _summary(config: RunConfig, *, seconds: float | None, epochs: float | None, **values: Any) -> Summary:
    note = values.get("note", "")
    seconds = None if note else seconds
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
