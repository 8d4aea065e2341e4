"""Set-ups by hand: no such machine is needed, and no images."""

from typing import Any

from ddpm_lab.training.setting import Images, Setup

IMAGES = Images(folder="somewhere", sha256="abc", name="5,000 synthetic images")
MACHINES = {"1 core": (0, 1), "2 cores": (0, 2), "64 cores": (0, 64), "1 GPU": (1, 16), "8 GPUs": (8, 64)}
"""GPUs and cores."""


def setup(preset: str = "quick", gpus: int = 0, cores: int = 2, **changes: Any) -> Setup:
    """The network tiny on so many GPUs, or on the cores of a CPU, and with whatever ``changes``."""
    device = "cuda" if gpus else "cpu"
    values = {"network": "tiny", "images": IMAGES, "device": device, "gpus": gpus, "usable_cores": cores}
    return Setup(preset=preset, **{**values, **changes})


def machine_setup(machine: str = "2 cores", preset: str = "quick", **changes: Any) -> Setup:
    """The same on one of MACHINES."""
    gpus, cores = MACHINES[machine]
    return setup(preset, **{"gpus": gpus, "cores": cores, **changes})
