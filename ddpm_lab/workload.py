"""The protocol of a workload, which lets the lab measure any training step.

A workload is named ``module:function``. Each rank calls ``function(config, context)`` once, in a new process, and then
alternates ``next(batches)`` and ``step(batch)``. Users provide a ``Training``, which ``training.own`` wraps.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ddpm_lab.config import RunConfig


class Unsupported(RuntimeError):  # noqa: N818 - a state of the machine that is recorded, not a defect
    """The machine cannot run the configuration; the message says what is missing and how to get it."""


def _unwatched(ddp: Any, hook: Any = None) -> None:
    """Register the communication hook, if any, without timing the exchange, as only a time budget does."""
    if hook is not None:
        ddp.register_comm_hook(None, hook)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Where a workload runs (``device`` is a torch device string), and functions with which it reports progress.

    ``mark(phase)`` reports what the rank does next. It divides a step into phases, shows what a hanging rank was doing,
    and takes a microsecond. The lab marks "data"; the workload marks "copy" (host to device), "forward", "backward",
    "optimizer", "ema" and "communication" (or "all-reduce"); others are shown as given. ``span(name, start, end)``,
    in seconds of ``time.perf_counter``, reports work beside the phases, from any thread. ``watch(ddp)``, or
    ``watch(ddp, hook)`` with a communication hook, reports a DDP module's gradient exchange; call it once, at first.
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
        """Return an endless iterator over this rank's batches, in an order determined by the configuration's seed."""
        ...

    def step(self, batch: Any) -> Any:
        """Run an optimizer step. Returns the loss, a detached 0-d tensor or a float, without waiting for the device."""
        ...

    def witness(self) -> dict[str, Any]:
        """Return the actual settings, read from the running objects, which are compared with the configuration.

        The lab interprets ``precision``, ``compile``, ``loader_workers``, ``prefetch_batches``, ``data_sha256``,
        ``indices_sha256`` and ``images``. Other entries are only recorded.
        """
        ...

    def close(self) -> None:
        """Stop everything that was started, such as loader workers."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Your own training. The lab sets precision, compilation, ranks and loading.

    It is returned by a function ``make()`` or ``make(config, context)``, which every rank calls once, with seeded
    generators (torch, numpy, random). ``loss`` and ``step`` must use the model that they are given: the lab wraps it.

    Args:
        model: the network, a ``torch.nn.Module`` on the CPU.
        data: a map-style dataset (``len(data)``, and ``data[i]`` is a sample), which the lab shuffles, splits between
            ranks and batches; or an iterable of batches of ``config.rank_batch_size`` samples for this rank.
        loss: ``loss(model, batch)`` returns the mean loss of a batch on the device, a tensor with one element.
        step: instead of ``loss``, ``step(model, batch)`` runs a whole step, with backward pass and optimizer, and
            returns its loss. It chooses its own number format.
        optimizer: a ``torch.optim.Optimizer`` of ``model.parameters()``. Default: Adam with the learning rate of
            ``config.optimizer``. Not used with ``step``.
        collate: makes a batch from a list of samples. Default: torch's ``default_collate``.
        held_out_loss: ``held_out_loss(model)`` returns the loss on data that is not trained on, as a number. The model
            is in eval mode on the device, without gradients. Without this, quality is not measured.
    """

    model: Any
    data: Any
    loss: Callable[[Any, Any], Any] | None = None
    step: Callable[[Any, Any], Any] | None = None
    optimizer: Any = None
    collate: Callable[[list[Any]], Any] | None = None
    held_out_loss: Callable[[Any], Any] | None = None


def call_maker(function: Callable[..., Any], name: str, config: RunConfig, context: RankContext) -> Any:
    """Return ``function(config, context)`` or ``function()``. Raises TypeError if it takes other arguments."""
    found: Iterable[inspect.Parameter] = inspect.signature(function).parameters.values()
    takes = sum(p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD for p in found)
    if takes not in (0, 2):
        raise TypeError(f"workload {name} takes {takes} arguments: write it to take none, or (config, context)")
    return function(config, context) if takes == 2 else function()


def place_of(function: Any) -> str:
    """Return where a function is defined, such as "mine.py, line 12"; empty if that is unknown."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{Path(code.co_filename).name}, line {code.co_firstlineno}" if code else ""


def named(name: str, function: Any) -> str:
    """Return a workload's name for messages, with the place where its function is defined if known."""
    place = place_of(function)
    return f"{name} ({place})" if place else name
