"""Runs a command as its parent, and ends with whoever started it; then nothing is left of what the command started.

Run as a file by a Python without the lab. Standard input is a pipe that whoever started it holds open.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection

import psutil

END_SECONDS = 10.0  # that killed processes have to be gone
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def adopt() -> None:
    """Become the parent of whatever loses its own below this process, also of what has left its session."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_below(pid: int, spared: Collection[int] = ()) -> None:
    """Kill what descends from a process, but its children that are ``spared``, and what descends from those.

    A killed process's children become those of one that has adopted, and are found at the next look; so is what was
    started during the last one, after which nobody is left to start more.
    """
    limit, looks = time.monotonic() + END_SECONDS, 0
    while looks < 2 and time.monotonic() < limit:
        looks += 1
        with contextlib.suppress(psutil.Error):  # the process itself has ended
            top = psutil.Process(pid)
            found = top.children(recursive=True)  # first, so that whatever a spared one starts meanwhile is not in it
            spare = [child for child in top.children() if child.pid in spared]
            kept = {process for child in spare for process in (child, *child.children(recursive=True))}
            for process in {*found} - kept:
                with contextlib.suppress(psutil.Error):  # it ended meanwhile
                    if process.status() != psutil.STATUS_ZOMBIE:
                        process.kill()
                        looks = 0
        time.sleep(0.01)


def main(command: list[str]) -> int:
    """Its exit code, 128 + n where signal n ended it."""
    adopt()
    library = ctypes.CDLL(None)
    signal.signal(signal.SIGTERM, _leave)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # whose signals to all do not reach this process
            preexec_fn=lambda: sys.platform == "linux" and library.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - no thread has been started
        )
        signal.signal(signal.SIGINT, lambda *_: os.killpg(child.pid, signal.SIGINT))
        threading.Thread(target=_end_with_starter, daemon=True).start()
        code = child.wait()
    finally:
        end_below(os.getpid())
    return code if code >= 0 else 128 - code


def _leave(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _end_with_starter() -> None:
    os.read(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
