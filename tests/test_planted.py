"""The planted work is what it says: so many equal pieces."""

from __future__ import annotations

import pytest
import torch

from ddpm_lab.config import RunConfig
from ddpm_lab.training.planted import pieces
from ddpm_lab.workload import RankContext

CONTEXT = RankContext(rank=0, world_size=1, device="cpu", threads=1, mark=lambda _: None)


@pytest.mark.parametrize("count", [100, 105])
def test_a_step_does_so_many_pieces(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = pieces(RunConfig(global_batch_size=1, options=(("pieces", count),)), CONTEXT)
    calls = 0
    forward = torch.nn.Conv2d.forward

    def counted(self: torch.nn.Conv2d, values: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(self, values)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", counted)
    workload.step(None)
    workload.step(None)
    assert calls == 2 * count
    assert workload.witness() == {"pieces": count, "images": 2}
