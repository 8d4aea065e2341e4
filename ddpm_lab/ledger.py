"""The append-only JSONL file that keeps records: one line is what one configuration did in one set."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from ddpm_lab.declared import parsed
from ddpm_lab.files import CHECKOUT, lock, writing
from ddpm_lab.output import printable
from ddpm_lab.record import LedgerError, Machine, OtherSchemaError, RunRecord

PUBLISHED = Path("trace_output", "published")
"""The records that come with the checkout, or are published into another output folder: a file for each machine."""
FAKE_DRIVER = "fake"
"""The driver of ``tests/fake_cuda``, which no GPU stands behind: nothing computes, so nothing is measured."""


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

    def read(self, having: str = "") -> tuple[list[RunRecord], list[str]]:
        """Records in the order they were written, and a sentence for each line that could not be read.

        Lines without the text ``having`` are passed over. A missing file is an empty ledger. Raises LedgerError for a
        record of another edition.
        """
        records, damaged = list[RunRecord](), list[str]()
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for number, text in enumerate(lines, 1):
            if not text.strip() or having.encode() not in text:
                continue
            place = f"{self.path}, line {number}"
            try:
                records.append(_record(text))
            except OtherSchemaError as error:
                raise OtherSchemaError(f"{place}: {error}") from error
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
                damaged.append(f"{place}: not a record ({error}); the line is set aside")
        return records, damaged


@lru_cache(maxsize=2**15)
def _record(text: bytes) -> RunRecord:
    """The record in a line; a command reads its ledger many times, and each line once."""
    record = RunRecord.from_dict(_values(text))
    _refuse_fake(record.machine)
    return record


def distinct(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Records without those that are there again, as in a ledger and what was published of it: the first one stays.

    Names of files and hosts, which are left out of what is published, tell no record from others.
    """
    first: dict[tuple[object, ...], RunRecord] = {}
    for r in records:
        place = (r.set_id, r.experiment, r.family, r.role, r.label, r.run_id, r.date, r.baseline_id)
        first.setdefault((*place, r.machine.key, r.code_version, r.plan.key, str(r.stages)), r)
    return list(first.values())


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


def _refuse_fake(machine: Machine) -> None:
    if machine.driver == FAKE_DRIVER:
        raise LedgerError("a record is of the tests' fake CUDA, which computes nothing: measure on a real GPU")


def read_all(paths: Sequence[Path | str]) -> tuple[list[RunRecord], list[str]]:
    """Records of several ledgers, in order; one that is there again counts once (``distinct``).

    Raises LedgerError if a file does not exist, or has lines and none of them is a record.
    """
    records, damaged = list[RunRecord](), list[str]()
    for path in paths:
        if not Path(path).is_file():
            raise LedgerError(f"there is no ledger {path}: give a .jsonl file written by this lab")
        more, bad = Ledger(path).read()
        if bad and not more:
            none = f"no record is in its {len(bad)} line{'s' * (len(bad) > 1)}"
            raise LedgerError(f"{path} is no ledger, {none}: give a .jsonl file written by this lab")
        records += more
        damaged += bad
    return distinct(records), damaged


def published_trials(output: Path = CHECKOUT) -> tuple[RunRecord, ...]:
    """The trials of every machine whose records are published: what they say of quality holds elsewhere too.

    Told by their text, since most of these megabytes are windows of other records.
    """
    files = sorted((output / PUBLISHED).glob("*.jsonl"))
    return tuple(trial for file in files for trial in Ledger(file).read('"role":"quality"')[0])
