"""The networks: exact sizes, agreement with independent implementations, and the properties a trainer needs."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_networks import error, inputs, randomise
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ddpm_lab.config import NETWORKS as MULTIPLES
from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion.blocks import UNetConfig
from ddpm_lab.diffusion.network import Inference
from ddpm_lab.diffusion.reference import reference
from ddpm_lab.diffusion.unet import NETWORKS, UNet, build_network, count_parameters
from ddpm_lab.questions.multi_gpu import PARAMETERS

SMALL = {
    "seed": replace(NETWORKS["seed"], width=16, heads=1),
    "patched": NETWORKS["tiny"],
    "ddpm": UNetConfig(family="ddpm", width=16, multipliers=(1, 2, 2), groups=8, attention_levels=(1,)),
}
"""Every path through the code, at sizes that take no time."""
SIZES = [(3, 12, 20), (1, 4, 8)]
"""Images, height, width."""


def made(config: UNetConfig, seed: int = 0) -> UNet:
    """A network in which every parameter takes part: a new one ends in zeros."""
    torch.manual_seed(seed)
    network = UNet(config)
    randomise(network)
    return network


def run(network: nn.Module, x: Tensor, t: Tensor, *, bf16: bool = False) -> tuple[Tensor, Tensor]:
    """The output, and all gradients of its mean square, in the order of the parameters."""
    network.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        output = network(x, t)
    output.float().square().mean().backward()
    return output.detach().float(), torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def flops(name: str) -> int:
    """FLOP per image, forward and backward: twice the multiply-adds."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        build_network(name)(torch.empty(1, 3, 32, 32), torch.zeros(1, dtype=torch.long)).sum().backward()
    return int(counter.get_total_flops())


def test_sizes_and_work() -> None:
    sizes = {"tiny": 44_332, "seed-16": 634_179, "seed-32": 2_520_707}
    sizes |= {"seed": 10_050_819, "ddpm": 35_746_307, "s000": 39_156_227}
    assert sizes == PARAMETERS, "for who has no torch"
    assert NETWORKS.keys() == MULTIPLES.keys()
    for name, parameters in sizes.items():
        with torch.device("meta"):
            network = build_network(name)
        assert count_parameters(network) == parameters
        # DDP warns where a gradient's strides differ from its bucket's, which (1, C, 1, 1) parameters bring about.
        assert {p.ndim for p in network.parameters()} == {1, 2, 4}
        assert all(p.shape[0] > 1 for p in network.parameters() if p.ndim == 4)
    assert round(flops("seed") / 1e9, 2) == 9.13
    # The published 36.3 GFLOP leave out the products inside attention, which are 4 L^2 C forward and twice that back:
    # five blocks over 16x16 positions and one over 4x4, all 256 wide.
    attention = 3 * 4 * 256 * (5 * 256**2 + 16**2)
    assert round((flops("ddpm") - attention) / 1e9, 1) == 36.3


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("axis", ["channels", "positions"])
def test_output_and_gradients_are_the_references(axis: str, fused: bool) -> None:
    """Also with the slip of the published code, normalisation over positions, and with images that are no squares."""
    for seed, size in enumerate(SIZES):
        network = made(replace(SMALL["seed"], middle_attention_axis=axis, fused=fused), seed)
        network = network.to(memory_format=torch.channels_last)
        other = reference(network)
        assert count_parameters(other) == count_parameters(network)
        x, t = inputs(*size)
        for actual, expected in zip(run(network, x, t), run(other, x, t), strict=True):
            assert error(actual, expected) < 1e-5


@pytest.mark.parametrize("fused", [False, True])
def test_in_bf16_it_is_as_near_as_autocast_brings_the_reference(fused: bool) -> None:
    network = made(replace(SMALL["seed"], fused=fused)).to(memory_format=torch.channels_last)
    other = reference(network)
    x, t = inputs(2, 16, 16)
    results = run(network, x, t, bf16=True), run(other, x, t, bf16=True), run(other, x, t)
    for actual, rounded, expected in zip(*results, strict=True):
        assert 1e-4 < error(actual, expected) < 1.5 * error(rounded, expected)


