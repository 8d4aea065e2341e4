"""The seed network as code of its kind is usually written: the implementation "plain".

NCHW images, 1x1 convolutions, einsum, a LayerNorm by hand. It computes what ``unet`` computes and shares none of its
code: that is tested against it, and its speed is compared with it.
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpm_lab.diffusion.blocks import UNetConfig
from ddpm_lab.diffusion.unet import UNet

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


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


class Residual(nn.Module):
    """Two times convolution, GroupNorm and SiLU; the time embedding scales and shifts the first; a shortcut."""

    def __init__(self, inputs: int, outputs: int, *, time_width: int, groups: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(time_width, 2 * outputs))
        self.conv1, self.norm1 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(groups, outputs)
        self.conv2, self.norm2 = nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(groups, outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        scale, shift = self.time(embedding)[:, :, None, None].chunk(2, dim=1)
        h = F.silu(self.norm1(self.conv1(x)) * (scale + 1) + shift)
        return F.silu(self.norm2(self.conv2(h))) + cast(Tensor, self.shortcut(x))


class Attention(nn.Module):
    """x + attention of its norm: ``attend`` takes queries, keys and values (N, heads, d, L), L = H * W."""

    def __init__(self, width: int, *, attend: Attend, normed: bool, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm = ChannelNorm(width)
        self.qkv = nn.Conv2d(width, 3 * heads * head_width, 1, bias=False)
        self.out = nn.Sequential(nn.Conv2d(heads * head_width, width, 1))
        if normed:
            self.out.append(ChannelNorm(width))

    def forward(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        qkv = (t.reshape(n, self.heads, -1, height * width) for t in self.qkv(self.norm(x)).chunk(3, dim=1))
        return x + cast(Tensor, self.out(self.attend(*qkv).reshape(n, -1, height, width)))


def linear_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return linear attention: queries normalised over channels, keys over positions."""
    q, k = q.softmax(dim=-2) * q.shape[-2] ** -0.5, k.softmax(dim=-1)
    return torch.einsum("bhde,bhdn->bhen", torch.einsum("bhdn,bhen->bhde", k, v), q)


def full_attention(q: Tensor, k: Tensor, v: Tensor, *, axis: str) -> Tensor:
    """Return full attention; logits are 16 times the product of queries and keys normalised over ``axis``."""
    over = -2 if axis == "channels" else -1
    q, k = F.normalize(q, dim=over), F.normalize(k, dim=over)
    attention = (torch.einsum("bhdi,bhdj->bhij", q, k) * 16).softmax(dim=-1)
    return torch.einsum("bhij,bhdj->bhid", attention, v).transpose(-1, -2)


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

        residual = partial(Residual, time_width=time_width, groups=groups)
        attention = partial(Attention, heads=config.heads, head_width=config.head_width)
        linear = partial(attention, attend=linear_attention, normed=True)
        self.downs = nn.ModuleList()
        for level, (d, e) in enumerate(pairs):
            last = level == len(pairs) - 1
            onwards = nn.Conv2d(d, e, 3, padding=1) if last else nn.Conv2d(d, e, 4, stride=2, padding=1)
            self.downs.append(nn.ModuleList([residual(d, d), residual(d, d), linear(d), onwards]))
        bottom = widths[-1]
        self.middle1 = residual(bottom, bottom)
        full = partial(full_attention, axis=config.middle_attention_axis)
        self.middle_attention = attention(bottom, attend=full, normed=False)
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
    restore(copy, network.parameters())
    return copy.to(next(network.parameters()).device)


@torch.no_grad()
def restore(network: nn.Module, tensors: Iterable[Tensor]) -> None:
    """Copy tensors in the order of the lab's own network into a network of either kind."""
    for mine, saved in zip(network.parameters(), tensors, strict=True):
        mine.copy_(saved.reshape(mine.shape))
