"""The code version: what changes it, what a rank says that it loaded, and a revision in a folder of its own."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from git_repository import git, repository, write

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure import code_version as module
from ddpm_lab.measure.code_version import PACKAGE, Loaded, Tree, code_version, is_setting, settings_among
from ddpm_lab.measure.hardware import package_version
from ddpm_lab.questions.gate import commit_of, root_of, worktree

WORKLOAD = """
import json
import importlib
import numpy as np
from helper import factor
from inner import deep
from packaging.version import Version

hidden = importlib.import_module('hid' + 'den')

def train():
    from inner.late import two
    return factor * deep.value + two
"""
FILES = {
    "planted_workload.py": WORKLOAD,
    "helper.py": "factor = 2\n",
    "hidden.py": "",
    "inner/__init__.py": "",
    "inner/deep.py": "from . import sibling\nvalue = sibling.one\n",
    "inner/sibling.py": "one = 1\n",
    "inner/late.py": "two = 2\n",
    "inner/never.py": "unused = 1\n",
}
COUNTED = ("planted_workload", "helper", "hidden", "inner", "inner.deep", "inner.sibling")
LOADED = """
import json, sys
sys.path.insert(0, sys.argv[1])
from ddpm_lab.measure.code_version import astray, loaded, unlisted
import planted_workload
first = loaded()
planted_workload.train()
print(json.dumps([*first[:2], unlisted({}), unlisted(json.loads(sys.argv[2])), astray(sys.argv[1] + "/inner")]))
print(json.dumps([m for m in sys.modules if m == 'torch' or m.startswith(('ddpm_lab.diffusion', 'ddpm_lab.training'))]))
"""


@pytest.fixture
def own(tmp_path: Path) -> Loaded:
    """What a rank of the planted workload says that it loaded, from a folder that holds FILES."""
    write(tmp_path, FILES)
    places = {m: tmp_path.joinpath(*m.split(".")) for m in COUNTED}
    return Loaded({m: str(p / "__init__.py" if p.is_dir() else p.with_suffix(".py")) for m, p in places.items()})


def test_a_rank_says_what_it_loaded_however_it_was_imported(own: Loaded, tmp_path: Path) -> None:
    known = {**code_version(own).modules, "helper": "another"}
    words = [sys.executable, "-c", LOADED, str(tmp_path), json.dumps(known)]
    shown = subprocess.run(words, capture_output=True, text=True, check=True)
    (files, libraries, everything, unknown, inside), heavy = map(json.loads, shown.stdout.splitlines())
    assert files == own.modules
    assert set(libraries) >= {"numpy", "packaging"}
    assert not {"json", "importlib"} & set(libraries), "Python's own"
    assert everything == sorted({*COUNTED, "inner.late"})
    assert unknown == ["helper", "inner.late"], "not as it was, and not known"
    assert inside == ["inner", "inner.deep", "inner.late", "inner.sibling"], "of another revision's folder"
    assert heavy == [], "the parent stays light"


INSTALLED = """
import json, sys
sys.path.insert(0, sys.argv[1])
from ddpm_lab.measure.code_version import loaded, unlisted
import helper, inner.deep
print(json.dumps([loaded().modules, list(loaded(["inner.deep:make"]).modules), unlisted({}, ["helper:make"])]))
"""


def test_the_own_package_of_a_workload_counts_where_it_is_installed(tmp_path: Path) -> None:
    """And no other that is installed beside it."""
    write(tmp_path / "site-packages", FILES)
    words = [sys.executable, "-c", INSTALLED, str(tmp_path / "site-packages")]
    shown = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert shown == [{}, ["inner", "inner.sibling", "inner.deep"], ["helper"]]


def test_an_edit_of_every_module_counts_and_is_noticed_meanwhile(own: Loaded, tmp_path: Path) -> None:
    before = code_version(own)
    file = Path(own.modules["inner.sibling"])
    text = file.read_text()
    file.write_text(text + "another = 1\n")
    assert code_version(own).key != before.key
    with pytest.raises(ConfigError, match=r"\(inner.sibling\)"):
        before.check_unchanged()
    file.write_text(text)
    write(tmp_path, {"stranger.cpp": "int one;"})
    before.check_unchanged()
    keys = {before.key}
    for text in ("int one;", "int two;"):
        write(tmp_path, {"inner/deep.cu": text})  # it bears a module's name
        keys.add(code_version(own).key)
    for header in ("inner/deep.cuh", "include/deep.h"):
        write(tmp_path, {header: "#define ONE 1"})
        keys.add(code_version(own).key)
    assert len(keys) == 5
    settings = tmp_path / "a.json"
    settings.touch()
    found = code_version(own._replace(settings=[str(settings)]))
    settings.write_text("{}")
    with pytest.raises(ConfigError, match=r"\(a.json\)"):
        found.check_unchanged()
    found.written.update((str(settings), own.modules["helper"]))  # by a command that is measured
    found.check_unchanged()
    Path(own.modules["helper"]).unlink()
    with pytest.raises(ConfigError, match=r"\(helper\)"):
        found.check_unchanged()


def test_the_version_of_an_imported_package_counts(own: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    real, versions = package_version, [code_version(), code_version(own._replace(libraries=["packaging"]))]
    for name, alike in (("packaging", [True, False]), ("torch", [False, False])):
        monkeypatch.setattr(module, "package_version", lambda found, new=name: "99" if found == new else real(found))
        now = [code_version(), code_version(own._replace(libraries=["packaging"]))]
        assert [a.key == b.key for a, b in zip(now, versions, strict=True)] == alike


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Tree]:
    """A revision that holds a lab of its own."""
    shutil.copytree(PACKAGE, tmp_path / "lab" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    yield Tree(revision="1234567890ab", folders=(str(tmp_path / "lab"),), apart=str(PACKAGE.parent))
    module._lab_sources.cache_clear()


def test_a_variable_that_changes_the_speed_of_the_same_code_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_version().key
    others = ("TORCH_LOGS", "TRITON_CACHE_DIR", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_DUMP_FILE")
    for name in ("SHLVL", "TORCHINDUCTOR_CACHE_DIR", "NCCL_DEBUG_FILE", *others):
        monkeypatch.setenv(name, "elsewhere")
        assert code_version().key == before
    for name in (
        "CXX",
        "LD_PRELOAD",
        "OMP_THREAD_LIMIT",
        "PYTHONMALLOC",
        "TORCHINDUCTOR_MAX_AUTOTUNE",
        "NCCL_BUFFSIZE",
        "NVIDIA_TF32_OVERRIDE",
        "THP_MEM_ALLOC_ENABLE",
        "TORCH_COMPILE_DISABLE",
        "TRITON_INTERPRET",
    ):
        monkeypatch.setenv(name, "1")
        assert code_version().key != before
        monkeypatch.delenv(name)


def test_a_variable_that_a_workloads_code_names_counts(own: Loaded, tmp_path: Path) -> None:
    lines = ['os.environ.get("DEPTH")', "os.environ['WIDTH']", "'PATH', '_', '', 'SLURM_JOB_ID'", "# NOTED"]
    write(
        tmp_path, {"reads.py": "\n".join(lines), "a.yaml": "width: ${oc.env:LENGTH}\n", "a.sh": "python $SIZE ${SEED}"}
    )
    settings = [str(tmp_path / name) for name in ("a.yaml", "a.sh")]
    loaded = own._replace(modules={**own.modules, "reads": str(tmp_path / "reads.py")}, settings=settings)

    def key(**environment: str) -> str:
        return code_version(loaded, environment=environment).key

    keys = {key()} | {key(**{name: "1"}) for name in ("DEPTH", "WIDTH", "LENGTH", "SIZE", "SEED")} | {key(DEPTH="2")}
    assert len(keys) == 7
    assert {key(**{name: "1"}) for name in ("PATH", "_", "SLURM_JOB_ID", "NOTED", "MORE")} == {key()}


def test_what_measures_counts_and_what_explains_does_not(lab: Tree) -> None:
    before = code_version(tree=lab)
    assert before.key == code_version().key
    write(lab.package, dict.fromkeys(("explain/any.py", "reports/any.py", "__main__.py"), "another = 1"))
    module._lab_sources.cache_clear()
    assert code_version(tree=lab).key == before.key
    keys = {before.key}
    for name in ("diffusion/kernels.cpp", "measure/sets.py", "config.py"):
        with (lab.package / name).open("a") as file:
            file.write("\n")
        with pytest.raises(ConfigError, match=name.partition(".")[0].replace("/", r"\.")):
            code_version(tree=lab)
        module._lab_sources.cache_clear()
        keys.add(code_version(tree=lab).key)
    assert len(keys) == 4


def test_an_edit_of_either_side_of_a_comparison_of_revisions_is_noticed(own: Loaded, tmp_path: Path) -> None:
    write(tmp_path, {"apart/helper.py": "factor = 3\n"})
    tree = Tree(revision="1234567890ab", folders=(str(tmp_path / "apart"),), apart=str(tmp_path / "working"))
    there = code_version(Loaded({"helper": str(tmp_path / "apart" / "helper.py")}), tree)
    both = code_version(own).with_revision(there)
    assert len({code_version(own).key, there.key, both.key}) == 3
    assert (both.of(""), both.of("1234567890ab")) == (both, there)
    with pytest.raises(ConfigError, match="0123456789ab"):
        both.of("0123456789ab")
    write(tmp_path, {"apart/helper.py": "factor = 4\n"})
    with pytest.raises(ConfigError, match="helper"):
        both.check_unchanged()


def test_which_files_that_a_workload_reads_are_settings(tmp_path: Path) -> None:
    listed = {".lab/work/a.json": True, ".lab/work/conf/a.json": True, ".lab/work/.a.json": True}
    listed |= dict.fromkeys((".lab/work/.git/a.json", ".lab/work/conf/__pycache__/a.json"), False)
    listed |= {".lab/work/fast.so": True, ".lab/work/built/fast.so": False, ".lab/work/torchinductor_me/a.cpp": False}
    listed |= dict.fromkeys((".lab/work/env/site-packages/one/a.json", ".lab/a.json", "named/a.json"), False)
    write(tmp_path, dict.fromkeys([*listed, ".lab/work/built/build.ninja"], ""))
    places = [tmp_path / ".lab" / "work"]
    assert {name: is_setting(str(tmp_path / name), places) for name in listed} == listed
    assert is_setting(str(tmp_path / "named" / "a.json"), [*places, tmp_path / "named"])
    assert not is_setting(str(places[0] / "none.json"), places)


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


def test_a_worktree_holds_the_revision_and_the_users_repository_stays_as_it_is(mine: Path) -> None:
    before, index = state(mine), (mine / ".git" / "index").stat().st_mtime_ns
    hook = mine / ".git" / "hooks" / "post-checkout"
    write(mine, {str(hook): "#!/bin/sh\ntouch hooked\n"})
    hook.chmod(0o755)
    root = root_of(mine)
    with worktree(root, commit_of(root, "main")) as one, worktree(root, commit_of(root, "main")) as two:
        for folder in (one, two):
            assert (folder / "mine.py").read_text() == "x = 1\n"
            assert not (folder / "new.py").exists()
            assert not (folder / "hooked").exists()
            assert settings_among([str(folder / "mine.py")], [folder / "sub"], []), "as from a subfolder here"
            assert not (folder / ".git").exists(), "which a script may look for, and then ask git"
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
    root = root_of(mine)
    assert root == mine.resolve()
    for revision in ("nowhere", "", "--all", "main:mine.py"):
        with pytest.raises(ConfigError, match=f"'{revision}'"):
            commit_of(root, revision)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        root_of(tmp_path)
