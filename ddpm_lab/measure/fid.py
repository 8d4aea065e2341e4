"""The FID of images, in a process of its own, so that what it needs is no part of the code that trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.group import Group, Limits
from ddpm_lab.plan import Fid

FID = "ddpm_lab.training.fid:fid"
SILENCE_SECONDS = 600.0


def distance(
    fid: Fid,
    generated: Path,
    *,
    data: str,
    device: str,
    threads: int,
    cache: Path | None = None,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """FID of the images in ``generated``, a .npy file of uint8 (N, S, S, 3), against training images of ``data``.

    What was found of the training images is kept in ``cache``. Returns the value with the counts of both sides, the
    SHA-256 of the Inception's weights and the packages' versions. Raises GroupFailed.
    """
    options = (("inception", fid.inception), ("sha256", fid.sha256))
    config = RunConfig(workload=FID, device=device, data=data, options=options)
    how: dict[str, Any] = {"limits": Limits(build_seconds=SILENCE_SECONDS)}
    with Group(config, threads=threads, modules={}, environment={}, progress=progress, **how) as group:
        asked = {"generated": str(generated), "count": fid.images, "cache": str(cache) if cache else None}
        found: dict[str, Any] = group.call("distance", SILENCE_SECONDS, **asked)[0]
        group.finish()
    return {**found, "inception_sha256": fid.sha256}
