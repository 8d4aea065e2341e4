"""A training that learns nothing: fp16 without a scaler, where every gradient is rounded to nothing."""

from torch import Tensor

from ddpm_lab.config import RunConfig
from ddpm_lab.data.loaders import Batch
from ddpm_lab.training.training import Training
from ddpm_lab.workload import RankContext


class Underflow(Training):
    """The gradients of a loss that is 1e-9 times the usual one, rounded to fp16."""

    def loss(self, batch: Batch, part: slice) -> Tensor:
        return super().loss(batch, part) * 1e-9

    def step(self, batch: Batch) -> Tensor:
        hooks = [p.register_hook(lambda g: g.half().float()) for p in self.parameters]  # type: ignore[no-untyped-call]
        try:
            return super().step(batch) * 1e9
        finally:
            for hook in hooks:
                hook.remove()


def underflow(config: RunConfig, context: RankContext) -> Underflow:
    return Underflow(config, context)
