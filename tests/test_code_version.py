"""The code version: which files it covers, what changes it, and what a rank says that it loaded."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from git_repository import write

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure import code_version as module
from ddpm_lab.measure.code_version import PACKAGE, Loaded, Tree, code_version, is_library, unlisted

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
print(json.dumps([*first, unlisted({}), unlisted(json.loads(sys.argv[2])), astray(sys.argv[1] + "/inner")]))
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


def test_an_edit_of_every_module_counts_and_is_noticed_meanwhile(own: Loaded, tmp_path: Path) -> None:
    before = code_version(own)
    for name, place in own.modules.items():
        file, text = Path(place), Path(place).read_text()
        file.write_text(text + "another = 1\n")
        assert code_version(own).key != before.key
        with pytest.raises(ConfigError, match=rf"\({name}\)"):
            before.check_unchanged()
        file.write_text(text)
        os.utime(file, (0, 0))
        before.check_unchanged()
    write(tmp_path, {"stranger.cpp": "int one;"})
    before.check_unchanged()
    keys = {before.key}
    for text in ("int one;", "int two;"):
        write(tmp_path, {"inner/deep.cu": text})  # it bears a module's name
        keys.add(code_version(own).key)
    assert len(keys) == 3
    Path(own.modules["helper"]).unlink()
    with pytest.raises(ConfigError, match=r"\(helper, inner.deep\)"):
        before.check_unchanged()


def test_the_version_of_an_imported_package_counts(own: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    real, versions = module._version, [code_version(), code_version(own._replace(libraries=["packaging"]))]
    for name, alike in (("packaging", [True, False]), ("torch", [False, False])):
        monkeypatch.setattr(module, "_version", lambda package, new=name: "99" if package == new else real(package))
        now = [code_version(), code_version(own._replace(libraries=["packaging"]))]
        assert [a.key == b.key for a, b in zip(now, versions, strict=True)] == alike


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Tree]:
    """A revision that holds a lab of its own."""
    shutil.copytree(PACKAGE, tmp_path / "lab" / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    yield Tree(revision="1234567890ab", folders=(str(tmp_path / "lab"),), apart=str(PACKAGE.parent))
    module._lab_sources.cache_clear()


def test_what_measures_counts_and_what_explains_does_not(lab: Tree) -> None:
    before = code_version(tree=lab)
    assert before.key == code_version().key
    write(lab.package, dict.fromkeys(("explain/any.py", "reports/any.py", "__main__.py"), "another = 1"))
    module._lab_sources.cache_clear()
    assert code_version(tree=lab).key == before.key
    for name in ("diffusion/kernels.cpp", "measure/sets.py", "config.py"):
        file = lab.package / name
        text = file.read_text()
        file.write_text(text + "\n")
        with pytest.raises(ConfigError, match=name.partition(".")[0].replace("/", r"\.")):
            code_version(tree=lab)
        module._lab_sources.cache_clear()
        assert code_version(tree=lab).key != before.key
        file.write_text(text)
        module._lab_sources.cache_clear()
        code_version(tree=lab)


def test_an_edit_of_either_side_of_a_comparison_of_revisions_is_noticed(own: Loaded, tmp_path: Path) -> None:
    write(tmp_path, {"apart/helper.py": "factor = 3\n"})
    tree = Tree(revision="1234567890ab", folders=(str(tmp_path / "apart"),), apart=str(tmp_path / "working"))
    assert tree.package == PACKAGE
    here, there = code_version(own), code_version(Loaded({"helper": str(tmp_path / "apart" / "helper.py")}), tree)
    both = here.with_revision(there)
    assert len({here.key, there.key, both.key}) == 3
    assert (both.of(""), both.of("1234567890ab")) == (both, there)
    with pytest.raises(ConfigError, match="0123456789ab"):
        both.of("0123456789ab")
    for name, text in (("apart/helper.py", "factor = 3\n"), ("helper.py", FILES["helper.py"])):
        write(tmp_path, {name: "factor = 4\n"})
        with pytest.raises(ConfigError, match="helper"):
            both.check_unchanged()
        write(tmp_path, {name: text})
    both.check_unchanged()


def test_what_pip_has_put_into_a_folder_is_a_library_and_what_lies_beside_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "target"
    listed = {"nvml.py": True, "sub/deep/one.py": True, "mine.py": False, "own/two.py": False}
    write(target, {"nvml-1.0.dist-info/RECORD": "nvml.py,sha256=x,1\nsub/deep/one.py,,\n", **dict.fromkeys(listed, "")})
    assert {name: is_library(str(target / name)) for name in listed} == listed
    assert is_library(str(tmp_path / "python3" / "site-packages" / "any.py"))
    monkeypatch.syspath_prepend(target)
    for name in ("nvml", "mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        __import__(name)
    assert {"nvml", "mine"} & set(unlisted({})) == {"mine"}
