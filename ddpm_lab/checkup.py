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


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One thing that was looked at. Without a ``needed`` one the lab cannot run; others add something."""

    name: str
    present: bool
    detail: str
    needed: bool = False
    adds: str = ""


def checkup(output: Path) -> list[Item]:
    """Look at everything; nothing is changed and no GPU is woken."""
    version = sys.version_info
    items = [
        Item(
            name="Linux",
            present=sys.platform == "linux",
            detail=platform.platform(terse=True),
            needed=True,
            adds="the lab starts its ranks by fork: use a Linux machine",
        ),
        Item(
            name="Python 3.11 to 3.13",
            present=(3, 11) <= version < (3, 14),
            detail=platform.python_version(),
            needed=True,
            adds="run make setup with PYTHON=python3.13 or another of them",
        ),
    ]
    for module, adds in (
        ("torch", "everything that is measured: run make setup"),
        ("torchvision", "workloads that use its transforms and models: run make setup"),
        ("numpy", "everything: run make setup"),
        ("psutil", "everything: run make setup"),
        ("PIL", "reading images: run make setup"),
    ):
        items.append(_module(module, adds, needed=module != "torchvision"))
    items += [_gpu(), _compiler(), _headers()]
    for module, adds in (
        ("pandas", "tables, figures and findings: run make setup (measuring works without)"),
        ("seaborn", "figures: run make setup"),
        ("papermill", "ddpm-lab report: run make setup"),
        ("nbconvert", "HTML pages: run make setup"),
        ("jupyterlab", "make lab: run make setup"),
        ("py7zr", "unpacking train.7z: run make setup"),
    ):
        items.append(_module(module, adds))
    free = shutil.disk_usage(_existing(output)).free
    items += [
        Item(
            name="output folder",
            present=os.access(_existing(output), os.W_OK),
            detail=f"{output}, {free / 1e9:.0f} GB free",
            needed=True,
            adds="choose a folder that can be written with --output-dir",
        ),
        Item(
            name="two ranks",
            present=hardware.usable_cores() > 1,
            detail=f"{hardware.usable_cores()} usable cores",
            adds="measuring several ranks needs two cores, or several GPUs",
        ),
    ]
    return items


def _existing(path: Path) -> Path:
    """The nearest folder above that exists."""
    return next(p for p in (path, *path.parents) if p.is_dir())


def _module(module: str, adds: str, *, needed: bool = False) -> Item:
    present = importlib.util.find_spec(module) is not None
    version = hardware.package_version("pillow" if module == "PIL" else module) if present else "missing"
    return Item(name=module, present=present, detail=version, needed=needed, adds=adds)


def _gpu() -> Item:
    gpus = hardware.gpus()
    return Item(
        name="NVIDIA GPU",
        present=bool(gpus),
        detail=", ".join(map(_card, gpus)) or "none visible",
        adds="the speeds that people train at; without one the lab measures the CPU and says so",
    )


def _card(gpu: hardware.Gpu) -> str:
    return gpu.name if gpu.memory_bytes is None else f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)"


def _compiler() -> Item:
    compiler = os.environ.get("CXX", "g++")
    found = shutil.which(compiler)
    return Item(
        name="C++ compiler",
        present=found is not None,
        detail=found or f"{compiler} is missing",
        adds="torch.compile (notebook 05); on Debian or Ubuntu: apt install g++",
    )


def _headers() -> Item:
    header = Path(sysconfig.get_path("include"), "Python.h")
    return Item(
        name="Python headers",
        present=header.exists(),
        detail=str(header) if header.exists() else "Python.h is missing",
        adds="torch.compile (notebook 05); on Debian or Ubuntu: apt install python3-dev",
    )
