"""Loaders, which all give the same batches: gathered from one array, decoded file by file, or made on the device.

Pixels of n images are uint8 (n, 3 S S): each row is an image in the order S, S, 3, as it is stored.
"""

import ctypes
import itertools
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch.utils.data import DataLoader, Dataset

from ddpm_lab.data.draws import Plan
from ddpm_lab.data.folder import DataError, decode
from ddpm_lab.data.packed import PackedImages
from ddpm_lab.workload import Unsupported

PREFETCH_FACTOR = 2
PR_SET_PDEATHSIG = 1
MIRROR_SHARE = 0.25
"""A resident set is also kept mirrored where both together take at most this part of the free memory."""
MIRRORED_BYTES = 512 * 2**20
"""Memory for a copy of a set with its mirrored images, 87,000 of 32x32: to mirror takes longer than all the rest."""
_UPLOAD_BYTES = 64 * 2**20
Scale = Callable[[torch.Tensor], torch.Tensor]


class Batch(NamedTuple):
    """One rank's part of a batch: float32 (n, 3, S, S) in [-1, 1] on the device or the host, and image indices."""

    images: torch.Tensor
    indices: npt.NDArray[np.int64]
    step: int


def model_range(side: int, channels_last: bool, device: torch.device | str = "cpu") -> Scale:
    """Make what maps pixels, uint8 (n, 3 S S), to the range of the network, float32 (n, 3, S, S): x / 127.5 - 1.

    Division and subtraction are rounded each for itself, on every kind of device, so that all give the same bits; a
    number as the divisor would be a product with its inverse on a GPU.
    """
    layout, divisor = torch.channels_last if channels_last else torch.contiguous_format, torch.tensor(127.5).to(device)

    def scale(pixels: torch.Tensor) -> torch.Tensor:
        images = pixels.view(-1, side, side, 3).permute(0, 3, 1, 2)
        return images.to(torch.float32, memory_format=layout).div_(divisor).sub_(1)

    return scale


