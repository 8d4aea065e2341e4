"""What trials drew, and how far that is from the training images: pixels and FIDs out of records."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ddpm_lab.record import RunRecord

LEAST = 2_049
"""Images with which the covariance of Inception's 2,048 features can have its full rank."""
FEW = f"with fewer than {LEAST:,} images the covariance is singular, and the FID too rough to compare"

Pixels = npt.NDArray[np.uint8]


def drawn(record: RunRecord) -> Mapping[str, Any]:
    """What a record says of the images that its trial drew; empty where it drew none."""
    found: Mapping[str, Any] = (record.quality or {}).get("samples") or {}
    return found


def pixels(record: RunRecord) -> Pixels:
    """The images (N, S, S, 3) that a trial drew, which are kept in one row."""
    row = np.asarray(Image.open(io.BytesIO(base64.urlsafe_b64decode(drawn(record)["png"]))).convert("RGB"))
    side = row.shape[0]
    return row.reshape(side, -1, side, 3).swapaxes(0, 1)


def fid(records: Sequence[RunRecord]) -> Mapping[str, Any] | None:
    """The FID of one of these trials, with its counts, or the reason why it failed; None where none was asked for."""
    asked = (((r.quality or {}).get("fid") or {}) for r in records)
    return next((found for found in asked if found), None)


def fid_words(found: Mapping[str, Any]) -> str:
    """A FID with the number of images it is of: ``12.3 (2,500 images)``."""
    if "fid" not in found:
        return "failed"
    few = ", too few" if found["images"] < LEAST else ""
    return f"{found['fid']:.{1 if found['fid'] >= 10 else 2}f} ({found['images']:,} images{few})"


def fid_method(known: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """How FIDs by label were measured, why any failed, and whether they are of too few images."""
    first = known[0][1]
    text = f"against as many training images, with the first seed, by DDIM in {first['steps']} steps; "
    text += f"Inception {first['inception_sha256'][:8]}"
    text += "".join(f"; {label} failed ({f.get('reason', 'unpublished')})" for label, f in known if "fid" not in f)
    return f"{text}; {FEW}" if any(found["images"] < LEAST for _, found in known) else text
