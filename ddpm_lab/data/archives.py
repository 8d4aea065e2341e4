"""Archives of images as they are published: Kaggle's ``train.7z`` and ``cifar-10-python.tar.gz``.

An archive is data from a stranger. Member names never choose a path outside the destination, limits on size and
number are checked before and while unpacking, and pickles are read by an unpickler that can build nothing but plain
values and byte arrays.
"""

import gzip
import inspect
import io
import pickle
import pickletools
import re
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from ddpm_lab.data.folder import SUFFIXES, DataError, Progress, paced

ARCHIVE_SUFFIXES = (".7z", ".tar.gz", ".tgz")
MAX_FILES = 1_000_000
MAX_TOTAL_BYTES = 16 * 2**30
MAX_TAR_BYTES, MAX_TAR_MEMBERS = 512 * 2**20, 1_000  # cifar-10-python.tar.gz holds 186 MB in 9 members
CIFAR_SIDE = 32
_BATCH = re.compile(r"(?:data_batch_[0-9]+|test_batch)")
_MULTIARRAY = {f"numpy.{core}.multiarray._reconstruct" for core in ("core", "_core")}
_OF_ARRAYS = {*_MULTIARRAY, "numpy.ndarray", "numpy.dtype"}


def is_archive(path: Path) -> bool:
    """Whether the name is that of an archive that ``extract`` takes."""
    return path.name.lower().endswith(ARCHIVE_SUFFIXES)


def extract(source: Path, dest: Path, *, progress: Progress | None = None) -> Path:
    """Unpack an archive into PNG or JPEG files under ``dest``, which is created.

    A ``.7z`` keeps its own folders (Kaggle's gives ``train/1.png`` ...); members that are not images stay inside. The
    pickled CIFAR-10 batches become ``train/1.png`` ... in their order, and the test batch ``test/1.png`` ...
    Returns the folder to train on: ``dest``, or ``dest/train`` for the batches, which leave the test images out. Raises
    DataError for an archive that is damaged, truncated, too large, of an unknown kind, or points outside ``dest``; what
    was unpacked until then is left for the caller to delete.
    """
    if not source.is_file():
        raise DataError(f"no such file: {source}; give the path of an archive")
    if not is_archive(source):
        raise DataError(f"{source} is not an archive of a known kind ({', '.join(ARCHIVE_SUFFIXES)})")
    dest.mkdir(parents=True, exist_ok=True)
    with _damage_named(source, dest):
        if source.name.lower().endswith(".7z"):
            _extract_7z(source, dest, progress)
            return dest
        _extract_cifar(source, dest, progress)
        return dest / "train"


@contextmanager
def _damage_named(source: Path, dest: Path) -> Iterator[None]:
    """Turn whatever a damaged or hostile archive makes its readers raise into one sentence."""
    try:
        yield
    except (DataError, MemoryError, ImportError):
        raise
    except RefusedPickleError as error:
        raise DataError(f"{source} is refused: its pickle {error}; use an archive from a source you trust") from error
    except Exception as error:  # as many kinds as there are libraries and checks
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"cannot unpack {source} into {dest}: {error.strerror}") from error
        if type(error).__name__ == "DecompressionBombError":  # py7zr's, which may be missing
            raise _too_large(source, "more than its header says", _size(MAX_TOTAL_BYTES)) from error
        text = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{source} is damaged or incomplete ({text}); download it again") from error


def _check_member(source: Path, name: str, is_plain: bool) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    windows_drive = len(name) > 1 and name[1] == ":"
    outside = path.is_absolute() or ".." in path.parts or windows_drive
    if outside or not is_plain:
        what = "points outside the destination" if outside else "is neither a file nor a folder"
        raise DataError(f"{source} is refused: its member {name!r} {what}; use an archive from a source you trust")


def _too_large(source: Path, what: str, limit: str) -> DataError:
    return DataError(f"{source} is refused: it holds {what}, more than the limit of {limit}; unpack it by hand first")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:,.1f} MiB"


def _extract_7z(source: Path, dest: Path, progress: Progress | None) -> None:
    import py7zr  # noqa: PLC0415 - only this kind of archive needs it, and a bare node may lack it

    options: dict[str, Any] = {}
    if "max_extract_size" in inspect.signature(py7zr.SevenZipFile).parameters:
        options["max_extract_size"] = MAX_TOTAL_BYTES  # stops an archive whose header lies about its sizes
    with py7zr.SevenZipFile(source, "r", **options) as archive:
        if archive.needs_password():
            raise DataError(f"{source} is encrypted; unpack it by hand and give the folder")
        members = archive.list()
        for member in members:
            _check_member(source, member.filename, member.is_file or member.is_directory)
        total = sum(member.uncompressed for member in members)
        if len(members) > MAX_FILES:
            raise _too_large(source, f"{len(members):,} files", f"{MAX_FILES:,}")
        if total > MAX_TOTAL_BYTES:
            raise _too_large(source, _size(total), _size(MAX_TOTAL_BYTES))
        if total > (free := shutil.disk_usage(dest).free):
            raise DataError(f"{source} unpacks to {_size(total)}, but {dest} has {_size(free)} free; make room")
        wanted = [m.filename for m in members if m.is_file and m.filename.lower().endswith(SUFFIXES)]
        if not wanted:
            raise DataError(f"{source} holds no PNG or JPEG image; give an archive of images, such as train.7z")
        if progress is not None:  # once: py7zr's own reports fail it when they fall behind
            progress(f"unpacking {len(wanted):,} images of {source.name}")
        archive.extract(dest, targets=wanted)


