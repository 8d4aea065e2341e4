"""The question all_reduce: how fast ranks exchange messages of each size, and the links that this makes."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from ddpm_lab.explain import link_fit, phrases
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.frames import ALL_REDUCE, Study, rank_zero
from ddpm_lab.explain.link_fit import Held, Link, NotEnoughData, Timing
from ddpm_lab.record import RunRecord, kept_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One measured all-reduce: geometric mean of seconds over sets with its 95 % interval (NaN for one set).

    ``by_set`` are the seconds of each set, by its id.
    """

    ranks: int
    hosts: int
    message_bytes: int
    message: str
    seconds: float
    low: float
    high: float
    by_set: Mapping[str, float]

    @property
    def sets(self) -> int:
        """Over how many it was measured."""
        return len(self.by_set)

    @property
    def timing(self) -> Timing:
        """What is fitted."""
        return Timing(ranks=self.ranks, message_bytes=self.message_bytes, seconds=self.seconds)

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that each rank's link passes: 2 (N - 1) / N n / t, as nccl-tests defines it."""
        return self.passed_bytes / self.seconds

    @property
    def passed_bytes(self) -> float:
        """Bytes that no all-reduce can avoid to pass over each link."""
        return float(link_fit.costs(self.ranks, self.message_bytes)[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Links of one kind: the all-reduces they were fitted to, the link or why there is none, and the check of it."""

    where: str
    exchanges: tuple[Exchange, ...]
    link: Link | None
    reason: str
    held: tuple[Held, ...]


def exchanges(study: Study) -> list[Exchange]:
    """Measured all-reduces of a study, its own or those that came with it, by hosts, ranks and size."""
    by_hosts: dict[int, list[RunRecord]] = defaultdict(list)
    for r in study.records if study.experiment == ALL_REDUCE else study.exchanges:
        by_hosts[int(rank_zero(r).get("hosts") or 1)].append(r)
    found = [
        exchange
        for hosts, records in by_hosts.items()
        for exchange in _exchanges(dataclasses.replace(study, experiment=ALL_REDUCE, records=tuple(records)), hosts)
    ]
    return sorted(found, key=lambda e: (e.hosts, e.ranks, e.message_bytes))


def _exchanges(study: Study, hosts: int) -> Iterable[Exchange]:
    by_set: dict[str, dict[str, float]] = defaultdict(dict)
    for r in study.records:
        if r.role != "twin" and (kept := kept_seconds(r)):
            by_set[r.run_id][r.set_id] = r.config.global_batch_size * median(kept.values())
    for row in comparisons(study):
        if row["experiment"] == ALL_REDUCE and row["sets"] and row["role"] != "twin" and row["ranks"] > 1:
            low, high = (row["batch"] / row[f"images_per_second_{end}"] for end in ("high", "low"))
            yield Exchange(
                ranks=row["ranks"],
                hosts=hosts,
                message_bytes=row["config"].option("message_bytes", 0),
                message=row["label"],
                seconds=row["step_seconds"],
                low=low,
                high=high,
                by_set=by_set[row["run_id"]],
            )


def fitted(study: Study, algorithm: str = "ring") -> dict[str, Fitted]:
    """Links "on one host" and "between hosts", of those kinds that were measured."""
    every = exchanges(study)
    kinds = {
        "on one host": [e for e in every if e.hosts == 1],
        "between hosts": [e for e in every if e.hosts == e.ranks],
    }
    return {where: _fitted(where, found, algorithm) for where, found in kinds.items() if found}


def _fitted(where: str, found: Sequence[Exchange], algorithm: str) -> Fitted:
    link, reason = None, ""
    try:
        link = fit(found, algorithm)
    except NotEnoughData as missing:
        reason = str(missing)
    held = tuple(link_fit.leave_one_out([e.timing for e in found], algorithm, shared=shared_variance(found)))
    return Fitted(where=where, exchanges=tuple(found), link=link, reason=reason, held=held)


def fit(found: Sequence[Exchange], algorithm: str) -> Link:
    """The link of these exchanges, which are of one kind. Raises NotEnoughData."""
    return link_fit.fit_link([e.timing for e in found], algorithm, shared=shared_variance(found))


def shared_variance(found: Sequence[Exchange]) -> float:
    """Variance of ln seconds that what slows a whole set alike leaves in the means over sets.

    Of each number of ranks, whose messages take turns in the same sets: how much more the sets' means over messages
    scatter than by the scatter within sets; the mean over numbers of ranks. 0 where it cannot be told.
    """
    variances = []
    for ranks in {e.ranks for e in found}:
        mine = [e for e in found if e.ranks == ranks]
        common = sorted(set.intersection(*(set(e.by_set) for e in mine)))
        if len(mine) > 1 and len(common) > 1:
            logs = np.log([[e.by_set[s] for s in common] for e in mine])
            logs -= logs.mean(axis=1, keepdims=True)
            means = logs.mean(axis=0)
            within = float(np.sum((logs - means) ** 2)) / (len(mine) - 1) / (len(common) - 1)
            variances.append(max(0.0, float(means.var(ddof=1)) - within / len(mine)) / len(common))
    return float(np.mean(variances)) if variances else 0.0


def answer(study: Study) -> tuple[str, str] | None:
    """Headline and evidence; None where no exchange was measured."""
    kinds = fitted(study)
    if not kinds:
        return None
    most = max((e for k in kinds.values() for e in k.exchanges), key=lambda e: (e.ranks, e.bus_bandwidth))
    least = min((e for k in kinds.values() for e in k.exchanges if e.ranks == most.ranks), key=lambda e: e.seconds)
    short = (
        f"{phrases.plural(most.ranks, 'rank')} exchange at up to {bandwidth(most.bus_bandwidth)} of bus bandwidth, and "
        f"in no less than {duration(least.seconds)}"
    )
    said = [
        f"The most is reached with {most.message}, the least time takes a message of "
        f"{least.message} ({phrases.plural(most.sets, 'set')})."
    ]
    said += [sentence(kind) for kind in kinds.values()]
    return short, " ".join(said)


def sentence(kind: Fitted) -> str:
    """The link with its intervals, and how well it predicts numbers of ranks that it was not fitted to."""
    if kind.link is None:
        return f"A link {kind.where}: not enough data ({kind.reason})."
    (a_low, a_high), (b_low, b_high) = kind.link.interval()
    text = (
        f"A link {kind.where} has a latency of {duration(kind.link.alpha)} ({duration(a_low)} to "
        f"{duration(a_high)}) and passes {bandwidth(1 / kind.link.beta)} ({bandwidth(1 / b_high)} to "
        f"{bandwidth(1 / b_low)}; 90 % intervals of a fit to {phrases.plural(len(kind.exchanges), 'all-reduce')}, "
        f"which it misses by {100 * kind.link.spread:.0f} %)."
    )
    return f"{text} {check(kind)}"


def check(kind: Fitted) -> str:
    """What leaving one number of ranks out says of the formula."""
    if not kind.held:
        counts = phrases.joined([str(n) for n in sorted({e.ranks for e in kind.exchanges})])
        return f"Only {counts} ranks were measured, so nothing here tests the formula at another number."
    error = float(np.median([abs(h.error) for h in kind.held]))
    counts = phrases.joined([str(n) for n in sorted({h.timing.ranks for h in kind.held})])
    return f"Predicted from the others, the times of {counts} ranks are off by {100 * error:.0f} % in the median."


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


def table(study: Study) -> pd.DataFrame:
    """One row for each number of ranks and message, with what the other numbers of ranks predict for it."""
    kinds = fitted(study)
    held = {(k, h.timing.ranks, h.timing.message_bytes): h for k, kind in kinds.items() for h in kind.held}
    rows: list[dict[str, Any]] = []
    for where, kind in kinds.items():
        for e in kind.exchanges:
            other = held.get((where, e.ranks, e.message_bytes))
            rows.append(
                {
                    "Configuration": f"{phrases.plural(e.ranks, 'rank')}, {where}",
                    "Message": e.message,
                    "Time": phrases.with_interval(duration, e.seconds, e.low, e.high),
                    "Bus bandwidth": bandwidth(e.bus_bandwidth),
                    "Predicted from the other numbers of ranks": "not enough data"
                    if other is None
                    else f"{duration(other.seconds)}, off by {100 * other.error:+.0f} % "
                    f"({duration(other.low)} to {duration(other.high)})",
                    "Sets": str(e.sets),
                }
            )
    columns = ["Configuration", "Message", "Time", "Bus bandwidth"]
    return pd.DataFrame(rows) if rows else pd.DataFrame(columns=columns)
