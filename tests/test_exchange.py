"""The question how ranks should exchange gradients: each setting alone, and where there is nothing to exchange."""

from __future__ import annotations

import dataclasses

import pytest
from setups import setup

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import HOOKS, NCCL, ExchangeConfig
from ddpm_lab.questions.bottleneck import NO_EXCHANGE
from ddpm_lab.questions.exchange import exchange


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (8, 8)])
def test_each_setting_is_changed_alone(gpus: int, ranks: int) -> None:
    family, halved = exchange(setup("quick", gpus)).families
    assert family.baseline.world_size == ranks
    assert family.baseline.exchange == ExchangeConfig()
    settings = family.candidates
    usual = dataclasses.asdict(ExchangeConfig())
    for _, config in settings:
        assert set(family.baseline.differences(config)) == {"exchange"}
        assert sum(usual[name] != value for name, value in dataclasses.asdict(config.exchange).items()) == 1
    assert not dict(settings)[NO_EXCHANGE].exchange.enabled
    assert {config.exchange.hook for _, config in settings} == set(HOOKS)
    assert {config.exchange.nccl for _, config in settings} == (set(NCCL) if gpus else {"default"})
    twice = halved.baseline
    assert twice.accumulation == 2
    assert twice.rank_batch_size // twice.accumulation == family.baseline.rank_batch_size, "half the exchanges an image"
    ((label, silent),) = halved.candidates
    assert (label, set(twice.differences(silent))) == (NO_EXCHANGE, {"exchange"}), "updates of weights are as many"


def test_ranks_and_batch_can_be_chosen_and_smoke_is_short() -> None:
    found = exchange(setup(cores=4), world_sizes=[2, 4], global_batch_size=16).families
    assert [(f.baseline.world_size, f.baseline.global_batch_size) for f in found] == [
        (2, 16),
        (2, 32),
        (4, 16),
        (4, 32),
    ]
    (family,) = exchange(setup("smoke")).families
    assert [label for label, _ in family.candidates] == [NO_EXCHANGE, "bf16 hook"]


def test_one_rank_exchanges_nothing() -> None:
    alone = exchange(setup(cores=1))
    assert [f.candidates for f in alone.families] == [()]
    ((_, label, reason),) = alone.left_out
    assert (label, reason) == ("2 ranks", "this machine has one usable core; each rank needs its own")
    with pytest.raises(ConfigError, match="world_sizes has 1, and one rank exchanges nothing: give 2 or more"):
        exchange(setup(), world_sizes=[1, 2])
