"""The fastest configuration that was measured: throughputs of equal work, over all experiments."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from ddpm_lab.config import DDPM
from ddpm_lab.explain import quality, stats
from ddpm_lab.explain.comparisons import Row, comparisons, throughput
from ddpm_lab.explain.frames import Study
from ddpm_lab.own_settings import OWN
from ddpm_lab.plan import SEARCH, scaling
from ddpm_lab.record import RunRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Configurations that did equal work (network, image size, data, global batch), fastest first.

    ``rows`` are rows of ``comparisons``: one for each configuration, of the experiment that measured it in most sets,
    and none for what is known to be worse in quality.
    """

    name: str
    rows: tuple[Row, ...]
    experiments: int

    @property
    def apart(self) -> bool:
        """Whether the first is faster than all others: than its own baseline by a verdict, than others by intervals."""
        best, *others = self.rows
        low = throughput(best)[1]
        own = best["baseline_id"] if best["verdict"] == stats.FASTER else None
        return all(r["run_id"] == own or low > throughput(r)[2] for r in others)


def groups(study: Study) -> list[Group]:
    """All groups of equal work, the one that most experiments measured first."""
    data = {r.run_id: r for r in study.records}
    by_work: dict[tuple[str, ...], dict[str, Row]] = defaultdict(dict)
    experiments: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for row in comparisons(study):
        # Only the lab's own training step, and the user's, do the work that the names of settings stand for.
        counts = row["sets"] and row["role"] in ("baseline", "candidate") and row["config"].workload in (DDPM, OWN)
        # Those have other losses, implementations of the same step, or another average of the weights; a search has
        # short sets, and measures again what it finds.
        counts = counts and row["experiment"] not in ("peers", "quality", SEARCH)
        # Another way of the same ranks to exchange is worth a line only where it is known to be faster.
        idle = row["experiment"] == "exchange" and row["role"] == "candidate" and row["verdict"] != stats.FASTER
        counts = counts and not idle
        # A ratio of weak scaling is one between batches; other families ask what no training would use.
        counts = counts and (row["experiment"] != "multi_gpu" or scaling(row["family"]) == "strong")
        counts = counts and row["config"].exchange.enabled  # else each rank trains a network of its own
        worse = row["equivalence"] is not None and row["equivalence"].verdict == quality.WORSE
        if not counts or worse or row["verdict"] == stats.NOT_TRUSTED:
            continue
        work = _work(data[row["run_id"]])
        experiments[work].add(row["experiment"])
        known = by_work[work].get(row["run_id"])
        # A configuration may be the baseline of one experiment and a candidate of another, which says more about it.
        rank = (row["role"] == "candidate", row["sets"])
        if known is None or rank > (known["role"] == "candidate", known["sets"]):
            by_work[work][row["run_id"]] = row
    found = [
        Group(
            name=f"{w[0]}, batch {w[1]}, {w[2]}",
            rows=tuple(sorted(rows.values(), key=lambda r: -r["images_per_second"])),
            experiments=len(experiments[w]),
        )
        for w, rows in by_work.items()
    ]
    compared = [g for g in found if len(g.rows) > 1]  # a size of batch_size alone has nothing to be faster than
    return sorted(compared or found, key=lambda g: (-g.experiments, -len(g.rows), g.name))


def fastest(study: Study) -> Group | None:
    """The group that the recommendation is about, or None where no speed was measured."""
    found = groups(study)
    return found[0] if found else None


def _work(record: RunRecord) -> tuple[str, ...]:
    config = record.config
    size = config.image_size
    lab = f"{config.network} network, {size}\N{MULTIPLICATION SIGN}{size} images"
    batch = str(config.global_batch_size)
    return (
        config.work_name if config.is_own else lab,
        batch,
        record.data_name,
        config.data_sha256,
        record.code_version,
    )
