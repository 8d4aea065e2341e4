"""Samplers: a function for each that works out its steps, and one that takes a step.

A sampler is a list of steps worked out beforehand, so that between two evaluations of the network there is a handful of
operations on the images, and nothing waits for the device.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpm_lab.diffusion.process import Diffusion, Network

GAP = 2
"""Pixels between the images of a grid."""


class Step(NamedTuple):
    """One step back from ``time``, as weights: but for the clipping of x0 it is linear in the images.

    x0 = ``x0_scale`` (prediction + ``x0_ratio`` x), clipped to [-1, 1]; the next x = ``of_x0`` x0 + ``of_x`` x +
    ``of_noise`` z, with z standard normal.
    """

    time: int
    x0_scale: float
    x0_ratio: float
    of_x0: float
    of_x: float
    of_noise: float


def ddpm_steps(diffusion: Diffusion, steps: int) -> list[Step]:
    """Ancestral sampling with the posterior variance (Ho et al. 2020, algorithm 2), first step to last.

    ``steps`` is at most T; fewer walk the respaced process of Nichol & Dhariwal 2021, section 4.
    """
    times, previous, one, zero = _walk(diffusion, steps)
    of_x0, variance = diffusion.posterior(one, zero, times, previous)
    of_x, _ = diffusion.posterior(zero, one, times, previous)
    return _steps(diffusion, times, of_x0, of_x, variance.sqrt())


def ddim_steps(diffusion: Diffusion, steps: int) -> list[Step]:
    """DDIM without noise (Song et al. 2021, eq. 12), first step to last."""
    times, previous, one, zero = _walk(diffusion, steps)
    alpha_bar_previous = diffusion.alpha_bar_before(previous).view_as(one)
    towards_noise = (1 - alpha_bar_previous).sqrt()
    # The noise is the one that fits x0, clipped or not.
    of_x0 = alpha_bar_previous.sqrt() + towards_noise * diffusion.noise_from_x0(one, zero, times)
    of_x = towards_noise * diffusion.noise_from_x0(zero, one, times)
    return _steps(diffusion, times, of_x0, of_x, zero)


@torch.no_grad()
def denoise(network: Network, step: Step, x: Tensor, noise: Callable[[], Tensor]) -> Tensor:
    """The images x (N, 3, H, W) one step further, in the memory format of what the network returns; x stays as it is.

    The network may predict in half precision: what becomes of its prediction has the precision of x. ``noise`` draws
    images of standard normal noise, where the step has any.
    """
    t = torch.full((len(x),), step.time, device=x.device)
    # The weight stands at x, and the scale afterwards: where x is nearly all noise both terms are thousands of times
    # larger than their sum.
    x0 = torch.add(network(x, t), x, alpha=step.x0_ratio).mul_(step.x0_scale).clamp_(-1, 1)
    following = x0.mul_(step.of_x0).add_(x, alpha=step.of_x)
    if step.of_noise > 0:
        following.add_(noise(), alpha=step.of_noise)
    return following


SAMPLERS = {"ddpm": ddpm_steps, "ddim": ddim_steps}


def _walk(diffusion: Diffusion, steps: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The timesteps (S,) that are walked, to each the next (-1 is x0 itself), and ones and zeros (S, 1, 1, 1), float64.

    They are spaced evenly from T - 1 down to 0, both ends included; one step is the first alone. A formula that is
    linear in images gives for ones and zeros its weights.
    """
    evenly = np.linspace(diffusion.timesteps - 1, 0, steps).round()
    times = torch.tensor(evenly, dtype=torch.long, device=diffusion.alpha_bar.device)
    one = torch.ones((len(times), 1, 1, 1), dtype=torch.float64, device=times.device)
    return times, torch.cat((times[1:], times.new_tensor([-1]))), one, torch.zeros_like(one)


def _steps(diffusion: Diffusion, times: Tensor, of_x0: Tensor, of_x: Tensor, of_noise: Tensor) -> list[Step]:
    """Steps with the weights (S, 1, 1, 1) given, read back from the device once."""
    one, zero = torch.ones_like(of_x0), torch.zeros_like(of_x0)
    scale, _ = diffusion.to_x0_and_noise(one, zero, times)
    of_x_in_x0, _ = diffusion.to_x0_and_noise(zero, one, times)
    table = torch.stack([w.flatten() for w in (scale, of_x_in_x0 / scale, of_x0, of_x, of_noise)], dim=1)
    return [Step(time, *weights) for time, weights in zip(times.tolist(), table.tolist(), strict=True)]


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
