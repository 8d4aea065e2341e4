"""The forward process and its losses against closed forms, brute force and diffusers' schedulers."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpm_lab.config import DiffusionConfig
from ddpm_lab.diffusion.process import Diffusion, cosine_betas, linear_betas

OBJECTIVES = ("noise", "x0", "v")


def process(**settings: Any) -> Diffusion:
    return Diffusion(DiffusionConfig(**settings))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x0 = torch.rand(6, 3, 4, 4, generator=generator, dtype=torch.float64) * 2 - 1
    noise = torch.randn(6, 3, 4, 4, generator=generator, dtype=torch.float64)
    return x0, torch.linspace(0, 990, 6).long(), noise


def test_schedules() -> None:
    """Against their closed forms; every process ends in noise."""
    betas = linear_betas(1000)
    assert (betas[0].item(), betas[-1].item()) == pytest.approx((1e-4, 0.02))
    assert betas.diff().std() < 1e-15
    assert cosine_betas(1000)[-1] == 0.999
    f = [math.cos((t / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2 for t in range(1001)]
    alpha_bar = process(schedule="cosine").alpha_bar
    assert [alpha_bar[t - 1].item() * f[0] for t in (1, 10, 500, 998)] == pytest.approx([f[1], f[10], f[500], f[998]])
    for schedule, timesteps in itertools.product(("linear", "cosine"), (10, 50, 1000, 4000)):
        diffusion = process(schedule=schedule, timesteps=timesteps)
        assert ((diffusion.betas > 0) & (diffusion.betas <= 0.999)).all()
        assert diffusion.alpha_bar[-1] < 1e-4
        assert (diffusion.alpha_bar.diff() < 0).all()


@pytest.mark.slow
def test_schedules_are_those_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    for schedule, theirs in (("linear", "linear"), ("cosine", "squaredcos_cap_v2")):
        scheduler = diffusers.DDPMScheduler(beta_schedule=theirs)
        torch.testing.assert_close(process(schedule=schedule).betas.float(), scheduler.betas, rtol=1e-4, atol=1e-9)


def test_q_sample_is_the_steps_one_by_one() -> None:
    # Mean and variance of x_t by applying q(x_t | x_{t-1}) again and again (Ho et al., eq. 2).
    diffusion = process(schedule="linear", timesteps=40)
    mean, variance = 1.0, 0.0
    one, zero = torch.ones(1, 3, 1, 1, dtype=torch.float64), torch.zeros(1, 3, 1, 1, dtype=torch.float64)
    for t, beta in enumerate(diffusion.betas.tolist()):
        mean, variance = math.sqrt(1 - beta) * mean, (1 - beta) * variance + beta
        time = torch.tensor([t])
        assert diffusion.q_sample(one, time, zero)[0, 0].item() == pytest.approx(mean, rel=1e-12)
        assert diffusion.q_sample(zero, time, one)[0, 0].item() ** 2 == pytest.approx(variance, rel=1e-12)


def test_posterior_is_bayes_by_brute_force() -> None:
    diffusion, shape, x0, x_t = process(schedule="linear", timesteps=40), (1, 3, 1, 1), 0.4, -0.3
    grid = torch.linspace(-8, 8, 400_001, dtype=torch.float64)
    pair = torch.full(shape, x0, dtype=torch.float64), torch.full(shape, x_t, dtype=torch.float64)
    for time, previous in ((30, 29), (30, 12), (1, 0)):
        before, after = diffusion.alpha_bar[previous].item(), diffusion.alpha_bar[time].item()
        ratio = after / before
        prior = -((grid - math.sqrt(before) * x0) ** 2) / (2 * (1 - before))
        likelihood = -((x_t - math.sqrt(ratio) * grid) ** 2) / (2 * (1 - ratio))
        density = torch.softmax(prior + likelihood, 0)
        mean = (density * grid).sum()
        found = diffusion.posterior(*pair, torch.tensor([time]), torch.tensor([previous]))
        assert found[0][0, 0].item() == pytest.approx(mean.item(), rel=1e-8)
        assert found[1].item() == pytest.approx((density * (grid - mean) ** 2).sum().item(), rel=1e-6)
    mean, variance = diffusion.posterior(*pair, torch.tensor([0]), torch.tensor([-1]))
    torch.testing.assert_close(mean, pair[0])
    assert variance.item() == 0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_round_trip_and_a_known_error_has_a_known_loss(objective: str) -> None:
    x0, t, noise = batch()
    for loss, expected in (("l1", 0.5), ("l2", 0.25)):
        diffusion = process(objective=objective, loss=loss)
        x_t, target = diffusion.q_sample(x0, t, noise), diffusion.target(x0, t, noise)
        x0_again, noise_again = diffusion.to_x0_and_noise(target, x_t, t)
        torch.testing.assert_close(x0_again, x0)
        torch.testing.assert_close(noise_again, noise)
        losses = diffusion.prediction_loss(target + 0.5, x0, t, noise)
        torch.testing.assert_close(losses, torch.full((len(x0),), expected, dtype=torch.float64))
        half = diffusion.prediction_loss(target.bfloat16(), x0.float(), t, noise.float())
        assert half.dtype == torch.float32, "of a prediction in half precision too"


def test_min_snr_makes_the_objectives_one() -> None:
    # The same wrong guess of x0, expressed in each objective, costs the same: min(SNR, gamma) |error of x0|^2.
    x0, t, noise = batch()
    guess = x0 + 0.1
    alpha_bar = process().alpha_bar[t]
    expected = (alpha_bar / (1 - alpha_bar)).clamp(max=5.0) * 0.01
    for objective in OBJECTIVES:
        diffusion = process(objective=objective, loss="l2", min_snr_gamma=5.0)
        x_t = diffusion.q_sample(x0, t, noise)
        prediction = diffusion.target(guess, t, diffusion.noise_from_x0(guess, x_t, t))
        torch.testing.assert_close(diffusion.prediction_loss(prediction, x0, t, noise), expected)
