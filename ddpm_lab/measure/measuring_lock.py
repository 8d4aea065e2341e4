"""One process at a time measures on a core: what two measure at once is wrong in both.

Each core that this process may use is a range of bytes in one file for each user of a machine, locked while it
measures; processes that are kept to other cores, such as jobs that share a node, do not wait for each other. The kernel
lets go of the locks of a process that is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

VARIABLE = "DDPM_LAB_MEASURING_LOCK"
"""Environment variable with another file; empty for tests, which measure side by side and claim no speed."""
_SLOT = 16  # bytes of a core, which hold the process id of whoever measures there
_LOOK_SECONDS = 1.0
_holding = False


def lock_file() -> Path:
    """The file, which is not in the home folder: several machines may share that."""
    usual = Path(tempfile.gettempdir(), f"ddpm_lab-measuring-{os.getuid()}.lock")
    return Path(os.environ.get(VARIABLE, usual))


def side_by_side() -> bool:
    """Whether processes measure at once, as tests do: what others take is then no disturbance, and not looked at."""
    return os.environ.get(VARIABLE) == ""


@contextlib.contextmanager
def measuring(say: Callable[[str], None]) -> Iterator[bool]:
    """Hold the cores of this process while the context lasts; True where another process had to end first.

    ``say`` gets one line that names that process. Where the file cannot be opened or locked nobody waits.
    """
    global _holding  # noqa: PLW0603 - locks of this kind belong to the whole process
    descriptor = None if _holding else _open()
    if descriptor is None:
        yield False
        return
    try:
        waited = _take(descriptor, say)
        _holding = True
        yield waited
    finally:
        _holding = False
        os.close(descriptor)  # lets go of the locks


def _open() -> int | None:
    try:
        return os.open(lock_file(), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _take(descriptor: int, say: Callable[[str], None]) -> bool:
    waited = False
    # All in one order, so that two that want the same cores never wait in a circle.
    for core in sorted(os.sched_getaffinity(0)):
        while True:
            try:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, _SLOT, core * _SLOT)
            except (BlockingIOError, PermissionError):
                if not waited:
                    waited = True
                    who = os.pread(descriptor, _SLOT, core * _SLOT).strip(b"\0 ").decode(errors="replace")
                    say(f"process {who or 'unknown'} measures on this machine: waiting until it ends")
                time.sleep(_LOOK_SECONDS)
            except OSError:
                return waited  # a file system without locks
            else:
                break
        with contextlib.suppress(OSError):  # a full disk: then nobody is told who it is
            os.pwrite(descriptor, str(os.getpid()).encode().ljust(_SLOT), core * _SLOT)
    return waited
