"""Two configurations, the baseline first, made ready to be measured in the same sets, on cores that are free."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.data.packed import read_manifest
from ddpm_lab.files import LEDGER
from ddpm_lab.ledger import Ledger, load
from ddpm_lab.measure import hardware
from ddpm_lab.measure.code_version import CodeVersion
from ddpm_lab.measure.others import free_cores
from ddpm_lab.plan import Experiment, Family, Plan
from ddpm_lab.questions.planning import MOST_SETS, Planned, plan_experiment
from ddpm_lab.training.setting import check_cores, check_ranks

RESOLUTION = 0.03
"""The smallest relative difference that is to be found, unless another is asked for."""


def plan_pair(
    pair: tuple[RunConfig, RunConfig],
    names: tuple[str, str],
    *,
    output: Path,
    quiet: bool,
    resolution: float = RESOLUTION,
    minutes: float | None = None,
    sets: int = MOST_SETS,
    code: CodeVersion | None = None,
    cores: int | None = None,
) -> Planned:
    """Make two configurations, the baseline first, ready to be measured in the same sets.

    ``code`` is what they run; None is what lies here. ``cores`` of a CPU are those of earlier sets, or that are free.
    Raises ConfigError where this machine cannot, or the work is not equal.
    """
    most = hardware.usable_cores()
    free = cores or cores_of_pair(pair, Ledger(output / LEDGER))
    for config in pair:
        ranks, gpus = config.world_size, len(hardware.gpus())
        check_ranks(config.device, ranks, gpus, free, limited=free < most)
        check_cores("loader_workers", config.loader_workers, most, ranks)
    one, two = (on_cores(config, free) for config in pair)
    if one.data_sha256 and two.data_sha256 and one.data_sha256 != two.data_sha256:
        raise ConfigError("the two sides train on different images: give both the same data, or it is not equal work")
    base, label = names
    family = Family(
        name=f"{label} against {base}", baseline=one, baseline_label=base, candidates=((label, two),), primary=label
    )
    asked = Experiment(name="compare", families=(family,))
    images = f"{read_manifest(Path(one.data)).train_count:,} images" if one.data_sha256 else ""
    limits: dict[str, Any] = {"output": output, "quiet": quiet, "code": code, "sets": sets}
    limits |= {"resolution": resolution, "minutes": minutes}
    planned = plan_experiment(asked, data_name=images, plan=Plan(), **limits)
    again = None if cores else lambda n: plan_pair(pair, names, cores=n, **limits)
    return dataclasses.replace(planned, on_cores=again)


def cores_of_pair(pair: tuple[RunConfig, RunConfig], ledger: Ledger) -> int:
    """Cores to compare two configurations with: those of an earlier answer here, or those that are free.

    All of them where a side is not for the CPU, or says how many threads it takes.
    """
    most = hardware.usable_cores()
    if most == 1 or any(c.device == "cuda" or c.threads for c in pair):
        return most
    by_id = {on_cores(pair[0], n).run_id: n for n in range(1, most + 1)}
    wanted = ("compare", "look", hardware.machine().key)
    mine = [h for h in ledger.heads()[0] if (h.experiment, h.role, h.machine.key) == wanted]
    known = [by_id[r.run_id] for r in load(mine)[0] if r.run_id in by_id]
    return max(known, default=0) or free_cores()


def on_cores(config: RunConfig, cores: int) -> RunConfig:
    """A configuration for so many of the cores, which its ranks share; with all of them as it is."""
    whole_machine = cores >= hardware.usable_cores()
    return config if whole_machine else dataclasses.replace(config, threads=max(1, cores // config.node_size))
