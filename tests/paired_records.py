"""Synthetic records of one device beside several, as a benchmark leaves them, with planted speed-ups."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import WEAK
from ddpm_lab.record import RunRecord


def family(
    batch: int,
    ratio: float,
    *,
    weak: bool = False,
    ranks: int = 8,
    device: str = "cuda",
    failed: tuple[str, str] | None = None,
    **values: Any,
) -> list[RunRecord]:
    """Sets of one and of several with a batch that they share, or (``weak``) that each has; ``failed`` are several."""
    network, word = ("seed", "GPU") if device == "cuda" else ("tiny", "rank")
    base = RunConfig(device=device, network=network, global_batch_size=batch)
    many = replace(base, world_size=ranks, global_batch_size=ranks * batch if weak else batch)
    label = f"{ranks} {word}s"
    found = make.sets(
        {} if failed else {label: (many, ratio)},
        baseline=base,
        baseline_label=f"1 {word}",
        experiment="multi_gpu",
        family=f"{network}, batch {batch}" + (f" per rank{WEAK}" if weak else ""),
        failures={label: (many, *failed)} if failed else None,
        **{"seed": batch + weak, **values},
    )
    return make.on(make.GPUS if device == "cuda" else make.CPU, found)


def paired(strong: Mapping[int, float], weak: Mapping[int, float], **values: Any) -> Study:
    """A study of these speed-ups by batch."""
    found = [r for batch, ratio in weak.items() for r in family(batch, ratio, weak=True, **values)]
    found += [r for batch, ratio in strong.items() for r in family(batch, ratio, **values)]
    return make.study(found)


def alone(*, single: bool) -> Study:
    """Sets of one GPU, or of eight, with nothing beside them but their twin."""
    base = RunConfig(device="cuda", network="seed", global_batch_size=256, world_size=1 if single else 8)
    values: dict[str, Any] = {"baseline_label": "1 GPU" if single else "8 GPUs", "experiment": "multi_gpu"}
    return make.study(make.on(make.GPUS, make.sets({}, baseline=base, family="seed, batch 256", **values)))


def nothing_ran(reason: str) -> Study:
    """A study whose every configuration crashed."""
    lost: dict[str, Any] = {"status": "crashed", "reason": reason, "windows": (), "ranks": ()}
    return make.study([replace(r, **lost) for r in family(64, 1.6)])
