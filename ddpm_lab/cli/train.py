"""The commands that train on the user's images and draw new ones, from their options to an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from ddpm_lab import declared
from ddpm_lab.checks import ConfigError
from ddpm_lab.cli.options import add, given, tracker_chosen
from ddpm_lab.config import OptimizerConfig, RunConfig
from ddpm_lab.files import PREPARED, expanded, output_folder
from ddpm_lab.training.run_folder import RunFailed
from ddpm_lab.training.stopping import Stop, Stopped, signal_name

USUAL_RANKS = "1; after rank, every process of the job"
TRAINED_BY = {
    "network": "seed on a GPU, tiny on a CPU",
    "image_size": 32,
    "global_batch_size": "128 on a GPU, 32 on a CPU",
    "accumulation": 1,
    "learning_rate": 2e-4,
    "precision": "the fastest here",
    "compile": "whole on a GPU, off on a CPU",
    "world_size": USUAL_RANKS,
    "device": "the GPU where there is one",
    "seed": 0,
    "oversubscribe": False,
}
"""Options of the command line that are settings of the same name, with what they are where none is given."""
EXAMPLE = "runs/first/checkpoints/step-00020000.pt"


def add_options(subparsers: Any, words: Sequence[str]) -> None:
    """Add both commands, with their options if ``words`` are for one of them."""
    train = subparsers.add_parser(
        "train",
        help="train on your images, with checkpoints, held-out loss and samples; the same command goes on",
        argument_default=argparse.SUPPRESS,
    )
    images = "images: a folder, an archive, a prepared folder, or synthetic (the default)"
    train.add_argument("--data", help=images)
    train.add_argument("--output-dir", required=True, help="folder of this run: checkpoints, samples, log, settings")
    train.add_argument("--config", metavar="FILE", help="TOML file of settings of RunConfig and a table [train]")
    train.add_argument(
        "--no-probe", action="store_true", help="take settings by the kind of processor, and try none (20 s, once)"
    )
    able = {**declared.options(RunConfig), **declared.options(OptimizerConfig)}
    declared.add_options(train, (replace(able[name], default=usual) for name, usual in TRAINED_BY.items()))
    if words[:1] == ["train"]:
        declared.add_options(train, _schedule().values())
    add(train, "held-out", "skip-bad", "tracker")
    train.set_defaults(command=train_command)

    sample = subparsers.add_parser("sample", help="draw images from a checkpoint; the same command goes on")
    sample.add_argument("checkpoint", metavar="CHECKPOINT", help=f"a file such as {EXAMPLE}")
    sample.add_argument("--count", type=int, required=True, metavar="N", help="how many images, at most 1000000")
    if words[:1] == ["sample"]:
        declared.add_options(sample, _sampling().values())
    add(sample, "output-dir", help="folder of the images (default: named after the checkpoint, beside it)")
    sample.add_argument("--grid", action="store_true", help="write all images as one, grid.png, too")
    sample.add_argument(
        "--inception", metavar="FILE", help="weights of torch-fidelity's Inception: the images' FID too"
    )
    against = "images that a FID is measured against: a folder, an archive, or synthetic"
    add(sample, "data", default=None, help=against)
    add(sample, "held-out", help="images not to measure against (default: 5 %% of them)")
    add(sample, "skip-bad")
    sample.add_argument("--world-size", type=int, help=f"number of ranks (default: {USUAL_RANKS})")
    sample.add_argument("--batch-size", type=int, default=64, help="images that a rank makes at once (default: 64)")
    add(sample, "device")
    sample.set_defaults(command=sample_command)


def _schedule() -> dict[str, declared.Option]:
    from ddpm_lab.training.training_run import Schedule  # noqa: PLC0415 - commands load what they need

    return declared.options(Schedule)


def _sampling() -> dict[str, declared.Option]:
    from ddpm_lab.training.sampling_run import Sampling  # noqa: PLC0415

    return declared.options(Sampling)


def train_command(options: argparse.Namespace) -> int:
    """Train, or go on; 128 and the signal's number if one ended it."""
    stop = Stop()

    def hint() -> str:
        return "goes on from the last checkpoint" if stop.gentle else "starts again: nothing was trained this time"

    with _ending(lambda: f"stopped at once; the same command {hint()}") as ending, stop:
        ending.code = _train(options, stop)
    return ending.code


