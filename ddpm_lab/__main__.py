"""The command line: ``ddpm-lab`` or ``python -m ddpm_lab``."""

from __future__ import annotations

import argparse
import functools
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from ddpm_lab import (
    __version__,
    bottleneck_command,
    commands,
    compare_command,
    predict_command,
    recommend_command,
    report_commands,
    slurm_commands,
    strategy_commands,
    train_commands,
)
from ddpm_lab.checks import LabError
from ddpm_lab.config import START_METHODS
from ddpm_lab.options import RESOLUTION, add
from ddpm_lab.plan import SCALINGS
from ddpm_lab.stopping import Stop, Stopped

COMMON = ("preset", "data", "network", "workload", "minutes", "output-dir", "held-out", "skip-bad")
"""Options of ``run`` and of ``report``, which does the same with notebooks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code.

    0 is success, 1 no answer, a run that failed or a change that must not pass, 2 wrong input, 3 and 4 a gate that
    cannot tell (see docs/gate.md), and 128 + n the signal n that ended it.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        with _ended_by_sigterm():
            result: int = options.command(options)
    except LabError as error:
        print(f"ddpm-lab: {error}", file=sys.stderr)
        refused: int = getattr(error, "exit_code", 2)
        return refused
    except KeyboardInterrupt as ended:
        print("\nddpm-lab: stopped; every complete set is in the ledger, the same command goes on", file=sys.stderr)
        return 128 + (ended.number if isinstance(ended, Stopped) else signal.SIGINT)
    return result


def _ended_by_sigterm() -> AbstractContextManager[object]:
    """SIGTERM ends a command as Ctrl-C does, its ranks first; only the main thread can see to that."""
    return Stop() if threading.current_thread() is threading.main_thread() else nullcontext()


class _Parser(argparse.ArgumentParser):
    """Refuses in one line, like everything else here; the usage is what --help is for."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what a command does not know by the command's own name; argparse would leave it to the program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"ddpm-lab: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ddpm-lab", description="Which settings train a diffusion model fastest here, and do they cost quality?"
    )
    parser.add_argument("--version", action="version", version=f"ddpm-lab {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    check = subparsers.add_parser("check", help="what this machine has, what is missing, and what that would add")
    add(check, "output-dir", help="folder that results would go to (default: this checkout)")
    add(check, "json")
    check.set_defaults(command=commands.check)

    prepare = subparsers.add_parser("prepare", help="decode images once into a folder that experiments use")
    prepare.add_argument(
        "source", help="a folder of PNG or JPEG images, train.7z, cifar-10-python.tar.gz, or synthetic"
    )
    prepare.add_argument("dest", help="folder to make")
    add(prepare, "held-out", "skip-bad", "image-size", "json")
    prepare.set_defaults(command=commands.prepare)

    _run_options(subparsers)
    compare_command.add_options(subparsers)
    _calibrate_options(subparsers)
    strategy_commands.add_options(subparsers)
    bottleneck_command.add_options(subparsers)
    report_commands.add_options(subparsers)
    train_commands.add_options(subparsers)
    rank = subparsers.add_parser(
        "rank",
        help="run a command on several hosts, as torchrun --nnodes 2 --nproc-per-node 4 ... -m ddpm_lab rank run amp",
    )
    rank.add_argument("--interface", metavar="NAME", help="network interface (or its address) that other hosts reach")
    rank.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="run, train or sample with its options"
    )
    rank.set_defaults(command=functools.partial(commands.rank, main=main))
    slurm_commands.add_options(subparsers, parser)
    predict_command.add_options(subparsers)
    recommend_command.add_options(subparsers)
    report = subparsers.add_parser("report", help="execute the notebooks and write their pages")
    add(report, *COMMON)
    report.add_argument("--notebook", action="append", metavar="NAME", help="only this notebook (may be repeated)")
    report.add_argument(
        "-p", "--parameter", action="append", nargs=2, metavar=("NAME", "VALUE"), help="a notebook parameter"
    )
    report.set_defaults(command=commands.report)

    figures = subparsers.add_parser("figures", help="rebuild figures and findings from records; needs no torch")
    add(figures, "ledger", "machine")
    add(figures, "output-dir", help="folder that receives image_output/ (default: this checkout)")
    add(figures, "bands")
    add(figures, "json", help="print findings as JSON")
    mode = figures.add_mutually_exclusive_group()
    mode.add_argument("--publish", action="store_true", help="write these records and figures to the published folders")
    mode.add_argument("--check", action="store_true", help="compare the published figures with the published records")
    figures.set_defaults(command=commands.figures)
    return parser


