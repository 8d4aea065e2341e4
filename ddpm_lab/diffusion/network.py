"""The network of a configuration: built, compiled block by block, read back, and made ready to be sampled from."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion import kernels
from ddpm_lab.diffusion.blocks import Stage, UpsampledConv2d
from ddpm_lab.diffusion.reference import ReferenceUNet, reference
from ddpm_lab.diffusion.step import AUTOCAST, allow_tf32, autocast, channels_last_seen, placed, require
from ddpm_lab.diffusion.unet import UNet, build_network
from ddpm_lab.plan import ATTENTION

AnyUNet = UNet | ReferenceUNet


def configured_network(config: RunConfig, device: torch.device) -> AnyUNet:
    """The network of a configuration, with weights from torch's global generator, the same in each implementation."""
    if config.kernels == "fused" and device.type == "cpu":
        kernels.library()  # compiled now, where it is, and not in the first step
    kernels.State.without = config.option("without", "")
    attention = config.option("attention", "")
    for each in ATTENTION if attention else ():
        getattr(torch.backends.cuda, f"enable_{each}_sdp")(each == attention)
    lab = build_network(config.network, fused=config.kernels == "fused", attention_axis=config.attention_axis)
    network: AnyUNet = placed(reference(lab) if config.implementation == "plain" else lab, config, device)
    return network


def compile_stages(network: nn.Module, mode: str) -> None:
    """Compile block by block: blocks of one shape share their code, so there is less to compile."""
    import torch._dynamo  # noqa: PLC0415 - takes a second, and most runs compile nothing

    stages = [m for m in network.modules() if isinstance(m, Stage)]
    # Each shape counts as a recompilation of Stage.forward, of which there may be 8 by default.
    torch._dynamo.config.recompile_limit = max(8, 2 * len(stages))
    for stage in stages:
        # Left to itself torch takes the second shape for one of many and compiles a tenth longer, for nothing.
        stage.compile(mode=mode, dynamic=False)


def network_seen(network: AnyUNet) -> dict[str, Any]:
    """The settings that are properties of a network, read back from it."""
    attention = [each for each in ATTENTION if getattr(torch.backends.cuda, f"{each}_sdp_enabled")()]
    return {
        "attention": attention[0] if len(attention) == 1 else "",
        "implementation": "lab" if isinstance(network, UNet) else "plain",
        "channels_last": channels_last_seen(network),
        "attention_axis": network.config.middle_attention_axis,
        "without": kernels.State.without,
    }


class Inference:
    """What a sampler calls: images (N, 3, H, W) and timesteps (N,) to predictions (N, 3, H, W), without gradients.

    It holds a copy of ``network``, so that training may go on; give it the averaged weights. Of ``config`` it takes
    precision, compile, compile_mode and channels_last. Predictions are in the number format of the network's last
    layer, and channels-last if the network is. TF32 is allowed or forbidden for the whole process, as in training.
    Raises Unsupported for what this machine cannot do.
    """

    def __init__(self, network: AnyUNet, config: RunConfig, device: torch.device | str) -> None:
        require(config)
        self.config, self.device = config, torch.device(device)
        self.format = torch.channels_last if config.channels_last else torch.contiguous_format
        allow_tf32(config.precision == "tf32")
        torch.backends.cudnn.benchmark = True
        self.network = self._prepared(network)
        if config.compile == "regional":
            compile_stages(self.network, config.compile_mode)
        self.model: Callable[[Tensor, Tensor], Tensor] = self.network
        if config.compile == "whole":
            self.model = torch.compile(self.network, mode=config.compile_mode)

    def _prepared(self, network: AnyUNet) -> AnyUNet:
        """A copy whose weights are rounded once to what autocast would round them to.

        Autocast keeps a rounded weight only within its context, and only if the weight needs gradients.
        """
        network = placed(copy.deepcopy(network).requires_grad_(False), self.config, self.device)
        if (dtype := AUTOCAST.get(self.config.precision)) is not None:
            for module in network.modules():
                summed = isinstance(module, UpsampledConv2d) and module.joined  # whose sums are rounded, not weights
                if isinstance(module, nn.Conv2d | nn.Linear) and not summed:
                    module.to(dtype)
        return network

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        with torch.inference_mode(), autocast(self.config, self.device):
            return self.model(x.contiguous(memory_format=self.format), t)
