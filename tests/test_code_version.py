"""The code version: what a rank runs, found without running it; layout and comments do not count."""

import importlib
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM
from ddpm_lab.measure.code_version import RANK_MODULE, Tree, code_version, is_library, unlisted

WORKLOAD = '''
"""A workload."""
import json
import numpy
from helper import factor  # a module beside it
from inner import deep
from inner.relative import thing

def train(config, context):
    """Train."""
    return factor * deep.value + thing
'''
FILES = {
    "planted_workload.py": WORKLOAD,
    "helper.py": "factor = 2\n",
    "inner/__init__.py": "",
    "inner/deep.py": "value = 1\n",
    "inner/relative.py": "from . import sibling\nfrom .below import base\nthing = sibling.one + base.zero\n",
    "inner/sibling.py": "one = 1\n",
    "inner/below/__init__.py": "from .own import three\n",
    "inner/below/own.py": "three = 3\n",
    "inner/below/base.py": "from ... import inner\nfrom ..cousin import two\nzero = 0 * two\n",
    "inner/cousin.py": "two = 2\n",
    "inner/never.py": "unused = 1\n",
}
COUNTED = {
    "planted_workload",
    "helper",
    "inner",
    "inner.deep",
    "inner.relative",
    "inner.sibling",
    "inner.below",
    "inner.below.base",
    "inner.below.own",
    "inner.cousin",
}
Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """A folder on the Python path that holds FILES; the fixture writes another file there."""

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        importlib.invalidate_caches()

    for name, text in FILES.items():
        write(name, text)
    monkeypatch.syspath_prepend(tmp_path)
    return write


def key() -> str:
    """The key of the planted workload now."""
    return code_version("planted_workload:train").key


@pytest.mark.usefixtures("write")
def test_the_walk_follows_every_form_of_import() -> None:
    found = code_version("planted_workload:train")
    assert {m for m in found.modules if not m.startswith("ddpm_lab")} == COUNTED
    assert RANK_MODULE in found.modules
    assert set(found.packages) >= {"numpy", "torch"}
    assert "json" not in found.packages


def test_comments_docstrings_and_layout_do_not_count(write: Write) -> None:
    before = key()
    write(
        "planted_workload.py",
        WORKLOAD.replace('"""A workload."""', "'''Something else.'''\n\n# a comment")
        .replace('"""Train."""', '"""Train, at length."""')
        .replace("factor * deep.value + thing", "(\n        factor * deep.value\n        + thing\n    )"),
    )
    write("helper.py", '"""New docstring."""\n\n\nfactor   =  0x2\n')
    assert key() == before
    write("inner/never.py", "unused = 2\n")
    assert key() == before


@pytest.mark.parametrize("name", sorted(set(FILES) - {"inner/never.py", "planted_workload.py"}))
def test_code_of_every_imported_module_counts(write: Write, name: str) -> None:
    before = key()
    write(name, FILES[name] + "another = 1\n")
    changed = key()
    assert changed != before
    write(name, FILES[name])
    assert key() == before


def test_an_edit_meanwhile_is_noticed(write: Write) -> None:
    before = code_version("planted_workload:train")
    before.check_unchanged()
    write("planted_workload.py", WORKLOAD + "another = 1\n")
    with pytest.raises(ConfigError, match="edited while it was measured"):
        before.check_unchanged()


@pytest.mark.parametrize(
    ("old", "new"),
    [("factor * deep", "factor + deep"), ("return factor", "return 1.0 * factor"), ("config, context", "config, c")],
)
def test_code_of_the_workload_counts(write: Write, old: str, new: str) -> None:
    before = key()
    assert old in WORKLOAD
    write("planted_workload.py", WORKLOAD.replace(old, new))
    assert key() != before


