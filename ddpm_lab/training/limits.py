"""Workloads that train nothing: the peaks of a machine, an all-reduce, and work with a known answer.

The peaks are a large matrix product, the network's own convolutions at their best, and a copy too large for any cache.
Beside them stands what a training step has to do at least, counted on the meta device: the floating-point operations of
convolutions and products, and the elements that every eager kernel reads and writes.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion.blocks import UpsampledConv2d
from ddpm_lab.diffusion.step import AUTOCAST, Untrained, allow_tf32
from ddpm_lab.diffusion.unet import NETWORKS, UNet, count_parameters
from ddpm_lab.measure.process import host_id
from ddpm_lab.workload import RankContext

CONVOLUTION, PRODUCT, NORM, POINTWISE, REST = "convolution", "matrix product", "normalisation", "element-wise", "rest"
_KINDS = (
    (CONVOLUTION, ("convolution",)),
    (PRODUCT, ("mm", "bmm", "addmm", "baddbmm", "scaled_dot_product")),
    (NORM, ("group_norm", "layer_norm", "softmax")),
    (POINTWISE, ("silu", "gelu", "add", "mul", "div", "sub", "neg", "sqrt", "exp", "sin", "cos", "clamp", "where")),
)
MATRIX = {"cpu": 1024, "cuda": 8192}
CONVOLVED = {"cpu": 32, "cuda": 1024}
COPY_BYTES = {"cpu": 2**27, "cuda": 2**31}
_COUNTED = 32
"""Images counted at once, so that weights, which a step reads once, count for what they cost in a batch."""


def count_work(network: str, *, image_size: int = 32, joined: bool = False) -> dict[str, dict[str, float]]:
    """Work per image of forward and backward, by kind of kernel: ``flop``, and ``elements`` read and written.

    ``joined`` counts upsampling and the convolution after it as the fewest products that give the same, as the trainer
    computes them on a CPU. "weights" holds the number of weights as elements, which the optimizer reads and writes once
    a step, whatever the batch.
    """
    with torch.device("meta"):
        model = UNet(NETWORKS[network])
        for layer in model.up:
            if isinstance(layer, UpsampledConv2d):
                layer.joined = joined
        images, t = torch.empty(1, 3, image_size, image_size), torch.empty(1)
    images, t = (x.expand(_COUNTED, *x.shape[1:]).contiguous() for x in (images, t))
    with _Counter() as counter:
        model(images, t).sum().backward()
    found = {kind: {name: value / _COUNTED for name, value in work.items()} for kind, work in counter.work.items()}
    return {**found, "weights": {"flop": 0.0, "elements": float(count_parameters(model))}}


class _Counter(TorchDispatchMode):
    """Adds up the work of every kernel that is called; views and allocations move nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: dict[str, dict[str, float]] = defaultdict(lambda: {"flop": 0.0, "elements": 0.0})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        packet = func.overloadpacket
        if func.is_view or name.startswith(("empty", "detach", "_unsafe_view", "view", "t.", "alias")):
            return out
        work = self.work[next((kind for kind, names in _KINDS if any(n in name for n in names)), REST)]
        tensors = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)]
        work["elements"] += sum(x.numel() for x in tensors)
        if packet in flop_registry:
            work["flop"] += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        return out


class Repeated(Untrained):
    """A step that only calls ``once``; ``does`` says in the witness what that is."""

    def __init__(
        self, config: RunConfig, context: RankContext, mark: str, once: Callable[[], object], **does: Any
    ) -> None:
        self.config, self.context, self.mark, self.once, self.does = config, context, mark, once, does
        self.steps = 0

    def step(self, batch: None) -> float:
        del batch
        self.context.mark(self.mark)
        self.once()
        self.steps += 1
        return 0.0

    def witness(self) -> dict[str, Any]:
        return {"images": self.steps * self.config.rank_batch_size, **self.does}


def _random(config: RunConfig, context: RankContext, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Normally distributed tensors on the rank's device, in the number format of the configuration."""
    allow_tf32(config.precision == "tf32")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(config.seed)
    dtype = AUTOCAST.get(config.precision, torch.float32)
    return [torch.randn(shape, device=context.device).to(dtype) for shape in shapes]


def product(config: RunConfig, context: RankContext) -> Repeated:
    """The product of two square matrices in the configuration's precision; the witness has its network's work too."""
    size = MATRIX[config.device]
    a, b = _random(config, context, (size, size), (size, size))
    out = torch.empty_like(a)
    work = count_work(config.network, image_size=config.image_size, joined=config.device == "cpu")
    once = partial(torch.mm, a, b, out=out)
    return Repeated(config, context, "forward", once, flop=2 * size**3, dtype=str(out.dtype), work=work)


def convolution(config: RunConfig, context: RankContext) -> Repeated:
    """A 3x3 convolution of 128 to 128 channels over 16x16 pixels, forward, in the configuration's precision."""
    count, width, side = CONVOLVED[config.device], 128, 16
    images, weight = _random(config, context, (count, width, side, side), (width, width, 3, 3))
    images = images.contiguous(memory_format=torch.channels_last)
    weight = (weight / (3 * math.sqrt(width))).contiguous(memory_format=torch.channels_last)
    flop = 2 * count * side * side * width * width * 9
    once = partial(functional.conv2d, images, weight, padding=1)
    return Repeated(config, context, "forward", once, flop=flop, dtype=str(images.dtype))


def copy(config: RunConfig, context: RankContext) -> Repeated:
    """A copy in memory: each byte is read once and written once."""
    source, target = (torch.zeros(COPY_BYTES[config.device] // 4, device=context.device) for _ in range(2))
    return Repeated(config, context, "copy", partial(target.copy_, source), bytes=2 * source.nbytes)


def all_reduce(config: RunConfig, context: RankContext) -> Repeated:
    """A step sums the option ``message_bytes`` of fp32 over all ranks."""
    message = torch.zeros(config.option("message_bytes", 2**20) // 4, device=context.device)
    one = torch.ones(1, device=context.device)
    dist.all_reduce(one)
    names = [torch.zeros(1, dtype=torch.int64, device=context.device) for _ in range(context.world_size)]
    dist.all_gather(names, torch.tensor([int(host_id(), 16)], device=context.device))
    told = {"message_bytes": message.nbytes, "summed_over": float(one), "hosts": len({int(name) for name in names})}
    # Zeros stay zeros, whatever the number of steps.
    return Repeated(config, context, "all-reduce", lambda: dist.all_reduce(message), **told)


def pieces(config: RunConfig, context: RankContext) -> Repeated:
    """The workload of ``ddpm-lab check --instrument``: a step of ``config.option("pieces")`` equal pieces.

    A planted slowdown is a few pieces more: work in proportion, where a sleep would overshoot by some 90 microseconds
    and shrink under load. A piece mixes what a training step mixes: a convolution, a normalisation and element-wise
    work, forward and backward. On a GPU it is larger, so that a step does not only launch kernels.
    """
    count = int(config.option("pieces", 100))
    width, images = (128, 32) if config.device == "cuda" else (8, 1)
    torch.manual_seed(config.seed)
    convolution = nn.Conv2d(width, width, 3, padding=1, device=context.device)
    values = torch.randn(images, width, 16, 16, device=context.device).contiguous(memory_format=torch.channels_last)

    def once() -> None:
        for _ in range(count):
            result = functional.silu(functional.group_norm(convolution(values), 8))
            result.backward(values)  # type: ignore[no-untyped-call]
        convolution.zero_grad(set_to_none=True)

    return Repeated(config, context, "forward", once, pieces=count)
