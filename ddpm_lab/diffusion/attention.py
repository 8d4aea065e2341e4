"""The U-Nets' attention, each module (N, C, H, W) -> (N, C, H, W), residual.

It works on tokens (N, L, C), L = H * W, which under channels_last are a view of the image. Softmax attention is torch's
kernel, or plain products, which a CPU does faster in bfloat16.
"""

from __future__ import annotations

import threading
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddpm_lab.diffusion import kernels
from ddpm_lab.diffusion.blocks import Norm, UNetConfig, zero

PRODUCTS_UP_TO = 256
"""Tokens up to which attention is plain products: the logits of more take more memory than they are worth."""
_FLAG = threading.Lock()


def _exact_product(a: Tensor, b: Tensor) -> Tensor:
    """The product a b of bfloat16 as float32, which no operator gives directly on a CPU.

    oneDNN's kernel, allowed to round its factors to bfloat16, which they are already, has five times the speed of the
    one for single precision. The permission is for the whole process: what another thread multiplies in single
    precision meanwhile may be rounded too.
    """
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _FLAG, torch.autocast(a.device.type, enabled=False):
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
