"""Other people's trainers as workloads, on the lab's own batches: denoising-diffusion-pytorch and diffusers.

Each step is written as the project's own training loop writes it (``Trainer.train`` there, and the example
``train_unconditional.py`` of diffusers): mixed precision by autocast, gradient clipping, Adam, and the project's own
moving average of the weights. The configuration tunes what their users could: precision, memory format, compilation,
flash attention, the implementation of Adam and of the average, and whether every step waits for its loss. Timesteps and
noise are drawn as they draw them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ddpm_lab.config import RunConfig
from ddpm_lab.data.loaders import Batch
from ddpm_lab.diffusion.step import Feed, LossStep, adam, adam_seen
from ddpm_lab.diffusion.unet import NETWORKS
from ddpm_lab.plan import FLASH_ATTENTION
from ddpm_lab.workload import RankContext, Unsupported

INSTALL = "make peers, or pip install denoising-diffusion-pytorch diffusers"

_BETAS = {"linear": "linear", "cosine": "squaredcos_cap_v2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a project brings: ``model`` holds the weights; ``loss(images, model)`` is their loss, in [-1, 1] as the
    lab's batches are; ``update`` moves its average of the weights and is called after every step; ``unet`` makes the
    network once more, for counting; ``seen`` reads settings of the project's own back from what was made.
    """

    model: nn.Module
    unet: Callable[[], nn.Module]
    loss: Callable[[Tensor, Callable[..., Any]], Tensor]
    update: Callable[[], None]
    seen: Callable[[], dict[str, Any]]


def denoising_diffusion_pytorch(config: RunConfig, context: RankContext) -> Peer:
    """The trainer of denoising-diffusion-pytorch. Raises Unsupported where it is not installed.

    ``options``: flash_attention, which its network offers.
    """
    try:
        from denoising_diffusion_pytorch import GaussianDiffusion, Unet  # noqa: PLC0415 - optional
        from denoising_diffusion_pytorch.attend import Attend  # noqa: PLC0415 - optional
        from ema_pytorch import EMA  # noqa: PLC0415 - optional
    except ImportError as missing:
        raise Unsupported(f"denoising-diffusion-pytorch is not installed: {INSTALL}") from missing
    _one_rank(config)
    shape = NETWORKS[config.network]
    if shape.family != "seed":
        raise Unsupported(f"denoising-diffusion-pytorch has no network of the size of {config.network!r}: use seed")

    def unet(flash: bool = False) -> nn.Module:
        made: nn.Module = Unet(dim=shape.width, dim_mults=shape.multipliers, flash_attn=flash)
        return made

    torch.manual_seed(config.seed)
    diffusion = GaussianDiffusion(
        unet(flash=config.option(FLASH_ATTENTION, False)),
        image_size=config.image_size,
        timesteps=config.diffusion.timesteps,
        objective="pred_noise",
        beta_schedule=config.diffusion.schedule,
        auto_normalize=False,  # the lab's batches are in [-1, 1] already
    )
    _place(diffusion, config, context)
    average = EMA(
        diffusion,
        beta=config.optimizer.ema_decay,
        update_every=config.optimizer.ema_every,
        use_foreach=config.optimizer.ema == "foreach",
    )

    def loss(images: Tensor, model: Callable[..., Any]) -> Tensor:
        value: Tensor = model(images)
        return value

    def seen() -> dict[str, Any]:
        attends = [bool(m.flash) for m in diffusion.modules() if isinstance(m, Attend)]
        return {FLASH_ATTENTION: bool(attends) and all(attends), "ema": "foreach" if average.use_foreach else "loop"}

    return Peer(config, context, Parts(model=diffusion, unet=unet, loss=loss, update=average.update, seen=seen))


