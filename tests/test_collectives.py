"""The question all_reduce: which messages, over how many ranks, and what is refused."""

from typing import Any

import pytest
from conftest import Call
from setups import setup

from ddpm_lab.checks import ConfigError
from ddpm_lab.plan import Family
from ddpm_lab.questions.all_reduce import all_reduce, label
from ddpm_lab.questions.ask import ask


def sizes(family: Family) -> list[int]:
    return [c.option("message_bytes", 0) for c in (family.baseline, *(c for _, c in family.candidates))]


@pytest.mark.parametrize("preset", ["smoke", "quick", "full"])
def test_messages_go_over_decades_the_smallest_and_the_largest_first(preset: str) -> None:
    (family,) = all_reduce(setup(preset)).families
    found = sizes(family)
    assert found[:2] == [2**10, 2**26]
    assert len(set(found)) == len(found) >= 6
    assert found[2:] == sorted(found[2:])


@pytest.mark.parametrize("preset", ["smoke", "quick", "full"])
def test_all_messages_of_a_number_of_ranks_take_turns_in_the_same_sets(preset: str) -> None:
    for family in all_reduce(setup(preset, cores=8)).families:
        assert family.at_once == len(family.candidates)


@pytest.mark.parametrize(
    ("gpus", "cores", "ranks"), [(0, 2, [2]), (0, 6, [2, 4, 6]), (8, 64, [2, 4, 8]), (0, 1, [1]), (1, 16, [1])]
)
def test_each_number_of_ranks_is_a_family_of_its_own(gpus: int, cores: int, ranks: list[int]) -> None:
    experiment = all_reduce(setup(gpus=gpus, cores=cores))
    assert [f.baseline.world_size for f in experiment.families] == ranks
    assert bool(experiment.left_out) == (ranks == [1])
    assert all("exchanges nothing" in reason for _, _, reason in experiment.left_out)
    assert bool(experiment.families[0].candidates) == (ranks != [1])


def test_ranks_and_messages_asked_for_by_name() -> None:
    experiment = all_reduce(setup(cores=8), world_sizes=[3, 1, 5], message_bytes=[4096, 1024, 4096])
    assert [(f.baseline.world_size, sizes(f)) for f in experiment.families] == [(3, [1024, 4096]), (5, [1024, 4096])]
    over = all_reduce(setup(oversubscribe=True), world_sizes=[2, 4])
    assert [f.baseline.oversubscribe for f in over.families] == [False, True]


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({"message_bytes": []}, "message_bytes"),
        ({"message_bytes": [0]}, "at least 4"),
        ({"message_bytes": [1022]}, "message_bytes has 1022: give multiples of 4"),
        ({"world_sizes": [3]}, "3 CPU ranks need 3 cores"),
    ],
)
def test_what_cannot_be_run_is_refused(grid: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ask("all_reduce", setup(), **grid)


def test_sizes_are_named_for_people() -> None:
    assert [label(n) for n in (4, 1024, 2**18, 3 * 2**19, 2**26)] == [
        "4 bytes",
        "1 KiB",
        "256 KiB",
        "1.5 MiB",
        "64 MiB",
    ]


def test_a_batch_size_means_nothing_here(call: Call) -> None:
    code, _, err = call("run", "all_reduce", "--batch-size", "8")
    assert code == 2
    assert "--batch-size 8: only profile, amp" in err
