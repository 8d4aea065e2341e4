"""Other people's trainers as workloads, on the lab's own batches: denoising-diffusion-pytorch and diffusers.

Each step is written as the project's own training loop writes it (``Trainer.train`` there, and the example
``train_unconditional.py`` of diffusers): mixed precision by autocast, gradient clipping, Adam, and the project's own
moving average of the weights. The configuration tunes what their users could: precision, memory format, compilation,
flash attention, the implementation of Adam and of the average, and whether every step waits for its loss. Timesteps and
noise are drawn as they draw them.
"""

import importlib
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddpm_lab.config import RunConfig
from ddpm_lab.data.loaders import Batch
from ddpm_lab.diffusion.blocks import UNetConfig
from ddpm_lab.diffusion.step import Feed, Step, adam, adam_seen, autocast
from ddpm_lab.diffusion.unet import NETWORKS, count_flops
from ddpm_lab.plan import FLASH_ATTENTION
from ddpm_lab.workload import RankContext, Unsupported

INSTALL = "make peers, or pip install denoising-diffusion-pytorch diffusers"

_BETAS = {"linear": "linear", "cosine": "squaredcos_cap_v2"}


def denoising_diffusion_pytorch(config: RunConfig, context: RankContext) -> "Peer":
    """The trainer of denoising-diffusion-pytorch. Raises Unsupported where it, or such a network, is not there."""
    theirs, average_of = _installed("denoising-diffusion-pytorch", "denoising_diffusion_pytorch", "ema_pytorch")
    shape = _shape("denoising-diffusion-pytorch", config, ("seed", "s000"))
    unet = partial(theirs.Unet, dim=shape.width, dim_mults=shape.multipliers)
    torch.manual_seed(config.seed)
    diffusion = theirs.GaussianDiffusion(
        unet(flash_attn=config.option(FLASH_ATTENTION, False)),
        image_size=config.image_size,
        timesteps=config.diffusion.timesteps,
        objective="pred_noise",
        beta_schedule=config.diffusion.schedule,
        auto_normalize=False,  # the lab's batches are in [-1, 1] already
    )
    _place(diffusion, config, context)
    optimizer = config.optimizer
    average = average_of.EMA(
        diffusion, beta=optimizer.ema_decay, update_every=optimizer.ema_every, use_foreach=optimizer.ema == "foreach"
    )

    def seen() -> dict[str, Any]:
        flash = [bool(m.flash) for m in diffusion.modules() if type(m).__name__ == "Attend"]
        return {FLASH_ATTENTION: bool(flash) and all(flash), "ema": "foreach" if average.use_foreach else "loop"}

    return Peer(
        config, context, diffusion, unet, lambda model, images: model(images), average=average.update, seen=seen
    )


def diffusers(config: RunConfig, context: RankContext) -> "Peer":
    """Diffusers' UNet2DModel with its DDPMScheduler. Raises Unsupported where it is not installed."""
    theirs, training_utils = _installed("diffusers", "diffusers", "diffusers.training_utils")
    shape = _shape("diffusers", config, ("seed", "ddpm", "s000"))
    width = shape.width
    # The ddpm network is one for one diffusers' own configuration of it; of the seed network's size is a U-Net of four
    # levels whose width is doubled once.
    widths = tuple(width * m for m in shape.multipliers) if shape.family == "ddpm" else (width, *(3 * [2 * width]))

    unet = partial(
        theirs.UNet2DModel,
        sample_size=config.image_size,
        block_out_channels=widths,
        layers_per_block=2,
        norm_num_groups=shape.groups,
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=None,
        freq_shift=1,
        flip_sin_to_cos=False,
    )
    torch.manual_seed(config.seed)
    network = unet()
    _place(network, config, context)
    scheduler = theirs.DDPMScheduler(config.diffusion.timesteps, beta_schedule=_BETAS[config.diffusion.schedule])
    foreach = config.optimizer.ema == "foreach"
    average = training_utils.EMAModel(network.parameters(), decay=config.optimizer.ema_decay, foreach=foreach)
    steps = itertools.count(1)

    def update() -> None:
        if next(steps) % config.optimizer.ema_every == 0:
            average.step(network.parameters())

    def loss(model: Callable[..., Any], images: Tensor) -> Tensor:
        noise = torch.randn(images.shape, device=images.device)
        t = torch.randint(0, config.diffusion.timesteps, (len(images),), device=images.device)
        noisy = scheduler.add_noise(images, noise, t)
        return nn.functional.mse_loss(model(noisy, t, return_dict=False)[0].float(), noise)

    ema = {True: "foreach", False: "loop"}
    return Peer(config, context, network, unet, loss, average=update, seen=lambda: {"ema": ema[average.foreach]})


def _installed(name: str, *modules: str) -> list[Any]:
    """Import what a project needs. Raises Unsupported where something is not installed."""
    try:
        return [importlib.import_module(module) for module in modules]
    except ImportError as missing:
        raise Unsupported(f"{name} is not installed: {INSTALL}") from missing


def _shape(name: str, config: RunConfig, networks: tuple[str, ...]) -> UNetConfig:
    """Of what size the network has to be. Raises Unsupported for one that the project does not have."""
    if config.world_size > 1:
        raise Unsupported(f"peers are compared on one rank, not on {config.world_size}")
    if config.network not in networks:
        raise Unsupported(f"{name} has no network of the size of {config.network!r}: use one of {', '.join(networks)}")
    return NETWORKS[config.network]


def _place(network: nn.Module, config: RunConfig, context: RankContext) -> None:
    """Put a network where it runs, in its memory format, before its averages are copied: theirs has to be the same."""
    network.to(context.device)
    if config.channels_last:
        network.to(memory_format=torch.channels_last)


class Peer(Step):
    """One rank of a peer's training run.

    ``unet`` makes the network once more, for counting; ``loss_of(model, images)`` takes images in [-1, 1]; ``average``
    moves the project's average of the weights after every step; ``seen`` reads back settings of the project's own.
    """

    def __init__(
        self,
        config: RunConfig,
        context: RankContext,
        model: nn.Module,
        unet: Callable[[], nn.Module],
        loss_of: Callable[[Any, Tensor], Tensor],
        *,
        average: Callable[[], None],
        seen: Callable[[], dict[str, Any]],
    ) -> None:
        self.unet, self.loss_of, self.average, self.seen = unet, loss_of, average, seen
        self.data = Feed(config, context)
        super().__init__(
            config, context, model, adam([p for p in model.parameters() if p.requires_grad], config.optimizer)
        )

    def loss(self, batch: Batch, part: slice) -> Tensor:
        """Mean loss of this rank's share, on the device."""
        mark = self.context.mark
        mark("copy")
        images = batch.images[part].to(self.device, non_blocking=True)
        images = images if self.config.channels_last else images.contiguous()
        mark("forward")
        with autocast(self.config, self.device):
            return self.loss_of(self.model, images)

    def update(self) -> None:
        self.context.mark("ema")
        self.average()

    def witness(self) -> dict[str, Any]:
        """What runs, read back from the objects that run, and the size of the network."""
        flop = count_flops(self.unet, image_size=self.config.image_size)
        return {**super().witness(), "adam": adam_seen(self.optimizer), "flop_per_image": flop, **self.seen()}
