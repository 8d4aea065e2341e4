"""The questions exchange and all_reduce: what they measure, and what planted records of them come to."""

import dataclasses
import re
from collections.abc import Callable

import numpy as np
import pytest
import records as make
from cells import column
from scaled_records import TWO, all_reduces, exchanged
from setups import setup

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import HOOKS, NCCL, ExchangeConfig
from ddpm_lab.plan import Family
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.exchange import (
    NO_EXCHANGE,
    all_reduce,
    bus_bandwidth,
    exchange,
    exchanges,
    label,
    message_bytes,
)

ALPHA, BETA = 2e-4, 1e-9


# --- exchange ---------------------------------------------------------------------------------------------------------


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
    ((name, silent),) = halved.candidates
    assert (name, set(twice.differences(silent))) == (NO_EXCHANGE, {"exchange"}), "updates of weights are as many"


def test_settings_for_pcie_leave_each_collective_an_algorithm_and_are_values_that_nccl_takes() -> None:
    """By NCCL's rules: the first entry holds for every collective, and trees only reduce to all."""
    usual, *others = NCCL["pcie"]["NCCL_ALGO"].split(";")
    named = dict(entry.split(":") for entry in others)
    known = {"allreduce": {"ring", "tree"}, "broadcast": {"ring"}, "allgather": {"ring"}}
    algorithms = {name: able & {*named.get(name, usual).lower().split(",")} for name, able in known.items()}
    assert algorithms == {"allreduce": {"tree"}, "broadcast": {"ring"}, "allgather": {"ring"}}
    assert int(NCCL["pcie"]["NCCL_NTHREADS"]) in range(64, 513, 32)


def test_ranks_and_batch_can_be_chosen_and_one_rank_exchanges_nothing() -> None:
    found = exchange(setup(cores=4), world_sizes=[2, 4], global_batch_size=16).families
    sizes = [(f.baseline.world_size, f.baseline.global_batch_size) for f in found]
    assert sizes == [(2, 16), (2, 32), (4, 16), (4, 32)]
    (family,) = exchange(setup("smoke")).families
    assert [name for name, _ in family.candidates] == [NO_EXCHANGE, "bf16 hook"]
    alone = exchange(setup(cores=1))
    assert ([f.candidates for f in alone.families], [label for _, label, _ in alone.left_out]) == ([()], ["2 ranks"])
    with pytest.raises(ConfigError, match="world_sizes has 1"):
        exchange(setup(), world_sizes=[1, 2])


def test_the_cost_of_the_exchange_is_what_a_step_takes_less_without_and_never_leads() -> None:
    twice = dataclasses.replace(TWO, global_batch_size=64, accumulation=2)
    halved = exchanged(1.9, twice, family="tiny, batch 64, 2 ranks, one exchange in 2", primary="")
    found = answer(make.study([*exchanged(1.25), *halved])).finding
    assert found.ratio == pytest.approx(1.1, rel=0.02), "the answer is about ranks that train one network"
    shorter = [re.findall(r" (\d+)\.\d % shorter", note) for note in found.notes[:2]]
    assert shorter in ([["19"], ["47"]], [["20"], ["47"]])
    assert "% shorter" not in answer(make.study(exchanged(1.0))).finding.claim


# --- all_reduce -------------------------------------------------------------------------------------------------------


def sizes(family: Family) -> list[int]:
    configs = (family.baseline, *(config for _, config in family.candidates))
    return [int(config.option("message_bytes", 0)) for config in configs]


def test_messages_go_over_decades_the_smallest_and_the_largest_first_all_in_the_same_sets() -> None:
    for preset in ("smoke", "quick", "full"):
        for family in all_reduce(setup(preset, cores=8)).families:
            found = sizes(family)
            assert found[:2] == [2**10, 2**26]
            assert len(set(found)) == len(found) >= 6
            assert family.at_once == len(family.candidates)
    named = [label(n) for n in (4, 1024, 2**18, 3 * 2**19, 2**26)]
    assert named == ["4 bytes", "1 KiB", "256 KiB", "1.5 MiB", "64 MiB"]
    for gpus, cores, ranks in ((0, 6, [2, 4, 6]), (8, 64, [2, 4, 8]), (0, 1, [1]), (1, 16, [1])):
        experiment = all_reduce(setup(gpus=gpus, cores=cores))
        assert [f.baseline.world_size for f in experiment.families] == ranks
        assert bool(experiment.left_out) == (ranks == [1]) != bool(experiment.families[0].candidates)
    experiment = all_reduce(setup(cores=8), world_sizes=[3, 1, 5], message_bytes=[4096, 1024, 4096])
    assert [(f.baseline.world_size, sizes(f)) for f in experiment.families] == [(3, [1024, 4096]), (5, [1024, 4096])]


def ring(alpha: float = ALPHA, beta: float = BETA) -> Callable[[int, int], float]:
    return lambda ranks, size: 2 * (ranks - 1) * (alpha + size / ranks * beta)


def test_ranks_on_several_hosts_are_rows_and_lines_of_their_own() -> None:
    near = all_reduces(ring(), ranks=(2, 4), machine=make.GPUS)
    far = all_reduces(ring(5e-3, 1e-8), ranks=(4,), nodes=4, machine=make.GPUS)
    study = make.study([*near, *far])
    shown = answer(study).table()
    assert list(dict.fromkeys(column(shown, "Configuration"))) == ["2 ranks", "4 ranks", "4 ranks on 4 hosts"]
    assert (len(shown), shown[0]["Sets"]) == (18, "6")
    found = exchanges(study)
    assert found[0].step_seconds == pytest.approx(2 * (ALPHA + 512 * BETA), rel=0.05)
    assert found[12].step_seconds == pytest.approx(6 * 5e-3, rel=0.05), "over four hosts"
    (ax,) = answer(study).figure().axes
    drawn = [tuple(point) for line in ax.get_lines() for point in np.asarray(line.get_xydata()).tolist()]
    assert drawn == [(message_bytes(e), 1e-9 * bus_bandwidth(e)) for e in found]
    # A link passes the same whatever the number of ranks.
    for e in exchanges(make.study(all_reduces(ring(0.0), ranks=(2, 8), machine=make.GPUS))):
        assert bus_bandwidth(e) == pytest.approx(1 / BETA, rel=0.03)


def test_ranks_that_share_cores_and_a_rank_alone_say_nothing_of_exchanges() -> None:
    shared = [dataclasses.replace(r, mechanism_only=True) for r in all_reduces(ring(), ranks=(4,))]
    alone = all_reduces(lambda *_: 1e-5, ranks=(1,))
    for records in (shared, alone):
        assert exchanges(make.study(records)) == []
        assert answer(make.study(records)).finding.verdict != "measured"
