"""The networks: exact sizes, agreement with plain independent implementations, and the properties a trainer needs."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from random_networks import randomise
from torch import Tensor, nn

from ddpm_lab.diffusion.unet import NETWORKS, UNet, UNetConfig, build_network, count_flops, count_parameters

SMALL = {
    "seed": replace(NETWORKS["seed"], width=16, heads=2, head_width=16),
    "patched": NETWORKS["tiny"],
    "ddpm": UNetConfig(family="ddpm", width=16, multipliers=(1, 2, 2), groups=8, attention_levels=(1,)),
}
"""Every path through the code, at sizes that take no time."""


def tiny() -> UNet:
    """The tiny network with random weights: a new one ends in zeros."""
    torch.manual_seed(0)
    network = build_network("tiny")
    randomise(network)
    return network


def inputs(size: int = 32, count: int = 2, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, size, size, generator=generator, dtype=dtype)
    return x, torch.randint(0, 1000, (count,), generator=generator)


@pytest.mark.parametrize(
    ("name", "parameters"), [("seed", 10_050_819), ("ddpm", 35_746_307), ("s000", 39_156_227), ("tiny", 44_332)]
)
def test_parameter_count(name: str, parameters: int) -> None:
    with torch.device("meta"):
        assert count_parameters(build_network(name)) == parameters


def test_flops_of_the_seed_network() -> None:
    forward, both = count_flops("seed")
    assert round(forward / 1e9, 2) == 3.05
    assert round(both / 1e9, 2) == 9.13


def test_flops_of_the_ddpm_network() -> None:
    # The published 36.3 GFLOP leave out the products inside attention, which are 4 L^2 C forward and twice that back:
    # five blocks over 16x16 positions and one over 4x4, all 256 wide.
    _, both = count_flops("ddpm")
    attention = 3 * 4 * 256 * (5 * 256**2 + 16**2)
    assert round((both - attention) / 1e9, 1) == 36.3


def test_work_grows_with_the_pixels() -> None:
    # All but the time embedding and the middle's full attention is proportional to the number of pixels.
    small, large = count_flops("seed", image_size=32)[0], count_flops("seed", image_size=64)[0]
    assert 3.9 < large / small < 4.1


@pytest.mark.parametrize("size", [20, 28, 36])
def test_untrained_output_is_finite_and_shaped_like_the_input(size: int) -> None:
    x, t = inputs(size)
    for name in ("tiny", "seed") if size == 20 else ("tiny",):
        output = build_network(name, image_size=size)(x, t)
        assert output.shape == x.shape
        assert output.isfinite().all()


@pytest.mark.parametrize("name", ["ddpm", "s000"])
@pytest.mark.slow
def test_large_networks_run(name: str) -> None:
    x, t = inputs(24, 1)
    assert build_network(name, image_size=24)(x, t).shape == x.shape


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [("seed", 30, "3 levels.*multiple of 4"), ("ddpm", 36, "4 levels.*multiple of 8"), ("tiny", 0, "image_size is 0")],
)
def test_sizes_that_do_not_fit_are_refused(name: str, size: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        build_network(name, image_size=size)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'huge': choose one of tiny, seed, ddpm, s000"):
        build_network("huge")
    with pytest.raises(ValueError, match="'rows': choose 'channels' or 'positions'"):
        replace(NETWORKS["seed"], middle_attention_axis="rows")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [16, 72])
def test_what_is_fastest_on_a_cpu_computes_the_same(name: str, size: int) -> None:
    """Joined kernels and joined upsampling, in single precision."""
    plain, fast = UNet(SMALL[name]), UNet(replace(SMALL[name], fused=True))
    assert not list(fast.buffers()), "ranks would exchange buffers in every step"
    randomise(plain)
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


def test_the_slip_changes_the_network() -> None:
    x, t = inputs()
    right = UNet(SMALL["seed"])
    slip = UNet(replace(SMALL["seed"], middle_attention_axis="positions"))
    slip.load_state_dict(right.state_dict())
    assert not torch.allclose(right(x, t), slip(x, t), rtol=1e-3)


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

    def copy(target: nn.Module, *sources: nn.Module) -> None:
        for name, parameter in target.named_parameters():
            value = torch.cat([source.get_parameter(name) for source in sources])
            parameter.data.copy_(value.view_as(parameter))

    def copy_stage(stage: nn.Module, resnet: nn.Module, attention: nn.Module | None) -> None:
        pairs = [("norm1", "norm1"), ("conv1", "conv1"), ("time", "time_emb_proj"), ("norm2", "norm2")]
        pairs += [("conv2", "conv2")]
        if resnet.conv_shortcut is not None:
            pairs += [("shortcut", "conv_shortcut")]
        block, a = stage.get_submodule("block"), attention
        for mine, other in pairs:
            copy(block.get_submodule(mine), resnet.get_submodule(other))
        if a is not None:
            copy(stage.get_submodule("attention.norm"), a.get_submodule("group_norm"))
            copy(stage.get_submodule("attention.qkv"), *(a.get_submodule(n) for n in ("to_q", "to_k", "to_v")))
            copy(stage.get_submodule("attention.out"), a.get_submodule("to_out.0"))

    copy(ours.stem, theirs.conv_in)
    copy(ours.time[0], theirs.time_embedding.linear_1)
    copy(ours.time[2], theirs.time_embedding.linear_2)
    down, up = iter(ours.down), iter(ours.up)
    for block in theirs.down_blocks:
        for resnet, attention in zip(block.resnets, getattr(block, "attentions", [None] * 2), strict=True):
            copy_stage(next(down), resnet, attention)
        if block.downsamplers:
            copy(next(down).get_submodule("1"), block.downsamplers[0].conv)
    copy_stage(ours.middle[0], theirs.mid_block.resnets[0], theirs.mid_block.attentions[0])
    copy_stage(ours.middle[1], theirs.mid_block.resnets[1], None)
    for block in theirs.up_blocks:
        for resnet, attention in zip(block.resnets, getattr(block, "attentions", [None] * 3), strict=True):
            copy_stage(next(up), resnet, attention)
        if block.upsamplers:
            next(up)  # the nearest-neighbour step has no parameters
            copy(next(up), block.upsamplers[0].conv)
    copy(ours.head.get_submodule("0"), theirs.conv_norm_out)
    copy(ours.head.get_submodule("2"), theirs.conv_out)

    x, t = inputs(count=1, dtype=torch.float64)
    with torch.no_grad():
        actual, expected = ours(x, t), theirs(x, t).sample
    # diffusers embeds t in single precision.
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("name", list(SMALL))
def test_gradients_reach_every_parameter(name: str) -> None:
    network = UNet(SMALL[name])
    randomise(network)
    x, t = inputs()
    network(x, t).square().mean().backward()
    for key, parameter in network.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", list(SMALL))
def test_channels_last_gives_the_same_numbers_and_stays(name: str) -> None:
    network = UNet(SMALL[name]).double()
    randomise(network)
    x, t = inputs(20, dtype=torch.float64)
    plain = network(x, t)
    assert plain.is_contiguous()
    network = network.to(memory_format=torch.channels_last)
    output = network(x.to(memory_format=torch.channels_last), t)
    assert output.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(output, plain, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", list(NETWORKS))
def test_no_parameter_has_strides_that_depend_on_the_memory_format(name: str) -> None:
    # DDP warns where a gradient's strides differ from its bucket's, which (1, C, 1, 1) parameters bring about.
    with torch.device("meta"):
        network = build_network(name)
    assert {p.ndim for p in network.parameters()} == {1, 2, 4}
    assert all(p.shape[0] > 1 for p in network.parameters() if p.ndim == 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_stays_close_to_single_precision(dtype: torch.dtype) -> None:
    network = tiny()
    x, t = inputs()
    exact = network(x, t)
    with torch.autocast("cpu", dtype):
        output = network(x, t)
    assert output.dtype == dtype
    assert (output - exact).abs().max() < 0.05 * exact.abs().max()


def test_compiles_without_graph_breaks() -> None:
    network = tiny()
    x, t = inputs()
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, t), network(x, t))


def test_deterministic_and_sensitive_to_time() -> None:
    network = tiny()
    x, t = inputs()
    assert torch.equal(network(x, t), network(x, t))
    assert torch.equal(network(x, t), network(x, t.float()))
    assert not torch.allclose(network(x, t), network(x, t + 1))


def test_images_of_a_batch_do_not_mix() -> None:
    network = tiny().double()
    x, t = inputs(dtype=torch.float64)
    torch.testing.assert_close(network(x, t)[1:], network(x[1:], t[1:]), rtol=1e-10, atol=1e-12)
