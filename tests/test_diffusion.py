"""The forward process and its losses against closed forms, brute force and diffusers' schedulers."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from ddpm_lab.diffusion.diffusion import Diffusion, cosine_betas, linear_betas

OBJECTIVES = ("noise", "x0", "v")


def batch(count: int = 6, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x0 = torch.rand(count, 3, 4, 4, generator=generator, dtype=dtype) * 2 - 1
    noise = torch.randn(count, 3, 4, 4, generator=generator, dtype=dtype)
    return x0, torch.linspace(0, 990, count).long(), noise


def test_linear_schedule() -> None:
    betas = linear_betas(1000)
    assert betas[0].item() == pytest.approx(1e-4)
    assert betas[-1].item() == pytest.approx(0.02)
    assert betas.diff().std() < 1e-15


def test_cosine_schedule_multiplies_up_to_a_squared_cosine() -> None:
    def f(t: int) -> float:
        return math.cos((t / 1000 + 0.008) / 1.008 * math.pi / 2) ** 2

    alpha_bar = Diffusion(schedule="cosine").alpha_bar
    for t in (1, 10, 500, 998):
        assert alpha_bar[t - 1].item() == pytest.approx(f(t) / f(0), rel=1e-9)
    assert cosine_betas(1000)[-1] == 0.999


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("timesteps", [10, 50, 1000, 4000])
def test_every_process_ends_in_noise(schedule: str, timesteps: int) -> None:
    diffusion = Diffusion(schedule=schedule, timesteps=timesteps)
    assert ((diffusion.betas > 0) & (diffusion.betas <= 0.999)).all()
    assert diffusion.alpha_bar[-1] < 1e-4
    assert (diffusion.alpha_bar.diff() < 0).all()


@pytest.mark.parametrize(("schedule", "theirs"), [("linear", "linear"), ("cosine", "squaredcos_cap_v2")])
def test_schedules_against_diffusers(schedule: str, theirs: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    scheduler = diffusers.DDPMScheduler(beta_schedule=theirs)
    torch.testing.assert_close(Diffusion(schedule=schedule).betas.float(), scheduler.betas, rtol=1e-4, atol=1e-9)


def test_q_sample_moments() -> None:
    diffusion, count = Diffusion(), 20_000
    x0 = torch.full((count, 3, 1, 1), 0.7)
    noise = torch.randn(x0.shape, generator=torch.Generator().manual_seed(0))
    for time in (0, 300, 700, 999):
        x_t = diffusion.q_sample(x0, torch.full((count,), time), noise)
        alpha_bar = diffusion.alpha_bar[time].item()
        sigma = math.sqrt(1 - alpha_bar)
        assert x_t.dtype == torch.float32
        assert x_t.mean().item() == pytest.approx(0.7 * math.sqrt(alpha_bar), abs=4 * sigma / math.sqrt(3 * count))
        assert x_t.std().item() == pytest.approx(sigma, rel=0.02)


def test_q_sample_is_the_steps_one_by_one() -> None:
    # Mean and variance of x_t by applying q(x_t | x_{t-1}) again and again (Ho et al., eq. 2).
    diffusion = Diffusion(schedule="linear", timesteps=40)
    mean, variance = 1.0, 0.0
    one, zero = torch.ones(1, 3, 1, 1, dtype=torch.float64), torch.zeros(1, 3, 1, 1, dtype=torch.float64)
    for t, beta in enumerate(diffusion.betas.tolist()):
        mean, variance = math.sqrt(1 - beta) * mean, (1 - beta) * variance + beta
        time = torch.tensor([t])
        assert diffusion.q_sample(one, time, zero)[0, 0].item() == pytest.approx(mean, rel=1e-12)
        assert diffusion.q_sample(zero, time, one)[0, 0].item() ** 2 == pytest.approx(variance, rel=1e-12)


@pytest.mark.parametrize(("time", "previous"), [(30, 29), (30, 12), (1, 0)])
def test_posterior_is_bayes_by_brute_force(time: int, previous: int) -> None:
    diffusion = Diffusion(schedule="linear", timesteps=40)
    x0, x_t = 0.4, -0.3
    before, after = diffusion.alpha_bar[previous].item(), diffusion.alpha_bar[time].item()
    ratio = after / before
    grid = torch.linspace(-8, 8, 400_001, dtype=torch.float64)
    prior = -((grid - math.sqrt(before) * x0) ** 2) / (2 * (1 - before))
    likelihood = -((x_t - math.sqrt(ratio) * grid) ** 2) / (2 * (1 - ratio))
    density = torch.softmax(prior + likelihood, 0)
    mean = (density * grid).sum()
    variance = (density * (grid - mean) ** 2).sum()
    shape = (1, 3, 1, 1)
    actual_mean, actual_variance = diffusion.posterior(
        torch.full(shape, x0, dtype=torch.float64),
        torch.full(shape, x_t, dtype=torch.float64),
        torch.tensor([time]),
        torch.tensor([previous]),
    )
    assert actual_mean[0, 0].item() == pytest.approx(mean.item(), rel=1e-8)
    assert actual_variance.item() == pytest.approx(variance.item(), rel=1e-6)


def test_posterior_of_the_first_step_is_x0() -> None:
    x0, _, x_t = batch(1)
    mean, variance = Diffusion().posterior(x0, x_t, torch.tensor([0]))
    torch.testing.assert_close(mean, x0)
    assert variance.item() == 0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_round_trip(objective: str) -> None:
    diffusion = Diffusion(objective=objective)
    x0, t, noise = batch()
    x_t = diffusion.q_sample(x0, t, noise)
    x0_again, noise_again = diffusion.to_x0_and_noise(diffusion.target(x0, t, noise), x_t, t)
    torch.testing.assert_close(x0_again, x0)
    torch.testing.assert_close(noise_again, noise)
    torch.testing.assert_close(diffusion.noise_from_x0(x0, x_t, t), noise)


@pytest.mark.parametrize(("loss", "expected"), [("l1", 0.5), ("l2", 0.25)])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_loss_of_a_known_error(loss: str, expected: float, objective: str) -> None:
    diffusion = Diffusion(objective=objective, loss=loss)
    x0, t, noise = batch()
    target = diffusion.target(x0, t, noise)

    def network(x_t: Tensor, time: Tensor) -> Tensor:
        assert torch.equal(x_t, diffusion.q_sample(x0, t, noise))
        assert torch.equal(time, t)
        return target + 0.5

    losses = diffusion.loss(network, x0, t, noise)
    torch.testing.assert_close(losses, torch.full((len(x0),), expected, dtype=torch.float64))


def test_loss_of_a_half_precision_prediction_is_in_single() -> None:
    x0, t, noise = batch(dtype=torch.float32)
    loss = Diffusion(loss="l2").prediction_loss(noise.bfloat16(), x0, t, noise)
    assert loss.dtype == torch.float32
    assert loss.max() < 1e-4


def test_loss_draws_no_random_numbers() -> None:
    x0, t, noise = batch()
    state = torch.get_rng_state()
    Diffusion().loss(lambda x, _: x, x0, t, noise)
    assert torch.equal(state, torch.get_rng_state())


def test_min_snr_makes_the_objectives_one() -> None:
    # The same wrong guess of x0, expressed in each objective, costs the same: min(SNR, gamma) |error of x0|^2.
    x0, t, noise = batch()
    guess = x0 + 0.1
    losses = []
    for objective in OBJECTIVES:
        diffusion = Diffusion(objective=objective, loss="l2", min_snr_gamma=5.0)
        x_t = diffusion.q_sample(x0, t, noise)
        prediction = diffusion.target(guess, t, diffusion.noise_from_x0(guess, x_t, t))
        losses.append(diffusion.prediction_loss(prediction, x0, t, noise))
    alpha_bar = Diffusion().alpha_bar[t]
    expected = (alpha_bar / (1 - alpha_bar)).clamp(max=5.0) * 0.01
    for loss in losses:
        torch.testing.assert_close(loss, expected)


def test_min_snr_weights_at_known_ratios() -> None:
    for objective, expected in (("noise", (0.5, 1.0)), ("x0", (5.0, 0.1)), ("v", (5 / 11, 1 / 11))):
        diffusion = Diffusion(objective=objective, loss="l2", min_snr_gamma=5.0)
        diffusion.alpha_bar = torch.tensor([10 / 11, 1 / 11], dtype=torch.float64)  # signal-to-noise ratios 10 and 1/10
        assert diffusion._loss_weight().tolist() == pytest.approx(expected)


def test_impossible_settings_are_refused_in_one_sentence() -> None:
    for place in ("schedule", "objective", "loss"):
        with pytest.raises(ValueError, match=rf"^{place} is 'sharp': choose one of "):
            Diffusion(**{place: "sharp"})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timesteps is 1"):
        Diffusion(timesteps=1)
    for gamma in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="min_snr_gamma"):
            Diffusion(loss="l2", min_snr_gamma=gamma)
    with pytest.raises(ValueError, match="loss 'l2' only"):
        Diffusion(loss="l1", min_snr_gamma=5.0)


def test_every_combination_gives_finite_losses() -> None:
    x0, t, noise = batch(dtype=torch.float32)
    for schedule, objective, gamma in itertools.product(("linear", "cosine"), OBJECTIVES, (None, 5.0)):
        diffusion = Diffusion(schedule=schedule, objective=objective, loss="l2", min_snr_gamma=gamma).to("cpu")
        loss = diffusion.loss(lambda x, _: x, x0, t, noise)
        assert loss.shape == (len(x0),)
        assert loss.isfinite().all()
