"""Commands that prepare images, train on them and draw new ones: ``prepare``, ``train`` and ``sample``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ddpm_lab import declared
from ddpm_lab.checks import ConfigError
from ddpm_lab.cli.options import Command, Parser, given, tracker_chosen
from ddpm_lab.config import OptimizerConfig, RunConfig
from ddpm_lab.data import packed
from ddpm_lab.files import PREPARED, expanded, output_folder
from ddpm_lab.measure import cluster, hardware
from ddpm_lab.measure.process import sweep
from ddpm_lab.measure.progress import Progress
from ddpm_lab.questions import trained
from ddpm_lab.questions.probe import fastest
from ddpm_lab.reports import summary
from ddpm_lab.training import sampling_run, training_run
from ddpm_lab.training.stopping import Stop, signal_name

TRAINED_BY = {
    "network": "seed on a GPU, tiny on a CPU",
    "image_size": 32,
    "global_batch_size": "128 on a GPU, 32 on a CPU",
    "accumulation": 1,
    "learning_rate": 2e-4,
    "precision": "the fastest here",
    "compile": "whole on a GPU, off on a CPU",
    "world_size": "1; after rank, every process of the job",
    "device": "the GPU where there is one",
    "seed": 0,
    "oversubscribe": False,
}
"""Options of the command line that are settings of the same name, with what they are where none is given."""
SCHEDULE, SAMPLING = declared.options(training_run.Schedule), declared.options(sampling_run.Sampling)
EXAMPLE = "runs/first/checkpoints/step-00020000.pt"


def prepare(options: argparse.Namespace) -> int:
    how = given(options, "image_size", "held_out", "skip_bad")
    dest = expanded(options.dest)
    manifest = packed.prepare(options.source, dest, progress=lambda line: print(line, file=sys.stderr), **how)
    if options.json:
        print(manifest.to_json(), end="")
    else:
        lines = (f"left out: {line}" for line in manifest.skipped)
        print(f"{options.dest}: {manifest.describe()}", *lines, sep="\n")
    return 0


def train(options: argparse.Namespace) -> int:
    """128 and the signal's number if one ended it."""
    if options.output_dir is None:
        raise ConfigError("train needs the folder of this run: give --output-dir, such as --output-dir runs/first")
    ends = ("starts again: nothing was trained this time", "goes on from the last checkpoint")
    with Stop() as stop:
        options.hint = lambda: f"stopped at once; the same command {ends[stop.gentle]}"
        return _train(options, stop)


def _train(options: argparse.Namespace, stop: Stop) -> int:
    settings = {name: value for name, value in given(options, "data", *TRAINED_BY).items() if value is not None}
    if "learning_rate" in settings:
        settings["optimizer.learning_rate"] = settings.pop("learning_rate")
    folder, output = expanded(options.output_dir).absolute(), output_folder(None)
    progress, tracker = Progress("train"), tracker_chosen(options.tracker)
    config, schedule, said = training_run.plan_training(
        settings,
        given(options, *SCHEDULE),
        file=None if options.config is None else expanded(options.config),
        cache=output / PREPARED,
        progress=progress,
        **given(options, "held_out", "skip_bad"),
    )
    _tell_of_idle(config.device, config.world_size, progress)
    sweep()
    chosen = config.device == "cpu" and not config.threads
    threads = config.rank_threads(cluster.training_cores() if chosen else hardware.usable_cores())
    how: dict[str, Any] = {"threads": threads, "folder": folder, "progress": progress}
    config, why = fastest(config, said, steps=schedule.steps, output=output, probing=not options.no_probe, **how)
    if why:
        progress.done(why)
    with summary.watched(config) as watch:
        outcome = training_run.train(config, schedule, stop=stop, tracker=tracker, why=why, **how)
    known = {"loss": outcome.loss, "held-out loss": outcome.held_out_loss}
    measured = [f"{name} {value:.4f}" for name, value in known.items() if value is not None]
    progress.done(", ".join([f"step {outcome.step:,} of {max(outcome.step, schedule.steps):,}", *measured]))
    if outcome.step < schedule.steps and stop.number is not None:
        where = f"{signal_name(stop.number)}, saved after step {outcome.step:,}"
        print(f"{where}: the same command goes on from there", file=sys.stderr)
        return 128 + stop.number
    summary.tell([summary.of_training(config, folder, watch.state.get("gpu_utilisation_percent"))])
    print(outcome.checkpoint)
    return 0


