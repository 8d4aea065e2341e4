"""The slowest of several ranks: no bias and no name among identical ones, and its place where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.questions.lost_scaling import excess_shares, slowest_rank
from ddpm_lab.record import RunRecord

NOISE = 0.01


def records(seconds: npt.NDArray[np.float64], config: RunConfig, hosts: Sequence[str] = ()) -> list[RunRecord]:
    """A record for each row of (sets, ranks) own seconds; ``hosts`` are the ranks' in order."""
    ranks = tuple(
        replace(make.rank_record(0), rank=n, device=f"cuda:{n % config.node_size}" if hosts else "cpu")
        for n in range(config.world_size)
    )
    seen = {"ranks": [{"rank": rank, "host": host} for rank, host in enumerate(hosts)]}
    (base, *_) = make.sets({}, baseline=config, count=1, turns=1)
    (window,) = base.windows
    windows = [replace(window, seconds=max(own), rank_seconds=tuple(own), steps=1) for own in seconds]
    return [replace(base, ranks=ranks, witness=seen, windows=(w,)) for w in windows]


def noisy(rng: np.random.Generator, sets: int, ranks: int) -> npt.NDArray[np.float64]:
    return np.exp(rng.normal(0, NOISE, (sets, ranks)) + rng.normal(0, 0.1, (sets, 1)))


@pytest.mark.parametrize("ranks", [2, 8])
def test_identical_ranks_have_no_excess_and_are_rarely_named(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    config = RunConfig(world_size=ranks, global_batch_size=ranks)
    trials = [records(noisy(rng, 6, ranks), config) for _ in range(300)]
    means = np.array([np.mean(excess_shares(found)) for found in trials])
    assert abs(means.mean()) < 3 * means.std() / len(means) ** 0.5
    assert abs(means.mean()) < NOISE / 10, "chosen where it is measured, it would be half the noise"
    assert np.mean([slowest_rank(found) != "" for found in trials]) <= 0.05


def test_a_slower_rank_is_named_with_its_excess_and_where_it_is() -> None:
    seconds = noisy(np.random.default_rng(0), 6, 16)
    seconds[:, 12] *= 1.1
    found = records(seconds, RunConfig(world_size=16, global_batch_size=16))
    assert np.mean(excess_shares(found)) == pytest.approx(1 - 1 / 1.1, abs=NOISE)
    assert np.isnan(excess_shares(found[:1])).all(), "no other set to say which it is"
    spread = RunConfig(device="cuda", world_size=16, nodes=2, global_batch_size=16)
    placed = records(seconds, spread, ["f3"] * 8 + ["0a"] * 8)
    for of, name in (
        (found, "rank 12"),
        (found[:3], ""),  # a claim needs four sets
        (placed, "rank 12 on cuda:4 of host 2"),
        ([*placed[:3], *records(seconds[3:], spread, ["f3"] * 8 + ["77"] * 8)], "rank 12"),  # on more than one host
        (records(seconds, replace(spread, nodes=1), ["f3"] * 16), "rank 12 on cuda:12"),
        ([replace(r, witness={}) for r in placed], "rank 12 on cuda:4"),  # unknown, so unsaid
    ):
        assert slowest_rank(of) == name
