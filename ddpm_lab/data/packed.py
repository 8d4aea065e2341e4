"""Prepared folders: a folder of images, an archive or the synthetic set, decoded once into a memory-mapped array.

A prepared folder holds ``images.npy`` (uint8, N x S x S x 3), ``files.json`` (where each image came from) and
``manifest.json``, which is written last and removed first: a folder without it is not finished. Archives and synthetic
images are unpacked into ``images/`` inside it.
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.config import RunConfig
from ddpm_lab.data import archives, synthetic
from ddpm_lab.data.folder import DECODING_RULE, DataError, ImageFile, Progress, decode_files, fingerprint, list_images
from ddpm_lab.declared import Opt, options, parsed, reader
from ddpm_lab.files import expanded, lock, replace

SCHEMA = 1
MANIFEST, IMAGES, FILES = "manifest.json", "images.npy", "files.json"
LOCK = ".ddpm-lab.lock"  # also marks a folder as ours to rebuild
UNPACKED = "images"
SYNTHETIC = "synthetic"
HELD_OUT_FRACTION, MAX_HELD_OUT = 0.05, 2_500


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a prepared folder holds.

    ``content_hash`` is SHA-256 over shape, pixels in order and split, so it names the data wherever it lies.
    ``fingerprint`` covers names, sizes and times of the source files and the options: while it stays, so does the rest.
    ``held_out_indices`` are never trained on; ``unused_indices`` are training images equal to one of a held-out
    folder; ``skipped`` lists the lines that name each damaged file left out.
    """

    schema: Annotated[int, Opt(choices=(SCHEMA,))]
    kind: str  # folder, archive, synthetic
    source: str
    held_out_source: str | None
    shape: Annotated[tuple[int, int, int, int], Opt(least=1)]
    content_hash: str
    fingerprint: str
    decoding: str
    held_out_indices: Annotated[tuple[int, ...], Opt(least=0)]
    unused_indices: Annotated[tuple[int, ...], Opt(least=0)]
    skipped: tuple[str, ...]

    def __post_init__(self) -> None:
        apart = {*self.held_out_indices, *self.unused_indices}
        whole = len(apart) == len(self.held_out_indices) + len(self.unused_indices) < self.count
        if not whole or max(apart, default=0) >= self.count or self.shape[1:] != (self.image_size,) * 2 + (3,):
            raise ConfigError("its images and indices do not fit each other")

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
        images, held_out = f"{self.count:,} images of {self.image_size}x{self.image_size}", len(self.held_out_indices)
        equal, damaged = len(self.unused_indices), len(self.skipped)
        parts = [images, f"{self.train_count:,} to train on", f"{held_out:,} held out"]
        parts += [f"{equal:,} left out of training as equal to a held-out image"] if equal else []
        return ", ".join([*parts, *([f"{damaged:,} damaged files left out"] if damaged else [])])


class PackedImages(NamedTuple):
    """An opened prepared folder. ``images`` is read-only and mapped: uint8 (N, S, S, 3); indices are sorted int64."""

    dest: Path
    manifest: Manifest
    images: np.memmap[Any, np.dtype[np.uint8]]
    train_indices: npt.NDArray[np.int64]
    held_out_indices: npt.NDArray[np.int64]

    @property
    def files(self) -> tuple[str, ...] | None:
        """Absolute path of the file behind each image; None where one is gone or has changed (0.2 s for 50,000)."""
        paths: list[str] = []
        try:
            for part in parsed((self.dest / FILES).read_bytes()):
                root = str(self.dest / part["root"])  # an absolute root stands for itself
                for name, size_bytes, mtime_ns in part["files"]:
                    path = f"{root}/{name}"
                    status = os.stat(path)  # noqa: PTH116 - plain strings are faster
                    if (status.st_size, status.st_mtime_ns) != (size_bytes, mtime_ns):
                        return None
                    paths.append(path)
        except (OSError, ValueError, TypeError, KeyError):  # of a damaged list too
            return None
        return tuple(paths) if len(paths) == self.manifest.count else None


