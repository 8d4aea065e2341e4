"""Images from a checkpoint: each is decided by its seed and number, and only what is missing is made."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fresh_processes import context
from PIL import Image
from test_checkpoint import made

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DiffusionConfig, RunConfig
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.measure.progress import Progress
from ddpm_lab.training import sampling_run
from ddpm_lab.training.checkpoint import write
from ddpm_lab.training.run_folder import RunFailed
from ddpm_lab.training.sampling_run import Sampling, sample
from ddpm_lab.training.training import generation

pytestmark = pytest.mark.usefixtures("two_cores")


class Ranks:
    """Writes black images where ranks would write theirs."""

    def __init__(self, fail_at: int = -1, ran: str = "") -> None:
        self.fail_at, self.ran = fail_at, ran
        self.configs: list[RunConfig] = []

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

    def use(fail_at: int = -1, ran: str = "") -> Ranks:
        group = Ranks(fail_at, ran)
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
    mine = Image.new("RGB", (8, 8), "red")
    mine.save(folder / "000003.png")
    (folder / "000001.png").write_bytes((folder / "000001.png").read_bytes()[:-1])  # so was its end
    mine.resize((9, 9)).save(folder / "000000.png")
    group = ranks()
    paths = draw(checkpoint, 9, seed=3, weights="trained", world_size=2, batch_size=1)
    config = group.configs[0]
    assert config.option("numbers", ()) == (0, 1, 2, 4, 5, 6, 7, 8)
    assert (config.world_size, config.global_batch_size, config.precision, config.seed) == (2, 2, "fp32", 3)
    assert (config.diffusion.timesteps, config.option("weights", "")) == (300, "trained")
    with Image.open(folder / "000003.png") as kept:
        assert kept.getpixel((0, 0)) == (255, 0, 0)
    group = ranks()
    assert draw(checkpoint, 9, seed=3, weights="trained") == paths
    assert group.configs == [], "nothing is missing"


def test_images_of_other_settings_are_not_mixed(checkpoint: Path, ranks: Callable[..., Ranks]) -> None:
    ranks(ran="fp32")
    with pytest.raises(RunFailed, match="the label says precision bf16, rank 0 ran with fp32"):
        draw(checkpoint, 3, precision="bf16", folder="others")
    ranks(fail_at=0)
    with pytest.raises(RunFailed):
        draw(checkpoint, 3, seed=2)
    ranks()
    draw(checkpoint, 3)  # into the same folder, which no image has claimed
    with pytest.raises(ConfigError, match=r"sampler is 'ddpm'; seed is 1"):
        draw(checkpoint, 3, sampler="ddpm", seed=1)
    note = checkpoint.parent / "images" / "sampling.json"
    assert json.loads(note.read_text()).keys() >= {"checkpoint", "seed"}
    assert "run" not in json.loads(note.read_text()), "which another version may call by another id"
    for damaged in ("{", "[]", "null"):
        note.write_text(damaged)
        with pytest.raises(ConfigError, match="is damaged"):
            draw(checkpoint, 3)
    note.unlink()
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
        seen = []
        for rank in range(ranks):
            workload = generation(config, context(rank, ranks))
            assert workload.witness() == {"images": 0}
            batches = list(workload.batches())
            assert len(batches) == -(-len(missing) // batch), "every rank takes as many steps"
            for numbers in batches:
                workload.step(numbers)
            seen.append(workload.witness())
        assert sum(each["images"] for each in seen) == len(missing)
        assert (seen[0]["precision"], seen[0]["kernels"]) == (precision, kernels)
        paths = sorted(folder.iterdir())
        assert [p.name for p in paths] == [f"{n:06d}.png" for n in missing]
        found.append(np.stack([np.asarray(Image.open(p), dtype=int) for p in paths]))
    first, *others, last = found
    assert all(abs(other - first).max() <= 1 for other in others)
    assert (last != first).any()
