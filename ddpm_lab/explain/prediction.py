"""How long a step takes with numbers of ranks that nobody measured: a rank's compute, and an exchange over its links.

What compute hides of the exchange comes from steps of several ranks with and without it in the same sets. What is
predicted has a 90 % interval that holds for one more measurement, drawn from the joint uncertainty of links, compute
and overlap.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ddpm_lab import plan
from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.exchange_settings import ExchangeConfig
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.link_fit import DRAWS, Array, Link, NotEnoughData, bounds
from ddpm_lab.record import RunRecord, kept_seconds, set_log_ratio

EXTRAPOLATION = 4
"""Beyond so many times the largest measured number of ranks, or of hosts, a prediction is called an extrapolation."""
EXTRAPOLATED = "extrapolation"
HIDING_SHARE = 2 / 3
"""Share of the compute that an exchange can hide behind: the backward pass does twice the work of the forward pass."""
WIDEST = 10
"""An interval whose ends are further apart than this factor is no prediction."""
LEAST_SETS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured compute of a rank without any exchange: images of its share, seconds, standard error of ln seconds."""

    rank_batch: float
    seconds: float
    log_error: float
    freedom: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Seconds of compute against the images of a rank: straight lines between measured points, and beyond them.

    ``speeds`` come in the order of their batches.
    """

    speeds: tuple[Speed, ...]

    def seconds(self, rank_batch: float) -> float:
        """Raises NotEnoughData for another batch where only one was measured."""
        return float(self._between([np.array([s.seconds]) for s in self.speeds], rank_batch)[0])

    def draws(self, rank_batch: float, rng: np.random.Generator) -> Array:
        """Draws of what would be measured: each point has its error, and the measurement that is predicted another."""
        errors = [np.clip(2**0.5 * s.log_error * rng.standard_t(s.freedom, DRAWS), -9, 9) for s in self.speeds]
        return self._between([s.seconds * np.exp(e) for s, e in zip(self.speeds, errors, strict=True)], rank_batch)

    def _between(self, seconds: Sequence[Array], rank_batch: float) -> Array:
        """Seconds at a batch, from those at the measured ones."""
        batches = [s.rank_batch for s in self.speeds]
        if rank_batch in batches:
            return seconds[batches.index(rank_batch)]
        if len(batches) < 2:
            raise NotEnoughData(
                f"compute was measured for {batches[0]:g} images a rank alone, and {rank_batch:g} are asked for"
            )
        right = int(np.clip(np.searchsorted(batches, rank_batch), 1, len(batches) - 1))
        share = (rank_batch - batches[right - 1]) / (batches[right] - batches[right - 1])
        line = seconds[right - 1] + share * (seconds[right] - seconds[right - 1])
        # A step of fewer images never costs less than in proportion, nor of more images less than that of fewer.
        if rank_batch < batches[0]:
            return np.asarray(np.maximum(line, seconds[0] * rank_batch / batches[0]))
        return np.asarray(np.maximum(line, seconds[-1])) if rank_batch > batches[-1] else line

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

    def spread(self, ranks: int, nodes: int) -> Cluster:
        """The same links for a step of so many ranks, spread evenly over so many hosts."""
        return replace(self, ranks_per_host=ranks // nodes if nodes > 1 else None)

    def shape(self, ranks: int) -> tuple[int, int]:
        """Ranks on a host, and hosts. Raises ConfigError where the ranks do not fill the hosts."""
        if self.ranks_per_host is None or ranks <= self.ranks_per_host:
            return ranks, 1
        if ranks % self.ranks_per_host:
            raise ConfigError(f"{ranks} ranks do not fill hosts of {self.ranks_per_host}: give a multiple")
        return self.ranks_per_host, ranks // self.ranks_per_host

    def seconds(self, ranks: int, message_bytes: float, buckets: int) -> float:
        """Seconds of the exchange: a ring within each host, and one between the hosts, of which each has one link.

        Each of R ranks on a host exchanges 1 / R of the message with its like on the other hosts, all over that link.
        Raises NotEnoughData for a kind of link that was not measured.
        """
        return sum(link.seconds(count, message_bytes, buckets) for count, link in self._parts(ranks))

    def draws(self, ranks: int, message_bytes: float, buckets: int, rng: np.random.Generator) -> Array:
        """Draws of the seconds that it would be measured to take."""
        parts = [link.draws(count, message_bytes, buckets, rng) for count, link in self._parts(ranks)]
        return np.sum(parts, axis=0) if parts else np.zeros(DRAWS)

    def _parts(self, ranks: int) -> list[tuple[int, Link]]:
        """How many exchange over each kind of link."""
        local, hosts = self.shape(ranks)
        found = []
        for count, link, where, how in (
            (local, self.inner, "on one host", "several ranks of a host"),
            (hosts, self.outer, "between hosts", "one rank on each host"),
        ):
            if count > 1:
                if link is None:
                    raise NotEnoughData(
                        f"the ledger holds no all-reduce {where}: measure it with ddpm-lab run all_reduce, {how}"
                    )
                found.append((count, link))
        return found

    def beyond(self, ranks: int) -> float:
        """How many doublings a number of ranks lies above four times what was measured; 0 below that."""
        local, hosts = self.shape(ranks)
        ratios = [count / link.most_ranks for count, link in ((local, self.inner), (hosts, self.outer)) if link]
        return max(0.0, math.log2(max(ratios, default=1.0) / EXTRAPOLATION))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What a step exchanges: bytes, in so many all-reduces, and the share of their time that compute hides.

    ``hidden`` None is unknown: then predictions reach from none to all that the backward pass can hide. ``added`` are
    seconds that the exchange adds to a step beyond its all-reduces: copies, and waiting for the slowest rank. Draws of
    what was measured carry its error.
    """

    message_bytes: float
    buckets: int = 1
    hidden: float | tuple[float, ...] | None = 0.0
    added: float | tuple[float, ...] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A step at a number of ranks: seconds with their 90 % interval; ``label`` is predicted or extrapolation.

    ``efficiency``, with its interval, is the images a second of each rank over those of one rank alone. What is not
    known of the compute is in both and cancels.
    """

    ranks: int
    rank_batch: float
    seconds: float
    low: float
    high: float
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    compute_seconds: float
    exchange_seconds: float
    label: str


def predict(
    cluster: Cluster,
    compute: Compute,
    exchanged: Exchanged,
    ranks: int,
    rank_batch: float,
    *,
    own_batch: float | None = None,
) -> Prediction:
    """A step of ``ranks`` ranks with ``rank_batch`` images each; efficiency is against one with ``own_batch`` of them.

    seconds = compute + exchange + added - min(hidden x exchange, two thirds of the compute). Beyond four times the
    largest measured number of ranks, and outside of the measured batches, ``own_batch`` too, it is an extrapolation:
    draws of the exchange and what it adds, or of the compute, then lie 1 + d times as far from their middle, in
    logarithm, d being the doublings beyond. Raises NotEnoughData, also where the ends of the interval lie further apart
    than a factor of ten.
    """
    message = (ranks, exchanged.message_bytes, exchanged.buckets)
    alone, exchange = compute.seconds(rank_batch), cluster.seconds(*message)
    own_batch = rank_batch if own_batch is None else own_batch
    beyond = (compute.beyond(rank_batch), cluster.beyond(ranks), compute.beyond(own_batch))
    alone_draws = _widened(compute.draws(rank_batch, np.random.default_rng(0)), alone, beyond[0])
    exchange_draws = _widened(cluster.draws(*message, np.random.default_rng(1)), exchange, beyond[1])
    # The same seed gives the same errors of the measured points, so that they cancel.
    own = compute.seconds(own_batch)
    per_image = own / own_batch
    per_image_draws = _widened(compute.draws(own_batch, np.random.default_rng(0)), own, beyond[2]) / own_batch
    more = np.resize(np.asarray(exchanged.added, dtype=float), DRAWS)
    added = float(np.median(more))
    added_draws = _widened(np.maximum(more, 1e-3 * added), added, beyond[1])
    middles, ends, shares = [], [], []
    for hidden in (0.0, 1.0) if exchanged.hidden is None else (exchanged.hidden,):
        share = np.resize(np.asarray(hidden, dtype=float), DRAWS)
        middles.append(float(_step(alone, exchange, np.median(share))) + added)
        steps = _step(alone_draws, exchange_draws, share) + added_draws
        ends.append(bounds(steps))
        shares.append(bounds(rank_batch * per_image_draws / steps))
    seconds, low, high = math.sqrt(middles[0] * middles[-1]), ends[-1][0], ends[0][1]
    if high > WIDEST * low:
        raise NotEnoughData(
            f"a step of {ranks} ranks may take {low:.2g} to {high:.2g} s: measure more sets, or on a quieter machine"
        )
    return Prediction(
        ranks=ranks,
        rank_batch=rank_batch,
        seconds=seconds,
        low=low,
        high=high,
        efficiency=rank_batch * per_image / seconds,
        efficiency_low=shares[0][0],
        efficiency_high=shares[-1][1],
        compute_seconds=alone,
        exchange_seconds=exchange,
        label=EXTRAPOLATED if any(beyond) else "predicted",
    )


def _widened(draws: Array, middle: float, doublings: float) -> Array:
    """Draws so many times as far from their middle, in logarithm, as the rule of extrapolation says."""
    if not doublings or not middle:
        return draws
    return np.asarray(middle * np.exp(np.clip((1 + doublings) * np.log(draws / middle), -50, 50)))


def _step(alone: npt.ArrayLike, exchange: npt.ArrayLike, share: npt.ArrayLike) -> Array:
    alone, exchange, share = np.asarray(alone), np.asarray(exchange), np.asarray(share)
    return np.asarray(alone + exchange - np.minimum(share * exchange, HIDING_SHARE * alone))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Seconds of a step with its exchange and without it, of each set; ``config`` is the one that exchanges."""

    config: RunConfig
    exchanged: tuple[float, ...]
    silent: tuple[float, ...]

    def compute(self) -> Speed:
        """The compute of these ranks: their step without exchange."""
        logs = np.log(self.silent)
        return Speed(
            rank_batch=self.config.rank_batch_size,
            seconds=math.exp(logs.mean()),
            log_error=float(logs.std(ddof=1)) / math.sqrt(len(logs)),
            freedom=len(logs) - 1,
        )

    def exposed(self, rng: np.random.Generator) -> Array:
        """Draws of the seconds that the exchange adds to a step: the mean over sets of what it adds in each."""
        added = np.subtract(self.exchanged, self.silent)
        error = added.std(ddof=1) / math.sqrt(len(added))
        return np.asarray(added.mean() + error * rng.standard_t(len(added) - 1, DRAWS))


