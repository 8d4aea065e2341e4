"""Sampling as code of its kind is usually written: tables in single precision, looked up anew in each step.

It computes what ``sampling.py`` computes and shares none of its code: the lab's samplers are tested against it, and
their speed is compared with it ("plain").
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddpm_lab.diffusion.diffusion import Diffusion, Network


def extract(table: Tensor, t: Tensor, shape: torch.Size) -> Tensor:
    """The entries of a table (T,) at t (N,), so that they broadcast over images of ``shape``."""
    return table.gather(-1, t).reshape(len(t), *((1,) * (len(shape) - 1)))


class ReferenceSampler(nn.Module):
    """One step back at a time, by ancestral sampling (Ho et al. 2020, algorithm 2) or DDIM (Song et al. 2021, eq. 12).

    ``network`` is what predicts. Estimates of x0 are clipped to [-1, 1].
    """

    def __init__(self, network: Network, diffusion: Diffusion) -> None:
        super().__init__()
        self.network, self.objective = network, diffusion.objective
        betas = diffusion.betas
        alphas_cumprod = torch.cumprod(1 - betas, dim=0)
        alphas_cumprod_prev = torch.nn.functional.pad(alphas_cumprod[:-1], (1, 0), value=1.0)
        posterior_variance = betas * (1 - alphas_cumprod_prev) / (1 - alphas_cumprod)
        self.table("alphas_cumprod", alphas_cumprod)
        self.table("sqrt_alphas_cumprod", alphas_cumprod.sqrt())
        self.table("sqrt_one_minus_alphas_cumprod", (1 - alphas_cumprod).sqrt())
        self.table("sqrt_recip_alphas_cumprod", (1 / alphas_cumprod).sqrt())
        self.table("sqrt_recipm1_alphas_cumprod", (1 / alphas_cumprod - 1).sqrt())
        self.table("posterior_log_variance_clipped", posterior_variance.clamp(min=1e-20).log())
        self.table("posterior_mean_coef1", betas * alphas_cumprod_prev.sqrt() / (1 - alphas_cumprod))
        self.table("posterior_mean_coef2", (1 - alphas_cumprod_prev) * (1 - betas).sqrt() / (1 - alphas_cumprod))

    def table(self, name: str, values: Tensor) -> None:
        """Keep ``values`` as a buffer, in single precision."""
        self.register_buffer(name, values.to(torch.float32))

    def predict_x0(self, x: Tensor, t: Tensor) -> Tensor:
        """The x0 that the network sees in x, clipped."""
        output = self.network(x, t)
        if self.objective == "noise":
            x0 = self.of("sqrt_recip_alphas_cumprod", t, x) * x - self.of("sqrt_recipm1_alphas_cumprod", t, x) * output
        elif self.objective == "x0":
            x0 = output
        else:
            x0 = self.of("sqrt_alphas_cumprod", t, x) * x - self.of("sqrt_one_minus_alphas_cumprod", t, x) * output
        return x0.clamp(-1.0, 1.0)

    def of(self, name: str, t: Tensor, x: Tensor) -> Tensor:
        """The table ``name`` at t, for images like x."""
        return extract(self.get_buffer(name), t, x.shape)

    @torch.no_grad()
    def p_sample(self, x: Tensor, time: int, generator: torch.Generator) -> Tensor:
        """Images x (N, 3, H, W) at ``time`` to x at ``time`` - 1, by ancestral sampling."""
        t = torch.full((x.shape[0],), time, device=x.device, dtype=torch.long)
        x0 = self.predict_x0(x, t)
        mean = self.of("posterior_mean_coef1", t, x) * x0 + self.of("posterior_mean_coef2", t, x) * x
        log_variance = self.of("posterior_log_variance_clipped", t, x)
        noise = torch.randn(x.shape, generator=generator, device=x.device) if time > 0 else 0.0
        return mean + (0.5 * log_variance).exp() * noise

    @torch.no_grad()
    def ddim_sample(self, x: Tensor, time: int, previous: int) -> Tensor:
        """Images x (N, 3, H, W) at ``time`` to x at ``previous``, by DDIM without noise; -1 is x0 itself."""
        t = torch.full((x.shape[0],), time, device=x.device, dtype=torch.long)
        x0 = self.predict_x0(x, t)
        if previous < 0:
            return x0
        noise = (self.of("sqrt_recip_alphas_cumprod", t, x) * x - x0) / self.of("sqrt_recipm1_alphas_cumprod", t, x)
        alpha_next = self.get_buffer("alphas_cumprod")[previous]
        return x0 * alpha_next.sqrt() + (1 - alpha_next).sqrt() * noise
