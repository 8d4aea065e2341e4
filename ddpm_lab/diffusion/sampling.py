"""Samplers: from images at a timestep to images at an earlier one, and the timesteps that are walked."""

import itertools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpm_lab.diffusion.process import Diffusion, Network

GAP = 2
"""Pixels between the images of a grid."""


def ddim(diffusion: Diffusion, x0: Tensor, x_t: Tensor, t: Tensor, previous: Tensor) -> tuple[Tensor, None]:
    """DDIM without noise (Song et al. 2021, eq. 12); the noise in x_t is the one that fits x0, clipped or not."""
    alpha_bar = diffusion.alpha_bar_before(previous).view(-1, 1, 1, 1)
    return alpha_bar.sqrt() * x0 + (1 - alpha_bar).sqrt() * diffusion.noise_from_x0(x0, x_t, t), None


# Mean and variance of the images a step back. Ancestral sampling (Ho et al. 2020, algorithm 2) has the posterior's.
SAMPLERS: dict[str, Callable[..., tuple[Tensor, Tensor | None]]] = {"ddpm": Diffusion.posterior, "ddim": ddim}


def walk(timesteps: int, steps: int) -> list[tuple[int, int]]:
    """Pairs of a timestep and the next, evenly from ``timesteps`` - 1 down to 0 and at last -1, which is x0 itself.

    ``steps`` is at most ``timesteps``; fewer walk the respaced process of Nichol & Dhariwal 2021, section 4.
    """
    times = np.linspace(timesteps - 1, 0, steps).round().astype(int).tolist()
    return list(itertools.pairwise([*times, -1]))


@torch.no_grad()
def denoise(
    network: Network,
    diffusion: Diffusion,
    sampler: str,
    x: Tensor,
    step: tuple[int, int],
    *,
    noise: Callable[[], Tensor],
) -> Tensor:
    """The images x (N, 3, H, W) after a ``step`` of ``walk``; ``noise`` draws images of standard normal noise.

    In double precision, but for the network: where x is nearly all noise, x0 is a small difference of large numbers.
    """
    t, previous = (torch.full((len(x),), time, device=x.device) for time in step)
    x0, _ = diffusion.to_x0_and_noise(network(x, t).double(), x.double(), t)
    mean, variance = SAMPLERS[sampler](diffusion, x0.clamp(-1, 1), x.double(), t, previous)
    return (mean if variance is None else mean + variance.sqrt() * noise()).to(x.dtype)


def image_grid(images: Tensor) -> npt.NDArray[np.uint8]:
    """Images (N, 3, H, W) in [-1, 1] side by side on white, as square as can be, as uint8 (height, width, 3)."""
    count, _, height, width = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    pixels = ((images.detach().float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    grid = np.full((rows * (height + GAP) - GAP, columns * (width + GAP) - GAP, 3), 255, dtype=np.uint8)
    for index, image in enumerate(pixels.permute(0, 2, 3, 1).numpy()):
        top, left = index // columns * (height + GAP), index % columns * (width + GAP)
        grid[top : top + height, left : left + width] = image
    return grid
