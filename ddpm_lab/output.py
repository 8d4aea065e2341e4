"""What people are told: each line is printed by ``say``, or is live ``Progress``; foreign names are ``printable``.

Names of files, labels in records and the texts of exceptions come from elsewhere: as they are, they could move a
terminal's cursor, or begin a line of their own.
"""

import contextlib
import io
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpm_lab.checks import LabError


class Unread(BrokenPipeError):  # noqa: N818 - an outcome
    """Nobody reads what is printed any more, as in a pipe into head."""


def printable(text: object) -> str:
    r"""``text`` in one line of printable characters; any other is written as its escape, such as ``\n`` or ``\x1b``."""
    line = str(text)
    if line.isprintable():
        return line
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def prepare_streams() -> None:
    """Let characters that an output's encoding lacks be written as escapes. Raises LabError for a closed output."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - for as long as the process lives
    if sys.stdout is None:  # what is opened next would take its place
        raise LabError("standard output is closed: send it to a file, or to /dev/null")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(*lines: object, error: bool = False, begin: str = "", end: str = "\n") -> None:
    """Print each of ``lines`` as one line, on standard error if ``error``; without any, flush what others printed.

    Messages on standard error that cannot be written end nothing. Of standard output, raises Unread where nobody reads
    on, and LabError where it cannot be written, such as on a full disk.
    """
    stream = sys.stderr if error else sys.stdout
    try:
        text = "\n".join(map(printable, lines))
        print(f"{begin}{text}" if lines else "", end=end if lines else "", file=stream, flush=True)
    except OSError as failure:
        # What is still buffered would fail again when Python ends, where nobody catches it.
        with open(os.devnull, "w") as nothing:  # noqa: PTH123
            os.dup2(nothing.fileno(), stream.fileno())
        if error:
            return
        if isinstance(failure, BrokenPipeError):
            raise Unread from failure
        raise LabError(f"cannot write to standard output: {failure.strerror}") from failure


# Live progress: one line that changes in a notebook, lines on a terminal and in a file

FILE_VARIABLE = "DDPM_LAB_PROGRESS"  # a file that receives every line, for whoever runs notebooks in batch
REPLACED_SECONDS, KEPT_SECONDS = 1.0, 10.0  # between lines that take the last one's place, and between others
SILENT_SECONDS = 1.0  # of a command's first line, so that quick work says nothing


class Progress:
    """Called with one line of text; ``always`` shows it at once, else where the last one is some time ago."""

    def __init__(self, title: str, *, quiet: bool = False, say: Callable[[str], None] | None = None) -> None:
        self.title, self.quiet, self.say = title, quiet, say
        self.prefix = ""
        self._until: float | None = None
        self._handle: Any = None
        shell = sys.modules.get("IPython")
        self._shell = shell.get_ipython() if shell else None
        self.in_notebook = self._shell is not None
        replaced = say is None and (self.in_notebook or sys.stderr.isatty())
        self._pause = REPLACED_SECONDS if replaced else KEPT_SECONDS
        self._shown = time.monotonic() - self._pause + SILENT_SECONDS

    def __call__(self, text: str) -> None:
        if time.monotonic() - self._shown >= self._pause:
            self.always(text)

    def always(self, text: str, *, stays: bool = False) -> None:
        """Show a line now; on a terminal and in a notebook the next one takes its place, unless it ``stays``."""
        self._shown = time.monotonic()
        line = printable(" ".join(part for part in (self.prefix, self._left(), text) if part))
        if file := os.environ.get(FILE_VARIABLE):
            with contextlib.suppress(OSError), Path(file).open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")
        if self.quiet:
            return
        shown = f"{self.title}: {line}"
        if self.say is not None:
            self.say(line)
        elif self._shell is not None:
            self._display(line)
        elif sys.stderr.isatty():
            width = 120
            with contextlib.suppress(OSError):
                width = os.get_terminal_size(sys.stderr.fileno()).columns
            say(shown if stays else shown[: width - 1], error=True, begin="\r\x1b[K", end="\n" * stays)
        else:
            say(shown, error=True)

    def expect(self, seconds: float | None) -> None:
        """Say in every line from now on how much of these seconds is left; None says nothing."""
        self._until = None if seconds is None else time.monotonic() + seconds

    def _left(self) -> str:
        if self._until is None:
            return ""
        left = self._until - time.monotonic()
        if left < 5:
            return "nearly done;" if left > -5 else "takes longer than forecast;"
        return f"about {left:.0f} s left;" if left < 90 else f"about {left / 60:.0f} min left;"

    def done(self, text: str) -> None:
        """Show the last line and leave it standing."""
        self.prefix, self._until = "", None
        self.stay(text)

    def stay(self, text: str) -> None:
        """Show a line and leave it standing: the next one comes below it."""
        self.always(text, stays=True)
        self._handle = None

    def _display(self, line: str) -> None:
        from IPython.display import display  # noqa: PLC0415 - only inside a notebook

        data = {"text/plain": line}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(data, raw=True)
