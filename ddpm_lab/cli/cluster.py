"""Commands for several hosts: ``rank`` under torchrun, and ``collect`` after SLURM jobs."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.cli.options import Command
from ddpm_lab.files import LEDGER, expanded, output_folder
from ddpm_lab.measure import cluster
from ddpm_lab.output import say
from ddpm_lab.reports import summary

MANY_HOSTS = ("run", "train", "sample")
"""Commands that start ranks as they are told how many."""


def rank(options: argparse.Namespace) -> int:
    words, main = options.words, options.main
    choice("the command after rank", next(iter(words), None), MANY_HOSTS)
    if {"-h", "--help"} & set(words):
        return int(main(words))
    process = cluster.Process.read(os.environ)
    process.use(options.interface)
    if process.rank:
        return cluster.serve(process)
    with cluster.leading(process):
        return int(main(words))


def collect(options: argparse.Namespace) -> int:
    """Exit code 1 if a log tells of no run: its job has failed, or not ended yet."""
    logs = [expanded(log) for log in options.logs] or sorted(Path.cwd().glob(summary.LOGS))
    if not logs:
        raise ConfigError(f"{Path.cwd()} has no {summary.LOGS}: go where the jobs were submitted, or give their logs")
    ledger = output_folder(options.output_dir) / LEDGER
    rows = [row for log in logs for row in summary.read_log(log)]
    added = summary.append_new(logs, ledger)
    summary.show(summary.compared(rows), csv=options.csv, as_json=options.json)
    say(f"{added} new records: {ledger}", error=True)
    return int(not all(row.found for row in rows))


COMMANDS = {
    "rank": Command(
        rank,
        "rank run amp (after torchrun --nnodes 2 --nproc-per-node 4 ... -m ddpm_lab)",
        "interface words",
        {"words": "run, train or sample with its options"},
    ),
    "collect": Command(collect, "collect --csv runs.csv", "logs output-dir csv json"),
}
