"""The ledger, an append-only JSONL file of records: each line is the result of one configuration in one set."""

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
"""The folder of published records, in the checkout or in another output folder, with one file per machine."""
FAKE_DRIVER = "fake"
"""The driver name of ``tests/fake_cuda``, which simulates a GPU without computing: its records are never stored."""


class Ledger:
    """An append-only JSONL file of records. Writers lock it, so several runs may share it."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def append(self, records: Iterable[RunRecord]) -> None:
        """Append records in a single locked write and flush them to disk.

        Raises LedgerError if the file cannot be written, or if a record comes from a fake GPU.
        """
        records = list(records)
        for record in records:
            _refuse_fake(record.machine)
        lines = "".join(json.dumps(r.as_dict(), separators=(",", ":")) + "\n" for r in records).encode()
        with writing(self.path, LedgerError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab+") as file:
                lock(file)
                # A writer killed midway leaves an incomplete last line: end it, so that only that line is lost.
                if file.seek(0, os.SEEK_END) and os.pread(file.fileno(), 1, file.tell() - 1) != b"\n":
                    lines = b"\n" + lines
                file.write(lines)
                file.flush()
                os.fsync(file.fileno())

    def read(self, having: str = "") -> tuple[list[RunRecord], list[str]]:
        """Return the records in the order they were written, and a sentence for each line that could not be read.

        Lines that do not contain ``having`` are skipped. A missing file is an empty ledger. Raises OtherSchemaError for
        a record written by another version of the lab.
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
    """Return the record in a line. Cached, because a command reads its ledger many times."""
    record = RunRecord.from_dict(_values(text))
    _refuse_fake(record.machine)
    return record


def distinct(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the records without duplicates, such as a record and its published copy; the first of each is kept.

    File and host names are not compared, because published records do not contain them.
    """
    first: dict[tuple[object, ...], RunRecord] = {}
    for r in records:
        place = (r.set_id, r.experiment, r.family, r.role, r.label, r.run_id, r.date, r.baseline_id)
        first.setdefault((*place, r.machine.key, r.code_version, r.plan.key, str(r.stages)), r)
    return list(first.values())


def _values(text: bytes) -> dict[str, Any]:
    """Return the values of a record, with the strings that are shown made printable; identifiers are not changed."""
    values: dict[str, Any] = parsed(text)
    if text.isascii() and b"\\" not in text:  # all characters are printable, as in most records
        return values
    shown = {name: with_texts(v, printable) for name, v in values.items() if name not in ("config", "environment")}
    return {**values, **shown}


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with ``change`` applied to every string, keys of objects included."""
    if isinstance(value, dict):
        return {change(name): with_texts(v, change) for name, v in value.items()}
    if isinstance(value, list):
        return [with_texts(v, change) for v in value]
    return change(value) if isinstance(value, str) else value


def _refuse_fake(machine: Machine) -> None:
    if machine.driver == FAKE_DRIVER:
        raise LedgerError("a record is of the tests' fake CUDA, which computes nothing: measure on a real GPU")


def read_all(paths: Sequence[Path | str]) -> tuple[list[RunRecord], list[str]]:
    """Return the ``distinct`` records of several ledgers, in order, and a sentence for each unreadable line.

    Raises LedgerError if a file does not exist, or if it has lines but no records.
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
    """Return the published trials of all machines: their results on quality apply to other machines too.

    Lines are filtered by their text before they are parsed, since trials are a small part of these large files.
    """
    files = sorted((output / PUBLISHED).glob("*.jsonl"))
    return tuple(trial for file in files for trial in Ledger(file).read('"role":"quality"')[0])
