"""The training step and the trainer of a long run: their mathematics, and what goes on to the last bit."""

import contextlib
import dataclasses
import itertools
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fresh_processes import advance, context
from torch import Tensor, nn

from ddpm_lab.config import TRAINING, DiffusionConfig, OptimizerConfig, RunConfig
from ddpm_lab.data.draws import noise_and_timesteps
from ddpm_lab.data.packed import open_packed, read_manifest
from ddpm_lab.diffusion.unet import build_network
from ddpm_lab.training.checkpoint import SECTIONS, Checkpoint, empty_network, read
from ddpm_lab.training.train import Trainer
from ddpm_lab.training.training import Training, training


@pytest.fixture(scope="module")
def config(data: Path) -> RunConfig:
    return RunConfig(
        workload=TRAINING,
        purpose="quality",
        data=str(data),
        data_sha256=read_manifest(data).content_hash,
        image_size=8,
        global_batch_size=8,
        optimizer=OptimizerConfig(ema_every=2),
        seed=3,
    )


def start(config: RunConfig, checkpoint: Path | None = None) -> Training:
    device = "cuda:0" if config.device == "cuda" else "cpu"
    options = (("checkpoint", str(checkpoint)),) if checkpoint else ()
    return training(dataclasses.replace(config, options=options), context(device=device))


def equal(one: Checkpoint, two: Checkpoint) -> bool:
    assert (one.step, one.adam_steps) == (two.step, two.adam_steps)
    return all(
        torch.equal(tensor, getattr(two, section)[name])
        for section in SECTIONS
        for name, tensor in getattr(one, section).items()
    )


SETTINGS: list[dict[str, Any]] = [
    {"precision": "bf16", "kernels": "fused"},
    {"accumulation": 2, "channels_last": False, "optimizer": OptimizerConfig(adam="loop", ema="loop", clip_norm=None)},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_a_run_that_goes_on_learns_the_same_to_the_last_bit(
    config: RunConfig, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """Also from a checkpoint before the first step of Adam, as gradient scaling leaves it."""
    config = dataclasses.replace(config, **settings)
    whole, first = start(config), start(config)
    first.save(path=str(tmp_path / "0.pt"))
    losses = advance(whole, 7)
    assert advance(start(config, tmp_path / "0.pt"), 2) == losses[:2]
    assert advance(first, 3) == losses[:3]
    assert first.save(path=str(tmp_path / "a.pt")) is None
    assert equal(read(tmp_path / "a.pt"), first.state())
    second = start(config, tmp_path / "a.pt")
    assert equal(second.state(), first.state())
    assert advance(second, 4) == losses[3:]
    assert equal(second.state(), whole.state())


def test_looking_in_between_changes_nothing_and_only_rank_0_does(config: RunConfig, tmp_path: Path) -> None:
    """Neither held-out losses nor samples nor saving draw from what training draws from."""
    plain, watched = start(config), start(config)
    advance(plain, 4)
    advance(watched, 2)
    for rank in (1, 0):
        watched.context = dataclasses.replace(watched.context, rank=rank)
        assert watched.samples(path=str(tmp_path / "a.png"), count=2, steps=2) is None
        assert (watched.held_out_loss(draws=20) is None) == (rank == 1)
        assert watched.save(path=str(tmp_path / "a.pt")) is None
        assert len(list(tmp_path.iterdir())) == 2 * (rank == 0)
    advance(watched, 2)
    assert equal(plain.state(), watched.state())
    assert "No such file" in (watched.save(path=str(tmp_path / "none" / "a.pt")) or ""), "a sentence, and no error"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**17, before[1]))
    try:
        assert "File too large" in (watched.save(path=str(tmp_path / "a.pt")) or ""), "as on a full disk"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert read(tmp_path / "a.pt").step == 2, "the old checkpoint"


def test_the_held_out_loss_is_the_mean_over_stratified_timesteps(config: RunConfig) -> None:
    """Under L2 a prediction of t / T costs the mean square of the noise, 1, and that of t / T, a third."""
    trainer = start(dataclasses.replace(config, diffusion=DiffusionConfig(loss="l2")))
    trainer._plain = lambda: (lambda x, t: (t / 1000).view(-1, 1, 1, 1).expand_as(x), trainer.config)  # type: ignore[assignment,method-assign,return-value]
    found = trainer.held_out_loss(draws=400)
    assert found is not None
    assert found["loss"] == pytest.approx(4 / 3, abs=0.03)