def diffusers(config: RunConfig, context: RankContext) -> Peer:
    """Diffusers' UNet2DModel with its DDPMScheduler. Raises Unsupported where it is not installed."""
    try:
        from diffusers import DDPMScheduler, UNet2DModel  # noqa: PLC0415 - optional
        from diffusers.training_utils import EMAModel  # noqa: PLC0415 - optional
    except ImportError as missing:
        raise Unsupported(f"diffusers is not installed: {INSTALL}") from missing
    _one_rank(config)
    shape = NETWORKS[config.network]
    if shape.patch != 1:
        raise Unsupported(f"diffusers has no network of the size of {config.network!r}: use seed or ddpm")
    width = shape.width
    # The ddpm network is one for one diffusers' own configuration of it; of the seed network's size is a U-Net of four
    # levels whose width is doubled once.
    widths = tuple(width * m for m in shape.multipliers) if shape.family == "ddpm" else (width, *(3 * [2 * width]))

    def unet() -> nn.Module:
        made: nn.Module = UNet2DModel(
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
        return made

    torch.manual_seed(config.seed)
    network = unet()
    _place(network, config, context)
    scheduler = DDPMScheduler(config.diffusion.timesteps, beta_schedule=_BETAS[config.diffusion.schedule])
    foreach = config.optimizer.ema == "foreach"
    average = EMAModel(network.parameters(), decay=config.optimizer.ema_decay, foreach=foreach)
    steps = iter(range(1, 2**62))

    def update() -> None:
        if next(steps) % config.optimizer.ema_every == 0:
            average.step(network.parameters())

    def loss(images: Tensor, model: Callable[..., Any]) -> Tensor:
        noise = torch.randn(images.shape, device=images.device)
        t = torch.randint(0, config.diffusion.timesteps, (len(images),), device=images.device)
        noisy = scheduler.add_noise(images, noise, t)
        return nn.functional.mse_loss(model(noisy, t, return_dict=False)[0].float(), noise)

    def seen() -> dict[str, Any]:
        return {"ema": "foreach" if average.foreach else "loop"}

    return Peer(config, context, Parts(model=network, unet=unet, loss=loss, update=update, seen=seen))


def _place(network: nn.Module, config: RunConfig, context: RankContext) -> None:
    """Put a network where it runs, in its memory format, before a project copies it for its average of the weights.

    Weights and averages in two formats could not be averaged in one call.
    """
    network.to(context.device)
    if config.channels_last:
        network.to(memory_format=torch.channels_last)


def _one_rank(config: RunConfig) -> None:
    if config.world_size > 1:
        raise Unsupported(f"peers are compared on one rank, not on {config.world_size}")


class Peer:
    """One rank of a peer's training run."""

    def __init__(self, config: RunConfig, context: RankContext, parts: Parts) -> None:
        self.config, self.mark, self.parts = config, context.mark, parts
        self.device = torch.device(context.device)
        self.data = Feed(config, context)
        self.optimizer = adam([p for p in parts.model.parameters() if p.requires_grad], config.optimizer)
        self.training = LossStep(
            config,
            context,
            parts.model,
            lambda model, images: parts.loss(images, model),
            self.optimizer,
            clip_norm=config.optimizer.clip_norm,
            update=self._update,
        )

    def batches(self) -> Iterator[Batch]:
        """Endless batches, the same as the lab's own trainer has."""
        return iter(self.data.loader)

    def step(self, batch: Batch) -> Tensor:
        """One optimizer step; returns the loss, still on the device."""
        self.data.note(batch)
        self.mark("copy")
        images = batch.images.to(self.device, non_blocking=True)
        return self.training.step(images if self.config.channels_last else images.contiguous())

    def _update(self) -> None:
        self.parts.update()

    def witness(self) -> dict[str, Any]:
        """What runs, read back from the objects that run, and the size of the network."""
        own = {"adam": adam_seen(self.optimizer), "flop_per_image": self._count_flop()}
        return {**self.training.witness(), **own, **self.parts.seen(), **self.data.witness()}

    def _count_flop(self) -> int:
        """FLOP of forward and backward for one image, counted on the meta device."""
        size = self.config.image_size
        with torch.device("meta"):
            network, images, t = self.parts.unet(), torch.empty(1, 3, size, size), torch.zeros(1, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            output = network(images, t)
            getattr(output, "sample", output).sum().backward()
        return int(counter.get_total_flops())

    def close(self) -> None:
        """Stop the loader workers."""
        self.data.loader.close()
