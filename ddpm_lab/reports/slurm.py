"""SLURM jobs: submit commands, ask how they stand, read the line that each prints at its end, collect their records.

``scripts/slurm.sh`` runs a command; job N leaves its log ``slurm-N.out`` and its results ``slurm-N/`` side by side.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import get_type_hints

from ddpm_lab.checks import ConfigError, whole
from ddpm_lab.files import CHECKOUT, LEDGER, writing
from ddpm_lab.ledger import Ledger
from ddpm_lab.record import LedgerError, RunRecord
from ddpm_lab.reports.summary import NO_SUMMARY, RUNS, Summary

SCRIPT = CHECKOUT / "scripts" / "slurm.sh"
LOGS = "slurm-*.out"
FAILED = ("BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
CORES_PER_GPU = 4
_ASK = (
    ("squeue", "--noheader", "--states=all", "--format=%A|%T"),
    ("sacct", "--noheader", "--parsable2", "--allocations", "--format=JobIDRaw,State"),
)
_KINDS = get_type_hints(Summary)


def tasks_of(words: Sequence[str]) -> list[list[str]]:
    """The command of each task: what stands before the first ``--``, with the words after one of them."""
    marks = [i for i, word in enumerate(words) if word == "--"]
    parts = [list(words[i + 1 : j]) for i, j in pairwise((-1, *marks, len(words)))]
    return [parts[0] + more for more in parts[1:] or [[]]]


def submit(words: Sequence[str], *, nodes: int = 1, gpus_per_node: int = 0, sbatch: str = "") -> str:
    """Submit a command; the id of its job, or of its array.

    In ``words`` each ``--`` begins the options of one task of an array; ``nodes`` are machines of a job, with
    ``gpus_per_node`` (0: on the CPUs); ``sbatch`` are further options, as a shell would read them. Raises ConfigError
    where a number is wrong, there is no SLURM or no job script here, or sbatch refused the job.
    """
    whole("--nodes", nodes, 1)
    whole("--gpus-per-node", gpus_per_node, 0)
    if (program := shutil.which("sbatch")) is None:
        raise ConfigError("there is no sbatch here: submit from a login node of a SLURM cluster")
    if not SCRIPT.is_file():
        raise ConfigError(f"there is no job script {SCRIPT}: submit with the lab of a checkout")
    options = [f"--nodes={nodes}", f"--cpus-per-task={CORES_PER_GPU * max(1, gpus_per_node)}"]
    options += [f"--gpus-per-node={gpus_per_node}"] if gpus_per_node else []
    options += [f"--array=0-{words.count('--') - 1}"] if "--" in words else []
    try:
        options += shlex.split(sbatch)
    except ValueError as error:
        raise ConfigError(f"--sbatch is {sbatch!r}: {error}; close every quotation mark") from error
    done = _run([program, "--parsable", *options, str(SCRIPT), *words])
    if done.returncode:
        reason = (done.stderr.strip() or "no reason given").splitlines()[-1]
        raise ConfigError(f"sbatch refused the job: {reason.removeprefix('sbatch: ')}")
    return done.stdout.strip().splitlines()[-1].partition(";")[0]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    told = {**os.environ, "DDPM_LAB_PYTHON": sys.executable}
    return subprocess.run(command, env=told, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)


def states(jobs: Iterable[str]) -> dict[str, str]:
    """States of jobs, such as RUNNING, by id; jobs that neither squeue nor sacct knows are absent."""
    ids = ",".join(job for job in jobs if job.isdecimal())
    found: dict[str, str] = {}
    for name, *options in _ASK:
        if ids and (path := shutil.which(name)):
            told = _run([path, *options, f"--jobs={ids}"]).stdout
            lines = (line.partition("|") for line in told.splitlines())
            found |= {job: state.split()[0] for job, _, state in lines if state.strip()}  # "CANCELLED by 1000"
    return found


def job_of(log: Path) -> str:
    """The id in the name of a job's log."""
    return log.stem.removeprefix("slurm-")


def read_log(log: Path, state: str | None = None) -> list[Summary]:
    """The runs in the log of a job, or one without numbers that notes its last line.

    A ``state`` other than COMPLETED is noted beside them. Raises ConfigError if the log cannot be read.
    """
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the log {log}: {error.strerror}; give logs of SLURM jobs") from error
    notes = [state.lower().replace("_", " ")] if state not in (None, "COMPLETED") else []
    runs = [run for line in lines for run in _runs(line)]
    if not runs:
        said = [line for line in lines if line.strip() and not line.startswith("srun: ")]  # it hides what has failed
        last = said[-1].strip() if said else "none"
        notes += [NO_SUMMARY, f"its last line: {''.join(c for c in last[:200] if c.isprintable())}"]
        runs = [Summary(job_id=job_of(log))]
    return [dataclasses.replace(r, log=str(log), note="; ".join(filter(None, [r.note, *notes]))) for r in runs]


def _runs(line: str) -> list[Summary]:
    """The runs in a line of a log; none if it is another line, damaged or cut off."""
    try:
        told, _ = json.JSONDecoder().raw_decode(line, line.index(f'{{"{RUNS}": '))
        runs = [Summary(**run) for run in told[RUNS]]
    except (ValueError, TypeError, RecursionError):
        return []
    values = [(name, value) for run in runs for name, value in dataclasses.asdict(run).items()]
    sound = all(isinstance(v, _KINDS[name]) and (not isinstance(v, int | float) or v >= 0) for name, v in values)
    return runs if sound else []


def append_new(logs: Sequence[Path], path: Path) -> int:
    """Append the records of jobs that a ledger does not hold yet; how many there were.

    May be called while the jobs run, and again. Raises LedgerError if the ledger cannot be written.
    """
    with writing(path.parent, LedgerError):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = (path.parent / ".collecting").open("w")
    with lock:  # what one process has looked for, another may be adding
        fcntl.flock(lock, fcntl.LOCK_EX)
        held = {_text(r) for r in Ledger(path).read()[0]}
        new: dict[str, RunRecord] = {}
        for log in logs:
            records, damaged = Ledger(log.with_suffix("") / LEDGER).read()
            print(*damaged, sep="\n", end="\n" * bool(damaged), file=sys.stderr)
            new |= {text: r for r in records if (text := _text(r)) not in held}
        if new:
            Ledger(path).append(new.values())
    return len(new)


def _text(record: RunRecord) -> str:
    return json.dumps(record.as_dict(), sort_keys=True)
