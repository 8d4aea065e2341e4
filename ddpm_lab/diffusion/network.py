"""The network of a configuration: built, compiled block by block, and read back."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion import fused
from ddpm_lab.diffusion.blocks import Stage
from ddpm_lab.diffusion.reference import ReferenceUNet, reference
from ddpm_lab.diffusion.step import autocast, channels_last_seen, compile_counters, inductor_seen
from ddpm_lab.diffusion.unet import UNet, build_network

AnyUNet = UNet | ReferenceUNet


def configured_network(config: RunConfig, device: torch.device) -> AnyUNet:
    """The network of the configuration on ``device``, with the same weights in every implementation.

    They are drawn from torch's global generator. Raises Unsupported without the compiler that joined kernels need.
    """
    if config.kernels == "fused" and device.type == "cpu":
        fused.library()  # compiled now, where it is, and not in the first step
    fused.leave_out(config.option("without", ""))
    lab = build_network(
        config.network,
        image_size=config.image_size,
        fused=config.kernels == "fused",
        attention_axis=config.attention_axis,
    )
    network = (reference(lab) if config.implementation == "plain" else lab).to(device)
    return network.to(memory_format=torch.channels_last) if config.channels_last else network


def compile_stages(network: nn.Module, mode: str) -> None:
    """Compile block by block: blocks of one shape share their code, so there is less to compile."""
    import torch._dynamo  # noqa: PLC0415 - takes a second, and most runs compile nothing

    stages = [m for m in network.modules() if isinstance(m, Stage)]
    # Each shape counts as a recompilation of Stage.forward, of which there may be 8 by default.
    torch._dynamo.config.recompile_limit = max(8, 2 * len(stages))
    for stage in stages:
        # Left to itself torch takes the second shape for one of many and compiles a tenth longer, for nothing.
        stage.compile(mode=mode, dynamic=False)


def forward_once(network: AnyUNet, config: RunConfig, device: torch.device) -> None:
    """Evaluate ``network`` once, eagerly: how the witness sees into what was compiled in whole."""
    size = config.image_size
    with torch.no_grad(), autocast(config, device):
        network(torch.zeros(1, 3, size, size, device=device), torch.zeros(1, device=device))


def network_seen(network: AnyUNet) -> dict[str, Any]:
    """The settings that are properties of a network, read back from it."""
    return {
        "implementation": "lab" if isinstance(network, UNet) else "plain",
        "channels_last": channels_last_seen(network),
        "attention_axis": network.config.middle_attention_axis,
        "without": fused.left_out(),
    }


def compile_seen(config: RunConfig, model: Any) -> dict[str, Any]:
    """What was compiled of ``model`` and how, if frames were: a silent fall-back to eager compiles none."""
    counters = compile_counters(config)
    if not counters.get("compiled_frames", 0):
        return {"compile": "off", **counters}
    how = "whole" if hasattr(model, "_orig_mod") else "regional"
    return {"compile": how, **counters, **inductor_seen(model)}
