"""Where the lost scaling went: the configurations from whose differences it is computed, each with one thing off."""

from __future__ import annotations

import dataclasses
from typing import Any

from ddpm_lab import plan
from ddpm_lab.config import ExchangeConfig, RunConfig
from ddpm_lab.plan import Family


def lost_scaling(
    one: RunConfig,
    many: RunConfig,
    *,
    name: str,
    ranks_label: str,
    usable_cores: int,
) -> Family:
    """Configurations of strong scaling from ``one`` rank to ``many`` at the same global batch, all in each set.

    With all ranks: as they train, without exchange of gradients, with batches that are ready, and with all of these
    off. With one rank: as it trains, with ready batches, with the batch of a rank, and on a CPU with its threads too.
    The baseline is one rank with all of it off: what it does, the others do too.

    There is no work of rank 0 to switch off: in a step of the lab's own trainer, the only one that is split so, rank 0
    does what every rank does. What it does alone, a checkpoint or a grid of images, lies between steps.
    """
    alone = ExchangeConfig(enabled=False)
    still: dict[str, Any] = {"loader": "still", "loader_workers": 0}
    small = dataclasses.replace(one, **still, global_batch_size=many.rank_batch_size)
    rows = [
        (ranks_label, many),
        (plan.NO_EXCHANGE, dataclasses.replace(many, exchange=alone)),
        (plan.ALL_OFF, dataclasses.replace(many, **still, exchange=alone)),
        (plan.READY_BATCHES, dataclasses.replace(many, **still)),
        (plan.ONE_RANK, one),
        (plan.ONE_SMALL, small),
    ]
    if one.device == "cpu":
        rows.append((plan.ONE_SMALL_THREADS, dataclasses.replace(small, threads=many.rank_threads(usable_cores))))
    return Family(
        name=f"{name}{plan.LOST}",
        baseline=dataclasses.replace(one, **still),
        baseline_label=plan.ONE_OFF,
        candidates=tuple(rows),
        together=True,
    )
