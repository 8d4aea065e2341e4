"""Steps of training with numbers of ranks that were not measured, from the records of a study and of its links."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import DDPM, RunConfig
from ddpm_lab.exchange_settings import ExchangeConfig
from ddpm_lab.explain import links, phrases, prediction
from ddpm_lab.explain.comparisons import Row, comparisons, throughput
from ddpm_lab.explain.frames import SCALING, Study, rank_zero
from ddpm_lab.explain.link_fit import Link, NotEnoughData
from ddpm_lab.explain.prediction import (
    LEAST_SETS,
    Cluster,
    Compute,
    Exchanged,
    Pair,
    Prediction,
    Speed,
    overlapped,
    pairs,
)
from ddpm_lab.explain.stats import LEVEL
from ddpm_lab.plan import scaling

WORLD_SIZES = tuple(2**power for power in range(1, 11))
_GRADIENT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured step, to stand beside predicted ones: seconds and efficiency with their 95 % intervals over sets.

    ``global_batch`` says whether the efficiency is of ranks that share a batch, else of ranks that keep their own.
    ``cores`` are the cores that all ranks shared; None on GPUs.
    """

    ranks: int
    rank_batch: float
    global_batch: bool
    seconds: float
    low: float
    high: float
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    cores: int | None
    sets: int
    label: str = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What predictions rest on: one training configuration, its measured compute, its exchange, the links.

    ``rank_batch`` is what a rank is taken to keep where nothing else is said, and ``own_seconds`` its measured step on
    one rank. ``checks`` are measured steps of several ranks, each with what was predicted of it without the all-reduces
    and the overlap of as many ranks; for ``unchecked`` numbers of ranks these do not suffice. ``measured`` are all
    measured steps of this configuration; ``cores`` are those of the one rank on a CPU, and None on GPUs.
    """

    config: RunConfig
    compute: Compute
    exchanged: Exchanged
    cluster: Cluster
    rank_batch: int
    own_seconds: float
    checks: tuple[tuple[float, Prediction], ...]
    unchecked: tuple[int, ...]
    measured: tuple[Measured, ...] = ()
    cores: int | None = None

    def at(self, ranks: int, rank_batch: float | None = None, *, own_batch: float | None = None) -> Prediction:
        """The predicted step of so many ranks; its efficiency is against one rank with ``own_batch``, or their batch.

        Raises NotEnoughData, or ConfigError.
        """
        batch = self.rank_batch if rank_batch is None else rank_batch
        return prediction.predict(self.cluster, self.compute, self.exchanged, ranks, batch, own_batch=own_batch)

    def beside(self, ranks: int, global_batch_size: int | None = None) -> Measured | None:
        """What was measured of so many ranks with this batch, shared or, for None, each its own; None for nothing."""
        shared = global_batch_size is not None
        batch = global_batch_size / ranks if global_batch_size is not None else self.rank_batch
        found = [m for m in self.measured if m.ranks == ranks and m.rank_batch == batch]
        return max(found, key=lambda m: (m.ranks == 1 or m.global_batch == shared, m.sets), default=None)

    def assumptions(self, most: int) -> str:
        """What every prediction of up to ``most`` ranks takes for granted, in sentences."""
        per_host = self.cluster.ranks_per_host
        link = self.cluster.inner or self.cluster.outer
        assert link is not None
        where = (
            "every link as the measured one"
            if per_host is None
            else f"{phrases.plural(per_host, 'rank')} a host, a ring within it and a {link.algorithm} between hosts"
        )
        hidden, added = self.exchanged.hidden, float(np.median(self.exchanged.added))
        if hidden is None:
            overlap = "overlap with the backward pass not measured: from none to full"
        elif added:
            overlap = f"each step takes {phrases.seconds(added)} more than compute and all-reduces, as measured"
        else:
            overlap = f"compute hides {100 * float(np.median(hidden)):.0f} % of the exchange, as measured"
        size = f"{self.exchanged.message_bytes / 2**20:.3g} MiB of gradients"
        buckets = phrases.plural(self.exchanged.buckets, "bucket")
        return (
            f"Assumed: {link.algorithm}, {where}; {size} in {buckets}; {overlap}; each rank as fast as the one "
            f"measured alone{self._own_cores(most)}."
        )

    def _own_cores(self, most: int) -> str:
        if self.cores is None:
            return ""
        each, total = phrases.plural(self.cores, "core"), phrases.plural(most * self.cores, "core")
        return f", so each rank on {each} of its own: {total} for {phrases.plural(most, 'rank')}"


def basis(
    study: Study, *, algorithm: str = "ring", ranks_per_host: int | None = None, carried: Sequence[str] = ()
) -> Basis:
    """What the records allow to predict. Raises NotEnoughData, whose message says what is missing and how to get it.

    ``ranks_per_host`` None takes the most that were measured on one host, where anything was measured on several.
    ``carried`` are options that the command which measures what is missing needs to write beside these records.
    """
    kinds, rows = links.fitted(study, algorithm), _training(study)
    alone = [r for r in rows if r["ranks"] == 1 and _log_error(r)]
    wanted = [("all-reduces", "all_reduce")] * (not kinds)
    wanted += [("training steps of one rank in three sets", SCALING)] * (not alone)
    if wanted:
        raise NotEnoughData(
            f"the ledger holds no {' and no '.join(what for what, _ in wanted)}: measure them with ddpm-lab run "
            + " ".join([*(name for _, name in wanted), f"--sets {LEAST_SETS}", *carried])
        )
    compute = Compute(speeds=_speeds(alone))
    if ranks_per_host is None:
        ranks_per_host = _ranks_per_host((r["config"] for r in rows), links.exchanges(study))
    cluster = _cluster(kinds, algorithm, ranks_per_host)
    if cluster.inner is None and cluster.outer is None:
        raise NotEnoughData("; ".join(kind.reason for kind in kinds.values()))
    ours = {r["run_id"] for r in rows}
    counted = (rank_zero(r).get("parameters") for r in reversed(study.records) if r.run_id in ours)
    if (parameters := next(filter(None, counted), None)) is None:
        raise NotEnoughData("the records do not say how many weights the network has: measure them again")
    size = _GRADIENT_BYTES * parameters
    mib = alone[0]["config"].exchange.bucket_mb
    exchanged = Exchanged(message_bytes=size, buckets=max(1, math.ceil(size / 2**20 / mib)), hidden=None)
    own = max(alone, key=lambda r: r["batch"])
    measured = [p for p in pairs(study) if _alike(p.config) == _alike(own["config"])]
    without = {n: _cluster(kinds, algorithm, without=n) for n in {r["ranks"] for r in rows}}
    cores = study.records[-1].environment.machine.usable_cores if own["config"].device == "cpu" else None
    held = list(_checks(rows, measured, compute, exchanged, without))
    return Basis(
        config=own["config"],
        compute=compute,
        exchanged=overlapped(measured, cluster, exchanged),
        cluster=cluster,
        rank_batch=own["batch"],
        own_seconds=own["step_seconds"],
        checks=tuple((row["step_seconds"], made) for row, made in held if made is not None),
        unchecked=tuple(sorted({row["ranks"] for row, made in held if made is None})),
        measured=tuple(_measured(row, cores) for row in rows if row["config"].exchange == ExchangeConfig()),
        cores=cores,
    )


def _measured(row: Row, cores: int | None) -> Measured:
    """A row of ``comparisons`` as a step; ``cores`` are those of a host."""
    _, slowest, fastest = throughput(row)
    kind = scaling(row["family"])
    shown = kind is not None and row["role"] == "candidate"
    names = ("efficiency", "efficiency_low", "efficiency_high")
    rated: Row = {name: row[name] if shown else math.nan for name in names}
    return Measured(
        ranks=row["ranks"],
        rank_batch=row["batch"] / row["ranks"],
        global_batch=kind == "strong",
        seconds=row["step_seconds"],
        low=row["batch"] / fastest,
        high=row["batch"] / slowest,
        **rated,
        cores=None if cores is None else cores * row["config"].nodes,
        sets=int(row["sets"]),
    )


def _training(study: Study) -> list[Row]:
    """Rows of the training step that was measured with most batch sizes: all alike but for ranks and batch."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in comparisons(study):
        config = row["config"]
        if row["experiment"] == SCALING and row["sets"] and row["role"] != "twin" and config.workload == DDPM:
            groups[_alike(config)].append(row)
    return max(groups.values(), key=lambda rows: len({r["batch"] for r in rows if r["ranks"] == 1}), default=[])


