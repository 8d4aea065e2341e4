"""A network made ready for sampling: the same predictions in every form, and nothing of it reaches the original."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from random_networks import randomise
from torch import Tensor

from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion import fused
from ddpm_lab.diffusion.inference import Inference
from ddpm_lab.diffusion.reference import reference
from ddpm_lab.diffusion.unet import NETWORKS, UNet

SMALL = dataclasses.replace(NETWORKS["seed"], width=16, heads=2, head_width=16)
SIZES = [(2, 32, 32), (3, 12, 20), (1, 4, 8)]


def network(**settings: Any) -> UNet:
    """A network in which every parameter takes part."""
    torch.manual_seed(0)
    made = UNet(dataclasses.replace(SMALL, **settings))
    randomise(made)
    return made


def inputs(count: int, height: int, width: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 3, height, width), torch.randint(0, 1000, (count,))


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kernels", ["aten", "fused"])
@pytest.mark.parametrize("channels_last", [True, False])
def test_predictions_are_the_networks(size: tuple[int, int, int], kernels: str, channels_last: bool) -> None:
    """Also those of the kernels, which do not know of inference mode."""
    x, t = inputs(*size)
    before = fused.uses()
    ready = Inference(network(fused=kernels == "fused"), RunConfig(network="seed", channels_last=channels_last), "cpu")
    prediction = ready(x, t)
    assert (fused.uses() > before) == (kernels == "fused")
    assert error(prediction, reference(network())(x, t).detach()) < 1e-5
    assert prediction.is_inference()
    assert ready.precision.seen() == "fp32"
    if channels_last:
        assert prediction.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("kernels", ["aten", "fused"])
def test_weights_rounded_once_predict_what_autocast_predicts(kernels: str) -> None:
    x, t = inputs(2, 16, 24)
    original = network(fused=kernels == "fused").to(memory_format=torch.channels_last)
    ready = Inference(original, RunConfig(network="seed", precision="bf16"), "cpu")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = original(x.contiguous(memory_format=torch.channels_last), t)
    assert torch.equal(ready(x, t), expected)
    assert ready.precision.seen() == "bf16"
    assert {p.dtype for p in ready.network.parameters()} == {torch.bfloat16, torch.float32}, "norms stay as they are"


def test_the_original_is_not_touched_and_may_go_on_training() -> None:
    original = network()
    weights = [p.detach().clone() for p in original.parameters()]
    x, t = inputs(2, 8, 8)
    ready = Inference(original, RunConfig(network="seed", precision="bf16"), "cpu")
    first = ready(x, t)
    for parameter, weight in zip(original.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight)
        assert parameter.requires_grad
    original(x, t).square().mean().backward()
    torch.optim.SGD(original.parameters(), lr=0.1).step()
    assert torch.equal(ready(x, t), first)


@pytest.mark.slow
@pytest.mark.parametrize(("compile_", "precision"), [("regional", "bf16"), ("whole", "fp32")])
def test_compiled_in_whole_or_block_by_block(compile_: str, precision: str) -> None:
    """Also when the first images come in another memory format than the others, as a sampler's do."""
    x, t = inputs(3, 12, 20)
    config = RunConfig(network="seed", precision=precision)
    eager = Inference(network(multipliers=(1,)), config, "cpu")(x, t)
    compiled = Inference(network(multipliers=(1,)), dataclasses.replace(config, compile=compile_), "cpu")
    for images in (x, x.contiguous(memory_format=torch.channels_last)):
        assert error(compiled(images, t), eager) < (1e-5 if precision == "fp32" else 2e-2)
    assert compiled.precision.seen() == precision
