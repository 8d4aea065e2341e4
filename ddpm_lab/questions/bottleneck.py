"""What should be changed next in a configuration? Its time budget, and each change of one setting, measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.config import RunConfig
from ddpm_lab.declared import Opt, known
from ddpm_lab.explain.changes import batch_sizes, changes
from ddpm_lab.plan import Experiment, Family
from ddpm_lab.training.setting import Batch, Setup, WorldSize, check_cores

BASELINE = "the present settings"
SIZES = ", batch sizes"
_FIXED = ("purpose", "workload", "data", "data_sha256", "options", "nodes")
"""Settings of a configuration that a question does not take."""


def bottleneck(
    setup: Setup,
    *,
    global_batch_size: Batch = None,
    world_size: WorldSize = 1,
    only: Annotated[Sequence[str] | None, Opt("changes to measure")] = None,
    **settings: Any,
) -> Experiment:
    """What takes the time of a step, and which change of one setting makes it faster?

    ``settings`` are those of ``RunConfig`` that the configuration in question has; what is left out is as there. Each
    change that the machine can run is measured against it; ``only`` names some of them. ``smoke`` measures the first
    three, and twice the batch.
    """
    known("a configuration", settings, RunConfig)
    for name in _FIXED:
        if name in settings:
            raise ConfigError(f"{name} is {settings[name]!r}: the lab sets it itself here; leave it out")
    setup.check_ranks(world_size)
    batch = setup.batch_size(global_batch_size, world_size)
    config = setup.config(global_batch_size=batch, world_size=world_size, **settings)
    check_cores("loader_workers", config.loader_workers, setup.usable_cores)
    one, sizes = changes(config, usable_cores=setup.usable_cores, most_ranks=setup.node_size), batch_sizes(config)
    for label in only or ():
        choice("only", label, (*one, *sizes))
    if only is None and setup.preset == "smoke":
        only = [*list(one)[:3], f"batch {2 * batch}"]
    name, families = setup.family_name(batch, world_size), []
    for what, offered in ((", one change at a time", one), (SIZES, sizes)):
        rows = tuple((label, other) for label, other in offered.items() if only is None or label in only)
        family = Family(name=f"{name}{what}", baseline=config, baseline_label=BASELINE, candidates=rows)
        families += [family] if rows else []
    profile = (name, BASELINE, dataclasses.replace(config, purpose="profile"))
    return Experiment(name="bottleneck", families=tuple(families), profiles=(profile,))


def check_memory(config: RunConfig, available_bytes: float, where: str) -> None:
    """Raise ConfigError for a batch whose images and noise in fp32 do not fit into the memory that is ``where``."""
    batch = config.global_batch_size
    needed = 2 * batch * 3 * config.image_size**2 * 4
    if needed > available_bytes:
        raise ConfigError(
            f"global_batch_size is {batch:,}: a step needs at least about {needed / 2**30:,.1f} GiB, and {where} has "
            f"{available_bytes / 2**30:,.1f} GiB; give a smaller batch"
        )
