"""Synthetic records of several ranks: all-reduces and training steps that take as long as is planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from records import CPU, GPUS, on, sets

from ddpm_lab import collectives
from ddpm_lab.config import RunConfig
from ddpm_lab.lost_scaling import lost_scaling
from ddpm_lab.plan import Family
from ddpm_lab.record import Machine, RunRecord


def all_reduces(
    seconds: Callable[[int, int], float],
    *,
    ranks: Sequence[int] = (2,),
    messages: Sequence[int] = (2**10, 2**14, 2**18, 2**20, 2**23, 2**26),
    hosts_of: Callable[[int], int] = lambda _: 1,
    machine: Machine = CPU,
    **values: Any,
) -> list[RunRecord]:
    """Sets of all-reduces that take ``seconds(ranks, bytes)``, on as many hosts as ``hosts_of(ranks)``."""
    found = []
    for n in ranks:
        common: dict[str, Any] = {"device": "cuda" if machine.gpus else "cpu", "world_size": n, "global_batch_size": n}
        base, *others = (
            RunConfig(workload=collectives.ALL_REDUCE, options=(("message_bytes", size),), **common)
            for size in messages
        )
        made = sets(
            {_label(c): (c, _seconds(seconds, base) / _seconds(seconds, c)) for c in others},
            baseline=base,
            baseline_label=_label(base),
            experiment="all_reduce",
            family=f"all-reduce, {n} ranks",
            step_seconds=_seconds(seconds, base),
            seed=n,
            **values,
        )
        witness = {"ranks": [{"rank": rank, "hosts": hosts_of(n)} for rank in range(n)]}
        found += [replace(r, witness=witness) for r in made]
    return on(machine, found)


def _label(config: RunConfig) -> str:
    return collectives.label(config.option("message_bytes", 0))


def _seconds(seconds: Callable[[int, int], float], config: RunConfig) -> float:
    return seconds(config.world_size, config.option("message_bytes", 0))


def scaled(
    seconds: Callable[[int, int, bool], float],
    *,
    ranks: Sequence[int] = (2, 4),
    batches: Sequence[int] = (32, 64),
    silent: bool = True,
    parameters: int = 2**20,
    nodes_of: Callable[[int], int] = lambda _: 1,
    machine: Machine = GPUS,
    **values: Any,
) -> list[RunRecord]:
    """Sets of training steps that take ``seconds(ranks, images of a rank, exchanged)``, the ranks sharing each batch.

    With ``silent`` each number of ranks is measured for the lost scaling too, so also without its exchange, in which a
    network of so many ``parameters`` would take part.
    """
    device = "cuda" if machine.gpus else "cpu"
    found = []
    for batch in batches:
        base = RunConfig(device=device, global_batch_size=batch)
        many = tuple((f"{n} ranks", replace(base, world_size=n, nodes=nodes_of(n))) for n in ranks)
        families = [Family(name=f"tiny, batch {batch}", baseline=base, baseline_label="1 rank", candidates=many)]
        for label, config in many if silent else ():
            name, cores = f"tiny, batch {batch}, {label}", machine.usable_cores
            families.append(lost_scaling(base, config, name=name, ranks_label=label, usable_cores=cores))
        for family in families:
            alone = seconds(1, batch, False)
            found += sets(
                {label: (c, alone * c.global_batch_size / batch / _step(seconds, c)) for label, c in family.candidates},
                baseline=family.baseline,
                baseline_label=family.baseline_label,
                experiment="multi_gpu",
                family=family.name,
                step_seconds=alone,
                seed=batch,
                **values,
            )
    return on(machine, [replace(r, witness={"ranks": [{"rank": 0, "parameters": parameters}]}) for r in found])


def _step(seconds: Callable[[int, int, bool], float], config: RunConfig) -> float:
    exchanged = config.world_size > 1 and config.exchange.enabled
    return seconds(config.world_size, config.rank_batch_size, exchanged)
