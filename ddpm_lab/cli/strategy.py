"""The command that says whether one rank or several should train, from its options to an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from typing import Any

from ddpm_lab.checks import whole_options
from ddpm_lab.cli.options import add, given, plain, tell
from ddpm_lab.config import NETWORKS


def add_options(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser("strategy", help="one rank or GPU, or several, for a network and a batch; and why")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--network", choices=NETWORKS, help="default: seed on a GPU, tiny on a CPU")
    size.add_argument("--parameters", type=int, metavar="COUNT", help="of a network of your own")
    add(parser, "batch-size", help="global batch size (default: 128 on a GPU, 32 on a CPU)")
    parser.add_argument(
        "--ranks",
        choices=("single", "multi", "auto"),
        help="measure one rank; one and several; or several unless the answer is single (default: measure nothing)",
    )
    add(parser, "device", "preset", "minutes")
    add(parser, "sets", help="sets to measure (default: what the time gives)")
    add(parser, "data", "output-dir", "json")
    parser.set_defaults(command=strategy_command)


def strategy_command(options: argparse.Namespace) -> int:
    """Say which, after measuring what --ranks asks for; 1 where that gave nothing or several ranks cannot be."""
    from ddpm_lab.questions import strategy  # noqa: PLC0415 - commands load what they need

    whole_options(vars(options), batch_size=1, parameters=1)
    asked = given(options, "network", "parameters", "batch_size", "device", "output_dir")
    found = strategy.strategy(**asked)
    completed = True
    if options.ranks:
        settings = given(options, "preset", "minutes", "sets", "data", "output_dir")
        completed = strategy.measure(found, options.ranks, **settings).completed
        found = strategy.strategy(**asked)
    carried = {"--device": options.device, "--output-dir": options.output_dir}
    words = " ".join(f"{name} {shlex.quote(value)}" for name, value in carried.items() if value)
    tell(options, plain(dataclasses.asdict(found)), [found.text(words)])
    return 0 if completed else 1
