"""Samplers: one plain function for each, one signature, the paper named in its docstring.

All noise comes from the generator given, on its device, in the same order whatever network runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpm_lab.model.diffusion import Diffusion, Network

Shape = tuple[int, int, int, int]
Progress = Callable[[int, int], None]
"""Called after each step with the number of steps done and their total."""


@torch.no_grad()
def ddpm_sample(
    network: Network,
    diffusion: Diffusion,
    shape: Shape,
    *,
    generator: torch.Generator,
    steps: int | None = None,
    clip_x0: bool = True,
    progress: Progress | None = None,
) -> Tensor:
    """Images (N, 3, H, W) in [-1, 1] by ancestral sampling with the posterior variance (Ho et al. 2020, algorithm 2).

    ``steps`` fewer than T walk the respaced process of Nichol & Dhariwal 2021, section 4; by default all T are walked.
    ``clip_x0`` clips each estimate of x0 to [-1, 1]. Raises ValueError for a number of steps outside 1..T.
    """
    times = sampling_timesteps(diffusion.timesteps, diffusion.timesteps if steps is None else steps)
    x = torch.randn(shape, generator=generator, device=generator.device)
    for done, (time, previous) in enumerate(zip(times, [*times[1:], -1], strict=True), start=1):
        t = torch.full((shape[0],), time, device=x.device)
        x0, _ = _estimate(network, diffusion, x, t, clip_x0)
        mean, variance = diffusion.posterior(x0, x, t, torch.full_like(t, previous))
        x = mean
        if previous >= 0:
            x = x + variance.sqrt() * torch.randn(shape, generator=generator, device=x.device)
        if progress is not None:
            progress(done, len(times))
    return x.clamp(-1, 1)


@torch.no_grad()
def ddim_sample(
    network: Network,
    diffusion: Diffusion,
    shape: Shape,
    *,
    generator: torch.Generator,
    steps: int = 250,
    eta: float = 0.0,
    clip_x0: bool = True,
    progress: Progress | None = None,
) -> Tensor:
    """Images (N, 3, H, W) in [-1, 1] by DDIM (Song et al. 2021, eq. 12 and 16).

    ``eta`` scales the noise added in each step: 0 is deterministic given the first noise, 1 is ancestral sampling.
    Other arguments and errors as in ``ddpm_sample``; an eta outside 0..1 raises ValueError too.
    """
    if not 0 <= eta <= 1:
        raise ValueError(f"eta is {eta}: give a number from 0 to 1")
    times = sampling_timesteps(diffusion.timesteps, steps)
    x = torch.randn(shape, generator=generator, device=generator.device)
    for done, (time, previous) in enumerate(zip(times, [*times[1:], -1], strict=True), start=1):
        t = torch.full((shape[0],), time, device=x.device)
        x0, noise = _estimate(network, diffusion, x, t, clip_x0)
        x = x0
        if previous >= 0:
            alpha_bar, alpha_bar_previous = diffusion.alpha_bar[time], diffusion.alpha_bar[previous]
            variance = (1 - alpha_bar_previous) / (1 - alpha_bar) * (1 - alpha_bar / alpha_bar_previous)
            sigma = eta * variance.sqrt()
            towards_noise = (1 - alpha_bar_previous - sigma**2).clamp(min=0).sqrt()
            x = alpha_bar_previous.sqrt().to(x.dtype) * x0 + towards_noise.to(x.dtype) * noise
            if eta > 0:
                x = x + sigma.to(x.dtype) * torch.randn(shape, generator=generator, device=x.device)
        if progress is not None:
            progress(done, len(times))
    return x.clamp(-1, 1)


def sampling_timesteps(timesteps: int, steps: int) -> list[int]:
    """``steps`` timesteps evenly from ``timesteps`` - 1 down to 0, both ends included; one step is the first alone."""
    if not 1 <= steps <= timesteps:
        raise ValueError(f"steps is {steps}: give a whole number from 1 to the {timesteps} timesteps of the process")
    return [round(float(t)) for t in np.linspace(timesteps - 1, 0, steps)]


def _estimate(network: Network, diffusion: Diffusion, x: Tensor, t: Tensor, clip_x0: bool) -> tuple[Tensor, Tensor]:
    """The network's estimates of x0 and of the noise in x; where x0 is clipped the noise is the one that fits it."""
    x0, noise = diffusion.to_x0_and_noise(network(x, t).to(x.dtype), x, t)
    if clip_x0:
        x0 = x0.clamp(-1, 1)
        noise = diffusion.noise_from_x0(x0, x, t)
    return x0, noise


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
