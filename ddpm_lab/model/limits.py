"""What a training step has to do at least, and what this machine can do at most.

The work is counted on the meta device: the floating-point operations of convolutions and products, and the bytes that
every eager kernel reads and writes. The peaks are workloads, measured like any other: a large matrix product, the
network's own convolutions at their best, and a copy too large for any cache.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ddpm_lab.config import RunConfig
from ddpm_lab.model.blocks import upsampled
from ddpm_lab.model.step import AUTOCAST, allow_tf32
from ddpm_lab.model.unet import NETWORKS, UNet, count_parameters
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


def count_work(network: str, *, image_size: int = 32, joined: bool = False) -> dict[str, dict[str, float]]:
    """Work per image of forward and backward, by kind of kernel: ``flop``, and ``elements`` read and written.

    ``joined`` counts upsampling and the convolution after it as the fewest products that give the same, as the trainer
    computes them on a CPU. Multiply elements by the bytes of a number to get bytes. "weights" holds the number of
    weights as elements: the optimizer reads and writes them once a step, whatever the batch.
    """
    with torch.device("meta"):
        model = UNet(NETWORKS[network])
        for i, layer in enumerate(model.up if joined else ()):
            if isinstance(layer, nn.Upsample):
                after = model.up[i + 1]
                assert isinstance(after, nn.Conv2d)
                model.up[i], model.up[i + 1] = upsampled(after.in_channels, after.out_channels, fused=True)
        images, t = torch.empty(1, 3, image_size, image_size), torch.empty(1)
    images, t = (x.expand(_COUNTED, *x.shape[1:]).contiguous() for x in (images, t))
    with _Counter() as counter:
        model(images, t).sum().backward()
    found = {kind: {name: value / _COUNTED for name, value in work.items()} for kind, work in counter.work.items()}
    return {**found, "weights": {"flop": 0.0, "elements": float(count_parameters(model))}}


_COUNTED = 32
"""Images counted at once, so that weights, which a step reads once, count for what they cost in a batch."""


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


class _Peak:
    """A step that does one thing as fast as the machine can: ``flop`` or ``bytes`` of it, said in the witness."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        self.config, self.mark, self.steps = config, context.mark, 0
        self.device, self.dtype = torch.device(context.device), AUTOCAST.get(config.precision, torch.float32)
        allow_tf32(config.precision == "tf32")
        torch.manual_seed(config.seed)

    def batches(self) -> Iterator[None]:
        """There are no data."""
        return itertools.repeat(None)

    def close(self) -> None:
        """Nothing was started."""

    def seen(self, **what: Any) -> dict[str, Any]:
        """The witness: what one step does."""
        return {"images": self.steps * self.config.rank_batch_size, **what}


class _Product(_Peak):
    def __init__(self, config: RunConfig, context: RankContext) -> None:
        super().__init__(config, context)
        self.size = MATRIX[config.device]
        self.a, self.b = (torch.randn(self.size, self.size, device=self.device).to(self.dtype) for _ in range(2))
        self.out = torch.empty_like(self.a)

    def step(self, batch: None) -> float:
        """One product of two square matrices."""
        del batch
        self.mark("forward")
        torch.mm(self.a, self.b, out=self.out)
        self.steps += 1
        return 0.0

    def witness(self) -> dict[str, Any]:
        """FLOP of a step, and the work of the configuration's network, which is to be compared with the peaks."""
        work = count_work(self.config.network, image_size=self.config.image_size, joined=self.config.device == "cpu")
        return self.seen(flop=2 * self.size**3, dtype=str(self.out.dtype), work=work)


class _Convolution(_Peak):
    def __init__(self, config: RunConfig, context: RankContext) -> None:
        super().__init__(config, context)
        count, width, side = CONVOLVED[config.device], 128, 16
        layer = nn.Conv2d(width, width, 3, padding=1, bias=False, device=self.device)
        self.weight = layer.weight.detach().to(self.dtype).contiguous(memory_format=torch.channels_last)
        images = torch.randn(count, width, side, side, device=self.device).to(self.dtype)
        self.images = images.contiguous(memory_format=torch.channels_last)
        self.flop = 2 * count * side * side * width * width * 9

    def step(self, batch: None) -> float:
        """One 3x3 convolution of 128 to 128 channels over 16x16 pixels, forward."""
        del batch
        self.mark("forward")
        functional.conv2d(self.images, self.weight, padding=1)
        self.steps += 1
        return 0.0

    def witness(self) -> dict[str, Any]:
        """FLOP of a step."""
        return self.seen(flop=self.flop, dtype=str(self.images.dtype))


class _Copy(_Peak):
    def __init__(self, config: RunConfig, context: RankContext) -> None:
        super().__init__(config, context)
        count = COPY_BYTES[config.device] // 4
        self.source, self.target = (torch.zeros(count, device=self.device) for _ in range(2))

    def step(self, batch: None) -> float:
        """One copy; each byte is read once and written once."""
        del batch
        self.mark("copy")
        self.target.copy_(self.source)
        self.steps += 1
        return 0.0

    def witness(self) -> dict[str, Any]:
        """Bytes read and written in a step."""
        return self.seen(bytes=2 * self.source.numel() * self.source.element_size())


def product(config: RunConfig, context: RankContext) -> _Product:
    """The workload that measures the peak of matrix products in the configuration's precision."""
    return _Product(config, context)


def convolution(config: RunConfig, context: RankContext) -> _Convolution:
    """The workload that measures how fast a convolution can be in the configuration's precision."""
    return _Convolution(config, context)


def copy(config: RunConfig, context: RankContext) -> _Copy:
    """The workload that measures the bandwidth of memory."""
    return _Copy(config, context)
