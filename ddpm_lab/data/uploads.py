"""Copies of batches to a GPU that run beside training: page-locked buffers in turn, and a stream of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ddpm_lab.data.pixels import ModelRange

__all__ = ["BUFFERS", "Copy", "CudaUploads", "Rotation", "Upload"]

BUFFERS = 2
"""One batch is on its way while the next one is gathered."""


class Copy(Protocol):
    """A copy under way, such as a CUDA event recorded after it."""

    def synchronize(self) -> None:
        """Wait until it has finished."""
        ...


class Rotation:
    """Buffers in turn; none is given out again before the copy that reads it has finished."""

    def __init__(self, buffers: Sequence[torch.Tensor]) -> None:
        self._buffers = buffers
        self._copies: list[Copy | None] = [None] * len(buffers)
        self._turn = 0

    def take(self) -> torch.Tensor:
        """The buffer whose turn it is: the one whose copy began longest ago, and has now finished."""
        copy = self._copies[self._turn]
        if copy is not None:
            copy.synchronize()
        return self._buffers[self._turn]

    def sent(self, copy: Copy) -> None:
        """Note the copy that reads the buffer whose turn it is, and go on to the next."""
        self._copies[self._turn] = copy
        self._turn = (self._turn + 1) % len(self._buffers)


@dataclass(frozen=True, slots=True)
class Upload:
    """A batch on its way: float32 (n, 3, S, S) on the device, and what is ``ready`` when it has arrived."""

    images: torch.Tensor
    ready: Any


class CudaUploads:
    """Sends pixels to a CUDA device and scales them there, on a stream beside the one that trains.

    Pixels travel as bytes: a quarter of what they are as floating point.
    """

    def __init__(self, device: torch.device, batch_size: int, side: int, *, channels_last: bool) -> None:
        self._device = device
        # Urgent, so that scaling does not queue behind a network that fills the device.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._scale = ModelRange(side, channels_last=channels_last, device=device)
        # The constants of the scaling were written on the stream that is current now.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._rotation = Rotation(
            [torch.empty(batch_size, 3 * side * side, dtype=torch.uint8, pin_memory=True) for _ in range(BUFFERS)]
        )

    def buffer(self) -> npt.NDArray[np.uint8]:
        """Where to put the next batch of pixels, uint8 (n, 3 S S); free to be written."""
        buffer: npt.NDArray[np.uint8] = self._rotation.take().numpy()
        return buffer

    def send(self) -> Upload:
        """Begin to copy what ``buffer`` gave; the host does not wait."""
        pinned = self._rotation.take()
        with torch.cuda.stream(self._stream):
            pixels = pinned.to(self._device, non_blocking=True)
            self._rotation.sent(self._stream.record_event())
            images = self._scale(pixels)
            return Upload(images, self._stream.record_event())

    def receive(self, upload: Upload) -> torch.Tensor:
        """The batch, for use on the current stream, which waits for it; the host does not."""
        current = torch.cuda.current_stream(self._device)
        current.wait_event(upload.ready)
        # The memory belongs to the other stream, which must not use it again before this one has done with it.
        upload.images.record_stream(current)
        return upload.images
