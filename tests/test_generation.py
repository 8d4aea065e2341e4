"""Images from a network: each is decided by its seed and number, and never by its neighbours."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_checkpoint import made
from torch import Tensor

from ddpm_lab.config import DiffusionConfig, RunConfig
from ddpm_lab.diffusion.process import Diffusion
from ddpm_lab.diffusion.sampling import denoise
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.training.checkpoint import write
from ddpm_lab.training.generation import (
    generate,
    generation,
    image_generators,
    image_name,
    sampler_steps,
    write_grid,
    write_png,
)
from ddpm_lab.workload import RankContext

CPU = torch.device("cpu")


def network(x: Tensor, t: Tensor) -> Tensor:
    """Any function that treats each image alone."""
    return torch.tanh(x * 0.7 + t[:, None, None, None] / 1000)


def images(numbers: list[int], sampler: str = "ddpm", seed: int = 1) -> Tensor:
    steps = sampler_steps(Diffusion(DiffusionConfig()), sampler, 7)
    generators = image_generators(seed, numbers)
    return generate(network, steps, generators, image_size=8, device=CPU, mark=lambda _: None)


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_an_image_depends_on_its_seed_and_number_alone(sampler: str) -> None:
    together = images([0, 1, 2, 3, 4], sampler)
    for split in ([[3], [0], [4], [1, 2]], [[4, 2, 0], [1, 3]]):
        for numbers in split:
            torch.testing.assert_close(images(numbers, sampler), together[numbers])
    assert not torch.allclose(images([0], sampler), images([0], sampler, seed=2))
    assert not torch.allclose(together[0], together[1])


@pytest.mark.parametrize("sampler", ["ddpm", "ddim"])
def test_one_image_is_that_of_the_sampler(sampler: str) -> None:
    """The same walk as in sampling.py, which draws noise for a whole batch."""
    (generator,) = image_generators(1, [5])
    x = torch.randn((1, 3, 8, 8), generator=generator)
    for step in sampler_steps(Diffusion(DiffusionConfig()), sampler, 7):
        x = denoise(network, step, x, generator=generator)
    torch.testing.assert_close(images([5], sampler), x.clamp(-1, 1))


def test_a_grid_holds_the_pixels_of_its_files(tmp_path: Path) -> None:
    paths = [tmp_path / image_name(n) for n in range(3)]
    for path, value in zip(paths, (-1.0, 0.3, 1.0), strict=True):
        write_png(path, torch.full((1, 3, 4, 4), value))
    write_grid(paths, tmp_path / "grid.png")
    grid = np.asarray(Image.open(tmp_path / "grid.png"))
    assert grid.shape == (10, 10, 3)
    for path, (top, left) in zip(paths, ((0, 0), (0, 6), (6, 0)), strict=True):
        assert (grid[top : top + 4, left : left + 4] == np.asarray(Image.open(path))).all()


@pytest.mark.parametrize(("precision", "kernels"), [("fp32", "aten"), ("fp32", "fused"), ("bf16", "fused")])
def test_how_the_network_ran_is_witnessed(tmp_path: Path, precision: str, kernels: str) -> None:
    write(tmp_path / "a.pt", made(RunConfig(image_size=8)))
    options = (("checkpoint", str(tmp_path / "a.pt")), ("steps", 2), ("numbers", (0, 1)), ("folder", str(tmp_path)))
    config = RunConfig(image_size=8, global_batch_size=2, options=options, precision=precision, kernels=kernels)
    context = RankContext(rank=0, world_size=1, device="cpu", threads=1, mark=lambda _: None)
    workload = generation(config, context)
    assert workload.witness() == {"images": 0}
    for numbers in workload.batches():
        workload.step(numbers)
    seen = {"rank": 0, "device": "cpu", "steps": 1, **workload.witness()}
    assert mismatches(config, [seen]) == []
    other = dataclasses.replace(config, precision="fp32" if precision == "bf16" else "bf16")
    assert [line for line in mismatches(other, [seen]) if "precision" in line]
    assert seen["kernels"] == kernels


@pytest.mark.parametrize("weights", ["ema", "trained"])
def test_ranks_share_the_missing_images(tmp_path: Path, weights: str) -> None:
    write(tmp_path / "a.pt", made(RunConfig(image_size=8)))
    missing = (1, 2, 5, 6, 7)
    options = (
        ("checkpoint", str(tmp_path / "a.pt")),
        ("weights", weights),
        ("sampler", "ddim"),
        ("steps", 2),
        ("numbers", missing),
    )
    folders = {}
    for world_size, batch in ((1, 8), (2, 4), (2, 2)):
        folder = folders[world_size, batch] = tmp_path / f"{world_size}-{batch}"
        folder.mkdir()
        config = RunConfig(
            image_size=8, world_size=world_size, global_batch_size=batch, options=(*options, ("folder", str(folder)))
        )
        made_by = []
        for rank in range(world_size):
            context = RankContext(rank=rank, world_size=world_size, device="cpu", threads=1, mark=lambda _: None)
            workload = generation(config, context)
            batches = list(workload.batches())
            assert len(batches) == -(-len(missing) // batch), "every rank takes as many steps"
            for numbers in batches:
                workload.step(numbers)
            made_by.append(workload.witness()["images"])
        assert sum(made_by) == len(missing)
    for folder in folders.values():
        assert sorted(p.name for p in folder.iterdir()) == [image_name(n) for n in missing]
        for number in missing:
            mine, first = (
                np.asarray(Image.open(f / image_name(number)), dtype=int) for f in (folder, tmp_path / "1-8")
            )
            assert abs(mine - first).max() <= 1
