"""What a FID needs: packages that are installed, a file of weights that is here, images enough; refused beforehand."""

from __future__ import annotations

import hashlib
import importlib.util
from functools import cache
from pathlib import Path

from ddpm_lab.checks import ConfigError, whole
from ddpm_lab.data.packed import Manifest
from ddpm_lab.files import expanded
from ddpm_lab.plan import Fid

PACKAGES = ("torchmetrics", "torch_fidelity")
INSTALL = "make fid, or pip install torchmetrics torch-fidelity"


def inception_sha256(path: str) -> str:
    """SHA-256 of a file that holds the weights of torch-fidelity's Inception.

    Raises ConfigError where a package or the file is missing, or it holds anything else.
    """
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"a FID needs {package}, which is not installed: {INSTALL}")
    file = expanded(path).absolute()
    if not file.is_file():
        raise ConfigError(
            f"inception is {path!r}: there is no such file; give that of torch-fidelity's Inception, "
            "weights-inception-2015-12-05-6726825d.pth (nothing is downloaded)"
        )
    return _checked(file)


@cache
def _checked(file: Path) -> str:
    from ddpm_lab.training.fid import inception_metric  # noqa: PLC0415 - torch only where a FID is asked for

    try:
        with file.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; give another file as inception") from error
    inception_metric(file, sha256)
    return sha256


def plan_fid(path: str, images: int, manifest: Manifest | None) -> Fid:
    """A FID of so many images. Raises ConfigError as above, and where there are fewer to train on in the data."""
    whole("fid_images", images, 2)
    sha256 = inception_sha256(path)
    if manifest is not None and images > manifest.train_count:
        raise ConfigError(
            f"a FID of {images:,} images needs as many training images, and the data has {manifest.train_count:,}: "
            "give at most that"
        )
    return Fid(inception=str(expanded(path).absolute()), sha256=sha256, images=images)
