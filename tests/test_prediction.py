"""Steps at numbers of ranks that were not measured: planted links and compute come back, and intervals cover."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.explain.prediction import (
    Cluster,
    Compute,
    Exchanged,
    Link,
    NotEnoughData,
    Prediction,
    Speed,
    Timing,
    costs,
    fit_link,
    leave_one_out,
    predict,
)

ALPHA, BETA = 50e-6, 1e-9
MESSAGES = [2.0**power for power in range(10, 27, 4)]
RANKS = (2, 4, 8)


def truth(ranks: int, size: float, algorithm: str = "ring", alpha: float = ALPHA, beta: float = BETA) -> float:
    """Another way to the same number: hops played one after the other, and trees by their depth."""
    if algorithm == "tree":
        return 2 * (math.ceil(math.log2(ranks)) * alpha + size * beta)
    at = [0.0] * ranks  # when each rank has finished its last hop
    for _ in range(2 * (ranks - 1)):  # reduce-scatter, then all-gather
        sent = [t + alpha + size / ranks * beta for t in at]
        at = [max(sent[rank - 1], sent[rank]) for rank in range(ranks)]
    return max(at)


def timings(
    rng: np.random.Generator, noise: float = 0.03, ranks: Sequence[int] = RANKS, algorithm: str = "ring"
) -> list[Timing]:
    return [
        Timing(ranks=n, message_bytes=size, seconds=truth(n, size, algorithm) * math.exp(noise * rng.normal()))
        for n in ranks
        for size in MESSAGES
    ]


def link(algorithm: str = "ring", **changes: float) -> Link:
    """A link that is known almost exactly."""
    found = fit_link(timings(np.random.default_rng(0), 1e-6, algorithm=algorithm), algorithm)
    return replace(found, **changes)  # type: ignore[arg-type]


def compute(log_error: float = 0.0, per_image: float = 1e-3, fixed: float = 5e-3) -> Compute:
    """Straight in the batch, known for four of them."""
    points = [(batch, fixed + per_image * batch) for batch in (4, 8, 16, 32)]
    return Compute(speeds=tuple(Speed(rank_batch=b, seconds=s, log_error=log_error, freedom=5) for b, s in points))


def step(found: Prediction) -> tuple[float, float, float]:
    return found.low, found.seconds, found.high


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


@pytest.mark.slow
def test_intervals_cover_what_was_planted_in_nine_cases_of_ten() -> None:
    """Parameters, all-reduces at 16 and 32 ranks, and whole steps: each fit is to ranks 2, 4 and 8 alone."""
    rng = np.random.default_rng(2)
    inside: dict[str, list[bool]] = {name: [] for name in ("alpha", "beta", "16 ranks", "32 ranks")}
    noise, speed_noise = 0.05, 0.02
    for _ in range(300):
        found = fit_link(timings(rng, noise))
        (a_low, a_high), (b_low, b_high) = found.interval()
        inside["alpha"].append(a_low <= ALPHA <= a_high)
        inside["beta"].append(b_low <= BETA <= b_high)
        sets = speed_noise * rng.standard_normal((4, 6))
        speeds = [
            Speed(
                rank_batch=s.rank_batch,
                seconds=s.seconds * math.exp(row.mean()),
                log_error=float(row.std(ddof=1) / math.sqrt(6)),
                freedom=5,
            )
            for s, row in zip(compute().speeds, sets, strict=True)
        ]
        for ranks in (16, 32):
            made = predict(
                Cluster(inner=found), Compute(speeds=tuple(speeds)), Exchanged(message_bytes=2**22), ranks, 16
            )
            own = 21e-3 * math.exp(speed_noise / math.sqrt(6) * rng.normal())
            step = own + truth(ranks, 2**22) * math.exp(noise * rng.normal())
            inside[f"{ranks} ranks"].append(made.low <= step <= made.high)
    covered = {name: float(np.mean(hits)) for name, hits in inside.items()}
    assert all(0.85 <= share <= 0.95 for share in covered.values()), covered


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


def test_hosts_exchange_over_their_own_link_and_their_ranks_within_them() -> None:
    outer = replace(link(), alpha=1e-3, beta=1e-8)
    cluster = Cluster(inner=link(), outer=outer, ranks_per_host=8)
    size, alone = 1e7, compute().speeds[2].seconds
    for ranks, expected in (
        (8, truth(8, size)),
        (32, truth(8, size) + truth(4, size, alpha=1e-3, beta=1e-8)),
    ):
        made = predict(cluster, compute(), Exchanged(message_bytes=size), ranks, 16)
        assert made.exchange_seconds == pytest.approx(expected, rel=0.01)
        assert made.seconds == pytest.approx(alone + expected, rel=0.01)
    with pytest.raises(ConfigError, match="12 ranks do not fill hosts of 8"):
        predict(cluster, compute(), Exchanged(message_bytes=size), 12, 16)
    with pytest.raises(NotEnoughData, match="between hosts"):
        predict(Cluster(inner=link(), ranks_per_host=8), compute(), Exchanged(message_bytes=size), 16, 16)


def test_beyond_four_times_the_measured_ranks_it_is_an_extrapolation_and_wider_by_the_rule() -> None:
    cluster = Cluster(inner=link(spread=0.05))
    found = {n: predict(cluster, compute(0.01), Exchanged(message_bytes=1e6), n, 16) for n in (8, 32, 64, 256, 1024)}
    assert [p.label for p in found.values()] == ["predicted"] * 2 + ["extrapolation"] * 3
    wide = {n: math.log(p.high / p.low) for n, p in found.items()}
    assert list(wide.values()) == sorted(wide.values())
    known = Cluster(inner=link(spread=0.05, most_ranks=1024))
    plain = predict(known, compute(0.01), Exchanged(message_bytes=1e6), 256, 16)
    assert wide[256] == pytest.approx((1 + 3) * math.log(plain.high / plain.low))
    assert found[256].seconds == plain.seconds


def test_compute_lies_on_straight_lines_and_outside_of_them_it_is_an_extrapolation() -> None:
    alone = Exchanged(message_bytes=4)
    for batch, label in ((12, "predicted"), (20, "predicted"), (64, "extrapolation"), (3, "extrapolation")):
        made = predict(Cluster(inner=link()), compute(), alone, 2, batch)
        assert made.compute_seconds == pytest.approx(5e-3 + 1e-3 * batch)
        assert made.label == label
    single = Compute(speeds=compute().speeds[:1])
    assert predict(Cluster(inner=link()), single, alone, 2, 4).compute_seconds == pytest.approx(9e-3)
    with pytest.raises(NotEnoughData, match="4 images a rank alone, and 8"):
        predict(Cluster(inner=link()), single, alone, 2, 8)


def test_compute_hides_a_share_of_the_exchange_up_to_the_backward_pass() -> None:
    def made(hidden: float | None, size: float = 1e6) -> Prediction:
        return predict(Cluster(inner=link()), compute(), Exchanged(message_bytes=size, hidden=hidden), 8, 16)

    alone, exchange = 21e-3, truth(8, 1e6)
    assert made(0.0).seconds == pytest.approx(alone + exchange, rel=0.01)
    assert made(0.5).seconds == pytest.approx(alone + exchange / 2, rel=0.01)
    assert made(1.0).seconds == pytest.approx(alone, rel=0.01)
    long = truth(8, 1e8)
    assert made(1.0, 1e8).seconds == pytest.approx(alone / 3 + long, rel=0.01)
    unknown = made(None)
    assert unknown.low == pytest.approx(made(1.0).low)
    assert unknown.high == pytest.approx(made(0.0).high)
    assert made(1.0).seconds < unknown.seconds < made(0.0).seconds


def test_buckets_pay_the_latency_each() -> None:
    one, four = (
        predict(Cluster(inner=link()), compute(), Exchanged(message_bytes=1e6, buckets=n), 8, 16).exchange_seconds
        for n in (1, 4)
    )
    assert four - one == pytest.approx(3 * 14 * ALPHA, rel=0.02)


def test_what_all_timings_share_widens_every_interval() -> None:
    known = timings(np.random.default_rng(4), 0.001)
    plain, shaken = fit_link(known), fit_link(known, shared=0.1**2)
    (low, high), _ = shaken.interval()
    assert math.log(high / low) == pytest.approx(2 * 1.65 * 0.1, rel=0.2)
    draws = [np.log(each.draws(8, 1e6, 1, np.random.default_rng(0))).std() for each in (plain, shaken)]
    assert draws[1] == pytest.approx(math.sqrt(2) * 0.1, rel=0.15)
    assert draws[0] < 0.01
