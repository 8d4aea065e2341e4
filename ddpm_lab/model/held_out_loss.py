"""The denoising loss on images never trained on, at timesteps and noise that are the same for every run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddpm_lab.checks import ConfigError
from ddpm_lab.data.packed import PackedImages
from ddpm_lab.model.diffusion import Diffusion

STRATA = 10
_SEED, _CHUNK = 20_061_968, 64


@torch.no_grad()
def held_out_loss(
    network: nn.Module, packed: PackedImages, diffusion: Diffusion, device: torch.device, *, draws: int
) -> tuple[float, list[float]]:
    """Mean loss over ``draws`` draws, and the means of ten equal ranges of timesteps from 0 to T - 1.

    The i-th of n draws has a timestep from the i-th of n equal parts of 0..T - 1, so that the timesteps are stratified;
    images take turns in a fixed random order. Timesteps, noise and images are functions of the data and ``draws``
    alone, never of the run. The network is evaluated eagerly in fp32, whatever it was trained in.

    Raises:
        ConfigError: nothing is held out of the data.
    """
    held_out = packed.held_out_indices
    if not len(held_out):
        raise ConfigError(f"{packed.dest} holds no image out of training: prepare it with a held-out part")
    generator = torch.Generator().manual_seed(_SEED)
    order = torch.randperm(len(held_out), generator=generator)
    within = torch.rand(draws, generator=generator, dtype=torch.float64)
    t = ((torch.arange(draws, dtype=torch.float64) + within) / draws * diffusion.timesteps).long()
    t = t.clamp_(max=diffusion.timesteps - 1)
    losses: list[Tensor] = []
    training = network.training
    network.eval()
    for start in range(0, draws, _CHUNK):
        part = torch.arange(start, min(start + _CHUNK, draws))
        pixels = packed.images[held_out[order[part % len(held_out)].numpy()]]
        x0 = torch.from_numpy(pixels).permute(0, 3, 1, 2).to(device, torch.float32).div_(127.5).sub_(1)
        noise = torch.randn(x0.shape, generator=generator).to(device)
        times = t[part].to(device)
        prediction = network(diffusion.q_sample(x0, times, noise), times)
        losses.append(diffusion.prediction_loss(prediction, x0, times, noise).double().cpu())
    network.train(training)
    each = torch.cat(losses)
    strata = t * STRATA // diffusion.timesteps
    return float(each.mean()), [float(each[strata == s].mean()) for s in range(STRATA)]
