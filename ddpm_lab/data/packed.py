"""Make prepared folders: turn a folder of images, an archive or the synthetic set into a mapped array, once.

``prepared`` describes what such a folder holds and reads it; its names are offered here too.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ddpm_lab.data import archives, synthetic
from ddpm_lab.data.decode_pool import decode_files
from ddpm_lab.data.folder import DECODING_RULE, DataError, ImageFile, fingerprint, list_images
from ddpm_lab.data.held_out import content_hash, split
from ddpm_lab.data.prepared import (
    FILES,
    IMAGES,
    MANIFEST,
    SCHEMA,
    Manifest,
    PackedImages,
    is_prepared,
    open_packed,
    read_manifest,
)
from ddpm_lab.data.progress import Progress
from ddpm_lab.files import expanded

__all__ = ["DataError", "Manifest", "PackedImages", "is_prepared", "open_packed", "prepare", "resolve"]

SYNTHETIC = "synthetic"
LOCK = ".ddpm-lab.lock"  # also marks a folder as ours to rebuild
UNPACKED = "images"
PARTIAL = ".partial"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """Everything that decides the content of a prepared folder."""

    kind: str
    source: Path  # Path("synthetic") for the synthetic set
    image_size: int
    held_out: Path | None
    skip_bad: bool

    def options(self) -> list[object]:
        held_out = str(self.held_out) if self.held_out else None
        return [SCHEMA, self.kind, str(self.source), self.image_size, held_out, self.skip_bad, DECODING_RULE]


def prepare(
    source: str | Path,
    dest: str | Path,
    *,
    image_size: int = 32,
    held_out: str | Path | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Decode ``source`` into the prepared folder ``dest``; return at once when it is there and still fits.

    Args:
        source: a folder of PNG and JPEG images, ``train.7z``, ``cifar-10-python.tar.gz``, or ``"synthetic"``.
        dest: a folder that does not exist, is empty, or was prepared before. Several processes may prepare the same
            one at once: one works, the others wait and use its result. A build that is killed leaves nothing that
            looks finished.
        image_size: side S of the square images in pixels.
        held_out: a folder of images never to train on; without it, a part of ``source`` is chosen (``packed.split``).
        skip_bad: leave damaged files out and list them in the manifest, instead of stopping at the first.
        progress: called with a line of text about once a second.

    Raises:
        DataError: the source or destination cannot be used; one sentence says which, why and what to do.
    """
    dest = Path(dest).absolute()
    job = _job(source, image_size, held_out, skip_bad)
    try:
        _check_dest(job, dest)
        with _locked(dest, progress):
            return _prepare_locked(job, dest, progress)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise DataError(f"cannot prepare {dest}: {error.strerror or error}{where}; choose another place") from error


