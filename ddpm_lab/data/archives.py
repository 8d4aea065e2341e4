"""Archives of images as they are published: Kaggle's ``train.7z`` and ``cifar-10-python.tar.gz``.

An archive is data from a stranger. Member names never choose a path outside the destination, limits on size and
number are checked before and while unpacking, and no pickle is run.
"""

import gzip
import io
import pickletools
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import numpy as np
import numpy.typing as npt
from PIL import Image

from ddpm_lab.data.folder import SUFFIXES, DataError, Progress

ARCHIVE_SUFFIXES = (".7z", ".tar.gz", ".tgz")
MAX_FILES = 1_000_000
MAX_TOTAL_BYTES = 16 * 2**30
MAX_TAR_BYTES = 512 * 2**20  # cifar-10-python.tar.gz holds 186 MB
CIFAR_SIDE = 32
_BATCH = re.compile(r"(?:data_batch_[0-9]+|test_batch)")


def extract(source: Path, dest: Path, progress: Progress = id) -> Path:
    """Unpack an archive into PNG or JPEG files under ``dest``, which is created.

    A ``.7z`` keeps its own folders (Kaggle's gives ``train/1.png`` ...); members that are not images stay inside. The
    pickled CIFAR-10 batches become ``train/1.png`` ... in their order, and the test batch ``test/1.png`` ...
    Returns the folder to train on: ``dest``, or ``dest/train`` for the batches, which leave the test images out. Raises
    DataError for an archive that is damaged, truncated, too large, or points outside ``dest``; what was unpacked until
    then is left for the caller to delete.
    """
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
    except Exception as error:  # as many kinds as there are libraries and checks
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"cannot unpack {source} into {dest}: {error.strerror}") from error
        if type(error).__name__ == "DecompressionBombError":  # py7zr's, which may be missing
            raise _too_large(source, "more than its header says", _size(MAX_TOTAL_BYTES)) from error
        text = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{source} is damaged or incomplete ({text}); download it again") from error


def _check_member(source: Path, name: str, is_plain: bool) -> None:
    path = PurePosixPath(name.replace("\\", "/"))
    outside = path.is_absolute() or ".." in path.parts
    if outside or not is_plain:
        what = "points outside the destination" if outside else "is neither a file nor a folder"
        raise DataError(f"{source} is refused: its member {name!r} {what}; use an archive from a source you trust")


def _too_large(source: Path, what: str, limit: str) -> DataError:
    return DataError(f"{source} is refused: it holds {what}, more than the limit of {limit}; unpack it by hand first")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:,.1f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:,.1f} MiB"


def _extract_7z(source: Path, dest: Path, progress: Progress) -> None:
    import py7zr  # noqa: PLC0415 - only this kind of archive needs it, and a bare node may lack it

    # The limit stops an archive whose header lies about its sizes.
    with py7zr.SevenZipFile(source, "r", max_extract_size=MAX_TOTAL_BYTES) as archive:
        members = archive.list()
        for member in members:
            _check_member(source, member.filename, member.is_file or member.is_directory)
        total = sum(member.uncompressed for member in members)
        if len(members) > MAX_FILES:
            raise _too_large(source, f"{len(members):,} files", f"{MAX_FILES:,}")
        if total > MAX_TOTAL_BYTES:
            raise _too_large(source, _size(total), _size(MAX_TOTAL_BYTES))
        wanted = [m.filename for m in members if m.is_file and m.filename.lower().endswith(SUFFIXES)]
        if not wanted:
            raise DataError(f"{source} holds no PNG or JPEG image; give an archive of images, such as train.7z")
        progress(f"unpacking {len(wanted):,} images of {source.name}")
        archive.extract(dest, targets=wanted)  # py7zr's own reports of progress fail it when they fall behind


def _extract_cifar(source: Path, dest: Path, progress: Progress) -> None:
    written = {"train": 0, "test": 0}
    for split in written:
        (dest / split).mkdir(exist_ok=True)
    for name, content in _cifar_batches(source):
        split = "test" if name == "test_batch" else "train"
        for pixels in _batch_pixels(content):
            written[split] += 1
            Image.fromarray(pixels).save(dest / split / f"{written[split]}.png", compress_level=1)
            progress(f"wrote {sum(written.values()):,} images of {source.name}")
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
        for member in tar:
            _check_member(source, member.name, member.isfile() or member.isdir())
            if member.size < 0 or member.issparse():  # either may claim anything, and some readers go round in circles
                raise ValueError("a member without a size of its own")
            name = PurePosixPath(member.name).name
            if member.isfile() and _BATCH.fullmatch(name):
                batches.append((len(name), name, member))
        for _, name, member in sorted(batches, key=lambda batch: batch[:2]):
            file = tar.extractfile(member)
            assert file is not None
            yield name, file.read()


def _batch_pixels(content: bytes) -> npt.NDArray[np.uint8]:
    """Images of one pickled batch, uint8 (n, 32, 32, 3); it stores each as 3 planes of 32 rows of 32 pixels.

    The pickle is not run: its longest string, of bytes, is the array, after NEWTRUE one in Fortran order.
    """
    seen, last, data, before = set[object](), "", b"", ""
    for opcode, argument, _ in pickletools.genops(content):
        if isinstance(argument, str | bytes) and ("STRING" in opcode.name or "BYTES" in opcode.name):
            text = argument.encode("latin-1") if isinstance(argument, str) else argument
            data, before = (text, last) if len(text) > len(data) else (data, before)
        seen.add(argument)
        last = opcode.name
    if "u1" not in seen or before == "NEWTRUE" or len(data) % (3 * CIFAR_SIDE**2):
        raise ValueError("a batch is no uint8 array of whole rows of 3072 bytes")
    planes = np.frombuffer(data, np.uint8).reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))
