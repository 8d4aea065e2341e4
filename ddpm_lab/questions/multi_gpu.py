"""Do more ranks or GPUs train faster? Strong and weak scaling."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.declared import Opt
from ddpm_lab.explain import figure_machine, figure_scaling, machine_state, phrases, scaling
from ddpm_lab.explain.answer import Answer, View, speeds
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.findings import compared
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.questions import lost_scaling
from ddpm_lab.plan import SCALINGS, WEAK, Experiment, Family
from ddpm_lab.questions.lost_scaling import lost_scaling as lost_scaling_of
from ddpm_lab.questions.quality import trained_views
from ddpm_lab.training.setting import (
    CPU_PRECISIONS,
    Batches,
    Precision,
    Setup,
    Workers,
    WorldSizes,
)

FULL_BATCH_SIZES = (32, 64, 128, 256, 512)


def multi_gpu(
    setup: Setup,
    *,
    world_sizes: WorldSizes = None,
    global_batch_sizes: Batches = None,
    precision: Precision = "fp32",
    scaling: Annotated[str | None, Opt("which scaling (default: both; smoke: strong)", choices=SCALINGS)] = None,
    lost_scaling: Annotated[bool | None, Opt("where the rest of the ideal speed-up went")] = None,
    loader_workers: Workers = None,
    alone: Annotated[bool, Opt("the most ranks without one rank beside them")] = False,
) -> Experiment:
    """Do more ranks or GPUs train faster? Strong scaling: the ranks share the batch. Weak: each rank brings its own.

    Weak scaling takes ``global_batch_sizes`` as those of one rank: n ranks take n times as many images. ``scaling``
    None is both; in ``smoke`` strong alone, in ``quick`` weak of the first batch size, last, if there is time.
    ``lost_scaling`` measures where the rest of the ideal went, for the most ranks that have a device each and can share
    a batch, the smallest one; None does so in ``full``. ``loader_workers`` decode files while they are needed; None
    packs the images beforehand. ``alone`` measures the most ranks without one rank beside them, and so no ratio.
    """
    full = setup.preset == "full"
    usual = [*setup.doubled_ranks, setup.most_ranks] if full or setup.device == "cuda" else [1, 2]
    ranks = [n for n in setup.world_sizes(world_sizes, sorted(set(usual))) if n > 1]
    small = (128, 512) if setup.device == "cuda" else (16, 32)
    batches = global_batch_sizes or (FULL_BATCH_SIZES if full else small if setup.preset == "quick" else small[:1])
    families, left_out, profiles = [], [], []
    settings = {"precision": precision, **({} if loader_workers is None else setup.files(loader_workers))}
    for batch in batches:
        if scaling != "weak":
            uneven = [n for n in ranks if batch % n]
            if uneven and world_sizes is not None:
                raise ConfigError(f"a global batch of {batch} cannot be shared by {uneven[0]} ranks: give a multiple")
            family = _scaled(setup, batch, [n for n in ranks if n not in uneven], settings)
            families += [family] if family.candidates or not uneven else []  # one rank alone compares with nothing
            images = f"{batch} image{'s' * (batch != 1)} cannot be shared by"
            left_out += [(family.name, setup.ranks_label(n), f"{images} {setup.ranks_label(n)}") for n in uneven]
    weak = batches if full or scaling else batches[:1] if setup.preset == "quick" else ()
    if scaling == "weak" or (ranks and scaling != "strong"):
        families += [_scaled(setup, b, ranks, settings, weak=True) for b in weak]
    if not families:
        raise ConfigError(f"{left_out[0][2]}, so nothing can be compared: give a batch size that they can share")
    if alone:
        families = [_alone(family) for family in families]
    if not ranks and world_sizes is None:
        left_out += [(f.name, setup.ranks_label(2), setup.why_alone) for f in families]
        if setup.device == "cuda" and setup.usable_cores >= 2 and setup.places != 1 and not setup.own:
            families.append(_mechanism(setup, precision))
    if setup.splits_scaling(lost_scaling) and (lost := _lost(setup, ranks, batches, settings)):
        families.append(lost)
        label, config = lost.candidates[0]
        profiles.append((lost.name, label, dataclasses.replace(config, purpose="profile")))
    elif lost_scaling and ranks:
        sizes = ", ".join(map(str, batches))
        raise ConfigError(
            f"lost_scaling: {setup.ranks_label(ranks[0])} cannot share a batch of {sizes}: give a multiple"
        )
    elif lost_scaling and world_sizes is not None:
        raise ConfigError("lost_scaling is what several ranks lose, and one rank alone was asked for: give world_sizes")
    return Experiment(name="multi_gpu", families=tuple(families), left_out=tuple(left_out), profiles=tuple(profiles))


def _lost(setup: Setup, ranks: Sequence[int], batches: Sequence[int], settings: dict[str, Any]) -> Family | None:
    """Where the rest of the ideal speed-up went, for the most ranks with a device each that can share a batch."""
    # Ranks that share a core show no speed, and so no loss: they are split only where nothing else was asked for.
    shared = [(n <= setup.most_ranks, n, -batch) for n in ranks for batch in batches if batch % n == 0]
    if not shared:
        return None
    _, most, negative = max(shared)
    return lost_scaling_of(
        setup.config(global_batch_size=-negative, **settings),
        setup.config(global_batch_size=-negative, world_size=most, **settings),
        name=setup.family_name(-negative, most),
        ranks_label=setup.ranks_label(most),
        usable_cores=setup.usable_cores,
    )


def _alone(family: Family) -> Family:
    """The most ranks of a family as its only configuration."""
    if not family.candidates:
        return family
    label, most = family.candidates[-1]
    return dataclasses.replace(family, baseline=most, baseline_label=label, candidates=())


def _scaled(setup: Setup, batch: int, ranks: Sequence[int], settings: dict[str, Any], *, weak: bool = False) -> Family:
    """Strong: the same global batch on each number of ranks. Weak: the same batch on each rank, over equal images."""
    many = [(n, setup.config(global_batch_size=n * batch if weak else batch, world_size=n, **settings)) for n in ranks]
    return Family(
        name=f"{setup.family_name(batch, per_rank=True)}{WEAK}" if weak else setup.family_name(batch),
        baseline_label=setup.ranks_label(1),
        baseline=setup.config(global_batch_size=batch, **settings),
        candidates=tuple((setup.ranks_label(n), config) for n, config in many),
        primary=setup.ranks_label(ranks[-1]) if ranks and not weak else "",
    )


def _mechanism(setup: Setup, precision: str) -> Family:
    """Two gloo ranks on the CPU of a machine with one GPU: they show that several ranks work, nothing about speed."""
    cpu = dataclasses.replace(setup, device="cpu", network="tiny")
    one = cpu.config(global_batch_size=16, precision=precision if precision in CPU_PRECISIONS else "fp32")
    return Family(
        name=f"{cpu.family_name(16)}, CPU ranks",
        baseline_label="1 rank",
        baseline=one,
        candidates=(("2 ranks", dataclasses.replace(one, world_size=2)),),
        mechanism=True,
    )


def answer(study: Study) -> Answer:
    """Compare numbers of ranks, strong and weak scaling apart, and say where lost scaling went."""
    rows = [scaling.named(row) for row in scaling.rows(study)]
    rated = f"Efficiency, by {scaling.whose(study.bands)} bands"

    def columns(row: Comparison) -> dict[str, str]:
        return {rated: scaling.rated(row, study.bands) if row.sets and row.role == "candidate" else phrases.DASH}

    def own(lead: Comparison) -> list[str]:
        candidates = [r for r in scaling.rows(study) if r.sets and r.role not in ("baseline", "twin")]
        return [scaling.efficiencies(study, candidates, lead)]

    split = " ".join(lost_scaling.sentence(part) for part in lost_scaling.splits(study))
    drawn = (
        (figure_scaling.speed_up, "speedup", "Speed-up against the number of ranks, with the ideal line."),
        (figure_scaling.efficiency, "efficiency", "Parallel efficiency: the speed-up divided by the number of ranks."),
        (figure_scaling.by_batch, "batch", "Time for 50,000 images against the batch size."),
        (figure_scaling.layouts, "devices", "Throughput of equal work on CPU, one GPU, several, and hosts."),
        (lost_scaling.figure, "lost_scaling", "Where the lost scaling went, from the ideal step to the measured."),
        (figure_machine.over_the_run, "machine", "Memory of each configuration's ranks, and what neighbours took."),
    )
    views = (
        *(View(caption=caption, name=name, figure=partial(draw, study)) for draw, name, caption in drawn),
        *trained_views(study),
        View(caption=f"Where the lost scaling went. {split}", table=lambda: lost_scaling.table(study)),
        View(caption="What the machine did meanwhile.", table=lambda: machine_state.table(study)),
    )
    found = compared(study, rows=scaling.rows(study), own=own)
    return speeds(study, found, rows=rows, columns=columns, views=views)
