"""Synthetic records of all-reduces that take as long as is planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from records import CPU, on, sets

from ddpm_lab.config import RunConfig
from ddpm_lab.questions import all_reduce as collectives
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
