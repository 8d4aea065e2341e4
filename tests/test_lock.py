"""pyproject.toml, uv.lock, requirements.lock and environment.yml name the same packages, versions and files."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parent.parent
Pins = dict[tuple[str, str], set[str]]


def parse_requirements(text: str) -> tuple[Pins, dict[tuple[str, str], Requirement]]:
    """Return the hashes and the requirement of each (name, version) of a hashed requirements file."""
    hashes: Pins = {}
    requirements: dict[tuple[str, str], Requirement] = {}
    for entry in re.sub(r"^\s*#.*\n?", "", text, flags=re.MULTILINE).replace("\\\n", " ").splitlines():
        requirement = Requirement(entry.split("--hash")[0].strip())
        (version,) = (specifier.version for specifier in requirement.specifier)
        key = (str(canonicalize_name(requirement.name)), version)
        requirements[key] = requirement
        hashes[key] = set(re.findall(r"--hash=(sha256:[0-9a-f]{64})", entry))
    return hashes, requirements


@pytest.fixture(scope="module")
def uv_lock() -> dict[str, Any]:
    return tomllib.loads((CHECKOUT / "uv.lock").read_text())


@pytest.fixture(scope="module")
def pip_section() -> list[str]:
    environment = yaml.safe_load((CHECKOUT / "environment.yml").read_text())
    (section,) = (entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert all(isinstance(line, str) for line in section)
    return list(section)


def runtime_closure(lock: dict[str, Any]) -> set[tuple[str, str]]:
    """Return (name, version) of all that the project's own dependencies reach in uv.lock, on any Linux machine."""
    packages: dict[str, list[dict[str, Any]]] = {}
    for package in lock["package"]:
        packages.setdefault(package["name"], []).append(package)
    (project,) = packages["ddpm-lab"]
    reached = set()
    waiting = [(dependency, tuple(dependency.get("extra", ()))) for dependency in project["dependencies"]]
    seen = set()
    while waiting:
        dependency, extras = waiting.pop()
        for package in packages[dependency["name"]]:
            if dependency.get("version", package["version"]) != package["version"]:
                continue
            key = (package["name"], package["version"])
            reached.add(key)
            if (key, extras) in seen:
                continue
            seen.add((key, extras))
            for extra in extras:
                optional = package.get("optional-dependencies", {}).get(extra, [])
                waiting += [(entry, tuple(entry.get("extra", ()))) for entry in optional]
            waiting += [(entry, tuple(entry.get("extra", ()))) for entry in package.get("dependencies", [])]
    return reached


def test_requirements_lock_holds_what_uv_lock_installs(uv_lock: dict[str, Any]) -> None:
    hashes, _ = parse_requirements((CHECKOUT / "requirements.lock").read_text())
    assert set(hashes) == runtime_closure(uv_lock)
    for package in uv_lock["package"]:
        key = (package["name"], package["version"])
        if key in hashes:
            files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
            assert hashes[key] == {file["hash"] for file in files}, key


def test_requirements_lock_is_what_uv_exports() -> None:
    uv = shutil.which(CHECKOUT / ".boot" / "uv") or shutil.which("uv")
    if uv is None:
        pytest.skip("no uv here: make setup fetches one")
    export = ["export", "--frozen", "--no-dev", "--no-emit-project", "--no-header", "--offline", "--quiet"]
    exported = subprocess.run([uv, *export], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout
    fresh, committed = parse_requirements(exported), parse_requirements((CHECKOUT / "requirements.lock").read_text())
    assert fresh == committed


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


def test_environment_yml_names_the_locked_versions(uv_lock: dict[str, Any], pip_section: list[str]) -> None:
    environment = yaml.safe_load((CHECKOUT / "environment.yml").read_text())
    assert {"name", "channels", "dependencies"} == set(environment)
    (python,) = (entry for entry in environment["dependencies"] if str(entry).startswith("python="))
    requires_python = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert Requirement(f"python{requires_python}").specifier.contains(python.removeprefix("python="))
    assert "pip" in environment["dependencies"]

    # pip takes the hashes of a package from its first mention, so the lock file has to come first.
    assert pip_section[0] == "-r requirements.lock"
    named = dict(line.split("==") for line in pip_section[1:])
    assert set(named) >= {"torch", "torchvision", "jupyterlab", "papermill", "matplotlib", "pandas", "nbconvert"}
    for name, version in named.items():
        assert [p["version"] for p in uv_lock["package"] if p["name"] == name] == [version]


def write_empty_wheel(distribution: importlib.metadata.Distribution, folder: Path) -> str:
    """Write a wheel with the metadata of an installed package and nothing else; return its hash."""
    metadata = distribution.read_text("METADATA")
    assert metadata is not None
    # The tag says "any platform": only names, versions and dependencies are on trial.
    stem = f"{canonicalize_name(distribution.name).replace('-', '_')}-{distribution.version}"
    files = {
        f"{stem}.dist-info/METADATA": metadata,
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for name, text in files.items():
        digest = urlsafe_b64encode(sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text.encode())}\n"
    files[f"{stem}.dist-info/RECORD"] = f"{record}{stem}.dist-info/RECORD,,\n"
    path = folder / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_pip_section_installs_into_a_fresh_folder_with_hashes(pip_section: list[str], tmp_path: Path) -> None:
    # The real packages are 3 GB, and pip downloads all of them to check hashes, even for a dry run. So pip gets the
    # same names, versions, markers and dependencies as wheels without content, and installs those. That the hashes of
    # the real files are right is compared with uv.lock above, and uv checked those when it set this environment up.
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    _, requirements = parse_requirements((CHECKOUT / "requirements.lock").read_text())
    lines, expected = [], set()
    for (name, version), requirement in requirements.items():
        digest = "0" * 64
        if requirement.marker is None or Marker(str(requirement.marker)).evaluate():
            distribution = importlib.metadata.distribution(name)
            assert distribution.version == version, "run make setup: .venv is behind uv.lock"
            digest = write_empty_wheel(distribution, wheels)
            expected.add(name)
        lines.append(f"{requirement} --hash=sha256:{digest}\n")
    (tmp_path / "requirements.lock").write_text("".join(lines))
    # conda writes the pip section to a file beside environment.yml and hands that to pip
    (tmp_path / "section.txt").write_text("\n".join(pip_section))
    site = tmp_path / "site"
    command = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--no-index", "--find-links", str(wheels), "--require-hashes", "--target", str(site)]
    command += ["--requirement", "section.txt"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    installed = {canonicalize_name(d.name) for d in importlib.metadata.distributions(path=[str(site)])}
    assert installed == expected