def _run_options(subparsers: Any) -> None:
    run = subparsers.add_parser("run", help="measure what is missing for one or more experiments")
    run.add_argument(
        "experiments",
        nargs="+",
        metavar="EXPERIMENT",
        help="profile, multi_gpu, amp, workers, torch_compile, batch_size (the largest batch that fits), exchange (how "
        "ranks exchange gradients), all_reduce (how fast their links are), peers (this trainer beside others, and the "
        "limits of the machine) or quality (what "
        "each setting costs in loss)",
    )
    add(run, *COMMON)
    add(run, "mode", help="one rank only; at least two; or what `ddpm-lab strategy` says of the network and batch")
    run.add_argument(
        "--scaling", choices=SCALINGS, help="multi_gpu: strong, weak or both (default: both; smoke: strong)"
    )
    add(run, "bands", "device", "batch-size")
    run.add_argument(
        "--world-sizes", metavar="N,N,...", help="numbers of ranks, such as 1,2,4 (default: the experiment's choice)"
    )
    run.add_argument(
        "--parts", help="peers: some of peers,fp32,sampling,limits,levers (default: the first four; full: all)"
    )
    run.add_argument(
        "--lost-scaling",
        action="store_true",
        default=None,
        help="multi_gpu: also where the rest of the ideal speed-up went (default: in full)",
    )
    run.add_argument("--trainers", help="peers: names of other trainers, with commas between (default: all)")
    run.add_argument("--candidates", help="quality: settings to try, with commas between (default: the preset's)")
    run.add_argument(
        "--seeds",
        type=int,
        help="train each configuration for quality from so many seeds, beside its speed; not for profile and workers "
        "(default: none; 8 in full; 2, 4 or 8 for the experiment quality)",
    )
    run.add_argument("--images", type=int, help="images that each of these runs trains on (default: the preset's)")
    run.add_argument("--inception", metavar="FILE", help="quality: weights of torch-fidelity's Inception, for a FID")
    run.add_argument(
        "--fid-images",
        type=int,
        metavar="N",
        help="quality: images of a FID (default: 64, 2,500 or 10,000, where there are as many to train on)",
    )
    add(run, "image-size", "sets")
    add(run, "resolution", help=f"{RESOLUTION}: measure until then (default: the planned number of sets)")
    add(run, "seed")
    run.add_argument(
        "--oversubscribe", action="store_true", help="allow more ranks than cores or GPUs; speed is not claimed"
    )
    run.add_argument("--start-method", choices=START_METHODS, default="forkserver", help="how ranks are started")
    add(run, "tracker", "json")
    run.set_defaults(command=commands.run)


def _calibrate_options(subparsers: Any) -> None:
    calibrate = subparsers.add_parser(
        "calibrate", help="the instrument checks itself: noise, drift, what it can resolve"
    )
    add(calibrate, "minutes", default=5.0, help="how long to measure (default: 5)")
    calibrate.add_argument(
        "--planted", default="5%", help="the slowdown that is planted and must be found (default: 5%%)"
    )
    add(calibrate, "device", "output-dir", "json")
    calibrate.set_defaults(command=commands.calibrate)


if __name__ == "__main__":
    sys.exit(main())
