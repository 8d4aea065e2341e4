"""How SLURM jobs ended: from scontrol, from sacct where there is accounting, else from what the jobs' scripts wrote."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddpm_lab.slurm_logs import ENDED_IN_LOG, text_lines

ACTIVE = (
    *("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"),
    *("RESIZING", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "RESV_DEL_HOLD"),
)
ENDED_BY_SLURM = {
    "TIMEOUT": ("timed out", "reached its time limit"),
    "DEADLINE": ("timed out", "reached its deadline"),
    "CANCELLED": ("cancelled", "was cancelled"),
    "PREEMPTED": ("cancelled", "was preempted"),
    "OUT_OF_MEMORY": ("oom", "took more memory than it had asked for"),
    "NODE_FAIL": ("crashed", "lost its node"),
    "BOOT_FAIL": ("crashed", "lost its node while it booted"),
}
FORGOTTEN = {
    "KILLED": "was killed before its script could end, and SLURM has forgotten it",
    "FORGOTTEN": "never started, and SLURM has forgotten it",
    "NOT AGAIN": "was put back into the queue and did not run again, and SLURM has forgotten it",
}
TAIL_LINES, TAIL_BYTES = 10, 1 << 16


class SlurmSilentError(Exception):
    """SLURM is here, and cannot be asked now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What SLURM says of a job: its state, its exit code as ``code:signal``, and its time limit."""

    state: str
    exit_code: str = ""
    limit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a job stands: ``status`` is None while nobody knows yet (``reason`` says why), ok, or that of a failure."""

    status: str | None
    reason: str
    state: str = ""
    exit_code: str = ""


def ask(job_id: str) -> dict[str, Told]:
    """What SLURM says of a job and of all tasks of its array, by name (``12`` or ``12_3``); forgotten ones are absent.

    Raises SlurmSilentError if there is no SLURM here, or if it does not answer.
    """
    said = _command("scontrol", "show", "job", job_id)
    if said is None:
        raise SlurmSilentError("there is no scontrol here")
    code, out, err = said
    if code and "Invalid job id" not in err:
        raise SlurmSilentError(err.strip().splitlines()[-1] if err.strip() else "scontrol failed without a word")
    found = {} if code else dict(_shown(out))
    accounting = _command("sacct", "-n", "-P", "-X", "-j", job_id, "-o", "JobID,State,ExitCode,Timelimit")
    if accounting is not None and accounting[0] == 0:
        for line in accounting[1].splitlines():
            name, state, exit_code, limit, *_ = [*line.split("|"), "", "", ""]
            if re.fullmatch(r"\d+(_\d+)?", name) and state:
                found.setdefault(name, Told(state=state.partition(" ")[0], exit_code=exit_code, limit=limit))
    return found


def _command(*words: str) -> tuple[int, str, str] | None:
    """Exit code and output of a command; None where it is not installed."""
    path = shutil.which(words[0])
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *words[1:]], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"{words[0]} did not answer within 60 seconds"
    return done.returncode, done.stdout, done.stderr


def _shown(out: str) -> Iterator[tuple[str, Told]]:
    """Jobs in the output of ``scontrol show job``. Each key is read where SLURM puts it: a job's name may hold any."""
    for block in re.split(r"\n\s*\n", out):
        state = re.search(r"^   JobState=(\w+)", block, re.MULTILINE)
        named = re.match(r"\s*JobId=(\d+)(?: ArrayJobId=(\d+) ArrayTaskId=(\S+))?", block)
        if state is None or named is None:
            continue
        exit_code = re.search(r"^   Requeue=.*\bExitCode=(\d+:\d+)", block, re.MULTILINE)
        limit = re.search(r"^   RunTime=.*\bTimeLimit=(\S+)", block, re.MULTILINE)
        told = Told(state=state[1], exit_code=exit_code[1] if exit_code else "", limit=limit[1] if limit else "")
        job, array, tasks = named.groups()
        for name in [f"{array}_{task}" for task in _numbers(tasks)] if array else [job]:
            yield name, told


def _numbers(text: str) -> Iterator[int]:
    """Tasks of an array that wait: ``3``, ``1,4-7%2``."""
    for part in text.partition("%")[0].split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last.isdigit() or not last):
            yield from range(int(first), int(last or first) + 1)


def tail(log: Path) -> list[str]:
    """The last lines of a log as people read them; empty where there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            raw = file.read()
    except OSError:
        return []
    told, _ = text_lines(raw + b"\n")
    return [line.rstrip() for line in told if line.strip()][-TAIL_LINES:]


def ending(told: Told | None, silent: str, state_file: Path, log_tail: Sequence[str]) -> Ending:
    """How a job ended.

    Args:
        told: what SLURM says; None if it says nothing.
        silent: why SLURM could not be asked; empty if it has forgotten the job.
        state_file: what the job's script wrote down.
        log_tail: the last lines of its log.
    """
    events = _events(state_file)
    told = told or _recalled(events, log_tail, certain=not silent)
    if told is None:
        return Ending(status=None, reason=f"unknown: {silent}")
    if told.state in ACTIVE:
        return Ending(status=None, reason=told.state.lower(), state=told.state)
    status, reason = _meaning(told, "signalled" in events, log_tail)
    return Ending(status=status, reason=reason, state=told.state, exit_code=told.exit_code)


def _recalled(events: Mapping[str, str], log_tail: Sequence[str], *, certain: bool) -> Told | None:
    """What a job's script and its log tell of its state; None where it may run still."""
    if "requeued" in events:
        return Told(state="NOT AGAIN") if certain else None
    if "ended" in events:
        return Told(state="FAILED" if int(events["ended"]) else "COMPLETED", exit_code=f"{events['ended']}:0")
    said = next((name for line in reversed(log_tail) for form, name in ENDED_IN_LOG if form.search(line)), None)
    if said is None and not certain:
        return None
    return Told(state=said or ("KILLED" if "started" in events else "FORGOTTEN"))


def _meaning(told: Told, signalled: bool, log_tail: Sequence[str]) -> tuple[str, str]:
    """Status and reason of a job that is over."""
    limit = f" of {told.limit}" if told.limit else ""
    if told.state == "COMPLETED":
        return "ok", "completed"
    if told.state in ENDED_BY_SLURM:
        status, reason = ENDED_BY_SLURM[told.state]
        return status, reason + (limit if told.state == "TIMEOUT" else "")
    if signalled and told.state not in FORGOTTEN:
        return "timed out", f"was told to stop, as before its time limit{limit}"
    code, _, number = told.exit_code.partition(":")
    how = f"was killed by signal {number}" if number not in ("", "0") else f"failed with exit code {code or 'unknown'}"
    ends = f"; its log ends: {log_tail[-1][:200]}" if log_tail else ""
    return "crashed", FORGOTTEN.get(told.state, how) + ends


def _events(state_file: Path) -> Mapping[str, str]:
    """What happened since a job's script last began: the event, and the last word of its line."""
    try:
        lines = state_file.read_text(errors="replace").split("\n")[:-1]  # not a line that was cut off
    except OSError:
        return {}
    events: dict[str, str] = {}
    for words in map(str.split, lines):
        if len(words) < 2 or (words[0] == "ended" and not (len(words) == 3 and words[-1].isdigit())):
            continue
        if words[0] == "started":
            events = {}
        events[words[0]] = words[-1]
    return events
