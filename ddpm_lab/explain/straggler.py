"""The straggler of several ranks where nothing is exchanged: how much longer it takes on its own, and which one it is.

Whichever rank is slowest in some sets is partly so by chance. So the other sets say which it is in a set, and identical
ranks have no excess on average; and it is named only where the test allows for each rank that might have been chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ddpm_lab.explain import decisions, stats
from ddpm_lab.record import RunRecord


def excess_shares(records: Sequence[RunRecord]) -> list[float]:
    """How much longer than the mean of the others the slowest rank takes in each set, as a share of the longest.

    ``records`` are of one configuration without exchange, one a set. Which rank is the slowest the other sets say: NaN
    where there are none. It may be below 0, where chance made it the slowest in the others.
    """
    if len(records) < 2:
        return [math.nan] * len(records)
    own, others, logs = _times(records)
    slowest = (logs.sum(axis=0) - logs).argmax(axis=1, keepdims=True)
    excess = np.take_along_axis(own - others, slowest, axis=1)[:, 0]
    return [float(share) for share in excess / own.max(axis=1)]


def named(records: Sequence[RunRecord]) -> str:
    """Such as "rank 12 on cuda:4 of host 2"; empty where no rank is shown to be slower than the others.

    Student's t over sets of ln(its seconds / the mean of the others'), with Bonferroni's correction over ranks.
    """
    if len(records) < decisions.LEAST_SETS:
        return ""
    logs = _times(records)[-1]
    rank = int(logs.mean(axis=0).argmax())
    found = stats.estimate(logs[:, rank])
    slower = found.value > 1 and logs.shape[1] * found.p < 1 - stats.LEVEL
    return f"rank {rank}{_place(rank, records)}" if slower else ""


def _times(records: Sequence[RunRecord]) -> tuple[stats.Array, stats.Array, stats.Array]:
    """Seconds of a step by set and rank, those of the others in the mean, and the logarithm of their ratio.

    A rank's own seconds are from the barrier before a window to its own end: the median over turns.
    """
    turns = [[np.array(w.rank_seconds) / w.steps for w in r.windows] for r in records]
    own = np.array([np.median(of_set, axis=0) for of_set in turns])
    others = (own.sum(axis=1, keepdims=True) - own) / (own.shape[1] - 1)
    return own, others, np.log(own / others)


def _place(rank: int, records: Sequence[RunRecord]) -> str:
    """Such as " on cuda:4 of host 2", where it was the same in every set; else empty."""
    hosts: dict[str, int] = {}
    places = set()
    for record in records:
        host_of = {own["rank"]: own["host"] for own in record.witness.get("ranks") or [] if own.get("host")}
        for host in host_of.values():
            hosts.setdefault(host, len(hosts) + 1)
        device = next((own.device for own in record.ranks if own.rank == rank), "")
        words = [device] if device.startswith("cuda") else []
        words += [f"host {hosts[host_of[rank]]}"] if rank in host_of and record.config.nodes > 1 else []
        places.add(" of ".join(words))
    return f" on {place}" if len(places) == 1 and (place := places.pop()) else ""
