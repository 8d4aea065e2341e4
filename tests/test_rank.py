"""What a rank does with anybody's loop, and with the memory that it frees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.rank import make_workload
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
    losses = [workload.step(None) for _ in range(3)]
    assert seen == [float(loss) for loss in losses] == [0, 1, 2]
    assert not any(loss.requires_grad for loss in losses), "a kept graph would grow with every window"
    assert workload.witness()["images"] == 3 * 4
    with pytest.raises(RuntimeError, match=r"mine:f ended after 3 steps"):
        workload.step(None)


def test_a_workload_is_taken_as_it_is_a_function_is_a_step_and_anything_else_is_refused() -> None:
    class Own:
        def __init__(self, config: RunConfig, context: RankContext) -> None:
            self.given = config, context

        def batches(self) -> None: ...

        step = witness = close = batches

    assert make(Own).given == (CONFIG, CONTEXT)
    assert make(lambda: lambda: 0.5).step(None) == 0.5
    functions: list[tuple[Callable[..., Any], str]] = [(lambda _a: None, "takes 1 arg"), (lambda: 5, "returned int")]
    for function, words in functions:
        with pytest.raises(TypeError, match=words):
            make(function)
