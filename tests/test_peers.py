"""Other people's trainers as workloads: they learn, they are of the stated size, and their labels tell the truth."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fresh_processes import advance, context, seen
from torch.utils.flop_counter import FlopCounterMode

from ddpm_lab.config import DiffusionConfig, OptimizerConfig, RunConfig
from ddpm_lab.diffusion.unet import NETWORKS
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.plan import FLASH_ATTENTION
from ddpm_lab.training import peers
from ddpm_lab.training.training import held_out_loss
from ddpm_lab.workload import RankContext

Make = Callable[[RunConfig, RankContext], peers.Peer]
INSTALLED: list[Any] = [
    pytest.param(peers.denoising_diffusion_pytorch, "denoising_diffusion_pytorch", id="denoising-diffusion-pytorch"),
    pytest.param(peers.diffusers, "diffusers", id="diffusers"),
]
PARAMETERS = {"denoising_diffusion_pytorch": 9_904_515, "diffusers": 8_952_067}
TUNED: dict[str, Any] = {"precision": "bf16"}
COMES: dict[str, Any] = {"channels_last": False, "read_loss": True}
COMES |= {"optimizer": OptimizerConfig(adam="loop", ema="loop")}


@pytest.fixture(scope="module")
def config(synthetic: RunConfig) -> RunConfig:
    return dataclasses.replace(synthetic, global_batch_size=4, network="seed", diffusion=DiffusionConfig(loss="l2"))


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NETWORKS, "seed", dataclasses.replace(NETWORKS["seed"], width=32))


def made(make: Make, module: str, config: RunConfig) -> peers.Peer:
    pytest.importorskip(module, reason=f"{module} is not installed: make peers")
    device = "cuda:0" if config.device == "cuda" else "cpu"
    return make(config, context(device=device))


@pytest.mark.slow
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("make", "module"), INSTALLED)
def test_a_step_is_witnessed_as_its_label_says(config: RunConfig, make: Make, module: str) -> None:
    for settings, others in ((COMES, TUNED), (TUNED, COMES)):
        label = dataclasses.replace(config, **settings)
        peer = made(make, module, label)
        assert all(0 < loss < 3 for loss in advance(peer, 2))
        found = seen(peer, steps=2)
        assert mismatches(label, [found]) == []
        assert len(mismatches(dataclasses.replace(config, **others), [found])) >= 2
        assert found["images"] == 8


@pytest.mark.slow
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("make", "module"), INSTALLED)
def test_averages_in_one_call_and_flash_attention_learn_the_same(config: RunConfig, make: Make, module: str) -> None:
    """What is tuned beyond precision and memory format, in fp32: read back, and the same losses."""
    flash = ((FLASH_ATTENTION, True),) if module == "denoising_diffusion_pytorch" else ()
    found = []
    for ema, options in (("loop", ()), ("foreach", flash)):
        label = dataclasses.replace(config, optimizer=OptimizerConfig(ema=ema, ema_every=1), options=options)
        peer = made(make, module, label)
        found.append(advance(peer, 4))
        told = seen(peer)
        assert mismatches(label, [told]) == []
        wrong = dataclasses.replace(label, optimizer=OptimizerConfig(ema="loop" if ema == "foreach" else "foreach"))
        assert [line for line in mismatches(wrong, [told]) if "ema" in line]
        other = dataclasses.replace(label, options=() if options else flash)
        assert bool(flash) == bool([line for line in mismatches(other, [told]) if FLASH_ATTENTION in line])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "module"), INSTALLED)
def test_the_network_is_of_the_size_that_is_compared(config: RunConfig, make: Make, module: str) -> None:
    """Nearly the 10.05 M weights and 9.13 GFLOP an image of the seed network, here of a sixteenth of the pixels.

    That of ddpm is the lab's.
    """
    peer = made(make, module, config)
    assert peer.witness()["parameters"] == PARAMETERS[module]
    with FlopCounterMode(display=False) as counter:
        trained(peer, torch.zeros(1, 3, 8, 8), torch.zeros(1, dtype=torch.long)).sum().backward()  # type: ignore[no-untyped-call]
    assert 8.9e9 < 16 * counter.get_total_flops() < 9.7e9
    if module == "diffusers":
        found = made(make, module, dataclasses.replace(config, network="ddpm")).witness()
        assert found["parameters"] == 35_746_307


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("make", "module"), INSTALLED)
def test_on_a_gpu(config: RunConfig, make: Make, module: str) -> None:
    flash = ((FLASH_ATTENTION, True),) if module == "denoising_diffusion_pytorch" else ()
    label = dataclasses.replace(config, device="cuda", precision="fp16", loader="resident", options=flash)
    peer = made(make, module, label)
    assert all(0 < loss < 3 for loss in advance(peer, 3))
    assert mismatches(label, [seen(peer, device="cuda:0")]) == []


@pytest.mark.slow
@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("make", "module"), INSTALLED)
def test_its_better_weights_are_judged_on_held_out_images(config: RunConfig, make: Make, module: str) -> None:
    """Trained weights where the average lags, the average where they are spoiled; looks change nothing learned."""
    label = dataclasses.replace(config, optimizer=OptimizerConfig(ema_every=1, learning_rate=2e-3))
    peer = made(make, module, label)
    first = peer.held_out_loss(draws=8)
    assert first["loss"] == pytest.approx(held_out_loss(peer, lambda x, t: trained(peer, x, t), 8)["loss"], rel=1e-5)
    losses = advance(peer, 10)
    last = peer.held_out_loss(draws=8)
    assert [look["step"] for look in (first, last)] == [0, 10]
    assert last["loss"] < 0.9 * first["loss"]
    assert last["loss"] == pytest.approx(held_out_loss(peer, lambda x, t: trained(peer, x, t), 8)["loss"], rel=1e-5)
    assert last["weights"] == "trained" or module == "denoising_diffusion_pytorch", "it copies them for 100 steps"
    losses += advance(peer, 2)
    assert losses == advance(made(make, module, label), 12)
    for parameter in peer.parameters:
        parameter.detach().zero_()
    spoiled = held_out_loss(peer, lambda x, t: trained(peer, x, t), 8)
    kept = peer.held_out_loss(draws=8)
    assert kept["loss"] < 0.95 * spoiled["loss"]
    assert kept["weights"] == "averaged"


def trained(peer: peers.Peer, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    model: Any = peer.theirs.model
    found: torch.Tensor = model.model(x, t) if hasattr(model, "model") else model(x, t, return_dict=False)[0]
    return found
