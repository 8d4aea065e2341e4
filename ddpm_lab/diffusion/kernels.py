"""The lab's own kernels: normalisation joined with what follows it, linear attention, gradients of convolutions.

On a CPU they are C++ (``kernels.cpp``), one pass over memory where torch's take four or five,
compiled once on each machine, in some seconds, into the user's cache. What torch.compile makes of normalisation over
channels-last images there is no faster than eager code, after minutes of compiling.

On a GPU they are torch's operators in the number format of the images. Autocast has norms and softmax in single
precision and casts to and fro: a step of the seed network at batch 128 then moves 30.1 GB, and 14.3 GB this way
(counted over operators, not measured).
"""

import contextlib
import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ddpm_lab.processor import instructions, processor
from ddpm_lab.workload import Unsupported

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-std=c++17", "-Wno-psabi")
HEAD_WIDTH = 32
"""Width of a head that linear attention is compiled for; other widths are computed by operators."""
LANES = 16
"""Channels of a norm have to be a multiple of it for the kernel: the numbers in the widest register of a processor."""
TILE = 32
"""Channels in and out of a convolution have to be multiples of it for the kernel."""
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class State:
    """Of this process: forward passes of the kernels so far, and the one of FUSED_PARTS that is left out, or ""."""

    uses = 0
    without = ""


def takes(part: str) -> bool:
    """Whether a network with fused kernels has them for ``part``; else torch's operators compute it."""
    return part != State.without


def _compiled(x: Tensor, part: str) -> bool:
    """Whether the kernel in C++ is used for a tensor, and not torch's operators; counts the use of either."""
    State.uses += 1
    return x.device.type == "cpu" and takes(part)


@cache
def library() -> dict[str, Callable[..., None]]:
    """The compiled kernels by name, from the cache or made now. Raises Unsupported without a C++ compiler that serves.

    ``weights_gradient`` is only among them where the processor multiplies pairs of bfloat16 (AVX512_BF16).
    """
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise Unsupported(f"kernels 'fused' need a C++ compiler ({compiler}); on Debian or Ubuntu: apt install g++")
    asked = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    # Compiled for the very processor it is run on: a home folder may be shared between different ones.
    known = (platform.machine(), processor(), *sorted(instructions()))
    text = "\n".join([SOURCE.read_text(encoding="utf-8"), asked.stdout, *FLAGS, *known])
    path = _folder() / f"kernels-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if not path.exists():
        _compile([compiler, *FLAGS], path)
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as problem:  # of a folder mounted noexec, or another OpenMP than the one that torch has loaded
        path.unlink(missing_ok=True)
        advice = "use g++ (CXX=g++), and set XDG_CACHE_HOME to a folder that code may be run from"
        raise Unsupported(f"kernels 'fused' compiled by {compiler} cannot be loaded ({problem}): {advice}") from None
    pointer, whole, single, count = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
    arguments: dict[str, list[Any]] = {
        **dict.fromkeys(("group_forward", "group_forward_silu"), [pointer] * 9 + [whole] * 4 + [single, count]),
        **dict.fromkeys(("group_backward", "group_backward_silu"), [pointer] * 12 + [whole] * 4 + [count]),
        "layer_forward": [pointer] * 7 + [whole] * 2 + [single, count],
        "layer_backward": [pointer] * 8 + [whole] * 2 + [count],
        "attention_forward": [pointer] * 6 + [whole] * 3 + [count],
        "attention_backward": [pointer] * 7 + [whole] * 3 + [count],
    }
    taken = {f"{name}_{dtype}": kinds for name, kinds in arguments.items() for dtype in NAMES.values()}
    if hasattr(loaded, "weights_gradient"):
        taken["weights_gradient"] = [pointer] * 4 + [whole] * 11 + [count]
    addresses = {name: ctypes.c_size_t.in_dll(loaded, name).value for name in taken}
    return {name: ctypes.CFUNCTYPE(None, *kinds)(addresses[name]) for name, kinds in taken.items()}