class PixelRows:
    """The images on a device, each as it is or mirrored; without ``copy`` where they lie.

    Of N images the i-th is row i, and mirrored left to right it is row i + N, whether or not it is stored there:
    without ``mirror`` images are mirrored as they are asked for.
    """

    def __init__(self, packed: PackedImages, device: torch.device, *, copy: bool, mirror: bool) -> None:
        pixels = np.asarray(packed.images).reshape(packed.manifest.count, -1)  # of a map only its memory
        self.device, self.side, self.width = device, packed.manifest.image_size, pixels.shape[1]
        self._count, self._both = len(pixels), mirror
        if not copy:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)  # nobody writes to it
                self._rows = torch.from_numpy(pixels)
            return
        self._rows = torch.empty((1 + mirror) * len(pixels), self.width, dtype=torch.uint8, device=device)
        step = max(1, _UPLOAD_BYTES // self.width)
        for start in range(0, len(pixels), step):
            part = torch.from_numpy(pixels[start : start + step].copy())
            self._rows[start : start + len(part)] = part
            if mirror:
                self._rows[len(pixels) + start :][: len(part)] = mirrored(part, self.side)

    def numbers(self, indices: npt.NDArray[np.int64], flips: npt.NDArray[np.bool_]) -> torch.Tensor:
        found = torch.from_numpy(indices + self._count * flips)
        # torch does not give page-locked memory to anybody else before the copy that reads it has finished.
        return found.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else found

    def gather(self, numbers: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy the rows ``numbers``, (n,), into ``out`` or a new tensor, uint8 (n, 3 S S)."""
        if self._both:
            return torch.index_select(self._rows, 0, numbers, out=out)
        pixels = torch.index_select(self._rows, 0, numbers % self._count, out=out)
        return torch.where((numbers >= self._count)[:, None], mirrored(pixels, self.side), pixels, out=pixels)


def mirrored(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """The images of ``pixels``, uint8 (n, 3 S S), mirrored left to right."""
    images = pixels.view(-1, side, side, 3).permute(0, 3, 1, 2)
    return images.flip(3).permute(0, 2, 3, 1).flatten(1)  # in this layout torch mirrors with vector instructions


class Loader:
    """An endless iterator over batches; it goes on where it stopped.

    ``kind`` is its name among the settings. ``prefetch_batches`` is how many batches may be ready before they are asked
    for: what a timed window must consume first so that it does not profit from time before it.
    """

    def __init__(self, kind: str, batches: Iterator[Any], prefetch_batches: int = 0) -> None:
        self.kind = kind
        self.prefetch_batches = prefetch_batches
        self._batches = batches
        self._workers: list[BaseProcess] = getattr(batches, "_workers", [])

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def live_workers(self) -> int:
        return sum(worker.is_alive() for worker in self._workers)

    def close(self) -> None:
        # torch's iterator ends its workers when it is dropped, but the traceback of an error may still hold it.
        shut_down = getattr(self._batches, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
        self._batches = iter(())
        for worker in self._workers:
            worker.kill()  # one that did not end in torch's time
            worker.join()


def dataset_loader(
    dataset: Dataset[Any],
    batches: Iterable[list[Any]],
    *,
    workers: int,
    collate: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
    seed: int = 0,
) -> Loader:
    """Load the samples that each entry of ``batches`` lists, in ``workers`` processes (0: in this one).

    The workers start at once and live until ``close``; each has at most two batches under way. A worker ends with its
    training process.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=collate,
        pin_memory=pin_memory and torch.cuda.is_available(),
        prefetch_factor=PREFETCH_FACTOR if workers else None,
        worker_init_fn=partial(_exit_with_parent, os.getpid()) if workers else None,
        multiprocessing_context="fork" if workers else None,
        # Else the loader would draw from torch's global generator, and the choice of a loader change the run.
        generator=torch.Generator().manual_seed(seed),
    )
    with warnings.catch_warnings():
        # Python 3.12 warns of any fork beside threads; these children only load and never use a thread pool.
        warnings.filterwarnings("ignore", message=r".*multi-threaded.*fork", category=DeprecationWarning)
        return Loader("files", iter(loader), PREFETCH_FACTOR * workers)


def _exit_with_parent(parent: int, _worker: int) -> None:
    """End this worker with its training process; torch looks every 5 s, and only while it waits for work."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before
        os._exit(1)


def open_loader(
    kind: str,
    packed: PackedImages,
    plan: Plan,
    *,
    workers: int = 0,
    device: torch.device | str = "cpu",
    channels_last: bool = False,
) -> Loader:
    """Open a loader of a kind; the batches of a plan are the same from all but the last.

    - ``packed`` gathers, mirrors and scales whole batches from the packed array, in this process. For a CUDA device the
      next batch is gathered and sent while the device works on the one before, so one may be ready before it is asked
      for. On a CPU none is.
    - ``files`` decodes each image from its file, in ``workers`` processes (0: in this one), as is usual. Batches lie in
      the host's memory.
    - ``resident`` makes batches on the device, from one array there of all the images.
    - ``still`` repeats the first batch, from the memory of the device: what is left of a step's time is the step with
      perfect data.

    Raises DataError where the files that the prepared folder was made from are gone or have changed, Unsupported where
    the images do not fit into the device's free memory.
    """
    device = torch.device(device)
    side = packed.manifest.image_size
    if kind == "files":
        return _decoded(packed, plan, workers, model_range(side, channels_last), pin_memory=device.type == "cuda")
    if kind == "resident":
        # The host's file cache counts as free.
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
        if (size := packed.images.nbytes) > free:
            room = f"{size / 2**20:,.0f} MiB and {device} has {free / 2**20:,.0f} MiB free"
            raise Unsupported(f"the {packed.manifest.count:,} images take {room}; use loader 'packed'")
        rows = PixelRows(packed, device, copy=True, mirror=2 * size <= MIRROR_SHARE * free)
        return Loader(kind, _gathered(plan, rows, model_range(side, channels_last, device)))
    both = 2 * packed.images.nbytes <= MIRRORED_BYTES
    rows = PixelRows(packed, torch.device("cpu"), copy=both, mirror=both)
    if kind == "packed" and device.type == "cuda":
        return Loader(kind, _sent_ahead(plan, rows, device, model_range(side, channels_last, device)), 1)
    batches = _gathered(plan, rows, model_range(side, channels_last))
    if kind == "still":
        first = next(batches)
        first = first._replace(images=first.images.to(device))
        batches = (first._replace(step=step) for step in itertools.count(plan.start_step))
    return Loader(kind, batches)


def _numbered(plan: Plan, rows: PixelRows) -> Iterator[tuple[int, npt.NDArray[np.int64], torch.Tensor]]:
    """Steps, image indices, and the rows of these images as they are or mirrored."""
    for step, indices, flips in plan.blocks():
        yield from zip(itertools.count(step), indices, rows.numbers(indices, flips).unbind(), strict=False)


def _gathered(plan: Plan, rows: PixelRows, scale: Scale) -> Iterator[Batch]:
    for step, indices, numbers in _numbered(plan, rows):
        yield Batch(images=scale(rows.gather(numbers)), indices=indices, step=step)


def _sent_ahead(plan: Plan, rows: PixelRows, device: torch.device, scale: Scale) -> Iterator[Batch]:
    """Gather batches and send them to a CUDA device as bytes, one ahead, on a stream beside the one that trains."""
    # Urgent, so that scaling does not queue behind a network that fills the device.
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    # The constants of the scaling were written on the stream that is current now.
    stream.wait_stream(torch.cuda.current_stream(device))
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    for step, indices, numbers in _numbered(plan, rows):
        pixels = rows.gather(numbers, torch.empty(len(numbers), rows.width, dtype=torch.uint8, pin_memory=True))
        with torch.cuda.stream(stream):
            images = scale(pixels.to(device, non_blocking=True))
            sent = Batch(images=images, indices=indices, step=step), stream.record_event()
        if ahead is not None:
            batch, ready = ahead
            current = torch.cuda.current_stream(device)
            current.wait_event(ready)
            # The memory belongs to the other stream, which must not use it again before this one has done with it.
            batch.images.record_stream(current)
            yield batch
        ahead = sent


def _decoded(packed: PackedImages, plan: Plan, workers: int, scale: Scale, *, pin_memory: bool) -> Loader:
    files = packed.files
    if files is None:
        raise DataError(
            f"the files that {packed.dest} was prepared from are gone or have changed ({packed.manifest.source}); "
            "put them back, prepare them again, or use the packed loader"
        )

    def collate(samples: list[tuple[int, int, npt.NDArray[np.uint8]]]) -> Batch:
        steps, indices, pixels = zip(*samples, strict=True)
        images = scale(torch.from_numpy(np.stack(pixels)).flatten(1))
        if workers:  # as the queue would, in a thread that tells nobody where /dev/shm is full
            images.share_memory_()  # type: ignore[no-untyped-call]
        return Batch(images=images, indices=np.array(indices), step=steps[0])

    keys = (
        [(step, index, flip) for index, flip in zip(indices.tolist(), flips.tolist(), strict=True)]
        for step, indices, flips in plan.draws()
    )
    images = _Files(files, packed.manifest.image_size)
    return dataset_loader(images, keys, workers=workers, collate=collate, pin_memory=pin_memory)


class _Files(Dataset[tuple[int, int, npt.NDArray[np.uint8]]]):
    """Decodes one file, as often as it is asked to."""

    def __init__(self, files: tuple[str, ...], image_size: int) -> None:
        # One array instead of many strings: reading a string writes its reference count, which would copy the shared
        # pages into every forked worker.
        self._paths = np.array([os.fsencode(path) for path in files])
        self._image_size = image_size

    def __getitem__(self, key: tuple[int, int, bool]) -> tuple[int, int, npt.NDArray[np.uint8]]:
        step, index, flip = key
        pixels = decode(os.fsdecode(self._paths[index]), self._image_size)
        return step, index, pixels[:, ::-1] if flip else pixels
