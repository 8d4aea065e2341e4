"""Archives of images as they are published: Kaggle's ``train.7z`` and ``cifar-10-python.tar.gz``.

An archive is data from a stranger. Member names never choose a path outside the destination, limits on size and
number are checked before and while unpacking, and pickles are read by an unpickler that can build nothing but plain
values and byte arrays.
"""

import gzip
import inspect
import io
import os
import pickle
import pickletools
import re
import shutil
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ddpm_lab.data.folder import SUFFIXES, DataError
from ddpm_lab.data.progress import Progress, paced

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["ARCHIVE_SUFFIXES", "MAX_FILES", "MAX_TAR_BYTES", "MAX_TOTAL_BYTES", "extract", "is_archive"]

ARCHIVE_SUFFIXES = (".7z", ".tar.gz", ".tgz")
MAX_FILES = 1_000_000
MAX_TOTAL_BYTES = 16 * 2**30
MAX_TAR_BYTES = 512 * 2**20  # cifar-10-python.tar.gz holds 186 MB
CIFAR_SIDE = 32
CIFAR_BYTES = 3 * CIFAR_SIDE * CIFAR_SIDE
_BATCH = re.compile(r"(?:data_batch_[0-9]+|test_batch)")


def is_archive(path: Path) -> bool:
    """Whether the name is that of an archive that ``extract`` takes."""
    return path.name.lower().endswith(ARCHIVE_SUFFIXES)


def extract(source: Path, dest: Path, *, progress: Progress | None = None) -> Path:
    """Unpack an archive into PNG or JPEG files under ``dest``, which is created.

    A ``.7z`` keeps its own folders (Kaggle's gives ``train/1.png`` ...); members that are not images stay inside. The
    pickled CIFAR-10 batches become ``train/1.png`` ... in their order, and the test batch ``test/1.png`` ...

    Returns:
        The folder to train on: ``dest``, or ``dest/train`` for the pickled batches, which leave the test images out.

    Raises:
        DataError: the archive is damaged, truncated, too large, of an unknown kind, or has a member that points
            outside ``dest``. What was unpacked until then is left for the caller to delete.
    """
    if not source.is_file():
        raise DataError(f"no such file: {source}; give the path of an archive")
    if not is_archive(source):
        raise DataError(f"{source} is not an archive of a known kind ({', '.join(ARCHIVE_SUFFIXES)})")
    dest.mkdir(parents=True, exist_ok=True)
    if source.name.lower().endswith(".7z"):
        _extract_7z(source, dest, progress)
        return dest
    _extract_cifar(source, dest, progress)
    return dest / "train"


def _damaged(source: Path, reason: object) -> DataError:
    text = " ".join(str(reason).split()) or type(reason).__name__
    return DataError(f"{source} is damaged or incomplete ({text}); download it again")


def _check_member(source: Path, name: str, is_plain: bool) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    windows_drive = len(name) > 1 and name[1] == ":"
    outside = path.is_absolute() or ".." in path.parts or windows_drive
    if outside or not is_plain:
        what = "points outside the destination" if outside else "is neither a file nor a folder"
        raise DataError(f"{source} is refused: its member {name!r} {what}; use an archive from a source you trust")


def _refuse_bomb(source: Path, what: str, limit: str) -> DataError:
    return DataError(f"{source} is refused: it holds {what}, more than the limit of {limit}; unpack it by hand first")


def _extract_7z(source: Path, dest: Path, progress: Progress | None) -> None:
    import py7zr  # noqa: PLC0415 - only this kind of archive needs it, and a bare node may lack it

    options: dict[str, Any] = {}
    if "max_extract_size" in inspect.signature(py7zr.SevenZipFile).parameters:
        options["max_extract_size"] = MAX_TOTAL_BYTES  # stops an archive whose header lies about its sizes
    try:
        with py7zr.SevenZipFile(source, "r", **options) as archive:
            if archive.needs_password():
                raise DataError(f"{source} is encrypted; unpack it by hand and give the folder")
            members = archive.list()
            for member in members:
                _check_member(source, member.filename, member.is_file or member.is_directory)
            total = sum(member.uncompressed for member in members)
            if len(members) > MAX_FILES:
                raise _refuse_bomb(source, f"{len(members):,} files", f"{MAX_FILES:,}")
            if total > MAX_TOTAL_BYTES:
                raise _refuse_bomb(source, _size(total), _size(MAX_TOTAL_BYTES))
            if total > (free := shutil.disk_usage(dest).free):
                raise DataError(f"{source} unpacks to {_size(total)}, but {dest} has {_size(free)} free; make room")
            wanted = [m.filename for m in members if m.is_file and m.filename.lower().endswith(SUFFIXES)]
            if not wanted:
                raise DataError(f"{source} holds no PNG or JPEG image; give an archive of images, such as train.7z")
            with _watch(dest, len(wanted), source.name, progress):
                archive.extract(dest, targets=wanted)
    except (DataError, MemoryError):
        raise
    except OSError as error:
        if error.errno is None:
            raise _damaged(source, error) from error
        raise DataError(f"cannot unpack {source} into {dest}: {error.strerror}") from error
    except py7zr.exceptions.DecompressionBombError as error:
        raise _refuse_bomb(source, "more than its header says", _size(MAX_TOTAL_BYTES)) from error
    except Exception as error:  # a damaged stream surfaces as errors of many libraries
        raise _damaged(source, error) from error


