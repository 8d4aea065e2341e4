"""Workloads with a known answer: an all-reduce, and planted pieces."""

import pytest
import torch
from fresh_processes import context

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.group import Group
from ddpm_lab.questions.exchange import WORKLOAD as ALL_REDUCE
from ddpm_lab.training.limits import pieces

CONTEXT = context()


def test_a_planted_step_does_so_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = 0, torch.nn.Conv2d.forward

    def counted(self: torch.nn.Conv2d, values: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(self, values)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", counted)
    workload = pieces(RunConfig(global_batch_size=1, options=(("pieces", 105),)), CONTEXT)
    for _ in range(2):
        workload.step(None)
    assert calls == 2 * 105
    assert workload.witness() == {"pieces": 105, "images": 2}


@pytest.mark.slow
def test_two_ranks_add_up_each_message() -> None:
    config = RunConfig(workload=ALL_REDUCE, world_size=2, global_batch_size=2, options=(("message_bytes", 1024),))
    with Group(config, threads=1) as group:
        group.window(settle=0, steps=2, limit=60, stage="testing")
        assert [[rank[n] for n in ("summed_over", "hosts", "message_bytes")] for rank in group.witness()] == [
            [2, 1, 1024]
        ] * 2
