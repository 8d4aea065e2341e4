"""Anybody's loop as a workload: what forms it may have, and what is said of others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.plain import LoopEnded, make_workload
from ddpm_lab.workload import RankContext

CONTEXT = RankContext(rank=0, world_size=1, device="cpu", threads=1, mark=lambda _: None)
CONFIG = RunConfig(global_batch_size=4)


def make(function: Callable[..., Any]) -> Any:
    return make_workload(function, "mine:f", CONFIG, CONTEXT)


def test_a_generator_steps_at_every_yield() -> None:
    seen: list[int] = []

    def loop() -> Iterator[torch.Tensor]:
        for i in range(3):
            seen.append(i)
            yield torch.tensor(float(i), requires_grad=True)

    workload = make(loop)
    assert seen == []
    batches = workload.batches()
    losses = [workload.step(next(batches)) for _ in range(3)]
    assert seen == [0, 1, 2]
    assert [float(loss) for loss in losses] == [0, 1, 2]
    assert not any(loss.requires_grad for loss in losses), "a kept graph would grow with every window"
    assert workload.witness()["images"] == 3 * 4
    with pytest.raises(LoopEnded, match=r"the loop of mine:f ended after 3 steps: let it go on"):
        workload.step(None)


def test_a_workload_is_taken_as_it_is() -> None:
    class Own:
        def __init__(self, config: RunConfig, context: RankContext) -> None:
            self.given = (config, context)

        def batches(self) -> Iterator[int]:
            yield 1

        def step(self, batch: int) -> float:
            return float(batch)

        def witness(self) -> dict[str, Any]:
            return {}

        def close(self) -> None: ...

    made = make(Own)
    assert isinstance(made, Own)
    assert made.given == (CONFIG, CONTEXT)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda _a: None, "takes 1 arguments: write it to take none, or (config, context)"),
        (lambda: 5, ") returned int: let it yield after every step"),
        (lambda: None, ") returned NoneType"),
    ],
)
def test_anything_else_is_refused_in_a_sentence(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(TypeError) as refusal:
        make(function)
    assert words in str(refusal.value)
