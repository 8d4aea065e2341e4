"""What commands have in common: their parser, the options that several have, and how an answer is printed."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ddpm_lab.checks import ConfigError, did_you_mean, percent
from ddpm_lab.config import DEVICES, NETWORKS
from ddpm_lab.explain.bands import DEFAULT, NAMED
from ddpm_lab.plan import PRESETS

KEY_VARIABLE = "COMET_API_KEY"
COMET = f"Comet ML, or into an archive for it (default: comet where {KEY_VARIABLE} is set, else none)"
TABLES = f"{', '.join(NAMED)}, or your own, such as good=75%,fair=50%,poor=0 (default: {DEFAULT})"


def _of(text: str, kind: Any = str, **how: Any) -> dict[str, Any]:
    """What argparse is told of an option; one that is a bool takes no value."""
    return {"help": text, **({"action": "store_true"} if kind is bool else {"type": kind}), **how}


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give whole numbers, such as 16,32") from None


OPTIONS: dict[str, dict[str, Any]] = {
    # how much is measured, on what
    "preset": _of(f"how much is run: {', '.join(PRESETS)} (default: quick)", default="quick"),
    "minutes": _of("time budget", float),
    "sets": _of("sets per comparison (default: what the time gives, at least 4)", int),
    "resolution": _of("smallest difference to be found, such as 2% (default: what the time gives)", metavar="SHARE"),
    "cores": _of("CPU cores to measure with (default: those that other processes leave free)", int, metavar="N"),
    "device": _of("default: the GPU where there is one", choices=DEVICES),
    "oversubscribe": _of("allow more ranks than cores or GPUs; speed is not claimed", bool),
    "network": _of(f"{', '.join(NETWORKS)} (default: the preset's choice for this machine)"),
    "parameters": _of("of a network of your own, in place of --network", int, metavar="COUNT"),
    "workload": _of("a training of your own (docs/your_own_model.md)", metavar="MODULE:FUNCTION"),
    "batch-size": _of("images of a step over all ranks", int),
    "batch-sizes": _of("images of a step (default: those of 16,32,64,128 that fit)", numbers, metavar="A,B,..."),
    "loader-workers": _of("of each rank, to decode files (default: packed images)", int),
    "world-size": _of("number of ranks (default: 1; after rank, every process of the job)", int),
    "ranks": _of("one rank alone; several; or several unless one is enough", choices=("single", "multi", "auto")),
    "seed": _of("seed of weights, data order and noise (default: 0)", int, default=0),
    "data": _of("images: a folder, an archive, or synthetic (the default)", default="synthetic"),
    "held-out": _of("images never to train on (default: 5 % of the data)", metavar="FOLDER"),
    "skip-bad": _of("leave damaged images out, and list them", bool),
    "image-size": _of("side of the images in pixels (default: 32)", int, default=32),
    # compare, check
    "against": _of("measure A as it is in this repository against a branch, tag or commit", metavar="REVISION"),
    "always": _of("with --against: measure identical code too", bool),
    "gate": _of("exit 1 if B is slower, not only if it fails: a gate", bool),
    "threshold": _of("a gate that fails what is surely slower by more (with --against: 3%)", metavar="SHARE"),
    "strict": _of("with a gate: exit 4 where the answer is inconclusive", bool),
    "summary": _of("append the decision as Markdown (default: $GITHUB_STEP_SUMMARY, if any)", metavar="FILE"),
    "instrument": _of("measure what it can resolve: noise, drift, and a planted slowdown of 5 %", bool),
    # recommend, bottleneck
    "train-images": _of("of the full training that is projected (default: 800,000 steps)", int, metavar="N"),
    "changes": _of("only these changes, by the names in the report", metavar="NAME,..."),
    # train, sample
    "config": _of("TOML file of settings of RunConfig and a table [train]", metavar="FILE"),
    "no-probe": _of("take settings by the kind of processor, and try none (20 s, once)", bool),
    "count": _of("how many images, at most 1000000", int, metavar="N", required=True),
    "grid": _of("write all images as one, grid.png, too", bool),
    # results
    "ledger": _of("records to read (default: your own ledger)", nargs="+", metavar="FILE"),
    "machine": _of("whose records: a name, a part of it, or a key", metavar="NAME"),
    "bands": _of(f"names of parallel efficiency: {TABLES}", default=DEFAULT, metavar="TABLE"),
    "notebook": _of("only this notebook (may be repeated)", action="append", metavar="NAME"),
    "parameter": _of("a notebook parameter", short=("-p",), action="append", nargs=2, metavar=("NAME", "VALUE")),
    "only": _of("settings of two runs that may differ: exit 1 if others do", metavar="A,B,..."),
    "publish": _of("write these records and figures to the published folders", bool),
    "check": _of("compare the published figures with the published records", bool),
    "csv": _of("write the table as CSV", metavar="FILE"),
    "markdown": _of("write table and speed-ups as Markdown", metavar="FILE"),
    "tracker": _of(f"log to {COMET}", choices=("comet", "comet-offline", "none")),
    "output-dir": _of("folder that receives all results (default: this checkout)"),
    "json": _of("print JSON", bool),
    # several hosts
    "interface": _of("network interface over which ranks exchange gradients", metavar="NAME"),
    "nodes": _of("machines of a job (default: 1)", int, default=1, metavar="N"),
    "gpus-per-node": _of("default: 0, on the CPUs", int, default=0, metavar="G"),
    "sbatch": _of('more: --sbatch="--time=2:00:00"', default="", metavar="OPTIONS"),
}
SEVERAL = "ledgers (.jsonl), folders of `train`, logs of jobs (default: your own ledger)"
RUNS = "folders, TOML files, run ids, SET:LABEL"
SIDE = "module:function, or a TOML file of settings"
POSITIONALS: dict[str, dict[str, Any]] = {
    "experiments": _of("such as amp: see below", nargs="+", metavar="EXPERIMENT"),
    "baseline": _of(f"{SIDE}: the side that is 1; with --against both sides", nargs="?", metavar="A"),
    "candidate": _of(f"{SIDE}: the side whose speed is asked for", nargs="?", metavar="B"),
    "source": _of("a folder of PNG or JPEG images, train.7z, cifar-10-python.tar.gz, or synthetic"),
    "dest": _of("folder to make"),
    "checkpoint": _of("a file of checkpoints/ in the folder of a run", metavar="CHECKPOINT"),
    "sources": _of(f"{SEVERAL}; or two runs: {RUNS}", nargs="*", metavar="SOURCE"),
    "words": _of("a command with its options", nargs=argparse.REMAINDER, metavar="COMMAND ..."),
    "logs": _of("logs of jobs (default: slurm-*.out in this folder)", nargs="*", metavar="LOG"),
}
COMMON = "preset data network workload minutes output-dir held-out skip-bad"
"""Options of ``run`` and of ``report``, which does the same with notebooks."""
SETTINGS = (*COMMON.replace("-", "_").split(), "sets", "resolution", "device", "image_size", "seed", "oversubscribe")
"""Options that are settings of every question, of the same name."""


class Parser(argparse.ArgumentParser):
    """Refuses in one line, like everything else here; the usage is what --help is for.

    ``hints`` say of options that others have, who has them.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(**how, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        self.hints: dict[str, str] = {}

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what a command does not know by the command's own name; argparse would leave it to the program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            hint = self.hints.get(name) or did_you_mean(name, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = ", ".join(map(str, action.choices))
            sentence = f"{value!r}: choose one of {names}{did_you_mean(value, action.choices)}"
            raise argparse.ArgumentError(action, sentence)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"ddpm-lab: {message}; see {self.prog} --help\n")


