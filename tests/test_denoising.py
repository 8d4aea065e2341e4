"""Networks ready for sampling, and the workload: the same predictions and images in every form, truly witnessed."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from fresh_processes import context
from random_networks import inputs, randomise
from torch import Tensor

from ddpm_lab.config import SAMPLING, DiffusionConfig, RunConfig
from ddpm_lab.diffusion.network import Inference
from ddpm_lab.diffusion.sampling import Sampling, sampling
from ddpm_lab.diffusion.unet import NETWORKS, UNet, build_network, count_flops, count_parameters
from ddpm_lab.measure.witness import mismatches

STEPS = 12
CONFIG = RunConfig(
    workload=SAMPLING,
    network="seed",
    global_batch_size=3,
    image_size=12,
    diffusion=DiffusionConfig(schedule="linear", timesteps=STEPS),
)
PLAIN: dict[str, Any] = {"implementation": "plain", "channels_last": False}

NARROW = dataclasses.replace(NETWORKS["seed"], width=16, heads=1)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed network, a sixteenth as wide: all of its code in little time."""
    monkeypatch.setitem(NETWORKS, "seed", NARROW)


def network(**settings: Any) -> UNet:
    """A network in which every parameter takes part."""
    torch.manual_seed(0)
    network = UNet(dataclasses.replace(NARROW, **settings))
    randomise(network)
    return network


@pytest.mark.parametrize("fused", [False, True])
def test_weights_are_rounded_once_in_a_copy_to_what_autocast_makes_of_them(fused: bool) -> None:
    x, t = inputs(2, 16, 24)
    original = network(fused=fused).to(memory_format=torch.channels_last)
    weights = [p.detach().clone() for p in original.parameters()]
    ready = Inference(original, RunConfig(network="seed", precision="bf16"), "cpu")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = original(x.contiguous(memory_format=torch.channels_last), t)
    assert torch.equal(ready(x, t), expected)
    assert ready.precision.seen() == "bf16"
    assert {p.dtype for p in ready.network.parameters()} == {torch.bfloat16, torch.float32}, "norms stay as they are"
    for parameter, weight in zip(original.parameters(), weights, strict=True):
        assert torch.equal(parameter, weight)
        assert parameter.requires_grad
    original(x, t).square().mean().backward()
    torch.optim.SGD(original.parameters(), lr=0.1).step()
    assert torch.equal(ready(x, t), expected), "the original may go on training"


def made(config: RunConfig, rank: int = 0) -> Sampling:
    return sampling(config, context(rank, config.world_size))


def walked(config: RunConfig, steps: int = STEPS) -> tuple[Sampling, Tensor]:
    """The workload after so many steps, and its images after each of them (steps, N, 3, H, W)."""
    workload, images = made(config), []
    for batch in itertools.islice(workload.batches(), steps):
        workload.step(batch)
        images.append(workload.x.contiguous())
    return workload, torch.stack(images)


def rank_of(workload: Sampling) -> dict[str, Any]:
    """What a rank would report, with what the rank adds."""
    return {"rank": 0, "device": "cpu", "world_size": 1, "steps": workload.steps, **workload.witness()}


@pytest.mark.parametrize(
    ("objective", "kernels", "image_size", "batch"), [("noise", "aten", 12, 3), ("v", "fused", 20, 1)]
)
def test_every_implementation_walks_through_the_same_images(
    objective: str, kernels: str, image_size: int, batch: int
) -> None:
    """Over more steps than a walk has, so through fresh noise too."""
    diffusion = dataclasses.replace(CONFIG.diffusion, objective=objective)
    config = dataclasses.replace(CONFIG, diffusion=diffusion, image_size=image_size, global_batch_size=batch)
    plain, expected = walked(dataclasses.replace(config, **PLAIN), STEPS + 3)
    lab, images = walked(dataclasses.replace(config, kernels=kernels), STEPS + 3)
    assert images.shape == (STEPS + 3, batch, 3, image_size, image_size)
    torch.testing.assert_close(images, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(images[0], images[STEPS])
    assert (lab.done, plain.done) == (3, 3)


LEVERS: list[dict[str, Any]] = [
    {"precision": "bf16", "channels_last": False},
    {"kernels": "fused", "attention_axis": "positions"},
    {**PLAIN, "precision": "bf16"},
]


def test_the_witness_agrees_with_what_ran_and_with_nothing_else() -> None:
    other, both = rank_of(walked(CONFIG, 2)[0]), count_flops("seed", image_size=CONFIG.image_size)[1]
    assert mismatches(CONFIG, [other]) == []
    for lever in LEVERS:
        pulled = dataclasses.replace(CONFIG, **lever)
        seen = rank_of(walked(pulled, 2)[0])
        assert mismatches(pulled, [seen]) == []
        assert len(mismatches(pulled, [other])) == len(mismatches(CONFIG, [seen])) == len(lever)
        assert seen["images"] == 2 * 3
        assert seen["parameters"] == other["parameters"] == count_parameters(build_network("seed"))
        assert (seen["sampler"], seen["sampler_steps"]) == ("ddpm", STEPS)
        # Training does each product of forward three times; here there is forward alone.
        assert seen["flop_per_image"] == other["flop_per_image"] == pytest.approx(both / 3, rel=0.02)
