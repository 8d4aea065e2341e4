"""What this machine has, what is missing, and what each missing thing would add."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from ddpm_lab.measure import hardware
from ddpm_lab.measure.hardware import gpu_trouble

NEEDED = ("Linux", "Python 3.11 to 3.13", "torch", "numpy", "psutil", "PIL", "output folder")
_MEASURING = {
    "torch": "everything that is measured: run make setup",
    "torchvision": "workloads that use its transforms and models: run make setup",
    "numpy": "everything: run make setup",
    "psutil": "everything: run make setup",
    "PIL": "reading images: run make setup",
}
_EXPLAINING = {
    "scipy": "tables, figures and findings: run make setup (measuring works without)",
    "matplotlib": "figures: run make setup",
    "papermill": "ddpm-lab report: run make setup",
    "nbconvert": "HTML pages: run make setup",
    "jupyterlab": "make lab: run make setup",
    "py7zr": "unpacking train.7z: run make setup",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that was looked at. Without a ``needed`` one the lab cannot run; others add something."""

    name: str
    present: bool
    detail: str
    needed: bool
    adds: str


def checkup(output: Path) -> list[Item]:
    """Look at everything; nothing is changed."""
    fork = "the lab starts its ranks by fork: use a Linux machine"
    another = "run make setup with PYTHON=python3.13 or another of them"
    version, gpus, cores = sys.version_info, hardware.gpus(), hardware.usable_cores()
    trouble = gpu_trouble()
    slower = "the speeds that people train at" + "; without one the lab measures the CPU and says so" * (not trouble)
    compiler = os.environ.get("CXX", "g++")
    found = shutil.which(compiler)
    header = Path(sysconfig.get_path("include"), "Python.h")
    headers = str(header) if header.exists() else "Python.h is missing"
    compiling = "torch.compile (notebook 05); on Debian or Ubuntu: apt install"
    place = next(p for p in (output, *output.parents) if p.is_dir())
    room = f"{output}, {shutil.disk_usage(place).free / 1e9:.0f} GB free"
    elsewhere = "choose a folder that can be written with --output-dir"
    rows = [
        ("Linux", sys.platform == "linux", platform.platform(terse=True), fork),
        ("Python 3.11 to 3.13", (3, 11) <= version < (3, 14), platform.python_version(), another),
        *map(_package, _MEASURING.items()),
        ("NVIDIA GPU", bool(gpus) and not trouble, trouble or ", ".join(map(_card, gpus)) or "none visible", slower),
        ("C++ compiler", found is not None, found or f"{compiler} is missing", f"{compiling} g++"),
        ("Python headers", header.exists(), headers, f"{compiling} python3-dev"),
        *map(_package, _EXPLAINING.items()),
        ("output folder", os.access(place, os.W_OK), room, elsewhere),
        ("two ranks", cores > 1, f"{cores} usable cores", "measuring several ranks needs two cores, or several GPUs"),
    ]
    return [
        Item(name=name, present=present, detail=detail, needed=name in NEEDED, adds=adds)
        for name, present, detail, adds in rows
    ]


def _package(row: tuple[str, str]) -> tuple[str, bool, str, str]:
    """A package: its name, whether it is there, its version, and what it adds."""
    module, adds = row
    present = importlib.util.find_spec(module) is not None
    version = hardware.package_version("pillow" if module == "PIL" else module) if present else "missing"
    return module, present, version, adds


def _card(gpu: hardware.Gpu) -> str:
    return gpu.name if gpu.memory_bytes is None else f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)"
