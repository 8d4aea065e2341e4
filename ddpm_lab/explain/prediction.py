"""How long a step takes with numbers of ranks that nobody measured: a rank's compute, and an exchange over its links.

A link passes a message of n bytes in alpha + n beta seconds: latency and inverse bandwidth (Hockney 1994). Both are
fitted to measured all-reduces by robust least squares on the logarithm of time. What is predicted from them has a 90 %
interval, drawn from the joint uncertainty of the fit and of the compute, that holds for one more measurement.
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
EXTRAPOLATION = 4
"""Beyond so many times the largest measured number of ranks, or of hosts, a prediction is called an extrapolation."""
HIDING_SHARE = 2 / 3
"""Share of the compute that an exchange can hide behind: the backward pass does twice the work of the forward pass."""
LEAST_TIMINGS = 4
_DRAWS = 4000

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
        draws = self._parameters(np.random.default_rng(0), _DRAWS * 5)[0]
        low, high = np.exp(np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0))
        return (float(low[0]), float(high[0])), (float(low[1]), float(high[1]))

    def seconds(self, ranks: int, message_bytes: float) -> float:
        """Seconds of an all-reduce."""
        latencies, passed = costs(ranks, message_bytes, self.algorithm)
        return float(latencies * self.alpha + passed * self.beta)

    def draws(self, ranks: int, message_bytes: float, buckets: int, rng: np.random.Generator) -> Array:
        """Draws of the seconds that ``buckets`` all-reduces of one message between them would be measured to take."""
        logs, scale = self._parameters(rng, _DRAWS)
        latencies, passed = costs(ranks, message_bytes, self.algorithm)
        seconds = np.exp(logs) @ np.array([buckets * latencies, passed])
        noise = np.hypot(self.spread * scale, math.sqrt(self.shared)) * rng.standard_normal(_DRAWS)
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
                low, high = _bounds(draws)
                seconds = link.seconds(ranks, timing.message_bytes)
                found.append(Held(timing=timing, seconds=seconds, low=low, high=high))
    return found


def _bounds(draws: Array) -> tuple[float, float]:
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured compute of a rank without any exchange: images of its share, seconds, standard error of ln seconds."""

    rank_batch: float
    seconds: float
    log_error: float
    freedom: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Seconds of compute against the images of a rank: straight lines between measured points, and beyond them."""

    speeds: tuple[Speed, ...]

    def draws(self, rank_batch: float, rng: np.random.Generator) -> Array:
        """Draws of what would be measured. Raises NotEnoughData for another batch where only one was measured."""
        points = sorted(self.speeds, key=lambda s: s.rank_batch)
        batches = np.array([s.rank_batch for s in points])
        # Once for the error of the point, and once for that of the measurement that is predicted.
        seconds = [
            s.seconds * np.exp(s.log_error * math.sqrt(2) * rng.standard_t(max(1, s.freedom), _DRAWS)) for s in points
        ]
        if rank_batch in batches:
            return np.asarray(seconds[int(np.argmax(batches == rank_batch))])
        if len(points) < 2:
            raise NotEnoughData(
                f"compute was measured for {batches[0]:g} images a rank alone, and {rank_batch:g} are asked for"
            )
        right = int(np.clip(np.searchsorted(batches, rank_batch), 1, len(points) - 1))
        share = (rank_batch - batches[right - 1]) / (batches[right] - batches[right - 1])
        line = seconds[right - 1] + share * (seconds[right] - seconds[right - 1])
        # A step of fewer images never costs less than in proportion, nor of more images less than that of fewer.
        least = seconds[0] * rank_batch / batches[0] if rank_batch < batches[0] else seconds[right - 1]
        return np.asarray(np.maximum(line, least) if not batches[0] <= rank_batch <= batches[-1] else line)

    def beyond(self, rank_batch: float) -> float:
        """How many doublings a batch lies outside of what was measured; 0 inside."""
        low, high = (pick(s.rank_batch for s in self.speeds) for pick in (min, max))
        return max(0.0, math.log2(rank_batch / high), math.log2(low / rank_batch))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Links of ranks on one host and, where it was measured, between hosts; how many ranks share a host.

    Without ``ranks_per_host`` every link is like ``inner``.
    """

    inner: Link | None
    outer: Link | None = None
    ranks_per_host: int | None = None

    def shape(self, ranks: int) -> tuple[int, int]:
        """Ranks on a host, and hosts. Raises ConfigError where the ranks do not fill the hosts."""
        if self.ranks_per_host is None or ranks <= self.ranks_per_host:
            return ranks, 1
        if ranks % self.ranks_per_host:
            raise ConfigError(f"{ranks} ranks do not fill hosts of {self.ranks_per_host}: give a multiple")
        return self.ranks_per_host, ranks // self.ranks_per_host

    def draws(self, ranks: int, message_bytes: float, buckets: int, rng: np.random.Generator) -> Array:
        """Draws of the exchange: a ring within each host, and one between the hosts, of which each has one link.

        Each of R ranks on a host exchanges 1 / R of the message with its like on the other hosts, all over that link.
        Raises NotEnoughData for a kind of link that was not measured.
        """
        local, hosts = self.shape(ranks)
        total = np.zeros(_DRAWS)
        for count, link, where in ((local, self.inner, "on one host"), (hosts, self.outer, "between hosts")):
            if count > 1:
                if link is None:
                    raise NotEnoughData(f"no all-reduce {where} was measured")
                total = total + link.draws(count, message_bytes, buckets, rng)
        return total

    def beyond(self, ranks: int) -> float:
        """How many doublings a number of ranks lies above four times what was measured; 0 below that."""
        local, hosts = self.shape(ranks)
        ratios = [count / link.most_ranks for count, link in ((local, self.inner), (hosts, self.outer)) if link]
        return max(0.0, math.log2(max(ratios, default=1.0) / EXTRAPOLATION))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What a step exchanges: bytes, in so many all-reduces, and the share of their time that compute hides.

    ``hidden`` None is unknown: then predictions reach from none to all that the backward pass can hide. Draws of a
    share that was measured carry its error.
    """

    message_bytes: float
    buckets: int = 1
    hidden: float | tuple[float, ...] | None = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step at a number of ranks: median and 90 % interval in seconds; ``label`` is predicted or extrapolation."""

    ranks: int
    rank_batch: float
    seconds: float
    low: float
    high: float
    compute_seconds: float
    exchange_seconds: float
    label: str