_manifest = reader(Manifest)


def is_prepared(path: Path) -> bool:
    """Whether ``path`` is a finished prepared folder, of this schema or another."""
    return (path / MANIFEST).is_file() and (path / IMAGES).is_file()


def read_manifest(dest: Path) -> Manifest:
    """Read the manifest of a prepared folder. Raises DataError for none, or one of another schema or unreadable."""
    try:
        values = parsed((dest / MANIFEST).read_bytes())
        found: Manifest = _manifest({k: v for k, v in values.items() if k in Manifest.__slots__}, "")
    except OSError:
        raise DataError(f"{dest} is not a prepared folder; make it with: ddpm-lab prepare SOURCE {dest}") from None
    except (ValueError, AttributeError) as error:
        advice = f"delete {dest} and prepare it again"
        raise DataError(f"{dest / MANIFEST} is damaged, or of another version ({error}); {advice}") from error
    return found


def open_packed(dest: Path) -> PackedImages:
    """Open a prepared folder, also while another process rebuilds it. Raises DataError for one that is not finished."""
    dest = Path(dest).absolute()
    while True:
        manifest = read_manifest(dest)
        try:
            images = np.load(dest / IMAGES, mmap_mode="r")
        except Exception as error:  # a damaged header makes anything of its readers
            raise DataError(f"{dest / IMAGES} cannot be opened ({error}); prepare it again") from error
        # A rebuild removes the manifest before it replaces the array: the same manifest, before and after, means that
        # the array between them is its own.
        if read_manifest(dest) == manifest:
            break
    if not isinstance(images, np.memmap) or images.shape != manifest.shape or images.dtype != np.uint8:
        raise DataError(f"{dest / IMAGES} does not fit its manifest; delete {dest} and prepare it again")
    held_out = np.array(manifest.held_out_indices, dtype=np.int64)
    trained = np.setdiff1d(np.arange(manifest.count), [*manifest.held_out_indices, *manifest.unused_indices])
    return PackedImages(dest=dest, manifest=manifest, images=images, train_indices=trained, held_out_indices=held_out)


def prepare(source: str | Path, dest: str | Path, *, progress: Progress = id, **how: Any) -> Manifest:
    """Decode ``source`` into the prepared folder ``dest``; return at once when it is there and still fits.

    Args:
        source: a folder of PNG and JPEG images, ``train.7z``, ``cifar-10-python.tar.gz``, or ``"synthetic"``.
        dest: a folder that does not exist, is empty, or was prepared before. Of several processes that prepare the same
            one, one works and the others wait. A build that is killed leaves nothing that looks finished.
        progress: called with a line of text for every few images.
        how: ``image_size``, the side S of the square images in pixels (32); ``held_out``, a folder of images never to
            train on, without which a part of ``source`` is chosen (``split``); and ``skip_bad``, to leave damaged files
            out and list them in the manifest, instead of stopping at the first.

    Raises DataError for a source or destination that cannot be used.
    """
    return _prepare(_job(source, **how), Path(dest).absolute(), progress)


def resolve(
    source: str | Path, cache: str | Path, *, results: Path | None = None, progress: Progress = id, **how: Any
) -> Path:
    """Return the prepared folder for ``source``, which may be one itself; otherwise prepare it inside ``cache``.

    The folder in ``cache`` is named by a hash of the source's path and the options, so that each combination has its
    own. ``results``, where images will be written, may not lie among those that are prepared. The other arguments and
    errors are those of ``prepare``.
    """
    dest, job = place_of(source, cache, **how)
    if job is None:
        side, wanted = read_manifest(dest).image_size, how.get("image_size", 32)
        if side != wanted:
            advice = f"give image size {side} (--image-size {side}), or prepare its source again with {wanted}"
            raise DataError(f"{dest} was prepared with images of {side}x{side}, not {wanted}x{wanted}; {advice}")
        if how.get("held_out") is not None:
            raise DataError(f"{dest} is prepared and has its held-out part; give --held-out when preparing it")
        return dest
    if results is not None:
        _check_outside(job, results)
    found = _prepare(job, dest, progress)
    if found.skipped:
        getattr(progress, "stay", progress)(f"{found.describe()}: listed in {dest / MANIFEST}")
    return dest


