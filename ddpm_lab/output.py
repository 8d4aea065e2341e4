"""What people are told: each line is printed by ``say``, and each foreign name made ``printable``.

Names of files, labels in records and the texts of exceptions come from elsewhere: as they are, they could move a
terminal's cursor, or begin a line of their own.
"""

import io
import os
import sys

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
