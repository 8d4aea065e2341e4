"""The lab's network and the reference: one function of one set of weights, in every form the lab can run it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_networks import randomise
from torch import Tensor, nn

from ddpm_lab.diffusion.reference import ReferenceUNet, reference
from ddpm_lab.diffusion.unet import NETWORKS, UNet, UNetConfig, count_parameters

SMALL = replace(NETWORKS["seed"], width=16, heads=2, head_width=16)


def lab(seed: int, config: UNetConfig) -> UNet:
    """A network in which every parameter takes part: gains, biases, and layers that start at zero."""
    torch.manual_seed(seed)
    network = UNet(config)
    randomise(network)
    return network.to(memory_format=torch.channels_last)


def inputs(seed: int, count: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, height, width, generator=generator), torch.randint(0, 1000, (count,))


def run(network: nn.Module, x: Tensor, t: Tensor, *, bf16: bool = False) -> tuple[Tensor, Tensor]:
    """The output, and all gradients of its mean square, in the order of the parameters."""
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = network(x, t)
    output.float().square().mean().backward()
    return output.detach().float(), torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("axis", ["channels", "positions"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("seed", "count", "height", "width"), [(0, 2, 32, 32), (1, 3, 12, 20), (2, 1, 4, 8)])
def test_output_and_gradients_are_the_references(  # noqa: PLR0917 - a grid
    axis: str, fused: bool, seed: int, count: int, height: int, width: int
) -> None:
    """Also with the slip of the published code, normalisation over positions, and with images that are no squares."""
    network = lab(seed, replace(SMALL, middle_attention_axis=axis, fused=fused))  # type: ignore[arg-type]
    other = reference(network)
    assert count_parameters(other) == count_parameters(network)
    x, t = inputs(seed, count, height, width)
    for actual, expected in zip(run(network, x, t), run(other, x, t), strict=True):
        assert error(actual, expected) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
def test_the_published_size_too(fused: bool) -> None:
    network = lab(3, replace(NETWORKS["seed"], middle_attention_axis="positions", fused=fused))
    x, t = inputs(3, 2, 32, 32)
    for actual, expected in zip(run(network, x, t), run(reference(network), x, t), strict=True):
        assert error(actual, expected) < 1e-5


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("fused", [False, True])
def test_in_bf16_it_is_as_near_as_autocast_brings_the_reference(seed: int, fused: bool) -> None:
    network = lab(seed, replace(SMALL, fused=fused))
    other = reference(network)
    x, t = inputs(seed, 4, 32, 32)
    exact = run(other, x, t)
    for actual, rounded, expected in zip(
        run(network, x, t, bf16=True), run(other, x, t, bf16=True), exact, strict=True
    ):
        assert 1e-4 < error(actual, expected) < 1.5 * error(rounded, expected)


@pytest.mark.parametrize(
    "config", [NETWORKS["ddpm"], NETWORKS["tiny"], replace(SMALL, blocks=3), replace(SMALL, patch=2)]
)
def test_what_has_no_reference_is_refused(config: UNetConfig) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match="has no reference"):
        ReferenceUNet(config)
