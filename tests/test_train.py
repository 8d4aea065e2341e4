"""The training step: its mathematics against a plain one, several ranks against one, and what its witness says."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fresh_processes import DoublePrecision, context, gradients
from PIL import Image
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from ddpm_lab.config import DiffusionConfig, OptimizerConfig, RunConfig
from ddpm_lab.data.draws import noise_and_timesteps
from ddpm_lab.data.packed import open_packed, prepare
from ddpm_lab.diffusion.step import Feed, LoaderAlone
from ddpm_lab.diffusion.unet import build_network
from ddpm_lab.questions.quality import IDENTITY_STEPS
from ddpm_lab.training.train import Trainer
from ddpm_lab.workload import Unsupported


@pytest.fixture(scope="module")
def config(synthetic: RunConfig) -> RunConfig:
    return synthetic


def train(trainer: Trainer, steps: int) -> list[float]:
    return [float(trainer.step(batch)) for batch in itertools.islice(trainer.batches(), steps)]


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("decays", [(0.995, 0.995), (2 / 11, 3 / 12)])
def test_a_step_is_the_plain_algorithm(config: RunConfig, decays: tuple[float, float]) -> None:
    """Against a loop written from the paper: noise, predict, L2, Adam, clipping, averaged weights."""
    warmed = decays[0] < 0.995
    optimizer = OptimizerConfig(ema_every=2, ema_warmup=warmed)
    config = dataclasses.replace(config, diffusion=DiffusionConfig(loss="l2", schedule="linear"), optimizer=optimizer)
    trainer = Trainer(config, context())
    losses = train(trainer, 4)

    torch.manual_seed(config.seed)
    network = build_network("tiny")
    averaged = [p.detach().clone() for p in network.parameters()]
    adam = torch.optim.Adam(network.parameters(), lr=2e-4, betas=(0.9, 0.99))
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0).float()
    expected = []
    for step, batch in enumerate(itertools.islice(Trainer(config, context()).batches(), 4)):
        x0 = batch.images
        noise, t = noise_and_timesteps(0, step, 0, 8, global_batch_size=8, shape=(3, 32, 32), timesteps=1000)
        signal = alpha_bar[t].sqrt()[:, None, None, None]
        sigma = (1 - alpha_bar[t]).sqrt()[:, None, None, None]
        loss = (network(signal * x0 + sigma * noise, t) - noise).square().mean()
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        adam.step()
        if step % 2:
            decay = decays[step // 2]
            for a, p in zip(averaged, network.parameters(), strict=True):
                a.mul_(decay).add_(p.detach(), alpha=1 - decay)
        expected.append(float(loss.detach()))
    assert losses == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(weights(trainer.network), weights(network), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weights(trainer.ema), torch.cat([a.reshape(-1) for a in averaged]), rtol=1e-4, atol=1e-6)
    assert trainer.witness()["ema_warmup"] is warmed


def test_accumulation_changes_nothing_but_rounding(config: RunConfig) -> None:
    whole, parts = (Trainer(dataclasses.replace(config, accumulation=n), context()) for n in (1, 4))
    assert train(whole, 3) == pytest.approx(train(parts, 3), rel=1e-4)
    torch.testing.assert_close(weights(whole.network), weights(parts.network), rtol=1e-3, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("accumulation", "kind", "bound"), [(1, Trainer, 1e-5), (2, DoublePrecision, 1e-9)])
def test_two_ranks_equal_one_on_the_same_global_batch(
    config: RunConfig, tmp_path: Path, accumulation: int, kind: type[Trainer], bound: float
) -> None:
    run = dataclasses.replace(config, accumulation=accumulation, optimizer=OptimizerConfig(clip_norm=None))
    for world_size in (1, 2):
        start_processes(gradients, args=(world_size, run, str(tmp_path), kind), nprocs=world_size)  # type: ignore[no-untyped-call]
    one, two = (torch.load(tmp_path / f"{n}.pt") for n in (1, 2))
    assert two["loss"] == pytest.approx(one["loss"], rel=bound / 10)
    assert one["gradient"].dtype == (torch.float64 if kind is DoublePrecision else torch.float32)
    error = (one["gradient"] - two["gradient"]).norm() / one["gradient"].norm()
    assert float(error) < bound


@pytest.mark.slow
def test_loaders_train_to_identical_weights_over_several_epochs(config: RunConfig, tmp_path: Path) -> None:
    """Twenty steps of eight over fewer images than that: where an epoch ends within a batch, nobody may differ."""
    rng = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for i in range(61):
        Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(tmp_path / "images" / f"{i}.png")
    manifest = prepare(tmp_path / "images", tmp_path / "prepared")
    small = dataclasses.replace(config, data=str(tmp_path / "prepared"), data_sha256=manifest.content_hash)
    drawn = IDENTITY_STEPS * small.global_batch_size
    assert drawn > 2 * manifest.train_count, "two epochs end on the way"
    assert manifest.train_count % small.global_batch_size, "and within a batch"
    hashes, seen = set(), set()
    for loader, workers in (("packed", 0), ("files", 0), ("files", 1), ("files", 2), ("resident", 0)):
        trainer = Trainer(dataclasses.replace(small, loader=loader, loader_workers=workers), context())
        train(trainer, IDENTITY_STEPS)
        said = trainer.witness()
        assert (said["loader"], said["loader_workers"], said["images"]) == (loader, workers, drawn)
        hashes.add(trainer.weights_sha256())
        seen.add(said["indices_sha256"])
        trainer.close()
    assert (len(hashes), len(seen)) == (1, 1)


def test_held_out_images_are_never_used(config: RunConfig) -> None:
    packed = open_packed(Path(config.data))
    held_out = set(packed.held_out_indices.tolist())
    assert held_out
    batches = itertools.islice(Trainer(config, context()).batches(), 300)
    used = {int(i) for batch in batches for i in batch.indices}
    assert not used & held_out
    assert used == set(packed.train_indices.tolist())


def test_the_witness_is_not_the_label(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that forgets its autocast is seen, whatever the configuration says."""
    trainer = Trainer(dataclasses.replace(config, precision="bf16"), context())
    monkeypatch.setattr("ddpm_lab.training.train.autocast", lambda *_: contextlib.nullcontext())
    train(trainer, 1)
    assert trainer.witness()["precision"] == "fp32"


def test_without_a_compiler_compile_is_unsupported(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unsupported, match=r"no C\+\+ compiler \(no-such-compiler\).*apt install g\+\+"):
        Trainer(dataclasses.replace(config, compile="whole"), context())


def test_the_loader_alone_consumes_the_same_images(config: RunConfig) -> None:
    alone, trainer = LoaderAlone(Feed(config, context())), Trainer(config, context())
    for batch in itertools.islice(alone.batches(), 3):
        assert alone.step(batch) == 0.0
    train(trainer, 3)
    assert alone.witness()["indices_sha256"] == trainer.witness()["indices_sha256"]
    alone.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_precisions_on_a_gpu(config: RunConfig, precision: str) -> None:
    here: dict[str, Any] = {"device": "cuda", "precision": precision}
    place = dataclasses.replace(context(), device="cuda:0")
    trainer = Trainer(dataclasses.replace(config, **here), place)
    losses = train(trainer, 30)
    assert trainer.witness()["precision"] == precision
    assert np.isfinite(losses).all()
    assert trainer.witness()["autocast_scaler"] == (precision == "fp16")
