"""The commands that train on the user's images and draw new ones, from their options to an exit code."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ddpm_lab.checks import ConfigError, whole_options
from ddpm_lab.config import COMPILE, NETWORKS, PRECISIONS
from ddpm_lab.files import PREPARED, expanded, output_folder
from ddpm_lab.options import add, given, tracker_chosen
from ddpm_lab.run_folder import RunFailed
from ddpm_lab.stopping import Stop, Stopped, signal_name

TRAINED_BY = (
    *("data", "network", "image_size", "global_batch_size", "accumulation", "world_size", "device", "precision"),
    *("compile", "seed", "oversubscribe"),
)
"""Options of the command line that are settings of the same name."""
USUAL_RANKS = "default: 1; after rank, every process of the job"
EXAMPLE = "runs/first/checkpoints/step-00020000.pt"
SCHEDULED_BY = ("steps", "save_every", "sample_every", "evaluate_every", "keep")


def add_options(subparsers: Any) -> None:
    """Add both commands to the command line. What is not given is absent, so that a file can say it."""
    train = subparsers.add_parser(
        "train",
        help="train on your images, with checkpoints, held-out loss and samples; the same command goes on",
        argument_default=argparse.SUPPRESS,
    )
    absent = argparse.SUPPRESS
    images = "images: a folder, an archive, a prepared folder, or synthetic (the default)"
    add(train, "data", default=absent, help=images)
    train.add_argument("--output-dir", required=True, help="folder of this run: checkpoints, samples, log, settings")
    train.add_argument("--steps", type=int, help="optimizer steps in all, those of an earlier start included")
    train.add_argument("--config", metavar="FILE", help="TOML file of settings of RunConfig and a table [train]")
    add(train, "network", choices=NETWORKS, help="default: seed on a GPU, tiny on a CPU")
    add(train, "image-size", default=absent)
    train.add_argument("--global-batch-size", type=int, help="images of a step (default: 128 on a GPU, 32 on a CPU)")
    train.add_argument("--accumulation", type=int, help="micro-batches of a rank in a step (default: 1)")
    train.add_argument("--learning-rate", type=float, help="Adam's learning rate (default: 2e-4)")
    train.add_argument("--precision", choices=PRECISIONS, help="number format (default: the fastest here)")
    train.add_argument(
        "--no-probe", action="store_true", help="take settings by the kind of processor, and try none (20 s, once)"
    )
    train.add_argument("--compile", choices=COMPILE, help="torch.compile (default: whole on a GPU, off on a CPU)")
    train.add_argument("--world-size", type=int, help=f"ranks, each with a GPU or a core of its own ({USUAL_RANKS})")
    add(train, "device", "seed", default=absent)
    train.add_argument("--oversubscribe", action="store_true", help="allow more ranks than cores or GPUs")
    train.add_argument("--save-every", type=int, metavar="N", help="steps between checkpoints (default: 1000)")
    train.add_argument("--sample-every", type=int, metavar="N", help="between sample grids (default: 1000; 0: none)")
    train.add_argument(
        "--evaluate-every", type=int, metavar="N", help="between held-out losses (default: 1000; 0: none)"
    )
    train.add_argument("--keep", type=int, metavar="N", help="checkpoints that stay (default: 3)")
    add(train, "held-out", "skip-bad", "tracker")
    train.set_defaults(command=train_command)

    sample = subparsers.add_parser("sample", help="draw images from a checkpoint; the same command goes on")
    sample.add_argument("checkpoint", metavar="CHECKPOINT", help=f"a file such as {EXAMPLE}")
    sample.add_argument("--count", type=int, required=True, metavar="N", help="how many images, at most 1000000")
    sample.add_argument("--sampler", choices=("ddpm", "ddim"), default="ddim", help="default: ddim")
    sample.add_argument("--steps", type=int, default=250, help="denoising steps (default: 250)")
    add(sample, "seed", help="with an image's number, its noise (default: 0)")
    sample.add_argument("--weights", choices=("ema", "trained"), default="ema", help="averaged or last (default: ema)")
    sample.add_argument("--precision", choices=PRECISIONS, default="fp32", help="number format (default: fp32)")
    sample.add_argument("--compile", choices=COMPILE, default="off", help="torch.compile (default: off)")
    add(sample, "output-dir", help="folder of the images (default: named after the checkpoint, beside it)")
    sample.add_argument("--grid", action="store_true", help="write all images as one, grid.png, too")
    sample.add_argument(
        "--inception", metavar="FILE", help="weights of torch-fidelity's Inception: the images' FID too"
    )
    against = "images that a FID is measured against: a folder, an archive, or synthetic"
    add(sample, "data", default=None, help=against)
    add(sample, "held-out", help="images not to measure against (default: 5 %% of them)")
    add(sample, "skip-bad")
    sample.add_argument("--world-size", type=int, help=f"ranks ({USUAL_RANKS})")
    add(sample, "batch-size", default=64, help="images that a rank makes at once (default: 64)")
    add(sample, "device")
    sample.set_defaults(command=sample_command)


def train_command(options: argparse.Namespace) -> int:
    """Train, or go on; 128 and the signal's number if one ended it."""
    from ddpm_lab import summary_lines  # noqa: PLC0415 - commands load what they need
    from ddpm_lab.measure import cluster, hardware  # noqa: PLC0415
    from ddpm_lab.measure.group_folder import sweep  # noqa: PLC0415
    from ddpm_lab.measure.progress import Progress  # noqa: PLC0415
    from ddpm_lab.probe import fastest  # noqa: PLC0415
    from ddpm_lab.training_plan import plan_training  # noqa: PLC0415
    from ddpm_lab.training_run import train  # noqa: PLC0415

    said = vars(options)
    settings = {name: said[name] for name in TRAINED_BY if name in said}
    if "learning_rate" in said:
        settings["optimizer.learning_rate"] = said["learning_rate"]
    whole_options(said, steps=1, global_batch_size=1, accumulation=1, world_size=1, image_size=1, seed=0)
    whole_options(said, save_every=1, sample_every=0, evaluate_every=0, keep=1)
    folder = expanded(options.output_dir).absolute()
    progress = Progress("train")
    tracker = tracker_chosen(said.get("tracker"))
    stop = Stop()
    try:
        with stop:
            config, schedule, said_of = plan_training(
                settings,
                {name: said[name] for name in SCHEDULED_BY if name in said},
                file=expanded(said["config"]) if "config" in said else None,
                cache=output_folder(None) / PREPARED,
                held_out=said.get("held_out"),
                skip_bad=said.get("skip_bad", False),
                progress=progress,
            )
            _tell_of_idle(config.device, config.world_size, progress)
            sweep()
            chosen = config.device == "cpu" and not config.threads
            cores = cluster.training_cores() if chosen else hardware.usable_cores()
            threads, output = config.rank_threads(cores), output_folder(None)
            how: dict[str, Any] = {"steps": schedule.steps, "threads": threads, "output": output, "folder": folder}
            config, why = fastest(config, said_of, probing=not said.get("no_probe"), progress=progress, **how)
            if why:
                progress.done(why)
            with summary_lines.watched(config) as gpus:
                told: dict[str, Any] = {"stop": stop, "progress": progress, "tracker": tracker, "why": why}
                outcome = train(config, schedule, folder, threads=threads, **told)
    except Stopped as stopped:
        found = "goes on from the last checkpoint" if stop.gentle else "starts again: nothing was trained this time"
        print(f"\nddpm-lab: {signal_name(stopped.number)}, stopped at once; the same command {found}", file=sys.stderr)
        return 128 + stopped.number
    except RunFailed as failed:
        print(f"\nddpm-lab: {failed}", file=sys.stderr)
        return 1
    measured = [
        f"{name} {value:.4f}"
        for name, value in (("loss", outcome.loss), ("held-out loss", outcome.held_out_loss))
        if value is not None
    ]
    progress.done(", ".join([f"step {outcome.step:,} of {max(outcome.step, schedule.steps):,}", *measured]))
    if outcome.step < schedule.steps and stop.number is not None:
        where = f"{signal_name(stop.number)}, saved after step {outcome.step:,}"
        print(f"{where}: the same command goes on from there", file=sys.stderr)
        return 128 + stop.number
    print(*summary_lines.lines(summary_lines.of_training(config, folder, gpus.percent)), sep="\n", file=sys.stderr)
    print(outcome.checkpoint)
    return 0


