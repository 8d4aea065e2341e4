"""A GPU that is there and that torch cannot use: why, and what to do about it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ddpm_lab.measure import hardware

LEAST_DRIVER = {11: 450, 12: 525, 13: 580}
"""Driver that a major version of CUDA needs: NVIDIA's "CUDA Compatibility", minor version compatibility, table 1."""
OLDER_WHEEL = (
    "torch's wheel for CUDA 12.6 (pip install torch torchvision --index-url https://download.pytorch.org/whl/cu126)"
)
"""For drivers before CUDA 13, and for GPUs before the Turing generation, for which later wheels have no kernels."""
CPU = "or measure the CPU with --device cpu (in a report: -p device cpu)"
PATIENCE_SECONDS = 120.0


def gpu_trouble() -> str:
    """Why torch cannot use the GPUs that NVML lists, and the ways out, in one sentence; empty without such trouble.

    Torch is asked in a process of its own, once, and only where there is a GPU: asking takes seconds and wakes CUDA.
    """
    cards = hardware.listed_gpus()
    if not cards or not (why := _why(told_by_torch(), hardware.machine().driver)):
        return ""
    names = ", ".join(dict.fromkeys(card.name for card in cards))
    return f"torch {hardware.package_version('torch')} cannot use {names}: {why}, {CPU}"


@cache
def told_by_torch() -> dict[str, Any]:
    """What ``torch_gpus`` prints: torch's CUDA, its error or the architectures it has kernels for, and the cards."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("torch_gpus.py"))]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"it did not answer within {PATIENCE_SECONDS:.0f} s"}
    told: dict[str, Any] = json.loads(done.stdout) if done.returncode == 0 else {"error": _last_line(done)}
    return told


def least_capability() -> tuple[int, int] | None:
    """The lowest compute capability of the GPUs that torch sees; None where it sees none."""
    cards = told_by_torch().get("cards", ()) if hardware.gpus() else ()
    return min(((major, minor) for _, major, minor in cards), default=None)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"the process that asked it ended with {done.returncode}"])[-1]


def _why(told: dict[str, Any], driver: str | None) -> str:
    """What ``torch_gpus`` told, as a reason and a way out; empty where every GPU can be used."""
    if not (error := told["error"]):
        return _no_kernels(told["cards"], told["architectures"])
    if "cuda" in told and told["cuda"] is None:
        return "it is built without CUDA; install a wheel with CUDA (https://pytorch.org/get-started/locally)"
    least = LEAST_DRIVER.get(int((told.get("cuda") or "0").partition(".")[0]), 0)
    has = re.match(r"\d+", driver or "")
    if has and int(has[0]) < least:
        wheel = f", or {OLDER_WHEEL}" if LEAST_DRIVER[12] <= int(has[0]) else ""
        return f"driver {driver} is too old for its CUDA {told['cuda']}; install driver {least} or newer{wheel}"
    return f"{error.partition('. ')[0].strip()}; check the driver (nvidia-smi) and CUDA_VISIBLE_DEVICES"


def _no_kernels(cards: Sequence[tuple[str, int, int]], architectures: Sequence[str]) -> str:
    without = [card for card in cards if not any(_runs(name, card[1:]) for name in architectures)]
    if not without:
        return ""
    name, *capability = without[0]
    before = tuple(capability) < min(map(_capability, architectures))
    way = OLDER_WHEEL if before else "a newer torch"
    hide = ", or hide it with CUDA_VISIBLE_DEVICES" if len(without) < len(cards) else ""
    has = ", ".join(architectures)
    return f"it has kernels for {has}, and {name} is sm_{capability[0]}{capability[1]}; install {way}{hide}"


def _capability(architecture: str) -> tuple[int, int]:
    """Compute capability: (9, 0) of sm_90, sm_90a or compute_90."""
    digits = re.sub(r"\D", "", architecture)
    return int(digits[:-1]), int(digits[-1])


def _runs(architecture: str, capability: Sequence[int]) -> bool:
    """Whether kernels for an architecture run on a GPU of that compute capability.

    Those of sm_XY run on the same major version from minor version Y on, those of sm_XYa on X.Y alone; compute_XY is
    compiled by the driver for whatever is newer (CUDA C++ Programming Guide, "Application Compatibility").
    """
    at, there = _capability(architecture), tuple(capability)
    if architecture.endswith("a"):
        return at == there
    return at <= there and (architecture.startswith("compute") or at[0] == there[0])