def sample(options: argparse.Namespace) -> int:
    if bool(options.inception) != bool(options.data):
        there, lacking = ("--inception", "--data") if options.inception else ("--data", "--inception")
        raise ConfigError(f"{there} is for a FID, which needs {lacking} too: give both, or neither")
    options.hint = lambda: "the images that were made stay, the same command goes on"
    progress, checkpoint = Progress("sample"), expanded(options.checkpoint)
    if not checkpoint.name:
        raise ConfigError(f"CHECKPOINT is {options.checkpoint!r}: give a file, such as {EXAMPLE}")
    folder = expanded(options.output_dir) if options.output_dir else checkpoint.with_suffix("")
    sampling = sampling_run.Sampling(**given(options, *SAMPLING))
    world_size = cluster.usual_ranks() if options.world_size is None else options.world_size
    _tell_of_idle(options.device, world_size, progress)
    sweep()
    if options.inception:
        how = {"cache": output_folder(None) / PREPARED, "progress": progress, **given(options, "held_out", "skip_bad")}
        fid, data = sampling_run.plan_sample_fid(checkpoint, options.inception, options.data, options.count, **how)
    how = {"world_size": world_size, "progress": progress, **given(options, "device", "batch_size")}
    paths = sampling_run.sample(checkpoint, folder, options.count, sampling, **how)
    if options.inception:
        found = sampling_run.sample_fid(paths, fid, data, device=options.device, progress=progress)
        few = f"; {trained.FEW}" if found["images"] < trained.LEAST_IMAGES else ""
        print(f"FID {trained.fid_words(found)} against as many training images, Inception {fid.sha256[:8]}{few}")
    if options.grid:
        from ddpm_lab.training.generation import write_grid  # noqa: PLC0415 - imports torch

        write_grid(paths, folder / "grid.png")
    print(folder / "grid.png" if options.grid else folder)
    return 0


def _tell_of_idle(device: str | None, ranks: int, progress: Progress) -> None:
    """Say what of a job, or of this host's GPUs, has nothing to do: who started it all may think that it works."""
    sentence = cluster.idle(ranks)
    gpus = 0 if device == "cpu" or cluster.current() else len(hardware.gpus())
    if not sentence and 0 < ranks < gpus:
        sentence = f"{ranks} of {gpus} GPUs used: --world-size {gpus} takes all"
    if sentence:
        progress.done(sentence)


def _add_settings(parser: Parser, _: Sequence[str]) -> None:
    able = declared.options(RunConfig) | declared.options(OptimizerConfig)
    declared.add_options(parser, (replace(able[name], default=usual) for name, usual in TRAINED_BY.items()))
    declared.add_options(parser, SCHEDULE.values())


COMMANDS = {
    "prepare": Command(
        prepare,
        "prepare path/to/images data/photos --image-size 64",
        "source dest held-out skip-bad image-size json",
    ),
    "train": Command(
        train,
        "train --data path/to/images --output-dir runs/first --steps 20000",
        "data output-dir config no-probe held-out skip-bad tracker",
        {"output-dir": "folder of this run: checkpoints, samples, log, settings", "data": {"default": None}},
        more=_add_settings,
    ),
    "sample": Command(
        sample,
        f"sample {EXAMPLE} --count 64 --grid",
        "checkpoint count output-dir grid batch-size world-size device inception data held-out skip-bad",
        {
            "output-dir": "folder of the images (default: named after the checkpoint, beside it)",
            "batch-size": {"help": "images that a rank makes at once (default: 64)", "default": 64},
            "data": {
                "help": "images that a FID is measured against: a folder, an archive, or synthetic",
                "default": None,
            },
            "held-out": "images not to measure against (default: 5 % of them)",
        },
        more=lambda parser, _: declared.add_options(parser, SAMPLING.values()),
    ),
}