class Command(NamedTuple):
    """A command: what runs it, an example of it, and its options.

    ``options`` are names of ``OPTIONS`` and ``POSITIONALS``, with | between those that exclude each other; ``here`` is
    the help of some of them in this command, or all that argparse is told otherwise; ``more`` adds options for the
    words that were typed after its name.
    """

    run: Callable[[argparse.Namespace], int]
    example: str
    options: str
    here: Mapping[str, str | dict[str, Any]] = {}
    more: Callable[[Parser, Sequence[str]], None] | None = None

    def fill(self, parser: Parser, words: Sequence[str]) -> None:
        """Give ``parser`` the command's options."""
        parser.epilog = f"example: ddpm-lab {self.example}"
        parser.set_defaults(command=self.run, parser=parser)
        for option in self.options.split():
            group = parser.add_mutually_exclusive_group() if "|" in option else parser
            for name in option.split("|"):
                told = self.here.get(name, {})
                add(group, name, **({"help": told} if isinstance(told, str) else told))
        if self.more:
            self.more(parser, words)


def add(parser: argparse._ActionsContainer, name: str, **otherwise: Any) -> None:
    """Add an option or a positional to a command; ``otherwise`` replaces what is said of it here."""
    how = {**(POSITIONALS.get(name) or OPTIONS[name]), **otherwise}
    how["help"] = how["help"].replace("%", "%%")
    parser.add_argument(*([name] if name in POSITIONALS else [*how.pop("short", ()), f"--{name}"]), **how)


def reads(options: argparse.Namespace, *also: str) -> bool:
    """Whether --ledger or --machine is given, so that records are read and nothing is measured.

    Raises ConfigError for another option beside them, but for those of ``also``.
    """
    if options.ledger is None and options.machine is None:
        return False
    for action in options.parser._actions:
        given_here = getattr(options, action.dest, action.default) != action.default
        if given_here and action.dest not in ("ledger", "machine", "output_dir", "json", *also):
            option = action.option_strings[-1]
            raise ConfigError(f"{option} is about measuring, and --ledger and --machine measure nothing: leave it out")
    return True


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Options by name, as keyword arguments; those that are absent are left out."""
    return {name: getattr(options, name) for name in names if name in options}


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """How a question is asked: those of ``SETTINGS`` that are given. Raises ConfigError for no share as resolution."""
    found = {name: value for name, value in given(options, *SETTINGS).items() if value is not None}
    return found | ({"resolution": percent(found["resolution"])} if "resolution" in found else {})


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values for JSON, which has no number that is not finite: what is unknown is null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def tell(options: argparse.Namespace, values: Any, lines: Iterable[object]) -> None:
    """Print an answer: ``values`` as JSON where that is asked for, else ``lines``."""
    print(*([json.dumps(values, indent=1)] if options.json else lines), sep="\n")


def tracker_chosen(option: str | None) -> str | None:
    """The tracker that the option names, or comet where its key is in the environment; None is none.

    Raises ConfigError where comet is asked for and there is no key.
    """
    has_key = bool(os.environ.get(KEY_VARIABLE))
    if option == "comet" and not has_key:
        raise ConfigError(
            f"--tracker comet needs your key in the environment variable {KEY_VARIABLE}: set it, or give "
            "--tracker comet-offline for an archive"
        )
    name = option or ("comet" if has_key else "none")
    return None if name == "none" else name
