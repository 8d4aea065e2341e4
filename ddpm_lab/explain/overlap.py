"""The share of an exchange that compute hides, from steps of several ranks with and without it in the same sets."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from ddpm_lab import plan
from ddpm_lab.config import RunConfig
from ddpm_lab.exchange_settings import ExchangeConfig
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.link_fit import DRAWS, Array, NotEnoughData
from ddpm_lab.explain.prediction import Cluster, Exchanged, Speed
from ddpm_lab.record import RunRecord, kept_seconds, set_log_ratio

LEAST_SETS = 3


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


def hidden(measured: Iterable[Pair], cluster: Cluster, exchanged: Exchanged) -> tuple[float, ...] | None:
    """Draws of the share of the exchange that compute hides: 1 - (step - step without exchange) / exchange.

    The mean over pairs; None where there is none whose links are known.
    """
    found = []
    rng = np.random.default_rng(0)
    for pair in measured:
        ranks, nodes = pair.config.world_size, pair.config.nodes
        with contextlib.suppress(NotEnoughData):  # a kind of link that was not measured
            whole = cluster.spread(ranks, nodes).draws(ranks, exchanged.message_bytes, exchanged.buckets, rng)
            found.append(np.clip(1 - pair.exposed(rng) / whole, 0.0, 1.0))
    return tuple(float(v) for v in np.mean(found, axis=0)) if found else None