class Job(NamedTuple):
    """Everything that decides the content of a prepared folder."""

    kind: str
    source: Path  # Path("synthetic") for the synthetic set
    image_size: int
    held_out: Path | None
    skip_bad: bool

    @property
    def given(self) -> list[Path]:
        return [path for path in (self.source, self.held_out) if path and path != Path(SYNTHETIC)]

    def options(self) -> list[object]:
        held_out = str(self.held_out) if self.held_out else None
        return [SCHEMA, self.kind, str(self.source), self.image_size, held_out, self.skip_bad, DECODING_RULE]


def _job(source: str | Path, image_size: int = 32, held_out: str | Path | None = None, skip_bad: bool = False) -> Job:
    options(RunConfig)["image_size"].checked(image_size, "image_size")
    choice("skip_bad", skip_bad, (True, False))  # papermill hands on "false" as a text
    if str(source) == SYNTHETIC:
        kind, path = "synthetic", Path(SYNTHETIC)
    else:
        path = expanded(source).absolute()
        kind = "archive" if path.name.lower().endswith(archives.ARCHIVE_SUFFIXES) and path.is_file() else "folder"
        if not path.exists():
            raise DataError(f"no such data: {path}; give a folder of images, an archive, or 'synthetic'")
        if kind == "folder" and not path.is_dir():
            what = f"neither a folder nor an archive ({', '.join(archives.ARCHIVE_SUFFIXES)})"
            raise DataError(f"{path} is {what}; give the folder that holds the images")
        if is_prepared(path):
            raise DataError(f"{path} is already prepared; use it as it is, or prepare its source again")
        if (path / LOCK).exists():  # an archive's test images may lie there too
            raise DataError(f"{path} was not prepared to its end; prepare its source again, or wait until that ends")
    held_out_path = expanded(held_out).absolute() if held_out is not None else None
    return Job(kind=kind, source=path, image_size=image_size, held_out=held_out_path, skip_bad=skip_bad)


def place_of(source: str | Path, cache: str | Path, **how: Any) -> tuple[Path, Job | None]:
    """Return the folder that ``resolve`` returns, prepared or not, and of what it is made; None if it is ``source``."""
    path = expanded(source)
    if str(source) != SYNTHETIC and is_prepared(path):
        return path.absolute(), None
    job = _job(source, **how)
    name = hashlib.sha256(json.dumps(job.options()).encode()).hexdigest()[:12]
    return (Path(cache) / f"{job.kind}-{name}").absolute(), job


def _check_outside(job: Job, dest: Path) -> None:
    """Refuse a folder among the user's own images: what is written there would be trained on."""
    for given in job.given:
        if dest.resolve().is_relative_to(given.resolve()):
            elsewhere = "have the images prepared elsewhere: ddpm-lab prepare SOURCE DEST, and DEST as the data"
            never = f"{dest} lies inside the image folder {given}, which is never written to"
            raise DataError(f"{never}; choose another, or {elsewhere}")


def _check_dest(job: Job, dest: Path) -> None:
    """Refuse a destination that would write into the user's own files."""
    _check_outside(job, dest)
    for given in job.given:
        if given.resolve().is_relative_to(dest.resolve()):
            raise DataError(f"{given} lies inside {dest}, which is emptied before it is prepared; choose another")
    before = None
    with contextlib.suppress(DataError, OSError):
        before = read_manifest(dest)
    if before and (before.source, before.image_size) != (str(job.source), job.image_size):
        side = f"{before.image_size}x{before.image_size}"
        raise DataError(f"{dest} holds images of {before.source} in {side}; choose another folder, or remove it")
    # One look at the names: another process that prepares the same folder makes its lock before anything else.
    names = {path.name for path in dest.iterdir()} if dest.exists() else set()
    if names and LOCK not in names:
        raise DataError(f"{dest} is not empty and not a prepared folder; choose a folder that does not exist yet")


