"""Steps at numbers of ranks that were not measured: planted links and compute come back, and intervals cover."""

import math
from dataclasses import replace

import numpy as np
import pytest
from planted_links import ALPHA, BETA, link, timings, truth

from ddpm_lab.checks import ConfigError
from ddpm_lab.explain.link_fit import NotEnoughData, fit_link
from ddpm_lab.explain.prediction import Cluster, Compute, Exchanged, Prediction, Speed, predict


def compute(log_error: float = 0.0, per_image: float = 1e-3, fixed: float = 5e-3) -> Compute:
    """Straight in the batch, known for four of them."""
    points = [(batch, fixed + per_image * batch) for batch in (4, 8, 16, 32)]
    return Compute(speeds=tuple(Speed(rank_batch=b, seconds=s, log_error=log_error, freedom=5) for b, s in points))


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
    idle = Compute(speeds=(Speed(rank_batch=16, seconds=1e-9, log_error=0.0, freedom=5),))
    cluster = Cluster(inner=link(spread=0.02))
    found = {n: predict(cluster, idle, Exchanged(message_bytes=1e6), n, 16) for n in (8, 32, 64, 256, 1024)}
    assert [p.label for p in found.values()] == ["predicted"] * 2 + ["extrapolation"] * 3
    wide = {n: math.log(p.high / p.low) for n, p in found.items()}
    assert list(wide.values()) == sorted(wide.values())
    known = Cluster(inner=link(spread=0.02, most_ranks=1024))
    plain = predict(known, idle, Exchanged(message_bytes=1e6), 256, 16)
    assert wide[256] == pytest.approx((1 + 3) * math.log(plain.high / plain.low), rel=1e-3)
    assert found[256].seconds == plain.seconds


def test_what_is_not_known_of_the_compute_is_in_the_step_and_not_in_the_efficiency() -> None:
    made = predict(Cluster(inner=link()), compute(0.1), Exchanged(message_bytes=1e6), 8, 16)
    assert made.efficiency == pytest.approx(21e-3 / (21e-3 + truth(8, 1e6)), rel=0.01)
    assert math.log(made.high / made.low) > 0.3
    assert math.log(made.efficiency_high / made.efficiency_low) < 0.1
    other = predict(Cluster(inner=link()), compute(), Exchanged(message_bytes=1e6), 8, 16, own_batch=32)
    assert other.efficiency == pytest.approx(made.efficiency * (37e-3 / 32) / (21e-3 / 16), rel=0.01)


def test_an_interval_that_spans_a_factor_of_ten_is_no_prediction() -> None:
    with pytest.raises(NotEnoughData, match="a step of 8 ranks may take"):
        predict(Cluster(inner=link()), compute(1.0), Exchanged(message_bytes=1e6), 8, 16)


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
