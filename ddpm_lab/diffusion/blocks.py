"""What the U-Nets are built from; each module maps images (N, C, H, W) to (N, C', H, W).

Both memory formats run without conversion: convolutions and norms keep the format of their input, and the kernels of
the lab are channels-last always. With ``fused`` each block is computed as is fastest (``kernels.py``): a norm and what
follows it in one kernel, an upsampled image without its copies of pixels, gradients of weights in single precision. The
mathematics is the same.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddpm_lab.diffusion import kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetConfig:
    """The shape of a network. Level ``i`` works with ``width * multipliers[i]`` channels.

    ``blocks`` are the residual blocks of a level on the way down. ``patch`` folds squares of pixels into channels
    before the stem and unfolds them after the head, so that all work is done on ``patch ** 2`` times fewer positions.
    ``attention_levels`` belongs to the ddpm family, which attends at level 1, 16x16 when images are 32x32; the seed
    family has attention at every level, with ``heads`` heads of ``head_width`` channels. ``middle_attention_axis`` says
    over what the seed family's middle attention normalises queries and keys: each vector over its "channels", which is
    cosine similarity, or each channel over all "positions", the slip of the published code, kept for exact comparison.
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

    def forward(self, x: Tensor) -> Tensor:
        if not self.joined:
            return super().forward(F.interpolate(x, scale_factor=2.0))
        return kernels.convolve(x, self.kernel(), self.bias, stride=2, padding=1, transposed=True)


class Norm(nn.GroupNorm):
    """f(norm(x + before) (1 + scale) + shift) + residual, f SiLU or nothing: before (N, C), scale_shift (N, 2 C)."""

    def __init__(self, c: UNetConfig, width: int) -> None:
        super().__init__(c.groups, width, eps=1e-5 if c.family == "seed" else 1e-6)
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
        super().__init__(4 * c.width, outputs)
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


# Attention, residual, on tokens (N, L, C), L = H * W, which under channels_last are a view of the image. Softmax
# attention is the kernel of torch, or plain products, which a CPU does faster in bfloat16.

PRODUCTS_UP_TO = 256
"""Tokens up to which attention is plain products: the logits of more take more memory than they are worth."""


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """The product a b of bfloat16 as float32, which no operator gives directly on a CPU.

    oneDNN's kernel, allowed to round its factors to bfloat16, which they are already, has five times the speed of the
    one for single precision. The permission is for the whole process: what another thread multiplies in single
    precision meanwhile may be rounded too.
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with torch.autocast(a.device.type, enabled=False):
        before, settings.fp32_precision = settings.fp32_precision, "bf16"
        try:
            return a.float() @ b.float()
        finally:
            settings.fp32_precision = before


class _Products(torch.autograd.Function):
    """softmax(scale q k^T) v of bfloat16: logits, weights and the gradients of both are in single precision."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        weights = _exact_product(q, k.transpose(-1, -2)).mul_(scale).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.scale = scale
        return weights.to(v.dtype) @ v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        q, k, v, weights = ctx.saved_tensors
        d_out = gradients[0].to(v.dtype)
        d_weights = _exact_product(d_out, v.transpose(-1, -2))
        inner = (d_weights * weights).sum(-1, keepdim=True)
        d_logits = d_weights.sub_(inner).mul_(weights).mul_(ctx.scale).to(q.dtype)
        return d_logits @ k, d_logits.transpose(-1, -2) @ q, weights.to(v.dtype).transpose(-1, -2) @ d_out, None


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, products: bool) -> Tensor:
    """softmax(scale q k^T) v of q, k and v (N, heads, L, d), with logits and softmax in single precision.

    Torch's kernel for CPUs is made for long sequences. Forward and backward in bfloat16 it takes 2.1 times as long as
    ``products`` on 256 tokens of one head 256 wide, and 3 to 4 times on 64 tokens of four heads 32 wide (AMD EPYC of
    family 26, one thread); in float32 it is as fast.
    """
    if products and q.dtype == torch.bfloat16 and q.device.type == "cpu" and q.shape[2] <= PRODUCTS_UP_TO:
        return cast(Tensor, _Products.apply(q, k, v, scale))
    return F.scaled_dot_product_attention(q, k, v, scale=scale)


def _products(c: UNetConfig) -> bool:
    return c.fused and kernels.takes("attention products")


def _tokens(image: Tensor) -> Tensor:
    """(N, C, H, W) -> (N, H * W, C)."""
    return image.flatten(2).transpose(1, 2)


def _image(tokens: Tensor, like: Tensor) -> Tensor:
    """(N, H * W, C) -> (N, C, H, W)."""
    return tokens.transpose(1, 2).reshape(like.shape)


class TokenNorm(nn.LayerNorm):
    """LayerNorm of tokens, in single precision on a CPU, as autocast does by itself on a GPU.

    In bfloat16 torch's CPU kernel also sums the gradients of gain and bias in bfloat16: over 4,096 positions they were
    off by 9 to 80 %, where everything else was off by half a percent.
    """

    def __init__(self, c: UNetConfig, width: int) -> None:
        super().__init__(width)
        self.fused = c.fused

    def forward(self, tokens: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.fused:
            return kernels.layer_norm(tokens, self, residual=residual)
        single = tokens.dtype == torch.bfloat16 and tokens.device.type == "cpu"
        y = super().forward(tokens.float()).to(tokens.dtype) if single else super().forward(tokens)
        return y if residual is None else y + residual


class LinearAttention(nn.Module):
    """Residual linear attention (Shen et al. 2021, "Efficient Attention"), normalised before and after."""

    def __init__(self, c: UNetConfig, width: int) -> None:
        super().__init__()
        self.fused, self.heads, inner = c.fused, c.heads, c.heads * c.head_width
        self.norm = TokenNorm(c, width)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, width)
        self.out_norm = TokenNorm(c, width)

    def forward(self, x: Tensor) -> Tensor:
        tokens = _tokens(x)
        qkv = self.qkv(self.norm(tokens))
        if self.fused:
            out = self.out(kernels.linear_attention(qkv, self.heads))
            return _image(self.out_norm(out, tokens), x)
        # Added as an image, so that it lies in the memory format of x.
        return x + _image(self.out_norm(self.out(kernels.linear_attention_by_operators(qkv, self.heads))), x)


class CosineAttention(nn.Module):
    """Residual full attention of logits 16 q k^T, with q and k normalised over the ``middle_attention_axis``."""

    def __init__(self, c: UNetConfig, width: int) -> None:
        super().__init__()
        self.products, self.heads, inner = _products(c), c.heads, c.heads * c.head_width
        self.axis = -1 if c.middle_attention_axis == "channels" else -2
        self.norm = TokenNorm(c, width)
        self.qkv = nn.Linear(width, 3 * inner, bias=False)
        self.out = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = kernels.split_heads(self.qkv(self.norm(_tokens(x))), self.heads)
        q, k = F.normalize(q, dim=self.axis), F.normalize(k, dim=self.axis)
        values = attend(q, k, v, scale=16.0, products=self.products)
        return x + _image(self.out(kernels.join_heads(values)), x)


class DDPMAttention(nn.Module):
    """Residual full attention with one head as wide as the image has channels."""

    def __init__(self, c: UNetConfig, width: int) -> None:
        super().__init__()
        self.products = _products(c)
        self.norm = Norm(c, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        zero(self.out)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = kernels.split_heads(self.qkv(_tokens(self.norm(x, silu=False))), heads=1)
        values = attend(q, k, v, scale=q.shape[-1] ** -0.5, products=self.products)
        return x + _image(self.out(kernels.join_heads(values)), x)