def _folder() -> Path:
    """Where compiled kernels are kept: the user's cache, or, where that cannot be written, a folder of this user's."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # noqa: PTH111 - never raises
    for folder in (cache / "ddpm_lab", Path("/tmp") / f"ddpm_lab-{os.getuid()}"):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
                return folder
    raise Unsupported("kernels 'fused' need a folder for compiled code: set XDG_CACHE_HOME to one that can be written")


def _compile(compiler: list[str], path: Path) -> None:
    """Compile into ``path`` in one step: another rank may be doing the same."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # Linked without OpenMP, so that its names are found in the library torch has loaded: two of them in one process
        # would be two pools of threads.
        linking = [compiler[0], "-shared", "kernels.o", "-o", "kernels.so"]
        for command in ([*compiler, "-c", str(SOURCE), "-o", "kernels.o"], linking):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                why = " ".join(done.stderr.split())[:300]
                raise Unsupported(f"kernels 'fused' did not compile with {compiler[0]}: {why}")
        Path(folder, "kernels.so").replace(path)


def _call(name: str, *given: Tensor | float | None) -> None:
    """Call a kernel with the addresses of tensors, with numbers, and with the number of threads."""
    addresses = (x.data_ptr() if isinstance(x, Tensor) else x for x in given)
    library()[name](*addresses, torch.get_num_threads())


def _flat(image: Tensor, dtype: torch.dtype) -> Tensor:
    """An image (N, C, H, W) in channels-last memory, as ``dtype``; a copy only where it is not yet so."""
    return image.to(dtype).contiguous(memory_format=torch.channels_last)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes all by position
        ctx: Any,
        x: Tensor,
        gain: Tensor,
        bias: Tensor,
        before: Tensor | None,
        scale_shift: Tensor | None,
        residual: Tensor | None,
        groups: int,
        eps: float,
        silu: bool,
    ) -> Tensor:
        x = _flat(x, x.dtype)
        n, c, height, width = x.shape
        more = None if residual is None else _flat(residual, x.dtype)
        added, factors = (None if v is None else v.float().contiguous() for v in (before, scale_shift))
        y = torch.empty_like(x)
        mean, rstd = x.new_empty((2, n, c), dtype=torch.float32)
        sizes = (n, height * width, c, groups)
        tensors = x, gain, bias, added, factors, more, y, mean, rstd
        _call(f"group_forward{'_silu' * silu}_{NAMES[x.dtype]}", *tensors, *sizes, eps)
        ctx.save_for_backward(x, gain, bias, factors, mean, rstd)
        ctx.sizes, ctx.silu = sizes, silu
        ctx.dtypes = [None if v is None else v.dtype for v in (before, scale_shift, residual)]
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, gain, bias, factors, mean, rstd = ctx.saved_tensors
        dy = _flat(gradients[0], x.dtype)
        n, _, c, _ = ctx.sizes
        dx = torch.empty_like(x)
        d_gain, d_bias = x.new_empty((2, n, c), dtype=torch.float32)
        of_before, of_factors, of_residual = ctx.dtypes
        d_before = None if of_before is None else torch.empty_like(d_gain)
        d_factors = None if factors is None else torch.empty_like(factors)
        tensors = dy, x, gain, bias, factors, mean, rstd, dx, d_gain, d_bias, d_before, d_factors
        _call(f"group_backward{'_silu' * ctx.silu}_{NAMES[x.dtype]}", *tensors, *ctx.sizes)
        extras = (d_before, of_before), (d_factors, of_factors), (dy, of_residual)
        of_extras = (None if dtype is None or d is None else d.to(dtype) for d, dtype in extras)
        return dx, d_gain.sum(0), d_bias.sum(0), *of_extras, None, None, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - as above
        ctx: Any, x: Tensor, gain: Tensor, bias: Tensor, residual: Tensor | None, eps: float
    ) -> Tensor:
        x = x.contiguous()
        more = None if residual is None else residual.to(x.dtype).contiguous()
        c = x.shape[-1]
        rows = x.numel() // c
        y = torch.empty_like(x)
        mean, rstd = x.new_empty((2, rows), dtype=torch.float32)
        _call(f"layer_forward_{NAMES[x.dtype]}", x, gain, bias, more, y, mean, rstd, rows, c, eps)
        ctx.save_for_backward(x, gain, mean, rstd)
        ctx.of_residual = None if residual is None else residual.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        x, gain, mean, rstd = ctx.saved_tensors
        dy = gradients[0].to(x.dtype).contiguous()
        c = x.shape[-1]
        dx = torch.empty_like(x)
        d_gain, d_bias = x.new_empty((2, torch.get_num_threads(), c), dtype=torch.float32)
        _call(f"layer_backward_{NAMES[x.dtype]}", dy, x, gain, mean, rstd, dx, d_gain, d_bias, x.numel() // c, c)
        return dx, d_gain.sum(0), d_bias.sum(0), None if ctx.of_residual is None else dy.to(ctx.of_residual), None


class _LinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int) -> Tensor:
        qkv = qkv.contiguous()
        n, length, width = qkv.shape
        d = width // (3 * heads)
        out = qkv.new_empty(n, length, heads * d)
        top, total = qkv.new_empty((2, n, heads, d), dtype=torch.float32)
        contexts = qkv.new_empty((n, heads, d, d), dtype=torch.float32)
        levels = qkv.new_empty((n, heads, length, 2), dtype=torch.float32)
        ctx.sizes = n, length, heads
        _call(f"attention_forward_{NAMES[qkv.dtype]}", qkv, out, top, total, contexts, levels, *ctx.sizes)
        ctx.save_for_backward(qkv, top, total, contexts, levels)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, ...]:
        qkv, top, total, contexts, levels = ctx.saved_tensors
        dout = gradients[0].to(qkv.dtype).contiguous()
        d_qkv = torch.empty_like(qkv)
        tensors = dout, qkv, d_qkv, top, total, contexts, levels
        _call(f"attention_backward_{NAMES[qkv.dtype]}", *tensors, *ctx.sizes)
        return d_qkv, None