def _extract_cifar(source: Path, dest: Path, progress: Progress | None) -> None:
    say = paced(progress)
    written = {"train": 0, "test": 0}
    for split in written:
        (dest / split).mkdir(exist_ok=True)
    for name, content in _cifar_batches(source):
        split = "test" if name == "test_batch" else "train"
        for pixels in _batch_pixels(content):
            written[split] += 1
            Image.fromarray(pixels).save(dest / split / f"{written[split]}.png", compress_level=1)
            say(f"wrote {sum(written.values()):,} images of {source.name}")
    if not written["train"]:
        raise DataError(f"{source} holds no CIFAR-10 batches (data_batch_1 ...); give cifar-10-python.tar.gz")


def _cifar_batches(source: Path) -> Iterator[tuple[str, bytes]]:
    """Names and contents of the pickled batches, in the order of their numbers."""
    with gzip.open(source) as stream:
        content = stream.read(MAX_TAR_BYTES + 1)
    if len(content) > MAX_TAR_BYTES:
        raise _too_large(source, "more bytes than CIFAR-10 has", _size(MAX_TAR_BYTES))
    batches = []
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        for count, member in enumerate(tar):
            _check_member(source, member.name, member.isfile() or member.isdir())
            if count >= MAX_TAR_MEMBERS:
                raise _too_large(source, "more files than CIFAR-10 has", f"{MAX_TAR_MEMBERS:,}")
            if member.size < 0 or member.issparse():  # either may claim anything, and some readers go round in circles
                raise ValueError("a member without a size of its own")
            name = PurePosixPath(member.name).name
            if member.isfile() and _BATCH.fullmatch(name):
                batches.append((len(name), name, member))
        for _, name, member in sorted(batches, key=lambda batch: batch[:2]):
            file = tar.extractfile(member)
            assert file is not None
            yield name, file.read()


_PLAIN = ("UNICODE", "STRING", "BYTES", "GLOBAL")
"""Parts of names of opcodes that make what may be used again."""


def refuse_tricks(content: bytes, *without: str) -> None:
    """Raise RefusedPickleError for a pickle that would take memory or time out of all proportion to its size.

    ``without`` are opcodes that its kind of file has no use for.
    """
    plain, last = dict[int, bool](), ""  # of what is numbered, whether it is text, bytes or a name
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name == "MEMOIZE" or name.endswith("PUT"):
            # The memo is an array as long as the largest number asks for: one opcode could fill the memory.
            if isinstance(argument, int) and argument > len(content):
                raise RefusedPickleError(f"numbers an object {argument:,}, a trick to fill the memory")
            number = argument if isinstance(argument, int) else len(plain)
            plain[number] = any(part in last for part in _PLAIN)
        # A tuple's hash is computed from its parts' each time: one in another, twice, and so on, doubles each time.
        elif name == "DUP" or (name.endswith("GET") and not plain.get(int(argument or 0), False)):
            raise RefusedPickleError("uses an object twice, a trick to take for ever")
        elif name in without:
            raise RefusedPickleError("changes objects, for which it has no use")
        last = name


def _batch_pixels(content: bytes) -> npt.NDArray[np.uint8]:
    """Images of one pickled batch, uint8 (n, 32, 32, 3); it stores each as 3 planes of 32 rows of 32 pixels."""
    refuse_tricks(content)
    batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    data = batch.get(b"data", batch.get("data")) if isinstance(batch, dict) else None
    if not isinstance(data, _Array):
        raise ValueError("a batch has no array named data")
    planes = data.pixels().reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


class RefusedPickleError(Exception):
    """A pickle that asks for more than a batch needs."""


class _Array:
    """What a pickled array, or its number format, leaves behind; no code of arrays runs while unpickling."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: Any = ()

    def __setstate__(self, state: object) -> None:
        self.state = state

    def pixels(self) -> npt.NDArray[np.uint8]:
        _version, (rows, columns), dtype, fortran_order, content = self.state
        if not isinstance(dtype, _Array) or dtype.arguments[:1] not in (("u1",), (b"u1",)) or fortran_order:
            raise ValueError("the data of a batch is not a uint8 array")
        whole = type(rows) is int and columns == 3 * CIFAR_SIDE**2
        if not whole or not isinstance(content, bytes) or len(content) != rows * columns:
            raise ValueError("the data of a batch is not whole rows of 3072 bytes")
        return np.frombuffer(content, np.uint8)


class _ArraysOnly(pickle.Unpickler):
    """Reads dictionaries, lists, numbers, text, bytes and arrays; a name of anything else is refused, not imported."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in _OF_ARRAYS:
            return _Array
        raise RefusedPickleError(f"asks for {module}.{name}, which no CIFAR-10 batch needs")
