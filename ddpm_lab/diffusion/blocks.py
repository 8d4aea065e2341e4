"""What the U-Nets are built from, but for attention; each module maps images (N, C, H, W) to (N, C', H, W).

Both memory formats run without conversion: convolutions and norms keep the format of their input, and the kernels of
the lab are channels-last always. With ``fused`` each block is computed as is fastest (``kernels.py``): a norm and what
follows it in one kernel, an upsampled image without its copies of pixels, gradients of weights in single precision. The
mathematics is the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpm_lab.diffusion import kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetConfig:
    """The shape of a network. Level ``i`` works with ``width * multipliers[i]`` channels.

    ``blocks`` are the residual blocks of a level on the way down. ``patch`` folds squares of pixels into channels
    before the stem and unfolds them after the head, so that all work is done on ``patch ** 2`` times fewer positions.
    ``attention_levels`` belongs to the ddpm family; the seed family has attention at every level, with ``heads`` heads
    of ``head_width`` channels. ``middle_attention_axis`` says over what the seed family's middle attention normalises
    queries and keys: each vector over its "channels", which is cosine similarity, or each channel over all "positions",
    the slip of the published code, kept for exact comparison.
    """

    family: str  # seed, ddpm
    width: int
    multipliers: tuple[int, ...]
    groups: int
    blocks: int = 2
    patch: int = 1
    heads: int = 4
    head_width: int = 32
    attention_levels: tuple[int, ...] = ()
    middle_attention_axis: str = "channels"
    fused: bool = False

    @property
    def time_width(self) -> int:
        """Width of the time embedding."""
        return 4 * self.width

    @property
    def epsilon(self) -> float:
        """What group norms add to the variance."""
        return 1e-5 if self.family == "seed" else 1e-6

    @property
    def image_size_multiple(self) -> int:
        """Images must have sides divisible by this, since every level but the last halves them; at least 4."""
        return max(4, self.patch << (len(self.multipliers) - 1))


def zero(layer: nn.Module) -> None:
    """Start ``layer`` at zero, as Ho et al. do with the last layer of each residual branch and of the network."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)


def convolution(
    c: UNetConfig, inputs: int, outputs: int, taps: int = 3, *, stride: int = 1, padding: int | None = None
) -> nn.Conv2d:
    """A convolution of square taps; without ``padding`` as much as keeps the size at stride 1 with odd taps."""
    kind = kernels.Convolution if c.fused else nn.Conv2d
    return kind(inputs, outputs, taps, stride=stride, padding=taps // 2 if padding is None else padding)


@cache
def _taps(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Which of the 3x3 taps each of the 4x4 sums (9, 16). No buffer: ranks would exchange it in every step."""
    with torch.inference_mode(mode=False):
        row = torch.tensor([[0.0, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]], dtype=dtype, device=device)
        return torch.einsum("ak,bl->klab", row, row).reshape(9, 16)


class UpsampledConv2d(nn.Conv2d):
    """Nearest-neighbour upsampling by 2 and then this 3x3 convolution, (N, C, H, W) -> (N, C', 2 H, 2 W).

    Each row of output sees two rows of input, one of them twice. So the same sums are a transposed convolution of 4x4
    taps with stride 2, each the sum of taps that meet the same pixel: 16 products a pixel of input in place of 36.
    Where ``joined`` that is what is computed.
    """

    held: Tensor | None = None

    def __init__(self, c: UNetConfig, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)
        self.joined = c.fused and kernels.takes("upsampling")

    def kernel(self) -> Tensor:
        """The 4x4 taps (C, C', 4, 4), sums of the weights before these are rounded."""
        outputs, inputs = self.weight.shape[:2]
        device = self.weight.device.type
        # There is no autocast where work is only counted.
        with torch.autocast(device if device != "meta" else "cpu", enabled=False):
            sums = self.weight.reshape(-1, 9) @ _taps(self.weight.dtype, self.weight.device)
        return sums.view(outputs, inputs, 4, 4).transpose(0, 1)

    def hold(self, dtype: torch.dtype) -> None:
        """Take the taps as they are now, rounded to ``dtype``, from here on: the weights will not change."""
        self.held = self.kernel().detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        if not self.joined:
            return super().forward(F.interpolate(x, scale_factor=2.0))
        kernel = self.kernel() if self.held is None else self.held
        return kernels.convolve(x, kernel, self.bias, stride=2, padding=1, transposed=True)


class Norm(nn.GroupNorm):
    """f(norm(x + before) (1 + scale) + shift) + residual, f SiLU or nothing: before (N, C), scale_shift (N, 2 C)."""

    def __init__(self, c: UNetConfig, width: int) -> None:
        super().__init__(c.groups, width, eps=c.epsilon)
        self.fused = c.fused

    def forward(
        self,
        x: Tensor,
        *,
        before: Tensor | None = None,
        scale_shift: Tensor | None = None,
        residual: Tensor | None = None,
        silu: bool = True,
    ) -> Tensor:
        if self.fused:
            return kernels.group_norm(x, self, before=before, scale_shift=scale_shift, residual=residual, silu=silu)
        y = super().forward(x if before is None else x + before[:, :, None, None])
        if scale_shift is not None:
            scale, shift = scale_shift[:, :, None, None].chunk(2, dim=1)
            y = y * (scale + 1) + shift
        y = F.silu(y) if silu else y
        return y if residual is None else y + residual


class TimeLinear(nn.Linear):
    """A block's layer of the time embedding; where the network has ``joined`` them, it is given its output already."""

    def __init__(self, c: UNetConfig, outputs: int) -> None:
        super().__init__(c.time_width, outputs)
        self.joined = c.fused and kernels.takes("time layers")

    def forward(self, x: Tensor) -> Tensor:
        return x if self.joined else super().forward(x)


class SeedBlock(nn.Module):
    """Two times convolution, GroupNorm, SiLU; the time embedding scales and shifts the first half; a shortcut."""

    def __init__(self, c: UNetConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.time = TimeLinear(c, 2 * outputs)
        self.conv1 = convolution(c, inputs, outputs)
        self.norm1 = Norm(c, outputs)
        self.conv2 = convolution(c, outputs, outputs)
        self.norm2 = Norm(c, outputs)
        self.shortcut = convolution(c, inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.norm1(self.conv1(x), scale_shift=self.time(embedding))
        return cast(Tensor, self.norm2(self.conv2(h), residual=self.shortcut(x)))


class DDPMBlock(nn.Module):
    """Two times GroupNorm, SiLU, convolution; the time embedding is added in between; a shortcut."""

    def __init__(self, c: UNetConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm1 = Norm(c, inputs)
        self.conv1 = convolution(c, inputs, outputs)
        self.time = TimeLinear(c, outputs)
        self.norm2 = Norm(c, outputs)
        self.conv2 = convolution(c, outputs, outputs)
        self.shortcut = convolution(c, inputs, outputs, 1) if inputs != outputs else nn.Identity()
        zero(self.conv2)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        h = self.norm2(self.conv1(self.norm1(x)), before=self.time(embedding))
        return cast(Tensor, self.conv2(h) + self.shortcut(x))


class Stage(nn.Module):
    """A residual block, then attention where there is one."""

    def __init__(self, block: SeedBlock | DDPMBlock, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.attention = block, attention

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        x = self.block(x, embedding)
        return x if self.attention is None else cast(Tensor, self.attention(x))
