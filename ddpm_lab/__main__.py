"""The command line: ``ddpm-lab`` or ``python -m ddpm_lab``."""

from __future__ import annotations

import argparse
import difflib
import functools
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, TextIO

from ddpm_lab import __version__
from ddpm_lab.checks import LabError
from ddpm_lab.cli import bottleneck as bottleneck_command
from ddpm_lab.cli import cluster as slurm_commands
from ddpm_lab.cli import commands
from ddpm_lab.cli import compare as compare_command
from ddpm_lab.cli import recommend as recommend_command
from ddpm_lab.cli import report as report_commands
from ddpm_lab.cli import run as run_command
from ddpm_lab.cli import strategy as strategy_commands
from ddpm_lab.cli import train as train_commands
from ddpm_lab.cli.options import COMMON, add
from ddpm_lab.training.stopping import Stop, Stopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code.

    0 is success, 1 no answer, a run that failed or a change that must not pass, 2 wrong input, 3 and 4 a gate that
    cannot tell, and 128 + n the signal n that ended it: SIGPIPE where nobody reads on, as in a pipe into head.
    """
    try:
        try:
            return _run(arguments)
        finally:  # help and refusals, too, end here; what is still buffered would fail where nobody catches it
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:
        unread = [stream for stream in (sys.stdout, sys.stderr) if stream is not None and _unread(stream)]
        if not unread:
            raise  # another pipe, such as that of a rank
        for stream in unread:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 128 + signal.SIGPIPE


def _unread(stream: TextIO) -> bool:
    """Whether the other end of an output was closed."""
    try:
        number = stream.fileno()
    except OSError:  # no file, as in a notebook
        return False
    watch = select.poll()
    watch.register(number, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in watch.poll(0))


def _run(arguments: Sequence[str] | None) -> int:
    """Run a command; its exit code, where all that it prints is read."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser(words).parse_args(words)
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

    def __init__(self, **how: Any) -> None:
        super().__init__(**how, allow_abbrev=False)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what a command does not know by the command's own name; argparse would leave it to the program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0].partition("=")[0], self._option_string_actions, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"ddpm-lab: {message}; see {self.prog} --help\n")


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="ddpm-lab", description="Which settings train a diffusion model fastest here, and do they cost quality?"
    )
    parser.add_argument("--version", action="version", version=f"ddpm-lab {__version__}")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    check = subparsers.add_parser("check", help="what this machine has, what is missing, and what that would add")
    check.add_argument(
        "--instrument",
        action="store_true",
        help="measure what it can resolve: noise, drift, and a planted slowdown of 5 %%",
    )
    add(check, "minutes", default=5.0, help="with --instrument: how long to measure (default: 5)")
    add(check, "device", help="with --instrument: cpu or cuda (default: the GPU where there is one)")
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

    run_command.add_options(subparsers, words)
    compare_command.add_options(subparsers)
    strategy_commands.add_options(subparsers)
    bottleneck_command.add_options(subparsers)
    report_commands.add_options(subparsers)
    train_commands.add_options(subparsers, words)
    rank = subparsers.add_parser(
        "rank",
        help="run a command on several hosts, as torchrun --nnodes 2 --nproc-per-node 4 ... -m ddpm_lab rank run amp",
    )
    rank.add_argument("--interface", metavar="NAME", help="network interface over which ranks exchange gradients")
    rank.add_argument(
        "words", nargs=argparse.REMAINDER, metavar="COMMAND ...", help="run, train or sample with its options"
    )
    rank.set_defaults(command=functools.partial(commands.rank, main=main))
    slurm_commands.add_options(subparsers, _parser)
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


if __name__ == "__main__":
    sys.exit(main())
