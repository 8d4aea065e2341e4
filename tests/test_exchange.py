"""The question exchange: what it measures, and what planted records of it come to."""

import dataclasses
import re

import pytest
import records as make
from scaled_records import exchanged
from setups import setup

from ddpm_lab.config import HOOKS, NCCL, ExchangeConfig
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.exchange import NO_EXCHANGE, exchange


@pytest.mark.parametrize(("gpus", "ranks"), [(0, 2), (8, 8)])
def test_each_setting_is_changed_alone(gpus: int, ranks: int) -> None:
    (family,) = exchange(setup("quick", gpus)).families
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


def test_settings_for_pcie_leave_each_collective_an_algorithm_and_are_values_that_nccl_takes() -> None:
    """By NCCL's rules: the first entry holds for every collective, and trees only reduce to all."""
    usual, *others = NCCL["pcie"]["NCCL_ALGO"].split(";")
    named = dict(entry.split(":") for entry in others)
    known = {"allreduce": {"ring", "tree"}, "broadcast": {"ring"}, "allgather": {"ring"}}
    algorithms = {name: able & {*named.get(name, usual).lower().split(",")} for name, able in known.items()}
    assert algorithms == {"allreduce": {"tree"}, "broadcast": {"ring"}, "allgather": {"ring"}}
    assert int(NCCL["pcie"]["NCCL_NTHREADS"]) in range(64, 513, 32)


def test_the_cost_of_the_exchange_is_what_a_step_takes_less_without_and_never_leads() -> None:
    found = answer(make.study(exchanged(1.25))).finding
    assert found.ratio == pytest.approx(1.1, rel=0.02), "the answer is about ranks that train one network"
    assert re.search(r" (19|20)\.\d % shorter", found.notes[0])
    for none in (1.0, 0.9):  # longer is no less than none
        assert "not called shorter" in answer(make.study(exchanged(none))).finding.notes[0]
