"""The samplers against a distribution known exactly, their equations, and diffusers' schedulers."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product

import numpy as np
import pytest
import torch
from torch import Tensor

from ddpm_lab.config import DiffusionConfig
from ddpm_lab.diffusion.process import Diffusion, Network
from ddpm_lab.diffusion.sampling import SAMPLERS, Step, denoise, image_grid, sampling_timesteps

MEAN, DEVIATION = 0.2, 0.15


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def process(schedule: str = "linear", timesteps: int = 1000, objective: str = "noise") -> Diffusion:
    return Diffusion(DiffusionConfig(schedule=schedule, timesteps=timesteps, objective=objective))


def walked(network: Network, steps: list[Step], shape: tuple[int, int, int, int], seed: int = 0) -> Tensor:
    """Images by all steps, from noise of the same generator."""
    source = generator(seed)
    x = torch.randn(shape, generator=source)
    for step in steps:
        x = denoise(network, step, x, generator=source)
    return x


def gaussian_noise_predictor(diffusion: Diffusion) -> Network:
    """E[noise | x_t] when every pixel of the data is N(MEAN, DEVIATION^2): the network that training would reach."""

    def predict(x: Tensor, t: Tensor) -> Tensor:
        alpha_bar = diffusion.alpha_bar[t].view(-1, 1, 1, 1)
        variance = alpha_bar * DEVIATION**2 + 1 - alpha_bar
        return ((1 - alpha_bar).sqrt() * (x - alpha_bar.sqrt() * MEAN) / variance).float()

    return predict


def wobbly(x: Tensor, t: Tensor) -> Tensor:
    """Stands for a network: any smooth function of x and t."""
    return torch.sin(2 * x) + 0.3 * x.flip(-1) + 0.001 * t.view(-1, 1, 1, 1)


def test_exact_predictor_recovers_the_data() -> None:
    # DDPM walks every step: the posterior variance leaves out what is uncertain in x0, which is small for small steps.
    for schedule, (sampler, count) in product(("linear", "cosine"), (("ddpm", 1000), ("ddim", 250))):
        diffusion = process(schedule)
        images = walked(gaussian_noise_predictor(diffusion), SAMPLERS[sampler](diffusion, count), (64, 3, 4, 4))
        error = 0.02 * DEVIATION + 5 * DEVIATION / math.sqrt(images.numel())
        assert images.mean().item() == pytest.approx(MEAN, abs=error)
        assert images.std().item() == pytest.approx(DEVIATION, rel=0.05)


def equation(  # noqa: PLR0917 - an equation
    diffusion: Diffusion, sampler: str, prediction: Tensor, x: Tensor, time: int, previous: int, z: Tensor
) -> Tensor:
    """One step back with clipping, as the papers write it: Ho et al. 2020, eq. 6-7, or Song et al. 2021, eq. 12."""
    t = torch.full((len(x),), time)
    x0 = diffusion.to_x0_and_noise(prediction, x, t)[0].clamp(-1, 1)
    if previous < 0:
        return x0
    if sampler == "ddpm":
        mean, variance = diffusion.posterior(x0, x, t, torch.full_like(t, previous))
        return mean + variance.sqrt() * z
    b = diffusion.alpha_bar[previous]
    return b.sqrt() * x0 + (1 - b).sqrt() * diffusion.noise_from_x0(x0, x, t)


@pytest.mark.parametrize("objective", ["noise", "x0", "v"])
def test_a_step_is_its_equation_to_single_precision(objective: str) -> None:
    """Also at the first steps, where x0 is a small difference of large numbers. The equation is in double precision."""
    for schedule, (sampler, count) in product(("linear", "cosine"), (("ddpm", 1000), ("ddpm", 50), ("ddim", 250))):
        diffusion = process(schedule, objective=objective)
        steps = SAMPLERS[sampler](diffusion, count)
        for index in {0, 1, 2, count // 2, count - 3, count - 2, count - 1}:
            x, other = torch.randn((2, 2, 3, 5, 7), generator=generator(index))
            z = torch.randn(x.shape, generator=generator(count))
            prediction = 0.95 * x + 0.3 * other
            previous = steps[index + 1].time if index + 1 < count else -1
            given = prediction.double(), x.double(), steps[index].time, previous, z.double()
            actual = denoise(lambda _, __, p=prediction: p, steps[index], x, generator=generator(count))  # type: ignore[misc]
            torch.testing.assert_close(actual.double(), equation(diffusion, sampler, *given), rtol=5e-7, atol=5e-7)


@pytest.mark.gpu
@pytest.mark.calls
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_never_waits_for_the_device(never_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    source = torch.Generator("cuda").manual_seed(0)
    x = torch.randn((2, 3, 8, 8), generator=source, device="cuda")
    for sampler in SAMPLERS.values():
        steps = sampler(process(timesteps=20).to("cuda"), 10)
        with never_waiting():
            for step in steps:
                x = denoise(wobbly, step, x, generator=source)


def test_timesteps_run_from_pure_noise_to_the_first() -> None:
    assert sampling_timesteps(1000, 1000) == list(range(999, -1, -1))
    times = sampling_timesteps(1000, 250)
    assert (times[0], times[-1], len(set(times))) == (999, 0, 250)
    assert set(np.diff(times)) == {-4, -5}
    assert sampling_timesteps(1000, 1) == [999]
    for steps in (0, 11):
        with pytest.raises(ValueError, match=f"steps is {steps}"):
            sampling_timesteps(10, steps)


def test_image_grid_places_and_scales() -> None:
    images = torch.stack([torch.full((3, 4, 5), value) for value in (-1.0, 0.0, 1.0, 9.0, -9.0)])
    images[0, 0] = 1.0  # red
    grid = image_grid(images)
    assert grid.shape == (2 * 4 + 2, 3 * 5 + 4, 3)
    assert grid.dtype == np.uint8
    assert (grid[:4, :5] == [255, 0, 0]).all()
    assert (grid[:4, 7:12] == 128).all()
    assert (grid[6:, 7:12] == 0).all()
    assert (grid[4:6] == 255).all()  # the gap
    assert (grid[6:, 14:] == 255).all()  # the place without an image
