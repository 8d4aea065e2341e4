"""Images from a checkpoint: only what is missing is made, and a folder holds images of one kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_checkpoint import made

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DiffusionConfig, RunConfig
from ddpm_lab.measure import hardware
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.measure.progress import Progress
from ddpm_lab.training import sampling_run
from ddpm_lab.training.checkpoint import write
from ddpm_lab.training.generation import write_grid
from ddpm_lab.training.run_folder import RunFailed
from ddpm_lab.training.sampling_run import Sampling, sample


class Ranks:
    """Writes black images where ranks would write theirs."""

    def __init__(self, fail_at: int = -1, ran: str = "") -> None:
        self.fail_at, self.ran = fail_at, ran
        self.configs: list[RunConfig] = []
        self.steps = 0

    def __call__(self, config: RunConfig, **_: Any) -> Ranks:
        self.configs.append(config)
        self.steps = 0
        return self

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def witness(self) -> list[dict[str, Any]]:
        config = self.configs[-1]
        seen = {"precision": self.ran or config.precision, "device": config.device, "images": 0}
        return [{"rank": rank, **seen} for rank in range(config.world_size)]

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
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(hardware, "usable_cores", lambda: 2)

    def use(fail_at: int = -1, ran: str = "") -> Ranks:
        group = Ranks(fail_at, ran)
        monkeypatch.setattr(sampling_run, "Group", group)
        return group

    return use


def draw(checkpoint: Path, count: int, *, world_size: int = 1, batch_size: int = 4, **settings: Any) -> list[Path]:
    return sample(
        checkpoint,
        checkpoint.parent / "images",
        count,
        Sampling(**settings),
        device=None,
        world_size=world_size,
        batch_size=batch_size,
        progress=Progress("sample", quiet=True),
    )


def test_only_what_is_missing_is_made(checkpoint: Path, ranks: Callable[..., Ranks]) -> None:
    group = ranks(fail_at=1)
    with pytest.raises(RunFailed, match="rank 1 was killed by SIGKILL; the images that were made stay"):
        draw(checkpoint, 9, seed=3, weights="trained")
    folder = checkpoint.parent / "images"
    assert len(list(folder.glob("*.png"))) == 4
    (folder / "000002.png").write_text("")  # its content was lost with the power
    mine = Image.new("RGB", (8, 8), "red")
    mine.save(folder / "000003.png")
    (folder / "000001.png").write_bytes((folder / "000001.png").read_bytes()[:-1])  # so was its end
    mine.resize((9, 9)).save(folder / "000000.png")
    group = ranks()
    paths = draw(checkpoint, 9, seed=3, weights="trained", world_size=2, batch_size=1)
    config = group.configs[0]
    assert config.option("numbers", ()) == (0, 1, 2, 4, 5, 6, 7, 8)
    assert (config.world_size, config.global_batch_size, config.precision, config.seed) == (2, 2, "fp32", 3)
    assert config.diffusion.timesteps == 300
    assert config.option("weights", "") == "trained"
    write_grid(paths, folder / "grid.png")
    with Image.open(folder / "000003.png") as kept:
        assert kept.getpixel((0, 0)) == (255, 0, 0)
    group = ranks()
    assert draw(checkpoint, 9, seed=3, weights="trained") == paths
    assert group.configs == [], "nothing is missing"
    assert len(draw(checkpoint, 10, seed=3, weights="trained")) == 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seed": 1}, "seed is 1"),
        ({"sampler": "ddpm"}, "sampler is 'ddpm'"),
    ],
)
def test_images_of_other_settings_are_not_mixed(
    checkpoint: Path, ranks: Callable[..., Ranks], settings: dict[str, Any], words: str
) -> None:
    ranks()
    draw(checkpoint, 3)
    with pytest.raises(ConfigError, match=f"images of other settings .*{words}"):
        draw(checkpoint, 3, **settings)


def test_ranks_that_ran_otherwise_are_stopped(checkpoint: Path, ranks: Callable[..., Ranks]) -> None:
    ranks(ran="fp32")
    with pytest.raises(RunFailed, match="the label says precision bf16, rank 0 ran with fp32"):
        draw(checkpoint, 3, precision="bf16")


def test_a_folder_of_other_images_is_left_alone(checkpoint: Path, ranks: Callable[..., Ranks]) -> None:
    ranks()
    folder = checkpoint.parent / "images"
    folder.mkdir()
    (folder / "000000.png").write_text("a user's")
    with pytest.raises(ConfigError, match="images of another origin"):
        draw(checkpoint, 3)
    assert [p.name for p in folder.iterdir()] == ["000000.png"]
    for damaged in ("{", "[]", "null"):
        (folder / "sampling.json").write_text(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            draw(checkpoint, 3)


@pytest.mark.parametrize(
    ("count", "more", "words"),
    [
        (0, {}, "count is 0"),
        (1_000_001, {}, "count is 1,000,001: give at most 1,000,000"),
        (1, {"world_size": 3}, "3 CPU ranks need 3 cores"),
        (1, {"steps": 301}, "give at most the 300 timesteps"),
        (1, {"precision": "fp16"}, "precision 'fp16' needs a CUDA device: use fp32 or bf16 on a CPU"),
    ],
)
def test_bad_settings_are_refused(
    checkpoint: Path, ranks: Callable[..., Ranks], count: int, more: dict[str, Any], words: str
) -> None:
    group = ranks()
    with pytest.raises(ConfigError, match=words):
        draw(checkpoint, count, **more)
    assert group.configs == []
    assert not (checkpoint.parent / "images").exists()


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_the_same_images_come_whatever_the_batch_and_ranks(checkpoint: Path, sampler: str) -> None:
    seen = []
    for world_size, batch_size in ((1, 6), (1, 4), (2, 2)):
        if world_size > hardware.usable_cores():
            continue
        paths = draw(checkpoint, 6, world_size=world_size, batch_size=batch_size, sampler=sampler, steps=5)
        seen.append(np.stack([np.asarray(Image.open(path), dtype=int) for path in paths]))
        for path in paths:
            path.unlink()
    assert seen[0].shape == (6, 8, 8, 3)
    assert all(abs(other - seen[0]).max() <= 1 for other in seen[1:])
    assert len(np.unique(seen[0].reshape(6, -1), axis=0)) == 6
