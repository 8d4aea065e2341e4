"""The blocks of the networks against plain implementations in double precision."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from random_networks import randomise
from torch import Tensor, nn

from ddpm_lab.diffusion.blocks import CosineAttention, LinearAttention, SeedBlock

# Plain implementations in numpy, written from the mathematics, one image and one head at a time.

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def values(tensor: Tensor) -> Array:
    return tensor.detach().double().numpy()


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return np.asarray(e / e.sum(axis, keepdims=True))


def layer_norm(x: Array, norm: nn.LayerNorm) -> Array:
    """X (C, L), each column normalised."""
    centred = x - x.mean(0)
    gain, bias = values(norm.weight)[:, None], values(norm.bias)[:, None]
    return np.asarray(centred / np.sqrt((centred**2).mean(0) + 1e-5) * gain + bias)


def heads_of(x: Array, module: LinearAttention | CosineAttention) -> list[tuple[Array, Array, Array]]:
    """Queries, keys and values (d, L) of each head for x (C, L); rows of the weight are q, k, v, and heads in each."""
    q, k, v = np.split(values(module.qkv.weight) @ layer_norm(x, module.norm), 3)
    return list(zip(*(np.split(part, module.heads) for part in (q, k, v)), strict=True))


def plain_linear_attention(x: Array, module: LinearAttention) -> Array:
    joined = []
    for q, k, v in heads_of(x, module):
        context = v @ softmax(k, 1).T  # (d of v, d of k)
        joined.append(context @ softmax(q, 0) / math.sqrt(len(q)))
    out = values(module.out.weight) @ np.concatenate(joined) + values(module.out.bias)[:, None]
    return x + layer_norm(out, module.out_norm)


def plain_cosine_attention(x: Array, module: CosineAttention, axis: int) -> Array:
    joined = []
    for q, k, v in heads_of(x, module):
        q1 = q / np.sqrt((q**2).sum(axis, keepdims=True))
        k1 = k / np.sqrt((k**2).sum(axis, keepdims=True))
        joined.append(v @ softmax(16 * q1.T @ k1, 1).T)
    return x + values(module.out.weight) @ np.concatenate(joined) + values(module.out.bias)[:, None]


def agree(actual: Tensor, expected: Array) -> None:
    assert np.abs(values(actual) - expected).max() <= 1e-12 * np.abs(expected).max()


def image_and(module: nn.Module, channels: int) -> Tensor:
    torch.manual_seed(3)
    randomise(module)
    return torch.randn(2, channels, 6, 4, dtype=torch.float64)


def test_linear_attention_against_a_plain_implementation() -> None:
    module = LinearAttention(12, heads=3, head_width=5).double()
    x = image_and(module, 12)
    agree(module(x), np.stack([plain_linear_attention(i.reshape(12, 24), module).reshape(12, 6, 4) for i in values(x)]))


@pytest.mark.parametrize(("axis", "summed"), [("channels", 0), ("positions", 1)])
def test_middle_attention_against_a_plain_implementation(axis: str, summed: int) -> None:
    module = CosineAttention(12, heads=3, head_width=5, axis=axis).double()
    x = image_and(module, 12)
    plain = [plain_cosine_attention(i.reshape(12, 24), module, summed).reshape(12, 6, 4) for i in values(x)]
    agree(module(x), np.stack(plain))


def plain_convolution(x: Array, layer: nn.Conv2d) -> Array:
    weight, pad = values(layer.weight), layer.kernel_size[0] // 2
    padded = np.pad(x, ((0, 0), (pad, pad), (pad, pad)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, layer.kernel_size, (1, 2))
    bias = layer.bias
    assert bias is not None
    return np.asarray(np.einsum("ihwyx,oiyx->ohw", windows, weight) + values(bias)[:, None, None])


def plain_group_norm(x: Array, norm: nn.GroupNorm) -> Array:
    groups = x.reshape(norm.num_groups, -1)
    centred = groups - groups.mean(1, keepdims=True)
    normal = (centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-5)).reshape(x.shape)
    return np.asarray(normal * values(norm.weight)[:, None, None] + values(norm.bias)[:, None, None])


@pytest.mark.parametrize("outputs", [8, 16])
def test_seed_block_against_a_plain_implementation(outputs: int) -> None:
    block = SeedBlock(8, outputs, time_width=6, groups=4).double()
    x, embedding = image_and(block, 8), torch.randn(2, 6, dtype=torch.float64)
    expected = []
    for image, e in zip(values(x), values(embedding), strict=True):
        scale, shift = np.split(values(block.time.weight) @ e + values(block.time.bias), 2)
        h = plain_group_norm(plain_convolution(image, block.conv1), block.norm1)
        h = h * (1 + scale[:, None, None]) + shift[:, None, None]
        h = plain_group_norm(plain_convolution(h / (1 + np.exp(-h)), block.conv2), block.norm2)
        shortcut = plain_convolution(image, block.shortcut) if isinstance(block.shortcut, nn.Conv2d) else image
        expected.append(h / (1 + np.exp(-h)) + shortcut)
    agree(block(x, embedding), np.stack(expected))
