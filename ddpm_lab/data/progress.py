"""Progress lines at a readable pace."""

import time
from collections.abc import Callable

__all__ = ["Progress", "paced"]

Progress = Callable[[str], None]


def paced(progress: Progress | None, interval_seconds: float = 1.0) -> Progress:
    """Wrap ``progress`` so that it is called at most once per ``interval_seconds``; lines in between are dropped.

    The first line comes after one interval, so that quick work stays silent. ``None`` gives a function that does
    nothing.
    """
    if progress is None:
        return lambda _line: None
    last = time.monotonic()

    def report(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= interval_seconds:
            last = time.monotonic()
            progress(line)

    return report
