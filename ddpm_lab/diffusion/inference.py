"""A network made ready to be sampled from: in the number format, memory format and compilation of a configuration."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion.blocks import UpsampledConv2d
from ddpm_lab.diffusion.network import AnyUNet, compile_stages, forward_once
from ddpm_lab.diffusion.step import AUTOCAST, PrecisionWatch, allow_tf32, autocast, require
from ddpm_lab.diffusion.unet import UNet


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
        self.network = copy.deepcopy(network).requires_grad_(False).to(self.device)
        for parameter in self.network.parameters():
            if parameter.ndim == 4:  # only these have a memory format
                parameter.data = parameter.data.contiguous(memory_format=self.format)
        self._round_weights()
        if config.compile == "regional":
            compile_stages(self.network, config.compile_mode)
        self.model: Callable[[Tensor, Tensor], Tensor] = self.network
        if config.compile == "whole":
            self.model = torch.compile(self.network, mode=config.compile_mode)
        # Blocks that are compiled one by one leave the first convolution, which is in none, as it is.
        eager = config.compile != "whole"
        once = partial(forward_once, self.network, config, self.device)
        self.precision = PrecisionWatch(self.network, self.device, eager=eager, run=once)

    def _round_weights(self) -> None:
        """Round once what autocast would round again at every step, to the same numbers.

        Autocast keeps a rounded weight only within its context, and only if the weight needs gradients.
        """
        dtype = AUTOCAST.get(self.config.precision)
        if dtype is None:
            return
        for module in self.network.modules():
            if isinstance(module, UpsampledConv2d):
                module.hold()
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.to(dtype)
        if isinstance(self.network, UNet) and self.network.times is not None:
            self.network.times.hold()

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        with torch.inference_mode(), autocast(self.config, self.device):
            return self.model(x.contiguous(memory_format=self.format), t)


class PlainInference:
    """As ``Inference``, the way it is usually written: autocast where it is asked for, and no gradients."""

    def __init__(self, network: AnyUNet, config: RunConfig, device: torch.device | str) -> None:
        require(config)
        self.config, self.device, self.network = config, torch.device(device), network
        allow_tf32(config.precision == "tf32")
        self.model: Callable[[Tensor, Tensor], Tensor] = network
        if config.compile == "whole":
            self.model = torch.compile(network, mode=config.compile_mode)
        once = partial(forward_once, network, config, self.device)
        self.precision = PrecisionWatch(network, self.device, eager=config.compile == "off", run=once)

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad(), autocast(self.config, self.device):
            return self.model(x, t)
