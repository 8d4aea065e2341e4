"""The workload of sampling: one set of images from every implementation, and a witness that cannot be talked round."""

from __future__ import annotations

import dataclasses
import itertools
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import SAMPLING, DiffusionConfig, RunConfig
from ddpm_lab.diffusion.denoising import Sampling, sampling
from ddpm_lab.diffusion.unet import NETWORKS, build_network, count_flops, count_parameters
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.questions.comparison import measure
from ddpm_lab.workload import RankContext

STEPS = 12
CONFIG = RunConfig(
    workload=SAMPLING,
    network="seed",
    global_batch_size=3,
    image_size=12,
    diffusion=DiffusionConfig(schedule="linear", timesteps=STEPS),
)
PLAIN: dict[str, Any] = {"implementation": "plain", "channels_last": False}
DDIM = (("sampler", "ddim"), ("steps", 5))


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed network, a sixteenth as wide: all of its code in little time."""
    monkeypatch.setitem(NETWORKS, "seed", dataclasses.replace(NETWORKS["seed"], width=16, heads=2, head_width=16))


def made(config: RunConfig, rank: int = 0, marks: list[str] | None = None) -> Sampling:
    mark = (lambda _: None) if marks is None else marks.append
    context = RankContext(rank=rank, world_size=config.world_size, device="cpu", threads=1, mark=mark)
    return sampling(config, context)


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
    "objective", ["noise", *(pytest.param(other, marks=pytest.mark.slow) for other in ("x0", "v"))]
)
@pytest.mark.parametrize("options", [(), DDIM], ids=["ddpm", "ddim"])
@pytest.mark.parametrize(("kernels", "image_size", "batch"), [("aten", 12, 3), ("fused", 20, 1)])
def test_every_implementation_walks_through_the_same_images(
    objective: str, options: tuple[tuple[str, Any], ...], kernels: str, image_size: int, batch: int
) -> None:
    """Over more steps than a walk has, so through fresh noise too."""
    diffusion = dataclasses.replace(CONFIG.diffusion, objective=objective)
    config = dataclasses.replace(
        CONFIG, diffusion=diffusion, options=options, image_size=image_size, global_batch_size=batch
    )
    plain, expected = walked(dataclasses.replace(config, **PLAIN), STEPS + 3)
    lab, images = walked(dataclasses.replace(config, kernels=kernels), STEPS + 3)
    assert images.shape == (STEPS + 3, batch, 3, image_size, image_size)
    torch.testing.assert_close(images, expected, rtol=1e-4, atol=1e-4)
    assert not torch.equal(images[0], images[lab.done - 1])
    assert (lab.done, plain.done) == ((STEPS + 3) % len(lab.times),) * 2


LEVERS: list[dict[str, Any]] = [
    {"precision": "bf16"},
    {"channels_last": False},
    {"kernels": "fused"},
    PLAIN,
    {"attention_axis": "positions"},
    {**PLAIN, "precision": "bf16"},
]


@cache
def plainly_seen() -> tuple[dict[str, Any], float]:
    """Without any lever: what a rank would report, and the FLOPs of an image in training."""
    return rank_of(walked(CONFIG, 2)[0]), count_flops("seed", image_size=CONFIG.image_size)[1]


@pytest.mark.parametrize("lever", LEVERS, ids=lambda lever: " ".join(map(str, lever.values())))
def test_the_witness_agrees_with_what_ran_and_with_nothing_else(lever: dict[str, Any]) -> None:
    pulled = dataclasses.replace(CONFIG, **lever)
    seen = rank_of(walked(pulled, 2)[0])
    other, both = plainly_seen()
    assert mismatches(pulled, [seen]) == []
    assert mismatches(CONFIG, [other]) == []
    assert mismatches(pulled, [other]) != []
    assert mismatches(CONFIG, [seen]) != []
    assert seen["images"] == 2 * 3
    assert seen["parameters"] == other["parameters"] == count_parameters(build_network("seed"))
    assert (seen["sampler"], seen["sampler_steps"]) == ("ddpm", STEPS)
    # Training does each product of forward three times; here there is forward alone.
    assert seen["flop_per_image"] == other["flop_per_image"] == pytest.approx(both / 3, rel=0.02)


def test_ranks_share_a_batch_have_one_network_and_draw_their_own_noise() -> None:
    config = dataclasses.replace(CONFIG, world_size=2, global_batch_size=6)
    one, two = (made(config, rank) for rank in (0, 1))
    for workload in (one, two):
        workload.step(None)
        assert workload.x.shape == (3, 3, 12, 12)
    assert not torch.equal(one.x, two.x)
    for mine, others in zip(one.evaluate.network.parameters(), two.evaluate.network.parameters(), strict=True):
        assert torch.equal(mine, others)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"options": (("sampler", "euler"),)}, "options.sampler is 'euler'"),
        ({"options": (("steps", 5),)}, "options.steps is 5 with sampler 'ddpm'"),
        ({"options": (("sampler", "ddim"),)}, "options.steps is 250: give at most the 12 timesteps"),
        ({"read_loss": True}, "sampling has no loss"),
    ],
)
def test_what_is_no_sampling_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(dataclasses.replace(CONFIG, **settings))


@pytest.fixture
def shallow(monkeypatch: pytest.MonkeyPatch) -> None:
    """One level of the network: a third of it to compile."""
    monkeypatch.setitem(NETWORKS, "seed", dataclasses.replace(NETWORKS["seed"], multipliers=(1,)))


@pytest.mark.slow
@pytest.mark.usefixtures("shallow")
@pytest.mark.parametrize("compile_", ["regional", "whole"])
def test_compiled_in_whole_or_block_by_block(compile_: str) -> None:
    _, expected = walked(CONFIG, 3)
    config = dataclasses.replace(CONFIG, compile=compile_)
    workload, images = walked(config, 3)
    torch.testing.assert_close(images, expected, rtol=1e-4, atol=1e-4)
    seen = rank_of(workload)
    assert mismatches(config, [seen]) == []
    assert seen["graph_breaks"] == 0
    assert mismatches(dataclasses.replace(config, compile="whole" if compile_ == "regional" else "regional"), [seen])


@pytest.mark.slow
def test_real_ranks_measure_it_without_data(tmp_path: Path) -> None:
    """Also two ranks, which share the batch."""
    config = dataclasses.replace(CONFIG, network="tiny", global_batch_size=4, oversubscribe=True)
    ddim = dataclasses.replace(config, options=DDIM, world_size=2)
    measure(config, ddim, sets=1, output_dir=tmp_path, quiet=True)
    records = Ledger(tmp_path / "trace_output" / "ledger.jsonl").read()[0]
    assert {(r.status, r.reason) for r in records} == {("ok", None)}
    assert {seen["sampler"] for r in records for seen in r.witness["ranks"]} == {"ddpm", "ddim"}
