"""The convolution with a weights' gradient of its own against double precision, at awkward sizes."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpm_lab.diffusion import convolution
from ddpm_lab.diffusion.blocks import SeedBlock
from ddpm_lab.diffusion.convolution import TILE, Convolution, convolve
from ddpm_lab.diffusion.fused import library
from ddpm_lab.diffusion.unet import NETWORKS, UNet


@pytest.fixture
def pairs() -> None:
    if not library().multiplies_pairs():
        pytest.skip("this processor has no AVX512_BF16, which the kernel is for")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def error(made: Tensor, exact: Tensor) -> float:
    """Relative L2 error."""
    return float((made.detach().double() - exact.detach()).norm() / exact.detach().norm().clamp(min=1e-30))


def trained(layer: nn.Conv2d, x: Tensor, weights: Tensor, *, autocast: bool = True) -> list[Tensor]:
    """Output and gradients of input, weight and bias."""
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = layer(x)
    assert layer.bias is not None
    return [y, *torch.autograd.grad(y, [x, layer.weight, layer.bias], weights.to(y.dtype).expand_as(y))]


SAME, HALVED, DOUBLED = (3, 1, 1, False), (4, 2, 1, False), (4, 2, 1, True)
"""Taps, stride, padding, and whether transposed."""


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(
    ("kind", "images", "inputs", "outputs", "height", "width", "threads"),
    [
        (SAME, 3, 64, 32, 5, 7, 1),
        (SAME, 2, 128, 96, 4, 4, 2),
        (SAME, 1, 64, 64, 1, 1, 1),
        (SAME, 5, 192, 32, 8, 8, 3),  # fewer tiles than threads: images are taken apart
        (SAME, 2, 64, 160, 3, 90, 4),  # more tiles, not evenly shared
        (SAME, 1, 128, 32, 70, 33, 1),  # some rows of an image at a time
        (SAME, 40, 64, 32, 4, 6, 1),  # some images at a time
        (SAME, 5, 32, 64, 4, 5, 3),  # tiles and images both taken apart
        (SAME, 1, 512, 32, 3, 90, 1),  # one row at a time
        (SAME, 0, 32, 32, 4, 4, 2),
        (HALVED, 3, 32, 64, 8, 6, 2),
        (HALVED, 2, 64, 32, 9, 7, 1),  # rows and columns that no tap reaches
        (HALVED, 1, 128, 32, 140, 66, 2),
        (DOUBLED, 3, 32, 64, 5, 7, 1),
        (DOUBLED, 30, 64, 32, 4, 4, 3),
        (DOUBLED, 1, 64, 128, 70, 50, 2),
        ((3, 2, 0, False), 3, 96, 64, 9, 7, 1),
        ((1, 1, 0, False), 3, 96, 32, 5, 3, 2),
        ((1, 1, 0, False), 1, 64, 384, 80, 65, 5),
        ((7, 1, 3, False), 2, 32, 32, 9, 8, 2),
        ((5, 3, 2, False), 2, 32, 32, 9, 8, 2),
        ((7, 2, 3, False), 2, 32, 32, 9, 8, 2),
        ((1, 2, 0, False), 2, 32, 32, 9, 8, 2),
    ],
)
def test_output_and_gradients_are_exact_but_for_the_format(  # noqa: PLR0917 - a grid
    kind: tuple[int, int, int, bool],
    images: int,
    inputs: int,
    outputs: int,
    height: int,
    width: int,
    threads: int,
) -> None:
    """What is bfloat16 is rounded once; the gradients of the weights, in single precision, not at all."""
    taps, stride, padding, transposed = kind
    torch.set_num_threads(threads)
    shape = (inputs, outputs) if transposed else (outputs, inputs)
    leaves = torch.randn(images, inputs, height, width), torch.randn(*shape, taps, taps), torch.randn(outputs)
    x, weight, bias = (leaf.bfloat16().float().requires_grad_() for leaf in leaves)  # so that autocast rounds nothing
    with torch.autocast("cpu", torch.bfloat16):
        y = convolve(x, weight, bias, stride=stride, padding=padding, transposed=transposed)
    weights = torch.randn(len(y), 2 * outputs, *y.shape[2:]).bfloat16()[:, outputs:]  # in no order a kernel wants
    whole = [leaf.detach().double().requires_grad_() for leaf in (x, weight, bias)]
    usual: Any = F.conv_transpose2d if transposed else F.conv2d
    double = usual(*whole, stride=stride, padding=padding)
    exact = torch.autograd.grad(double, whole, weights.double())
    d_x, d_weight, d_bias = torch.autograd.grad(y, [x, weight, bias], weights)
    assert y.dtype == torch.bfloat16
    assert error(y, double) < 4e-3
    assert error(d_x, exact[0]) < 4e-3
    assert error(d_weight, exact[1]) < 1e-5
    assert error(d_bias, exact[2]) < 1e-5


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (4, 2), (1, 1)])
def test_gradients_lie_as_the_weights_do(taps: int, stride: int) -> None:
    """Else the optimizer copies them in every step."""
    layer = Convolution(64, 32, taps, stride=stride).to(memory_format=torch.channels_last)
    _, d_x, d_weight, d_bias = trained(layer, torch.randn(2, 64, 8, 8, requires_grad=True), torch.ones(()))
    assert (d_x.dtype, d_weight.dtype, d_bias.dtype) == (torch.float32,) * 3
    if taps > 1:  # else every order is the same one
        assert d_weight.stride() == layer.weight.stride()


@pytest.mark.parametrize(
    "case", ["float32", "float64 within autocast", "float16 autocast", "no autocast", "no gradients", "frozen"]
)
def test_elsewhere_it_is_the_usual_convolution(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtypes = {"float64 within autocast": torch.float64, "no autocast": torch.bfloat16}
    dtype = dtypes.get(case, torch.float32)
    layer, usual = Convolution(TILE, TILE, 3, padding=1).to(dtype), nn.Conv2d(TILE, TILE, 3, padding=1).to(dtype)
    usual.load_state_dict(layer.state_dict())
    x = torch.randn(2, TILE, 6, 6, dtype=dtype)
    monkeypatch.setattr(convolution, "_Convolution", None)
    rounded = torch.float16 if case == "float16 autocast" else torch.bfloat16
    layer.weight.requires_grad_(case != "frozen")
    with (
        torch.set_grad_enabled(case != "no gradients"),
        torch.autocast("cpu", rounded, enabled=case not in {"float32", "no autocast"}),
    ):
        assert torch.equal(layer(x), usual(x))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(TILE // 2, TILE), (TILE, TILE + TILE // 2)])
def test_other_channels_are_convolved_as_usual(
    inputs: int, outputs: int, transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "_Convolution", None)
    weight = torch.randn(*((inputs, outputs) if transposed else (outputs, inputs)), 3, 3, requires_grad=True)
    x, usual = torch.randn(2, inputs, 6, 6), F.conv_transpose2d if transposed else F.conv2d
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(convolve(x, weight, None, transposed=transposed), usual(x, weight))


@pytest.mark.usefixtures("pairs")
@pytest.mark.parametrize(
    ("name", "kinds"),
    [("seed", {(3, 1): 24, (1, 1): 13, (4, 2): 2}), ("ddpm", {(3, 1): 24, (1, 1): 19, (3, 2): 1, (4, 2): 1})],
)
def test_a_network_trains_all_its_convolutions_by_it(
    name: str, kinds: dict[tuple[int, int], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for its first and its last, which have three channels, and with gradients as near as bfloat16 is."""
    narrow = dataclasses.replace(NETWORKS[name], width=32, multipliers=(1, 2), groups=8, heads=2, head_width=16)
    networks = [UNet(dataclasses.replace(narrow, fused=fused)) for fused in (True, False)]
    for layer in networks[0].parameters():
        if not layer.any():  # layers that begin at zero would let no gradient pass
            nn.init.normal_(layer, std=0.05)
    networks[1].load_state_dict(networks[0].state_dict())
    found: Counter[tuple[int, int]] = Counter()
    real = convolution._weights_gradient

    def counted(large: Tensor, small: Tensor, taps: int, stride: int, padding: int) -> tuple[Tensor, Tensor]:
        found[taps, stride] += 1
        return real(large, small, taps, stride, padding)

    monkeypatch.setattr(convolution, "_weights_gradient", counted)
    x, t, weights = torch.randn(2, 3, 16, 16), torch.tensor([3, 700]), torch.randn(2, 3, 16, 16)
    for network, dtype in zip(networks, (torch.float32, torch.float64), strict=True):
        network.to(dtype).to(memory_format=torch.channels_last)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            out = network(x.to(dtype), t)
        out.backward(weights.to(out.dtype))
    assert found == kinds
    for (place, ours), exact in zip(networks[0].named_parameters(), networks[1].parameters(), strict=True):
        assert ours.grad is not None
        assert exact.grad is not None
        assert error(ours.grad, exact.grad) < 0.1, place


