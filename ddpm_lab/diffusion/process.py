"""The forward process of a diffusion model, its training loss, and the posterior of one step back.

Symbols follow Ho et al. 2020, "Denoising Diffusion Probabilistic Models": beta_t, alpha_t = 1 - beta_t and
alpha_bar_t = alpha_1 ... alpha_t. Timesteps count from 0 here, so the paper's t is index t - 1.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ddpm_lab.config import DiffusionConfig

Network = Callable[[Tensor, Tensor], Tensor]
"""Images (N, 3, H, W) and timesteps (N,) to a prediction (N, 3, H, W)."""


def linear_betas(timesteps: int) -> Tensor:
    """Betas (T,), float64, from 1e-4 to 0.02 at T = 1000 (Ho et al. 2020, section 4).

    For another T they are scaled by 1000 / T, so that the process always ends in noise, and clipped at 0.999.
    """
    scale = 1000 / timesteps
    return torch.linspace(1e-4 * scale, 0.02 * scale, timesteps, dtype=torch.float64).clamp(max=0.999)


def cosine_betas(timesteps: int) -> Tensor:
    """Betas (T,), float64, for which alpha_bar falls like a squared cosine (Nichol & Dhariwal 2021, eq. 17)."""
    time = torch.linspace(0, 1, timesteps + 1, dtype=torch.float64)
    alpha_bar = torch.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - alpha_bar[1:] / alpha_bar[:-1]).clamp(max=0.999)


class Diffusion:
    """The process and the objective. Tables are float64 and computed once; results have the precision of the images.

    Nothing here draws random numbers: timesteps and noise come from the caller, so that eager, compiled and parallel
    runs of one seed see the same ones.
    """

    def __init__(self, config: DiffusionConfig, device: torch.device | str = "cpu") -> None:
        self.config, self.timesteps = config, config.timesteps
        self.betas = (linear_betas if config.schedule == "linear" else cosine_betas)(config.timesteps)
        alpha_bar = torch.cumprod(1 - self.betas, 0)
        # Weights (T,) of the squared error (Hang et al. 2023, section 3.4): min(SNR, gamma) on x0. The errors of the
        # other objectives are multiples of the error of x0, which the divisors undo.
        snr = alpha_bar / (1 - alpha_bar)
        divisor = {"noise": snr, "x0": torch.ones_like(snr), "v": snr + 1}[config.objective]
        weight = snr.clamp(max=config.min_snr_gamma or math.inf) / divisor  # without a gamma of no use
        self.alpha_bar, self.loss_weight = alpha_bar.to(device), weight.to(device)

    def signal_and_noise(self, t: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """sqrt(alpha_bar_t) and sqrt(1 - alpha_bar_t), each (N, 1, 1, 1), for integer t (N,), in ``like``'s dtype."""
        alpha_bar = self.alpha_bar[t].view(-1, 1, 1, 1)
        return alpha_bar.sqrt().to(like.dtype), (1 - alpha_bar).sqrt().to(like.dtype)

    def q_sample(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Draw x_t from q(x_t | x_0) with the given standard normal noise (Ho et al. 2020, eq. 4)."""
        signal, sigma = self.signal_and_noise(t, x0)
        return signal * x0 + sigma * noise

    def target(self, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """What the network should predict: the noise, x0, or v (Salimans & Ho 2022, appendix D)."""
        if self.config.objective == "noise":
            return noise
        if self.config.objective == "x0":
            return x0
        signal, sigma = self.signal_and_noise(t, x0)
        return signal * noise - sigma * x0

    def prediction_loss(self, prediction: Tensor, x0: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Loss of each image, (N,), in the precision of x0; images (N, 3, H, W), integer t (N,)."""
        error = prediction.to(x0.dtype) - self.target(x0, t, noise)
        per_image = (error.abs() if self.config.loss == "l1" else error.square()).flatten(1).mean(1)
        if self.config.min_snr_gamma is None:
            return per_image
        return per_image * self.loss_weight[t].to(per_image.dtype)

    def to_x0_and_noise(self, prediction: Tensor, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """The x0 and the noise that a prediction of this objective implies at x_t."""
        signal, sigma = self.signal_and_noise(t, x_t)
        if self.config.objective == "noise":
            return (x_t - sigma * prediction) / signal, prediction
        if self.config.objective == "x0":
            return prediction, self.noise_from_x0(prediction, x_t, t)
        return signal * x_t - sigma * prediction, sigma * x_t + signal * prediction

    def noise_from_x0(self, x0: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """The noise with which x0 becomes x_t."""
        signal, sigma = self.signal_and_noise(t, x_t)
        return (x_t - signal * x0) / sigma

    def alpha_bar_before(self, previous: Tensor) -> Tensor:
        """alpha_bar (N,) at timesteps (N,), of which -1 is x0 itself."""
        return torch.where(previous < 0, 1.0, self.alpha_bar[previous.clamp(min=0)])

    def posterior(self, x0: Tensor, x_t: Tensor, t: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (N, 3, H, W) and variance (N, 1, 1, 1) of q(x_previous | x_t, x0) (Ho et al. 2020, eq. 6-7).

        ``previous`` (N,) is t - 1, or less in the respaced process of Nichol & Dhariwal 2021, section 4. -1 means x0
        itself: the mean is then x0 and the variance 0.
        """
        alpha_bar, alpha_bar_previous = self.alpha_bar[t], self.alpha_bar_before(previous)
        alpha = alpha_bar / alpha_bar_previous
        of_x0 = alpha_bar_previous.sqrt() * (1 - alpha) / (1 - alpha_bar)
        of_x_t = alpha.sqrt() * (1 - alpha_bar_previous) / (1 - alpha_bar)
        variance = (1 - alpha) * (1 - alpha_bar_previous) / (1 - alpha_bar)
        of_x0, of_x_t, variance = (c.view(-1, 1, 1, 1).to(x_t.dtype) for c in (of_x0, of_x_t, variance))
        return of_x0 * x0 + of_x_t * x_t, variance
