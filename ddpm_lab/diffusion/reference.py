"""The seed network and its sampler as code of their kind is usually written: the implementation "plain".

NCHW images, 1x1 convolutions, einsum, a LayerNorm by hand; tables in single precision, looked up anew in each step. It
computes what ``unet`` and ``sampling`` compute and shares none of their code: they are tested against it, and their
speed is compared with it.
"""

import math
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpm_lab.diffusion.blocks import UNetConfig
from ddpm_lab.diffusion.process import Diffusion, Network
from ddpm_lab.diffusion.unet import UNet


class ChannelNorm(nn.Module):
    """LayerNorm over the channels of (N, C, H, W)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1, width, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, width, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        variance = torch.var(x, dim=1, unbiased=False, keepdim=True)
        mean = torch.mean(x, dim=1, keepdim=True)
        return (x - mean) / (variance + 1e-5).sqrt() * self.gain + self.bias


class Half(nn.Module):
    """Convolution, GroupNorm, scale and shift where they are given, SiLU."""

    def __init__(self, inputs: int, outputs: int, groups: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = nn.GroupNorm(groups, outputs)

    def forward(self, x: Tensor, scale_shift: tuple[Tensor, Tensor] | None = None) -> Tensor:
        x = self.norm(self.conv(x))
        if scale_shift is not None:
            scale, shift = scale_shift
            x = x * (scale + 1) + shift
        return F.silu(x)


class Residual(nn.Module):
    """The residual block: two halves, the first of which the time embedding scales and shifts."""

    def __init__(self, inputs: int, outputs: int, time_width: int, groups: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time_width, 2 * outputs))
        self.first = Half(inputs, outputs, groups)
        self.second = Half(outputs, outputs, groups)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        scale, shift = self.time(embedding)[:, :, None, None].chunk(2, dim=1)
        return cast(Tensor, self.second(self.first(x, (scale, shift))) + self.shortcut(x))


class Linear(nn.Module):
    """x + linear attention of its norm: queries normalised over channels, keys over positions."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads, self.scale = heads, head_width**-0.5
        self.norm = ChannelNorm(width)
        self.qkv = nn.Conv2d(width, 3 * heads * head_width, 1, bias=False)
        self.out = nn.Sequential(nn.Conv2d(heads * head_width, width, 1), ChannelNorm(width))

    def forward(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        q, k, v = (t.reshape(n, self.heads, -1, height * width) for t in self.qkv(self.norm(x)).chunk(3, dim=1))
        q, k = q.softmax(dim=-2) * self.scale, k.softmax(dim=-1)
        context = torch.einsum("bhdn,bhen->bhde", k, v)
        out = torch.einsum("bhde,bhdn->bhen", context, q)
        return x + cast(Tensor, self.out(out.reshape(n, -1, height, width)))


class Full(nn.Module):
    """x + full attention of its norm, with logits of 16 times the product of normalised queries and keys."""

    def __init__(self, width: int, heads: int, head_width: int, axis: str) -> None:
        super().__init__()
        self.heads, self.axis = heads, -2 if axis == "channels" else -1
        self.norm = ChannelNorm(width)
        self.qkv = nn.Conv2d(width, 3 * heads * head_width, 1, bias=False)
        self.out = nn.Conv2d(heads * head_width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        q, k, v = (t.reshape(n, self.heads, -1, height * width) for t in self.qkv(self.norm(x)).chunk(3, dim=1))
        q, k = F.normalize(q, dim=self.axis), F.normalize(k, dim=self.axis)
        attention = (torch.einsum("bhdi,bhdj->bhij", q, k) * 16).softmax(dim=-1)
        out = torch.einsum("bhij,bhdj->bhid", attention, v)
        return x + cast(Tensor, self.out(out.permute(0, 1, 3, 2).reshape(n, -1, height, width)))


class ReferenceUNet(nn.Module):
    """The seed family with two blocks a level: images (N, 3, H, W) and timesteps (N,) to (N, 3, H, W)."""

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        width, time_width, groups = config.width, 4 * config.width, config.groups
        self.config, self.width = config, width
        self.time = nn.Sequential(nn.Linear(width, time_width), nn.GELU(), nn.Linear(time_width, time_width))
        self.stem = nn.Conv2d(3, width, 7, padding=3)
        self.head = nn.Conv2d(width, 3, 1)
        widths = [width, *(width * m for m in config.multipliers)]
        pairs = list(pairwise(widths))

        def residual(inputs: int, outputs: int) -> Residual:
            return Residual(inputs, outputs, time_width, groups)

        def linear(channels: int) -> Linear:
            return Linear(channels, config.heads, config.head_width)

        self.downs = nn.ModuleList()
        for level, (d, e) in enumerate(pairs):
            last = level == len(pairs) - 1
            onwards = nn.Conv2d(d, e, 3, padding=1) if last else nn.Conv2d(d, e, 4, stride=2, padding=1)
            self.downs.append(nn.ModuleList([residual(d, d), residual(d, d), linear(d), onwards]))
        bottom = widths[-1]
        self.middle1 = residual(bottom, bottom)
        self.middle_attention = Full(bottom, config.heads, config.head_width, config.middle_attention_axis)
        self.middle2 = residual(bottom, bottom)
        self.ups = nn.ModuleList()
        for level, (d, e) in reversed(list(enumerate(pairs))):
            conv = nn.Conv2d(e, d, 3, padding=1)
            onwards_up = conv if level == 0 else nn.Sequential(nn.Upsample(scale_factor=2), conv)
            self.ups.append(nn.ModuleList([residual(e + d, e), residual(e + d, e), linear(e), onwards_up]))
        self.last = residual(2 * width, width)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        half = self.width // 2
        frequencies = torch.exp(torch.arange(half, device=t.device) * (-math.log(10_000) / (half - 1)))
        angles = t[:, None] * frequencies[None, :]
        embedding = self.time(torch.cat((angles.sin(), angles.cos()), dim=-1))
        x = self.stem(x)
        start, skips = x.clone(), []
        for first, second, attention, onwards in cast(Any, self.downs):
            x = first(x, embedding)
            skips.append(x)
            x = attention(second(x, embedding))
            skips.append(x)
            x = onwards(x)
        x = self.middle2(self.middle_attention(self.middle1(x, embedding)), embedding)
        for first, second, attention, onwards in cast(Any, self.ups):
            x = first(torch.cat((x, skips.pop()), dim=1), embedding)
            x = attention(second(torch.cat((x, skips.pop()), dim=1), embedding))
            x = onwards(x)
        return cast(Tensor, self.head(self.last(torch.cat((x, start), dim=1), embedding)))


def reference(network: UNet) -> ReferenceUNet:
    """The reference with the weights of ``network``, which is of the seed family: configurations refuse others.

    Both register their layers in the order in which the other does. A 1x1 convolution holds what a linear layer holds,
    with two more axes, and so does a norm by hand.
    """
    copy = ReferenceUNet(network.config)
    with torch.no_grad():
        for mine, theirs in zip(copy.parameters(), network.parameters(), strict=True):
            mine.copy_(theirs.reshape(mine.shape))
    return copy.to(next(network.parameters()).device)


class ReferenceSampler(nn.Module):
    """Ancestral sampling (Ho et al. 2020, algorithm 2), estimates of x0 clipped to [-1, 1]; ``network`` predicts."""

    def __init__(self, network: Network, diffusion: Diffusion) -> None:
        super().__init__()
        self.network, self.objective = network, diffusion.config.objective
        betas = diffusion.betas
        alphas_cumprod = torch.cumprod(1 - betas, dim=0)
        alphas_cumprod_prev = F.pad(alphas_cumprod[:-1], (1, 0), value=1.0)
        posterior_variance = betas * (1 - alphas_cumprod_prev) / (1 - alphas_cumprod)
        tables = {
            "sqrt_alphas_cumprod": alphas_cumprod.sqrt(),
            "sqrt_one_minus_alphas_cumprod": (1 - alphas_cumprod).sqrt(),
            "sqrt_recip_alphas_cumprod": (1 / alphas_cumprod).sqrt(),
            "sqrt_recipm1_alphas_cumprod": (1 / alphas_cumprod - 1).sqrt(),
            "posterior_log_variance_clipped": posterior_variance.clamp(min=1e-20).log(),
            "posterior_mean_coef1": betas * alphas_cumprod_prev.sqrt() / (1 - alphas_cumprod),
            "posterior_mean_coef2": (1 - alphas_cumprod_prev) * (1 - betas).sqrt() / (1 - alphas_cumprod),
        }
        for name, table in tables.items():
            self.register_buffer(name, table.to(torch.float32))

    def predict_x0(self, x: Tensor, t: Tensor) -> Tensor:
        """The x0 that the network sees in x, clipped."""
        output = self.network(x, t)
        if self.objective == "noise":
            x0 = self.of("sqrt_recip_alphas_cumprod", t) * x - self.of("sqrt_recipm1_alphas_cumprod", t) * output
        elif self.objective == "x0":
            x0 = output
        else:
            x0 = self.of("sqrt_alphas_cumprod", t) * x - self.of("sqrt_one_minus_alphas_cumprod", t) * output
        return x0.clamp(-1.0, 1.0)

    def of(self, name: str, t: Tensor) -> Tensor:
        """The table ``name`` at t (N,), so that it broadcasts over images."""
        return self.get_buffer(name).gather(-1, t).reshape(len(t), 1, 1, 1)

    @torch.no_grad()
    def p_sample(self, x: Tensor, time: int, generator: torch.Generator) -> Tensor:
        """Images x (N, 3, H, W) at ``time`` to x at ``time`` - 1."""
        t = torch.full((x.shape[0],), time, device=x.device, dtype=torch.long)
        x0 = self.predict_x0(x, t)
        mean = self.of("posterior_mean_coef1", t) * x0 + self.of("posterior_mean_coef2", t) * x
        log_variance = self.of("posterior_log_variance_clipped", t)
        noise = torch.randn(x.shape, generator=generator, device=x.device) if time > 0 else 0.0
        return mean + (0.5 * log_variance).exp() * noise
