"""Anybody's own loop as a workload: a generator that yields after every step, or a function that does one step.

    def mine():                     def mine():
        model, data = ...               model, data = ...
        for batch in data:              def step():
            loss = ...                      ...
            yield loss                      return loss
                                        return step

The first form is an ordinary training loop with a ``yield`` in it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from ddpm_lab.config import RunConfig
from ddpm_lab.workload import RankContext, Training, Workload, call_maker, named


class LoopEnded(RuntimeError):  # noqa: N818 - it names what happened
    """A generator that has no more steps."""


class Plain:
    """A loop without batches, device or witness of its own: what it runs on is its own affair."""

    def __init__(self, step: Callable[[], Any], config: RunConfig, context: RankContext) -> None:
        self._step, self.config, self._mark = step, config, context.mark
        self.steps = 0

    def batches(self) -> Iterator[Any]:
        """The loop fetches its own data."""
        return itertools.repeat(None)

    def step(self, batch: Any) -> Any:
        """One step; what it gives is its loss if it is a number, and otherwise nothing is known of its loss."""
        del batch
        self._mark("whole step")
        result = self._step()
        self.steps += 1
        if hasattr(result, "detach"):
            return result.detach() if result.numel() == 1 else 0.0
        return result if isinstance(result, int | float) else 0.0

    def witness(self) -> dict[str, Any]:
        """All that can be said of a stranger's loop."""
        return {"images": self.steps * self.config.rank_batch_size}

    def close(self) -> None:
        """The process ends after this; nothing else is known to be open."""


def make_workload(function: Callable[..., Any], name: str, config: RunConfig, context: RankContext) -> Workload:
    """Call ``function(config, context)``, or ``function()``, and take what it returns as a workload.

    Raises TypeError, in one sentence, for anything else.
    """
    made = call_maker(function, name, config, context)
    if all(hasattr(made, method) for method in ("batches", "step", "witness", "close")):
        workload: Workload = made
        return workload
    if inspect.isgenerator(made):
        return Plain(_endless(made, name), config, context)
    if callable(made):
        return Plain(made, config, context)
    if isinstance(made, Training):
        raise TypeError(f"workload {name} returned a Training, which is for ddpm-lab run --workload {name}")
    raise TypeError(
        f"workload {named(name, function)} returned {type(made).__name__}: let it yield after every step, or return a "
        "function that does one step, or a Training"
    )


def _endless(loop: Iterator[Any], name: str) -> Callable[[], Any]:
    """One step of a generator; an exhausted one says how to go on."""
    done = itertools.count()

    def step() -> Any:
        for result in loop:
            next(done)
            return result
        count = next(done)
        raise LoopEnded(f"the loop of {name} ended after {count} step{'s' * (count != 1)}: let it go on (while True)")

    return step
