"""Set-ups by hand: no such machine is needed, and no images."""

from typing import Any

from ddpm_lab.training.setting import Images, Setup

IMAGES = Images(folder="somewhere", sha256="abc", name="5,000 synthetic images")


def setup(preset: str = "quick", gpus: int = 0, cores: int = 2, **changes: Any) -> Setup:
    """The network tiny on so many GPUs, or on the cores of a CPU, and with whatever ``changes``."""
    device = "cuda" if gpus else "cpu"
    values = {"network": "tiny", "images": IMAGES, "device": device, "gpus": gpus, "usable_cores": cores}
    return Setup(preset=preset, **{**values, **changes})
