"""What commands have in common: their parser, the options that several have, and how an answer is printed."""

import argparse
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

from ddpm_lab import declared
from ddpm_lab.checks import ConfigError, choice, did_you_mean, percent
from ddpm_lab.config import OptimizerConfig, RunConfig
from ddpm_lab.explain.bands import DEFAULT, NAMED
from ddpm_lab.output import printable, say
from ddpm_lab.plan import PRESETS

KEY_VARIABLE = "COMET_API_KEY"
COMET = f"Comet ML, or into an archive for it (default: comet where {KEY_VARIABLE} is set, else none)"
TABLES = f"{', '.join(NAMED)}, or your own, such as good=75%,fair=50%,poor=0 (default: {DEFAULT})"


def _of(text: str, kind: Any = str, **how: Any) -> dict[str, Any]:
    """What argparse is told of an option; one that is a bool takes no value."""
    return {"help": text, **({"action": "store_true"} if kind is bool else {"type": kind}), **how}


NUMBERS = partial(declared.comma_separated, int)
OPTIONS: dict[str, dict[str, Any]] = {
    # how much is measured, on what
    "preset": _of(f"how much is run: {', '.join(PRESETS)} (default: quick)"),
    "minutes": _of("time budget", float),
    "sets": _of("sets per comparison (default: what the time gives, at least 4)", int),
    "resolution": _of("smallest difference to be found, such as 2% (default: what the time gives)", metavar="SHARE"),
    "cores": _of("CPU cores to measure with (default: those that other processes leave free)", int, metavar="N"),
    "parameters": _of("of a network of your own, in place of --network", int, metavar="COUNT"),
    "workload": _of("a training of your own (docs/your_own_model.md)", metavar="MODULE:FUNCTION"),
    "batch-sizes": _of("images of a step (default: those of 16,32,64,128 that fit)", NUMBERS, metavar="A,B,..."),
    "ranks": _of("one rank alone; several; or several unless one is enough", choices=("single", "multi", "auto")),
    "data": _of("images: a folder, an archive, or synthetic (the default)"),
    "held-out": _of("images never to train on (default: 5 % of the data)", metavar="FOLDER"),
    "skip-bad": _of("leave damaged images out, and say how many", bool),
    # compare, check
    "against": _of("measure A as it is in this repository against a branch, tag or commit", metavar="REVISION"),
    "per-step": _of("of command lines: images of a step (of A and of B)", NUMBERS, metavar="N[,M]"),
    "optimizer": _of("of command lines: class of the optimizer whose steps count (default: the first)", metavar="NAME"),
    "as-is": _of("of command lines: set neither threads nor memory handling", bool),
    "gate": _of("exit 1 if B is slower, not only if it fails: a gate", bool),
    "threshold": _of("a gate that fails what is surely slower by more (with --against: 3%)", metavar="SHARE"),
    "strict": _of("with a gate: exit 4 where the answer is inconclusive", bool),
    "instrument": _of("measure what it can resolve: noise, drift, and a planted slowdown of 5 %", bool),
    # train, sample
    "config": _of("TOML file of settings of RunConfig and a table [train]", metavar="FILE"),
    "no-probe": _of("take settings by the kind of processor, and try none (20 s, once)", bool),
    "count": _of("how many images, at most 1000000", int, metavar="N", required=True),
    "grid": _of("write all images as one, grid.png, too", bool),
    "batch-size": _of("images that a rank makes at once (default: 64)", int),
    # results
    "ledger": _of("measure nothing, and read these records", nargs="+", metavar="FILE"),
    "machine": _of("whose records to read: a name, a part of it, or a key", metavar="NAME"),
    "bands": _of(f"names of parallel efficiency: {TABLES}", metavar="TABLE"),
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
}
OF_TRAINING = declared.options(OptimizerConfig) | declared.options(RunConfig)
"""Options that are settings of these, by field; they are checked where a configuration is made."""
SEVERAL = "ledgers (.jsonl), folders of `train`, logs of jobs (default: your own ledger)"
SIDE = "module:function, a TOML file of settings, or a command line in quotes"
POSITIONALS: dict[str, dict[str, Any]] = {
    "experiments": _of("such as amp: see below", nargs="+", metavar="EXPERIMENT"),
    "baseline": _of(f"{SIDE}: the side that is 1; with --against both sides", nargs="?", metavar="A"),
    "candidate": _of(f"{SIDE}: the side whose speed is asked for", nargs="?", metavar="B"),
    "source": _of("a folder of PNG or JPEG images, train.7z, cifar-10-python.tar.gz, or synthetic"),
    "dest": _of("folder to make"),
    "checkpoint": _of("a file of checkpoints/ in the folder of a run", metavar="CHECKPOINT"),
    "sources": _of(f"{SEVERAL}; or two runs: folders, TOML files", nargs="*", default=[], metavar="SOURCE"),
    "words": _of("a command with its options", nargs=argparse.REMAINDER, metavar="COMMAND ..."),
    "logs": _of("logs of jobs (default: slurm-*.out in this folder)", nargs="*", default=[], metavar="LOG"),
}
USUAL = {
    **{"device": "the GPU where there is one", "network": "the preset's choice for this machine", "nodes": 1},
    **{"seed": 0, "image_size": 32, "world_size": "1; after rank, every process of the job"},
}
"""What ``OF_TRAINING`` are where nothing else is said: their help tells it."""
COMMON = "preset data network workload minutes output-dir held-out skip-bad"
"""Options of ``run`` and of ``report``, which does the same with notebooks."""
SETTINGS = (*COMMON.replace("-", "_").split(), "sets", "resolution", "device", "image_size", "seed", "oversubscribe")
"""Options that are settings of every question, of the same name."""


