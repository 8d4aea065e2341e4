"""Is torch.compile worth its compile time? Eager against compiled."""

from __future__ import annotations

import dataclasses
import math

from ddpm_lab.explain import compiling, figure_costs, phrases
from ddpm_lab.explain.answer import Answer, View, speeds
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.findings import compared
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import Experiment, Family
from ddpm_lab.questions.quality import trained_views
from ddpm_lab.training.setting import (
    Batch,
    Precision,
    Setup,
    Workers,
    WorldSizes,
)


def torch_compile(
    setup: Setup,
    *,
    world_sizes: WorldSizes = None,
    precision: Precision | None = None,
    global_batch_size: Batch = None,
    loader_workers: Workers = None,
) -> Experiment:
    """Is torch.compile worth its compile time? Eager against compiled, in bf16 autocast unless said otherwise.

    In ``full`` block by block too, which compiles less and leaves what lies between the blocks eager.
    """
    precision = precision or setup.usual_precision
    count = loader_workers
    if count is None:
        count = min(4, setup.usable_cores) if setup.preset == "full" else 0
    loader = setup.files(count) if count else {"loader": "packed"}
    usual = sorted({1, setup.most_ranks}) if setup.preset == "full" else [1]
    families = []
    for ranks in setup.world_sizes(world_sizes, usual):
        batch = setup.batch_size(global_batch_size, ranks)
        eager = setup.config(global_batch_size=batch, world_size=ranks, precision=precision, **loader)
        families.append(
            Family(
                name=f"{setup.family_name(batch, ranks)}, {setup.precision_name(precision)}",
                baseline_label="eager",
                baseline=eager,
                candidates=tuple(
                    (label, dataclasses.replace(eager, compile=how))
                    for label, how in (("compiled", "whole"), ("compiled block by block", "regional"))
                    if how == "whole" or (setup.preset == "full" and not setup.own)
                ),
                primary="compiled",
            )
        )
    return Experiment(name="torch_compile", families=tuple(families))


def answer(study: Study) -> Answer:
    """Compare eager and compiled speed, and what compiling costs with what it saves."""

    def columns(row: Comparison) -> dict[str, str]:
        cost = compiling.break_even(study, row)
        compiled = bool(row.sets) and row.role == "candidate"
        known = compiled and not math.isnan(cost.cold_seconds)
        return {
            "Compile, cold": phrases.seconds(cost.cold_seconds) if known else phrases.DASH,
            "Pays off": compiling.pays_off(cost, row) if compiled else phrases.DASH,
        }

    crossing = "Total time with and without compiling: where the lines cross it pays off."
    split = "What a run costs beside its steps: eager, from a warm and from a cold cache."
    views = (
        View(caption=crossing, name="break_even", figure=lambda: figure_costs.break_even(study)),
        View(caption=split, name="costs", figure=lambda: figure_costs.cost_split(study)),
        *trained_views(study),
    )
    found = compared(study, own=lambda lead: [compiling.sentence(study, lead)])
    return speeds(study, found, columns=columns, views=views)
