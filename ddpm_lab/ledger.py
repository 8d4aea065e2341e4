"""The append-only JSONL file that keeps records: one line is what one configuration did in one set.

The parent that measures appends the lines of a set together. A reader learns what each line is, and keeps only the
records that it wants, so that a ledger may be larger than memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ddpm_lab.files import CHECKOUT
from ddpm_lab.plan import Plan
from ddpm_lab.record import SCHEMA, Cohort, LedgerError, Machine, OtherSchemaError, RunRecord

PUBLISHED = Path("trace_output", "published")
"""The records that come with the checkout, or are published into another output folder: a file for each machine."""


@dataclass(frozen=True, slots=True)
class Damaged:
    """A line that could not be read: it is set aside, and everything else is used."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}; the line is set aside"


class Head(NamedTuple):
    """What tells a record from others, read without reading the rest of its line: a ledger may be large.

    ``machine``, ``cohort``, ``date``, ``experiment`` and ``role`` are the record's own.
    """

    path: Path
    line: int
    offset: int
    length: int
    experiment: str
    role: str
    machine: Machine
    cohort: Cohort
    date: str


Select = Callable[[Sequence[Head]], Iterable[Head]]


class Ledger:
    """An append-only JSONL file of records; writers take a lock, so two runs may share it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def append(self, records: Iterable[RunRecord]) -> None:
        """Append records together: all their lines in one locked write, flushed to disk.

        Raises LedgerError if the file cannot be written.
        """
        lines = "".join(json.dumps(r.as_dict(), separators=(",", ":")) + "\n" for r in records).encode()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                # A writer killed in the middle leaves a torn last line: end it, so that only that line is lost.
                if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                    lines = b"\n" + lines
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise LedgerError(
                f"cannot write the ledger {self.path}: {error.strerror}; choose another folder"
            ) from error

    def heads(self) -> tuple[list[Head], list[Damaged]]:
        """What each record is, in the order they were written, and the lines that could not be read.

        A missing file is an empty ledger. Raises LedgerError for a record of another edition.
        """
        heads: list[Head] = []
        damaged: list[Damaged] = []
        if not self.path.exists():
            return heads, damaged
        offset = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                begin, offset = offset, offset + len(line)
                if not line.strip():
                    continue
                try:
                    heads.append(Head(self.path, number, begin, len(line), *_told(line, self.path, number)))
                except _UNREADABLE as error:
                    damaged.append(_damage(self.path, number, error))
        return heads, damaged

    def read(self, select: Select | None = None) -> tuple[list[RunRecord], list[Damaged]]:
        """Records in the order they were written, and the lines that could not be read.

        ``select`` chooses from the heads which records are wanted; None wants all. A missing file is an empty ledger.
        Raises LedgerError for a record of another edition.
        """
        heads, damaged = self.heads()
        records, more = load(heads if select is None else select(heads))
        return records, sorted([*damaged, *more], key=lambda d: d.line)


def load(heads: Iterable[Head]) -> tuple[list[RunRecord], list[Damaged]]:
    """The records of some heads, in their order, and the lines that could not be read."""
    records: list[RunRecord] = []
    damaged: list[Damaged] = []
    files: dict[Path, BinaryIO] = {}
    with contextlib.ExitStack() as stack:
        for head in heads:
            if head.path not in files:
                files[head.path] = stack.enter_context(head.path.open("rb"))
            file = files[head.path]
            file.seek(head.offset)
            try:
                records.append(_parsed(file.read(head.length), head.path, head.line))
            except _UNREADABLE as error:
                damaged.append(_damage(head.path, head.line, error))
    return records, damaged


def _told(line: bytes, path: Path, number: int) -> tuple[str, str, Machine, Cohort, str]:
    """Experiment, role, machine, cohort and date of a line."""
    values = json.loads(line)
    if values["schema"] != SCHEMA:
        _parsed(line, path, number)  # which refuses it
    machine, plan = _machine(json.dumps(values["environment"]["machine"])), _plan(json.dumps(values["plan"]))
    cohort = (machine.key, values["code_version"], values["config"]["data_sha256"], plan.key)
    return values["experiment"], values["role"], machine, cohort, values["environment"]["date"]


@lru_cache(maxsize=256)
def _machine(text: str) -> Machine:
    return Machine(**json.loads(text))


@lru_cache(maxsize=256)
def _plan(text: str) -> Plan:
    return Plan(**json.loads(text))


_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)


def _parsed(line: bytes, path: Path, number: int) -> RunRecord:
    try:
        return RunRecord.from_dict(json.loads(line))
    except OtherSchemaError as error:
        raise OtherSchemaError(f"{path}, line {number}: {error}") from error


def _damage(path: Path, number: int, error: Exception) -> Damaged:
    if isinstance(error, OtherSchemaError):
        raise error
    return Damaged(path, number, f"not a record ({type(error).__name__}: {error})")


def read_all(paths: Sequence[Path | str], select: Select | None = None) -> tuple[list[RunRecord], list[Damaged]]:
    """Records of several ledgers, in order; ``select`` chooses from all their heads, None wants all.

    A record that several files hold, as a ledger and what was published of it do, counts once: the first one.

    Raises LedgerError if a file does not exist, or has lines and none of them is a record.
    """
    heads: list[Head] = []
    damaged: list[Damaged] = []
    for path in paths:
        if not Path(path).is_file():
            raise LedgerError(f"there is no ledger {path}: give a .jsonl file written by this lab")
        more, bad = Ledger(path).heads()
        if bad and not more:
            lines = f"none of its {len(bad)} lines is a record" if len(bad) > 1 else "its only line is not a record"
            raise LedgerError(f"{path} is no ledger, {lines}: give a .jsonl file written by this lab")
        heads += more
        damaged += bad
    records, bad = load(heads if select is None else select(heads))
    if len(paths) > 1:
        # Names of files and hosts are left out of what is published: they cannot tell one record from another.
        def marks(r: RunRecord) -> tuple[str, ...]:
            return (r.set_id, r.experiment, r.family, r.role, r.label, r.run_id, r.environment.date)

        once = {id(r) for r in {marks(r): r for r in reversed(records)}.values()}
        records = [r for r in records if id(r) in once]
    return records, damaged + bad


def published_trials(output: Path = CHECKOUT) -> tuple[RunRecord, ...]:
    """The trials of every machine whose records are published: what they say of quality holds elsewhere too."""
    ledgers = [Ledger(file) for file in sorted((output / PUBLISHED).glob("*.jsonl"))]
    return tuple(r for each in ledgers for r in each.read(lambda heads: [h for h in heads if h.role == "quality"])[0])
