"""Runs a command as its parent, and ends with whoever started it; then nothing is left of what the command started.

Run as a file by a Python without the lab. Standard input is a pipe that whoever started it holds open.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable

import psutil

TIDYING_SECONDS = 4.0  # that torch's manager of shared memory took, once its clients had ended
END_SECONDS = 10.0  # that killed processes have to be gone
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Set what Linux has for a process."""
    ctypes.CDLL(None).prctl(option, value)


def adopt() -> None:
    """Become the parent of whatever loses its own below this process, also of what has left its session."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def tidies(process: psutil.Process) -> bool:
    """Whether a process removes shared memory and semaphores of others that have ended, and then ends itself."""
    line = " ".join(process.cmdline())
    return "torch_shm_manager" in line or "multiprocessing.resource_tracker" in line


def end_below(pid: int, spared: Collection[int] = (), tidying: float = 0.0) -> None:
    """Kill what descends from a process, but its children that are ``spared``, and what descends from those.

    What removes the shared memory of killed processes has ``tidying`` seconds to do so.

    A killed process's children become those of one that has adopted, and are found at the next look; so is what was
    started during the last one, after which nobody is left to start more.
    """
    begun, looks = time.monotonic(), 0
    limit = begun + END_SECONDS
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
                        looks = 0
                        if time.monotonic() > begun + tidying or not tidies(process):
                            process.kill()
        time.sleep(0.01)


class Paused:
    """Processes that are stopped while others take their turns: whatever they would load ahead cost them nothing."""

    def __init__(self) -> None:
        self._stopped: list[psutil.Process] = []

    def stop(self, heads: Iterable[psutil.Process]) -> None:
        """Stop processes and all below them; those known from last time at once, since it takes time to find all.

        What tidies up shared memory goes on.
        """
        _each(psutil.Process.suspend, self._stopped)
        found = dict.fromkeys(filter(psutil.Process.is_running, self._stopped))  # who has lost its parent, too, goes on
        _each(lambda head: found.update(dict.fromkeys((head, *head.children(recursive=True)))), heads)
        self._stopped = []
        _each(lambda process: process.resume() if tidies(process) else self._stopped.append(process), found)
        _each(psutil.Process.suspend, self._stopped)

    def resume(self) -> None:
        """Let them go on, children before their parents."""
        _each(psutil.Process.resume, self._stopped[::-1])

    def kill(self) -> None:
        """Kill those that are left, as of a guard that was killed."""
        _each(psutil.Process.kill, self._stopped)


def _each(action: Callable[[psutil.Process], None], processes: Iterable[psutil.Process]) -> None:
    """Do this to every process that has not ended."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            action(process)


def main(command: list[str]) -> int:
    """Its exit code, 128 + n where signal n ended it, or 128 + SIGTERM where whoever started it has let go."""
    adopt()
    # One thread and a pipe: a signal that comes just before a system call waits for the call to return.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):  # standard input says when to end
        signal.signal(number, lambda *_: None)
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            process_group=0,  # signals to all of which do not reach this process; stopped, it is woken when this ends
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 - no thread has been started
        )
        while child.poll() is None:
            ready = select.select([0, reading], [], [])[0]
            if 0 in ready:
                return 128 + signal.SIGTERM
            if signal.SIGINT in os.read(reading, 1000):
                os.killpg(child.pid, signal.SIGINT)
    finally:
        end_below(os.getpid(), tidying=TIDYING_SECONDS)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
