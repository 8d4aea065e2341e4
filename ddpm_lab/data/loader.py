"""Two loaders that give the same batches: one gathers from the packed array, one decodes file by file in workers."""

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from ddpm_lab.data.dataset_loader import DatasetLoader
from ddpm_lab.data.draws import EpochStream, rank_share
from ddpm_lab.data.folder import DataError, decode
from ddpm_lab.data.pixels import ModelRange, PixelRows
from ddpm_lab.data.prepared import PackedImages
from ddpm_lab.data.uploads import CudaUploads, Upload

__all__ = ["Batch", "FileLoader", "Loader", "PackedLoader", "Plan"]

BLOCK_POSITIONS = 4096
Draws = tuple[int, npt.NDArray[np.int64], npt.NDArray[np.bool_]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Which part of which global batches a loader gives: those of one rank, from ``start_step`` on, without end.

    Raises:
        ValueError: the batch cannot be divided evenly, or there is no such rank.
    """

    stream: EpochStream
    global_batch_size: int
    rank: int = 0
    world_size: int = 1
    start_step: int = 0

    def __post_init__(self) -> None:
        rank_share(self.global_batch_size, self.rank, self.world_size)

    def blocks(self) -> Iterator[Draws]:
        """Give a step and, for k steps from it on, image indices and whether to mirror them, both (k, n), without end.

        k is as large as thousands of positions allow, and at most an epoch: to begin a draw costs more than to make it.
        """
        size = self.global_batch_size
        share = rank_share(size, self.rank, self.world_size)
        steps = max(1, min(BLOCK_POSITIONS, self.stream.epoch_size) // size)
        step = self.start_step
        while True:
            start, stop = step * size, (step + steps) * size
            indices = self.stream.indices(start, stop).reshape(steps, size)[:, share.start : share.stop]
            flips = self.stream.flips(start, stop).reshape(steps, size)[:, share.start : share.stop]
            yield step, indices, flips
            step += steps

    def draws(self) -> Iterator[Draws]:
        """Give each step with its image indices and whether to mirror them, both (n,), without end."""
        for step, indices, flips in self.blocks():
            yield from zip(itertools.count(step), indices, flips, strict=False)

    @property
    def rank_batch_size(self) -> int:
        """Images of a batch that belong to this rank, n."""
        return self.global_batch_size // self.world_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's part of a global batch: float32 (n, 3, S, S) in [-1, 1], and the image indices it was made from.

    The images lie on the device that the loader serves, or in the host's memory.
    """

    images: torch.Tensor
    indices: npt.NDArray[np.int64]
    step: int


class Loader(Protocol):
    """An endless iterator over batches.

    ``kind`` is its name among the settings. ``prefetch_batches`` is how many batches may be ready before they are asked
    for: what a timed window must consume first so that it does not profit from time before it.
    """

    kind: str
    prefetch_batches: int

    def __iter__(self) -> Iterator[Batch]:
        """Return itself: a loader goes on where it stopped."""
        ...

    def __next__(self) -> Batch:
        """Give the batch of the next step."""
        ...

    def live_workers(self) -> int:
        """Return the number of loader worker processes that are alive now."""
        ...

    def close(self) -> None:
        """End the workers and wait for them."""
        ...


class PackedLoader:
    """Gathers, mirrors and scales whole batches from the packed array, in the training process itself.

    For a CUDA device the next batch is gathered and sent while the device works on the one before, so one batch may be
    ready before it is asked for. On a CPU none is.

    Raises:
        IndexError: the plan names an image that the array does not hold.
    """

    kind = "packed"

    def __init__(
        self, packed: PackedImages, plan: Plan, *, device: torch.device | str = "cpu", channels_last: bool = False
    ) -> None:
        side = packed.manifest.image_size
        device = torch.device(device)
        self._rows = PixelRows(packed.images)
        self._rows_of_steps = self._numbered(plan)
        self._scale = ModelRange(side, channels_last=channels_last)
        self._uploads: CudaUploads | None = None
        self.prefetch_batches = 0
        if device.type == "cuda":
            self._uploads = CudaUploads(device, plan.rank_batch_size, side, channels_last=channels_last)
            self._coming: tuple[Upload, npt.NDArray[np.int64], int] | None = None
            self.prefetch_batches = 1

    def _numbered(self, plan: Plan) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Steps, image indices and rows."""
        for step, indices, flips in plan.blocks():
            yield from zip(itertools.count(step), indices, self._rows.numbers(indices, flips), strict=False)

    def __iter__(self) -> Self:
        """Return itself: a loader goes on where it stopped."""
        return self

    def __next__(self) -> Batch:
        """Give the batch of the next step."""
        if self._uploads is not None:
            return self._sent_ahead(self._uploads)
        step, indices, numbers = next(self._rows_of_steps)
        pixels = torch.from_numpy(self._rows.gather(numbers))
        return Batch(images=self._scale(pixels), indices=indices, step=step)

    def _sent_ahead(self, uploads: CudaUploads) -> Batch:
        upload, indices, step = self._coming or self._send(uploads)
        self._coming = self._send(uploads)
        return Batch(images=uploads.receive(upload), indices=indices, step=step)

    def _send(self, uploads: CudaUploads) -> tuple[Upload, npt.NDArray[np.int64], int]:
        step, indices, numbers = next(self._rows_of_steps)
        self._rows.gather(numbers, uploads.buffer())
        return uploads.send(), indices, step

    def live_workers(self) -> int:
        """Return 0: there are none."""
        return 0

    def close(self) -> None:
        """Nothing to end."""


class FileLoader:
    """Decodes each image from its file, in ``workers`` processes (0: in the training process), as is usual.

    Raises:
        DataError: the files that the prepared folder was made from are gone or have changed.
        ValueError: ``workers`` is negative.
    """

    kind = "files"

    def __init__(
        self,
        packed: PackedImages,
        plan: Plan,
        *,
        workers: int,
        pin_memory: bool = False,
        channels_last: bool = False,
    ) -> None:
        files = packed.files
        if files is None:
            raise DataError(
                f"the files that {packed.dest} was prepared from are gone or have changed ({packed.manifest.source}); "
                "put them back, prepare them again, or use the packed loader"
            )
        self._step = plan.start_step
        self._batches = DatasetLoader(
            _Files(files, packed.manifest.image_size),
            _PlannedBatches(plan),
            workers=workers,
            collate=_Collate(packed.manifest.image_size, channels_last),
            pin_memory=pin_memory,
        )
        self.prefetch_batches = self._batches.prefetch_batches

    def __iter__(self) -> Self:
        """Return itself: a loader goes on where it stopped."""
        return self

    def __next__(self) -> Batch:
        """Give the batch of the next step."""
        images, indices = next(self._batches)
        batch = Batch(images=images, indices=indices.numpy(), step=self._step)
        self._step += 1
        return batch

    def live_workers(self) -> int:
        """Return the number of loader worker processes that are alive now."""
        return self._batches.live_workers()

    def close(self) -> None:
        """End the workers and wait for them."""
        self._batches.close()


class _PlannedBatches:
    """Lists of (image index, whether to mirror it), one list for each step, without end."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[list[tuple[int, bool]]]:
        for _, indices, flips in self._plan.draws():
            yield list(zip(indices.tolist(), flips.tolist(), strict=True))


class _Files(Dataset[tuple[npt.NDArray[np.uint8], int]]):
    """Decodes one file, as often as it is asked to."""

    def __init__(self, files: tuple[str, ...], image_size: int) -> None:
        # One bytes object instead of many strings: reading a string writes its reference count, which would copy the
        # shared pages into every forked worker.
        encoded = [os.fsencode(path) for path in files]
        self._ends = np.cumsum([len(path) for path in encoded])
        self._paths = b"".join(encoded)
        self._image_size = image_size

    def __getitem__(self, key: tuple[int, bool]) -> tuple[npt.NDArray[np.uint8], int]:
        index, flip = key
        start = self._ends[index - 1] if index else 0
        pixels = decode(os.fsdecode(self._paths[start : self._ends[index]]), self._image_size)
        return (pixels[:, ::-1] if flip else pixels), index


class _Collate:
    """Stacks decoded images into a batch, in the worker that decoded them."""

    def __init__(self, side: int, channels_last: bool) -> None:
        self._scale = ModelRange(side, channels_last=channels_last)

    def __call__(self, samples: list[tuple[npt.NDArray[np.uint8], int]]) -> tuple[torch.Tensor, torch.Tensor]:
        pixels = torch.from_numpy(np.stack([pixels for pixels, _ in samples])).flatten(1)
        return self._scale(pixels), torch.tensor([index for _, index in samples])
