"""The samplers against a known distribution, their equations and diffusers', and images from a checkpoint."""

import dataclasses
import json
import math
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fresh_processes import context
from PIL import Image
from test_checkpoint import made
from torch import Tensor

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DiffusionConfig, RunConfig
from ddpm_lab.diffusion.kernels import State
from ddpm_lab.diffusion.process import Diffusion, Network
from ddpm_lab.diffusion.sampling import SAMPLERS, denoise, image_grid, walk
from ddpm_lab.files import lock
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.output import Progress
from ddpm_lab.training import sampling_run
from ddpm_lab.training.checkpoint import write
from ddpm_lab.training.run_folder import RunFailed
from ddpm_lab.training.sampling_run import Sampling, sample
from ddpm_lab.training.training import Generation, generate

MEAN, DEVIATION = 0.2, 0.15


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def process(schedule: str = "linear", timesteps: int = 1000, objective: str = "noise") -> Diffusion:
    return Diffusion(DiffusionConfig(schedule=schedule, timesteps=timesteps, objective=objective))


def gaussian_noise_predictor(diffusion: Diffusion) -> Network:
    """E[noise | x_t] when every pixel of the data is N(MEAN, DEVIATION^2): the network that training would reach."""

    def predict(x: Tensor, t: Tensor) -> Tensor:
        alpha_bar = diffusion.alpha_bar[t].view(-1, 1, 1, 1)
        variance = alpha_bar * DEVIATION**2 + 1 - alpha_bar
        return ((1 - alpha_bar).sqrt() * (x - alpha_bar.sqrt() * MEAN) / variance).float()

    return predict


def wobbly(x: Tensor, t: Tensor) -> Tensor:
    """Stands for a network: any smooth function of x and t."""
    return torch.sin(2 * x) + 0.3 * x.flip(-1) + 0.001 * t.view(-1, 1, 1, 1)


def test_exact_predictor_recovers_the_data() -> None:
    # DDPM walks every step: the posterior variance leaves out what is uncertain in x0, which is small for small steps.
    for schedule, (sampler, count) in product(("linear", "cosine"), (("ddpm", 1000), ("ddim", 250))):
        diffusion = process(schedule)
        network, source = gaussian_noise_predictor(diffusion), generator()
        images, *draws = torch.randn((1 + count, 64, 3, 4, 4), generator=source)
        for step in walk(1000, count):
            images = denoise(network, diffusion, sampler, images, step, noise=draws.pop)
        error = 0.02 * DEVIATION + 5 * DEVIATION / math.sqrt(images.numel())
        assert images.mean().item() == pytest.approx(MEAN, abs=error)
        assert images.std().item() == pytest.approx(DEVIATION, rel=0.05)


def equation(  # noqa: PLR0917 - an equation
    diffusion: Diffusion, sampler: str, prediction: Tensor, x: Tensor, time: int, previous: int, z: Tensor
) -> Tensor:
    """One step back with clipping, as the papers write it: Ho et al. 2020, eq. 6-7, or Song et al. 2021, eq. 12."""
    t = torch.full((len(x),), time)
    x0 = diffusion.to_x0_and_noise(prediction, x, t)[0].clamp(-1, 1)
    if previous < 0:
        return x0
    if sampler == "ddpm":
        mean, variance = diffusion.posterior(x0, x, t, torch.full_like(t, previous))
        return mean + variance.sqrt() * z
    b = diffusion.alpha_bar[previous]
    return b.sqrt() * x0 + (1 - b).sqrt() * diffusion.noise_from_x0(x0, x, t)


