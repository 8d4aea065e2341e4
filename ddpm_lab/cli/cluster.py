"""The commands for a SLURM cluster: ``submit`` hands it work, ``collect`` brings the results together."""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.cli.commands import MANY_HOSTS
from ddpm_lab.cli.options import add, given, tell
from ddpm_lab.files import LEDGER, expanded, output_folder

COMMANDS = (*MANY_HOSTS, "compare", "check")


def add_options(subparsers: Any, parser_of: Callable[[list[str]], argparse.ArgumentParser]) -> None:
    """Add the commands; ``parser_of`` the words of a command is what checks it before it is submitted."""
    submit = subparsers.add_parser("submit", help="submit a command of the lab as a SLURM job, or as an array of jobs")
    submit.add_argument("--nodes", type=int, default=1, metavar="N", help="machines of a job (default: 1)")
    submit.add_argument("--gpus-per-node", type=int, default=0, metavar="G", help="default: 0, on the CPUs")
    submit.add_argument("--sbatch", default="", metavar="OPTIONS", help='more: --sbatch="--time=2:00:00"')
    add(submit, "json")
    more = "such as: -- run amp; for an array: -- run amp -- --seed 0 -- --seed 1"
    submit.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help=more)
    submit.set_defaults(command=submit_command, parser_of=parser_of)

    collect = subparsers.add_parser("collect", help="records of SLURM jobs into the ledger, and a table of their runs")
    collect.add_argument("logs", nargs="*", metavar="LOG", help="logs of jobs (default: slurm-*.out in this folder)")
    add(collect, "output-dir", help="folder whose ledger receives the records (default: this checkout)")
    collect.add_argument("--csv", metavar="FILE", help="write the table as CSV")
    add(collect, "json")
    collect.set_defaults(command=collect_command)


def submit_command(options: argparse.Namespace) -> int:
    """Check every task as the job will read it, then submit."""
    from ddpm_lab.reports import slurm  # noqa: PLC0415 - commands load what they need

    words = options.words[options.words[:1] == ["--"] :]
    tasks = slurm.tasks_of(words)
    for task in tasks:
        _check(task, options)
    job = slurm.submit(words, **given(options, "nodes", "gpus_per_node", "sbatch"))
    lines = [f"job {job}, tasks: {len(tasks)}", f"then, in this folder: ddpm-lab collect reads its logs, {slurm.LOGS}"]
    tell(options, {"job_id": job, "tasks": len(tasks)}, lines)
    return 0


def _check(task: list[str], options: argparse.Namespace) -> None:
    """Raise ConfigError for a command that cannot be run as a job."""
    from ddpm_lab.questions.ask import QUESTIONS  # noqa: PLC0415

    if not task:
        raise ConfigError("there is no command: give it after two dashes, such as submit -- run amp")
    choice("the command of a job", task[0], COMMANDS if options.nodes == 1 else MANY_HOSTS)
    if any(word.partition("=")[0] == "--output-dir" for word in task):
        raise ConfigError("--output-dir: results of job N go to slurm-N, where collect finds them; leave it out")
    refusal = io.StringIO()
    try:
        with contextlib.redirect_stderr(refusal), contextlib.redirect_stdout(io.StringIO()):
            parsed = options.parser_of(task).parse_args([*task, "--output-dir=results"])
    except SystemExit as end:
        reason = refusal.getvalue().strip().removeprefix("ddpm-lab: ") or "it only shows help"
        raise ConfigError(f"the command {shlex.join(task)} cannot be run: {reason}") from end
    for name in getattr(parsed, "experiments", ()):
        choice("experiment", name, QUESTIONS)


def collect_command(options: argparse.Namespace) -> int:
    """Append the records of jobs to the ledger and show their runs; 1 if a job failed."""
    from ddpm_lab.reports import slurm, summary  # noqa: PLC0415 - commands load what they need

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
