"""Synthetic images: smooth colour gradients, stripes and discs that a denoiser can learn something from.

They are written as PNG files in Kaggle's flat layout, so that decoding one file at a time can be measured on them too.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image

from ddpm_lab.data.folder import Progress

DEFAULT_COUNT = 2_000
GENERATOR_VERSION = 1
BLOCK_IMAGES = 100
DISCS = 3
SEED = 20_210_218


def generate(count: int, image_size: int = 32) -> npt.NDArray[np.uint8]:
    """Return ``count`` images, uint8 (count, S, S, 3); image ``i`` is the same in every set, whatever ``count``.

    The pixels are the same on every machine: they come from raw generator output, whose stream numpy guarantees, by
    single correctly rounded additions, products and quotients; sine and exponential differ between machines.
    """
    blocks = [_block(number, image_size) for number in range(-(-count // BLOCK_IMAGES))]
    return np.concatenate(blocks)[:count]


def _block(number: int, image_size: int) -> npt.NDArray[np.uint8]:
    raw = np.random.PCG64(np.random.SeedSequence([SEED, number])).random_raw((BLOCK_IMAGES, 24 + 8 * DISCS))
    uniform = (raw >> np.uint64(11)) / 2.0**53  # [0, 1), exact
    draws = iter(np.moveaxis(uniform, 1, 0)[:, :, None, None])  # each (images, 1, 1)
    axis = (np.arange(image_size) + 0.5) / image_size
    y, x = axis[None, :, None], axis[None, None, :]

    # A colour at each corner, blended bilinearly.
    weights = ((1 - y) * (1 - x), (1 - y) * x, y * (1 - x), y * x)
    black: npt.NDArray[np.float64] = np.zeros((BLOCK_IMAGES, image_size, image_size))
    channels = [sum((next(draws) * weight for weight in weights), black) for _ in range(3)]

    # Stripes: a triangle wave along a random direction, visible on two thirds of the images.
    direction_x, direction_y = 2 * next(draws) - 1, 2 * next(draws) - 1
    phase = (2 + 5 * next(draws)) * (direction_x * x + direction_y * y) + next(draws)
    wave = np.abs(2 * (phase - np.floor(phase)) - 1)
    strength = np.maximum(0, 1.5 * next(draws) - 0.5) * 0.5
    channels = [channel + strength * wave * (next(draws) - channel) for channel in channels]

    # Discs, the later ones in front, with an edge about two pixels wide.
    for _ in range(DISCS):
        centre_x, centre_y, radius = next(draws), next(draws), 0.08 + 0.27 * next(draws)
        squared = (x - centre_x) * (x - centre_x) + (y - centre_y) * (y - centre_y)
        edge = np.clip((radius * radius - squared) * image_size / (4 * radius) + 0.5, 0, 1)
        opacity = edge * (0.6 + 0.4 * next(draws))
        channels = [channel + opacity * (next(draws) - channel) for channel in channels]

    pixels: npt.NDArray[np.uint8] = np.clip(np.rint(255 * np.stack(channels, axis=-1)), 0, 255).astype(np.uint8)
    return pixels


def write_folder(folder: Path, image_size: int, progress: Progress) -> None:
    """Write ``folder/train/1.png`` ... of DEFAULT_COUNT images, creating the folder."""
    train = folder / "train"
    train.mkdir(parents=True, exist_ok=True)
    for number, pixels in enumerate(generate(DEFAULT_COUNT, image_size), 1):
        Image.fromarray(pixels).save(train / f"{number}.png", compress_level=1)
        progress(f"wrote {number:,} of {DEFAULT_COUNT:,} synthetic images")
