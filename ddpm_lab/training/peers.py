"""Other people's trainers as workloads, on the lab's own batches: denoising-diffusion-pytorch and diffusers.

Each step is written as the project's own training loop writes it (``Trainer.train`` there, and the example
``train_unconditional.py`` of diffusers): mixed precision by autocast, gradient clipping, Adam, and the project's own
moving average of the weights. The configuration tunes what their users could: precision, memory format, compilation,
flash attention, the implementation of Adam and of the average, and whether every step waits for its loss. Timesteps and
noise are drawn as they draw them.
"""

import importlib
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddpm_lab.config import SEED_FAMILY, RunConfig
from ddpm_lab.data.loaders import Batch
from ddpm_lab.diffusion.step import Feed, Step, autocast, placed
from ddpm_lab.diffusion.unet import NETWORKS
from ddpm_lab.plan import FLASH_ATTENTION
from ddpm_lab.training.training import held_out_loss
from ddpm_lab.workload import RankContext, Unsupported

INSTALL = "make peers, or pip install denoising-diffusion-pytorch diffusers"

_BETAS = {"linear": "linear", "cosine": "squaredcos_cap_v2"}


class Theirs(NamedTuple):
    """What is a project's own in a step.

    ``loss(model, images)`` takes images in [-1, 1]; ``average`` moves the average of the weights after every step;
    ``judged`` makes two networks in fp32, of that average and of the trained weights; ``seen`` reads back settings of
    the project's own.
    """

    model: nn.Module
    loss: Callable[[Any, Tensor], Tensor]
    average: Callable[[], object]
    judged: Callable[[], Sequence[Callable[[Tensor, Tensor], Tensor]]]
    seen: Callable[[], dict[str, Any]]


def denoising_diffusion_pytorch(config: RunConfig, context: RankContext) -> "Peer":
    """The trainer of denoising-diffusion-pytorch. Raises Unsupported where it, or such a network, is not there."""
    needs = "denoising_diffusion_pytorch", "ema_pytorch"
    theirs, averages = _modules("denoising-diffusion-pytorch", config, SEED_FAMILY, *needs)
    shape = NETWORKS[config.network]
    unet = partial(theirs.Unet, dim=shape.width, dim_mults=shape.multipliers)
    diffusion = theirs.GaussianDiffusion(
        unet(flash_attn=config.option(FLASH_ATTENTION, False)),
        image_size=config.image_size,
        timesteps=config.diffusion.timesteps,
        objective="pred_noise",
        beta_schedule=config.diffusion.schedule,
        auto_normalize=False,  # the lab's batches are in [-1, 1] already
    )
    diffusion = placed(diffusion, config, context.device)  # before its averages are copied
    optimizer = config.optimizer
    average = averages.EMA(
        diffusion, beta=optimizer.ema_decay, update_every=optimizer.ema_every, use_foreach=optimizer.ema == "foreach"
    )

    def seen() -> dict[str, Any]:
        flash = [bool(m.flash) for m in diffusion.modules() if type(m).__name__ == "Attend"]
        return {FLASH_ATTENTION: bool(flash) and all(flash), "ema": "foreach" if average.use_foreach else "loop"}

    def judged() -> list[Any]:
        networks = [unet().to(context.device) for _ in range(2)]
        for network, weights in zip(networks, (average.ema_model, diffusion), strict=True):
            network.load_state_dict(weights.model.state_dict())
        return networks

    loss: Any = lambda model, images: model(images)  # noqa: E731
    return Peer(config, context, Theirs(diffusion, loss, average.update, judged, seen))


def diffusers(config: RunConfig, context: RankContext) -> "Peer":
    """Diffusers' UNet2DModel with its DDPMScheduler. Raises Unsupported where it is not installed."""
    needs = "diffusers", "diffusers.training_utils"
    theirs, training_utils = _modules("diffusers", config, (*SEED_FAMILY, "ddpm"), *needs)
    shape = NETWORKS[config.network]
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
    network = placed(unet(), config, context.device)
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

    def judged() -> list[Callable[[Tensor, Tensor], Tensor]]:
        averaged, trained = unet().to(context.device), unet().to(context.device)
        average.copy_to(averaged.parameters())
        trained.load_state_dict(network.state_dict())
        predict: Callable[[Any, Tensor, Tensor], Tensor] = lambda model, x, t: model(x, t, return_dict=False)[0]  # noqa: E731
        return [partial(predict, model) for model in (averaged, trained)]

    ema = {True: "foreach", False: "loop"}
    return Peer(config, context, Theirs(network, loss, update, judged, lambda: {"ema": ema[average.foreach]}))


def _modules(name: str, config: RunConfig, networks: tuple[str, ...], *modules: str) -> list[Any]:
    """Import what a project needs, and seed its weights. Raises Unsupported where it, or such a network, is not there.

    ``networks`` are those of the lab of whose size it has one.
    """
    try:
        found = [importlib.import_module(module) for module in modules]
    except ImportError as missing:
        raise Unsupported(f"{name} is not installed: {INSTALL}") from missing
    if config.world_size > 1:
        raise Unsupported(f"peers are compared on one rank, not on {config.world_size}")
    if config.network not in networks:
        raise Unsupported(f"{name} has no network of the size of {config.network!r}: use one of {', '.join(networks)}")
    torch.manual_seed(config.seed)
    return found


class Peer(Step):
    """One rank of a peer's training run."""

    def __init__(self, config: RunConfig, context: RankContext, theirs: Theirs) -> None:
        self.theirs, self.data = theirs, Feed(config, context)
        super().__init__(config, context, theirs.model)

    def loss(self, batch: Batch, part: slice) -> Tensor:
        mark = self.context.mark
        mark("copy")
        images = batch.images[part].to(self.device, non_blocking=True)
        images = images if self.config.channels_last else images.contiguous()
        mark("forward")
        with autocast(self.config, self.device):
            return self.theirs.loss(self.model, images)

    def update(self) -> None:
        self.context.mark("ema")
        self.theirs.average()

    def held_out_loss(self, *, draws: int) -> dict[str, Any]:
        """Loss of the project's own average of the weights or of the trained weights, by the lab's images and noise.

        It is the lower of both: an average that remembers as many steps as were trained lags behind the weights.
        """
        with torch.random.fork_rng(devices=()):  # a new network draws its first weights; training goes on as without
            networks = self.theirs.judged()
        found = [held_out_loss(self, each, draws) for each in networks]
        best = min(zip(found, ("averaged", "trained"), strict=True), key=lambda pair: float(pair[0]["loss"]))
        return {**best[0], "weights": best[1]}

    def witness(self) -> dict[str, Any]:
        return {**super().witness(), **self.theirs.seen()}
