"""Read the output files of SLURM jobs: a job's log is often all that is left of it.

Read are the lines of ``summary_lines``, and what benchmarks of this kind print in other words: "Number of GPUs",
"Average epoch time", "Epoch 10/10", times in minutes or as a clock, and the GPU-Util column of nvidia-smi.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.explain.summary import NO_SUMMARY, NOT_CLAIMED, Row, Summary

# --- what a line says ------------------------------------------------------------------------------------------------

SAME_LOSS = 5e-3
"""Two losses this near are one, printed with other numbers of digits."""
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_NUMBER = r"(?P<number>[+-]?(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|nan|inf)(?![\d,/])"
_WHOLE = r"(?P<whole>\d+)(?![\d.])"
_REST = r"(?P<rest>.*)"


def _line(names: str, value: str) -> re.Pattern[str]:
    """A line that gives one of ``names`` a value, whatever stands before: a rank's number, a date, a logger's name."""
    return re.compile(rf"(?<![\w-])(?:{names})\s*[:=]\s*{value}", re.IGNORECASE)


_JOB = _line(r"(?:slurm[ _])?job[ _]?id", r"(?P<text>\d+(?:_\d+)?)(?!\w)")
_NAME = re.compile(r"^[^A-Za-z]*(?:INFO\W+)?Configuration\s*[:=]\s*(?P<text>\S.*)", re.IGNORECASE)
_WHOLES = {
    "gpus": _line(r"(?:(?:number|count) of |total |num[ _]|n)?gpus(?: used| in total)?|world[ _]size", _WHOLE),
    "ranks": _line(r"(?:number of )?ranks", _WHOLE),
    "nodes": _line(r"(?:number of |total |num[ _])?nodes|slurm_(?:job_num_|n)nodes", _WHOLE),
}
_PER_NODE = _line(r"gpus[ _]per[ _]node", _WHOLE)
_EPOCHS = _line(r"(?:number of |total |num[ _])?epochs", _NUMBER)
_EPOCH = re.compile(r"(?<![\w-])epoch\s*[:=]?\s*[\[(]?\s*(?P<current>\d+)\s*/\s*(?P<whole>\d+)(?![\d.])", re.IGNORECASE)
_TIME = _line("total training time", _REST)
_EPOCH_TIME = _line("(?:average |mean )?(?:time (?:per|/) ?epoch|epoch time)", _REST)
_WHY = re.compile(rf"{NOT_CLAIMED} \((.*)\)", re.IGNORECASE)
_LOSS = _line("best val(?:idation)?[ _]loss", _NUMBER)
_UTILISATION = _line("gpu-util", r"(?P<number>\d+(?:\.\d+)?)\s*%")
_SMI_HEAD = re.compile(r"\|.*GPU-Util\b.*\|")
_SMI_ROW = re.compile(r"\|[^|]*MiB\s*/[^|]*\|\s*(?P<number>\d{1,3})%")
_CLOCK = re.compile(r"(?:(\d+):)?(\d+):(\d\d(?:\.\d+)?)(?![\d:])")
_PART = re.compile(rf"{_NUMBER}\s*(?P<unit>[a-z]*)[\s,]*", re.IGNORECASE)
_UNITS = {
    **dict.fromkeys(("h", "hour", "hours"), 3600.0),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60.0),
    **dict.fromkeys(("", "s", "sec", "secs", "second", "seconds"), 1.0),
    "ms": 1e-3,
}


ENDED_IN_LOG = (
    (re.compile(r"CANCELLED.* DUE TO TIME LIMIT"), "TIMEOUT"),
    (re.compile(r"CANCELLED.* DUE TO PREEMPTION"), "PREEMPTED"),
    (re.compile(r"oom[-_ ]kill|(?:srun|slurmstepd): error: .*\bout[ _-]of[ _-]memory", re.IGNORECASE), "OUT_OF_MEMORY"),
    (re.compile(r"DUE TO NODE FAILURE"), "NODE_FAIL"),
    (re.compile(r"slurmstepd.*CANCELLED|\*\*\* (?:JOB|STEP) .*CANCELLED"), "CANCELLED"),
)
"""What SLURM writes into the log of a job that it ends, the more telling first, and the state that this means."""
_ENDED = {
    "TIMEOUT": "cancelled at its time limit",
    "PREEMPTED": "cancelled as others went first",
    "OUT_OF_MEMORY": "killed for want of memory",
    "NODE_FAIL": "lost its node",
    "CANCELLED": "cancelled",
}


def text_lines(raw: bytes) -> tuple[list[str], bool]:
    """Lines of a log as a terminal's user would read them, and whether its last line was cut off.

    A carriage return ends a line, as the bars of a progress display do; colours are taken out; a line that is not
    UTF-8 is read as Latin-1. The last line counts only if it was ended: of a number in it nobody knows the rest.
    """
    pieces = re.split(rb"\r\n|\r|\n", raw)
    cut = bool(pieces[-1].strip())
    return [_ESCAPES.sub("", _decoded(piece)).replace("\0", "") for piece in pieces[:-1]], cut


def _decoded(piece: bytes) -> str:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece.decode("latin-1")


def _seconds(text: str) -> float | None:
    """A time such as ``362.45 seconds``, ``6.04 min``, ``1 h 2 min`` or ``0:06:02``; None for anything else."""
    if clock := _CLOCK.match(text):
        hours, minutes, seconds = clock.groups(default="0")
        return 3600 * int(hours) + 60 * int(minutes) + float(seconds)
    total, smallest, at = 0.0, math.inf, 0
    while (part := _PART.match(text, at)) and (unit := _UNITS.get(part["unit"].lower())) and unit < smallest:
        value = _number(part)
        if not math.isfinite(value) or value < 0:
            return None
        total, smallest, at = total + value * unit, unit, part.end()
    return total if at else None


def _number(match: re.Match[str]) -> float:
    return float(match["number"].replace(",", ""))


# --- runs of a log ---------------------------------------------------------------------------------------------------


class _Reader:
    """Collects what the lines of one log say; a value that a finished run has already begins the next run."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = [{}]
        self.busy: list[list[float]] = [[]]
        self.per_node: int | None = None
        self._table = False

    def _set(self, name: str, value: Any, *, begins: bool = False) -> None:
        run = self.runs[-1]
        if name in run and ("time" in run or (begins and run[name] != value)):
            self.runs.append(run := {})
            self.busy.append([])
        run[name] = value

    def read(self, line: str) -> None:
        """Take up one line; a value that cannot be read is as good as none."""
        if ended := next((state for pattern, state in ENDED_IN_LOG if pattern.search(line)), None):
            self.runs[-1].setdefault("ended", _ENDED[ended])  # the first tells why, and others follow from it
            return
        if match := _EPOCH.search(line):
            self._progress(int(match["current"]), int(match["whole"]))
        if match := _JOB.search(line):
            self._set("job_id", match["text"], begins=True)
        elif match := _NAME.search(line):
            self._set("configuration", match["text"].strip(), begins=True)
        elif match := _PER_NODE.search(line):
            self.per_node = int(match["whole"])
        elif match := _TIME.search(line):
            why = _WHY.match(match["rest"])
            seconds = _seconds(match["rest"])
            zero = "the log tells of 0 seconds, in which nothing trains" if seconds == 0 else ""
            self._set("time", (None, why[1]) if why else (seconds or None, zero))
            self.runs[-1].pop("ended", None)  # put back into the queue, it went on to its end
        elif match := _EPOCH_TIME.search(line):
            self._set("epoch_seconds", _seconds(match["rest"]))
        elif match := _LOSS.search(line):
            self._loss(_number(match))
        elif match := _EPOCHS.search(line):
            self._set("epochs", _number(match))
        elif not self._utilisation(line):
            for name, pattern in _WHOLES.items():
                if match := pattern.search(line):
                    self._set(name, int(match["whole"]))

    def _progress(self, current: int, total: int) -> None:
        """An epoch that began or ended. After the end of a run only a first one tells of the next: others came late."""
        if "time" in self.runs[-1]:
            if current > 1 and "ended" not in self.runs[-1]:
                return
            self.runs.append({})
            self.busy.append([])
        first, last, _ = self.runs[-1].get("progress", (current, current, total))
        self.runs[-1]["progress"] = (min(first, current), max(last, current), total)

    def _utilisation(self, line: str) -> bool:
        """Whether a line tells of a GPU's utilisation, itself or as a row below nvidia-smi's heading."""
        self._table = self._table or bool(_SMI_HEAD.search(line))
        match = _UTILISATION.search(line) or (self._table and _SMI_ROW.search(line))
        if match:
            self.busy[-1].append(float(match["number"]))
        return bool(match)

    def _loss(self, loss: float) -> None:
        """The best loss, which some print whenever it falls, and then once more at the end."""
        before = self.runs[-1].get("loss", math.nan)
        if "time" not in self.runs[-1]:
            loss = min((x for x in (before, loss) if math.isfinite(x)), default=loss)
        elif math.isclose(loss, before, rel_tol=SAME_LOSS):
            return
        self._set("loss", loss)

    def summaries(self) -> Iterator[tuple[Summary, str]]:
        """The runs and how SLURM ended them; what a run does not say of its job, an earlier one has said."""
        job: dict[str, Any] = {}
        for run, busy in zip(self.runs, self.busy, strict=True):
            values = {**job, **run}
            job = {name: values[name] for name in ("job_id", "gpus", "ranks", "nodes") if name in values}
            seconds, note = values.pop("time", (None, ""))
            ended = values.pop("ended", "")
            if values.get("gpus") is None and self.per_node is not None and "ranks" not in values:
                values["gpus"] = self.per_node * values.get("nodes", 1)
            first, last, total = values.pop("progress", (0, 0, 0))
            trained_all = last >= total or (first == 0 and last == total - 1)  # a run may stop early; some count from 0
            epochs = values.get("epochs", float(total) if trained_all else None)
            epochs = epochs if epochs and math.isfinite(epochs) else None
            if values.get("epoch_seconds") is None and seconds is not None and epochs:
                values["epoch_seconds"] = seconds / epochs
            values |= {"epochs": epochs, "gpu_percent": fmean(busy) if busy else None}
            yield Summary(seconds=seconds, note=note, **values), ended


