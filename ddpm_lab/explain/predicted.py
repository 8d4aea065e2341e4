"""Steps of training with numbers of ranks that were not measured, from the records of a study and of its links."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy import special

from ddpm_lab.config import DDPM, RunConfig
from ddpm_lab.exchange_settings import ExchangeConfig
from ddpm_lab.explain import links, phrases, prediction
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.frames import SCALING, Study
from ddpm_lab.explain.link_fit import Array, NotEnoughData
from ddpm_lab.explain.prediction import (
    EXTRAPOLATION,
    Cluster,
    Compute,
    Exchanged,
    Prediction,
    Speed,
)
from ddpm_lab.explain.stats import LEVEL

WORLD_SIZES = tuple(2**power for power in range(1, 11))
LEAST_SETS = 3
_GRADIENT_BYTES = 4

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What predictions rest on: one training configuration, its measured compute, its exchange, the links.

    ``rank_batch`` is what a rank is taken to keep where nothing else is said, and ``own_seconds`` its measured step on
    one rank. ``checks`` are measured steps of several ranks, each with what was predicted of it from all others.
    """

    config: RunConfig
    compute: Compute
    exchanged: Exchanged
    cluster: Cluster
    rank_batch: int
    own_seconds: float
    checks: tuple[tuple[float, Prediction], ...]

    def at(self, ranks: int, rank_batch: float | None = None) -> Prediction:
        """The predicted step of so many ranks. Raises NotEnoughData, or ConfigError."""
        batch = self.rank_batch if rank_batch is None else rank_batch
        return prediction.predict(self.cluster, self.compute, self.exchanged, ranks, batch, own_batch=self.rank_batch)

    def assumptions(self) -> str:
        """What every prediction takes for granted, in sentences."""
        per_host = self.cluster.ranks_per_host
        link = self.cluster.inner or self.cluster.outer
        assert link is not None
        where = (
            "every link as the measured one"
            if per_host is None
            else f"{phrases.plural(per_host, 'rank')} a host, a ring within it and a {link.algorithm} between hosts"
        )
        hidden = self.exchanged.hidden
        overlap = (
            "overlap with the backward pass not measured: from none to full"
            if hidden is None
            else f"compute hides {100 * float(np.median(hidden)):.0f} % of the exchange, as measured"
        )
        size = f"{self.exchanged.message_bytes / 2**20:.3g} MiB of gradients"
        buckets = phrases.plural(self.exchanged.buckets, "bucket")
        return (
            f"Assumed: {link.algorithm}, {where}; {size} in {buckets}; {overlap}; each rank as fast as the one "
            f"measured alone{', with as many cores' if self.config.device == 'cpu' else ''}."
        )


def basis(study: Study, *, algorithm: str = "ring", ranks_per_host: int | None = None) -> Basis:
    """What the records allow to predict. Raises NotEnoughData, whose message says what is missing and how to get it."""
    kinds, rows = links.fitted(study, algorithm), _training(study)
    alone = [r for r in rows if r["ranks"] == 1 and _log_error(r)]
    wanted = [("all-reduces", "all_reduce")] * (not kinds)
    wanted += [("training steps of one rank in three sets", SCALING)] * (not alone)
    if wanted:
        raise NotEnoughData(
            f"the ledger holds no {' and no '.join(what for what, _ in wanted)}: measure them with ddpm-lab run "
            + " ".join(name for _, name in wanted)
        )
    compute = Compute(speeds=_speeds(alone))
    inner, outer = (kinds[k].link if k in kinds else None for k in ("on one host", "between hosts"))
    if inner is None and outer is None:
        raise NotEnoughData("; ".join(kind.reason for kind in kinds.values()))
    # Ranks with hosts of their own are what a link between hosts says something of.
    cluster = Cluster(inner=inner or outer, outer=outer, ranks_per_host=ranks_per_host)
    parameters = _parameters(study, {r["run_id"] for r in rows})
    if parameters is None:
        raise NotEnoughData("the records do not say how many weights the network has: measure them again")
    size = _GRADIENT_BYTES * parameters
    mib = alone[0]["config"].exchange.bucket_mb
    exchanged = Exchanged(message_bytes=size, buckets=max(1, math.ceil(size / 2**20 / mib)), hidden=None)
    own = max(alone, key=lambda r: r["batch"])
    shared = replace(exchanged, hidden=_hidden(rows, cluster, exchanged))
    return Basis(
        config=own["config"],
        compute=compute,
        exchanged=shared,
        cluster=cluster,
        rank_batch=own["batch"],
        own_seconds=own["step_seconds"],
        checks=tuple(_checks(rows, cluster, compute, exchanged)),
    )


