"""Real git repositories for tests, whatever the user's own settings are."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

SETTINGS = ("user.name=somebody", "user.email=a@example.org", "protocol.file.allow=always", "commit.gpgsign=false")


def git(folder: Path, *words: str) -> str:
    """What git prints; raises CalledProcessError where it fails."""
    command = ["git", "-C", str(folder), *(word for setting in SETTINGS for word in ("-c", setting)), *words]
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def repository(folder: Path, files: Mapping[str, str]) -> Path:
    """A repository with one commit on its branch main."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "--quiet", "--initial-branch=main")
    commit(folder, files)
    return folder


def commit(folder: Path, files: Mapping[str, str]) -> str:
    """Write files and commit them; the commit's hash."""
    write(folder, files)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "a change")
    return git(folder, "rev-parse", "HEAD")


def write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files and no commit."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
