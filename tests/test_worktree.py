"""A revision in a folder of its own: what it holds, what of the repository is left alone, and what is removed."""

from __future__ import annotations

import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from git_repository import git, repository, write

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure import code_version as sources
from ddpm_lab.measure.code_version import in_repository
from ddpm_lab.measure.worktree import Repository, tree_of


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A repository whose working tree differs from its only commit."""
    folder = repository(tmp_path / "mine", {"mine.py": "x = 1\n", "notes.txt": "old\n"})
    write(folder, {"mine.py": "x = 2\n", "new.py": ""})
    git(folder, "add", "mine.py")
    return folder


def state(folder: Path) -> tuple[str, ...]:
    """What a user would notice: branch, index, files, and what git remembers."""
    words = ("status --porcelain --branch", "ls-files --stage", "branch --all -vv", "worktree list", "stash list")
    return tuple(git(folder, *line.split()) for line in words)


KILLED = """
import os, signal, sys
from pathlib import Path
from ddpm_lab.measure.worktree import Repository
own = Repository.around(Path(sys.argv[1]))
with own.worktree(own.commit("main")) as folder:
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_worktree_holds_the_revision_and_the_users_repository_stays_as_it_is(mine: Path) -> None:
    """What a killed process leaves is removed by the next one, and what lives is not."""
    before, index = state(mine), (mine / ".git" / "index").stat().st_mtime_ns
    hook = mine / ".git" / "hooks" / "post-checkout"
    write(mine, {str(hook): "#!/bin/sh\ntouch hooked\n"})
    hook.chmod(0o755)
    done = subprocess.run([sys.executable, "-c", KILLED, str(mine)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    left = Path(done.stdout.strip())
    assert (left / "mine.py").is_file()
    own = Repository.around(mine)
    with own.worktree(own.commit("main")) as one, own.worktree(own.commit("main")) as two:
        assert not left.parent.exists()
        for folder in (one, two):
            assert (folder / "mine.py").read_text() == "x = 1\n"
            assert not (folder / "new.py").exists()
            assert not (folder / "hooked").exists()
        assert (mine / "mine.py").read_text() == "x = 2\n"
    assert not one.parent.exists()
    assert (mine / ".git" / "index").stat().st_mtime_ns == index, "not even refreshed"
    assert state(mine) == before


def test_what_is_no_commit_is_refused_and_a_hooks_variables_lead_nowhere(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = repository(tmp_path / "other", {"other.py": ""})
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_INDEX_FILE", str(other / ".git" / "index"))
    own = Repository.around(mine)
    assert own.root == mine.resolve()
    for revision in ("nowhere", "", "--all", "main:mine.py"):
        with pytest.raises(ConfigError, match=f"'{revision}'"):
            own.commit(revision)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        Repository.around(tmp_path)


def test_folders_on_the_path_have_counterparts_and_libraries_have_none(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(mine, {"src/pack/__init__.py": "", "generated/made.py": ""})
    root, there = mine.resolve(), tmp_path / "there"
    (there / "src").mkdir(parents=True)
    for folder in ("generated", "src"):
        monkeypatch.syspath_prepend(root / folder)
    monkeypatch.chdir(mine)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    tree = tree_of(Repository(root), "1234567890abcdef", there, ["pack"])
    assert (tree.revision, list(tree.folders)) == ("1234567890ab", [str(there), str(there / "src")])
    assert tree.path[:2] == list(tree.folders)
    assert not {str(root / "src"), str(root / "generated"), ""} & set(tree.path), "also what the revision has not"
    assert sysconfig.get_paths()["purelib"] in tree.path


def test_libraries_and_other_repositories_below_the_root_are_not_of_it_and_submodules_are_named(
    mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(mine.resolve())
    git(mine, "submodule", "--quiet", "add", str(repository(tmp_path / "sub", {"a.py": ""})), "vendor/sub")
    git(mine, "commit", "--quiet", "--message", "with a submodule")
    repository(mine / "clone", {"a.py": ""})
    write(mine, {"venv/lib/b.py": "", "pack/c.py": ""})
    monkeypatch.setattr(sources, "_library_folders", lambda: (f"{root}/venv/lib/",))
    assert in_repository(mine, root)
    assert in_repository(mine / "pack" / "c.py", root)
    for other in ("clone", "clone/a.py", "vendor/sub/a.py", "venv/lib", "venv/lib/b.py", "..", "/"):
        assert not in_repository(mine / other, root), other
    own = Repository.around(mine)
    assert own.submodule_of(mine / "vendor" / "sub" / "a.py") == "vendor/sub"
    assert own.submodule_of(mine / "clone" / "a.py") == own.submodule_of(mine / "mine.py") == ""