@pytest.mark.usefixtures("pairs")
def test_a_block_trains_by_it_and_its_gradients_add_up() -> None:
    """As near to double precision as the same block of torch's kernels, and after two backward passes twice as much."""
    blocks = [SeedBlock(64, 64, 8, groups=4, fused=fused) for fused in (True, False, False)]
    x, embedding, weights = torch.randn(3, 64, 7, 6), torch.randn(3, 8), torch.randn(3, 64, 7, 6)
    for block, dtype in zip(blocks, (torch.float32, torch.float32, torch.float64), strict=True):
        block.load_state_dict(blocks[0].state_dict())
        block.to(dtype).to(memory_format=torch.channels_last)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
                time = embedding.to(dtype)
                out = block(x.to(dtype), block.time(time) if block.fused else time)
            out.backward(weights.to(out.dtype))
    for name in ("conv1", "conv2"):
        ours, torchs, exact = (getattr(block, name).weight.grad for block in blocks)
        assert error(ours, exact) < 1.2 * error(torchs, exact) < 3e-2
        assert not torch.equal(ours, ours.bfloat16().float()), "the kernel did not run"


@pytest.mark.usefixtures("pairs")
def test_what_is_not_a_number_is_not_hidden() -> None:
    layer = Convolution(64, 32, 3, padding=1)
    x = torch.randn(1, 64, 4, 4)
    x[0, 5, 2, 2] = torch.nan
    *_, d_weight, d_bias = trained(layer, x.requires_grad_(), torch.ones(1, 32, 4, 4))
    assert d_weight[:, 5].isnan().all()
    assert d_weight[:, :5].isfinite().all()
    assert d_bias.isfinite().all()
