"""The training step: its mathematics against a plain one, several ranks against one, and what its witness says."""

import contextlib
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fresh_processes import DoublePrecision, context, gradients
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes

from ddpm_lab.config import DiffusionConfig, OptimizerConfig, RunConfig
from ddpm_lab.data.draws import noise_and_timesteps
from ddpm_lab.diffusion.unet import build_network
from ddpm_lab.training.train import Trainer


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


@pytest.mark.slow
def test_two_ranks_equal_one_on_the_same_global_batch(config: RunConfig, tmp_path: Path) -> None:
    run = dataclasses.replace(config, accumulation=2, optimizer=OptimizerConfig(clip_norm=None))
    given = (run, str(tmp_path), DoublePrecision)
    groups: list[Any] = [start_processes(gradients, (n, *given), n, join=False) for n in (1, 2)]  # type: ignore[no-untyped-call]
    for group in groups:
        while not group.join():
            """It waits for one of several."""
    one, two = (torch.load(tmp_path / f"{n}.pt") for n in (1, 2))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-10)
    assert one["gradient"].dtype == torch.float64
    assert float((one["gradient"] - two["gradient"]).norm() / one["gradient"].norm()) < 1e-9


def test_the_witness_is_not_the_label(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that forgets its autocast is seen, whatever the configuration says."""
    trainer = Trainer(dataclasses.replace(config, precision="bf16"), context())
    monkeypatch.setattr("ddpm_lab.training.train.autocast", lambda *_: contextlib.nullcontext())
    train(trainer, 1)
    assert trainer.witness()["precision"] == "fp32"


def trained_on_a_gpu(config: RunConfig, precision: str) -> tuple[Trainer, list[float]]:
    label = dataclasses.replace(config, device="cuda", precision=precision)
    trainer = Trainer(label, context(device="cuda:0"))
    return trainer, train(trainer, 30)


@pytest.mark.gpu
@pytest.mark.calls
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_precisions_on_a_gpu(config: RunConfig, precision: str) -> None:
    seen = trained_on_a_gpu(config, precision)[0].witness()
    assert (seen["precision"], seen["autocast_scaler"]) == (precision, precision == "fp16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_losses_on_a_gpu_are_finite(config: RunConfig, precision: str) -> None:
    assert np.isfinite(trained_on_a_gpu(config, precision)[1]).all()