def _prepare(job: Job, dest: Path, progress: Progress) -> Manifest:
    try:
        _check_dest(job, dest)
        dest.mkdir(parents=True, exist_ok=True)
        with (dest / LOCK).open("a") as held:  # the system frees it when its holder dies, however it dies
            if not lock(held, wait=False):
                progress(f"waiting for another process that prepares {dest}")
                lock(held)
            return _prepared(job, dest, progress)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        way_out = "choose another place: ddpm-lab prepare SOURCE DEST, and DEST as the data"
        raise DataError(f"cannot prepare {dest}: {error.strerror or error}{where}; {way_out}") from error


def _prepared(job: Job, dest: Path, progress: Progress) -> Manifest:
    held_out = _listed(job.held_out) if job.held_out else []
    files = _listed(job.source) if job.kind == "folder" else []
    if len(files) == 1 and not job.held_out:
        raise DataError(f"{job.source} has only 1 image, so none can be held out; give at least 2")
    state: list[str | int] = [synthetic.GENERATOR_VERSION, synthetic.DEFAULT_COUNT]
    if job.kind == "archive":
        status = job.source.stat()
        state = [status.st_size, status.st_mtime_ns]
    state = [fingerprint(files)] if files else state
    mark = hashlib.sha256(json.dumps([*job.options(), state, fingerprint(held_out)]).encode()).hexdigest()
    with contextlib.suppress(DataError):
        packed = open_packed(dest)
        # Unpacked files belong to the prepared folder; without them a loader cannot decode one at a time.
        if packed.manifest.fingerprint == mark and (job.kind == "folder" or packed.files is not None):
            return packed.manifest
    _clear(dest)
    try:
        root = job.source
        if job.kind == "archive":
            root = archives.extract(job.source, dest / UNPACKED, progress)
        elif job.kind == "synthetic":
            synthetic.write_folder(root := dest / UNPACKED, job.image_size, progress)
        sources = [(root, files or _listed(root)), *([(job.held_out, held_out)] if job.held_out else [])]
        manifest = _build(job, dest, mark, sources, progress)
        if any(list_images(folder) != listed for folder, listed in sources):
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


def _clear(dest: Path) -> None:
    """Remove what an earlier or interrupted build left; the manifest first, since it vouches for the rest."""
    for name in (MANIFEST, IMAGES, FILES):
        (dest / name).unlink(missing_ok=True)
    if (dest / UNPACKED).is_dir():
        shutil.rmtree(dest / UNPACKED)


_Sources = list[tuple[Path, list[ImageFile]]]
"""Each folder with the files of its images: those to train on first, then the user's held-out ones, if any."""


def _decode(
    job: Job, path: Path, sources: _Sources, progress: Progress
) -> tuple[npt.NDArray[np.uint8], _Sources, list[str]]:
    """Decode all images into an array mapped from ``path``: uint8 (N, S, S, 3).

    With ``skip_bad`` damaged files are left out. Returns the array, the sources in it, and a line for each damaged
    file. Raises DataError for a damaged file otherwise, or where too few are left.
    """
    skipped: list[str] = []
    while True:
        paths = [f"{folder}/{file.path}" for folder, files in sources for file in files]
        shape = len(paths), job.image_size, job.image_size, 3
        array: npt.NDArray[np.uint8] = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint8, shape=shape)
        with path.open("r+b") as file:  # a full disk is an error here; met while writing to the map a crash
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        damaged = dict(decode_files(paths, array, keep_going=job.skip_bad, progress=progress))
        if not damaged:
            return array, sources, skipped
        if not job.skip_bad:
            raise DataError(f"{next(iter(damaged.values()))}; remove it, or leave out damaged files with --skip-bad")
        # Once more, without the damaged ones.
        skipped += damaged.values()
        numbers = itertools.count()
        sources = [(folder, [f for f in files if next(numbers) not in damaged]) for folder, files in sources]
        if not all(files for _, files in sources) or len(paths) - len(damaged) < 2:
            bad = f"{len(damaged):,} of {len(paths):,} images of {sources[0][0]} are damaged"
            raise DataError(f"{bad} and too few are left; check them")


