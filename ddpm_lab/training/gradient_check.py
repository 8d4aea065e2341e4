"""Loss and gradient of a configuration against single precision, step by step: what breaks a setting shows at once.

A run of seconds cannot tell whether a setting costs quality, but it can tell whether the setting computes what it
should: gradients that underflow, that are added or divided wrongly, or that never reach the other ranks.
"""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpm_lab.config import LEARNED, RunConfig
from ddpm_lab.data.loaders import Batch
from ddpm_lab.diffusion.reference import restore
from ddpm_lab.diffusion.step import allow_tf32
from ddpm_lab.training.train import PLAIN, Trainer
from ddpm_lab.workload import RankContext

NEGLIGIBLE = 1e-6
"""A layer with a gradient below this share of the largest layer's is not judged alone: it is mostly rounding."""


_KEPT = (*LEARNED, "optimizer", "workload", "purpose", "device", "threads", "data", "options")


def plain(config: RunConfig) -> RunConfig:
    """A configuration that learns the same as ``config`` in the plain way, on one rank.

    A setting is plain unless it is named here, so that a new one is checked and not compared with itself.
    """
    kept = {name: getattr(config, name) for name in _KEPT}
    return RunConfig(**kept, **PLAIN)


class GradientCheck(Trainer):
    """A trainer that can compare its steps with plain ones. It learns what a Trainer learns, to the last bit."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        # The gradient is wanted as it is before clipping, so clipping moves from the step into the hook that takes it.
        super().__init__(replace(config, optimizer=replace(config.optimizer, clip_norm=None)), context)
        self.clip_norm = config.optimizer.clip_norm
        self.gradient: list[Tensor] | None = None
        self.compared_images = 0
        self.optimizer.register_step_pre_hook(self._before_update)

    def _before_update(self, *_: object) -> None:
        """Called by the optimizer: the gradient is exchanged, added up and unscaled by now, and not yet used."""
        if self.gradient is not None:
            self.gradient = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.parameters]
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)

    def compare(self, *, steps: int = 3) -> dict[str, Any] | None:
        """Train ``steps`` steps and compare each with the same step in fp32; on every rank, None but on rank 0.

        The reference is computed by rank 0 from the weights before the step: in ieee fp32, eagerly, with the lab's
        network and torch's own kernels, for the whole global batch at once, which has to fit into its memory.

        Returns ``precision``, ``loss`` and ``hook`` of the configuration, and ``steps``, a list of what ``compared``
        returns with ``step``, ``loss``, ``loss_error`` (relative), ``ranks_error`` (L2 norm of the difference between a
        rank's gradient and rank 0's over that of rank 0's, at its largest) and ``skipped`` (by the gradient scaler;
        what is computed from the gradient is then None).
        """
        config = self.config
        alone, exact = replace(self.context, rank=0, world_size=1), None
        if self.context.rank == 0:
            exact = Trainer(plain(config), alone, start_step=self.steps)  # of this data, whose step is the plain one
        found = [self._compare(batch, exact) for batch in itertools.islice(self.batches(), steps)]
        if exact is None:
            return None
        exact.close()
        settings = {"precision": config.precision, "loss": config.diffusion.loss, "hook": config.exchange.hook}
        return {**settings, "steps": found}

    def _compare(self, batch: Batch, exact: Trainer | None) -> dict[str, Any]:
        """Train one step; what is told of it is of use on rank 0, which has the ``exact`` trainer."""
        plain_loss, plain = self._reference(exact, next(exact.batches())) if exact else (math.nan, {})
        self.gradient = []
        scale = self.scaler.get_scale()
        total = self.step(batch).double()
        if self.context.world_size > 1:
            dist.all_reduce(total)
        loss = float(total) / self.context.world_size
        self.compared_images += len(batch.images)
        skipped = self.scaler.get_scale() < scale
        apart = self._between_ranks()
        gradient, self.gradient = None if skipped else self.gradient, None
        both = math.isfinite(loss) and math.isfinite(plain_loss) and plain_loss
        return {
            "step": batch.step,
            "skipped": skipped,
            "loss": loss if math.isfinite(loss) else None,
            "loss_error": abs(loss - plain_loss) / abs(plain_loss) if both else None,
            "ranks_error": None if skipped else apart,
            **(compared(gradient, plain) if exact else {}),
        }

    def witness(self) -> dict[str, Any]:
        """What runs; images of compared steps are not among those that the rank was asked to train on."""
        seen = super().witness()
        return {**seen, "images": seen["images"] - self.compared_images}

    def _reference(self, exact: Trainer, batch: Batch) -> tuple[float, dict[str, Tensor]]:
        """Loss and gradients by name of the global ``batch`` at this trainer's weights."""
        allow_tf32(False)
        restore(exact.network, self.parameters)
        exact.optimizer.zero_grad()
        loss = exact.loss(batch, slice(0, len(batch.images)))
        loss.backward()  # type: ignore[no-untyped-call]
        allow_tf32(self.config.precision == "tf32")
        named = exact.network.named_parameters()
        return float(loss.detach()), {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}

    def _between_ranks(self) -> float | None:
        """The largest distance of a rank's gradient from rank 0's; None if one is no number. Every rank has to ask."""
        if self.context.world_size == 1:
            return 0.0
        mine = torch.cat([g.reshape(-1) for g in self.gradient or [torch.zeros_like(p) for p in self.parameters]])
        first = mine.clone()
        dist.broadcast(first, src=0)
        error = (mine - first).double().norm() / first.double().norm().clamp(min=1e-300)
        error = torch.where(error.isfinite(), error, torch.inf)
        dist.all_reduce(error, dist.ReduceOp.MAX)
        return float(error) if error.isfinite() else None


def compared(gradient: Sequence[Tensor] | None, reference: Mapping[str, Tensor]) -> dict[str, Any]:
    """A gradient against its reference, layer by layer in the same order, in double precision.

    Returns ``gradient_error``, the L2 norm of the difference over that of the reference, of the whole gradient;
    ``worst_layer`` (``name``, ``error``) of those whose gradient is not negligible; ``nonfinite``, how many values are,
    also of the reference where the weights are. All but the last are None where there are such values, or no gradient.
    """
    nonfinite = sum(int((~g.isfinite()).sum()) for g in (*gradient, *reference.values())) if gradient else 0
    if nonfinite or gradient is None:
        return {"gradient_error": None, "worst_layer": None, "nonfinite": nonfinite}
    pairs = [(g.double().reshape(r.shape), r.double()) for g, r in zip(gradient, reference.values(), strict=True)]
    squares = torch.tensor(
        [[float((g - r).square().sum()), float(r.square().sum())] for g, r in pairs], dtype=torch.float64
    )
    least, (off, whole) = NEGLIGIBLE**2 * float(squares[:, 1].max()), squares.sum(0).tolist()
    errors = {name: math.sqrt(o / w) for name, (o, w) in zip(reference, squares.tolist(), strict=True) if w > least}
    worst = max(errors.items(), key=operator.itemgetter(1), default=None)
    worst_layer = worst and {"name": worst[0], "error": worst[1]}
    return {"gradient_error": math.sqrt(off / whole) if whole else None, "worst_layer": worst_layer, "nonfinite": 0}


gradient_check = GradientCheck
"""The workload, as configurations name it."""
