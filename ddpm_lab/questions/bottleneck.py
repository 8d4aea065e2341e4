"""What should be changed next in a configuration? Its time budget, and each change of one setting, measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.config import RunConfig
from ddpm_lab.declared import Opt, known
from ddpm_lab.explain.changes import batch_sizes, changes
from ddpm_lab.measure.held import Held
from ddpm_lab.measure.largest_batch import host_bytes, predicted_bytes, same_work
from ddpm_lab.measure.shortfall import COMPILE_SECONDS
from ddpm_lab.plan import Experiment, Family
from ddpm_lab.record import RunRecord
from ddpm_lab.training.setting import Batch, Setup, WorldSize, check_cores

BASELINE = "the present settings"
COMPILE_SHARE = 0.5
"""Share of the time that cold compiles may take: the rest is for what they are compared with."""
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
    name = setup.family_name(batch, world_size)
    families = [
        Family(
            name=f"{name}{what}",
            baseline=config,
            baseline_label=BASELINE,
            candidates=tuple((label, other) for label, other in offered.items() if only is None or label in only),
        )
        for what, offered in ((", one change at a time", one), (SIZES, sizes))
    ]
    return Experiment(
        name="bottleneck",
        families=tuple(f for f in families if f.candidates),
        profiles=((name, BASELINE, dataclasses.replace(config, purpose="profile")),),
    )


def check_memory(config: RunConfig, known: Iterable[RunRecord], *, available_bytes: float, where: str) -> None:
    """Refuse a batch that the memory ``where`` it is trained cannot hold, as far as that is known before any rank.

    What is sure are its images and their noise in fp32. On a CPU also a line through the two largest peaks of the same
    work among the ``known`` records, as in the search for the largest batch.

    Raises:
        ConfigError: the batch needs more than ``available_bytes``.
    """
    batch = config.global_batch_size
    needed = 2.0 * batch * 3 * config.image_size**2 * 4
    same = [r for r in known if r.status == "ok" and same_work(r.config, config) and host_bytes(r)]
    peaks = {r.config.global_batch_size: host_bytes(r) for r in same}
    if config.device == "cpu" and len(peaks) > 1:
        needed = max(needed, predicted_bytes(peaks, batch))
    if needed > available_bytes:
        raise ConfigError(
            f"global_batch_size is {batch:,}: a step needs at least about {needed / 2**30:,.1f} GiB, and {where} has "
            f"{available_bytes / 2**30:,.1f} GiB; give a smaller batch"
        )


def fitting(experiment: Experiment, seconds: float, held: Held) -> Experiment:
    """The experiment without changes whose cold compiles alone would take half of ``seconds``; they are left out.

    A cold compile is forecast to take as long as the longest that is ``held``; what was compiled once stays in.
    """
    took, room = max(held.compile_seconds, default=COMPILE_SECONDS), COMPILE_SHARE * seconds
    families, left_out = [], list(experiment.left_out)
    for family in experiment.families:
        kept = []
        for label, config in family.candidates:
            cold = config.compile != "off" and not held.cold_compiles(config.run_id)
            if cold and config.run_id not in held.lasting:
                if took >= room:
                    reason = f"does not fit into the time: its cold compile takes about {took:.0f} s"
                    left_out.append((family.name, label, reason))
                    continue
                room -= took
            kept.append((label, config))
        families.append(dataclasses.replace(family, candidates=tuple(kept)))
    return dataclasses.replace(experiment, families=tuple(families), left_out=tuple(left_out))
