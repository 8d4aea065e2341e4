"""The folder of a training run: its checkpoints, its log, its settings; one run at a time works in it."""

import contextlib
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

from ddpm_lab.checks import ConfigError, LabError
from ddpm_lab.config import RunConfig
from ddpm_lab.declared import Entries, Opt, parsed
from ddpm_lab.files import NOT_IN_FILES, check_room, lock, replace, settings_text, writing

CHECKPOINTS, SAMPLES = "checkpoints", "samples"
SETTINGS, LOG, LOCK = "config.toml", "log.jsonl", ".lock"
_NOT_NAMED = (
    *("network", "global_batch_size", "image_size", "options"),
    *("data", "data_sha256", "purpose", "seed", "device", "world_size", "nodes", "oversubscribe"),
)
"""Settings that have another place in a configuration's name, or are not part of it."""
_CHECKPOINT = re.compile(r"step-(\d{8,})\.pt")


class RunFailed(LabError):  # noqa: N818 - an outcome
    """A run that ended before its last step, in one sentence; what was saved before is untouched."""

    exit_code = 1


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a run's folder, newest first, readable or not."""
    found = [(int(match[1]), path) for path in folder.glob("*.pt") if (match := _CHECKPOINT.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


class RunFolder:
    """The folder, made and locked on entry. Raises ConfigError if it cannot be, or if another run works in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints, self.samples = path / CHECKPOINTS, path / SAMPLES

    def __enter__(self) -> Self:
        others = [name for name in (SETTINGS, LOG) if (self.path / name).exists()]
        if others and not ((self.path / LOCK).exists() or self.checkpoints.exists()):
            raise ConfigError(f"{self.path} holds {others[0]} of something else: give another --output-dir")
        check_room(self.checkpoints, self.samples)
        with writing(self.path):
            self._lock = os.open(self.path / LOCK, os.O_WRONLY | os.O_CREAT, 0o666)
        if not lock(self._lock, wait=False):
            os.close(self._lock)
            raise ConfigError(f"another run works in {self.path}: wait for it, or choose another --output-dir")
        for left in (*self.checkpoints.glob("*.partial"), *self.samples.glob("*.partial")):
            left.unlink(missing_ok=True)  # of a run that was killed while it wrote
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}.pt"

    def keep(self, count: int) -> None:
        for path in checkpoints_in(self.checkpoints)[count:]:
            path.unlink(missing_ok=True)

    def write_settings(self, config: RunConfig, schedule: dict[str, int], why: str = "") -> None:
        """Write the configuration to ``config.toml``, a file for ``--config``, with ``why`` as a comment."""
        values = {name: value for name, value in config.as_dict().items() if name not in NOT_IN_FILES}
        if config.world_size == 1:
            del values["exchange"]
        comment = f"# {' '.join(why.split())}\n" if why else ""
        with writing(self.path / SETTINGS, RunFailed):
            replace(self.path / SETTINGS, comment + settings_text({**values, "train": schedule}))

    def cut_log(self, step: int) -> None:
        """Take out of the log what is after ``step``, and a last row that was cut off. Raises RunFailed."""
        with writing(self.path, RunFailed):
            replace(self.path / LOG, _text(logged(self.path, step)))

    def log(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows to the log. Raises RunFailed if they cannot be written."""
        with writing(self.path, RunFailed), (self.path / LOG).open("a") as file:
            file.write(_text(rows))

    def sync_log(self) -> None:
        """Flush the log to the disk: a checkpoint must not outlive the rows before it. Raises RunFailed."""
        with writing(self.path, RunFailed), (self.path / LOG).open("a") as file:
            os.fsync(file.fileno())


def _text(rows: Iterable[dict[str, Any]]) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


_rate = Annotated[float, Opt(above=0)]
_ROW = Entries({"step": int, "loss": float}, images_per_second=_rate, held_out_loss=float, settings=str)


def logged(folder: Path, last: int = sys.maxsize) -> Iterator[dict[str, Any]]:
    """Rows of a run's log up to the step ``last``, each step once. Raises OSError for a log that cannot be read now."""
    following = 0
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / LOG).read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                row = _ROW.read(parsed(line), "")
                if following < row["step"] <= last:
                    following = row["step"]
                    yield row


def trained(folder: Path, global_batch_size: int) -> tuple[int, float, float, float | None]:
    """Steps in a run's log, the seconds that these took, those of one in its last settings, and its best held-out loss.

    The last is None where it was never measured, and seconds of a step are NaN where no step was. A run may go on with
    other ranks, or in another number format. Those of one are the median: each start compiles in its first step.
    """
    rows, each, settings = list(logged(folder)), list[float](), ""
    total = 0.0
    for row in rows:
        if row.get("settings", settings) != settings:
            settings, each = row["settings"], []
        if rate := row.get("images_per_second"):
            each.append(global_batch_size / rate)
            total += each[-1]
    best = min((row["held_out_loss"] for row in rows if "held_out_loss" in row), default=None)
    return len(rows), total, statistics.median(each) if each else math.nan, best


def name_of(config: RunConfig) -> str:
    """Return a name of what is trained and how. Runs that differ only in seed or number of ranks have equal names."""
    usual = RunConfig()
    words = [config.work_name, f"batch {config.global_batch_size}"]
    words += [f"{config.image_size}x{config.image_size} pixels"] if config.image_size != usual.image_size else []
    before = usual.flat
    for name, value in config.flat.items():
        if name.partition(".")[0] not in _NOT_NAMED and value != before.get(name):
            is_switch = "." not in name and isinstance(value, bool)
            switch = name if value else f"no {name}"
            words.append(switch if is_switch else f"{name} {value}")
    own = (("checkpoint", config.option("checkpoint", "")), *config.own_options)
    words += [f"{name} {value}" for name, value in config.options if (name, value) not in own]
    return ", ".join(words)
