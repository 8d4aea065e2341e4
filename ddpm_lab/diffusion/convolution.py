"""Convolutions whose weights get their gradient from a kernel of our own where a CPU multiplies pairs of bfloat16.

The kernel is C++ (``convolution.cpp``). oneDNN's takes 1.1 to 1.4 times as long for the seed network's 3x3 and 1x1
convolutions at batch 32, and 1.3 to 2.7 times for strided and transposed ones; 3.6 times for 3x3 on 4x4 pixels at batch
8 (AMD EPYC of family 26, 2 threads). It also rounds the gradients to bfloat16, which this one does not.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddpm_lab.diffusion.fused import library, takes

TILE = 32
"""Channels in and out have to be multiples of it for the kernel."""


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes all by position
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int, transposed: bool
    ) -> Tensor:
        x = x.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
        rounded = weight.to(torch.bfloat16)
        ctx.save_for_backward(x, rounded)
        ctx.settings = stride, padding, transposed
        usual = F.conv_transpose2d if transposed else F.conv2d
        return usual(x, rounded, None if bias is None else bias.to(torch.bfloat16), stride, padding)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, rounded = ctx.saved_tensors
        stride, padding, transposed = ctx.settings
        grad = gradients[0].to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
        d_x = None
        if ctx.needs_input_grad[0]:
            settings = [stride] * 2, [padding] * 2, [1, 1], transposed, [0, 0], 1, [True, False, False]
            d_x, _, _ = torch.ops.aten.convolution_backward(grad, x, rounded, None, *settings)
        large, small = (grad, x) if transposed else (x, grad)
        d_weight, sums = _weights_gradient(large, small, rounded.shape[-1], stride, padding)
        d_bias = None
        if ctx.needs_input_grad[2]:
            d_bias = grad.sum((0, 2, 3), dtype=torch.float32) if transposed else sums
        return d_x, d_weight, d_bias, None, None, None


def _weights_gradient(large: Tensor, small: Tensor, taps: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
    """The gradient (S, L, taps, taps) of images (N, L, ..), which taps reach into, and (N, S, ..); the latter's sums.

    A convolution's input is large and the gradient of its output small, whatever their sizes; a transposed one's are
    the other way round.
    """
    (n, columns, *large_size), (rows, *small_size) = large.shape, small.shape[1:]
    threads = torch.get_num_threads()
    parts = max(1, min(n, math.ceil(threads / (rows // TILE))))  # work for more threads than there are tiles
    d_weight = large.new_empty((parts, rows, taps, taps, columns), dtype=torch.float32)
    sums = large.new_empty((parts, rows), dtype=torch.float32)
    sizes = n, *large_size, columns, *small_size, rows, taps, stride, padding, parts, threads
    library().weights_gradient(*(t.data_ptr() for t in (large, small, d_weight, sums)), *sizes)
    d_weight, sums = (t[0] if parts == 1 else t.sum(0) for t in (d_weight, sums))
    return d_weight.permute(0, 3, 1, 2), sums


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1, padding: int = 0, transposed: bool = False
) -> Tensor:
    """``F.conv2d``, or ``F.conv_transpose2d``; the weights' gradient is by our kernel where autocast is bfloat16."""
    fits = x.ndim == 4 and weight.shape[0] % TILE == weight.shape[1] % TILE == weight.shape[2] - weight.shape[3] == 0
    fits = fits and takes("weights' gradient")
    if fits and torch.is_grad_enabled() and weight.requires_grad and _in_bfloat16(x):
        return cast(Tensor, _Convolution.apply(x, weight, bias, stride, padding, transposed))
    return (F.conv_transpose2d if transposed else F.conv2d)(x, weight, bias, stride, padding)


class Convolution(nn.Conv2d):
    """``nn.Conv2d`` of square taps, computed by ``convolve``."""

    def __init__(self, inputs: int, outputs: int, taps: int, *, stride: int = 1, padding: int = 0) -> None:
        super().__init__(inputs, outputs, taps, stride=stride, padding=padding)

    def forward(self, x: Tensor) -> Tensor:
        (stride, _), (padding, _) = self.stride, cast("tuple[int, int]", self.padding)
        return convolve(x, self.weight, self.bias, stride=stride, padding=padding)


def _in_bfloat16(x: Tensor) -> bool:
    """Whether x is computed with in bfloat16 on a CPU that the kernel is for."""
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    half = x.dtype != torch.float64 and autocast
    return x.device.type == "cpu" and half and bool(library().multiplies_pairs())