@pytest.mark.parametrize("objective", ["noise", "x0", "v"])
def test_a_step_is_its_equation_to_single_precision(objective: str) -> None:
    """Also at the first steps, where x0 is a small difference of large numbers. The equation is in double precision."""
    for schedule, (sampler, count) in product(("linear", "cosine"), (("ddpm", 1000), ("ddpm", 50), ("ddim", 250))):
        diffusion = process(schedule, objective=objective)
        steps = walk(1000, count)
        for index in {0, 1, 2, count // 2, count - 3, count - 2, count - 1}:
            x, other = torch.randn((2, 2, 3, 5, 7), generator=generator(index))
            z = torch.randn(x.shape, generator=generator(count))
            prediction = 0.95 * x + 0.3 * other
            given = prediction.double(), x.double(), *steps[index], z.double()
            predict: Network = lambda _, __, p=prediction: p  # type: ignore[misc]  # noqa: E731
            actual = denoise(predict, diffusion, sampler, x, steps[index], noise=lambda z=z: z)  # type: ignore[misc]
            torch.testing.assert_close(actual.double(), equation(diffusion, sampler, *given), rtol=5e-7, atol=5e-7)


@pytest.mark.gpu
@pytest.mark.calls
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_step_never_waits_for_the_device(never_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    source = torch.Generator("cuda").manual_seed(0)
    x = torch.randn((2, 3, 8, 8), generator=source, device="cuda")
    diffusion = Diffusion(DiffusionConfig(timesteps=20), "cuda")
    for sampler in SAMPLERS:
        with never_waiting():
            for step in walk(20, 10):
                z = torch.randn((2, 3, 8, 8), generator=source, device="cuda")
                x = denoise(wobbly, diffusion, sampler, x, step, noise=lambda z=z: z)  # type: ignore[misc]


def test_image_grid_places_and_scales() -> None:
    images = torch.stack([torch.full((3, 4, 5), value) for value in (-1.0, 0.0, 1.0, 9.0, -9.0)])
    images[0, 0] = 1.0  # red
    grid = image_grid(images)
    assert grid.shape == (2 * 4 + 2, 3 * 5 + 4, 3)
    assert grid.dtype == np.uint8
    assert (grid[:4, :5] == [255, 0, 0]).all()
    assert (grid[:4, 7:12] == 128).all()
    assert (grid[6:, 7:12] == 0).all()
    assert (grid[4:6] == 255).all()  # the gap
    assert (grid[6:, 14:] == 255).all()  # the place without an image


# --- images from a checkpoint ---

pytestmark = pytest.mark.usefixtures("two_cores")


class Ranks(AbstractContextManager["Ranks"]):
    """Writes black images where ranks would write theirs."""

    def __init__(self, fail_at: int = -1) -> None:
        self.fail_at = fail_at
        self.configs: list[RunConfig] = []

    def __call__(self, config: RunConfig, **_: Any) -> "Ranks":
        self.configs.append(config)
        self.steps = 0
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def advance(self, steps: int, limit: float, stage: str) -> None:
        assert (steps, limit >= 60, stage) == (1, True, "sampling")
        if self.steps == self.fail_at:
            raise GroupFailed("crashed", "rank 1 was killed by SIGKILL")
        config = self.configs[-1]
        size = config.global_batch_size
        for number in config.option("numbers", ())[self.steps * size : (self.steps + 1) * size]:
            Image.new("RGB", (8, 8)).save(Path(config.option("folder", ""), f"{number:06d}.png"))
        self.steps += 1


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write(tmp_path / "a.pt", made(RunConfig(image_size=8, diffusion=DiffusionConfig(timesteps=300))))
    return tmp_path / "a.pt"


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    """Put a stand-in in the place of the group."""

    def use(fail_at: int = -1) -> "Ranks":
        group = Ranks(fail_at)
        monkeypatch.setattr(sampling_run, "Group", group)
        return group

    return use


def draw(
    checkpoint: Path, count: int, *, folder: str = "images", world_size: int = 1, batch_size: int = 4, **settings: Any
) -> list[Path]:
    how: dict[str, Any] = {"device": None, "world_size": world_size, "batch_size": batch_size}
    progress = Progress("sample", quiet=True)
    return sample(checkpoint, checkpoint.parent / folder, count, Sampling(**settings), progress=progress, **how)


def test_only_what_is_missing_is_made(checkpoint: Path, ranks: Callable[..., Ranks]) -> None:
    group = ranks(fail_at=1)
    with pytest.raises(RunFailed, match="SIGKILL"):
        draw(checkpoint, 9, seed=3, weights="trained")
    folder = checkpoint.parent / "images"
    assert len(list(folder.glob("*.png"))) == 4
    (folder / "000002.png").write_text("")  # its content was lost with the power
    (folder / "000004.png.99.partial").write_text("of a rank that was killed while it wrote")
    mine = Image.new("RGB", (8, 8), "red")
    mine.save(folder / "000003.png")
    mine.resize((9, 9)).save(folder / "000000.png")
    group = ranks()
    paths = draw(checkpoint, 9, seed=3, weights="trained", world_size=2, batch_size=1)
    assert not [*folder.glob("*.partial")]
    config = group.configs[0]
    assert config.option("numbers", ()) == (0, 2, 4, 5, 6, 7, 8)
    assert (config.world_size, config.global_batch_size, config.precision, config.seed) == (2, 2, "fp32", 3)
    assert (config.diffusion.timesteps, config.option("weights", "")) == (300, "trained")
    with Image.open(folder / "000003.png") as kept:
        assert kept.getpixel((0, 0)) == (255, 0, 0)
    group = ranks()
    assert draw(checkpoint, 9, seed=3, weights="trained") == paths
    assert group.configs == [], "nothing is missing"


def test_two_commands_do_not_fill_one_folder(checkpoint: Path) -> None:
    folder = checkpoint.parent / "images"
    folder.mkdir()
    other = os.open(folder, os.O_RDONLY)
    assert lock(other, wait=False)
    with pytest.raises(ConfigError, match="another command"):
        draw(checkpoint, 3)
    assert not [*folder.iterdir()]
    os.close(other)


def test_images_of_other_settings_are_not_mixed(checkpoint: Path, ranks: Callable[..., Ranks]) -> None:
    ranks(fail_at=0)
    with pytest.raises(RunFailed):
        draw(checkpoint, 3, seed=2)
    ranks()
    draw(checkpoint, 3)  # into the same folder, which no image has claimed
    with pytest.raises(ConfigError, match=r"sampler is 'ddpm'; seed is 1"):
        draw(checkpoint, 3, sampler="ddpm", seed=1)
    note = checkpoint.parent / "images" / "sampling.json"
    assert json.loads(note.read_text()).keys() >= {"checkpoint", "seed"}
    for damaged in ("{", "[]"):
        note.write_text(damaged)
        with pytest.raises(ConfigError, match="images of another origin"):
            draw(checkpoint, 3)


def test_bad_settings_are_refused(checkpoint: Path, ranks: Callable[..., Ranks]) -> None:
    group = ranks()
    bad: list[tuple[int, dict[str, Any], str]] = [
        (0, {}, "count is 0"),
        (1_000_001, {}, "count is 1,000,001"),
        (1, {"world_size": 3}, "3 CPU ranks"),
        (1, {"steps": 301}, "at most the 300 timesteps"),
        (1, {"precision": "fp16"}, "precision 'fp16'"),
    ]
    for count, more, words in bad:
        with pytest.raises(ConfigError, match=words):
            draw(checkpoint, count, **more)
    assert group.configs == []
    assert not (checkpoint.parent / "images").exists()


def test_no_two_images_of_a_seed_begin_with_the_same_noise() -> None:
    """These two numbers have the same 32 bits, which are all that a generator of torch takes."""
    evaluate = SimpleNamespace(config=RunConfig(image_size=8), device=torch.device("cpu"))
    first, second = generate(cast(Any, evaluate), "ddim", 0, [2912, 57954], print)
    assert not torch.equal(first, second)


# One rank's share


@pytest.mark.parametrize(("precision", "kernels"), [("fp32", "aten"), ("bf16", "fused")])
def test_ranks_share_the_missing_images_which_are_of_their_seed_and_number_alone(
    tmp_path: Path, precision: str, kernels: str
) -> None:
    write(tmp_path / "a.pt", made(RunConfig(image_size=8)))
    missing = (1, 2, 5, 6, 7)
    options: dict[str, Any] = {"checkpoint": str(tmp_path / "a.pt"), "steps": 2, "numbers": missing}
    usual = RunConfig(image_size=8, precision=precision, kernels=kernels)
    found = []
    for ranks, batch, seed in ((1, 8, 0), (2, 4, 0), (2, 2, 0), (1, 8, 1)):
        folder = tmp_path / f"{ranks}-{batch}-{seed}"
        folder.mkdir()
        given = tuple({**options, "folder": str(folder)}.items())
        config = dataclasses.replace(usual, world_size=ranks, global_batch_size=batch, seed=seed, options=given)
        for rank in range(ranks):
            workload, before = Generation(config, context(rank, ranks)), State.uses
            batches = list(workload.batches())
            assert len(batches) == -(-len(missing) // batch), "every rank takes as many steps"
            for numbers in batches:
                workload.step(numbers)
            assert (kernels == "fused") == (State.uses > before)
        paths = sorted(folder.iterdir())
        assert [p.name for p in paths] == [f"{n:06d}.png" for n in missing]
        found.append(np.stack([np.asarray(Image.open(p), dtype=int) for p in paths]))
    first, *others, last = found
    assert all(abs(other - first).max() <= 1 for other in others)
    assert (last != first).any()
