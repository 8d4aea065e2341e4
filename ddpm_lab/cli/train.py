"""Commands that prepare images, train on them and draw new ones; and ``rank``, with which they run on several hosts."""

import argparse
import dataclasses
import os
import shlex
import signal
from typing import Any

from ddpm_lab import declared
from ddpm_lab.checks import choice
from ddpm_lab.cli.options import Command, given, tracker_chosen
from ddpm_lab.data import packed
from ddpm_lab.files import PREPARED, expanded, output_folder
from ddpm_lab.measure import cluster, hardware
from ddpm_lab.measure.others import Watch
from ddpm_lab.output import Progress, say
from ddpm_lab.questions.probe import fastest
from ddpm_lab.reports import summary
from ddpm_lab.training import sampling_run, training_run
from ddpm_lab.training.setting import fused_lacking
from ddpm_lab.training.stopping import Stop

TRAINED_BY = {
    "network": "seed",
    "image_size": None,
    "global_batch_size": "128 on a GPU, 16 on a CPU",
    "accumulation": 1,
    "learning_rate": 2e-4,
    "precision": "the fastest here",
    "compile": "whole on a GPU, off on a CPU",
    "mirror": True,
    **dict.fromkeys(("world_size", "device", "seed", "oversubscribe")),
}
"""Options that are settings of the same name, with what they are where none is given; None is what is usual."""
SCHEDULE, SAMPLING = declared.options(training_run.Schedule), declared.options(sampling_run.Sampling)
MANY_HOSTS = ("run", "train", "sample")
"""Commands that start ranks as they are told how many."""


def prepare(options: argparse.Namespace) -> int:
    how = given(options, "image_size", "held_out", "skip_bad")
    dest, progress = expanded(options.dest), Progress("prepare")
    manifest = packed.prepare(options.source, dest, progress=progress, **how)
    progress.done("all images are there")
    lines = (f"left out: {line}" for line in manifest.skipped)
    say(f"{options.dest}: {manifest.describe()}", *lines)
    return 0


def train(options: argparse.Namespace) -> int:
    """128 and the signal's number if one ended it."""
    with Stop() as stop:
        return _train(options, stop)


def _train(options: argparse.Namespace, stop: Stop) -> int:
    settings = given(options, "data", *TRAINED_BY)
    if "learning_rate" in settings:
        settings["optimizer.learning_rate"] = settings.pop("learning_rate")
    output = output_folder(None)
    folder = output / "runs/first" if options.output_dir is None else expanded(options.output_dir).absolute()
    progress, tracker = Progress("train"), tracker_chosen(options.tracker)
    config, schedule, said = training_run.plan_training(
        settings,
        given(options, *SCHEDULE),
        file=None if options.config is None else expanded(options.config),
        cache=output / PREPARED,
        folder=folder,
        progress=progress,
        **given(options, "held_out", "skip_bad"),
    )
    if "kernels" not in said and (lacking := fused_lacking(config)):
        progress.done(lacking)
        config, said = dataclasses.replace(config, kernels="aten"), said | {"kernels"}
    chosen = config.device == "cpu" and not config.threads
    threads = config.rank_threads(cluster.training_cores() if chosen else hardware.usable_cores())
    how: dict[str, Any] = {"threads": threads, "folder": folder, "progress": progress}
    config, why = fastest(config, said, steps=schedule.steps, output=output, probing=not options.no_probe, **how)
    if why:
        progress.done(why)
    gpus = hardware.gpus()[: config.node_size] if config.device == "cuda" else ()
    with Watch({gpu.uuid: 0 for gpu in gpus if gpu.uuid}) as watch:
        outcome = training_run.train(config, schedule, stop=stop, tracker=tracker, why=why, **how)
    known = {"loss": outcome.loss, "held-out loss": outcome.held_out_loss}
    measured = [f"{name} {value:.4f}" for name, value in known.items() if value is not None]
    progress.done(", ".join([f"step {outcome.step:,} of {max(outcome.step, schedule.steps):,}", *measured]))
    if outcome.step < schedule.steps and stop.number is not None:
        where = f"{signal.Signals(stop.number).name}, saved after step {outcome.step:,}"
        say(f"{where}: the same command with --output-dir {shlex.quote(str(folder))} goes on from there", error=True)
        return 128 + stop.number
    busy = watch.state.get("gpu_utilisation_percent")
    summary.tell([summary.of_training(config, folder, busy, hardware.machine())])
    say(outcome.checkpoint)
    return 0


def sample(options: argparse.Namespace) -> int:
    progress, checkpoint = Progress("sample"), expanded(options.checkpoint)
    folder = expanded(vars(options).get("output_dir", checkpoint.parent / checkpoint.stem))
    sampling = sampling_run.Sampling(**given(options, *SAMPLING))
    world_size = cluster.usual_ranks() if options.world_size is None else options.world_size
    how: dict[str, Any] = {"world_size": world_size, "progress": progress, **given(options, "device", "batch_size")}
    paths = sampling_run.sample(checkpoint, folder, options.count, sampling, **how)
    if options.grid:
        from ddpm_lab.training.training import write_grid  # noqa: PLC0415 - imports torch

        write_grid(paths, folder / "grid.png")
    say(folder / "grid.png" if options.grid else folder)
    return 0


def rank(options: argparse.Namespace) -> int:
    choice("the command after rank", next(iter(options.words), ""), MANY_HOSTS)
    process = cluster.Process.read(os.environ)
    process.use_interface()
    if process.rank:
        return cluster.serve(process)
    with cluster.leading(process):
        return int(options.main(options.words))


COMMANDS = {
    "prepare": Command(
        prepare, "prepare path/to/images data/photos --image-size 64", "source dest held-out skip-bad image_size"
    ),
    "train": Command(
        train,
        "train --data path/to/images",
        f"data output-dir config no-probe held-out skip-bad tracker {' '.join(TRAINED_BY)}",
        {"output-dir": "folder of this run: checkpoints, samples, log, settings (default: runs/first)", **TRAINED_BY},
        more=lambda parser, _: declared.add_options(parser, SCHEDULE.values()),
    ),
    "sample": Command(
        sample,
        "sample runs/first/checkpoints/step-00020000.pt --count 64 --grid",
        "checkpoint count output-dir grid batch-size world_size device",
        {"output-dir": "folder of the images (default: named after the checkpoint, beside it)"},
        more=lambda parser, _: declared.add_options(parser, SAMPLING.values()),
    ),
    "rank": Command(
        rank,
        "rank run amp (after torchrun --nnodes 2 --nproc-per-node 4 ... -m ddpm_lab)",
        "words",
        {"words": "run, train or sample with its options"},
    ),
}