def pairs(study: Study) -> list[Pair]:
    """Of what was measured for the lost scaling: all ranks with and without exchange, where three sets have both."""
    sets: dict[str, dict[str, RunRecord]] = defaultdict(dict)
    for r in study.records:
        if r.family.endswith(plan.LOST) and r.status == "ok" and kept_seconds(r) and not r.mechanism_only:
            sets[r.set_id][r.run_id] = r
    configs: dict[str, RunConfig] = {}
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for members in sets.values():
        for silent in members.values():
            config = replace(silent.config, exchange=ExchangeConfig())
            if silent.label == plan.NO_EXCHANGE and config.run_id in members:
                # Paired by turn: what slows a whole turn is no exchange.
                log = set_log_ratio(silent, members[config.run_id])
                seconds = statistics.median(kept_seconds(silent).values()) * config.global_batch_size
                if math.isfinite(log):
                    configs[config.run_id] = config
                    found[config.run_id].append((seconds * math.exp(-log), seconds))
    return [
        Pair(config=configs[run_id], exchanged=tuple(e for e, _ in steps), silent=tuple(s for _, s in steps))
        for run_id, steps in found.items()
        if len(steps) >= LEAST_SETS
    ]


def overlapped(measured: Iterable[Pair], cluster: Cluster, exchanged: Exchanged) -> Exchanged:
    """``exchanged`` with draws of what was measured of the overlap, each the mean over pairs.

    The share that compute hides is 1 - (step - step without exchange) / exchange, and what is more than all of the
    exchange is added. Nothing is known where there is no pair whose links are known.
    """
    shares, added = [], []
    rng = np.random.default_rng(0)
    for pair in measured:
        ranks, nodes = pair.config.world_size, pair.config.nodes
        with contextlib.suppress(NotEnoughData):  # a kind of link that was not measured
            whole = cluster.spread(ranks, nodes).draws(ranks, exchanged.message_bytes, exchanged.buckets, rng)
            exposed = pair.exposed(rng)
            shares.append(np.clip(1 - exposed / whole, 0.0, 1.0))
            added.append(np.maximum(exposed - whole, 0.0))
    if not shares:
        return replace(exchanged, hidden=None, added=0.0)
    means = (tuple(float(v) for v in np.mean(draws, axis=0)) for draws in (shares, added))
    return replace(exchanged, hidden=next(means), added=next(means))
