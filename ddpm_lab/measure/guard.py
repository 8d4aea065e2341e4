"""Runs a command as its parent, and ends with whoever started it; then nothing is left of what the command started.

Run as a file by a Python without the lab. Standard input is a pipe that whoever started it holds open.
"""

from __future__ import annotations

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
    """Kill what descends from a process, but those ``spared`` and what descends from them.

    A killed process's children become those of one that has adopted, and are found at the next look.
    """
    limit = time.monotonic() + END_SECONDS
    while time.monotonic() < limit:
        found = list[psutil.Process]()
        try:
            for child in psutil.Process(pid).children():
                if child.pid not in spared:
                    found += [child, *child.children(recursive=True)]
            found = [process for process in found if process.status() != psutil.STATUS_ZOMBIE]
            for process in found:
                process.kill()
        except psutil.Error:  # one that ended meanwhile, or all of them
            if not psutil.pid_exists(pid):
                return
            continue
        if not found:
            return
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