class Options(argparse.Namespace):
    """What was given on the command line; all else is None, so that each default stands in one place."""

    def __getattr__(self, name: str) -> Any:
        return None


class Parser(argparse.ArgumentParser):
    """Refuses in one line, like everything else here; the usage is what --help is for."""

    def __init__(self, **how: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(**how, allow_abbrev=False, formatter_class=formatter, argument_default=argparse.SUPPRESS)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return Options(**vars(super().parse_args(args, namespace)))

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse what a command does not know by the command's own name; argparse would leave it to the program."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None:
            choice(f"argument {'/'.join(action.option_strings) or action.metavar}", value, action.choices)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"ddpm-lab: {printable(message)}; see {self.prog} --help\n")


class Command(NamedTuple):
    """A command: what runs it, an example of it, and its options.

    ``options`` are names of ``OPTIONS``, ``POSITIONALS`` and ``OF_TRAINING``; ``here`` is the help of some of them in
    this command, or of a setting its default; ``more`` adds options for the words that were typed after its name.
    """

    run: Callable[[argparse.Namespace], int]
    example: str
    options: str
    here: Mapping[str, Any] = {}
    more: Callable[[Parser, Sequence[str]], None] | None = None

    def fill(self, parser: Parser, words: Sequence[str]) -> None:
        parser.epilog = f"example: ddpm-lab {self.example}"
        parser.set_defaults(command=self.run, parser=parser)
        for name in self.options.split():
            add(parser, name, self.here.get(name))
        if self.more:
            self.more(parser, words)


def add(parser: argparse._ActionsContainer, name: str, here: Any = None) -> None:
    """Add an option or a positional to a command; ``here`` replaces its help, or more that argparse is told."""
    option = POSITIONALS.get(name) or OPTIONS.get(name)
    if option is None:
        declared.add_options(parser, [replace(OF_TRAINING[name], default=here or USUAL.get(name))])
    else:
        how = {**option, **({"help": here} if isinstance(here, str) else here or {})}
        how["help"] = how["help"].replace("%", "%%")
        parser.add_argument(*([name] if name in POSITIONALS else [*how.pop("short", ()), f"--{name}"]), **how)


def refuse_others(options: argparse.Namespace, *able: str, why: str) -> None:
    """Raise ConfigError for an option that is not among those that have an effect, as ``why`` says."""
    for action in options.parser._actions:
        if action.dest in options and action.dest not in (*able, "debug"):
            raise ConfigError(f"{why}, and {action.option_strings[-1]} has no effect there: leave it out")


def given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Options by name, as keyword arguments; those that are absent are left out."""
    return {name: getattr(options, name) for name in names if name in options}


def asked(options: argparse.Namespace) -> dict[str, Any]:
    """How a question is asked: those of ``SETTINGS`` that are given. Raises ConfigError for no share as resolution."""
    found = given(options, *SETTINGS)
    return found | ({"resolution": percent(found["resolution"])} if "resolution" in found else {})


def tell(options: argparse.Namespace, values: Any, lines: Iterable[object]) -> None:
    """Print an answer: ``values`` as JSON where that is asked for, else ``lines``."""
    texts = [json.dumps(values, indent=1, default=str)] if options.json else lines
    say(*(line for text in texts for line in str(text).split("\n")))


def tracker_chosen(option: str | None) -> str | None:
    """The tracker that the option names, or comet where its key is in the environment; None is none.

    Raises ConfigError where comet is asked for and there is no key.
    """
    has_key = bool(os.environ.get(KEY_VARIABLE))
    if option == "comet" and not has_key:
        advice = "set it, or give --tracker comet-offline for an archive"
        raise ConfigError(f"--tracker comet needs your key in the environment variable {KEY_VARIABLE}: {advice}")
    name = option or ("comet" if has_key else "none")
    return None if name == "none" else name
