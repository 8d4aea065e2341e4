"""From stored pixels to what a training step consumes: gather, mirror and scale, in few passes over the data.

Pixels of n images are uint8 (n, 3 S S): each row is an image in the order S, S, 3, as it is stored.
"""

import numpy as np
import numpy.typing as npt
import torch

COPY_BYTES = 512 * 2**20
"""Memory for a copy of a set with its mirrored images, 87,000 of 32x32: to mirror takes longer than all the rest."""


class ModelRange:
    """Maps pixels to the range of the network, x / 127.5 - 1: 0 becomes -1 and 255 becomes 1.

    Division and subtraction are rounded each for itself, on every kind of device, so that all give the same bits; a
    number as the divisor would be a product with its inverse on a GPU. Both happen in one pass.
    """

    def __init__(self, side: int, channels_last: bool, device: torch.device | str = "cpu") -> None:
        self._side = side
        self._channels_last = channels_last
        self._minus_one = torch.tensor(-1.0, dtype=torch.float32, device=device)
        # As long as a row: torch has no vectorised division of a tensor by one number within this operation.
        self._divisor = torch.full((3 * side * side,), 127.5, dtype=torch.float32, device=device)

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """Map pixels, uint8 (n, 3 S S), to float32 (n, 3, S, S) in the memory format given at the start."""
        count, side = len(pixels), self._side
        if not self._channels_last:
            pixels = pixels.view(count, side * side, 3).transpose(1, 2).reshape(count, -1)
        values = pixels.float()
        torch.addcdiv(self._minus_one, values, self._divisor, out=values)
        if self._channels_last:
            return values.as_strided((count, 3, side, side), (3 * side * side, 1, 3 * side, 3))
        return values.view(count, 3, side, side)


class PixelRows:
    """The images of an array, which may be a map of a file, each as it is or mirrored left to right.

    Image i of uint8 (N, S, S, 3) is row i, and mirrored it is row i + N, whether or not it is stored there: where both
    together take more than ``COPY_BYTES`` nothing is copied, and images are mirrored as they are asked for.
    """

    def __init__(self, images: npt.NDArray[np.uint8]) -> None:
        self._count, self._side = images.shape[:2]
        self._rows = np.asarray(images).reshape(self._count, -1)  # of a map only its memory, not its bookkeeping
        self.width = self._rows.shape[1]
        self._both = 2 * self._rows.nbytes <= COPY_BYTES
        if self._both:
            self._rows = np.concatenate([self._rows, self._rows])
            for start in range(self._count, 2 * self._count, 1_000):
                self._rows[start : start + 1_000] = mirrored(self._rows[start : start + 1_000], self._side)

    def numbers(self, indices: npt.NDArray[np.int64], flips: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """The rows of the images ``indices``, mirrored where ``flips``; the shapes are equal.

        Raises:
            IndexError: there is no such image.
        """
        if indices.min() < 0 or indices.max() >= self._count:
            raise IndexError(f"image {indices.max()} of {self._count} is asked for: use the plan of this set")
        rows: npt.NDArray[np.int64] = indices + self._count * flips
        return rows

    def gather(self, numbers: npt.NDArray[np.int64], out: npt.NDArray[np.uint8] | None = None) -> npt.NDArray[np.uint8]:
        """Copy the rows ``numbers``, (n,), into ``out`` or a new array, (n, 3 S S)."""
        if self._both:
            return self._rows.take(numbers, axis=0, out=out, mode="clip")  # with "raise" numpy would copy twice
        pixels = self._rows.take(numbers % self._count, axis=0, out=out, mode="clip")
        where = (numbers >= self._count).nonzero()[0]
        if len(where):
            pixels[where] = mirrored(pixels[where], self._side)
        return pixels


def mirrored(pixels: npt.NDArray[np.uint8], side: int) -> npt.NDArray[np.uint8]:
    """The images of ``pixels``, a writable uint8 (n, 3 S S), mirrored left to right."""
    images = torch.from_numpy(pixels).view(len(pixels), side, side, 3).permute(0, 3, 1, 2)
    # In this layout torch mirrors with vector instructions.
    rows: npt.NDArray[np.uint8] = images.flip(3).permute(0, 2, 3, 1).reshape(len(pixels), -1).numpy()
    return rows
