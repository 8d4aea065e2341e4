"""The question all_reduce: how fast ranks exchange messages of each size."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ddpm_lab.explain import phrases
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.frames import Study, rank_zero
from ddpm_lab.explain.table import Table
from ddpm_lab.record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One measured all-reduce: geometric mean of seconds over sets."""

    ranks: int
    hosts: int
    message_bytes: int
    message: str
    seconds: float
    sets: int

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that each rank's link passes: 2 (N - 1) / N n / t, as nccl-tests defines it."""
        return self.passed_bytes / self.seconds

    @property
    def passed_bytes(self) -> float:
        """Bytes that no all-reduce can avoid to pass over each link: 2 (N - 1) / N n."""
        return 2 * (self.ranks - 1) / self.ranks * self.message_bytes

    @property
    def ranks_name(self) -> str:
        """Such as "4 ranks", or "4 ranks on 2 hosts"."""
        return phrases.plural(self.ranks, "rank") + (f" on {self.hosts} hosts" if self.hosts > 1 else "")


def exchanges(study: Study) -> list[Exchange]:
    """Measured all-reduces of a study, by hosts, ranks and size."""
    by_hosts: dict[int, list[RunRecord]] = defaultdict(list)
    for r in study.records:
        by_hosts[int(rank_zero(r).get("hosts") or 1)].append(r)
    found = [
        exchange
        for hosts, records in by_hosts.items()
        for exchange in _exchanges(dataclasses.replace(study, records=tuple(records)), hosts)
    ]
    return sorted(found, key=lambda e: (e.hosts, e.ranks, e.message_bytes))


def _exchanges(study: Study, hosts: int) -> Iterable[Exchange]:
    for row in comparisons(study):
        if row.sets and row.role != "twin" and row.ranks > 1:
            yield Exchange(
                ranks=row.ranks,
                hosts=hosts,
                message_bytes=row.config.option("message_bytes", 0),
                message=row.label,
                seconds=row.step_seconds,
                sets=row.sets,
            )


def answer(study: Study) -> tuple[str, str] | None:
    """Headline and evidence; None where no exchange was measured."""
    found = exchanges(study)
    if not found:
        return None
    most = max(found, key=lambda e: (e.ranks, e.bus_bandwidth))
    least = min((e for e in found if e.ranks == most.ranks), key=lambda e: e.seconds)
    short = (
        f"{phrases.plural(most.ranks, 'rank')} exchange at up to {bandwidth(most.bus_bandwidth)} of bus bandwidth, and "
        f"in no less than {duration(least.seconds)}"
    )
    return short, (
        f"The most is reached with {most.message}, the least time takes a message of "
        f"{least.message} ({phrases.plural(most.sets, 'set')})."
    )


def duration(seconds: float) -> str:
    """A short time for people: microseconds below a millisecond."""
    if 0 < seconds < 1e-3:
        return f"{phrases.significant(1e6 * seconds)} \N{MICRO SIGN}s"
    return phrases.seconds(seconds)


def bandwidth(bytes_per_second: float) -> str:
    """Such as "1.9 GB/s"."""
    if not math.isfinite(bytes_per_second):
        return phrases.significant(bytes_per_second)
    unit, name = (1e9, "GB/s") if bytes_per_second >= 1e9 else (1e6, "MB/s")
    return f"{phrases.significant(bytes_per_second / unit)} {name}"


def table(study: Study) -> Table:
    """One row for each number of ranks and message."""
    return [
        {
            "Configuration": e.ranks_name,
            "Message": e.message,
            "Time": duration(e.seconds),
            "Bus bandwidth": bandwidth(e.bus_bandwidth),
            "Sets": str(e.sets),
        }
        for e in exchanges(study)
    ]