def predict(cluster: Cluster, compute: Compute, exchanged: Exchanged, ranks: int, rank_batch: float) -> Prediction:
    """A step of ``ranks`` ranks with ``rank_batch`` images each.

    seconds = compute + exchange - min(hidden x exchange, two thirds of the compute). Beyond four times the largest
    measured number of ranks, and outside of the measured batches, it is an extrapolation: each end of the interval then
    lies 1 + d times as far from the prediction, in logarithm, d being the doublings beyond. Raises NotEnoughData.
    """
    rng = np.random.default_rng(ranks)
    alone = compute.draws(rank_batch, rng)
    exchange = cluster.draws(ranks, exchanged.message_bytes, exchanged.buckets, rng)
    ends = []
    for hidden in (0.0, 1.0) if exchanged.hidden is None else (exchanged.hidden,):
        share = np.resize(np.asarray(hidden, dtype=float), len(exchange))
        ends.append(alone + exchange - np.minimum(share * exchange, HIDING_SHARE * alone))
    low, high = _bounds(ends[-1])[0], _bounds(ends[0])[1]
    seconds = math.sqrt(float(np.median(ends[0])) * float(np.median(ends[-1])))
    doublings = cluster.beyond(ranks) + compute.beyond(rank_batch)
    return Prediction(
        ranks=ranks,
        rank_batch=rank_batch,
        seconds=seconds,
        low=seconds * (low / seconds) ** (1 + doublings),
        high=seconds * (high / seconds) ** (1 + doublings),
        compute_seconds=float(np.median(alone)),
        exchange_seconds=float(np.median(exchange)),
        label="extrapolation" if doublings else "predicted",
    )
