"""Latency and bandwidth of a link: planted ones come back, and what is predicted from them has honest intervals."""

import math
from dataclasses import replace

import numpy as np
import pytest
from planted_links import ALPHA, BETA, RANKS, link, timings, truth

from ddpm_lab.explain.link_fit import NotEnoughData, Timing, costs, fit_link, leave_one_out


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16])
def test_the_formula_is_what_hops_played_out_one_by_one_take(algorithm: str, ranks: int) -> None:
    latencies, passed = costs(ranks, 1e6, algorithm)
    assert latencies * ALPHA + passed * BETA == pytest.approx(truth(ranks, 1e6, algorithm))


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_one_rank_exchanges_nothing(algorithm: str) -> None:
    assert [float(v) for v in costs(1, 1e6, algorithm)] == [0.0, 0.0]


def test_a_tree_pays_latency_by_its_depth_and_a_ring_by_its_length() -> None:
    assert float(costs(1024, 0, "tree")[0]) == 20
    assert float(costs(1024, 0, "ring")[0]) == 2046


@pytest.mark.parametrize("algorithm", ["ring", "tree"])
def test_a_planted_link_comes_back(algorithm: str) -> None:
    found = link(algorithm)
    assert (found.alpha, found.beta) == pytest.approx((ALPHA, BETA), rel=1e-4)


def test_one_timing_far_off_hardly_moves_the_link_and_widens_its_intervals() -> None:
    clean = timings(np.random.default_rng(1), 0.01)
    off = [replace(clean[0], seconds=5 * clean[0].seconds), *clean[1:]]
    found, before = fit_link(off), fit_link(clean)
    assert found.alpha == pytest.approx(ALPHA, rel=0.1)
    assert found.beta == pytest.approx(BETA, rel=0.1)
    assert found.spread > 5 * before.spread


def test_each_number_of_ranks_is_predicted_from_the_others_alone() -> None:
    clean = timings(np.random.default_rng(3), 0.01)
    wrong = [replace(t, seconds=2 * t.seconds) if t.ranks == 8 else t for t in clean]
    errors = {h.timing.ranks: h.error for h in leave_one_out(wrong)}
    assert errors[8] == pytest.approx(-0.5, abs=0.03)
    assert {h.timing.ranks for h in leave_one_out(clean)} == set(RANKS)
    assert max(abs(h.error) for h in leave_one_out(clean)) < 0.05
    assert leave_one_out([t for t in clean if t.ranks == 2]) == []


@pytest.mark.parametrize(
    ("few", "words"),
    [
        ([], "0 all-reduces"),
        ([Timing(ranks=n, message_bytes=1e6, seconds=1.0) for n in range(2, 9)], "several sizes"),
        (
            [Timing(ranks=2, message_bytes=4.0 * n, seconds=truth(2, 4.0 * n)) for n in range(1, 9)],
            "do not tell latency from bandwidth",
        ),
    ],
)
def test_too_little_to_fit_is_said(few: list[Timing], words: str) -> None:
    with pytest.raises(NotEnoughData, match=words):
        fit_link(few)


def test_what_all_timings_share_widens_every_interval() -> None:
    known = timings(np.random.default_rng(4), 0.001)
    plain, shaken = fit_link(known), fit_link(known, shared=0.1**2)
    (low, high), _ = shaken.interval()
    assert math.log(high / low) == pytest.approx(2 * 1.65 * 0.1, rel=0.2)
    draws = [np.log(each.draws(8, 1e6, 1, np.random.default_rng(0))).std() for each in (plain, shaken)]
    assert draws[1] == pytest.approx(math.sqrt(2) * 0.1, rel=0.15)
    assert draws[0] < 0.01
