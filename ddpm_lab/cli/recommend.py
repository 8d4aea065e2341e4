"""The command that searches the fastest configuration, from its options to an exit code."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ddpm_lab.checks import ConfigError, percent
from ddpm_lab.cli.options import add, command, given, plain

MINUTES = {"quick": 10.0, "full": 60.0}
"""Where no budget is given."""


def add_options(subparsers: Any) -> None:
    """Add the command to the command line."""
    summary = "Search the fastest configuration whose quality is not worse."
    parser = command(subparsers, "recommend", summary, recommend_command, "recommend --minutes 10")
    add(parser, "preset")
    add(parser, "minutes", help="time budget (default: 10; 60 in full)")
    add(parser, "data", "held-out", "skip-bad", "network")
    add(parser, "workload", help="a training of your own in place of the lab's DDPM")
    add(parser, "device")
    add(parser, "batch-size", help="global batch size to set out from (default: the preset's)")
    parser.add_argument(
        "--only",
        action="append",
        metavar="NAME=VALUE,...",
        help="hold a setting to these values, such as precision=bf16 or loader=packed,files-2 (may be repeated); the "
        "first is where the search sets out; settings: precision, memory, compile, ranks, "
        "loader, batch, and on a CPU freed_memory",
    )
    parser.add_argument(
        "--any-batch",
        action="store_true",
        help="search any batch size, although another is another training (default: those that trials call not worse)",
    )
    parser.add_argument(
        "--seeds", type=int, help="trials of what is found, from so many seeds (default: none; full: 8)"
    )
    parser.add_argument("--images", type=int, help="images that each trial trains on (default: the preset's)")
    add(parser, "sets", help="sets that measure again what is found (default: the preset's)")
    add(parser, "resolution", help="or until a difference such as 2%% would be found")
    parser.add_argument(
        "--train-images", type=int, metavar="N", help="of the full training that is projected (default: 800,000 steps)"
    )
    add(parser, "ledger", help="measure nothing, and read these records")
    add(parser, "machine", help="whose records to read: a name, a part of it, a key, or all")
    add(parser, "output-dir", "json")


def recommend_command(options: argparse.Namespace) -> int:
    """Search and answer; 1 where nothing could be recommended."""
    from ddpm_lab.questions import experiments  # noqa: PLC0415 - commands load what they need

    settings = given(options, "preset", "data", "held_out", "skip_bad", "network", "workload", "device", "any_batch")
    settings |= given(options, "seeds", "images", "sets", "train_images", "ledger", "machine", "output_dir")
    reads = options.ledger is not None or options.machine is not None
    if options.minutes is not None and not options.minutes > 0:
        raise ConfigError(f"minutes is {options.minutes!r}: give a number above 0")
    minutes = options.minutes if options.minutes is not None or reads else MINUTES.get(options.preset)
    try:
        answer = experiments.recommendation(
            minutes=minutes,
            resolution=percent(options.resolution) if options.resolution else None,
            global_batch_size=options.batch_size,
            only=_only(options.only or ()),
            **settings,
        )
    except ModuleNotFoundError as missing:
        print(f"measured; {missing.name} is not installed here: take the ledger elsewhere, ddpm-lab recommend --ledger")
        return 0
    from ddpm_lab.explain.charts.style import save  # noqa: PLC0415
    from ddpm_lab.explain.questions.recommendation import FILE  # noqa: PLC0415
    from ddpm_lab.explain.show import NAMES  # noqa: PLC0415
    from ddpm_lab.explain.table import plain as plain_table  # noqa: PLC0415

    study, found = answer.study, answer.finding
    path = study.output_dir / FILE
    if options.json:
        names = ("verdict", "status", "claim", "sets", "ratio", "low", "high", "quality")
        row = plain({name: getattr(found, name) for name in names})
        print(json.dumps({**row, "settings": None if reads else str(path)}, indent=1))
    else:
        print(plain_table(answer.table()), found.claim, sep="\n")
        if not reads:
            image = study.output_dir / "image_output" / f"{NAMES[study.experiment]}.png"
            save(answer.figure(), image)
            print(f"figure: {image}")
            if options.workload is None:  # a file is for ddpm-lab train
                print(f"settings: {path}" if path.exists() else "no search was made")
    return 0 if study.records else 1


def _only(given: Any) -> dict[str, list[str]]:
    found = {}
    for text in given:
        name, sign, values = text.partition("=")
        if not sign or not values:
            raise ConfigError(f"--only is {text!r}: give a setting and its values, such as precision=fp32,bf16")
        found[name.strip()] = [value.strip() for value in values.split(",")]
    return found
