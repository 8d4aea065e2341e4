"""The thing being trained, as the lab sees it: a small protocol, so that any training step can be measured.

A workload is named ``module:function``. Every rank calls ``function(config, context)`` once, in a fresh process, and
then alternates ``next(batches)`` and ``step(batch)``. A user gives a ``Training``, which ``training.own`` makes one of.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddpm_lab.config import RunConfig


class Unsupported(RuntimeError):  # noqa: N818 - a state of the machine that becomes a row, not a defect
    """The machine cannot run the configuration; the message says what is missing and how to get it."""


def _unwatched(ddp: Any, hook: Any = None) -> None:
    """When gradients are exchanged is of interest only where a time budget is taken; how they are is the workload's."""
    if hook is not None:
        ddp.register_comm_hook(None, hook)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Where a workload runs, ``device`` as a torch device string, and whom it tells.

    ``mark(phase)`` says what the rank does next: it cuts a step into phases, names what a rank that hangs was doing,
    and costs a microsecond. The lab marks "data"; "copy" (host to device), "forward", "backward", "optimizer", "ema"
    and "communication" (or "all-reduce") are the workload's, and any other name is shown as it is.
    ``span(name, start, end)``, in seconds of ``time.perf_counter``, reports what ran beside these, from any thread.
    ``watch(ddp)``, or ``watch(ddp, hook)`` with a communication hook, does so for the gradient exchange of a
    DistributedDataParallel module: once, before its first step.
    """

    rank: int
    world_size: int
    device: str
    threads: int
    mark: Callable[[str], None]
    span: Callable[[str, float, float], None] = lambda *_: None
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training of your own: what only you can know. Precision, compilation, ranks and loading are the lab's to set.

    A function ``make()``, or ``make(config, context)``, returns it; every rank calls that once, with seeded generators
    (torch, numpy, random). ``loss`` and ``step`` must call the model that they are given, which the lab has wrapped.

    Args:
        model: the network, a ``torch.nn.Module``, on the CPU.
        data: a map-style dataset (``len(data)``, ``data[i]`` one sample), which the lab shuffles, shares between ranks
            and makes batches of; or an iterable of ready batches of ``config.rank_batch_size`` samples for this rank.
        loss: ``loss(model, batch)`` is the mean loss of a batch on the device, a tensor of one number.
        step: in place of it, ``step(model, batch)`` is a whole step, backward pass and optimizer included, and returns
            its loss. Its number format is your own.
        optimizer: a ``torch.optim.Optimizer`` of ``model.parameters()``; None is Adam with the learning rate of
            ``config.optimizer``. A ``step`` brings its own.
        collate: makes a batch of a list of samples; None is torch's ``default_collate``.
        held_out_loss: ``held_out_loss(model)`` is a loss, a number, on data that is never trained on, of the model in
            eval mode, without gradients, on the device. Without it nothing is said about quality.
    """

    model: Any
    data: Any
    loss: Callable[[Any, Any], Any] | None = None
    step: Callable[[Any, Any], Any] | None = None
    optimizer: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    held_out_loss: Callable[[Any], Any] | None = None


def call_maker(function: Callable[..., Any], name: str, config: RunConfig, context: RankContext) -> Any:
    """What ``function(config, context)``, or ``function()``, returns. Raises TypeError for one with other arguments."""
    found: Iterable[inspect.Parameter] = inspect.signature(function).parameters.values()
    takes = sum(p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in found)
    if takes not in (0, 2):
        raise TypeError(f"workload {name} takes {takes} arguments: write it to take none, or (config, context)")
    return function(config, context) if takes == 2 else function()


def place_of(function: Any) -> str:
    """Where a function is written, such as "mine.py, line 12"; empty where that cannot be told."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}" if code else ""


def named(name: str, function: Any) -> str:
    """A workload's name for a sentence about it, with the place of its function where that can be told."""
    place = place_of(function)
    return f"{name} ({place})" if place else name