@pytest.mark.parametrize("fused", [False, True])
def test_for_sampling_weights_are_rounded_once_in_a_copy_to_what_autocast_makes_of_them(fused: bool) -> None:
    original = made(replace(SMALL["seed"], fused=fused)).to(memory_format=torch.channels_last)
    weights = [p.detach().clone() for p in original.parameters()]
    x, t = inputs(2, 16, 24)
    ready = Inference(original, RunConfig(network="seed", precision="bf16"), "cpu")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = original(x.contiguous(memory_format=torch.channels_last), t)
    assert torch.equal(ready(x, t), expected)
    assert {p.dtype for p in ready.network.parameters()} == {torch.bfloat16, torch.float32}, "norms stay as they are"
    run(original, x, t)
    assert all(map(torch.equal, original.parameters(), weights))
    torch.optim.SGD(original.parameters(), lr=0.1).step()
    assert torch.equal(ready(x, t), expected), "the original may go on training"


@pytest.mark.parametrize(("name", "size"), [("patched", 16), ("ddpm", 24)])
def test_fused_computes_the_same(name: str, size: int) -> None:
    """Also in the family that has no reference."""
    plain, fast = made(SMALL[name]), UNet(replace(SMALL[name], fused=True))
    assert not list(fast.buffers()), "ranks would exchange buffers in every step"
    fast.load_state_dict(plain.state_dict())
    x, t = torch.randn(2, 3, size, size), torch.rand(2) * 1000
    found = []
    for network in (plain, fast):
        output = network.to(memory_format=torch.channels_last)(x, t)
        (output.square().mean() / output.detach().square().mean()).backward()
        found.append([output.detach(), *(p.grad for p in network.parameters() if p.grad is not None)])
    whole = math.sqrt(sum(float(g.square().sum()) for g in found[0][1:]))
    for expected, actual in zip(*found, strict=True):
        assert float((actual - expected).norm()) < 1e-5 * max(float(expected.norm()), 0.05 * whole)


@pytest.mark.parametrize("name", list(SMALL))
def test_gradients_reach_every_parameter_in_either_memory_format(name: str) -> None:
    network = made(SMALL[name]).double()
    x, t = inputs(2, 20, 20, torch.float64)
    plain = network(x, t)
    assert plain.is_contiguous()
    plain.square().mean().backward()
    for key, parameter in network.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key
    network = network.to(memory_format=torch.channels_last)
    output = network(x.to(memory_format=torch.channels_last), t)
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output, plain, rtol=1e-11, atol=1e-11)


def test_compiles_without_breaks_and_each_image_is_for_itself_and_its_time() -> None:
    network = made(SMALL["patched"]).double()
    x, t = inputs(dtype=torch.float64)
    found = network(x, t)
    torch.testing.assert_close(torch.compile(network, fullgraph=True, backend="eager")(x, t), found)
    assert torch.equal(found, network(x, t.float()))
    assert not torch.allclose(found, network(x, t + 1))
    torch.testing.assert_close(found[1:], network(x[1:], t[1:]), rtol=1e-10, atol=1e-12)


def called(network: nn.Module, x: Tensor, t: Tensor) -> list[Any]:
    """Its layers with weights, in the order in which they compute."""
    layers: list[Any] = []
    for module in network.modules():
        if [*module.parameters(recurse=False)]:
            module.register_forward_pre_hook(lambda layer, _: layers.append(layer))
    network(x, t)
    return layers


@pytest.mark.slow
def test_ddpm_network_against_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.UNet2DModel(
        sample_size=32,
        block_out_channels=(128, 256, 256, 256),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=None,
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
        norm_eps=1e-6,
    ).double()
    torch.manual_seed(0)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.02)
    ours = build_network("ddpm").double()
    x, t = inputs(1, dtype=torch.float64)
    with torch.no_grad():
        others = iter(called(theirs, x, t))
        for layer in called(ours, x, t):
            # Queries, keys and values are three layers of theirs.
            sources = [other := next(others)]
            sources += [next(others) for _ in range(2)] if other.weight.numel() < layer.weight.numel() else []
            for name, parameter in layer.named_parameters():
                parameter.copy_(torch.cat([source.get_parameter(name) for source in sources]).view_as(parameter))
        assert next(others, None) is None
        actual, expected = ours(x, t), theirs(x, t).sample
    # diffusers embeds t in single precision.
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()
