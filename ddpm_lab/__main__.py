"""The command line: ``ddpm-lab`` or ``python -m ddpm_lab``."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module
from typing import TextIO

from ddpm_lab import __version__
from ddpm_lab.checks import LabError
from ddpm_lab.cli.options import Parser
from ddpm_lab.training.stopping import Stop, Stopped, signal_name

ABOUT = "Which settings train a diffusion model fastest here, and do they cost quality?"
GROUPS = {
    "measure": {
        "run": "Answer one or more questions; again, more sets where inconclusive.",
        "compare": "Compare the speed of two training steps, or of one in two revisions.",
        "recommend": "Search the fastest configuration whose quality is not worse.",
        "check": "Say what this machine has and lacks, or how finely it measures.",
    },
    "train": {
        "prepare": "Decode images once into a folder that experiments use.",
        "train": "Train on your images, with checkpoints and samples, or go on.",
        "sample": "Draw images from a checkpoint, or those that are missing.",
    },
    "report": {
        "report": "Execute the notebooks and write their pages.",
        "figures": "Rebuild figures and findings from records; needs no torch.",
        "benchmark": "Write a folder: one GPU against several, with tables and figures.",
        "summary": "Print runs as a table with speed-ups; of two runs, what differs.",
    },
    "cluster": {
        "rank": "Run a command on several hosts, in processes that torchrun started.",
        "collect": "Collect records of SLURM jobs into the ledger, and show their runs.",
    },
}
"""The commands as --help lists them."""
MODULES = {"recommend": "recommend", "check": "check"}
"""Where a command is, if not in the module of ``ddpm_lab.cli`` that is called as its group."""


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
        # SIGTERM ends a command as Ctrl-C does, its ranks first; only the main thread can see to that.
        with Stop() if threading.current_thread() is threading.main_thread() else nullcontext():
            result: int = options.command(options)
    except LabError as error:
        code = int(getattr(error, "exit_code", 2))
        lines = "\n" * (code == 1 and "hint" in options)  # ends a line of progress
        print(f"{lines}ddpm-lab: {error}", file=sys.stderr)
        return code
    except KeyboardInterrupt as ended:
        number = ended.number if isinstance(ended, Stopped) else signal.SIGINT
        said = "stopped; every complete set is in the ledger, the same command goes on"
        if "hint" in options:
            said = f"{signal_name(number)}, {options.hint()}"
        print(f"\nddpm-lab: {said}", file=sys.stderr)
        return 128 + number
    return result


def _parser(words: Sequence[str]) -> Parser:
    """The parser of all commands; the one that ``words`` begin with has its options, and its module is loaded."""
    lines = [ABOUT]
    parser = Parser(prog="ddpm-lab")
    parser.add_argument("--version", action="version", version=f"ddpm-lab {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for group, members in GROUPS.items():
        lines += ["", f"{group}:", *(f"    {name:11} {about}" for name, about in members.items())]
        for name, about in members.items():
            command = commands.add_parser(name, description=about)
            if words[:1] == [name]:
                module = import_module(f"ddpm_lab.cli.{MODULES.get(name, group)}")
                module.COMMANDS[name].fill(command, words[1:])
    parser.set_defaults(main=main, typed=words)
    parser.description = "\n".join(lines)
    return parser


if __name__ == "__main__":
    sys.exit(main())
