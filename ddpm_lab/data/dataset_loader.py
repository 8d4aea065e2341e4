"""Batches of any dataset, sample by sample as torch's DataLoader makes them, in worker processes that end in order."""

import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any, Self

import torch
from torch.utils.data import DataLoader, Dataset

PREFETCH_FACTOR = 2
ORPHAN_CHECK_SECONDS = 1.0


class DatasetLoader:
    """The samples that each entry of ``batches`` lists, made in ``workers`` processes (0: in this one).

    The workers start with the loader and live until ``close``; each has at most two batches under way. A worker whose
    training process dies ends within about a second.

    Raises:
        ValueError: ``workers`` is negative.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batches: Iterable[list[Any]],
        *,
        workers: int,
        collate: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        seed: int = 0,
    ) -> None:
        if workers < 0:
            raise ValueError(f"{workers} loader workers are impossible; give 0 or more")
        self.prefetch_batches = PREFETCH_FACTOR * workers
        self._workers: list[BaseProcess] = []
        loader = DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=pin_memory and torch.cuda.is_available(),
            prefetch_factor=PREFETCH_FACTOR if workers else None,
            worker_init_fn=_ExitWithParent(os.getpid()) if workers else None,
            multiprocessing_context="fork" if workers else None,
            # Else the loader would draw from torch's global generator, and the choice of a loader change the run.
            generator=torch.Generator().manual_seed(seed),
        )
        before = set(multiprocessing.active_children())
        with warnings.catch_warnings():
            # Python 3.12 warns of any fork beside threads; these children only load and never use a thread pool.
            warnings.filterwarnings("ignore", message=r".*multi-threaded.*fork", category=DeprecationWarning)
            self._batches: Iterator[Any] | None = iter(loader)
        if workers:
            self._workers = [child for child in multiprocessing.active_children() if child not in before]

    def __iter__(self) -> Self:
        """Return itself: a loader goes on where it stopped."""
        return self

    def __next__(self) -> Any:
        """Give the next batch."""
        if self._batches is None:
            raise StopIteration
        return next(self._batches)

    def live_workers(self) -> int:
        """Return the number of loader worker processes that are alive now."""
        return sum(worker.is_alive() for worker in self._workers)

    def close(self) -> None:
        """End the workers and wait for them."""
        # torch's iterator ends its workers when it is dropped, but the traceback of an error may still hold it.
        shut_down = getattr(self._batches, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()
        self._batches = None
        for worker in self._workers:
            worker.join(timeout=5)
            if worker.is_alive():
                worker.kill()
                worker.join()


class _ExitWithParent:
    """Makes a loader worker end soon after its training process, however that dies.

    torch's own watch looks every 5 seconds and only while the worker waits for work.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def __call__(self, worker_id: int) -> None:
        threading.Thread(target=self._watch, name=f"orphan watch {worker_id}", daemon=True).start()

    def _watch(self) -> None:
        while os.getppid() == self._parent:
            time.sleep(ORPHAN_CHECK_SECONDS)
        os._exit(1)