def test_a_look_takes_no_more_memory_than_a_step_and_gives_signs_of_life(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, marks = start(config), list[str]()
    advance(trainer, 4)
    whole, drawn = trainer.held_out_loss(draws=100), drawn_by(trainer, tmp_path, 4, 3)
    assert whole is not None
    monkeypatch.setattr("ddpm_lab.training.training._at_once", lambda _: 3)
    trainer.context = dataclasses.replace(trainer.context, mark=marks.append)
    assert trainer.held_out_loss(draws=100) == {**whole, "loss": pytest.approx(whole["loss"])}
    assert len(marks) == 22 + 12, "of 64 and of 36 draws"
    assert np.abs(drawn_by(trainer, tmp_path, 4, 3) - drawn).max() <= 1


def test_the_state_of_gradient_scaling_goes_on(config: RunConfig, tmp_path: Path) -> None:
    trainer = start(config)
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    advance(trainer, 3)
    trainer.save(path=str(tmp_path / "a.pt"))
    state = read(tmp_path / "a.pt").scaler
    assert state == trainer.scaler.state_dict()
    assert state["scale"] == 2048.0
    other = start(config)
    other.scaler = torch.amp.GradScaler("cpu")
    other._restore(read(tmp_path / "a.pt"))
    assert other.scaler.state_dict() == state


def drawn_by(trainer: Training, folder: Path, count: int, steps: int) -> np.ndarray[Any, Any]:
    """The first images (N, S, S, 3) that its averaged weights draw."""
    trainer.draw_pixels(path=str(folder / "drawn.npy"), count=count, steps=steps)
    found: np.ndarray[Any, Any] = np.load(folder / "drawn.npy")
    return found.astype(int)


def test_what_weights_draw_is_drawn_alike_whatever_they_were_trained_in(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same averages, so that only who draws could make a difference: to the last bit there is none."""
    trainers = [start(config), start(dataclasses.replace(config, precision="bf16", kernels="fused", accumulation=4))]
    for trainer in trainers:
        grow(trainer, 1)
    found, other = (drawn_by(trainer, tmp_path, 3, 8) for trainer in trainers)
    assert (found == other).all()
    assert (found[0] != found[1]).any()
    assert np.mean((found > 0) & (found < 255)) > 0.05, "pixels that could tell a difference"
    monkeypatch.setattr("ddpm_lab.training.training._AT_ONCE", 2)
    many = drawn_by(trainers[0], tmp_path, 5, 8)
    assert many.shape == (5, 8, 8, 3)
    assert abs(many[:3] - found).max() <= 1, "many images begin with the first few"
    grow(trainers[0], 2)
    assert (drawn_by(trainers[0], tmp_path, 3, 8) != found).any(), "other weights draw something else"


@torch.no_grad()
def grow(trainer: Training, seed: int) -> None:
    """Move the averages, so that the network predicts something: a new one predicts nothing."""
    generator = torch.Generator().manual_seed(seed)
    for average, plain in zip(trainer.averages, empty_network(trainer.config).parameters(), strict=True):
        average.add_(torch.randn(plain.shape, generator=generator).reshape(average.shape), alpha=0.1)


# --- the step of every training ---


def weights(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("decays", [(0.995, 0.995), (2 / 11, 3 / 12)])
def test_a_step_is_the_plain_algorithm(synthetic: RunConfig, decays: tuple[float, float]) -> None:
    """Against a loop written from the paper: noise, predict, L2, Adam, clipping, averaged weights."""
    warmed = decays[0] < 0.995
    optimizer = OptimizerConfig(ema_every=2, ema_warmup=warmed)
    synthetic = dataclasses.replace(
        synthetic, diffusion=DiffusionConfig(loss="l2", schedule="linear"), optimizer=optimizer
    )
    trainer = Trainer(synthetic, context())
    losses = advance(trainer, 4)

    torch.manual_seed(synthetic.seed)
    network = build_network("tiny")
    averaged = [p.detach().clone() for p in network.parameters()]
    adam = torch.optim.Adam(network.parameters(), lr=2e-4, betas=(0.9, 0.99))
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000, dtype=torch.float64), 0).float()
    expected = []
    for step, batch in enumerate(itertools.islice(Trainer(synthetic, context()).batches(), 4)):
        x0 = batch.images
        noise, t = noise_and_timesteps(0, step, 0, 8, global_batch_size=8, shape=(3, 8, 8), timesteps=1000)
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


def test_images_are_mirrored_unless_that_is_turned_off(synthetic: RunConfig) -> None:
    batches = [next(Trainer(dataclasses.replace(synthetic, mirror=m), context()).batches()) for m in (True, False)]
    stored = open_packed(Path(synthetic.data)).images[batches[0].indices]
    plain = torch.from_numpy(stored).permute(0, 3, 1, 2) / 127.5 - 1
    equal = [[torch.equal(*pair) for pair in zip(batch.images, plain, strict=True)] for batch in batches]
    assert (any(equal[0]), all(equal[0]), all(equal[1])) == (True, False, True)


def test_the_witness_is_not_the_label(synthetic: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that forgets its autocast is seen, whatever the configuration says."""
    trainer = Trainer(dataclasses.replace(synthetic, precision="bf16"), context())
    monkeypatch.setattr("ddpm_lab.training.train.autocast", lambda *_: contextlib.nullcontext())
    advance(trainer, 1)
    assert trainer.witness()["precision"] == "fp32"


def trained_on_a_gpu(synthetic: RunConfig, precision: str) -> tuple[Trainer, list[float]]:
    label = dataclasses.replace(synthetic, device="cuda", precision=precision)
    trainer = Trainer(label, context(device="cuda:0"))
    return trainer, advance(trainer, 30)


@pytest.mark.gpu
@pytest.mark.calls
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_precisions_on_a_gpu(synthetic: RunConfig, precision: str) -> None:
    seen = trained_on_a_gpu(synthetic, precision)[0].witness()
    assert (seen["precision"], seen["autocast_scaler"]) == (precision, precision == "fp16")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
def test_losses_on_a_gpu_are_finite(synthetic: RunConfig, precision: str) -> None:
    assert np.isfinite(trained_on_a_gpu(synthetic, precision)[1]).all()
