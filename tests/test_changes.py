"""What could be set differently: one change at a time, none that cannot run, none that is there already."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpm_lab.config import ExchangeConfig, OptimizerConfig, RunConfig
from ddpm_lab.explain.changes import NO_EXCHANGE, batch_sizes, changes

PLAIN = RunConfig()
CONFIGS = {
    "plain": PLAIN,
    "files": replace(PLAIN, loader="files", loader_workers=1),
    "bf16, compiled": replace(PLAIN, precision="bf16", compile="whole"),
    "joined kernels": replace(PLAIN, kernels="fused"),
    "two ranks": replace(PLAIN, world_size=2, exchange=ExchangeConfig(bucket_mb=5)),
    "a GPU": replace(PLAIN, device="cuda", global_batch_size=128),
    "a GPU, CUDA graphs": replace(PLAIN, device="cuda", compile="whole", compile_mode="reduce-overhead"),
    "old settings": replace(PLAIN, channels_last=False, read_loss=True, optimizer=OptimizerConfig(adam="loop")),
}
FOLLOW = {"loader_workers", "kernels", "compile_mode", "nodes", "exchange"}


@pytest.mark.parametrize("name", CONFIGS)
def test_each_is_one_change_away_and_none_is_there_twice(name: str) -> None:
    config = CONFIGS[name]
    found = {**changes(config, usable_cores=2, most_ranks=2), **batch_sizes(config)}
    assert config not in found.values()
    assert len({other.run_id for other in found.values()}) == len(found)
    for other in found.values():
        assert other.loader_workers <= 2
        changed = other.differences(config).keys()
        assert len(changed - FOLLOW) <= 1, changed
        assert changed, "nothing is changed"


def test_what_is_wrong_has_its_cure_among_the_changes() -> None:
    offered = changes(CONFIGS["old settings"], usable_cores=2, most_ranks=2)
    assert offered["channels last"].channels_last
    assert not offered["losses not read"].read_loss
    assert offered["fused Adam"].optimizer == OptimizerConfig()
    assert changes(CONFIGS["bf16, compiled"], usable_cores=2, most_ranks=1)["eager"].compile == "off"
    assert changes(CONFIGS["joined kernels"], usable_cores=2, most_ranks=1)["compiled"].kernels == "aten"
    assert changes(CONFIGS["files"], usable_cores=2, most_ranks=1).keys() >= {"packed data", "0 loader workers"}
    assert not changes(CONFIGS["two ranks"], usable_cores=2, most_ranks=2)[NO_EXCHANGE].exchange.enabled
    assert changes(CONFIGS["a GPU"], usable_cores=8, most_ranks=8)["8 ranks"].world_size == 8
    assert not any(other.world_size > 1 for other in changes(PLAIN, usable_cores=1, most_ranks=1).values())


def test_the_sweep_holds_the_published_sizes_and_twice_the_present_one() -> None:
    assert list(batch_sizes(replace(PLAIN, global_batch_size=8))) == ["batch 16", "batch 32", "batch 64"]
    assert list(batch_sizes(CONFIGS["a GPU"])) == [f"batch {n}" for n in (8, 16, 32, 64, 256)]
    three = replace(PLAIN, world_size=3, global_batch_size=9)
    assert list(batch_sizes(three)) == ["batch 18"], "the others cannot be shared by three ranks"