def _log_error(row: Row) -> float:
    """Standard error of ln seconds over sets, from the 95 % interval; 0 with fewer sets than tell one."""
    _, low, high = throughput(row)
    if math.isnan(low) or row["sets"] < LEAST_SETS:
        return 0.0
    return float(math.log(high / low) / 2 / special.stdtrit(row["sets"] - 1, (1 + LEVEL) / 2))


def _speeds(rows: Iterable[Row]) -> tuple[Speed, ...]:
    """The best known compute of each batch of a rank."""
    best: dict[float, Speed] = {}
    for row in rows:
        batch = row["batch"] / row["ranks"]
        found = Speed(rank_batch=batch, seconds=row["step_seconds"], log_error=_log_error(row), freedom=row["sets"] - 1)
        if batch not in best or found.log_error < best[batch].log_error:
            best[batch] = found
    return tuple(best[batch] for batch in sorted(best))


def _alike(config: RunConfig) -> str:
    """What a configuration has in common with those of other ranks and batches."""
    alone = replace(config, world_size=1, nodes=1, global_batch_size=1, accumulation=1, exchange=ExchangeConfig())
    return alone.run_id


def _ranks_per_host(configs: Iterable[RunConfig], exchanges: Sequence[links.Exchange]) -> int | None:
    """The most ranks that were measured on one host; None where nothing was measured on several."""
    spread = [(c.node_size, c.nodes) for c in configs] + [(e.ranks // e.hosts, e.hosts) for e in exchanges]
    return max(size for size, _ in spread) if any(hosts > 1 for _, hosts in spread) else None


def _cluster(
    kinds: Mapping[str, links.Fitted], algorithm: str, ranks_per_host: int | None = None, without: int | None = None
) -> Cluster:
    """The links fitted to all all-reduces but those of ``without`` ranks."""
    found: dict[str, Link] = {}
    for where, kind in kinds.items():
        with contextlib.suppress(NotEnoughData):
            found[where] = links.fit([e for e in kind.exchanges if e.ranks != without], algorithm)
    return Cluster(inner=found.get("on one host"), outer=found.get("between hosts"), ranks_per_host=ranks_per_host)


def _checks(
    rows: Sequence[Row], pairs: Sequence[Pair], compute: Compute, exchanged: Exchanged, without: Mapping[int, Cluster]
) -> Iterable[tuple[Row, Prediction | None]]:
    """Each measured step of several ranks, with what is predicted of it; None where the rest does not suffice.

    Links, of ``without``, and overlap are fitted to everything but its own number of ranks. Compute is that of the same
    ranks without exchange where it was measured: ranks that share the cores of a machine are slower than one alone, so
    of those nothing else is predicted.
    """
    silent = {_work(pair.config): pair for pair in pairs}
    for row in rows:
        ranks, config = row["ranks"], row["config"]
        if ranks == 1 or config.exchange != ExchangeConfig():
            continue
        pair = silent.get(_work(config))
        if pair is None and config.device == "cpu" and config.nodes < ranks:
            continue
        known = compute if pair is None else Compute(speeds=(pair.compute(),))
        here = without[ranks].spread(ranks, config.nodes)
        others = [p for p in pairs if p.config.world_size != ranks]
        try:
            seen = overlapped(others, without[ranks], exchanged)
            yield row, prediction.predict(here, known, seen, ranks, row["batch"] / ranks)
        except NotEnoughData:
            yield row, None


def _work(config: RunConfig) -> tuple[int, int, int]:
    return config.world_size, config.nodes, config.global_batch_size


Made = Prediction | Measured | str


def beside(found: Basis, made: Mapping[int, Made], global_batch_size: int | None = None) -> dict[int, Measured]:
    """What was measured of the same ranks and batch as what is predicted."""
    rows = {n: found.beside(n, global_batch_size) for n, p in made.items() if isinstance(p, Prediction)}
    return {n: row for n, row in rows.items() if row is not None}


def predictions(found: Basis, world_sizes: Sequence[int], global_batch_size: int | None = None) -> dict[int, Made]:
    """A prediction for each number of ranks, or why there is none; without a global batch each keeps its own.

    One rank with a batch that was measured exchanges nothing, so there is nothing to predict: it is that measurement.

    Ranks that share a global batch have the efficiency of strong scaling, against one rank with all of it. Raises
    NotEnoughData where there is no prediction for any.
    """
    made: dict[int, Made] = {}
    for ranks in world_sizes:
        try:
            if ranks == 1 and (alone := found.beside(1, global_batch_size)) is not None:
                made[ranks] = alone
            elif global_batch_size is None:
                made[ranks] = found.at(ranks)
            elif global_batch_size % ranks:
                shared = f"{phrases.plural(global_batch_size, 'image')} cannot be shared by"
                made[ranks] = f"{shared} {phrases.plural(ranks, 'rank')}"
            else:
                made[ranks] = found.at(ranks, global_batch_size // ranks, own_batch=global_batch_size)
        except NotEnoughData as missing:
            made[ranks] = f"not enough data: {missing}"
        except ConfigError as refused:
            made[ranks] = str(refused)
    if all(isinstance(p, str) for p in made.values()):
        raise NotEnoughData(str(next(iter(made.values()))))
    return made
