"""Read prepared folders: images decoded once into a memory-mapped array, and a manifest that says what they are.

A prepared folder holds ``images.npy`` (uint8, N x S x S x 3), ``files.json`` (where each image came from) and
``manifest.json``, which is written last and removed first: a folder without it is not finished. Archives and synthetic
images are unpacked into ``images/`` inside it.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpm_lab.data.folder import DataError

__all__ = [
    "FILES",
    "IMAGES",
    "MANIFEST",
    "SCHEMA",
    "Manifest",
    "PackedImages",
    "is_prepared",
    "open_packed",
    "read_manifest",
]

SCHEMA = 1
MANIFEST, IMAGES, FILES = "manifest.json", "images.npy", "files.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a prepared folder holds.

    ``content_hash`` is SHA-256 over shape, pixels in order and split, so it names the data wherever it lies.
    ``fingerprint`` covers names, sizes and times of the source files and the options: while it stays, so does the rest.
    ``held_out_indices`` are never trained on; ``unused_indices`` are training images equal to one of a held-out
    folder; ``skipped`` lists the lines that name each damaged file left out.
    """

    schema: int
    kind: str  # folder, archive, synthetic
    source: str
    held_out_source: str | None
    shape: tuple[int, int, int, int]
    content_hash: str
    fingerprint: str
    decoding: str
    held_out_indices: tuple[int, ...]
    unused_indices: tuple[int, ...]
    skipped: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of images, held-out ones included."""
        return self.shape[0]

    @property
    def image_size(self) -> int:
        """Side of the square images in pixels."""
        return self.shape[1]

    @property
    def train_count(self) -> int:
        """Number of images in an epoch."""
        return self.count - len(self.held_out_indices) - len(self.unused_indices)

    def describe(self) -> str:
        """Return one line for a person: counts, size, and what was left out."""
        parts = [
            f"{self.count:,} images of {self.image_size}x{self.image_size}",
            f"{self.train_count:,} to train on",
            f"{len(self.held_out_indices):,} held out",
        ]
        if self.unused_indices:
            parts.append(f"{len(self.unused_indices):,} left out of training as equal to a held-out image")
        if self.skipped:
            parts.append(f"{len(self.skipped):,} damaged files left out")
        return ", ".join(parts)

    def to_json(self) -> str:
        """Write as one JSON object, with ``count`` for readers that know nothing of the rest."""
        return json.dumps({"count": self.count, **asdict(self)}, indent=1) + "\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedImages:
    """An opened prepared folder. ``images`` is read-only and mapped: uint8 (N, S, S, 3); indices are sorted int64."""

    dest: Path
    manifest: Manifest
    images: np.memmap[Any, np.dtype[np.uint8]]
    train_indices: npt.NDArray[np.int64]
    held_out_indices: npt.NDArray[np.int64]

    @property
    def files(self) -> tuple[str, ...] | None:
        """Absolute path of the file behind each image, or None where one is gone or has changed since.

        Looks at every file: about 0.2 s for 50,000.
        """
        listing = json.loads((self.dest / FILES).read_text())
        paths: list[str] = []
        for part in listing:
            root = str(self.dest / part["root"])  # an absolute root stands for itself
            for name, size_bytes, mtime_ns in part["files"]:
                path = f"{root}/{name}"
                try:
                    status = os.stat(path)  # noqa: PTH116 - plain strings are faster
                except OSError:
                    return None
                if (status.st_size, status.st_mtime_ns) != (size_bytes, mtime_ns):
                    return None
                paths.append(path)
        return tuple(paths)


def is_prepared(path: Path) -> bool:
    """Whether ``path`` is a finished prepared folder, of this schema or another."""
    return (path / MANIFEST).is_file() and (path / IMAGES).is_file()


def read_manifest(dest: Path) -> Manifest:
    """Read the manifest of a prepared folder.

    Raises:
        DataError: there is none, or it is of another schema or unreadable.
    """
    try:
        values = json.loads((dest / MANIFEST).read_text())
    except OSError:
        raise DataError(f"{dest} is not a prepared folder; make it with: ddpm-lab prepare SOURCE {dest}") from None
    except ValueError:
        raise DataError(f"{dest / MANIFEST} is damaged; delete {dest} and prepare it again") from None
    if not isinstance(values, dict) or values.get("schema") != SCHEMA:
        raise DataError(f"{dest} was prepared by another version of ddpm_lab; delete it and prepare it again")
    try:
        known = {field.name: values[field.name] for field in fields(Manifest)}
        known = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
        return Manifest(**known)
    except KeyError as error:
        raise DataError(f"{dest / MANIFEST} has no {error}; delete {dest} and prepare it again") from None


def open_packed(dest: Path) -> PackedImages:
    """Open a prepared folder for reading, also while another process rebuilds it.

    Raises:
        DataError: ``dest`` is not a finished prepared folder of this version, or its array does not fit its manifest.
    """
    dest = Path(dest).absolute()
    while True:
        manifest = read_manifest(dest)
        try:
            images = np.load(dest / IMAGES, mmap_mode="r")
            # A rebuild removes the manifest before it replaces the array: the same manifest, before and after, means
            # that the array between them is its own.
            if read_manifest(dest) != manifest:
                continue
        except (OSError, ValueError) as error:
            raise DataError(f"{dest / IMAGES} cannot be opened ({error}); prepare it again") from error
        break
    if images.shape != manifest.shape or images.dtype != np.uint8:
        raise DataError(f"{dest / IMAGES} does not fit its manifest; delete {dest} and prepare it again")
    held_out = np.array(manifest.held_out_indices, dtype=np.int64)
    in_training = np.ones(manifest.count, dtype=bool)
    in_training[held_out] = False
    in_training[np.array(manifest.unused_indices, dtype=np.int64)] = False
    return PackedImages(
        dest=dest,
        manifest=manifest,
        images=images,
        train_indices=np.flatnonzero(in_training),
        held_out_indices=held_out,
    )
