"""The command that predicts steps with more ranks than were measured, from its options to an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, whole


def add_options(subparsers: Any) -> None:
    """Add the command to the command line."""
    predict = subparsers.add_parser("predict", help="the step with numbers of ranks that were not measured")
    predict.add_argument("--world-sizes", metavar="N,N,...", help="numbers of ranks (default: 2,4,8,...,1024)")
    predict.add_argument(
        "--ranks-per-node",
        type=int,
        metavar="N",
        help="ranks on a host (default: as measured on several hosts, else all on one)",
    )
    predict.add_argument(
        "--batch-size", type=int, help="global batch that the ranks share (default: each keeps the largest measured)"
    )
    predict.add_argument("--algorithm", default="ring", help="of the all-reduce: ring (the default) or tree")
    predict.add_argument("--ledger", nargs="+", metavar="FILE", help="records to read (default: your own ledger)")
    predict.add_argument("--machine", metavar="NAME", help="whose records: a name, a part of it, or a key")
    predict.add_argument("--output-dir", help="folder whose ledger is read (default: this checkout)")
    predict.add_argument("--json", action="store_true", help="print JSON")
    predict.set_defaults(command=predict_command)


def predict_command(options: argparse.Namespace) -> int:
    """Print what the ledger's records predict; refuse where they do not suffice."""
    from ddpm_lab.explain import predicted  # noqa: PLC0415 - commands load what they need
    from ddpm_lab.explain.frames import SCALING, chosen, study  # noqa: PLC0415
    from ddpm_lab.ledger import read_all  # noqa: PLC0415
    from ddpm_lab.planning import LEDGER, output_folder  # noqa: PLC0415

    sizes = _world_sizes(options.world_sizes) or list(predicted.WORLD_SIZES)
    for name in ("ranks_per_node", "batch_size"):
        if (value := getattr(options, name)) is not None:
            whole(f"--{name.replace('_', '-')}", value, 1)
    output = output_folder(options.output_dir)
    files = [Path(f).expanduser() for f in options.ledger or [output / LEDGER]]
    if options.ledger is None:  # nothing measured is what the refusal below is about
        files = [f for f in files if f.exists()]
    records, damaged = read_all(files, lambda heads: chosen(heads, SCALING, machine=options.machine))
    for line in damaged:
        print(f"note: {line}")
    answer = study(records, SCALING, machine=options.machine, output_dir=output)
    found = predicted.basis(answer, algorithm=options.algorithm, ranks_per_host=options.ranks_per_node)
    shown = predicted.predictions(found, sizes, options.batch_size)
    if options.json:
        rows = [p if isinstance(p, str) else dataclasses.asdict(p) for p in shown.values()]
        print(json.dumps(dict(zip(shown, rows, strict=True)), indent=1))
        return 0
    print(predicted.table(shown).to_string(index=False))
    print(found.assumptions(), predicted.check(found), predicted.rule(), sep="\n")
    print(f"Predicted from records of {answer.hardware}, {answer.date}; nothing of this was measured.")
    return 0


def _world_sizes(text: str | None) -> list[int]:
    if text is None:
        return []
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"--world-sizes is {text!r}: give numbers of ranks with commas between, such as 2,8,64")
    return [int(word) for word in words]
