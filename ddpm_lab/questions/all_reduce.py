"""How fast ranks exchange: an all-reduce of messages of several sizes, at each number of ranks this machine can run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.declared import Opt
from ddpm_lab.explain import figure_links, links, machine_state
from ddpm_lab.explain.answer import Answer, speeds
from ddpm_lab.explain.findings import ANSWERED, compared, plain
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import Experiment, Family, Plan
from ddpm_lab.training.setting import Setup, WorldSizes

Messages = Annotated[Sequence[int] | None, Opt("bytes of the messages", least=4)]
ALL_REDUCE = "ddpm_lab.training.allreduce:all_reduce"
PLAN = Plan(turns=6, window_seconds=0.1, window_steps=5, settle_steps=2, warmup_steps=5)
"""Nothing is compared with anything: a time within some per cent is enough, and large messages take long."""
MESSAGES = (2**10, 2**14, 2**18, 2**20, 2**23, 2**26)
FULL_MESSAGES = tuple(2**power for power in range(10, 27, 2))
"""Bytes, from where latency alone counts to where bandwidth alone does."""


def all_reduce(setup: Setup, *, world_sizes: WorldSizes = None, message_bytes: Messages = None) -> Experiment:
    """How fast do ranks exchange? All-reduces from 1 KiB to 64 MiB; a family for each number of ranks."""
    usual = sorted({*setup.doubled_ranks, setup.most_ranks})
    ranks = [n for n in setup.world_sizes(world_sizes, usual) if n > 1]
    if world_sizes is not None and not ranks:
        raise ConfigError("world_sizes has 1 alone, and one rank exchanges nothing: give 2 or more")
    for size in message_bytes or ():
        if size % 4:
            raise ConfigError(f"message_bytes has {size}: give multiples of 4, the bytes of a number")
    first, *others = sorted(set(message_bytes or (FULL_MESSAGES if setup.preset == "full" else MESSAGES)))
    sizes = [first, *others[-1:], *others[:-1]]  # smallest and largest tell most
    families, left_out = [], []
    for n in ranks or [1]:
        configs = [_config(setup, n, size) for size in sizes]
        named = list(zip(map(label, sizes), configs, strict=True))
        families.append(
            Family(
                name=f"all-reduce, {setup.ranks_label(n)}",
                baseline_label=named[0][0],
                baseline=named[0][1],
                candidates=tuple(named[1:]) if ranks else (),
                together=True,  # what slows a whole set is told from what all its messages share
            )
        )
    if not ranks:
        have = "GPU" if setup.device == "cuda" else "usable core"
        reason = f"this machine has one {have}, and each rank needs its own: a rank alone exchanges nothing"
        left_out = [(families[0].name, setup.ranks_label(2), reason)]
    return Experiment(name="all_reduce", families=tuple(families), left_out=tuple(left_out))


def label(size: int) -> str:
    """Such as "64 KiB"."""
    unit, name = next(((u, n) for u, n in ((2**20, "MiB"), (2**10, "KiB")) if size >= u), (1, "bytes"))
    return f"{size / unit:.4g} {name}"


def _config(setup: Setup, ranks: int, size: int) -> RunConfig:
    return setup.config(
        workload=ALL_REDUCE, world_size=ranks, global_batch_size=ranks, options=(("message_bytes", size),)
    )


def answer(study: Study) -> Answer:
    """Show time and bus bandwidth of each message."""
    if (told := links.answer(study)) is None:
        return replace(speeds(study, compared(study)), table=lambda: links.table(study))
    found = plain(study, told[0], ANSWERED, *machine_state.warnings(study), evidence=told[1])
    found = replace(found, verdict="measured", quality="no training, so no quality")
    shown = speeds(study, found)
    return replace(
        shown,
        figure=lambda: figure_links.exchange(study, found.headline) or shown.figure(),
        table=lambda: links.table(study),
    )
