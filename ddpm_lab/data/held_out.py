"""The held-out part of a data set: which images no run ever trains on, and a hash that names data and split."""

import hashlib
import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ddpm_lab.data.folder import DataError

__all__ = ["HELD_OUT_FRACTION", "MAX_HELD_OUT", "Split", "content_hash", "split"]

HELD_OUT_FRACTION = 0.05
MAX_HELD_OUT = 2_500


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Sorted positions of images that are held out, and of those left out of training as their duplicates."""

    held_out: tuple[int, ...]
    unused: tuple[int, ...] = ()


def split(images: npt.NDArray[np.uint8], held_out_start: int | None) -> Split:
    """Choose the held-out images of ``images``, uint8 (N, S, S, 3).

    With ``held_out_start`` the images from there on are held out, and an image before it that equals one of them is
    not trained on. Without, images are taken in the order of a hash of their pixels, equal ones together, as far as
    they fit into 5 % of all, at least 1 and at most 2,500. So duplicates fall on one side, and the choice depends on
    the images, not on their names or order.

    Raises:
        DataError: nothing would be left to train on or to hold out.
    """
    digests = [hashlib.blake2b(image.data, digest_size=16).digest() for image in images]
    if held_out_start is not None:
        held_out_digests = set(digests[held_out_start:])
        unused = tuple(i for i, digest in enumerate(digests[:held_out_start]) if digest in held_out_digests)
        if len(unused) == held_out_start:
            raise DataError("every training image is also in the held-out folder; give two folders that differ")
        return Split(held_out=tuple(range(held_out_start, len(digests))), unused=unused)
    groups: dict[bytes, list[int]] = {}
    for position, digest in enumerate(digests):
        groups.setdefault(digest, []).append(position)
    if len(groups) < 2:
        raise DataError(f"all {len(digests):,} images are equal, so none can be held out; give at least 2 that differ")
    limit = min(MAX_HELD_OUT, max(1, round(HELD_OUT_FRACTION * len(digests))))
    chosen: list[int] = []
    for _, group in sorted(groups.items()):
        if len(chosen) + len(group) <= limit:
            chosen += group
    if not chosen:  # only groups larger than the share: the smallest, so that there is a held-out part at all
        chosen = min((group for _, group in sorted(groups.items())), key=len)
        if len(chosen) > MAX_HELD_OUT:
            raise DataError(
                f"each image occurs more than {MAX_HELD_OUT:,} times, so none can be held out; remove copies"
            )
    return Split(held_out=tuple(sorted(chosen)))


def content_hash(images: npt.NDArray[np.uint8], chosen: Split) -> str:
    """SHA-256 over shape, pixels in order, and split."""
    header = json.dumps({"shape": images.shape, "held_out": chosen.held_out, "unused": chosen.unused})
    digest = hashlib.sha256(header.encode())
    for start in range(0, len(images), 1_000):
        digest.update(np.ascontiguousarray(images[start : start + 1_000]).data)
    return digest.hexdigest()