@pytest.mark.parametrize("name", ["helper.cpp", "inner/deep.cu"])
def test_a_source_beside_a_module_counts_with_it(write: Write, name: str) -> None:
    before = key()
    write(name.replace("helper", "stranger").replace("deep", "stranger"), "int one;")
    assert key() == before
    write(name, "int one;")
    first = key()
    write(name, "int two;")
    assert len({before, first, key()}) == 3


def test_a_string_that_is_no_docstring_counts(write: Write) -> None:
    write("helper.py", 'factor = 2\nname = "a"\n')
    before = key()
    write("helper.py", 'factor = 2\nname = "b"\n')
    assert key() != before


def test_the_version_of_an_imported_package_counts(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    del write
    before = key()
    real = importlib.metadata.version
    monkeypatch.setattr(
        "importlib.metadata.version", lambda name: "99.0" if name == "numpy" else real(name), raising=True
    )
    assert key() != before


def test_an_import_that_can_fail_is_no_obstacle(write: Write) -> None:
    write("helper.py", "try:\n    import not_there_at_all\nexcept ImportError:\n    pass\nfactor = 2\n")
    assert "not_there_at_all" not in code_version("planted_workload:train").modules


def test_the_labs_own_workload_lists_what_a_rank_runs_and_not_what_explains() -> None:
    found = code_version(DDPM)
    assert set(found.modules) >= {
        "ddpm_lab.model.train",
        "ddpm_lab.model.unet",
        "ddpm_lab.model.blocks",
        "ddpm_lab.model.diffusion",
        "ddpm_lab.data.loader",
        "ddpm_lab.config",
        "ddpm_lab.measure.rank",
        "ddpm_lab.measure.process",
    }
    assert not [m for m in found.modules if "explain" in m or m.startswith("ddpm_lab.measure.campaign")]
    assert set(found.packages) >= {"torch", "numpy"}
    assert code_version(DDPM).key == found.key


def test_torch_is_not_imported_to_find_the_version() -> None:
    code = (
        "import sys; from ddpm_lab.measure.code_version import code_version; from ddpm_lab.config import DDPM\n"
        "code_version(DDPM)\n"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('ddpm_lab.model')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_a_module_that_is_missing_or_broken_is_named(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"'nowhere:train': there is no module 'nowhere'; is its folder"):
        code_version("nowhere:train")
    with pytest.raises(ConfigError, match=r"no module 'inner\.nowhere'"):
        code_version("inner.nowhere:train")
    write("helper.py", "factor = 2\ndef broken(:\n")
    with pytest.raises(ConfigError, match=r"'planted_workload:train': .*helper\.py, line 2: "):
        key()


def test_a_function_that_the_module_lacks_is_named(write: Write) -> None:
    write("mine.py", "from helper import factor as renamed\nif True:\n    x = 1\ndef step(): ...\nclass Own: ...\n")
    for name in ("renamed", "x", "step", "Own"):
        code_version(f"mine:{name}")
    with pytest.raises(ConfigError, match=r"workload 'mine:stop': .*mine\.py defines no 'stop'"):
        code_version("mine:stop")


@pytest.fixture
def revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write) -> Tree:
    """Another revision of FILES: without inner/sibling.py, and with a helper of its own."""
    root = tmp_path / "apart"
    write("apart/helper.py", "factor = 3\n")
    for name, text in FILES.items():
        if name not in ("inner/sibling.py", "helper.py"):
            write(f"apart/{name}", text)
    working = tmp_path / "working"
    for name, text in FILES.items():
        write(f"working/{name}", text)
        (tmp_path / name).unlink()
    monkeypatch.syspath_prepend(working)
    return Tree(revision="1234567890ab", folders=(str(root),), apart=str(working.resolve()))


def test_a_revision_is_read_in_its_own_folders_and_nowhere_in_the_working_tree(revision: Tree) -> None:
    here, there = code_version("planted_workload:train"), code_version("planted_workload:train", tree=revision)
    assert {m for m in there.modules if not m.startswith("ddpm_lab")} == COUNTED - {"inner.sibling"}
    (folder,) = revision.folders
    assert all(str(s.file).startswith(folder) for m, s in there.sources.items() if not m.startswith("ddpm_lab"))
    same = {m for m, s in there.sources.items() if here.sources[m].sha256 == s.sha256}
    assert here.sources.keys() - same == {"helper", "inner.sibling"}
    (Path(revision.apart) / "only_here.py").write_text("def f(): ...\n")
    code_version("only_here:f")
    for module in ("inner.sibling", "only_here"):
        with pytest.raises(ConfigError, match=f"there is no module '{module}'"):
            code_version(f"{module}:f", tree=revision)


def test_an_edit_of_either_side_is_noticed(revision: Tree, write: Write) -> None:
    here, there = code_version("planted_workload:train"), code_version("planted_workload:train", tree=revision)
    both = here.with_revision(there)
    assert len({here.key, there.key, both.key}) == 3
    assert both.of("") is both
    assert both.of("1234567890ab") is there
    both.check_unchanged()
    for side, text in (("apart", "factor = 3\n"), ("working", FILES["helper.py"])):
        write(f"{side}/helper.py", "factor = 4\n")
        with pytest.raises(ConfigError, match="edited while it was measured"):
            both.check_unchanged()
        write(f"{side}/helper.py", text)
    both.check_unchanged()


@pytest.mark.usefixtures("write")
def test_a_module_from_the_working_tree_is_seen_in_the_process(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import helper, json\n"
        "from ddpm_lab.measure.code_version import astray\n"
        f"print(astray({str(tmp_path.resolve())!r}), astray({str(tmp_path.resolve() / 'inner')!r}))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "['helper'] []"


def test_two_workloads_share_a_version_that_either_changes(write: Write) -> None:
    write("one.py", "def f(): return 1\n")
    write("two.py", "def f(): return 2\n")
    both = code_version("one:f", "two:f")
    assert {"one", "two"} <= set(both.modules)
    assert code_version("two:f", "one:f").key == both.key
    for name in ("one", "two"):
        write(f"{name}.py", "def f(): return 3\n")
        changed = code_version("one:f", "two:f").key
        assert changed != both.key
        both = code_version("one:f", "two:f")


def test_what_only_a_type_checker_reads_is_not_run(write: Write) -> None:
    write("typed.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import helper\ndef f(): ...\n")
    assert "helper" not in code_version("typed:f").modules


def test_libraries_are_told_from_sources(tmp_path: Path) -> None:
    assert is_library(textwrap.__file__)
    assert is_library(pytest.__file__)
    assert not is_library(str(tmp_path / "mine.py"))
    assert not is_library(__file__)


def test_a_module_that_hides_from_the_walk_is_found_when_it_is_loaded(write: Write, tmp_path: Path) -> None:
    write("planted_workload.py", "import importlib\nhidden = importlib.import_module('hid' + 'den')\ntrain = 1\n")
    write("hidden.py", "import helper\n")
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from ddpm_lab.measure.code_version import code_version, unlisted\n"
        "version = code_version('planted_workload:train')\n"
        "before = unlisted(version.modules)\n"
        "import planted_workload\n"
        "print(json.dumps([before, unlisted(version.modules)]))"
    )
    shown = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == '[[], ["helper", "hidden"]]'


def test_the_hooks_of_an_installation_are_no_part_of_a_workload(write: Write) -> None:
    write("sitecustomize.py", "import helper\n")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("sitecustomize", "helper"):
            patch.delitem(sys.modules, name, raising=False)
        importlib.import_module("sitecustomize")
        found = unlisted([])
        patch.delitem(sys.modules, "helper")
        patch.delitem(sys.modules, "sitecustomize")
    assert "helper" in found
    assert "sitecustomize" not in found


def test_listed_modules_and_libraries_are_not_reported() -> None:
    loaded = [name for name, m in sys.modules.items() if (getattr(m, "__file__", None) or "").endswith(".py")]
    assert unlisted(loaded) == []
