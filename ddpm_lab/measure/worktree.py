"""A revision of somebody's git repository as a folder of its own, for as long as it is measured.

Neither index nor branches nor working tree are touched: ``git worktree`` checks the commit out below the folder for
temporary files. What a killed process leaves is removed by the next one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure.code_version import Tree, in_repository
from ddpm_lab.measure.group_folder import GroupFolder, sweep

NAME = "tree"
OF_ANOTHER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
"""What git tells its hooks of the repository that they run for; this one is found by its folder."""


class GitError(ConfigError):
    """What git refuses, in its own words."""


def _git(folder: Path, *words: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in OF_ANOTHER}
    environment |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0"}
    command = ["git", "-C", str(folder), "-c", f"core.hooksPath={os.devnull}", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise ConfigError(f"--against needs git, and it cannot be started ({error.strerror}): install it") from error
    if done.returncode:
        raise GitError(" ".join(done.stderr.split())[:300])
    return done.stdout.strip()


@dataclass(frozen=True, slots=True)
class Repository:
    """A git repository by the root of its working tree."""

    root: Path

    @classmethod
    def around(cls, folder: Path) -> Repository:
        """The repository that a folder lies in. Raises ConfigError where there is none."""
        try:
            return cls(Path(_git(folder, "rev-parse", "--show-toplevel")).resolve())
        except GitError as error:
            raise ConfigError(
                f"--against compares the working tree of a git repository with a revision of it, and {folder} is in "
                f"none: change to its folder (git says: {error})"
            ) from error

    def commit(self, revision: str) -> str:
        """The full hash of a revision. Raises ConfigError where the repository has none of that name."""
        try:
            return _git(self.root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        except GitError as error:
            shallow = _git(self.root, "rev-parse", "--is-shallow-repository") == "true"
            remedy = (
                "this clone is shallow: fetch its history with git fetch --unshallow, or fetch-depth: 0 in a workflow"
                if shallow
                else "give a branch, a tag or a commit, and fetch what another clone has"
            )
            raise ConfigError(f"--against is {revision!r}, which {self.root} does not have: {remedy}") from error

    def submodule_of(self, file: Path) -> str:
        """The submodule that a file of the working tree lies in, or the empty string."""
        path = file.resolve()
        between = [p for p in path.parents if p.is_relative_to(self.root) and p != self.root and (p / ".git").exists()]
        if not between:
            return ""
        name = str(between[-1].relative_to(self.root))
        return name if _git(self.root, "ls-files", "--stage", "--", name).startswith("160000 ") else ""

    @contextlib.contextmanager
    def worktree(self, commit: str) -> Iterator[Path]:
        """A folder that holds ``commit``, gone at the end. Raises ConfigError where git cannot make it."""
        self._remove_abandoned()
        holder = GroupFolder()
        folder = holder.path.resolve() / NAME
        try:
            try:
                _git(self.root, "worktree", "add", "--quiet", "--detach", str(folder), commit)
            except GitError as error:
                raise ConfigError(f"git cannot check out {commit[:12]} in {folder}: {error}") from error
            yield folder
        finally:
            self._remove(folder)
            holder.remove()

    def _remove(self, folder: Path) -> None:
        with contextlib.suppress(ConfigError):  # twice, since one is locked while git makes it
            _git(self.root, "worktree", "remove", "--force", "--force", str(folder))

    def _remove_abandoned(self) -> None:
        """Remove what killed processes left: their folders, then what the repository remembers of these."""
        sweep()
        for line in _git(self.root, "worktree", "list", "--porcelain").splitlines():
            folder = Path(line.removeprefix("worktree "))
            ours = folder.name == NAME and folder.parent.name.startswith("ddpm_lab.")
            if line.startswith("worktree ") and ours and not folder.exists():
                self._remove(folder)


def tree_of(repository: Repository, commit: str, worktree: Path, modules: Iterable[str]) -> Tree:
    """Where a revision's modules are found: in the counterparts of the folders that hold ``modules`` here.

    These are the folders on this process's Python path that belong to the repository, and those of modules that an
    import hook finds there, as that of an editable install does.
    """
    folders = [Path(p).resolve() for p in sys.path]
    for top in dict.fromkeys(m.partition(".")[0] for m in modules):
        spec = importlib.util.find_spec(top)
        places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []
        folders += [Path(place).resolve().parent for place in places if place]
    own = [folder for folder in dict.fromkeys(folders) if in_repository(folder, str(repository.root))]
    there = [worktree / folder.relative_to(repository.root) for folder in own]
    return Tree(revision=commit[:12], folders=tuple(str(f) for f in there if f.is_dir()), apart=str(repository.root))
