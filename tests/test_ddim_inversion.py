"""Deterministic DDIM backwards and forwards, over data whose noise is known exactly."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ddpm_lab.diffusion.diffusion import Diffusion
from ddpm_lab.diffusion.sampling import ddim_steps, denoise, sampling_timesteps


def two_peaks(alpha_bar: Tensor, x: Tensor) -> Tensor:
    """E[noise | x] in double precision where every pixel of the data is N(-0.5, 0.3^2) or N(0.5, 0.3^2)."""
    signal, variance = alpha_bar.sqrt(), alpha_bar * 0.3**2 + 1 - alpha_bar
    peaks = torch.tensor([-0.5, 0.5], dtype=torch.float64).view(2, 1, 1, 1, 1)
    away = x - signal * peaks
    x0 = ((-away.square() / (2 * variance)).softmax(0) * (peaks + signal * 0.3**2 / variance * away)).sum(0)
    return (x - signal * x0) / (1 - alpha_bar).sqrt()


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_what_deterministic_ddim_encodes_it_decodes(schedule: str) -> None:
    """Song et al. 2021, section 5.4: the steps walked backwards give a latent from which the image comes back.

    Encoder and a second decoder are written here, from eq. 12 with sigma = 0 in double precision.
    """
    diffusion, source = Diffusion(schedule=schedule), torch.Generator().manual_seed(0)
    peaks = torch.randint(2, (4, 3, 8, 8), generator=source) - 0.5
    images = (peaks + 0.3 * torch.randn((4, 3, 8, 8), generator=source)).double()
    none = torch.ones((), dtype=torch.float64)

    def moved(x: Tensor, time: int, of: Tensor, to: Tensor) -> Tensor:
        noise = two_peaks(diffusion.alpha_bar[time].double(), x)
        return to.sqrt() * (x - (1 - of).sqrt() * noise) / of.sqrt() + (1 - to).sqrt() * noise

    def network(x: Tensor, t: Tensor) -> Tensor:
        return two_peaks(diffusion.alpha_bar[int(t[0])].double(), x.double()).float()

    errors = []
    for steps in (10, 50, 250, 1000):
        times = sampling_timesteps(1000, steps)
        levels = [none, *(diffusion.alpha_bar[t].double() for t in reversed(times))]
        latent = images
        for time, of, to in zip([0, *times[:0:-1]], levels, levels[1:], strict=False):
            latent = moved(latent, time, of, to)
        plain, decoded = latent, latent.float()
        for time, of, to in zip(times, levels[:0:-1], levels[-2::-1], strict=True):
            plain = moved(plain, time, of, to)
        for step in ddim_steps(diffusion, steps):
            decoded = denoise(network, step, decoded, generator=source, clip_x0=False)
        torch.testing.assert_close(decoded.double(), plain, rtol=2e-5, atol=2e-5)
        errors.append(float((decoded - images).square().mean().sqrt()))
    assert abs(float(latent.mean())) < 0.2
    assert 0.8 < float(latent.std()) < 1.2, "what is encoded is noise"
    assert all(more < less / 2 for less, more in pairwise(errors)), errors
    assert errors[-1] < 0.01
