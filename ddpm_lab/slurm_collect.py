"""Bring the results of submitted jobs together: their records into one ledger, and a row for each job that failed."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig, digest
from ddpm_lab.files import LEDGER, writing
from ddpm_lab.ledger import Head, Ledger, load
from ddpm_lab.plan import Plan
from ddpm_lab.record import JOB, Environment, LedgerError, Machine, RunRecord
from ddpm_lab.slurm import STATE, SUBMISSION, Submission, read_submission
from ddpm_lab.slurm_jobs import Ending, SlurmSilentError, Told, ask, ending, tail

SET_ROLES = ("baseline", "twin", "candidate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What came of a task: how it stands, records found in its ledger, those that were new, and its log's end."""

    job_id: str
    arguments: tuple[str, ...]
    results: Path
    ending: Ending
    found: int
    added: int
    log_tail: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """Whether it ended without reaching its end."""
        return self.ending.status not in (None, "ok")


def submissions(folder: Path) -> list[Submission]:
    """The submission that a folder is, or those in it, oldest first. Raises ConfigError if there is none."""
    if (folder / SUBMISSION).is_file():
        return [read_submission(folder)]
    found = [read_submission(path.parent) for path in sorted(folder.glob(f"*/{SUBMISSION}"))]
    if not found:
        raise ConfigError(f"{folder} has no submission: give a folder that slurm submit made, or one that holds them")
    return found


def collect(folder: Path, output: Path) -> list[Collected]:
    """Append to the ledger in ``output`` what the jobs in ``folder`` have measured and the ledger lacks.

    Records come in whole sets; a job that failed, was cancelled or ran out of time becomes a record of the role
    ``job``. What the ledger holds is not added again, so that this may be called while jobs run, and after. Raises
    ConfigError or LedgerError.
    """
    ledger = Ledger(output / LEDGER)
    collected: list[Collected] = []
    found = submissions(folder)
    with _one_at_a_time(ledger.path.parent):
        for submission in found:
            collected += _collect(submission, ledger)
    return collected


@contextlib.contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Wait for others who collect into the same ledger: what one has looked for, the other may be adding."""
    with writing(folder, LedgerError):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".collecting").open("w")
    with file:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _collect(submission: Submission, ledger: Ledger) -> Iterator[Collected]:
    if submission.job_id is not None:  # else sbatch was interrupted: nothing was accepted
        told: dict[str, Told] = {}
        silent = ""
        try:
            told = ask(submission.job_id)
        except SlurmSilentError as error:
            silent = str(error)
        for number in range(len(submission.tasks)):
            yield _task(submission, number, told, silent, ledger)


def _task(submission: Submission, number: int, told: dict[str, Told], silent: str, ledger: Ledger) -> Collected:
    results, job_id = submission.results(number), submission.task_id(number)
    log_tail = tail(submission.log(number))
    stands = ending(told.get(job_id), silent, results / STATE, log_tail)
    records = whole_sets(results / LEDGER)
    rows = [_row(submission, number, stands, records, log_tail)] if stands.status not in (None, "ok") else []
    new = missing([*records, *rows], ledger)
    if new:
        ledger.append(new)
    return Collected(
        job_id=job_id,
        arguments=submission.tasks[number].arguments,
        results=results,
        ending=stands,
        found=len(records),
        added=sum(r.role != JOB for r in new),
        log_tail=tuple(log_tail),
    )


def whole_sets(path: Path) -> list[RunRecord]:
    """The records of a ledger without those of a set that was not written as a whole.

    The lines of a set are written together. Where one is damaged, as by a full disk or while it is being written, its
    set lacks a member (that of the line before it, where it does not say); so does one without baseline and twin,
    unless it is the row of a baseline that failed, beside which nothing is kept.
    """
    heads, damaged = Ledger(path).heads()
    records, more = load(heads)
    bad = {(d.path, d.line) for d in more}
    lines = {h.line: r for h, r in zip([h for h in heads if (h.path, h.line) not in bad], records, strict=True)}
    torn = {
        _set_of(path, d.line) or (lines[d.line - 1].set_id if d.line - 1 in lines else "") for d in (*damaged, *more)
    }
    roles: dict[str, set[str]] = {}
    for r in records:
        roles.setdefault(r.set_id, set()).add(r.role)
    failed = {r.set_id for r in records if r.role in ("baseline", "twin") and r.status != "ok"}
    whole = {s for s, found in roles.items() if {"baseline", "twin"} <= found} | failed
    torn |= {s for s, found in roles.items() if found & set(SET_ROLES)} - whole
    return [r for r in records if r.role not in SET_ROLES or r.set_id not in torn]


def _set_of(path: Path, number: int) -> str | None:
    """The set that a line names at its beginning, however it goes on."""
    with path.open("rb") as file:
        line = next(itertools.islice(file, number - 1, None), b"")
    named = re.match(rb'\{"set_id":"([^"\\]*)"', line)
    return named[1].decode(errors="replace") if named else None


def missing(records: Sequence[RunRecord], ledger: Ledger) -> list[RunRecord]:
    """Those of the records that a ledger does not hold; of jobs' rows, those of no job that has one."""
    wanted = {_told(r) for r in records}

    def alike(heads: Sequence[Head]) -> Iterable[Head]:
        return [h for h in heads if _told(h) in wanted or h.role == JOB]

    held = {_identity(r) for r in ledger.read(alike)[0]}
    new = {_identity(r): r for r in records}
    return [r for identity, r in new.items() if identity not in held]


def _told(record: RunRecord | Head) -> tuple[object, ...]:
    """What the head of a line tells of its record: a ledger is searched by it before anything is read whole."""
    return record.experiment, record.role, record.cohort, record.date


def _identity(record: RunRecord) -> str:
    return record.set_id if record.role == JOB else digest(json.loads(json.dumps(record.as_dict())))


def _row(
    submission: Submission, number: int, stands: Ending, records: Sequence[RunRecord], log_tail: Sequence[str]
) -> RunRecord:
    """The record of a job that failed. Where it ran is known only if it measured something."""
    task, job_id = submission.tasks[number], submission.task_id(number)
    ended = datetime.now().astimezone().isoformat(timespec="seconds")
    unknown = Environment(
        machine=Machine(cpu="unknown", usable_cores=0),
        hostname=None,
        python="",
        packages={},
        cuda=None,
        gpu_uuids=(),
        ram_bytes=None,
        kernel="",
        slurm_job_id=job_id,
        git_commit=None,
        load_before=None,
        date=ended,
    )
    names = [word for word in task.arguments if not word.startswith("-")]
    return RunRecord(
        set_id=f"slurm-{job_id}-{submission.date}",
        experiment=names[1] if names[0] == "run" and len(names) > 1 else names[0],
        family=f"SLURM job {job_id}",
        role=JOB,
        label=shlex.join(task.arguments),
        config=RunConfig(),
        baseline_id="",
        plan=Plan(),
        environment=records[-1].environment if records else unknown,
        code_version="",
        data_name="",
        status=str(stands.status),
        reason=stands.reason,
        witness={
            "slurm_job_id": job_id,
            "state": stands.state,
            "exit_code": stands.exit_code,
            "arguments": list(task.arguments),
            "configuration": task.configuration,
            "results": str(submission.results(number)),
            "log_tail": list(log_tail),
        },
    )
