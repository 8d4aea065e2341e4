"""Set-up: one command from a fresh clone, refusals before any download, and locks that agree."""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CHECKOUT = Path(__file__).resolve().parent.parent
TOOLS = ["awk", "cat", "cksum", "cp", "df", "dirname", "head", "ln", "mkdir", "mv", "rm", "sed", "sh", "tail", "uname"]
OLD = 'case "$2" in *implementation*) echo it is cpython 3.10 >&2; exit 1 ;; esac'
NO_PIP = 'case "$2" in "import pip") exit 1 ;; esac'
UV = """#!/bin/sh
if [ "$1" = --version ]; then echo 'uv {version} (a build)'; exit; fi
echo "$*" >>"{calls}"
case "$*" in
  *--offline*) exit 1 ;;
  sync*) [ -e .venv/bin/python ] || "{python}" -m venv --without-pip .venv ;;
  pip*) cd .venv/lib/python*/site-packages && mkdir torch-2.dist-info && echo Version: 2 >torch-2.dist-info/METADATA ;;
esac
"""


class Machine:
    """A copy of what set-up reads, and a PATH that holds only what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.checkout, self.bin, self.calls = folder / "clone with space", folder / "bin", folder / "calls"
        self.bin.mkdir()
        (self.checkout / "scripts").mkdir(parents=True)
        shutil.copy(CHECKOUT / "scripts" / "setup.sh", self.checkout / "scripts")
        for name in ("uv.lock", "pyproject.toml"):
            shutil.copy(CHECKOUT / name, self.checkout)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.python("python3")

    def shim(self, name: str, script: str) -> None:
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def python(self, name: str, disguise: str = "") -> None:
        """An interpreter that notes what is to be downloaded, and downloads nothing."""
        note = f'case "$1" in -m) echo "$*" >>"{self.calls}"; exit 9 ;; esac'
        self.shim(name, f'#!/bin/sh\n{disguise}\n{note}\nexec "{sys.executable}" "$@"\n')

    def uv(self, version: str) -> None:
        self.shim("uv", UV.format(version=version, calls=self.calls, python=sys.executable))

    def set_up(self, **extra: str) -> tuple[int, str, str]:
        """Exit code, messages, and what was downloaded."""
        self.calls.write_text("")
        environment = {"PATH": str(self.bin), "HOME": str(self.bin), **extra}
        command = [str(self.bin / "sh"), "scripts/setup.sh"]
        done = subprocess.run(command, cwd=self.checkout, env=environment, capture_output=True, text=True, check=False)
        assert not done.stdout
        return done.returncode, done.stderr, self.calls.read_text()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_what_cannot_work_is_refused_before_any_download(machine: Machine) -> None:
    def refused(*words: str, **extra: str) -> None:
        code, said, calls = machine.set_up(**extra)
        assert (code, said.count("\n"), calls) == (1, 1, ""), said
        assert all(word in said for word in words), said

    machine.python("python3", NO_PIP)
    refused("has no pip")
    machine.python("old python", OLD)
    refused("old python: it is cpython 3.10", PYTHON="old python")
    machine.python("python3", f'case "$2" in *torchvision*) exec "{sys.executable}" -S "$@" ;; esac')  # and no packages
    refused("needs torch 2.11 or newer", "found for torch", TORCH="installed")
    refused("TORCH is cuda: give", TORCH="cuda")
    (machine.bin / "python3").unlink()
    refused("python3", "not found")
    machine.python("python3")
    machine.shim("df", "#!/bin/sh\necho Filesystem Blocks Used Available\necho /dev/x 9 9 3000000 9% /\n")
    refused("3 GB of free disk space", "needs 8 GB")
    machine.shim("uname", '#!/bin/sh\nif [ "$1" = -s ]; then echo Darwin; else echo arm64; fi\n')
    refused("this is Darwin on arm64")


def test_uv_is_fetched_where_there_is_none_or_an_old_one(machine: Machine) -> None:
    machine.python("python3", OLD)
    machine.shim("python3.13", "#!/bin/sh\necho 'pyenv: python3.13: command not found' >&2\nexit 127\n")
    machine.python("python3.12")
    for old in (None, "0.9.30"):
        if old:
            machine.uv(old)
        code, said, calls = machine.set_up()
        assert (code, calls.startswith("-m pip install --quiet --target")) == (1, True)
        assert "uv could not be downloaded" in said.splitlines()[-1]


def test_nothing_is_done_when_up_to_date_and_a_moved_checkout_is_set_up_anew(machine: Machine, tmp_path: Path) -> None:
    machine.uv("0.13.0")
    code, said, calls = machine.set_up()
    assert (code, calls.count("sync --frozen")) == (0, 2), said
    assert machine.set_up() == (0, "", "")
    with (machine.checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert "sync --frozen" in machine.set_up()[2]
    (machine.checkout / ".venv" / "bin" / "ddpm-lab").touch()
    machine.checkout = machine.checkout.rename(tmp_path / "elsewhere")
    assert "sync --frozen" in machine.set_up()[2]
    assert not (machine.checkout / ".venv" / "bin" / "ddpm-lab").exists()


def test_another_torch_than_the_locked_one_stays_until_the_locked_one_is_asked_for(machine: Machine) -> None:
    machine.uv("0.13.0")
    code, said, calls = machine.set_up(TORCH="installed")
    assert (code, "pip install" in calls) == (0, False), said
    left_out = set(re.findall(r"--no-install-package (\S+)", calls))
    assert {"torch", "torchvision", "triton", "nvidia-cublas"} < left_out
    assert "nvidia-ml-py" not in left_out
    tell = "import importlib.metadata as m; print(m.version('torch'))"
    ask = [str(machine.checkout / ".venv/bin/python"), "-c", tell]
    shown = subprocess.run(ask, capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == metadata.version("torch")
    assert machine.set_up() == (0, "", "")
    for torch, installs, leaves_out in (("cu126", True, True), ("", False, True), ("locked", False, False)):
        with (machine.checkout / "pyproject.toml").open("a") as file:
            file.write("# changed\n")
        code, said, calls = machine.set_up(**({"TORCH": torch} if torch else {}))
        assert (code, "--torch-backend cu126 torch>=2.11 torchvision" in calls) == (0, installs), said
        assert ("--inexact --no-install-package" in calls) == leaves_out


def test_pyproject_and_its_locks_name_the_same_packages() -> None:
    lock, project = (tomllib.loads((CHECKOUT / name).read_text()) for name in ("uv.lock", "pyproject.toml"))
    hosts = re.findall(r"https?://([^/\"]+)", (CHECKOUT / "uv.lock").read_text())
    assert {*hosts} == {"pypi.org", "files.pythonhosted.org"}
    packages = lock["package"]
    (locked,) = (package for package in packages if package["name"] == "ddpm-lab")

    def named(words: list[str]) -> dict[str, Any]:
        return {canonicalize_name(r.name): r.specifier for r in map(Requirement, words)}

    for declared, entries in (
        (project["project"]["dependencies"], locked["metadata"]["requires-dist"]),
        (project["dependency-groups"]["dev"], locked["metadata"]["requires-dev"]["dev"]),
    ):
        assert named([e["name"] + e.get("specifier", "") for e in entries]) == named(declared)
    python, _, section = yaml.safe_load((CHECKOUT / "environment.yml").read_text())["dependencies"]
    assert Requirement(f"python{project['project']['requires-python']}").specifier.contains(python.partition("=")[2])
    pins = {name: str(version) for name, version in named(section["pip"]).items()}
    assert pins.items() <= {(package["name"], f"=={package['version']}") for package in packages}
    assert named(project["project"]["dependencies"]).keys() <= pins.keys()