def sample_command(options: argparse.Namespace) -> int:
    """Draw the images that are missing."""
    from ddpm_lab.measure.cluster import usual_ranks  # noqa: PLC0415
    from ddpm_lab.measure.group_folder import sweep  # noqa: PLC0415
    from ddpm_lab.measure.progress import Progress  # noqa: PLC0415
    from ddpm_lab.sampling_run import Sampling, plan_sample_fid, sample, sample_fid  # noqa: PLC0415

    whole_options(vars(options), count=1, steps=1, seed=0, world_size=1, batch_size=1)
    if bool(options.inception) != bool(options.data):
        there, lacking = ("--inception", "--data") if options.inception else ("--data", "--inception")
        raise ConfigError(f"{there} is for a FID, which needs {lacking} too: give both, or neither")
    progress = Progress("sample")
    checkpoint = expanded(options.checkpoint)
    if not checkpoint.name:
        raise ConfigError(f"CHECKPOINT is {options.checkpoint!r}: give a file, such as {EXAMPLE}")
    folder = expanded(options.output_dir) if options.output_dir else checkpoint.with_suffix("")
    sampling = Sampling(**given(options, "sampler", "steps", "seed", "weights", "precision", "compile"))
    world_size = usual_ranks() if options.world_size is None else options.world_size
    try:
        with Stop():
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
                from ddpm_lab.model.generation import write_grid  # noqa: PLC0415

                write_grid(paths, folder / "grid.png")
    except Stopped as stopped:
        name = signal_name(stopped.number)
        print(f"\nddpm-lab: {name}; the images that were made stay, the same command goes on", file=sys.stderr)
        return 128 + stopped.number
    except RunFailed as failed:
        print(f"\nddpm-lab: {failed}", file=sys.stderr)
        return 1
    print(folder / "grid.png" if options.grid else folder)
    return 0


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
