"""The Fréchet inception distance of images (Heusel et al. 2017), by torchmetrics and the Inception of torch-fidelity.

Its weights are a local file; nothing is downloaded. What a FID needs is checked beforehand by ``plan_fid``.
"""

import hashlib
import importlib.util
import io
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ddpm_lab import plan
from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.data.packed import Manifest, open_packed
from ddpm_lab.diffusion.step import Untrained, allow_tf32
from ddpm_lab.files import expanded
from ddpm_lab.workload import RankContext

PACKAGES = ("torchmetrics", "torch_fidelity")
INSTALL = "make fid, or pip install torchmetrics torch-fidelity"
WEIGHTS = "weights-inception-2015-12-05-6726825d.pth"
FEATURES = 2048
_BATCH, _SEED = 32, 17_060_850

Pixels = npt.NDArray[np.uint8]


def plan_fid(inception: str, images: int, manifest: Manifest | None) -> plan.Fid:
    """A FID of so many images, with the weights in the file ``inception``.

    Raises ConfigError where a package or the file is missing, the file holds anything else, or the data has fewer
    images to train on.
    """
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"a FID needs {package}, which is not installed: {INSTALL}")
    file = expanded(inception).absolute()
    if not file.is_file():
        raise ConfigError(
            f"inception is {inception!r}: there is no such file; give that of torch-fidelity's Inception, {WEIGHTS} "
            "(nothing is downloaded)"
        )
    sha256 = _sha256(file)
    if manifest is not None and images > manifest.train_count:
        raise ConfigError(
            f"a FID of {images:,} images needs as many training images, and the data has {manifest.train_count:,}: "
            "give at most that"
        )
    return plan.Fid(inception=str(file), sha256=sha256, images=images)


@cache
def _sha256(file: Path) -> str:
    """SHA-256 of a file that holds the right weights. Raises ConfigError."""
    try:
        found = hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}; give another file as inception") from error
    inception_metric(file, found)
    return found


def inception_metric(path: Path, sha256: str) -> Any:
    """An empty ``FrechetInceptionDistance`` on the 2,048 pooled features of the Inception whose weights are in a file.

    Images are scaled to 299 pixels as torch-fidelity and the paper's code do it. Raises ConfigError for a file that
    holds other weights than those of torch-fidelity's Inception, or whose SHA-256 is not ``sha256``.
    """
    from torchmetrics.image.fid import FrechetInceptionDistance  # noqa: PLC0415 - optional, and seconds to import

    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ConfigError(f"{path} was changed while it was used: give the same command again")
    try:
        # torch-fidelity would run code that a file holds; what can be read as tensors alone holds none.
        torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
        stream: Any = io.BytesIO(content)
        return FrechetInceptionDistance(feature=FEATURES, feature_extractor_weights_path=stream, antialias=False)
    except Exception as error:  # as many kinds as there are ways to be another file
        raise ConfigError(
            f"{path} does not hold the weights of torch-fidelity's Inception: give its file, {WEIGHTS}"
        ) from error


class Fid(Untrained):
    """One process that holds the Inception, in fp32: the file and its ``sha256`` are options."""

    def __init__(self, config: RunConfig, context: RankContext) -> None:
        self.config, self.context = config, context
        self.device = torch.device(context.device)
        allow_tf32(False)
        torch.backends.cudnn.benchmark = True
        self.metric = inception_metric(Path(config.option("inception", "")), config.option("sha256", ""))
        self.metric.to(self.device)

    def distance(self, *, generated: str, count: int) -> dict[str, Any]:
        """FID of the first ``count`` images of a .npy file, uint8 (N, S, S, 3), against as many training images.

        Which training images these are depends on the data and ``count`` alone.
        """
        packages = {name: version(name) for name in ("torchmetrics", "torch-fidelity")}
        packed = open_packed(Path(self.config.data))
        chosen = np.random.default_rng(_SEED).permutation(packed.train_indices)[:count]
        images: Pixels = np.load(generated, mmap_mode="r")[:count]
        self._add(packed.images, np.sort(chosen), real=True)
        self._add(images, np.arange(len(images)), real=False)
        self.context.mark("distance")
        # The eigenvalues are those of a matrix that is not symmetric, for which GPUs have no fast method.
        value = float(self.metric.cpu().compute())
        return {"fid": value, "images": len(images), "training_images": len(chosen), "packages": packages}

    def _add(self, images: Pixels, indices: npt.NDArray[np.int64], *, real: bool) -> None:
        for start in range(0, len(indices), _BATCH):
            self.context.mark("training images" if real else "generated images")
            pixels: Tensor = torch.from_numpy(images[indices[start : start + _BATCH]]).permute(0, 3, 1, 2)
            self.metric.update(pixels.contiguous().to(self.device), real=real)
