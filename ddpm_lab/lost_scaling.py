"""Where the lost scaling went: the configurations from whose differences it is computed, each with one thing off."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ddpm_lab import plan
from ddpm_lab.config import RunConfig
from ddpm_lab.exchange_settings import ExchangeConfig
from ddpm_lab.plan import Family


def lost_scaling(
    one: RunConfig,
    many: RunConfig,
    *,
    name: str,
    ranks_label: str,
    usable_cores: int,
    without_rank_zero: Mapping[str, Any] | None = None,
) -> Family:
    """Configurations of strong scaling from ``one`` rank to ``many`` at the same global batch, all in each set.

    With all ranks: as they train, without exchange of gradients, with batches that are ready, and with all of these
    off. With one rank: as it trains, with ready batches, with the batch of a rank, and on a CPU with its threads too.
    The baseline is one rank with all of it off: what it does, the others do too.

    ``without_rank_zero`` are options of the workload that switch off what rank 0 alone does. The lab's own trainer has
    no such work, so None leaves it out.
    """
    quiet: dict[str, Any] = {}
    if without_rank_zero is not None:
        quiet = {"options": tuple({**dict(one.options), **without_rank_zero}.items())}
    alone = ExchangeConfig(enabled=False)
    still: dict[str, Any] = {"loader": "still", "loader_workers": 0}
    small = dataclasses.replace(one, **still, **quiet, global_batch_size=many.rank_batch_size)
    rows = [
        (ranks_label, many),
        (plan.NO_EXCHANGE, dataclasses.replace(many, exchange=alone)),
        (plan.ALL_OFF, dataclasses.replace(many, **still, **quiet, exchange=alone)),
        (plan.READY_BATCHES, dataclasses.replace(many, **still)),
        (plan.ONE_RANK, one),
        (plan.ONE_SMALL, small),
    ]
    if one.device == "cpu":
        rows.append((plan.ONE_SMALL_THREADS, dataclasses.replace(small, threads=many.rank_threads(usable_cores))))
    if quiet:
        rows += [
            (plan.NO_RANK_ZERO, dataclasses.replace(many, **quiet)),
            (plan.ONE_READY, dataclasses.replace(one, **still)),
            (plan.ONE_NO_RANK_ZERO, dataclasses.replace(one, **quiet)),
        ]
    return Family(
        name=f"{name}{plan.LOST}",
        baseline=dataclasses.replace(one, **still, **quiet),
        baseline_label=plan.ONE_OFF,
        candidates=tuple(rows),
        together=True,
    )