def _train(options: argparse.Namespace, stop: Stop) -> int:
    from ddpm_lab.measure import cluster, hardware  # noqa: PLC0415
    from ddpm_lab.measure.process import sweep  # noqa: PLC0415
    from ddpm_lab.measure.progress import Progress  # noqa: PLC0415
    from ddpm_lab.questions.probe import fastest  # noqa: PLC0415
    from ddpm_lab.reports import summary_lines  # noqa: PLC0415
    from ddpm_lab.training import training_run  # noqa: PLC0415

    said = vars(options)
    settings = {name: said[name] for name in ("data", *TRAINED_BY) if name in said}
    if "learning_rate" in said:
        settings["optimizer.learning_rate"] = settings.pop("learning_rate")
    folder, output = expanded(options.output_dir).absolute(), output_folder(None)
    progress = Progress("train")
    tracker = tracker_chosen(said.get("tracker"))
    config, schedule, said_of = training_run.plan_training(
        settings,
        {name: said[name] for name in _schedule() if name in said},
        file=expanded(said["config"]) if "config" in said else None,
        cache=output / PREPARED,
        progress=progress,
        **{name: said[name] for name in ("held_out", "skip_bad") if name in said},
    )
    _tell_of_idle(config.device, config.world_size, progress)
    sweep()
    chosen = config.device == "cpu" and not config.threads
    threads = config.rank_threads(cluster.training_cores() if chosen else hardware.usable_cores())
    how: dict[str, Any] = {"threads": threads, "folder": folder, "progress": progress}
    probing = not said.get("no_probe")
    config, why = fastest(config, said_of, steps=schedule.steps, output=output, probing=probing, **how)
    if why:
        progress.done(why)
    with summary_lines.watched(config) as watch:
        outcome = training_run.train(config, schedule, stop=stop, tracker=tracker, why=why, **how)
    known = {"loss": outcome.loss, "held-out loss": outcome.held_out_loss}
    measured = [f"{name} {value:.4f}" for name, value in known.items() if value is not None]
    progress.done(", ".join([f"step {outcome.step:,} of {max(outcome.step, schedule.steps):,}", *measured]))
    if outcome.step < schedule.steps and stop.number is not None:
        where = f"{signal_name(stop.number)}, saved after step {outcome.step:,}"
        print(f"{where}: the same command goes on from there", file=sys.stderr)
        return 128 + stop.number
    busy = watch.state.get("gpu_utilisation_percent")
    summary_lines.tell([summary_lines.of_training(config, folder, busy)])
    print(outcome.checkpoint)
    return 0


def sample_command(options: argparse.Namespace) -> int:
    """Draw the images that are missing."""
    if bool(options.inception) != bool(options.data):
        there, lacking = ("--inception", "--data") if options.inception else ("--data", "--inception")
        raise ConfigError(f"{there} is for a FID, which needs {lacking} too: give both, or neither")
    with _ending(lambda: "the images that were made stay, the same command goes on") as ending, Stop():
        _sample(options)
    return ending.code


def _sample(options: argparse.Namespace) -> None:
    from ddpm_lab.measure.cluster import usual_ranks  # noqa: PLC0415
    from ddpm_lab.measure.process import sweep  # noqa: PLC0415
    from ddpm_lab.measure.progress import Progress  # noqa: PLC0415
    from ddpm_lab.training.sampling_run import Sampling, plan_sample_fid, sample, sample_fid  # noqa: PLC0415

    progress = Progress("sample")
    checkpoint = expanded(options.checkpoint)
    if not checkpoint.name:
        raise ConfigError(f"CHECKPOINT is {options.checkpoint!r}: give a file, such as {EXAMPLE}")
    folder = expanded(options.output_dir) if options.output_dir else checkpoint.with_suffix("")
    sampling = Sampling(**{name: value for name, value in vars(options).items() if name in _sampling()})
    world_size = usual_ranks() if options.world_size is None else options.world_size
    _tell_of_idle(options.device, world_size, progress)
    sweep()
    if options.inception:
        images = {"cache": output_folder(None) / PREPARED, **given(options, "held_out", "skip_bad")}
        fid, data = plan_sample_fid(
            checkpoint, options.inception, options.data, options.count, progress=progress, **images
        )
    how = {"world_size": world_size, **given(options, "device", "batch_size")}
    paths = sample(checkpoint, folder, options.count, sampling, progress=progress, **how)
    if options.inception:
        found = sample_fid(paths, fid, data, device=options.device, progress=progress)
        print(_fid_line(found, fid.sha256))
    if options.grid:
        from ddpm_lab.training.generation import write_grid  # noqa: PLC0415

        write_grid(paths, folder / "grid.png")
    print(folder / "grid.png" if options.grid else folder)


@dataclass
class _Ending:
    """How a command ended."""

    code: int = 0


@contextmanager
def _ending(stopped_how: Callable[[], str]) -> Iterator[_Ending]:
    """The exit code of what runs within; a signal and a failure are one sentence on stderr."""
    ending = _Ending()
    try:
        yield ending
    except Stopped as stopped:
        print(f"\nddpm-lab: {signal_name(stopped.number)}, {stopped_how()}", file=sys.stderr)
        ending.code = 128 + stopped.number
    except RunFailed as failed:
        print(f"\nddpm-lab: {failed}", file=sys.stderr)
        ending.code = 1


def _tell_of_idle(device: str | None, ranks: int, progress: Any) -> None:
    """Say what of a job, or of this host's GPUs, has nothing to do: who started it all may think that it works."""
    from ddpm_lab.measure import cluster, hardware  # noqa: PLC0415

    sentence = cluster.idle(ranks)
    gpus = 0 if device == "cpu" or cluster.current() else len(hardware.gpus())
    if not sentence and 0 < ranks < gpus:
        sentence = f"{ranks} of {gpus} GPUs used: --world-size {gpus} takes all"
    if sentence:
        progress.done(sentence)


def _fid_line(found: dict[str, Any], sha256: str) -> str:
    from ddpm_lab.explain import samples  # noqa: PLC0415

    few = f"; {samples.FEW}" if found["images"] < samples.LEAST else ""
    return f"FID {samples.fid_words(found)} against as many training images, Inception {sha256[:8]}{few}"
