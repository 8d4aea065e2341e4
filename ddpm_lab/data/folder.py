"""Image folders: which files belong to a data set, in which order, and how files become pixels."""

import contextlib
import errno
import hashlib
import math
import os
import re
import struct
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from ddpm_lab.checks import LabError

DECODING_RULE = (
    "8-bit RGB; grey and palette images expanded; 16-bit grey keeps its high byte; transparency composited on white; "
    "JPEG turned as its EXIF orientation says; the largest centred square resampled with an antialiased bicubic filter"
)
SUFFIXES = (".png", ".jpg", ".jpeg")
CHUNK_FILES = 10
Progress = Callable[[str], object]  # called with each line of text, of which ``output.Progress`` shows some
_DAMAGE = (None, errno.ENOENT, errno.ELOOP, errno.EINVAL)  # of an OSError; any other is no fault of the file
# Pillow warns of more than 89 megapixels, as of an attack, and refuses twice as many; below these it decodes them.
warnings.simplefilter("ignore", Image.DecompressionBombWarning)
MAX_PIXELS, MAX_SCANS = 50_000_000, 40  # a progressive JPEG has some ten scans, and each of them takes its time
_DIGITS = re.compile(r"([0-9]+)")


class DataError(LabError):
    """Data that cannot be used; the message is one sentence that says what, where and what to do."""


class ImageError(DataError):
    """One file that is not a readable PNG or JPEG image."""


class ImageFile(NamedTuple):
    """One file of a data set: path relative to the folder (``/`` between parts), and what shows that it changed."""

    path: str
    size_bytes: int
    mtime_ns: int


def list_images(folder: Path) -> list[ImageFile]:
    """List every PNG and JPEG under ``folder``, recursively, in natural numeric order (1.png, 2.png, 10.png).

    Links to files and folders are followed, each folder once. Names that begin with a dot, ``__MACOSX`` and
    ``lost+found`` are left out: they hold no images of the set. Raises DataError (no folder, or one that cannot be
    read) or OSError.
    """
    found, visited = list[ImageFile](), set[str]()
    waiting = [(str(folder), "")]
    try:
        while waiting:
            path, prefix = waiting.pop()
            if (place := os.path.realpath(path)) in visited:
                continue
            visited.add(place)
            with os.scandir(path) as entries:
                for entry in entries:
                    if entry.name.startswith(".") or entry.name in ("__MACOSX", "lost+found"):
                        continue
                    # One that leads nowhere is listed too, and found damaged when it is decoded.
                    lost = entry.is_symlink() and not os.path.exists(entry.path)  # noqa: PTH110 - strings are faster
                    if entry.name.lower().endswith(SUFFIXES) and (lost or entry.is_file()):
                        status = entry.stat(follow_symlinks=not lost)
                        found.append(ImageFile(prefix + entry.name, status.st_size, status.st_mtime_ns))
                    elif not lost and entry.is_dir():
                        waiting.append((entry.path, f"{prefix}{entry.name}/"))
    except FileNotFoundError:
        raise DataError(f"no such folder: {folder}; give the folder that holds the images") from None
    except NotADirectoryError:
        raise DataError(f"{folder} is a file, not a folder of images; give the folder that holds it") from None
    except PermissionError as error:
        raise DataError(f"{error.filename}: {error.strerror}; change its mode, or move it away") from None
    return sorted(found, key=lambda file: (_natural_key(file.path), file.path))


def _natural_key(path: str) -> list[list[str | int]]:
    """Sort key in which runs of digits compare as numbers, one path component at a time."""
    # The split alternates text, digits, text, ..., so a number only ever meets a number.
    return [[int(part) if i % 2 else part for i, part in enumerate(_DIGITS.split(name))] for name in path.split("/")]


def fingerprint(files: Sequence[ImageFile]) -> str:
    """Hash of the names, sizes and modification times: what must stay the same for decoded pixels to be reused."""
    lines = "\0".join(f"{file.path}\0{file.size_bytes}\0{file.mtime_ns}" for file in files)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


def decode(path: str | Path, image_size: int) -> npt.NDArray[np.uint8]:
    """Decode one file to pixels of shape (image_size, image_size, 3), 8-bit RGB, by ``DECODING_RULE``.

    Resampling the largest centred square is resizing the shorter side and then cropping the centre, in one step
    whose cost does not depend on how long the longer side is. Raises ImageError, one line with the path, for a file
    that is missing, damaged, or neither PNG nor JPEG, and DataError for one that cannot be read now.
    """
    try:
        with Image.open(path, formats=("PNG", "JPEG")) as opened:
            image: Image.Image = opened
            if (count := math.prod(image.size)) > MAX_PIXELS:
                raise ValueError(f"it has {count:,} pixels, and the limit is {MAX_PIXELS:,}")
            if "progressive" in image.info and Path(path).read_bytes().count(b"\xff\xda") > MAX_SCANS:
                raise ValueError(f"it is drawn in more than {MAX_SCANS} scans")
            if "exif" in image.info:
                image.load()
                image.getexif()
                with contextlib.suppress(TypeError, ValueError, struct.error):  # once it is turned
                    ImageOps.exif_transpose(image, in_place=True)
            if image.mode != "RGB" or "transparency" in image.info:
                image = _to_rgb(image)
            if image.size != (image_size, image_size):
                image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BICUBIC)
            return np.asarray(image, dtype=np.uint8)
    except MemoryError:
        raise
    except Exception as error:  # decoders meet damage with OSError, SyntaxError, ValueError, struct.error, ...
        if isinstance(error, OSError) and error.errno not in _DAMAGE:
            raise DataError(f"{path}: cannot be read ({error.strerror}); see to that, then start again") from error
        known = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        reason = " ".join(known.split()) or type(error).__name__
        reason = "not a PNG or JPEG image" if isinstance(error, UnidentifiedImageError) else reason
        raise ImageError(f"{path}: cannot be decoded ({reason})") from error


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        opaque = Image.new("RGBA", image.size, "white")
        opaque.alpha_composite(image.convert("RGBA"))
        image = opaque
    return image.convert("RGB")


def decode_files(
    paths: Sequence[str], out: npt.NDArray[np.uint8], *, keep_going: bool, progress: Progress = id
) -> list[tuple[int, str]]:
    """Decode ``paths[i]`` into ``out[i]``, uint8 (N, S, S, 3), in a thread for each usable core.

    Returns position and one-line reason of each file that could not be decoded, in order; without ``keep_going`` the
    work stops at the first ones found.
    """
    failures: list[tuple[int, str]] = []

    def decode_chunk(start: int) -> list[tuple[int, str]]:
        bad = []
        for position in range(start, min(start + CHUNK_FILES, len(paths))):
            try:
                out[position] = decode(paths[position], out.shape[1])
            except ImageError as error:
                bad.append((position, str(error)))
        return bad

    # Threads, since decoders release Python's lock; a process that is killed takes them along.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        try:
            starts = range(0, len(paths), CHUNK_FILES)
            for start, bad in zip(starts, pool.map(decode_chunk, starts), strict=True):
                failures += bad
                if failures and not keep_going:
                    break
                progress(f"decoded {min(start + CHUNK_FILES, len(paths)):,} of {len(paths):,} images")
        finally:  # at an interrupt too, what is queued never begins
            pool.shutdown(cancel_futures=True)
    return failures
