"""The samplers against a distribution known exactly, against each other, and against diffusers' schedulers."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ddpm_lab.diffusion.diffusion import Diffusion, Network
from ddpm_lab.diffusion.sampling import Shape, Step, ddim_steps, ddpm_steps, denoise, image_grid, sampling_timesteps
from ddpm_lab.diffusion.sampling import sample as walk

MEAN, DEVIATION = 0.2, 0.15


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ddpm_sample(
    network: Network, diffusion: Diffusion, shape: Shape, *, steps: int | None = None, **how: Any
) -> Tensor:
    return walk(network, ddpm_steps(diffusion, steps), shape, **how)


def ddim_sample(
    network: Network, diffusion: Diffusion, shape: Shape, *, steps: int = 250, eta: float = 0.0, **how: Any
) -> Tensor:
    return walk(network, ddim_steps(diffusion, steps, eta=eta), shape, **how)


def gaussian_noise_predictor(diffusion: Diffusion) -> Callable[[Tensor, Tensor], Tensor]:
    """E[noise | x_t] when every pixel of the data is N(MEAN, DEVIATION^2): the network that training would reach."""

    def predict(x: Tensor, t: Tensor) -> Tensor:
        alpha_bar = diffusion.alpha_bar[t].view(-1, 1, 1, 1)
        variance = alpha_bar * DEVIATION**2 + 1 - alpha_bar
        return ((1 - alpha_bar).sqrt() * (x - alpha_bar.sqrt() * MEAN) / variance).float()

    return predict


def wobbly(x: Tensor, t: Tensor) -> Tensor:
    """Stands for a network: any smooth function of x and t."""
    return torch.sin(2 * x) + 0.3 * x.flip(-1) + 0.001 * t.view(-1, 1, 1, 1)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize(("sample", "steps"), [(ddpm_sample, 1000), (ddim_sample, 250), (ddim_sample, 1000)])
def test_exact_predictor_recovers_the_data(sample: Callable[..., Tensor], steps: int, schedule: str) -> None:
    # DDPM walks every step: the posterior variance leaves out what is uncertain in x0, which is small for small steps.
    diffusion = Diffusion(schedule=schedule)
    network = gaussian_noise_predictor(diffusion)
    images = sample(network, diffusion, (64, 3, 8, 8), generator=generator(), steps=steps, clip_x0=False)
    count = images.numel()
    assert images.mean().item() == pytest.approx(MEAN, abs=0.02 * DEVIATION + 5 * DEVIATION / math.sqrt(count))
    assert images.std().item() == pytest.approx(DEVIATION, rel=0.05)


def test_ddim_follows_the_probability_flow_exactly_as_steps_grow() -> None:
    # For Gaussian data the flow maps the first noise z to MEAN + DEVIATION z; the error must fall with the step size.
    diffusion = Diffusion(schedule="linear")
    z = torch.randn((4, 3, 8, 8), generator=generator())
    errors = []
    for steps in (50, 200, 1000):
        network = gaussian_noise_predictor(diffusion)
        images = ddim_sample(network, diffusion, (4, 3, 8, 8), generator=generator(), steps=steps, clip_x0=False)
        errors.append((images - (MEAN + DEVIATION * z)).abs().mean().item() / DEVIATION)
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 0.02


@pytest.mark.parametrize("steps", [20, 100])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("objective", ["noise", "x0", "v"])
def test_ddim_with_full_noise_is_ddpm(steps: int, clip: bool, objective: str) -> None:
    # Song et al. 2021, section 4.1; the samplers are written from different equations.
    diffusion = Diffusion(schedule="linear", timesteps=100, objective=objective)
    shape = (2, 3, 4, 4)
    ancestral = ddpm_sample(wobbly, diffusion, shape, generator=generator(), steps=steps, clip_x0=clip)
    implicit = ddim_sample(wobbly, diffusion, shape, generator=generator(), steps=steps, clip_x0=clip, eta=1.0)
    torch.testing.assert_close(ancestral, implicit, rtol=1e-3, atol=1e-4)


class Recorder:
    """A network that remembers what it was asked, so that each step of a sampler can be checked by itself."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, int]] = []

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.seen.append((x, int(t[0])))
        return wobbly(x, t)