def resolve(
    source: str | Path,
    cache: str | Path,
    *,
    image_size: int = 32,
    held_out: str | Path | None = None,
    skip_bad: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return the prepared folder for ``source``, which may be one itself; otherwise prepare it inside ``cache``.

    The folder in ``cache`` is named by a hash of the source's path and the options, so that each combination has its
    own. The other arguments and errors are those of ``prepare``.
    """
    path = expanded(source)
    if str(source) != SYNTHETIC and is_prepared(path):
        manifest = read_manifest(path)
        if manifest.image_size != image_size:
            raise DataError(
                f"{path} was prepared with images of {manifest.image_size}x{manifest.image_size}, not "
                f"{image_size}x{image_size}; prepare its source again with image size {image_size}"
            )
        if held_out is not None:
            raise DataError(f"{path} is prepared and has its held-out part; give --held-out when preparing it")
        return path.absolute()
    job = _job(source, image_size, held_out, skip_bad)
    name = hashlib.sha256(json.dumps(job.options()).encode()).hexdigest()[:12]
    dest = Path(cache) / f"{job.kind}-{name}"
    prepare(source, dest, image_size=image_size, held_out=held_out, skip_bad=skip_bad, progress=progress)
    return dest.absolute()


def _job(source: str | Path, image_size: int, held_out: str | Path | None, skip_bad: bool) -> _Job:
    if image_size < 1:
        raise DataError(f"image size {image_size} is not a number of pixels; give at least 1")
    if str(source) == SYNTHETIC:
        kind, path = "synthetic", Path(SYNTHETIC)
    else:
        path = expanded(source).absolute()
        kind = "archive" if archives.is_archive(path) and not path.is_dir() else "folder"
        if not path.exists():
            raise DataError(f"no such data: {path}; give a folder of images, an archive, or 'synthetic'")
        if kind == "folder" and path.is_file():
            kinds = ", ".join(archives.ARCHIVE_SUFFIXES)
            raise DataError(
                f"{path} is neither a folder nor an archive ({kinds}); give the folder that holds the images"
            )
        if is_prepared(path):
            raise DataError(f"{path} is already prepared; use it as it is, or prepare its source again")
    held_out_path = expanded(held_out).absolute() if held_out is not None else None
    return _Job(kind=kind, source=path, image_size=image_size, held_out=held_out_path, skip_bad=skip_bad)


def _check_dest(job: _Job, dest: Path) -> None:
    """Refuse a destination that would write into the user's own files."""
    resolved = dest.resolve()
    for folder in (job.source if job.kind == "folder" else None, job.held_out):
        if folder is not None and resolved.is_relative_to(folder.resolve()):
            raise DataError(f"{dest} lies inside the image folder {folder}, which is never written to; choose another")
    if dest.exists() and not dest.is_dir():
        raise DataError(f"{dest} is a file; choose a folder that does not exist yet")
    # One look at the names: another process that prepares the same folder makes its lock before anything else.
    names = {path.name for path in dest.iterdir()} if dest.exists() else set()
    if names and LOCK not in names:
        raise DataError(f"{dest} is not empty and not a prepared folder; choose a folder that does not exist yet")


@contextlib.contextmanager
def _locked(dest: Path, progress: Progress | None) -> Iterator[None]:
    """Hold the right to build in ``dest``. The system frees the lock when its holder dies, however it dies."""
    dest.mkdir(parents=True, exist_ok=True)
    with (dest / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if progress is not None:
                progress(f"waiting for another process that prepares {dest}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _prepare_locked(job: _Job, dest: Path, progress: Progress | None) -> Manifest:
    held_out = _listed(job.held_out) if job.held_out else []
    if job.kind == "folder":
        files = _listed(job.source)
        if len(files) < 2 and not job.held_out:
            raise DataError(f"{job.source} has only 1 image, so none can be held out; give at least 2")
        state: list[str | int] = [fingerprint(files)]
    elif job.kind == "archive":
        status = job.source.stat()
        files, state = [], [status.st_size, status.st_mtime_ns]
    else:
        files, state = [], [synthetic.GENERATOR_VERSION, synthetic.DEFAULT_COUNT]
    mark = hashlib.sha256(json.dumps([*job.options(), state, fingerprint(held_out)]).encode()).hexdigest()
    if (manifest := _current(job, dest, mark)) is not None:
        return manifest

    _clear(dest)
    try:
        root = job.source if job.kind == "folder" else _unpack(job, dest, progress)
        listed = files if job.kind == "folder" else _listed(root)
        manifest = _build(job, dest, mark, root=root, files=listed, held_out=held_out, progress=progress)
        if (files and list_images(root) != files) or (job.held_out and list_images(job.held_out) != held_out):
            raise DataError(f"the images in {root} changed while they were read; run the command again")
    except BaseException:
        _clear(dest)
        raise
    return manifest


def _listed(folder: Path) -> list[ImageFile]:
    files = list_images(folder)
    if not files:
        raise DataError(f"no PNG or JPEG images in {folder}; give a folder of images, such as cifar-10/train")
    return files


def _current(job: _Job, dest: Path, mark: str) -> Manifest | None:
    """Return the manifest of ``dest`` if what is there is what the job would build."""
    if not is_prepared(dest):
        return None
    try:
        packed = open_packed(dest)
    except DataError:
        return None
    if packed.manifest.fingerprint != mark:
        return None
    # The unpacked files belong to the prepared folder; without them a loader cannot decode one at a time.
    if job.kind != "folder" and packed.files is None:
        return None
    return packed.manifest


def _clear(dest: Path) -> None:
    """Remove what an earlier or interrupted build left; the manifest first, since it vouches for the rest."""
    for name in (MANIFEST, IMAGES, FILES):
        (dest / name).unlink(missing_ok=True)
        (dest / (name + PARTIAL)).unlink(missing_ok=True)
    for name in (UNPACKED, UNPACKED + PARTIAL):
        if (dest / name).is_dir():
            shutil.rmtree(dest / name)


def _unpack(job: _Job, dest: Path, progress: Progress | None) -> Path:
    """Unpack an archive, or write the synthetic images, into ``dest``; return the folder to train on."""
    partial = dest / (UNPACKED + PARTIAL)
    if job.kind == "archive":
        train = archives.extract(job.source, partial, progress=progress)
    else:
        synthetic.write_folder(partial, image_size=job.image_size, progress=progress)
        train = partial
    partial.rename(dest / UNPACKED)
    return dest / UNPACKED / train.relative_to(partial)


def _build(
    job: _Job,
    dest: Path,
    mark: str,
    *,
    root: Path,
    files: list[ImageFile],
    held_out: list[ImageFile],
    progress: Progress | None,
) -> Manifest:
    paths = [f"{root}/{file.path}" for file in files] + [f"{job.held_out}/{file.path}" for file in held_out]
    side = job.image_size
    partial = dest / (IMAGES + PARTIAL)
    array: npt.NDArray[np.uint8] = np.lib.format.open_memmap(
        partial, mode="w+", dtype=np.uint8, shape=(len(paths), side, side, 3)
    )
    with partial.open("r+b") as file:
        # A full disk is an error here; met while writing to the map it would be a crash.
        os.posix_fallocate(file.fileno(), 0, partial.stat().st_size)
    bad = decode_files(paths, partial, side, keep_going=job.skip_bad, progress=progress)
    if bad and not job.skip_bad:
        raise DataError(f"{bad[0][1]}; remove it, or leave out damaged files with --skip-bad")
    if bad:
        array = _without(array, [position for position, _ in bad], partial)
        wrong = {position for position, _ in bad}
        held_out = [file for position, file in enumerate(held_out, len(files)) if position not in wrong]
        files = [file for position, file in enumerate(files) if position not in wrong]
        if not files or len(array) < 2 or (job.held_out and not held_out):
            raise DataError(
                f"{len(bad):,} of {len(paths):,} images of {root} are damaged and too few are left; check them"
            )
    chosen = split(array, len(files) if job.held_out else None)
    manifest = Manifest(
        schema=SCHEMA,
        kind=job.kind,
        source=str(job.source),
        held_out_source=str(job.held_out) if job.held_out else None,
        shape=(len(array), side, side, 3),
        content_hash=content_hash(array, chosen),
        fingerprint=mark,
        decoding=DECODING_RULE,
        held_out_indices=chosen.held_out,
        unused_indices=chosen.unused,
        skipped=tuple(reason for _, reason in bad),
    )
    listed_root = str(root) if job.kind == "folder" else str(root.relative_to(dest))
    parts = [{"root": listed_root, "files": files}]
    if job.held_out:
        parts.append({"root": str(job.held_out), "files": held_out})
    (dest / (FILES + PARTIAL)).write_text(json.dumps(parts))
    (dest / (MANIFEST + PARTIAL)).write_text(manifest.to_json())
    for name in (IMAGES, FILES, MANIFEST):  # the manifest last, and only when the others have reached the disk
        with (dest / (name + PARTIAL)).open("r+b") as file:
            os.fsync(file.fileno())
        (dest / (name + PARTIAL)).rename(dest / name)
    return manifest


def _without(array: npt.NDArray[np.uint8], rows: list[int], path: Path) -> npt.NDArray[np.uint8]:
    """Replace the array file at ``path`` by one that lacks ``rows``."""
    kept = np.delete(np.arange(len(array)), rows)
    replacement = path.with_suffix(".kept" + PARTIAL)
    smaller = np.lib.format.open_memmap(replacement, mode="w+", dtype=np.uint8, shape=(len(kept), *array.shape[1:]))
    for start in range(0, len(kept), 1_000):
        smaller[start : start + 1_000] = array[kept[start : start + 1_000]]
    smaller.flush()
    replacement.rename(path)
    return smaller
