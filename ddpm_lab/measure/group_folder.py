"""The folder of a group: whose it is, and the removal of those whose owner was killed before it could."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from ddpm_lab.measure.process import start_ticks

OWNER = "owner"
"""File in a group's folder that says whose it is, locked while the parent lives."""


class GroupFolder:
    """A private folder for as long as a group lives."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"ddpm_lab.{os.getpid()}."))
        self._lock: int | None = claim(self.path)

    def remove(self) -> None:
        """Remove the folder and what lies in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _identity() -> dict[str, Any]:
    """Who this process is, told apart from processes of the same number on other hosts and in other containers."""
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "pid_namespace": str(Path("/proc/self/ns/pid").readlink()),
        "pid": os.getpid(),
        "start_ticks": start_ticks(os.getpid()),
    }


def claim(folder: Path) -> int:
    """Mark a folder as this process's own; the lock on the returned descriptor ends when the process does."""
    new = folder / "owner.new"
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):  # a file system without locks: then nobody will ever get one, and all stay away
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with contextlib.suppress(OSError):  # no /proc: an empty mark, which proves nothing
        os.write(descriptor, json.dumps(_identity()).encode())
    new.rename(folder / OWNER)  # locked before anybody can see it
    return descriptor


def _abandoned(folder: Path) -> bool:
    """Whether a folder is proved to be this user's, made on this boot in this pid namespace, by a process now gone."""
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return False
    with (folder / OWNER).open("r+") as file:
        owner, here = json.load(file), _identity()
        if any(owner[name] != here[name] for name in ("boot", "pid_namespace")):
            return False
        if owner["start_ticks"] is None or start_ticks(int(owner["pid"])) == owner["start_ticks"]:
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises while the owner lives
    return True


def sweep(parent: Path | None = None) -> None:
    """Remove the folders of groups whose parent was killed before it could; those of unknown origin stay."""
    for folder in (parent or Path(tempfile.gettempdir())).glob("ddpm_lab.*.*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if _abandoned(folder):
                shutil.rmtree(folder, ignore_errors=True)
