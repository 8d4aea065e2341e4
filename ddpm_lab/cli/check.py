"""The command ``check``: what this machine has, what each missing thing would add, and how finely it measures."""

import argparse
import importlib.util
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from ddpm_lab.checks import missing_to_compile
from ddpm_lab.cli.options import Command, given, refuse_others, tell
from ddpm_lab.files import ROOM_BYTES, output_folder
from ddpm_lab.measure import hardware

PACKAGES = {
    "torch": "everything that is measured",
    "torchvision": "workloads that use its transforms and models",
    **dict.fromkeys(("numpy", "psutil"), "everything"),
    "PIL": "reading images",
    "scipy": "tables, figures and findings (measuring works without)",
    "matplotlib": "figures",
    "papermill": "ddpm-lab report",
    "nbconvert": "HTML pages",
    "jupyterlab": "make lab",
    "py7zr": "unpacking train.7z",
}
"""What each adds, once make setup has installed it."""
NEEDED = ("Linux", "Python 3.11 to 3.13", "torch", "numpy", "psutil", "PIL", "output folder")


class Item(NamedTuple):
    """One thing that was looked at, and what it adds. Without those that are ``NEEDED`` the lab cannot run."""

    name: str
    present: bool
    detail: str
    adds: str


def check(options: argparse.Namespace) -> int:
    output = output_folder(options.output_dir)
    if options.instrument:
        from ddpm_lab.questions import calibrate as calibration  # noqa: PLC0415 - check runs where packages are missing

        found = calibration.calibrate(**given(options, "minutes", "device"), output_dir=output)
        tell(options, found.as_dict(), calibration.lines(found))
        return 0 if found.passed else 1
    refuse_others(options, "instrument", "output_dir", "json", why="check measures with --instrument alone")
    rows = [{**item._asdict(), "needed": item.name in NEEDED} for item in checkup(output)]
    runnable = all(row["present"] for row in rows if row["needed"])
    lines = [
        f"ok       {row['name']}: {row['detail']}"
        if row["present"]
        else f"{'MISSING' if row['needed'] else 'absent '}  {row['name']}: {row['detail']}; {row['adds']}"
        for row in rows
    ]
    lines.append("The lab can run here." if runnable else "The lab cannot run here: see what is MISSING above.")
    tell(options, {"can_run": runnable, "items": rows}, lines)
    return 0 if runnable else 1


def checkup(output: Path) -> list[Item]:
    """Look at everything; nothing is changed."""

    def package(module: str, adds: str) -> Item:
        present = importlib.util.find_spec(module) is not None
        version = hardware.package_version("pillow" if module == "PIL" else module) if present else "missing"
        return Item(module, present, version, f"{adds}: run make setup")

    def card(gpu: hardware.Gpu) -> str:
        return gpu.name if gpu.memory_bytes is None else f"{gpu.name} ({gpu.memory_bytes / 2**30:.0f} GiB)"

    version, gpus, cores = sys.version_info, hardware.gpus(), hardware.usable_cores()
    trouble = hardware.gpu_trouble()
    none = "none visible" + "; AMD's are not used, the CPU is" * ("+rocm" in hardware.package_version("torch"))
    slower = "the speeds that people train at" + "; without one the lab measures the CPU and says so" * (not trouble)
    uncompiled = missing_to_compile("cuda" if gpus and not trouble else "cpu")
    compiler = uncompiled or "a compiler and Python's headers"
    place = next(p for p in (output, *output.parents) if os.path.lexists(p))
    free, able = shutil.disk_usage(place).free, place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    room, writable = f"{output}, {free / 1e9:.0f} GB free", able and free > ROOM_BYTES
    python, other = (3, 11) <= version < (3, 14), "run make setup with PYTHON=python3.13 or another of them"
    return [
        Item("Linux", sys.platform == "linux", platform.platform(terse=True), "starting ranks: use a Linux machine"),
        Item("Python 3.11 to 3.13", python, platform.python_version(), other),
        *(package(module, adds) for module, adds in PACKAGES.items()),
        Item("NVIDIA GPU", bool(gpus) and not trouble, trouble or ", ".join(map(card, gpus)) or none, slower),
        Item("torch.compile", not uncompiled, compiler, "notebook 05, fused kernels"),
        Item("output folder", writable, room, "choose one that can be written with --output-dir"),
        Item("two ranks", cores > 1, f"{cores} usable cores", "measuring several ranks: two cores, or several GPUs"),
    ]


COMMANDS = {
    "check": Command(
        check,
        "check --instrument --minutes 10",
        "instrument minutes device output-dir json",
        {"minutes": "with --instrument: how long to measure (default: 5)"},
    )
}