def read_log(path: Path) -> list[Row]:
    """The runs in a job's log, at least one row. Raises ConfigError if the file cannot be read."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read the log {path}: {error.strerror}; give output files of SLURM jobs") from error
    told, cut = text_lines(raw)
    reader = _Reader()
    for line in told:
        reader.read(line)
    named = re.fullmatch(r"slurm-(\d+(?:_\d+)?)\.out", path.name)
    note = "cut off in its last line" if cut else ""
    rows = []
    for summary, ended in reader.summaries():
        if summary.job_id is None and named:
            summary = dataclasses.replace(summary, job_id=named[1])  # noqa: PLW2901 - slurm-123_4.out
        rows.append(Row(log=str(path), summary=summary, note=note, ended=ended))
    found = [row for row in rows if row.found]
    if found:
        return [dataclasses.replace(row, note="") for row in found[:-1]] + [found[-1]]
    if wrong := "the file is empty" if not raw.strip() else "a binary file, no log" if b"\0" in raw else "":
        return [dataclasses.replace(rows[-1], note=f"{NO_SUMMARY}: {path.name}: {wrong}")]
    last = next((line.strip() for line in reversed(told) if line.strip()), "")
    why = "; ".join(text for text in (NO_SUMMARY, f"its last line: {last[:200]}" if last else "", note) if text)
    return [dataclasses.replace(rows[-1], note=why)]