def group_norm(
    x: Tensor,
    norm: nn.GroupNorm,
    *,
    before: Tensor | None = None,
    scale_shift: Tensor | None = None,
    residual: Tensor | None = None,
    silu: bool = True,
) -> Tensor:
    """f(norm(x + before) (1 + scale) + shift) + residual of images (N, C, H, W), with f SiLU or nothing.

    ``before`` is (N, C), ``scale_shift`` (N, 2 C). Images are float32 or bfloat16; the result is channels-last, in the
    dtype of ``x``. Raises Unsupported without a C++ compiler.
    """
    if _compiled(x, "group norm") and x.shape[1] % LANES == 0:
        extras = before, scale_shift, residual
        return cast(Tensor, _GroupNorm.apply(x, norm.weight, norm.bias, *extras, norm.num_groups, norm.eps, silu))
    with torch.autocast(x.device.type, enabled=False):
        if before is not None:
            x = x + before[:, :, None, None].to(x.dtype)
        gain, bias = cast(Tensor, norm.weight), cast(Tensor, norm.bias)
        if scale_shift is None:
            y = F.group_norm(x, norm.num_groups, gain.to(x.dtype), bias.to(x.dtype), norm.eps)
        else:  # gain and bias of each image and channel, computed from few numbers
            scale, shift = scale_shift.float().chunk(2, dim=1)
            gain, bias = gain * (scale + 1), bias * (scale + 1) + shift
            y = F.group_norm(x, norm.num_groups, eps=norm.eps)
            y = y * gain[:, :, None, None].to(x.dtype) + bias[:, :, None, None].to(x.dtype)
        y = F.silu(y) if silu else y
        return y if residual is None else y + residual


