"""The straggler of several ranks where nothing is exchanged: how much longer it takes on its own, and which one it is.

Whichever rank is slowest in some sets is partly so by chance. So the other sets say which it is in a set, and identical
ranks have no excess on average; and it is named only where the test allows for each rank that might have been chosen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ddpm_lab.explain import decisions, stats
from ddpm_lab.record import RunRecord


def excess_shares(records: Sequence[RunRecord]) -> list[float]:
    """How much longer than the mean of the others the slowest rank takes in each set, as a share of the longest.

    ``records`` are of one configuration without exchange, one a set. Which rank is the slowest the other sets say: NaN
    where there are none. It may be below 0, where chance made it the slowest in the others.
    """
    known = [_own_seconds(r) for r in records]
    shares = []
    for i, own in enumerate(known):
        elsewhere = [_excess_logs(other) for j, other in enumerate(known) if j != i and other]
        if own and elsewhere:
            rank = _slowest(elsewhere)
            shares.append((own[rank] - _others(own, rank)) / max(own))
        else:
            shares.append(math.nan)
    return shares


def named(records: Sequence[RunRecord]) -> str:
    """Such as "rank 12 on cuda:4 of host 2"; empty where no rank is shown to be slower than the others.

    Student's t over sets of ln(its seconds / the mean of the others'), with Bonferroni's correction over ranks.
    """
    logs = [_excess_logs(own) for r in records if (own := _own_seconds(r))]
    if not logs:
        return ""
    rank = _slowest(logs)
    found = stats.estimate([of_set[rank] for of_set in logs])
    slower = found.value > 1 and found.sets >= decisions.LEAST_SETS and len(logs[0]) * found.p < 1 - stats.LEVEL
    return f"rank {rank}{_place(rank, records)}" if slower else ""


def _own_seconds(record: RunRecord) -> list[float]:
    """Each rank's own seconds of a step, from the barrier before a window to its own end: the median over turns."""
    by_rank = zip(*([s / w.steps for s in w.rank_seconds] for w in record.windows), strict=True)
    return [statistics.median(seconds) for seconds in by_rank]


def _others(own: Sequence[float], rank: int) -> float:
    return (math.fsum(own) - own[rank]) / (len(own) - 1)


def _excess_logs(own: Sequence[float]) -> list[float]:
    return [math.log(seconds / _others(own, rank)) for rank, seconds in enumerate(own)]


def _slowest(logs: Sequence[Sequence[float]]) -> int:
    """The rank with the largest mean over sets."""
    means = [statistics.fmean(of_rank) for of_rank in zip(*logs, strict=True)]
    return means.index(max(means))


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
