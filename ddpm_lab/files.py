"""Where results lie, and how files are written: whole or not at all, or refused in one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ddpm_lab.checks import ConfigError, LabError

CHECKOUT = Path(__file__).resolve().parents[1]
LEDGER = Path("trace_output", "ledger.jsonl")
PREPARED = Path("data", "prepared")
"""Records and prepared images, in an output folder."""


def expanded(path: str | Path) -> Path:
    """A path of the user's, with ``~`` as a home folder. Raises ConfigError for that of a user who is not known."""
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
    """The files of records that are given, or else the one in ``output``."""
    return [expanded(file) for file in ([output / LEDGER] if given is None else given)]


@contextmanager
def writing(place: Path, refusal: type[LabError] = ConfigError, option: str = "--output-dir") -> Iterator[None]:
    """Raise ``refusal`` where what is done inside cannot write to ``place``; the ``option`` names another one."""
    try:
        yield
    except OSError as error:
        raise refusal(f"cannot write to {place}: {error.strerror}; choose another {option}") from error


def replace(path: Path, content: str | bytes) -> None:
    """Write a file so that it is there as before or as a whole. Raises OSError."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content.encode() if isinstance(content, str) else content)
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
