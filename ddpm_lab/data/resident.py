"""A loader whose training set lies in the memory of the training device: batches are made where they are used."""

from collections.abc import Iterator
from typing import Self

import numpy as np
import numpy.typing as npt
import psutil
import torch

from ddpm_lab.data.loader import Batch, Plan
from ddpm_lab.data.pixels import ModelRange, mirrored
from ddpm_lab.data.prepared import PackedImages
from ddpm_lab.workload import Unsupported

__all__ = ["ResidentLoader"]

MIRROR_SHARE = 0.25
"""A set is also kept mirrored where both together take at most this part of the free memory."""
_COPY_BYTES = 64 * 2**20


class ResidentLoader:
    """Gathers, mirrors and scales batches on the device itself, from one array there of all the training images.

    All that is sent during training are row numbers, for many steps at once, by a copy that nothing waits for. No batch
    is ready before it is asked for: on a GPU the work for it is queued then.

    Raises:
        Unsupported: the training images do not fit into the device's free memory.
    """

    kind = "resident"
    prefetch_batches = 0

    def __init__(
        self, packed: PackedImages, plan: Plan, *, device: torch.device | str = "cpu", channels_last: bool = False
    ) -> None:
        self._device = torch.device(device)
        self._side = packed.manifest.image_size
        own = plan.stream.train_indices
        size, free = len(own) * 3 * self._side**2, _free_bytes(self._device)
        if size > free:
            raise Unsupported(
                f"the {len(own):,} training images take {_mib(size)} and {self._device} has {_mib(free)} free; "
                "use loader 'packed'"
            )
        self._count = len(own)
        self._both = 2 * size <= MIRROR_SHARE * free
        self._rows = self._load(packed, own)
        self._row_of = np.full(packed.manifest.count, -1)
        self._row_of[own] = np.arange(len(own))
        self._scale = ModelRange(self._side, channels_last=channels_last, device=self._device)
        self._batches = self._make(plan)

    def _load(self, packed: PackedImages, own: npt.NDArray[np.int64]) -> torch.Tensor:
        """The training images, uint8 (N, 3 S S), and after them, if there is room, the same mirrored."""
        source = np.asarray(packed.images).reshape(packed.manifest.count, -1)
        rows = torch.empty((1 + self._both) * len(own), source.shape[1], dtype=torch.uint8, device=self._device)
        step = max(1, _COPY_BYTES // source.shape[1])
        for start in range(0, len(own), step):
            part = source.take(own[start : start + step], axis=0)
            rows[start : start + len(part)] = torch.from_numpy(part)
            if self._both:
                rows[len(own) + start :][: len(part)] = torch.from_numpy(mirrored(part, self._side))
        return rows

    def _make(self, plan: Plan) -> Iterator[Batch]:
        for first, indices, flips in plan.blocks():
            # A mirrored image is row r + N, whether or not it is stored there.
            rows = torch.from_numpy(self._row_of[indices] + self._count * flips)
            if self._device.type == "cuda":
                # torch does not give the page-locked memory to anybody else before this copy has finished.
                rows = rows.pin_memory().to(self._device, non_blocking=True)
            turned = None if self._both else rows >= self._count
            if turned is not None:
                rows = rows % self._count
            for i, (chosen, own) in enumerate(zip(rows.unbind(), indices, strict=True)):
                pixels = self._rows.index_select(0, chosen)
                if turned is not None:
                    images = pixels.view(-1, self._side, self._side, 3)
                    pixels = torch.where(turned[i, :, None, None, None], images.flip(2), images).flatten(1)
                yield Batch(images=self._scale(pixels), indices=own, step=first + i)

    def __iter__(self) -> Self:
        """Return itself: a loader goes on where it stopped."""
        return self

    def __next__(self) -> Batch:
        """Give the batch of the next step."""
        return next(self._batches)

    def live_workers(self) -> int:
        """Return 0: there are none."""
        return 0

    def close(self) -> None:
        """Nothing to end."""


def _free_bytes(device: torch.device) -> int:
    """Memory that nobody uses: of the GPU, or of the host, whose file cache counts as free."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return int(free)


def _mib(size: float) -> str:
    return f"{size / 2**20:,.0f} MiB"
