"""Anybody's loop as a workload: what forms it may have, what is said of others, and the examples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.plain import LoopEnded, make_workload
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.training.own import own
from ddpm_lab.training.setting import Own
from ddpm_lab.workload import RankContext

CONTEXT = RankContext(rank=0, world_size=1, device="cpu", threads=1, mark=lambda _: None)
CONFIG = RunConfig(global_batch_size=4)
CHECKOUT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path.stem for path in (CHECKOUT / "examples").glob("*.py"))


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
    assert [float(loss) for loss in losses] == seen == [0, 1, 2]
    assert not any(loss.requires_grad for loss in losses), "a kept graph would grow with every window"
    assert workload.witness()["images"] == 3 * 4
    with pytest.raises(LoopEnded, match=r"the loop of mine:f ended after 3 steps: let it go on"):
        workload.step(None)


def test_a_workload_is_taken_as_it_is() -> None:
    class Mine:
        def __init__(self, config: RunConfig, context: RankContext) -> None:
            self.given = (config, context)

        def batches(self) -> Iterator[int]:
            yield 1

        def step(self, batch: int) -> float:
            return float(batch)

        def witness(self) -> dict[str, Any]:
            return {}

        def close(self) -> None: ...

    made = make(Mine)
    assert isinstance(made, Mine)
    assert made.given == (CONFIG, CONTEXT)


def test_anything_else_is_refused_in_a_sentence() -> None:
    refused: dict[str, Callable[..., Any]] = {"takes 1 arguments: write it to take none": lambda _a: None}
    refused |= {"returned int: let it yield after every step": lambda: 5, "returned NoneType": lambda: None}
    for words, function in refused.items():
        with pytest.raises(TypeError, match=words):
            make(function)


def test_an_example_is_short_and_the_docs_name_it() -> None:
    for name in EXAMPLES:
        text = (CHECKOUT / "examples" / f"{name}.py").read_text()
        assert len(text.splitlines()) < 40
        assert f"--workload examples.{name}:make" in text
        assert f"examples.{name}:make" in (CHECKOUT / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_example_trains_as_its_label_says(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "diffusion":
        pytest.importorskip("diffusers", reason="diffusers is not installed: make peers")
    monkeypatch.syspath_prepend(str(CHECKOUT))
    settings = Own(name=f"examples.{name}:make").settings()
    config = RunConfig(**settings, global_batch_size=4, precision=precision)
    training = own(config, CONTEXT)
    losses = [float(training.step(batch)) for batch in itertools.islice(training.batches(), 3)]
    assert all(0 < loss < 10 for loss in losses)
    assert mismatches(config, [{"rank": 0, "device": "cpu", "steps": 3, **training.witness()}]) == []
    if training.made.held_out_loss:
        assert math.isfinite(training.held_out_loss(draws=1)["loss"])
