"""The U-Nets: networks that predict noise (or x0, or v) for diffusion models, two families in one skeleton.

The ``seed`` family normalises after each convolution, lets the time embedding scale and shift, and puts linear
attention at every level and cosine-similarity attention in the middle. The ``ddpm`` family is the network of Ho et
al. 2020 (appendix B), without its dropout, so that a step draws no random numbers.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpm_lab.diffusion.blocks import (
    CosineAttention,
    DDPMAttention,
    DDPMBlock,
    LinearAttention,
    Norm,
    SeedBlock,
    Stage,
    TimeLinear,
    UNetConfig,
    UpsampledConv2d,
    convolution,
    zero,
)

# tiny is made for a CPU: a training step of some 10 ms at batch 8 on two cores, and few kernels to compile. Both rule
# out more than one level, because its cost is the number of operators, not their size. seed-16 and seed-32 are the seed
# network at these widths, to show from which size a setting pays; s000 is twice as wide.
NETWORKS = {
    "tiny": UNetConfig(family="ddpm", width=16, multipliers=(1,), groups=8, blocks=1, patch=2),
    "seed-16": UNetConfig(family="seed", width=16, multipliers=(1, 2, 4), groups=8, heads=1),
    "seed-32": UNetConfig(family="seed", width=32, multipliers=(1, 2, 4), groups=8, heads=2),
    "seed": UNetConfig(family="seed", width=64, multipliers=(1, 2, 4), groups=8),
    "ddpm": UNetConfig(family="ddpm", width=128, multipliers=(1, 2, 2, 2), groups=32, attention_levels=(1,)),
    "s000": UNetConfig(family="seed", width=128, multipliers=(1, 2, 4), groups=8),
}


class UNet(nn.Module):
    """A U-Net over images (N, 3, H, W) and timesteps (N,) that returns (N, 3, H, W), built from ``config``.

    H and W are multiples of what the configuration asks of a network. The encoder remembers the output of every stage
    (in the ddpm family of the stem and of every downsampling too) and each stage of the decoder takes back the latest.
    """

    def __init__(self, config: UNetConfig) -> None:
        super().__init__()
        self.config, time_width = config, 4 * config.width
        activation: nn.Module = nn.GELU() if config.family == "seed" else nn.SiLU()
        # Every block applies SiLU to the embedding before its own linear layer: done once here.
        self.time = nn.Sequential(
            nn.Linear(config.width, time_width), activation, nn.Linear(time_width, time_width), nn.SiLU()
        )
        build = _build_seed if config.family == "seed" else _build_ddpm
        self.stem, down, middle, up, self.head = build(config)
        self.down, self.middle, self.up = nn.ModuleList(down), nn.ModuleList(middle), nn.ModuleList(up)
        self.times = [layer for layer in self.modules() if isinstance(layer, TimeLinear)]

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        embeddings = self._for_blocks(self.time(self._sinusoids(t)))
        h = self.stem(F.pixel_unshuffle(x, self.config.patch) if self.config.patch > 1 else x)
        remembered = [h]
        for layer in self.down:
            is_stage = isinstance(layer, Stage)
            h = layer(h, next(embeddings)) if is_stage else layer(h)
            if is_stage or self.config.family == "ddpm":
                remembered.append(h)
        for stage in self.middle:
            h = stage(h, next(embeddings))
        for layer in self.up:
            is_stage = isinstance(layer, Stage)
            h = layer(torch.cat((h, remembered.pop()), dim=1), next(embeddings)) if is_stage else layer(h)
        h = self.head(h)
        return F.pixel_shuffle(h, self.config.patch) if self.config.patch > 1 else h

    def _for_blocks(self, embedding: Tensor) -> Iterator[Tensor]:
        """What each block is given of the time embedding.

        Joined layers are one: each is so small that a CPU takes longer to begin it, and its gradients, than to compute
        it. Without gradients to join them takes longer.
        """
        if not self.times[0].joined:
            return itertools.repeat(embedding)
        if not torch.is_grad_enabled():
            return (F.linear(embedding, layer.weight, layer.bias) for layer in self.times)
        weight, bias = (torch.cat([getattr(layer, name) for layer in self.times]) for name in ("weight", "bias"))
        joined = F.linear(embedding, weight, bias)
        return iter(torch.split(joined, [layer.out_features for layer in self.times], dim=1))

    def _sinusoids(self, t: Tensor) -> Tensor:
        """The sinusoidal embedding of t (N,) -> (N, width): sines, then cosines (Vaswani et al. 2017, section 3.5)."""
        weight, half = cast(Tensor, self.time[0].weight), self.config.width // 2
        # In half precision neighbouring timesteps would be one number, so at least single precision.
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        frequencies = torch.exp(torch.arange(half, dtype=dtype, device=t.device) * (-math.log(10_000) / (half - 1)))
        angles = t.to(dtype)[:, None] * frequencies
        return torch.cat((angles.sin(), angles.cos()), dim=1).to(weight.dtype)


_Parts = tuple[nn.Module, list[nn.Module], list[nn.Module], list[nn.Module], nn.Module]


def _build_seed(c: UNetConfig) -> _Parts:
    """Stem, encoder, middle, decoder and head of the seed family."""
    widths = [c.width * m for m in c.multipliers]
    levels = list(enumerate(zip([c.width, *widths[:-1]], widths, strict=True)))  # (level, (its width, width below))
    pixel, last, bottom = 3 * c.patch**2, len(widths) - 1, widths[-1]

    def stages(inputs: int, outputs: int) -> list[nn.Module]:
        plain = [Stage(SeedBlock(c, inputs, outputs)) for _ in range(c.blocks - 1)]
        return [*plain, Stage(SeedBlock(c, inputs, outputs), LinearAttention(c, outputs))]

    down: list[nn.Module] = []
    for level, (d, e) in levels:
        taps, stride = (4, 2) if level < last else (3, 1)
        down += [*stages(d, d), convolution(c, d, e, taps, stride=stride, padding=1)]
    middle: list[nn.Module] = [
        Stage(SeedBlock(c, bottom, bottom), CosineAttention(c, bottom)),
        Stage(SeedBlock(c, bottom, bottom)),
    ]
    up: list[nn.Module] = []
    for level, (d, e) in reversed(levels):
        up += [*stages(e + d, e), *(_upsampled(c, e, d) if level > 0 else [convolution(c, e, d)])]
    up += [Stage(SeedBlock(c, 2 * c.width, c.width))]
    return nn.Conv2d(pixel, c.width, 7, padding=3), down, middle, up, nn.Conv2d(c.width, pixel, 1)


def _build_ddpm(c: UNetConfig) -> _Parts:
    """Stem, encoder, middle, decoder and head of the ddpm family."""
    widths = [c.width * m for m in c.multipliers]
    pixel, last, bottom = 3 * c.patch**2, len(widths) - 1, widths[-1]

    def stage(inputs: int, level: int) -> Stage:
        attention = DDPMAttention(c, widths[level]) if level in c.attention_levels else None
        return Stage(DDPMBlock(c, inputs, widths[level]), attention)

    down: list[nn.Module] = []
    remembered = [c.width]  # widths of what the encoder remembers, in order
    for level, width in enumerate(widths):
        for _ in range(c.blocks):
            down += [stage(remembered[-1], level)]
            remembered += [width]
        if level < last:  # padded below and on the right only, as "SAME" padding is in the original
            halved = convolution(c, width, width, stride=2, padding=0)
            down += [nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), halved)]
            remembered += [width]
    middle: list[nn.Module] = [
        Stage(DDPMBlock(c, bottom, bottom), DDPMAttention(c, bottom)),
        Stage(DDPMBlock(c, bottom, bottom)),
    ]
    up: list[nn.Module] = []
    inputs = bottom
    for level, width in reversed(list(enumerate(widths))):
        for _ in range(c.blocks + 1):
            up += [stage(inputs + remembered.pop(), level)]
            inputs = width
        up += _upsampled(c, width, width) if level > 0 else []
    head = nn.Sequential(Norm(c, inputs), nn.Identity(), nn.Conv2d(inputs, pixel, 3, padding=1))
    zero(head[-1])
    return nn.Conv2d(pixel, c.width, 3, padding=1), down, middle, up, head


def _upsampled(c: UNetConfig, inputs: int, outputs: int) -> list[nn.Module]:
    # The first holds the place of a layer of older checkpoints, so that names of weights stay.
    return [nn.Identity(), UpsampledConv2d(c, inputs, outputs)]


def build_network(name: str, *, fused: bool = False, attention_axis: str = "channels") -> UNet:
    """The network called ``name``, freshly initialised from torch's global generator; the others as in UNetConfig."""
    return UNet(replace(NETWORKS[name], fused=fused, middle_attention_axis=attention_axis))


def count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