def _training(study: Study) -> list[Row]:
    """Rows of the training step that was measured with most batch sizes: all alike but for ranks and batch."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in comparisons(study).to_dict("records"):
        config = row["config"]
        if row["experiment"] == SCALING and row["sets"] and row["role"] != "twin" and config.workload == DDPM:
            alike = replace(
                config, world_size=1, nodes=1, global_batch_size=1, accumulation=1, exchange=ExchangeConfig()
            )
            groups[alike.run_id].append({str(k): v for k, v in row.items()})
    return max(groups.values(), key=lambda rows: len({r["batch"] for r in rows if r["ranks"] == 1}), default=[])


def _log_error(row: Row) -> float:
    """Standard error of ln seconds over sets, from the 95 % interval; 0 with fewer sets than tell one."""
    low, high = row["images_per_second_low"], row["images_per_second_high"]
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


def _parameters(study: Study, run_ids: set[str]) -> int | None:
    for record in reversed(study.records):
        ranks = record.witness.get("ranks")
        if record.run_id in run_ids and ranks and ranks[0].get("parameters"):
            return int(ranks[0]["parameters"])
    return None


def _pairs(rows: Sequence[Row]) -> Iterable[tuple[Row, Row]]:
    """Steps of several ranks with and without their exchange, all else alike."""
    silent = {_work(r): r for r in rows if not r["config"].exchange.enabled and _log_error(r)}
    for row in rows:
        other = silent.get(_work(row))
        if row["ranks"] > 1 and other is not None and row["config"].exchange == ExchangeConfig() and _log_error(row):
            yield row, other


def _work(row: Row) -> tuple[int, int, int]:
    return row["ranks"], row["config"].nodes, row["batch"]


def _laid_out(row: Row, cluster: Cluster) -> Cluster:
    """The links with the ranks of a row on its hosts."""
    nodes = row["config"].nodes
    return replace(cluster, ranks_per_host=row["ranks"] // nodes if nodes > 1 else None)


def _hidden(
    rows: Sequence[Row], cluster: Cluster, exchanged: Exchanged, without: int | None = None
) -> tuple[float, ...] | None:
    """Draws of the share of the exchange that compute hides: 1 - (step - step without exchange) / exchange.

    Over all numbers of ranks but ``without``; None where nothing was measured without its exchange.
    """
    found = []
    rng = np.random.default_rng(0)
    for row, silent in _pairs(rows):
        if row["ranks"] == without:
            continue
        with contextlib.suppress(NotEnoughData):  # a kind of link that was not measured
            here = _laid_out(row, cluster)
            whole = here.draws(row["ranks"], exchanged.message_bytes, exchanged.buckets, rng)
            found.append(_share(row, silent, whole, rng))
    return tuple(float(v) for v in np.mean(found, axis=0)) if found else None


def _share(row: Row, silent: Row, whole: Array, rng: np.random.Generator) -> Array:
    """Draws of the hidden share from one pair of steps."""
    seconds = [
        r["step_seconds"] * np.exp(_log_error(r) * rng.standard_t(r["sets"] - 1, len(whole))) for r in (row, silent)
    ]
    return np.asarray(np.clip(1 - (seconds[0] - seconds[1]) / whole, 0.0, 1.0))


def _checks(
    rows: Sequence[Row], cluster: Cluster, compute: Compute, exchanged: Exchanged
) -> Iterable[tuple[float, Prediction]]:
    """Each measured step of several ranks, with what is predicted of it from everything but steps of as many ranks.

    Compute is that of the same ranks without exchange where it was measured: ranks that share the cores of a machine
    are slower than one alone, so of those nothing else is predicted.
    """
    silent = {_work(row): other for row, other in _pairs(rows)}
    for row in rows:
        if row["ranks"] == 1 or row["config"].exchange != ExchangeConfig():
            continue
        other = silent.get(_work(row))
        if other is None and row["config"].device == "cpu" and row["config"].nodes < row["ranks"]:
            continue
        known = compute if other is None else Compute(speeds=_speeds([other]))
        hidden = _hidden(rows, cluster, exchanged, without=row["ranks"])
        batch = row["batch"] / row["ranks"]
        try:
            here = _laid_out(row, cluster)
            found = prediction.predict(here, known, replace(exchanged, hidden=hidden), row["ranks"], batch)
        except NotEnoughData:
            continue
        yield row["step_seconds"], found


def further(study: Study) -> tuple[str, pd.DataFrame]:
    """Caption and table of what is predicted, without rows where it cannot be."""
    try:
        found = basis(study)
        made = predictions(found, WORLD_SIZES)
    except NotEnoughData as missing:
        return f"Predicted steps: not enough data ({missing}).", pd.DataFrame()
    caption = (
        f"Predicted, not measured: {found.rank_batch} images a rank. {found.assumptions()} {check(found)} {rule()}"
    )
    return caption, table(made)


def predictions(
    found: Basis, world_sizes: Sequence[int], global_batch_size: int | None = None
) -> dict[int, Prediction | str]:
    """A prediction for each number of ranks, or why there is none; without a global batch each keeps its own.

    Raises NotEnoughData where there is none for any.
    """
    made: dict[int, Prediction | str] = {}
    for ranks in world_sizes:
        try:
            made[ranks] = found.at(ranks, global_batch_size / ranks if global_batch_size else None)
        except NotEnoughData as missing:
            made[ranks] = f"not enough data: {missing}"
    if all(isinstance(p, str) for p in made.values()):
        raise NotEnoughData(str(next(iter(made.values()))))
    return made


def table(made: Mapping[int, Prediction | str]) -> pd.DataFrame:
    """Predictions as strings, one row for each number of ranks."""
    rows = []
    for ranks, p in made.items():
        name = {"Configuration": phrases.plural(ranks, "rank")}
        if isinstance(p, str):
            rows.append({**name, "Label": p})
            continue
        rows.append(
            {
                **name,
                "Images a rank": f"{p.rank_batch:g}",
                "Step": f"{phrases.seconds(p.seconds)} ({phrases.seconds(p.low)} to {phrases.seconds(p.high)})",
                "Compute": phrases.seconds(p.compute_seconds),
                "Exchange": phrases.seconds(p.exchange_seconds),
                "Images/s": phrases.significant(ranks * p.rank_batch / p.seconds),
                "Efficiency": f"{100 * p.efficiency:.0f} % ({100 * p.efficiency_low:.0f} to "
                f"{100 * p.efficiency_high:.0f} %)",
                "Label": p.label,
            }
        )
    order = ("Configuration", "Images a rank", "Step", "Compute", "Exchange", "Images/s", "Efficiency", "Label")
    return pd.DataFrame(rows, columns=list(order)).fillna(phrases.DASH)


def check(found: Basis) -> str:
    """How far measured steps of several ranks lay from their predictions."""
    if not found.checks:
        return "No measured step of several ranks can be held against a prediction here."
    said = []
    for seconds, made in found.checks:
        images = phrases.plural(f"{made.rank_batch:g}", "image")
        outside = "" if made.low <= seconds <= made.high else " (outside of its interval)"
        said.append(f"{made.ranks} ranks of {images} {100 * (made.seconds / seconds - 1):+.0f} %{outside}")
    return f"Predicted against measured, each from all but its own number of ranks: {phrases.joined(said)}."


def rule() -> str:
    """When a prediction is an extrapolation, and what that does to its interval."""
    return (
        f"Extrapolation: beyond {EXTRAPOLATION} times the largest measured number of ranks, or outside the measured "
        "batches; each doubling beyond adds the error of the exchange, or of the compute, once more, in logarithm."
    )