def layer_norm(x: Tensor, norm: nn.LayerNorm, *, residual: Tensor | None = None) -> Tensor:
    """LayerNorm of x (..., C) over C, plus ``residual``; in the dtype of ``x``, float32 or bfloat16."""
    if _compiled(x, "layer norm") and x.shape[-1] % LANES == 0:
        return cast(Tensor, _LayerNorm.apply(x, norm.weight, norm.bias, residual, norm.eps))
    with torch.autocast(x.device.type, enabled=False):  # in single precision, as TokenNorm says
        y = F.layer_norm(x.float(), norm.normalized_shape, norm.weight, norm.bias, norm.eps).to(x.dtype)
        return y if residual is None else y + residual


def split_heads(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """(N, L, 3 * heads * d) -> queries, keys and values, each (N, heads, L, d)."""
    # Split into three first: its backward then writes whole rows, several times faster than scattering over heads.
    q, k, v = (part.view(*part.shape[:2], heads, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
    return q, k, v


def join_heads(values: Tensor) -> Tensor:
    """(N, heads, L, d) -> (N, L, heads * d)."""
    return values.transpose(1, 2).flatten(2)


def linear_attention_by_operators(qkv: Tensor, heads: int) -> Tensor:
    """As ``linear_attention``, by torch's operators, in the number formats of autocast where that is on."""
    q, k, v = split_heads(qkv, heads)
    context = k.softmax(-2).transpose(-1, -2) @ v * q.shape[-1] ** -0.5
    return join_heads(q.softmax(-1) @ context)


def linear_attention(qkv: Tensor, heads: int) -> Tensor:
    """softmax(q) / sqrt(d) (softmax(k)^T v) of tokens (N, L, 3 heads d): (N, L, heads d); Shen et al. 2021, eq. 4.

    Queries are normalised over their d channels, keys over the L positions.
    """
    if _compiled(qkv, "linear attention") and qkv.shape[-1] == 3 * heads * HEAD_WIDTH:
        return cast(Tensor, _LinearAttention.apply(qkv, heads))
    with torch.autocast(qkv.device.type, enabled=False):
        return linear_attention_by_operators(qkv, heads)


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
    """The gradient (S, L, taps, taps) of images (N, L, ..), which taps reach into, and (N, S, ..), whose sums too."""
    (n, columns, *large_size), (rows, *small_size) = large.shape, small.shape[1:]
    # Work for more threads than there are tiles.
    parts = max(1, min(n, math.ceil(torch.get_num_threads() / (rows // TILE))))
    d_weight = large.new_empty((parts, rows, taps, taps, columns), dtype=torch.float32)
    sums = large.new_empty((parts, rows), dtype=torch.float32)
    sizes = n, *large_size, columns, *small_size, rows, taps, stride, padding, parts
    _call("weights_gradient", large, small, d_weight, sums, *sizes)
    d_weight, sums = (t[0] if parts == 1 else t.sum(0) for t in (d_weight, sums))
    return d_weight.permute(0, 3, 1, 2), sums


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, stride: int = 1, padding: int = 0, transposed: bool = False
) -> Tensor:
    """``F.conv2d``, or ``F.conv_transpose2d``; the weights' gradient is by our kernel where autocast is bfloat16."""
    fits = x.ndim == 4 and weight.shape[0] % TILE == weight.shape[1] % TILE == weight.shape[2] - weight.shape[3] == 0
    fits = fits and takes("weights' gradient") and torch.is_grad_enabled() and weight.requires_grad
    fits = fits and x.device.type == "cpu" and x.dtype != torch.float64
    fits = fits and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.bfloat16
    if fits and "weights_gradient" in library():
        return cast(Tensor, _Convolution.apply(x, weight, bias, stride, padding, transposed))
    return (F.conv_transpose2d if transposed else F.conv2d)(x, weight, bias, stride, padding)


class Convolution(nn.Conv2d):
    """``nn.Conv2d`` of square taps, computed by ``convolve``."""

    def forward(self, x: Tensor) -> Tensor:
        (stride, _), (padding, _) = self.stride, cast("tuple[int, int]", self.padding)
        return convolve(x, self.weight, self.bias, stride=stride, padding=padding)
