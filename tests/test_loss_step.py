"""What a step of anybody's loss says of itself: an exchange is one that happened, not a wrapper that stands ready."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddpm_lab.config import OWN, RunConfig
from ddpm_lab.diffusion.step import LossStep
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.workload import RankContext

LABEL = RunConfig(workload=OWN, options=(("make", "mine:make"),), world_size=2, global_batch_size=2)
OFFERED = {"rank": 0, "device": "cpu", "maker": "mine.py, line 32", "place": "mine.py, line 27"}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group in this process, in which a network can be wrapped as in one of two ranks."""
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    moved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("moved", torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        self.moved += 1  # a buffer that is each rank's own
        return self.own_loss(images)

    def own_loss(self, images: Tensor) -> Tensor:
        out: Tensor = self.layer(images)
        return out.square().mean()


def trained(label: RunConfig, way: str, *, whole: bool = False) -> dict[str, Any]:
    """What rank 0 says after three steps in which the loss reaches the network in one of several ways."""
    context = RankContext(rank=0, world_size=label.world_size, device="cpu", threads=1, mark=lambda _: None)
    network = Net()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def loss(model: Any, batch: Tensor) -> Tensor:
        if way == "looked at":
            with torch.no_grad():
                model(batch)
        reached = {"given": model, "module": getattr(model, "module", network).own_loss}
        found: Tensor = reached.get(way, network)(batch)
        return found

    def step(model: Any, batch: Tensor) -> Tensor:
        found = loss(model, batch)
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return found

    training = LossStep(label, context, network, loss, optimizer, whole=step if whole else None)
    for _ in range(3):
        training.step(torch.ones(1, 3))
    offers = ["dataset"] if whole else ["dataset", "loss"]
    return {**OFFERED, "offers": offers, "steps": training.steps, **training.witness()}


def without(label: RunConfig) -> RunConfig:
    """Ranks that are measured on purpose without an exchange."""
    return dataclasses.replace(label, exchange=dataclasses.replace(label.exchange, enabled=False))


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(
    ("way", "happened"), [("given", True), ("held", False), ("module", False), ("looked at", False)]
)
def test_ranks_exchange_where_the_loss_calls_what_it_is_given(
    way: str, happened: bool, whole: bool, static_graph: bool
) -> None:
    exchange = dataclasses.replace(LABEL.exchange, static_graph=static_graph)
    label = dataclasses.replace(LABEL, exchange=exchange)
    seen = trained(label, way, whole=whole)
    other = {**seen, "rank": 1}
    assert seen["exchange_enabled"] is happened
    if happened:
        assert mismatches(label, [seen, other]) == []
        return
    (sentence,) = mismatches(label, [seen, other])
    what = "step" if whole else "loss"
    assert sentence.startswith(
        "mine:make (mine.py, line 32) exchanged no gradients between its 2 ranks in 3 steps: let its "
        f"{what} (mine.py, line 27) call the model that it is given, as model(...)"
    )


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("way", ["given", "held"])
def test_without_an_exchange_nothing_is_missed(way: str) -> None:
    label = without(LABEL)
    seen = trained(label, way)
    assert mismatches(label, [seen, {**seen, "rank": 1}]) == []
    alone = dataclasses.replace(LABEL, world_size=1)
    assert mismatches(alone, [trained(alone, way)]) == []


def test_what_goes_past_the_compiled_model_is_told_with_its_line() -> None:
    label = dataclasses.replace(LABEL, world_size=1, compile="whole")
    seen = {**OFFERED, "offers": ["loss"], "steps": 3, "compile": "off"}
    (sentence,) = mismatches(label, [seen])
    assert sentence.startswith("mine:make (mine.py, line 32) was not compiled in 3 steps: let its loss (mine.py, line")
    assert mismatches(label, [{**seen, "compile": "whole"}]) == []
