"""The blocks that the U-Nets are built from: residual convolutions and attention, each (N, C, H, W) -> (N, C', H, W).

Both memory formats run without conversion: convolutions and norms keep the format of their input (those of our own are
channels-last always), and attention works on tokens (N, H * W, C), which under channels_last are a view of the image.
With ``fused`` each block is computed as is fastest on a CPU: a norm and what follows it in one kernel (``fused.py``),
an upsampled image without its copies of pixels, few tokens attended by plain products (``attention.py``), the time
embedding's layers of all blocks at once, the gradients of weights in single precision (``convolution.py``). The
mathematics is the same.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpm_lab.diffusion import fused as kernels
from ddpm_lab.diffusion.attention import attend
from ddpm_lab.diffusion.convolution import Convolution, convolve


def _tokens(image: Tensor) -> Tensor:
    """(N, C, H, W) -> (N, H * W, C)."""
    return image.flatten(2).transpose(1, 2)


def _image(tokens: Tensor, like: Tensor) -> Tensor:
    """(N, H * W, C) -> (N, C, H, W)."""
    return tokens.transpose(1, 2).reshape(like.shape)


def _split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(N, L, 3 * heads * d) -> queries, keys and values, each (N, heads, L, d)."""
    # Split into three first: its backward then writes whole rows, several times faster than scattering over heads.
    q, k, v = (part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    return q, k, v


def _join_heads(values: Tensor) -> Tensor:
    """(N, heads, L, d) -> (N, L, heads * d)."""
    return values.transpose(1, 2).flatten(2)


def _pointwise(tokens: Tensor, layer: nn.Linear, like: Tensor) -> Tensor:
    """``layer`` of tokens (N, L, C) of the image ``like`` as a convolution of one pixel.

    That uses a CPU's whole vectors where products may not: on an AMD EPYC of family 26 it is 1.0 to 1.2 times as fast
    forward and backward in bf16, and 1.1 to 2.2 times in fp32, on the seed network's sizes at batch 32.
    """
    if not kernels.takes("1x1 layers"):
        return cast(Tensor, layer(tokens))
    image = tokens.transpose(1, 2).view(len(like), -1, *like.shape[2:])  # channels last
    return _tokens(convolve(image, layer.weight[:, :, None, None], layer.bias))


@cache
def _taps(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Which of the 3x3 taps each of the 4x4 sums (9, 16). No buffer: ranks would exchange it in every step."""
    with torch.inference_mode(mode=False):
        row = torch.tensor([[0.0, 0, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]], dtype=dtype, device=device)
        return torch.einsum("ak,bl->klab", row, row).reshape(9, 16)


class UpsampledConv2d(nn.Conv2d):
    """Nearest-neighbour upsampling by 2 and then this 3x3 convolution, (N, C, H, W) -> (N, C', 2 H, 2 W), joined.

    Each row of output sees two rows of input, one of them twice. So the same sums are a transposed convolution of 4x4
    taps with stride 2, each the sum of taps that meet the same pixel: 16 products a pixel of input in place of 36.
    """

    held: Tensor | None

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)
        self.register_buffer("held", None, persistent=False)

    def kernel(self) -> Tensor:
        """The 4x4 taps (C, C', 4, 4): sums of weights, before these are rounded."""
        outputs, inputs = self.weight.shape[:2]
        device = self.weight.device.type
        # There is no autocast where work is only counted.
        with torch.autocast(device if device != "meta" else "cpu", enabled=False):
            sums = self.weight.reshape(-1, 9) @ _taps(self.weight.dtype, self.weight.device)
        return sums.view(outputs, inputs, 4, 4).transpose(0, 1)

    def hold(self) -> None:
        """Take the taps as they are now from here on: the weights will not change, or be rounded."""
        self.held = self.kernel().detach()

    def forward(self, x: Tensor) -> Tensor:
        kernel = self.kernel() if self.held is None else self.held
        return convolve(x, kernel, self.bias, stride=2, padding=1, transposed=True)


def upsampled(inputs: int, outputs: int, *, fused: bool) -> list[nn.Module]:
    """Upsampling by 2 and a 3x3 convolution; two modules with the same parameters whether they are joined or not."""
    if fused and kernels.takes("upsampling"):
        return [nn.Identity(), UpsampledConv2d(inputs, outputs)]
    return [nn.Upsample(scale_factor=2), nn.Conv2d(inputs, outputs, 3, padding=1)]


def convolution(
    inputs: int, outputs: int, taps: int = 3, *, stride: int = 1, padding: int | None = None, fused: bool
) -> nn.Conv2d:
    """A convolution of square taps; without ``padding`` as much as keeps the size at stride 1 with odd taps."""
    kind = Convolution if fused else nn.Conv2d
    return kind(inputs, outputs, taps, stride=stride, padding=taps // 2 if padding is None else padding)


def _layer_norm(tokens: Tensor, norm: nn.LayerNorm) -> Tensor:
    """LayerNorm, in single precision on a CPU, as autocast does by itself on a GPU.

    In bfloat16 torch's CPU kernel also sums the gradients of gain and bias in bfloat16: over 4,096 positions they were
    off by 9 to 80 %, where everything else was off by half a percent.
    """
    if tokens.dtype == torch.bfloat16 and tokens.device.type == "cpu":
        return cast(Tensor, norm(tokens.float())).to(tokens.dtype)
    return cast(Tensor, norm(tokens))


def _products(fused: bool) -> bool:
    return fused and kernels.takes("attention products")


def zero(layer: nn.Module) -> None:
    """Start ``layer`` at zero, as Ho et al. do with the last layer of each residual branch and of the network."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)


class SeedBlock(nn.Module):
    """Two times convolution, GroupNorm, SiLU; the time embedding scales and shifts the first half; a shortcut.

    With ``fused`` what it is given is not the embedding, but what ``time`` makes of it.
    """

    def __init__(self, inputs: int, outputs: int, time_width: int, groups: int, *, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.time = nn.Linear(time_width, 2 * outputs)
        self.conv1 = convolution(inputs, outputs, fused=fused)
        self.norm1 = nn.GroupNorm(groups, outputs)
        self.conv2 = convolution(outputs, outputs, fused=fused)
        self.norm2 = nn.GroupNorm(groups, outputs)
        self.shortcut = convolution(inputs, outputs, 1, fused=fused) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        if self.fused:
            h = kernels.group_norm(self.conv1(x), self.norm1, scale_shift=embedding)
            return kernels.group_norm(self.conv2(h), self.norm2, residual=self.shortcut(x))
        scale, shift = self.time(embedding)[:, :, None, None].chunk(2, dim=1)
        h = self.norm1(self.conv1(x))
        h = self.conv2(F.silu(h * (scale + 1) + shift))
        return cast(Tensor, F.silu(self.norm2(h)) + self.shortcut(x))


class LinearAttention(nn.Module):
    """Residual linear attention (Shen et al. 2021, "Efficient Attention"), normalised before and after."""

    def __init__(self, width: int, heads: int, head_width: int, *, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.heads, inner = heads, heads * head_width
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, width)
        self.out_norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = _tokens(x)
        if self.fused:
            qkv = _pointwise(kernels.layer_norm(tokens, self.norm), self.qkv, x)
            out = _pointwise(kernels.linear_attention(qkv, self.heads), self.out, x)
            return _image(kernels.layer_norm(out, self.out_norm, residual=tokens), x)
        q, k, v = _split_heads(self.qkv(_layer_norm(tokens, self.norm)), self.heads)
        q = q.softmax(-1) * q.shape[-1] ** -0.5
        context = k.softmax(-2).transpose(-1, -2) @ v
        return x + _image(_layer_norm(self.out(_join_heads(q @ context)), self.out_norm), x)


class CosineAttention(nn.Module):
    """Residual full attention whose logits are 16 times the cosine similarity of queries and keys.

    ``axis`` is what the vectors are normalised over: their 'channels', which is cosine similarity, or the 'positions'.
    """

    def __init__(self, width: int, heads: int, head_width: int, axis: str, *, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.heads, inner = heads, heads * head_width
        self.axis = -1 if axis == "channels" else -2
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = _split_heads(self.qkv(_layer_norm(_tokens(x), self.norm)), self.heads)
        q, k = F.normalize(q, dim=self.axis), F.normalize(k, dim=self.axis)
        return x + _image(self.out(_join_heads(attend(q, k, v, scale=16.0, products=_products(self.fused)))), x)


class NormSiLU(nn.GroupNorm):
    """GroupNorm and SiLU, joined."""

    def forward(self, x: Tensor) -> Tensor:
        return kernels.group_norm(x, self)


def norm_silu(groups: int, width: int, *, fused: bool) -> list[nn.Module]:
    """GroupNorm and SiLU of the ddpm family; two modules with the same parameters whether they are joined or not."""
    if fused:
        return [NormSiLU(groups, width, eps=1e-6), nn.Identity()]
    return [nn.GroupNorm(groups, width, eps=1e-6), nn.SiLU()]


class DDPMBlock(nn.Module):
    """Two times GroupNorm, SiLU, convolution; the time embedding is added in between; a shortcut.

    With ``fused`` what it is given is not the embedding, but what ``time`` makes of it.
    """

    def __init__(self, inputs: int, outputs: int, time_width: int, groups: int, *, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.norm1 = nn.GroupNorm(groups, inputs, eps=1e-6)
        self.conv1 = convolution(inputs, outputs, fused=fused)
        self.time = nn.Linear(time_width, outputs)
        self.norm2 = nn.GroupNorm(groups, outputs, eps=1e-6)
        self.conv2 = convolution(outputs, outputs, fused=fused)
        self.shortcut = convolution(inputs, outputs, 1, fused=fused) if inputs != outputs else nn.Identity()
        zero(self.conv2)

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        if self.fused:
            h = self.conv1(kernels.group_norm(x, self.norm1))
            h = kernels.group_norm(h, self.norm2, before=embedding)
        else:
            h = self.conv1(F.silu(self.norm1(x))) + self.time(embedding)[:, :, None, None]
            h = F.silu(self.norm2(h))
        return cast(Tensor, self.conv2(h) + self.shortcut(x))


class DDPMAttention(nn.Module):
    """Residual full attention with one head as wide as the image has channels."""

    def __init__(self, width: int, groups: int, *, fused: bool = False) -> None:
        super().__init__()
        self.fused = fused
        self.norm = nn.GroupNorm(groups, width, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        zero(self.out)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            qkv = _pointwise(_tokens(kernels.group_norm(x, self.norm, silu=False)), self.qkv, x)
        else:
            qkv = self.qkv(_tokens(self.norm(x)))
        q, k, v = _split_heads(qkv, heads=1)
        values = _join_heads(attend(q, k, v, scale=q.shape[-1] ** -0.5, products=_products(self.fused)))
        return x + _image(_pointwise(values, self.out, x) if self.fused else self.out(values), x)


class JoinedLinear:
    """Linear layers of one input as one. Each is so small that a CPU takes longer to begin it than to compute it."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.layers = layers
        self.held: tuple[Tensor, Tensor] | None = None

    def joined(self) -> tuple[Tensor, Tensor]:
        """Weights (sum of C', C) and biases (sum of C',) of all layers, in their order."""
        weight, bias = (torch.cat([getattr(layer, name) for layer in self.layers]) for name in ("weight", "bias"))
        return weight, bias

    def hold(self) -> None:
        """Take the weights as they are now from here on."""
        self.held = self.joined()

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """The output (N, C') of each layer."""
        if not kernels.takes("time layers"):
            return tuple(layer(x) for layer in self.layers)
        joined = F.linear(x, *(self.held or self.joined()))
        return torch.split(joined, [layer.out_features for layer in self.layers], dim=1)


class Stage(nn.Module):
    """A residual block, then attention where there is one."""

    def __init__(self, block: SeedBlock | DDPMBlock, attention: nn.Module | None = None) -> None:
        super().__init__()
        self.block, self.attention = block, attention

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        x = self.block(x, embedding)
        return x if self.attention is None else cast(Tensor, self.attention(x))
