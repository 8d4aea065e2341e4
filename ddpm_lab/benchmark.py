"""One device against several for a network, as S000 and S003 ask for it: what to measure, measured as ``multi_gpu``.

With a batch for each device (S000's comparison) that is weak scaling; with a batch that all share (S003's) strong.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError, whole
from ddpm_lab.files import PREPARED, output_folder
from ddpm_lab.planned import Measured, Planned
from ddpm_lab.planning import merged, plan_question
from ddpm_lab.setting import each_whole, usual_device
from ddpm_lab.strategy import USUAL, most_ranks, several_ranks, strategy

BATCH_SIZES = (16, 32, 64, 128)
"""Batches that the devices share, unless others are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """What is asked for.

    ``batch_size`` is that of each device, ``batch_sizes`` are those that devices share. ``mode`` None measures one
    device, and several where there are any; multi insists on several; auto asks ``strategy`` for each batch.
    ``loader_workers`` None packs the images beforehand. ``preset`` says how long a set is, ``sets`` how many there are.
    """

    network: str
    device: str
    batch_size: int
    batch_sizes: tuple[int, ...]
    mode: str | None = None
    skip_single: bool = False
    skip_multi: bool = False
    loader_workers: int | None = None
    data: str = "synthetic"
    sets: int = 6
    minutes: float | None = None
    preset: str = "quick"


def request(
    *,
    network: str | None = None,
    device: str | None = None,
    batch_sizes: Sequence[int] | None = None,
    **settings: Any,
) -> Benchmark:
    """A benchmark with what is usual for the device where nothing was said.

    Raises ConfigError, or NoRanksError where several devices are asked for and there is one.
    """
    device = usual_device(device)
    shared = BATCH_SIZES if batch_sizes is None else tuple(dict.fromkeys(batch_sizes))
    asked = Benchmark(network=network or USUAL[device][0], device=device, batch_sizes=shared, **settings)
    whole("--batch-size", asked.batch_size, 1)
    whole("--runs", asked.sets, 1)
    each_whole("--batch-sizes", list(asked.batch_sizes), 1)
    no_multi = asked.skip_multi or asked.mode == "single"
    if no_multi and (asked.skip_single or asked.mode == "multi"):
        raise ConfigError("nothing is left to measure: one of --skip-single, --skip-multi and --mode must go")
    ranks = several_ranks(device) if asked.mode == "multi" or asked.skip_single else most_ranks(device)[0]
    if ranks > 1 and not no_multi:
        ranks = several_ranks(device)
        odd = [b for b in asked.batch_sizes if b % ranks]
        if odd and batch_sizes is not None:
            raise ConfigError(
                f"--batch-sizes: a batch of {odd[0]} cannot be shared by {ranks} ranks: give multiples of {ranks}"
            )
        shared = tuple(b for b in asked.batch_sizes if b not in odd) or (ranks * asked.batch_size,)
        return dataclasses.replace(asked, batch_sizes=shared)
    return dataclasses.replace(asked, skip_multi=True)


def parts(asked: Benchmark) -> list[dict[str, Any]]:
    """Grids of the question multi_gpu that together are the benchmark."""
    ranks = 1 if asked.skip_multi else several_ranks(asked.device)
    wanted = [("weak", asked.batch_size), *(("strong", batch) for batch in asked.batch_sizes)]
    batches = sorted({batch for _, batch in wanted})
    alone = [b for b in batches if asked.skip_multi or (asked.mode == "auto" and _single(asked, b))]
    grids: list[dict[str, Any]] = []
    for scaling in ("weak", "strong"):
        batches = [batch for kind, batch in wanted if kind == scaling and batch not in alone]
        if batches:
            sizes = [ranks] if asked.skip_single else [1, ranks]
            devices = {"world_sizes": sizes, "alone": asked.skip_single}
            grids.append({"scaling": scaling, "global_batch_sizes": batches, **devices})
    if alone:
        grids.append({"scaling": "strong", "global_batch_sizes": alone, "world_sizes": [1]})
    return grids


def _single(asked: Benchmark, batch: int) -> bool:
    """Whether one device is the better choice for a batch, by the records of this machine or the published rule."""
    found = strategy(network=asked.network, batch_size=batch, device=asked.device)
    print(f"--mode auto: {found.sentence()}", file=sys.stderr)
    return found.answer == "single"


def plan(asked: Benchmark, output: Path) -> list[Planned]:
    """Everything that is to be measured, checked before the first of it starts."""
    grids = parts(asked)
    count = sum(len(grid["global_batch_sizes"]) for grid in grids)
    return [
        plan_question(
            "multi_gpu",
            preset=asked.preset,
            sets=asked.sets,
            minutes=asked.minutes and asked.minutes * len(grid["global_batch_sizes"]) / count,
            output_dir=output,
            network=asked.network,
            device=asked.device,
            data=asked.data,
            cache=output_folder(None) / PREPARED,  # one for all folders of results
            lost_scaling=False,
            loader_workers=asked.loader_workers,
            **grid,
        )
        for grid in grids
    ]


def measure(planned: Sequence[Planned]) -> Measured:
    """Measure what the folder's ledger lacks; what answers is that of all parts together."""
    measured = [one.measure() for one in planned]
    return dataclasses.replace(
        measured[-1],
        experiment=merged([one.experiment for one in measured]),
        measured_sets=sum(one.measured_sets for one in measured),
        completed=any(one.completed for one in measured),
    )