def _build(job: Job, dest: Path, mark: str, sources: _Sources, progress: Progress) -> Manifest:
    """Decode, split and write a prepared folder. Raises DataError for damaged files."""
    array, sources, skipped = _decode(job, dest / IMAGES, sources, progress)
    held_out_indices, unused_indices = split(array, len(sources[0][1]) if job.held_out else None)
    parts = [{"root": str(folder).removeprefix(f"{dest}/"), "files": files} for folder, files in sources]
    manifest = Manifest(
        schema=SCHEMA,
        kind=job.kind,
        source=str(job.source),
        held_out_source=str(job.held_out) if job.held_out else None,
        shape=(len(array), job.image_size, job.image_size, 3),
        content_hash=content_hash(array, held_out_indices, unused_indices),
        fingerprint=mark,
        decoding=DECODING_RULE,
        held_out_indices=held_out_indices,
        unused_indices=unused_indices,
        skipped=tuple(skipped),
    )
    (dest / FILES).write_text(json.dumps(parts))
    for name in (IMAGES, FILES):
        with (dest / name).open("r+b") as file:
            os.fsync(file.fileno())
    text = json.dumps({"count": manifest.count, **asdict(manifest)}, indent=1)  # its count for readers of no more
    replace(dest / MANIFEST, f"{text}\n", durable=True)  # last: it vouches for the rest
    return manifest


def split(images: npt.NDArray[np.uint8], held_out_start: int | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Choose the images of uint8 (N, S, S, 3) that are held out, and those left out of training as their duplicates.

    With ``held_out_start`` the images from there on are held out, and an image before it that equals one of them is
    not trained on. Without, images are taken in the order of a hash of their pixels, equal ones together, as far as
    they fit into 5 % of all, at least 1 and at most 2,500. So duplicates fall on one side, and the choice depends on
    the images, not on their names or order. Returns sorted positions of both; raises DataError where nothing would be
    left to train on or to hold out.
    """
    digests = [hashlib.blake2b(image.data, digest_size=16).digest() for image in images]
    if held_out_start is not None:
        held_out_digests = set(digests[held_out_start:])
        unused = tuple(i for i, digest in enumerate(digests[:held_out_start]) if digest in held_out_digests)
        if len(unused) == held_out_start:
            raise DataError("every training image is also in the held-out folder; give two folders that differ")
        return tuple(range(held_out_start, len(digests))), unused
    groups: dict[bytes, list[int]] = {}
    for position, digest in enumerate(digests):
        groups.setdefault(digest, []).append(position)
    if len(groups) < 2:
        raise DataError(f"all {len(digests):,} images are equal, so none can be held out; give at least 2 that differ")
    limit = min(MAX_HELD_OUT, max(1, round(HELD_OUT_FRACTION * len(digests))))
    in_order = [group for _, group in sorted(groups.items())]
    chosen: list[int] = []
    for group in in_order:
        if len(chosen) + len(group) <= limit:
            chosen += group
    if not chosen:  # only groups larger than the share: the smallest, so that there is a held-out part at all
        chosen = min(in_order, key=len)
    return tuple(sorted(chosen)), ()


def content_hash(images: npt.NDArray[np.uint8], held_out: Sequence[int], unused: Sequence[int]) -> str:
    """SHA-256 over shape, pixels in order, and split."""
    header = json.dumps({"shape": images.shape, "held_out": held_out, "unused": unused})
    digest = hashlib.sha256(header.encode())
    digest.update(np.ascontiguousarray(images).data)
    return digest.hexdigest()
