"""The command that says whether one rank or several should train, from its options to an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import shlex
import sys
from typing import Any

from ddpm_lab.checks import whole_options
from ddpm_lab.config import DEVICES, NETWORKS
from ddpm_lab.plan import PRESETS


def add_options(subparsers: Any) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser("strategy", help="one rank or GPU, or several, for a network and a batch; and why")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--network", choices=NETWORKS, help="default: seed on a GPU, tiny on a CPU")
    size.add_argument("--parameters", type=int, metavar="COUNT", help="of a network of your own")
    parser.add_argument("--batch-size", type=int, help="global batch size (default: 128 on a GPU, 32 on a CPU)")
    parser.add_argument(
        "--mode",
        choices=("single", "multi", "auto"),
        help="measure one rank; one and several; or several unless the answer is single (default: measure nothing)",
    )
    parser.add_argument("--device", choices=DEVICES, help="default: the GPU where there is one")
    parser.add_argument("--preset", default="quick", help=f"how much is run: {', '.join(PRESETS)} (default: quick)")
    parser.add_argument("--minutes", type=float, help="time budget")
    parser.add_argument("--sets", type=int, help="sets to measure (default: the preset's)")
    parser.add_argument("--data", default="synthetic", help="images: a folder, an archive, or synthetic (the default)")
    parser.add_argument("--output-dir", help="folder that receives all results (default: this checkout)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=strategy_command)


def strategy_command(options: argparse.Namespace) -> int:
    """Say which, after measuring what the mode asks for; 1 where that gave nothing or several ranks cannot be."""
    from ddpm_lab import strategy  # noqa: PLC0415 - commands load what they need

    whole_options(vars(options), batch_size=1, parameters=1)
    asked = {
        "network": options.network,
        "parameters": options.parameters,
        "batch_size": options.batch_size,
        "device": options.device,
        "output_dir": options.output_dir,
    }
    found = strategy.strategy(**asked)
    completed = True
    if options.mode:
        settings = {name: getattr(options, name) for name in ("preset", "minutes", "sets", "data", "output_dir")}
        try:
            completed = strategy.measure(found, options.mode, **settings).completed
        except strategy.NoRanksError as error:
            print(f"ddpm-lab: {error}", file=sys.stderr)
            return 1
        found = strategy.strategy(**asked)
    if options.json:
        values = dataclasses.asdict(found).items()
        known = {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values}
        print(json.dumps(known, indent=1))
    else:
        given = {"--device": options.device, "--output-dir": options.output_dir}
        print(found.text(" ".join(f"{name} {shlex.quote(value)}" for name, value in given.items() if value)))
    return 0 if completed else 1
