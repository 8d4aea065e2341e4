"""A revision of somebody's git repository as a folder of its own, for as long as it is measured.

Git remembers nothing of it: the files are written through an index that lies in the same folder.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure.code_version import Tree, in_repository
from ddpm_lab.measure.process import private_folder

OF_ANOTHER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR")
"""What git tells its hooks of the repository that they run for; this one is found by its folder."""


def _git(folder: Path, *words: str, refusal: str = "git failed", **variables: str) -> str:
    """What git prints. Raises ConfigError, with the ``refusal`` and git's own words, where it fails."""
    environment = {k: v for k, v in os.environ.items() if k not in OF_ANOTHER}
    environment |= {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", **variables}
    command = ["git", "-C", str(folder), "-c", f"core.hooksPath={os.devnull}", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except OSError as error:
        raise ConfigError(f"--against needs git, and it cannot be started ({error.strerror}): install it") from error
    if done.returncode:
        said = " ".join(done.stderr.split())[:300]
        raise ConfigError(f"{refusal} (git says: {said})" if said else refusal)
    return done.stdout.strip()


def root_of(folder: Path) -> Path:
    """The root of the repository that a folder lies in. Raises ConfigError where there is none."""
    refusal = (
        f"--against compares the working tree of a git repository with a revision of it, and {folder} is in none: "
        "change to its folder"
    )
    return Path(_git(folder, "rev-parse", "--show-toplevel", refusal=refusal)).resolve()


def commit_of(root: Path, revision: str) -> str:
    """The full hash of a revision. Raises ConfigError where the repository has none of that name."""
    remedy = "give a branch, a tag or a commit, and fetch what another clone has"
    if _git(root, "rev-parse", "--is-shallow-repository") == "true":
        remedy = "this clone is shallow: run git fetch --unshallow, or set fetch-depth: 0 in a workflow"
    words = ("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
    return _git(root, *words, refusal=f"--against is {revision!r}, which {root} does not have: {remedy}")


def submodule_of(root: Path, file: Path) -> str:
    """The submodule that a file of the working tree lies in, or the empty string."""
    for folder in file.resolve().parents:
        if root in folder.parents and (folder / ".git").exists():
            name = str(folder.relative_to(root))
            if _git(root, "ls-files", "--stage", "--", name).startswith("160000 "):
                return name
    return ""


@contextlib.contextmanager
def worktree(root: Path, commit: str) -> Iterator[Path]:
    """A folder that holds ``commit``, gone at the end. Raises ConfigError where git cannot make it."""
    with private_folder() as holder:
        folder, index = Path(holder).resolve() / "tree", f"{holder}/index"
        refusal = f"git cannot check out {commit[:12]} in {folder}"
        for words in (("read-tree", commit), ("checkout-index", "--all", "--quiet", f"--prefix={folder}/")):
            _git(root, *words, refusal=refusal, GIT_INDEX_FILE=index)
        (folder.parent / ".git").mkdir()  # where the repository of a file begins, as is looked for
        yield folder


def tree_of(root: Path, commit: str, holder: Path, modules: Iterable[str]) -> Tree:
    """Where a revision's modules are: counterparts of the folders on the path, and of those of ``modules``."""
    folders = [Path(p).resolve() for p in sys.path]
    for top in dict.fromkeys(m.partition(".")[0] for m in modules):
        spec = importlib.util.find_spec(top)
        places = list(spec.submodule_search_locations or [spec.origin or ""]) if spec else []
        folders += [Path(place).resolve().parent for place in places if place]
    own = [folder for folder in dict.fromkeys(folders) if in_repository(folder, str(root))]
    there = [holder / folder.relative_to(root) for folder in own]
    return Tree(revision=commit[:12], folders=tuple(str(f) for f in there if f.is_dir()), apart=str(root))
