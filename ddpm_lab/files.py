"""Where results lie, how files are written (whole or not at all), and settings in TOML files."""

import errno
import fcntl
import glob
import json
import os
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ddpm_lab.checks import ConfigError, LabError, several
from ddpm_lab.config import RunConfig
from ddpm_lab.declared import LARGEST_TEXT

CHECKOUT = Path(__file__).resolve().parents[1]
LEDGER = Path("trace_output", "ledger.jsonl")
PREPARED = Path("data", "prepared")
"""Records and prepared images, in an output folder."""
ROOM_BYTES = 2**20
"""What must fit into a folder before anything is measured: the records and figures of a question are smaller."""
NONE = "none"
"""How a file says that a number is left out, such as ``clip_norm``: TOML has no null."""
NOT_IN_FILES = ("purpose", "workload", "options")
"""Settings that a training decides by itself, so that no file gives them."""


def expanded(path: str | Path) -> Path:
    """A path of the user's, with ``~`` as a home folder. Raises ConfigError for none, or an unknown user's."""
    if not isinstance(path, str | Path):
        raise ConfigError(f"{path!r} is given as a path: give text")
    if path == "":
        raise ConfigError("a path is empty, as of a variable that is not set: give one")
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: there is no such user's home folder; give the whole path, from / on") from error


def output_folder(output_dir: str | Path | None) -> Path:
    """Where results go: ``output_dir``, the checkout of this package, or for an installed copy the working folder."""
    if output_dir is not None:
        return expanded(output_dir).absolute()
    return CHECKOUT if (CHECKOUT / "notebooks").is_dir() else Path.cwd()


def ledgers(given: Sequence[str | Path] | None, output: Path) -> list[Path]:
    """The files of records that are given, or else the one in ``output``. Raises ConfigError for none, or no list."""
    if given is not None:
        several("ledger", given)
    return [expanded(file) for file in ([output / LEDGER] if given is None else given)]


def lock(file: IO[Any] | int, *, wait: bool = True) -> bool:
    """Lock an open file until it is closed; False where another process has it and ``wait`` is not wanted.

    On a file system without locks nobody gets one, and all go on.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@contextmanager
def writing(place: Path, refusal: type[LabError] = ConfigError, option: str = "--output-dir") -> Iterator[None]:
    """Raise ``refusal`` where what is done inside cannot write to ``place``; the ``option`` names another one.

    Work that fails on its way, which ConfigError does not tell, goes on in the same place.
    """
    try:
        yield
    except OSError as error:
        advice = f"choose another {option}" if refusal is ConfigError else "mend that, and the same command goes on"
        raise refusal(f"cannot write to {place}: {error.strerror}; {advice}") from error


def check_room(*folders: Path, ledger: Path | None = None) -> None:
    """Make folders, and see that results fit into each, and that a ledger, if there is one, can be written to.

    Raises ConfigError, before the work begins whose results would be lost.
    """
    for folder in folders:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(bytes(ROOM_BYTES))
    if ledger is not None and ledger.exists():
        with writing(ledger):
            ledger.open("r+b").close()


def replace(path: Path, content: str | bytes | memoryview, *, durable: bool = False) -> None:
    """Write a file so that it is there as before or as a whole. Raises OSError, which names it.

    Two processes may write one file, and a link that lies where the new content is gathered is not followed. What is
    ``durable`` has reached the disk when this returns, and so has its name.
    """
    stem = f"{path.name}.{os.uname().nodename}"  # on a shared disk, processes of other hosts cannot be asked for
    partial = path.with_name(f"{stem}.{os.getpid()}.partial")
    try:
        for left in path.parent.glob(f"{glob.escape(stem)}.*.partial"):  # of a process that was killed
            if left == partial or not Path("/proc", left.name.split(".")[-2]).exists():
                left.unlink(missing_ok=True)
        with partial.open("xb") as file:
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        error.filename = error.filename or str(path)  # a full disk names none
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        with suppress(OSError):  # not every file system can
            os.fsync(folder)
        os.close(folder)


def content(path: Path) -> bytes:
    """What a file holds. Raises OSError, also for more than LARGEST_TEXT bytes: a device never ends."""
    with path.open("rb") as file:
        found = file.read(LARGEST_TEXT + 1)
    if len(found) > LARGEST_TEXT:
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
    return found


def read_settings(path: Path, place: str) -> dict[str, Any]:
    """The settings in a TOML file, as they stand there. Raises ConfigError, which names ``place``."""
    try:
        values = tomllib.loads(content(path).decode())
    except OSError as error:
        raise ConfigError(f"{place}: cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: {path} is not TOML: {error}") from error
    for table, name in (("diffusion", "min_snr_gamma"), ("optimizer", "clip_norm")):
        if isinstance(values.get(table), dict) and values[table].get(name) == NONE:
            values[table][name] = None
    return values


def configuration(values: Mapping[str, Any], place: str) -> RunConfig:
    """The configuration with these settings. Raises ConfigError, which names ``place``."""
    if values.get("revision"):
        raise ConfigError(f"{place}: revision is {values['revision']!r}: leave it out, and use compare --against")
    try:
        return RunConfig.from_dict(values)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{place}: {error}") from error


def settings_text(values: Mapping[str, Any]) -> str:
    """Settings as TOML that ``read_settings`` reads back; a dictionary among them becomes a table."""
    tables = {name: table for name, table in values.items() if isinstance(table, Mapping)}
    lines = [f"{name} = {_value(value)}" for name, value in values.items() if name not in tables]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Strings, numbers, booleans and lists of them are written in TOML as in JSON, but for inf and nan."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, float):
        return float.__repr__(value)
    return json.dumps(NONE if value is None else value, ensure_ascii=False)
