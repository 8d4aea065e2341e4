"""The command that predicts steps with more ranks than were measured, from its options to an exit code."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
from typing import Any

from ddpm_lab.checks import whole_numbers, whole_options
from ddpm_lab.files import LEDGER, ledgers, output_folder
from ddpm_lab.options import add, plain


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
    add(predict, "batch-size", help="global batch that the ranks share (default: each keeps the largest measured)")
    predict.add_argument("--algorithm", default="ring", help="of the all-reduce: ring (the default) or tree")
    add(predict, "ledger", "machine")
    add(predict, "output-dir", help="folder whose ledger is read (default: this checkout)")
    add(predict, "json")
    predict.set_defaults(command=predict_command)


def predict_command(options: argparse.Namespace) -> int:
    """Print what the ledger's records predict; refuse where they do not suffice."""
    from ddpm_lab.experiments import read_study  # noqa: PLC0415 - commands load what they need
    from ddpm_lab.explain import predicted, predicted_words  # noqa: PLC0415
    from ddpm_lab.explain.frames import SCALING  # noqa: PLC0415

    asked = options.world_sizes
    sizes = list(predicted.WORLD_SIZES) if asked is None else whole_numbers("--world-sizes", asked)
    whole_options(vars(options), ranks_per_node=1, batch_size=1)
    output = output_folder(options.output_dir)
    files = ledgers(options.ledger, output)
    if options.ledger is None:  # nothing measured is what the refusal below is about
        files = [f for f in files if f.exists()]
    answer = read_study(files, SCALING, output, machine=options.machine)
    # What is missing belongs into the ledger that was read, where that is one the lab would write.
    written = next((f.absolute().parents[1] for f in files if f.parts[-2:] == LEDGER.parts), output)
    carried = [] if written == output_folder(None) else ["--output-dir", shlex.quote(str(written))]
    found = predicted.basis(answer, algorithm=options.algorithm, ranks_per_host=options.ranks_per_node, carried=carried)
    shown = predicted.predictions(found, sizes, options.batch_size)
    measured = predicted.beside(found, shown, options.batch_size)
    if options.json:
        rows = {n: p if isinstance(p, str) else _values(p, measured.get(n)) for n, p in shown.items()}
        print(json.dumps(rows, indent=1))
        return 0
    print(predicted_words.table(shown, measured).to_string(index=False))
    ranks = [n for n, p in shown.items() if not isinstance(p, str | predicted.Measured)]
    if not ranks:
        print(f"Measured on {answer.hardware}, {answer.date}; nothing here had to be predicted.")
        return 0
    said = (found.assumptions(max(ranks)), predicted_words.check(found), predicted_words.rule(shown))
    print(*(text for text in said if text), sep="\n")
    kept = "what is labelled measured was measured there" if measured or len(ranks) < len(shown) else ""
    print(
        f"Predicted from records of {answer.hardware}, {answer.date}; {kept or 'nothing of this was measured'}. "
        "Notebook 02_multi_gpu draws the predictions: ddpm-lab report --notebook 02_multi_gpu."
    )
    return 0


def _values(row: Any, measured: Any = None) -> dict[str, Any]:
    """Plain values, with what was measured of the same."""
    shown = plain(dataclasses.asdict(row))
    return shown if measured is None else {**shown, "measured": _values(measured)}
