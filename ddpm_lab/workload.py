"""The thing being trained, as the lab sees it: a small protocol, so that any training step can be measured.

A workload is named ``module:function`` in the configuration. Every rank calls ``function(config, context)`` once, in a
fresh process, and then alternates ``next(batches)`` and ``step(batch)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol


class Unsupported(RuntimeError):  # noqa: N818 - a state of the machine that becomes a row, not a defect
    """The machine cannot run the configuration; the message says what is missing and how to get it."""


def _nothing(*_: Any) -> None:
    """Spans are of interest only where a time budget is taken."""


def _unwatched(ddp: Any, hook: Any = None) -> None:
    """When gradients are exchanged is of interest only where a time budget is taken; how they are is the workload's."""
    if hook is not None:
        ddp.register_comm_hook(None, hook)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Where a workload runs.

    ``mark(phase)`` tells the watching parent what the rank is about to do, so that a rank that hangs can be named with
    what it was doing, and cuts a step into the phases of its time budget; it costs about a microsecond. The lab marks
    "data"; "copy" (host to device), "forward", "backward", "optimizer", "ema" and "communication" (or "all-reduce")
    are the workload's, and any other name is shown as it is. ``span(name, start, end)`` reports what ran beside these
    phases, in seconds of ``time.perf_counter``; any thread may call it. ``watch(ddp)`` does so for the gradient
    exchange of a DistributedDataParallel module: once, before its first step; ``watch(ddp, hook)`` where that is done
    by a communication hook, which it registers. No time is noted where no budget is taken.
    ``device`` is a torch device string.
    """

    rank: int
    world_size: int
    device: str
    threads: int
    mark: Callable[[str], None]
    span: Callable[[str, float, float], None] = _nothing
    watch: Callable[..., None] = _unwatched


class Workload(Protocol):
    """One rank's share of a training run."""

    def batches(self) -> Iterator[Any]:
        """Endless batches of this rank's share, in the order fixed by the configuration's seed."""
        ...

    def step(self, batch: Any) -> Any:
        """One optimizer step; returns the loss as a detached 0-d tensor or a float, without waiting for the device."""
        ...

    def witness(self) -> dict[str, Any]:
        """What really runs, read back from the objects that run; compared with the configuration.

        Names with a meaning to the lab: ``precision``, ``compile``, ``loader_workers``, ``prefetch_batches``,
        ``data_sha256``, ``indices_sha256`` and ``images``. Others are recorded as they are.
        """
        ...

    def close(self) -> None:
        """Stop whatever was started."""
        ...