@contextmanager
def _watch(folder: Path, count: int, name: str, progress: Progress | None) -> Iterator[None]:
    """Report the files that appear, from outside: py7zr's own reports fail it when they fall behind."""
    if progress is None:
        yield
        return
    finished = threading.Event()

    def look() -> None:
        while not finished.wait(1):
            done = sum(len(files) for _, _, files in os.walk(folder))
            progress(f"unpacked {done:,} of {count:,} images of {name}")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:,.1f} MiB"


class _Limited(io.RawIOBase):
    """A stream that refuses to give more than a number of bytes, whatever the reader asks for."""

    def __init__(self, stream: gzip.GzipFile, limit: int, refusal: DataError) -> None:
        self._stream, self._left, self._refusal = stream, limit, refusal

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "Buffer") -> int:
        count = self._stream.readinto(buffer)
        self._left -= count
        if self._left < 0:
            raise self._refusal
        return count


def _extract_cifar(source: Path, dest: Path, progress: Progress | None) -> None:
    say = paced(progress)
    written = {"train": 0, "test": 0}
    for split in written:
        (dest / split).mkdir(exist_ok=True)
    try:
        for name, content in sorted(_cifar_batches(source), key=lambda batch: (len(batch[0]), batch[0])):
            split = "test" if name == "test_batch" else "train"
            for pixels in _batch_pixels(content):
                written[split] += 1
                Image.fromarray(pixels).save(dest / split / f"{written[split]}.png", compress_level=1)
                say(f"wrote {sum(written.values()):,} images of {source.name}")
    except (DataError, MemoryError):
        raise
    except OSError as error:
        if error.errno is None:
            raise _damaged(source, error) from error
        raise DataError(f"cannot unpack {source} into {dest}: {error.strerror}") from error
    except _RefusedPickleError as error:
        raise DataError(f"{source} is refused: its pickle {error}; use an archive from a source you trust") from error
    except Exception as error:  # a hostile pickle or tar header fails in as many ways as there are checks
        raise _damaged(source, error) from error
    if not written["train"]:
        raise DataError(f"{source} holds no CIFAR-10 batches (data_batch_1 ...); give cifar-10-python.tar.gz")


def _cifar_batches(source: Path) -> Iterator[tuple[str, bytes]]:
    refusal = _refuse_bomb(source, "more bytes than CIFAR-10 has", _size(MAX_TAR_BYTES))
    with (
        gzip.open(source) as stream,
        io.BufferedReader(_Limited(stream, MAX_TAR_BYTES, refusal)) as limited,
        tarfile.open(fileobj=limited, mode="r|") as tar,
    ):
        for member in tar:
            _check_member(source, member.name, member.isfile() or member.isdir())
            if member.size > MAX_TAR_BYTES:
                raise refusal
            name = PurePosixPath(member.name).name
            if member.isfile() and _BATCH.fullmatch(name):
                content = tar.extractfile(member)
                assert content is not None
                yield name, content.read()


def _batch_pixels(content: bytes) -> npt.NDArray[np.uint8]:
    """Images of one pickled batch, uint8 (n, 32, 32, 3); it stores each as 3 planes of 32 rows of 32 pixels."""
    for opcode, argument, _ in pickletools.genops(content):
        # The memo is an array as long as the largest number asks for: one opcode could fill the memory.
        if opcode.name in ("PUT", "LONG_BINPUT") and isinstance(argument, int) and argument > len(content):
            raise _RefusedPickleError(f"numbers an object {argument:,}, a trick to fill the memory")
    batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    data = batch.get(b"data", batch.get("data")) if isinstance(batch, dict) else None
    if not isinstance(data, _Array):
        raise ValueError("a batch has no array named data")
    planes = data.pixels().reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


class _RefusedPickleError(Exception):
    """A pickle that asks for more than a batch needs."""


class _Array:
    """What a pickled array leaves behind: its state, not yet believed. No array code runs while unpickling."""

    def __init__(self, *_: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def pixels(self) -> npt.NDArray[np.uint8]:
        _version, shape, dtype, fortran_order, content = self.state
        rows, columns = shape
        if not isinstance(dtype, _DType) or dtype.name not in ("u1", b"u1") or columns != CIFAR_BYTES or fortran_order:
            raise ValueError("the data of a batch is not a uint8 array with 3072 columns")
        if not isinstance(content, bytes) or len(content) != rows * columns:
            raise ValueError("the data of a batch has the wrong length")
        return np.frombuffer(content, np.uint8).reshape(rows, columns)


class _DType:
    """A pickled number format, as its name."""

    def __init__(self, name: object = None, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment: one byte has neither."""


def _latin1_bytes(text: object, encoding: object = None) -> bytes:
    """Stand-in for ``_codecs.encode``, by which protocol 2 spells bytes."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError("an encoding other than latin1")
    return text.encode("latin1")


class _ArraysOnly(pickle.Unpickler):
    """Reads dictionaries, lists, numbers, text, bytes and arrays; a name of anything else is refused, not imported."""

    _ADMITTED = {  # noqa: RUF012
        ("numpy.core.multiarray", "_reconstruct"): _Array,
        ("numpy._core.multiarray", "_reconstruct"): _Array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _DType,
        ("_codecs", "encode"): _latin1_bytes,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._ADMITTED[module, name]
        except KeyError:
            raise _RefusedPickleError(f"asks for {module}.{name}, which no CIFAR-10 batch needs") from None
