"""Commands for several hosts: ``rank`` under torchrun, ``submit`` and ``collect`` with SLURM."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.cli.options import Command, given, tell
from ddpm_lab.files import LEDGER, expanded, output_folder
from ddpm_lab.measure import cluster
from ddpm_lab.questions.ask import questions
from ddpm_lab.reports import slurm, summary

MANY_HOSTS = ("run", "train", "sample")
"""Commands that start ranks as they are told how many."""
ONE_HOST = ("compare", "check")


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


def submit(options: argparse.Namespace) -> int:
    words = options.words[options.words[:1] == ["--"] :]
    tasks = slurm.tasks_of(words)
    for task in tasks:
        _check(task, MANY_HOSTS if options.nodes not in (None, 1) else (*MANY_HOSTS, *ONE_HOST), options.parser_of)
    job = slurm.submit(words, **given(options, "nodes", "gpus_per_node", "sbatch"))
    lines = [f"job {job}, tasks: {len(tasks)}", f"then, in this folder: ddpm-lab collect reads its logs, {slurm.LOGS}"]
    tell(options, {"job_id": job, "tasks": len(tasks)}, lines)
    return 0


def _check(task: list[str], able: Sequence[str], parser_of: Callable[[Sequence[str]], argparse.ArgumentParser]) -> None:
    """Raise ConfigError for a command that cannot be run as a job."""
    if not task:
        raise ConfigError("there is no command: give it after two dashes, such as submit -- run amp")
    choice("the command of a job", task[0], able)
    if any(word.partition("=")[0] == "--output-dir" for word in task):
        raise ConfigError("--output-dir: results of job N go to slurm-N, where collect finds them; leave it out")
    refusal = io.StringIO()
    try:
        with contextlib.redirect_stderr(refusal), contextlib.redirect_stdout(io.StringIO()):
            parsed = parser_of(task).parse_args([*task, "--output-dir=results"])
    except SystemExit as end:
        reason = refusal.getvalue().strip().removeprefix("ddpm-lab: ") or "it only shows help"
        raise ConfigError(f"the command {shlex.join(task)} cannot be run: {reason}") from end
    for name in parsed.experiments or ():
        choice("experiment", name, questions())


def collect(options: argparse.Namespace) -> int:
    """Exit code 1 if a job failed."""
    logs = [expanded(log) for log in options.logs] or sorted(Path.cwd().glob(slurm.LOGS))
    if not logs:
        raise ConfigError(f"{Path.cwd()} has no {slurm.LOGS}: go where the jobs were submitted, or give their logs")
    states = slurm.states(map(slurm.job_of, logs))
    ledger = output_folder(options.output_dir) / LEDGER
    rows = [row for log in logs for row in slurm.read_log(log, states.get(slurm.job_of(log)))]
    added = slurm.append_new(logs, ledger)
    summary.show(summary.compared(rows), csv=options.csv, as_json=options.json)
    print(f"{added} new records: {ledger}", file=sys.stderr)
    return int(any(states.get(slurm.job_of(log)) in slurm.FAILED for log in logs))


COMMANDS = {
    "rank": Command(
        rank,
        "rank run amp (after torchrun --nnodes 2 --nproc-per-node 4 ... -m ddpm_lab)",
        "interface words",
        {"words": "run, train or sample with its options"},
    ),
    "submit": Command(
        submit,
        "submit --gpus-per-node 1 -- run amp -- --seed 0 -- --seed 1 (an array of two)",
        "nodes gpus-per-node sbatch json words",
        {"words": "the command after --; after two more dashes what each task of an array adds to it"},
    ),
    "collect": Command(collect, "collect --csv runs.csv", "logs output-dir csv json"),
}