@pytest.mark.parametrize("clip", [True, False])
def test_ddpm_steps_against_diffusers(clip: bool) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDPMScheduler(timestep_spacing="linspace", clip_sample=clip)
    shape, network = (2, 3, 4, 4), Recorder()
    ddpm_sample(network, Diffusion(schedule="linear"), shape, generator=generator(), clip_x0=clip)
    scheduler.set_timesteps(1000)
    noises = generator()
    torch.randn(shape, generator=noises)
    assert [t for _, t in network.seen] == scheduler.timesteps.tolist()
    for (x, t), (following, _) in zip(network.seen, network.seen[1:], strict=False):
        step = scheduler.step(wobbly(x, torch.full((2,), t)), t, x, generator=noises)
        torch.testing.assert_close(step.prev_sample, following, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_ddim_steps_against_diffusers(eta: float) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDIMScheduler(timestep_spacing="linspace", clip_sample=True)
    shape, network = (2, 3, 4, 4), Recorder()
    ddim_sample(network, Diffusion(schedule="linear"), shape, generator=generator(), steps=1000, eta=eta)
    scheduler.set_timesteps(1000)
    noises = generator()
    torch.randn(shape, generator=noises)
    for (x, t), (following, _) in zip(network.seen, network.seen[1:], strict=False):
        prediction = wobbly(x, torch.full((2,), t))
        step = scheduler.step(prediction, t, x, eta=eta, use_clipped_model_output=True, generator=noises)
        torch.testing.assert_close(step.prev_sample, following, rtol=2e-4, atol=2e-4)


class Constant:
    """A network that always predicts the same."""

    def __init__(self, prediction: Tensor) -> None:
        self.prediction = prediction

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        assert t.shape == (len(x),)
        return self.prediction


def steps_of(diffusion: Diffusion, eta: float | None, count: int) -> list[Step]:
    """The steps of DDPM, or with an eta of DDIM."""
    return ddpm_steps(diffusion, count) if eta is None else ddim_steps(diffusion, count, eta=eta)


def equation(  # noqa: PLR0917 - an equation
    diffusion: Diffusion, eta: float | None, prediction: Tensor, x: Tensor, time: int, previous: int, z: Tensor
) -> Tensor:
    """One step back with clipping, as the papers write it: Ho et al. 2020, eq. 6-7, or Song et al. 2021, eq. 12."""
    t = torch.full((len(x),), time)
    x0 = diffusion.to_x0_and_noise(prediction, x, t)[0].clamp(-1, 1)
    if previous < 0:
        return x0
    if eta is None:
        mean, variance = diffusion.posterior(x0, x, t, torch.full_like(t, previous))
        return mean + variance.sqrt() * z
    a, b = diffusion.alpha_bar[time], diffusion.alpha_bar[previous]
    sigma = eta * ((1 - b) / (1 - a) * (1 - a / b)).sqrt()
    return b.sqrt() * x0 + (1 - b - sigma**2).sqrt() * diffusion.noise_from_x0(x0, x, t) + sigma * z


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("objective", ["noise", "x0", "v"])
@pytest.mark.parametrize(("eta", "count"), [(None, 1000), (None, 50), (0.0, 250), (0.5, 50), (1.0, 1000)])
def test_a_step_is_its_equation_to_single_precision(
    schedule: str, objective: str, eta: float | None, count: int
) -> None:
    """Also at the first steps, where x0 is a small difference of large numbers. The equation is in double precision."""
    diffusion = Diffusion(schedule=schedule, objective=objective)
    steps = steps_of(diffusion, eta, count)
    for index in {0, 1, 2, count // 2, count - 3, count - 2, count - 1}:
        x, other = torch.randn((2, 2, 3, 5, 7), generator=generator(index))
        z = torch.randn(x.shape, generator=generator(count))
        prediction = 0.95 * x + 0.3 * other
        previous = steps[index + 1].time if index + 1 < count else -1
        expected = equation(diffusion, eta, prediction.double(), x.double(), steps[index].time, previous, z.double())
        actual = denoise(Constant(prediction), steps[index], x, generator=generator(count))
        torch.testing.assert_close(actual.double(), expected, rtol=5e-7, atol=5e-7)


@pytest.mark.parametrize("sample", [ddpm_sample, ddim_sample])
def test_the_memory_format_is_the_networks_and_changes_nothing(sample: Callable[..., Tensor]) -> None:
    diffusion, shape = Diffusion(timesteps=20), (2, 3, 6, 10)
    formats = []

    def channels_last(x: Tensor, t: Tensor) -> Tensor:
        formats.append(x.is_contiguous(memory_format=torch.channels_last))
        return wobbly(x, t).contiguous(memory_format=torch.channels_last)

    plain = sample(wobbly, diffusion, shape, generator=generator(), steps=10)
    images = sample(channels_last, diffusion, shape, generator=generator(), steps=10)
    assert plain.is_contiguous()
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert formats == [False, *[True] * 9], "only the first noise is drawn as it always was"
    torch.testing.assert_close(images, plain, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("eta", [None, 0.5])
def test_a_step_never_waits_for_the_device(
    eta: float | None, never_waiting: Callable[[], AbstractContextManager[None]]
) -> None:
    source = torch.Generator("cuda").manual_seed(0)
    x = torch.randn((2, 3, 8, 8), generator=source, device="cuda")
    steps = steps_of(Diffusion(timesteps=20).to("cuda"), eta, 10)
    with never_waiting():
        for step in steps:
            x = denoise(wobbly, step, x, generator=source)


@pytest.mark.parametrize("sample", [ddpm_sample, ddim_sample])
def test_one_seed_one_image(sample: Callable[..., Tensor]) -> None:
    diffusion = Diffusion(timesteps=30)
    first, again, other = (
        sample(wobbly, diffusion, (1, 3, 8, 8), generator=generator(seed), steps=10) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not first.requires_grad
    assert first.abs().max() <= 1


def test_timesteps_run_from_pure_noise_to_the_first() -> None:
    assert sampling_timesteps(1000, 1000) == list(range(999, -1, -1))
    times = sampling_timesteps(1000, 250)
    assert (times[0], times[-1], len(set(times))) == (999, 0, 250)
    assert set(np.diff(times)) == {-4, -5}
    assert sampling_timesteps(1000, 1) == [999]


def test_impossible_requests_are_refused() -> None:
    diffusion = Diffusion(timesteps=10)
    for steps in (0, 11):
        with pytest.raises(ValueError, match=f"steps is {steps}: give a whole number from 1 to the 10 timesteps"):
            ddim_sample(wobbly, diffusion, (1, 3, 4, 4), generator=generator(), steps=steps)
    with pytest.raises(ValueError, match="eta is 2"):
        ddim_sample(wobbly, diffusion, (1, 3, 4, 4), generator=generator(), steps=5, eta=2.0)
    with pytest.raises(ValueError, match="images have shape"):
        image_grid(torch.zeros(3, 4, 4))
    with pytest.raises(ValueError, match="columns is 0"):
        image_grid(torch.zeros(1, 3, 4, 4), columns=0)


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
    assert image_grid(images, columns=5, gap=0).shape == (4, 25, 3)
