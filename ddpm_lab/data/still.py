"""A loader that has nothing to do: one batch lies ready and is handed out at every step."""

from dataclasses import replace
from typing import Self

import torch

from ddpm_lab.data.loader import Batch, PackedLoader, Plan
from ddpm_lab.data.prepared import PackedImages

__all__ = ["StillLoader"]


class StillLoader:
    """Gives the plan's first batch again and again, from the memory of the device that trains.

    What is left of a step's time is the step with perfect data, for what waiting for data costs; what is learned from
    one batch is of no use.
    """

    kind = "still"
    prefetch_batches = 0

    def __init__(
        self, packed: PackedImages, plan: Plan, *, device: torch.device | str = "cpu", channels_last: bool = False
    ) -> None:
        first = next(PackedLoader(packed, plan, channels_last=channels_last))
        self._batch = replace(first, images=first.images.to(device))

    def __iter__(self) -> Self:
        """Return itself: a loader goes on where it stopped."""
        return self

    def __next__(self) -> Batch:
        """Give the same images, as the batch of the next step."""
        batch = self._batch
        self._batch = replace(batch, step=batch.step + 1)
        return batch

    def live_workers(self) -> int:
        """Return 0: there are none."""
        return 0

    def close(self) -> None:
        """Nothing to end."""
