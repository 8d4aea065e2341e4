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
    add(parser, "device", "output-dir", "json")
    parser.set_defaults(command=strategy_command)


def strategy_command(options: argparse.Namespace) -> int:
    """Say which, and how to measure it."""
    from ddpm_lab.questions.strategy import strategy  # noqa: PLC0415 - commands load what they need

    whole_options(vars(options), batch_size=1, parameters=1)
    found = strategy(**given(options, "network", "parameters", "batch_size", "device", "output_dir"))
    carried = {"--device": options.device, "--output-dir": options.output_dir}
    words = " ".join(f"{name} {shlex.quote(value)}" for name, value in carried.items() if value)
    tell(options, plain(dataclasses.asdict(found)), [found.text(words)])
    return 0
