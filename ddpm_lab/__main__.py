"""The command line: ``ddpm-lab`` or ``python -m ddpm_lab``."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TextIO

from ddpm_lab import __version__
from ddpm_lab.checks import LabError
from ddpm_lab.cli import check, cluster, measure, recommend, report, train
from ddpm_lab.cli.options import Parser
from ddpm_lab.training.stopping import Stop, Stopped

GROUPS = {
    "measure": ("run", "compare", "recommend", "bottleneck", "strategy", "check"),
    "train": ("prepare", "train", "sample"),
    "report": ("report", "figures", "benchmark", "summary"),
    "cluster": ("rank", "submit", "collect"),
}
"""The commands as --help lists them."""


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


def _parser(words: Sequence[str]) -> Parser:
    """The parser of all commands; that of ``words`` has its options from everywhere."""
    about = "Which settings train a diffusion model fastest here, and do they cost quality?"
    parser = Parser(prog="ddpm-lab", description=about)
    parser.add_argument("--version", action="version", version=f"ddpm-lab {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in (measure, recommend, check, train, report, cluster):
        for command in module.COMMANDS:
            command.add(commands, words)
    parser.set_defaults(main=main, parser_of=_parser)
    lines = []
    for group, names in GROUPS.items():
        lines += ["", f"{group}:", *(f"    {name:11} {commands.choices[name].description}" for name in names)]
    parser.description = "\n".join([about, *lines])
    return parser


if __name__ == "__main__":
    sys.exit(main())
