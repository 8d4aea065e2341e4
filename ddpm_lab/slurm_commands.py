"""The commands of ``ddpm-lab slurm``: hand work to a cluster, bring its results together, read its logs."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.files import LEDGER, expanded, output_folder
from ddpm_lab.options import add, given, tell

OUTPUTS = "outputs"


def add_options(subparsers: Any, lab: argparse.ArgumentParser) -> None:
    """Add the commands to the command line ``lab``, which also reads the commands that jobs run."""
    slurm = subparsers.add_parser("slurm", help="on a SLURM cluster: submit jobs, collect results, read logs")
    commands = slurm.add_subparsers(title="commands", required=True, metavar="COMMAND")

    submit = commands.add_parser("submit", help="submit a command of the lab as a job, or an array of configurations")
    submit.add_argument("--nodes", type=int, default=1, metavar="N", help="machines of a job (default: 1)")
    submit.add_argument("--gpus-per-node", type=int, default=0, metavar="G", help="default: 0, on the CPUs")
    submit.add_argument("--time", help="time limit as SLURM writes it, such as 2:00:00 (default: the job script's)")
    submit.add_argument("--partition", help="partition of the cluster (default: the site's)")
    submit.add_argument("--account", help="account that pays (default: the site's)")
    submit.add_argument("--name", default="ddpm-lab", help="name of the job (default: ddpm-lab)")
    submit.add_argument(
        "--array", nargs="+", default=[], metavar="FILE.toml", help="a task for each file, or for each [[task]] in it"
    )
    submit.add_argument(
        "--requeue", action="store_true", help="a train job that saved before its time limit goes back into the queue"
    )
    submit.add_argument("--folder", help="folder that receives a folder for this submission (default: outputs)")
    add(submit, "json")
    submit.add_argument("words", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="such as: -- run amp")
    submit.set_defaults(command=submit_command, lab=lab)

    collect = commands.add_parser("collect", help="results of jobs into the ledger; jobs that failed become rows")
    collect.add_argument("folder", nargs="?", metavar="FOLDER", help="of one submission or of many (default: outputs)")
    add(collect, "output-dir", help="folder whose ledger receives the records (default: this checkout)")
    add(collect, "json")
    collect.set_defaults(command=collect_command)

    logs = commands.add_parser("logs", help="a summary table and speed-ups from the output files of jobs")
    logs.add_argument("logs", nargs="+", metavar="LOG", help="output files, such as outputs/slurm-*.out")
    logs.add_argument("--csv", metavar="FILE", help="write the table as CSV")
    add(logs, "json")
    logs.set_defaults(command=logs_command)


def _outputs(folder: str | None) -> Path:
    return expanded(folder).absolute() if folder else output_folder(None) / OUTPUTS


def submit_command(options: argparse.Namespace) -> int:
    """Check every task as the job will read it, then submit."""
    from ddpm_lab.slurm import Request, submit, tasks_of  # noqa: PLC0415 - commands load what they need

    words = options.words[1:] if options.words[:1] == ["--"] else options.words
    tasks = tasks_of(words, [expanded(f) for f in options.array])
    for task in tasks:
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                options.lab.parse_args([*task.arguments, "--output-dir=results"])
        except SystemExit as end:
            where = f" from {task.configuration}" if task.configuration else ""
            why = said.getvalue().strip().removeprefix("ddpm-lab: ") or "it asks for help only"
            raise ConfigError(f"the command {shlex.join(task.arguments)}{where} cannot be run: {why}") from end
    request = Request(**given(options, "nodes", "gpus_per_node", "time", "partition", "account", "name"))
    done = submit(tasks, request, _outputs(options.folder), requeue=options.requeue)
    count = f" with {len(done.tasks)} tasks" if len(done.tasks) > 1 else ""
    collects = shlex.join(["ddpm-lab", "slurm", "collect", str(done.folder)])
    values = {"job_id": done.job_id, "tasks": len(done.tasks), "folder": str(done.folder)}
    lines = [f"job {done.job_id}{count}: {done.folder}", f"{collects} brings its results into the ledger"]
    tell(options, values, lines)
    return 0


def collect_command(options: argparse.Namespace) -> int:
    """Bring results together; 1 if a job failed."""
    from ddpm_lab.slurm_collect import collect  # noqa: PLC0415

    output = output_folder(options.output_dir)
    collected = collect(_outputs(options.folder), output)
    if options.json:
        rows = [
            {
                "job_id": one.job_id,
                "command": list(one.arguments),
                "results": str(one.results),
                "status": one.ending.status,
                "reason": one.ending.reason,
                "state": one.ending.state,
                "records": one.found,
                "added": one.added,
                "log_tail": list(one.log_tail),
            }
            for one in collected
        ]
        print(json.dumps({"ledger": str(output / LEDGER), "jobs": rows}, indent=1))
    else:
        for one in collected:
            status = "" if one.ending.status in (None, "ok") else f"{one.ending.status}: "
            print(f"job {one.job_id}, {shlex.join(one.arguments)}: {status}{one.ending.reason}")
            print(f"  {one.found} records, {one.added} of them new, from {one.results}")
            if one.failed:
                print(*(f"  | {line}" for line in one.log_tail), sep="\n")
        print(f"records: {output / LEDGER}")
    return int(any(one.failed for one in collected))


def logs_command(options: argparse.Namespace) -> int:
    """Print the table and the speed-ups; 1 if no log told of a run."""
    from ddpm_lab.explain import summary  # noqa: PLC0415
    from ddpm_lab.slurm_logs import read_log  # noqa: PLC0415

    rows = [row for log in options.logs for row in read_log(expanded(log))]
    summary.show(rows, [summary.speed_ups(rows)], csv=options.csv, as_json=options.json)
    if any(row.found for row in rows):
        return 0
    print("ddpm-lab: no log tells of a run that ended", file=sys.stderr)
    return 1
