"""pyproject.toml, uv.lock and environment.yml name the same packages and versions."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def uv_lock() -> dict[str, Any]:
    return tomllib.loads((CHECKOUT / "uv.lock").read_text())


def test_uv_lock_belongs_to_pyproject_and_names_public_hosts_only(uv_lock: dict[str, Any]) -> None:
    text = (CHECKOUT / "uv.lock").read_text()
    assert set(re.findall(r"https?://([^/\"]+)", text)) == {"pypi.org", "files.pythonhosted.org"}
    assert "file://" not in text
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    (locked,) = (package for package in uv_lock["package"] if package["name"] == "ddpm-lab")
    for declared, entries in (
        (project["project"]["dependencies"], locked["metadata"]["requires-dist"]),
        (project["dependency-groups"]["dev"], locked["metadata"]["requires-dev"]["dev"]),
    ):
        wanted = {canonicalize_name(r.name): r.specifier for r in map(Requirement, declared)}
        assert {e["name"]: Requirement(e["name"] + e.get("specifier", "")).specifier for e in entries} == wanted


def test_environment_yml_has_a_python_and_the_locked_versions(uv_lock: dict[str, Any]) -> None:
    python, _, section = yaml.safe_load((CHECKOUT / "environment.yml").read_text())["dependencies"]
    requires_python = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert Requirement(f"python{requires_python}").specifier.contains(python.removeprefix("python="))
    pins = {(canonicalize_name(r.name), str(r.specifier)) for r in map(Requirement, section["pip"])}
    assert pins <= {(package["name"], f"=={package['version']}") for package in uv_lock["package"]}
    asked = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {canonicalize_name(Requirement(each).name) for each in asked} <= {name for name, _ in pins}


def test_environment_yml_is_what_make_lock_writes() -> None:
    if shutil.which(CHECKOUT / ".boot" / "uv") is None:
        pytest.skip("no uv here: make setup fetches one")
    show = "import sys; sys.path.insert(0, 'scripts'); import lock; print(lock.environment_yml(), end='')"
    shown = subprocess.run([sys.executable, "-c", show], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    assert shown.stdout == (CHECKOUT / "environment.yml").read_text()
