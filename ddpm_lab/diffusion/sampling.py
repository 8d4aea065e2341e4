"""Samplers: a function for each that works out its steps, and one that walks them.

All noise comes from the generator given, on its device, in the same order whatever network runs. A sampler is a list of
steps worked out beforehand, so that between two evaluations of the network there is a handful of operations on the
images, and nothing waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpm_lab.diffusion.diffusion import Diffusion, Network

Shape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step back from ``time``, as weights: but for the clipping of x0 it is linear in the images.

    x0 = ``x0_scale`` (prediction + ``x0_ratio`` x); the next x = ``of_x0`` x0 + ``of_x`` x + ``of_noise`` z, with z
    standard normal.
    """

    time: int
    x0_scale: float
    x0_ratio: float
    of_x0: float
    of_x: float
    of_noise: float


def sample(
    network: Network, steps: Sequence[Step], shape: Shape, *, generator: torch.Generator, clip_x0: bool = True
) -> Tensor:
    """Images (N, 3, H, W) in [-1, 1] by all ``steps``, in the memory format of what the network returns.

    ``clip_x0`` clips each estimate of x0 to [-1, 1].
    """
    x = torch.randn(shape, generator=generator, device=generator.device)
    for step in steps:
        x = denoise(network, step, x, generator=generator, clip_x0=clip_x0)
    return x.clamp_(-1, 1)


def ddpm_steps(diffusion: Diffusion, steps: int | None = None) -> list[Step]:
    """Ancestral sampling with the posterior variance (Ho et al. 2020, algorithm 2), first step to last.

    ``steps`` fewer than T walk the respaced process of Nichol & Dhariwal 2021, section 4; by default all T are walked.
    Raises ValueError for a number of steps outside 1..T.
    """
    times, previous = _times(diffusion, diffusion.timesteps if steps is None else steps)
    one, zero = _units(times)
    of_x0, variance = diffusion.posterior(one, zero, times, previous)
    of_x, _ = diffusion.posterior(zero, one, times, previous)
    return _steps(diffusion, times, of_x0, of_x, variance.sqrt())


def ddim_steps(diffusion: Diffusion, steps: int = 250, *, eta: float = 0.0) -> list[Step]:
    """DDIM (Song et al. 2021, eq. 12 and 16), first step to last.

    ``eta`` scales the noise added in each step: 0 is deterministic given the first noise, 1 is ancestral sampling.
    Raises ValueError for a number of steps outside 1..T, and for an eta outside 0..1.
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta is {eta}: give a number from 0 to 1")
    times, previous = _times(diffusion, steps)
    one, zero = _units(times)
    alpha_bar = diffusion.alpha_bar[times].view_as(one)
    alpha_bar_previous = torch.where(previous < 0, 1.0, diffusion.alpha_bar[previous.clamp(min=0)]).view_as(one)
    variance = (1 - alpha_bar_previous) / (1 - alpha_bar) * (1 - alpha_bar / alpha_bar_previous)
    sigma = eta * variance.sqrt()
    towards_noise = (1 - alpha_bar_previous - sigma**2).clamp(min=0).sqrt()
    # The noise is the one that fits x0, clipped or not.
    of_x0 = alpha_bar_previous.sqrt() + towards_noise * diffusion.noise_from_x0(one, zero, times)
    of_x = towards_noise * diffusion.noise_from_x0(zero, one, times)
    return _steps(diffusion, times, of_x0, of_x, sigma)


@torch.no_grad()
def denoise(network: Network, step: Step, x: Tensor, *, generator: torch.Generator, clip_x0: bool = True) -> Tensor:
    """The images x (N, 3, H, W) one step further, in the memory format of what the network returns; x stays as it is.

    The network may predict in half precision: what becomes of its prediction has the precision of x.
    """
    t = torch.full((len(x),), step.time, device=x.device)
    # The weight stands at x, and the scale afterwards: where x is nearly all noise both terms are thousands of times
    # larger than their sum.
    x0 = torch.add(network(x, t), x, alpha=step.x0_ratio).mul_(step.x0_scale)
    if clip_x0:
        x0.clamp_(-1, 1)
    following = x0.mul_(step.of_x0).add_(x, alpha=step.of_x)
    if step.of_noise > 0:
        noise = torch.randn(x.shape, generator=generator, device=x.device)
        following.add_(noise, alpha=step.of_noise)
    return following


def sampling_timesteps(timesteps: int, steps: int) -> list[int]:
    """``steps`` timesteps evenly from ``timesteps`` - 1 down to 0, both ends included; one step is the first alone."""
    if not 1 <= steps <= timesteps:
        raise ValueError(f"steps is {steps}: give a whole number from 1 to the {timesteps} timesteps of the process")
    return [round(float(t)) for t in np.linspace(timesteps - 1, 0, steps)]


def _times(diffusion: Diffusion, steps: int) -> tuple[Tensor, Tensor]:
    """The timesteps (S,) that are walked, and to each the next; -1 is x0 itself."""
    times = torch.tensor(sampling_timesteps(diffusion.timesteps, steps), device=diffusion.alpha_bar.device)
    return times, torch.cat((times[1:], times.new_tensor([-1])))


def _units(times: Tensor) -> tuple[Tensor, Tensor]:
    """Ones and zeros (S, 1, 1, 1), float64: a formula that is linear in images gives for them its weights."""
    one = torch.ones((len(times), 1, 1, 1), dtype=torch.float64, device=times.device)
    return one, torch.zeros_like(one)


def _steps(diffusion: Diffusion, times: Tensor, of_x0: Tensor, of_x: Tensor, of_noise: Tensor) -> list[Step]:
    """Steps with the weights (S, 1, 1, 1) given, read back from the device once."""
    one, zero = _units(times)
    scale, _ = diffusion.to_x0_and_noise(one, zero, times)
    of_x_in_x0, _ = diffusion.to_x0_and_noise(zero, one, times)
    table = torch.stack([w.flatten() for w in (scale, of_x_in_x0 / scale, of_x0, of_x, of_noise)], dim=1)
    return [
        Step(time=time, x0_scale=a, x0_ratio=b, of_x0=c, of_x=d, of_noise=e)
        for time, (a, b, c, d, e) in zip(times.tolist(), table.tolist(), strict=True)
    ]


def image_grid(images: Tensor, *, columns: int | None = None, gap: int = 2) -> npt.NDArray[np.uint8]:
    """Images (N, 3, H, W) in [-1, 1] side by side on white, row by row, as uint8 (height, width, 3).

    The grid is as square as it can be unless ``columns`` is given; ``gap`` is in pixels. Values outside are clipped.
    """
    if images.ndim != 4 or images.shape[1] != 3 or len(images) == 0:
        raise ValueError(f"images have shape {tuple(images.shape)}: give (N, 3, H, W) with N of at least 1")
    count, _, height, width = images.shape
    columns = math.ceil(math.sqrt(count)) if columns is None else columns
    if columns < 1:
        raise ValueError(f"columns is {columns}: give at least 1")
    rows = math.ceil(count / columns)
    pixels = ((images.detach().float().cpu() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    shape = (rows * (height + gap) - gap, columns * (width + gap) - gap, 3)
    grid = np.full(shape, 255, dtype=np.uint8)
    for index, image in enumerate(pixels.permute(0, 2, 3, 1).numpy()):
        top, left = index // columns * (height + gap), index % columns * (width + gap)
        grid[top : top + height, left : left + width] = image
    return grid
