"""3x3 convolutions whose weights get their gradient from a kernel of our own where a CPU multiplies pairs of bfloat16.

The kernel is C++ (``convolution.cpp``). oneDNN's takes 1.02 to 1.4 times as long on the sizes of the seed network at
batch 32, and 1.6 to 3 times on images of 8x8 and 4x4 at batch 8 (AMD EPYC of family 26, one thread); it also rounds the
gradients to bfloat16, which this one does not.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddpm_lab.model.fused import library

COLUMNS, TILE = 64, 32
"""The kernel takes multiples of so many input and output channels."""


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x = x.to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
        rounded = weight.to(torch.bfloat16)
        ctx.save_for_backward(x, rounded)
        return F.conv2d(x, rounded, bias.to(torch.bfloat16), padding=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, rounded = ctx.saved_tensors
        grad = gradients[0].to(torch.bfloat16).contiguous(memory_format=torch.channels_last)
        d_x = None
        if ctx.needs_input_grad[0]:
            ones = [1, 1]
            d_x, _, _ = torch.ops.aten.convolution_backward(
                grad, x, rounded, None, ones, ones, ones, False, [0, 0], 1, [True, False, False]
            )
        n, inputs, height, width = x.shape
        outputs, threads = grad.shape[1], torch.get_num_threads()
        parts = min(n, math.ceil(threads / (outputs // TILE)))  # work for more threads than there are tiles
        d_weight = x.new_empty((parts, outputs, 3, 3, inputs), dtype=torch.float32)
        d_bias = x.new_empty((parts, outputs), dtype=torch.float32)
        library().convolution_backward(
            *(t.data_ptr() for t in (x, grad, d_weight, d_bias)), n, height, width, inputs, outputs, parts, threads
        )
        whole = d_weight[0] if parts == 1 else d_weight.sum(0)
        return d_x, whole.permute(0, 3, 1, 2), d_bias[0] if parts == 1 else d_bias.sum(0)


class Convolution3x3(nn.Conv2d):
    """``nn.Conv2d(inputs, outputs, 3, padding=1)``, trained in bfloat16 by the kernel above where that can be."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.in_channels % COLUMNS == self.out_channels % TILE == 0
        if sizes and torch.is_grad_enabled() and self.weight.requires_grad and _in_bfloat16(x):
            return cast(Tensor, _Convolution.apply(x, self.weight, self.bias))
        return super().forward(x)


def _in_bfloat16(x: Tensor) -> bool:
    """Whether x is computed with in bfloat16 on a CPU that the kernel is for."""
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    half = x.dtype != torch.float64 and autocast
    return x.device.type == "cpu" and half and bool(library().multiplies_pairs())
