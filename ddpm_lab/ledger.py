"""The append-only JSONL file that keeps records: one line is what one configuration did in one set."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ddpm_lab.declared import parsed, reader
from ddpm_lab.files import CHECKOUT, lock, writing
from ddpm_lab.output import printable
from ddpm_lab.plan import Plan
from ddpm_lab.record import Cohort, LedgerError, Machine, OtherSchemaError, RunRecord, check_schema, moment

PUBLISHED = Path("trace_output", "published")
"""The records that come with the checkout, or are published into another output folder: a file for each machine."""
FAKE_DRIVER = "fake"
"""The driver of ``tests/fake_cuda``, which no GPU stands behind: nothing computes, so nothing is measured."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Damaged:
    """A line that could not be read: it is set aside, and everything else is used."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}: {self.reason}; the line is set aside"


class Head(NamedTuple):
    """What tells a record from others, before it is made of its ``text``: most readers want few of many."""

    path: Path
    line: int
    text: bytes
    experiment: str
    role: str
    machine: Machine
    cohort: Cohort
    date: str
    network: str
    device: str
    image_size: int


Select = Callable[[Sequence[Head]], Iterable[Head]]


class Ledger:
    """An append-only JSONL file of records; writers take a lock, so two runs may share it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def append(self, records: Iterable[RunRecord]) -> None:
        """Append records together: all their lines in one locked write, flushed to disk.

        Raises LedgerError if the file cannot be written, or a record is of a fake GPU.
        """
        records = list(records)
        for record in records:
            _refuse_fake(record.machine)
        lines = "".join(json.dumps(r.as_dict(), separators=(",", ":")) + "\n" for r in records).encode()
        with writing(self.path, LedgerError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                lock(file)
                # A writer killed in the middle leaves a torn last line: end it, so that only that line is lost.
                if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                    lines = b"\n" + lines
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())

    def heads(self) -> tuple[list[Head], list[Damaged]]:
        """What each record is, in the order they were written, and the lines that could not be read.

        A missing file is an empty ledger. Raises LedgerError for a record of another edition.
        """
        if not self.path.exists():
            return [], []
        lines = enumerate(self.path.read_bytes().split(b"\n"), 1)
        return _read(_head, ((self.path, number, line) for number, line in lines if line.strip()))

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
    return _read(_record, (head[:3] for head in heads))


def distinct(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Records without those that are there again, as in a ledger and what was published of it: the first one stays."""

    def mark(r: RunRecord) -> tuple[object, ...]:
        """What tells it from others: names of files and hosts, which are left out of what is published, cannot."""
        place = (r.set_id, r.experiment, r.family, r.role, r.label, r.run_id, r.date, r.baseline_id)
        return (*place, r.machine.key, r.code_version, r.plan.key, str(r.stages))

    first = {mark(r): r for r in reversed(records)}
    return [r for r in records if first[mark(r)] is r]


def _record(_path: Path, _number: int, text: bytes) -> RunRecord:
    return RunRecord.from_dict(_values(text))


def _values(text: bytes) -> dict[str, Any]:
    """The values of a record; texts that are shown are made printable, and those that identify something stay."""
    values: dict[str, Any] = parsed(text)
    if text.isascii() and b"\\" not in text:  # no other character can be in it, and most records are many numbers
        return values
    shown = {name: with_texts(v, printable) for name, v in values.items() if name not in ("config", "environment")}
    return {**values, **shown}


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Values of JSON with each text changed, names in tables too."""
    if isinstance(value, dict):
        return {change(name): with_texts(v, change) for name, v in value.items()}
    if isinstance(value, list):
        return [with_texts(v, change) for v in value]
    return change(value) if isinstance(value, str) else value


def _read(
    make: Callable[[Path, int, bytes], T], lines: Iterable[tuple[Path, int, bytes]]
) -> tuple[list[T], list[Damaged]]:
    made, damaged = [], []
    for path, number, text in lines:
        try:
            made.append(make(path, number, text))
        except OtherSchemaError as error:
            raise OtherSchemaError(f"{path}, line {number}: {error}") from error
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            damaged.append(Damaged(path, number, f"not a record ({error})"))
    return made, damaged


def _head(path: Path, number: int, text: bytes) -> Head:
    check_schema(values := parsed(text))
    config, where = values["config"], values["environment"]
    moment(date := where["date"])
    machine, plan = _made(Machine, json.dumps(where["machine"])), _made(Plan, json.dumps(values["plan"]))
    _refuse_fake(machine)
    cohort = (machine.key, str(values["code_version"]), str(config["data_sha256"]), plan.key)
    of = str(config["network"]), str(config["device"]), int(config["image_size"])
    return Head(path, number, text, str(values["experiment"]), str(values["role"]), machine, cohort, date, *of)


def _refuse_fake(machine: Machine) -> None:
    if machine.driver == FAKE_DRIVER:
        raise LedgerError("a record is of the tests' fake CUDA, which computes nothing: measure on a real GPU")


@lru_cache(maxsize=512)
def _made(kind: type[T], text: str) -> T:
    made: T = reader(kind)(json.loads(text), "")
    return made


def read_all(paths: Sequence[Path | str], select: Select | None = None) -> tuple[list[RunRecord], list[Damaged]]:
    """Records of several ledgers, in order; ``select`` chooses from all their heads, None wants all.

    A record that is there again counts once (``distinct``). Raises LedgerError if a file does not exist, or has lines
    and none of them is a record.
    """
    heads: list[Head] = []
    damaged: list[Damaged] = []
    for path in paths:
        if not Path(path).is_file():
            raise LedgerError(f"there is no ledger {path}: give a .jsonl file written by this lab")
        more, bad = Ledger(path).heads()
        if bad and not more:
            none = f"no record is in its {len(bad)} line{'s' * (len(bad) > 1)}"
            raise LedgerError(f"{path} is no ledger, {none}: give a .jsonl file written by this lab")
        heads += more
        damaged += bad
    records, bad = load(heads if select is None else select(heads))
    return distinct(records), damaged + bad


def published_trials(output: Path = CHECKOUT) -> tuple[RunRecord, ...]:
    """The trials of every machine whose records are published: what they say of quality holds elsewhere too."""
    files = sorted((output / PUBLISHED).glob("*.jsonl"))
    return tuple(trial for file in files for trial in _trials_of(file, file.stat().st_mtime_ns))


@lru_cache
def _trials_of(file: Path, _changed: int) -> list[RunRecord]:
    """Told by their text, since most of these megabytes are windows of other records."""
    lines = ((file, n, line) for n, line in enumerate(file.read_bytes().split(b"\n"), 1))
    return _read(_record, (line for line in lines if b'"role":"quality"' in line[2]))[0]
