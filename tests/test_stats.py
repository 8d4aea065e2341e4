"""Statistics against simulation, hand-worked cases and invariants."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from ddpm_lab.explain import stats


def test_holm_and_the_posterior_variance_by_hand() -> None:
    # Holm 1979: sorted 0.01, 0.02, 0.03, 0.6 times 4, 3, 2, 1 and made non-decreasing.
    found = stats.holm([0.03, 0.01, math.nan, 0.6, 0.02])
    assert found == pytest.approx([0.06, 0.04, math.nan, 0.6, 0.06], nan_ok=True)
    assert (stats.holm([0.9, 0.8]), stats.holm([])) == ([1.0, 1.0], [])
    spread = stats.Spread(variance=4e-4, df=4.0)
    assert stats.steadied(1e-4, 5, spread) == pytest.approx(((4 * 4e-4 + 5 * 1e-4) / 9, 4.0))
    assert stats.steadied(1e-4, 5, None) == (1e-4, 0.0)
    # F(0.95; 5, 4) is 6.26: a comparison that scatters more than that keeps its own variance.
    assert stats.steadied(6.2 * 4e-4, 5, spread)[1] == 4.0
    assert stats.steadied(6.3 * 4e-4, 5, spread) == pytest.approx((6.3 * 4e-4, 0.0))


def test_one_set_has_a_ratio_and_no_interval_and_equal_ones_no_doubt() -> None:
    one = stats.estimate([math.log(1.5)])
    assert (one.value, one.half_width) == pytest.approx((1.5, math.inf))
    assert np.isnan([one.low, one.p, stats.estimate([]).value]).all()
    assert (stats.estimate([0.5] * 6).p, stats.estimate([0.0] * 6).p) == (0.0, 1.0)


def test_a_quotient_of_which_one_side_is_known_has_the_ends_of_the_other() -> None:
    known, wide = stats.Interval(value=30.0), stats.Interval(value=30.0, low=20.0, high=40.0)
    for a, b, ends in (
        (known, stats.Interval(value=0.02, low=0.015, high=0.03), (1000, 2000)),
        (wide, stats.Interval(value=0.02), (1000, 2000)),
        (known, stats.Interval(value=0.02, low=-0.001, high=0.05), (600, math.inf)),
    ):
        assert stats.quotient_interval(a, b) == pytest.approx(ends)
    for known_b in np.linspace(0.001, 1, 200):  # the difference of two equal products may round to less than nothing
        found = stats.quotient_interval(stats.Interval(value=0.3), stats.Interval(value=known_b))
        assert found == pytest.approx((0.3 / known_b,) * 2, rel=1e-6)


@pytest.mark.parametrize(("few", "many", "spread"), [(2, 6, 0.05), (3, 12, 0.1)])
def test_the_interval_of_a_quotient_covers_it(few: int, many: int, spread: float) -> None:
    """Few and many values on each side, as compile times and set ratios are."""
    rng, hits = np.random.default_rng(0), []
    for _ in range(1500):
        a = stats.estimate(np.log(30) + rng.normal(0, spread, few))
        b = stats.estimate(np.log(0.02) + rng.normal(0, 0.05, many))
        low, high = stats.quotient_interval(a, b)
        hits.append(low <= 1500 <= high)
    assert 0.93 <= np.mean(hits) <= 0.985


def test_an_estimate_equals_scipy_and_with_a_spread_has_the_degrees_of_freedom_of_both() -> None:
    logs = np.array([0.02, 0.05, -0.01, 0.04])
    plain, found = stats.estimate(logs), stats.estimate(logs, stats.Spread(variance=4e-4, df=4.0))
    assert plain == stats.estimate([*logs, math.nan])
    test = scipy_stats.ttest_1samp(logs, 0.0)
    assert (plain.p, *np.log(plain.ends)) == pytest.approx((test.pvalue, *test.confidence_interval(0.95)))
    variance = (4 * 4e-4 + 3 * logs.var(ddof=1)) / 7
    assert found.standard_error == pytest.approx(math.sqrt(variance / 4))
    assert found.half_width == pytest.approx(scipy_stats.t.ppf(0.975, 7) * found.standard_error)
    assert found.p == pytest.approx(2 * scipy_stats.t.sf(logs.mean() / found.standard_error, 7))


def test_the_prior_of_a_planted_population_comes_back() -> None:
    """Variances drawn as s0^2 d0 / chi2(d0), with 3 to 11 degrees of freedom of their own, and equal ones."""
    rng = np.random.default_rng(0)
    differing = [np.sqrt(4e-4 * 3 / rng.chisquare(3)) * rng.normal(size=n) for n in rng.integers(4, 13, 4000)]
    for drawn, df in ((differing, 3), ([*0.02 * rng.normal(size=(400, 6))], stats.MOST_PRIOR_DF)):
        found = stats.spread_of(drawn)
        assert found is not None
        assert (found.df, found.variance) == pytest.approx((df, 4e-4), rel=0.1)
    assert stats.spread_of(differing[:2]) is None
    assert stats.spread_of([[0.1], [0.1, 0.1], [0.1, math.nan], [0.1, 0.2], [0.3, 0.1]]) is None
