"""The workload of an all-reduce: it exchanges what its options say, over the ranks that its label says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.measure.sets import Instrument, Member, measure_set
from ddpm_lab.plan import Plan
from ddpm_lab.questions.all_reduce import ALL_REDUCE
from ddpm_lab.training.allreduce import AllReduce, all_reduce
from ddpm_lab.workload import RankContext


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(marks: list[str] | None = None, **options: Any) -> AllReduce:
    mark = (lambda _: None) if marks is None else marks.append
    context = RankContext(rank=0, world_size=1, device="cpu", threads=1, mark=mark)
    config = RunConfig(workload=ALL_REDUCE, global_batch_size=1, options=tuple(options.items()))
    return all_reduce(config, context)


@pytest.mark.usefixtures("group")
def test_a_step_exchanges_all_buckets_and_says_what_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = made(message_bytes=4 * 1000, buckets=3)
    sent: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda bucket: sent.append(bucket.nbytes))
    for batch, _ in zip(workload.batches(), range(2), strict=False):
        workload.step(batch)
    assert len(sent) == 6
    assert sum(sent) == 2 * 4000
    assert max(sent) - min(sent) <= 4
    seen = workload.witness()
    assert {k: seen[k] for k in ("images", "message_bytes", "buckets", "summed_over", "hosts")} == {
        "images": 2,
        "message_bytes": 4000,
        "buckets": 3,
        "summed_over": 1,
        "hosts": 1,
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"message_bytes": 6}, "give a multiple of 4 bytes"),
        ({"message_bytes": 8, "buckets": 3}, "8 in 3 buckets"),
        ({"messages": 4}, "options has messages: an all-reduce knows message_bytes"),
    ],
)
def test_options_that_cannot_be_run_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(**options)


@pytest.mark.alone
@pytest.mark.slow
def test_two_ranks_are_measured_in_sets_as_any_workload_and_a_larger_message_takes_longer(
    instrument: Instrument, short_plan: Plan
) -> None:
    instrument = dataclasses.replace(instrument, code=code_version())
    small, large = (
        RunConfig(workload=ALL_REDUCE, world_size=2, global_batch_size=2, options=(("message_bytes", size),))
        for size in (1024, 2**24)
    )
    members = [Member("baseline", "1 KiB", small), Member("candidate", "16 MiB", large)]
    records = measure_set(instrument, experiment="all_reduce", family="2 ranks", plan=short_plan, members=members)
    assert [r.status for r in records] == ["ok", "ok"]
    for record in records:
        for rank in record.witness["ranks"]:
            assert (rank["summed_over"], rank["hosts"]) == (2, 1)
            assert rank["message_bytes"] == record.config.option("message_bytes", 0)
    seconds = [min(w.seconds / w.steps for w in r.windows) for r in records]
    assert seconds[1] > 3 * seconds[0]
