"""Latency and bandwidth of a link, fitted to measured all-reduces.

A link passes a message of n bytes in alpha + n beta seconds: latency and inverse bandwidth (Hockney 1994). Both come
from robust least squares on the logarithm of time. What a link predicts has a 90 % interval, drawn from the joint
uncertainty of the fit, that holds for one more measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize

from ddpm_lab.checks import ConfigError, choice

LEVEL = 0.90
ALGORITHMS = ("ring", "tree")
LEAST_TIMINGS = 4
DRAWS = 4000

Array = npt.NDArray[np.float64]


class NotEnoughData(ConfigError):  # noqa: N818 - an answer, not a defect
    """What was measured does not suffice for a prediction; the message says what is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """One measured all-reduce: ranks, bytes of the message, seconds (over several sets their mean)."""

    ranks: int
    message_bytes: float
    seconds: float


def costs(ranks: npt.ArrayLike, message_bytes: npt.ArrayLike, algorithm: str = "ring") -> tuple[Array, Array]:
    """How many times an all-reduce of n bytes over N ranks pays a link's latency, and how many bytes pass a link.

    ring: 2 (N - 1) and 2 (N - 1) / N n (Thakur et al. 2005; Patarasuk & Yuan 2009, who show that no algorithm passes
    fewer bytes). tree: 2 ceil(log2 N) and 2 n, for two binary trees that reduce and broadcast half of the message
    each, in a pipeline whose filling is left out (Sanders et al. 2009). One rank pays nothing.
    """
    choice("algorithm", algorithm, ALGORITHMS)
    count, size = np.asarray(ranks, dtype=float), np.asarray(message_bytes, dtype=float)
    if algorithm == "tree":
        return 2 * np.ceil(np.log2(count)), 2 * size * (count > 1)
    return 2 * (count - 1), 2 * (count - 1) / count * size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Link:
    """A fitted link: alpha in seconds, beta in seconds per byte.

    ``covariance`` is that of (ln alpha, ln beta), ``spread`` the standard deviation of the residuals of ln seconds with
    ``freedom`` degrees of freedom, ``shared`` the variance of what all of them share, ``most_ranks`` the largest number
    of ranks measured.
    """

    alpha: float
    beta: float
    covariance: Array
    spread: float
    shared: float
    freedom: int
    most_ranks: int
    algorithm: str

    def interval(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """90 % intervals of alpha and of beta, by Student's t."""
        draws = self._parameters(np.random.default_rng(0), DRAWS * 5)[0]
        low, high = np.exp(np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0))
        return (float(low[0]), float(high[0])), (float(low[1]), float(high[1]))

    def seconds(self, ranks: int, message_bytes: float, buckets: int = 1) -> float:
        """Seconds of ``buckets`` all-reduces of one message between them."""
        latencies, passed = costs(ranks, message_bytes, self.algorithm)
        return float(buckets * latencies * self.alpha + passed * self.beta)

    def draws(self, ranks: int, message_bytes: float, buckets: int, rng: np.random.Generator) -> Array:
        """Draws of the seconds that they would be measured to take."""
        logs, scale = self._parameters(rng, DRAWS)
        latencies, passed = costs(ranks, message_bytes, self.algorithm)
        seconds = np.exp(logs) @ np.array([buckets * latencies, passed])
        noise = np.hypot(self.spread * scale, math.sqrt(self.shared)) * rng.standard_normal(DRAWS)
        return np.asarray(seconds * np.exp(noise))

    def _parameters(self, rng: np.random.Generator, count: int) -> tuple[Array, Array]:
        """Draws of (ln alpha, ln beta) from a multivariate t, and of the factor by which their scale was drawn."""
        scale = np.sqrt(self.freedom / rng.chisquare(self.freedom, count))
        normal = rng.multivariate_normal([0.0, 0.0], self.covariance, count, method="svd")
        return np.log([self.alpha, self.beta]) + scale[:, None] * normal, scale


def fit_link(timings: Sequence[Timing], algorithm: str = "ring", *, shared: float = 0.0) -> Link:
    """Latency and bandwidth from all-reduces of several sizes, by least squares on ln seconds with a soft L1 loss.

    The covariance is Huber's (1981, section 7.6), scaled by the residuals: whatever the formula cannot follow widens
    all intervals. What slows all timings alike is not seen in residuals: ``shared`` is the variance of ln seconds that
    it adds, as far as it is known otherwise. Raises NotEnoughData for fewer than four timings, or where they do not
    tell latency from bandwidth.
    """
    if len(timings) < LEAST_TIMINGS or len({t.message_bytes for t in timings}) < 2:
        raise NotEnoughData(
            f"{len(timings)} all-reduces were measured: latency and bandwidth need at least {LEAST_TIMINGS}, of "
            "several sizes"
        )
    measured = np.log([t.seconds for t in timings])
    latencies, passed = costs([t.ranks for t in timings], [t.message_bytes for t in timings], algorithm)
    # A start from below: each of the two terms alone takes no longer than the whole.
    start = np.array([np.min(measured - np.log(latencies)), np.min(measured - np.log(passed))])

    def residuals(logs: Array) -> Array:
        return np.asarray(np.logaddexp(np.log(latencies) + logs[0], np.log(passed) + logs[1]) - measured)

    def slopes(logs: Array) -> Array:
        terms = np.array([latencies, passed]) * np.exp(logs)[:, None]
        return np.asarray((terms / terms.sum(axis=0)).T)

    cut = 0.1
    for _ in range(3):
        start = optimize.least_squares(residuals, start, jac=slopes, loss="soft_l1", f_scale=cut).x
        rest = residuals(start)
        cut = max(2 * 1.4826 * float(np.median(np.abs(rest))), 1e-6)
    normal = slopes(start).T @ slopes(start)
    if np.linalg.cond(normal) > 1e8:
        raise NotEnoughData("the measured messages do not tell latency from bandwidth: measure smaller and larger ones")
    bent = 1 + (rest / cut) ** 2
    freedom = len(timings) - 2
    influence = float(np.sum(rest**2 / bent)) / freedom / float(np.mean(bent**-1.5)) ** 2
    return Link(
        alpha=math.exp(start[0]),
        beta=math.exp(start[1]),
        covariance=np.asarray(influence * np.linalg.inv(normal) + shared, dtype=float),
        spread=math.sqrt(float(np.sum(rest**2)) / freedom),
        shared=shared,
        freedom=freedom,
        most_ranks=max(t.ranks for t in timings),
        algorithm=algorithm,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A timing that was not used to fit, and what the others predict for it."""

    timing: Timing
    seconds: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.seconds / self.timing.seconds - 1


def leave_one_out(timings: Sequence[Timing], algorithm: str = "ring", *, shared: float = 0.0) -> list[Held]:
    """Each number of ranks predicted from all others; empty where these do not suffice."""
    found = []
    for ranks in sorted({t.ranks for t in timings}):
        try:
            link = fit_link([t for t in timings if t.ranks != ranks], algorithm, shared=shared)
        except NotEnoughData:
            continue
        for timing in timings:
            if timing.ranks == ranks:
                draws = link.draws(ranks, timing.message_bytes, 1, np.random.default_rng(0))
                low, high = bounds(draws)
                seconds = link.seconds(ranks, timing.message_bytes)
                found.append(Held(timing=timing, seconds=seconds, low=low, high=high))
    return found


def bounds(draws: Array) -> tuple[float, float]:
    """The ends of the 90 % interval of draws."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
