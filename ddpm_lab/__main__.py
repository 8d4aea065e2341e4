"""The command line: ``ddpm-lab`` or ``python -m ddpm_lab``."""

import errno
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from multiprocessing import resource_tracker

from ddpm_lab import __version__
from ddpm_lab.checks import LabError
from ddpm_lab.cli.options import Options, Parser
from ddpm_lab.output import Unread, prepare_streams, printable, say
from ddpm_lab.training.stopping import Stop, Stopped

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
MODULES = {"check": "check", "rank": "train", "collect": "report"}
"""Where a command is, if not in the module of ``ddpm_lab.cli`` that is called as its group."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code.

    0 is success, 1 no answer, a run that failed or a change that must not pass, 2 wrong input, 3 and 4 a gate that
    cannot tell, and 128 + n the signal n that ended it: SIGPIPE where nobody reads on, as in a pipe into head.
    """
    try:
        with Stop() as stop:  # SIGTERM and SIGHUP end a command as Ctrl-C does, its ranks first
            try:
                return _run(list(sys.argv[1:] if arguments is None else arguments))
            finally:
                if arguments is None and (process := sys.modules.get("ddpm_lab.measure.process")):
                    stop.gentle = True  # a first signal changes nothing any more
                    process.end_all()
                    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]  # which no other can use
    except Unread:
        return 128 + signal.SIGPIPE
    except Stopped as again:
        return 128 + again.number


def _run(words: Sequence[str]) -> int:
    """Run a command; its exit code, also where it was refused or stopped, or failed for what is not the lab's."""
    options = Options()
    try:
        try:
            prepare_streams()
            options = _parser(words).parse_args(words)
            return int(options.command(options))
        finally:  # help and refusals, too, end here
            say()
    except ConnectionError:  # of an output, or between processes
        raise
    except Exception as error:
        known = isinstance(error, LabError | OSError | RecursionError | MemoryError | ModuleNotFoundError)
        if not known and "can't start new thread" not in str(error):  # for want of memory; any other is a defect
            raise
        code = int(getattr(error, "exit_code", 2))
        seen = traceback.format_exc().splitlines() if options.debug else ()
        detail = getattr(error, "__notes__", ()) if options.debug else ()
        notes = (line for note in detail for line in note.splitlines())
        over = "\r\x1b[K" * sys.stderr.isatty()  # in place of a line of progress
        say(*seen, *notes, f"ddpm-lab: {_sentence(error)}", error=True, begin=over)
        return code
    except KeyboardInterrupt as stopped:
        number = stopped.number if isinstance(stopped, Stopped) else signal.SIGINT
        kept = "stopped; what was complete is kept, and the same command goes on"
        say("", f"ddpm-lab: {signal.Signals(number).name}, {kept}", error=True)
        return 128 + number


def _sentence(error: BaseException) -> str:
    if isinstance(error, OSError) and error.errno not in (errno.EAGAIN, errno.ENOMEM):  # a process could not start
        place = printable(error.filename2 or error.filename or "a file")  # of a copy the second
        return f"cannot use {place}: {error.strerror or error}; check permissions and space, or choose another place"
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed here: install it with pip, or use a checkout after make setup"
    lacks = "out of memory or processes, or nested too deeply; --debug shows where"
    return str(error) if isinstance(error, LabError) else lacks


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
                command.add_argument("--debug", action="store_true", help="show where in the code an error arose")
    parser.set_defaults(main=main, typed=words)
    parser.description = "\n".join(lines)
    return parser


if __name__ == "__main__":
    sys.exit(main())
