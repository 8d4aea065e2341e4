"""How large a batch fits, and does a larger one train faster?"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from ddpm_lab.explain import batch_sizes, figure_batch_sizes
from ddpm_lab.explain.answer import Answer, speeds
from ddpm_lab.explain.findings import compared
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import Experiment, Family
from ddpm_lab.questions.quality import trained_views
from ddpm_lab.training.setting import (
    Batches,
    Precision,
    Setup,
    WorldSize,
)

MOST_CPU, MOST_CUDA = 1024, 65_536
"""Where a search for the largest batch ends if nothing else ends it."""


def batch_size(
    setup: Setup,
    *,
    global_batch_sizes: Batches = None,
    precision: Precision = "fp32",
    world_size: WorldSize = 1,
) -> Experiment:
    """How large a batch fits, and does a larger one train faster? The smallest size against its multiples."""
    cuda = setup.device == "cuda"
    setup.check_ranks(world_size)
    first = 32 if setup.preset == "full" else setup.batch_size(None)
    count = {"smoke": 2, "quick": 5, "full": 8 if cuda else 5}[setup.preset]
    usual = [-(-first * 2**i // world_size) * world_size for i in range(count)]
    smallest, *larger = sorted(set(global_batch_sizes or usual))
    most = 2 * max(usual) if setup.preset == "smoke" else MOST_CUDA if cuda else MOST_CPU
    base = setup.config(global_batch_size=smallest, precision=precision, world_size=world_size)
    family = Family(
        name=f"{setup.family_name(None, world_size)}, {setup.precision_name(precision)}",
        baseline=base,
        baseline_label=f"batch {smallest}",
        candidates=tuple((f"batch {n}", dataclasses.replace(base, global_batch_size=n)) for n in larger),
        search_up_to=max(most, smallest, *larger),
        primary=f"batch {larger[min(1, len(larger) - 1)]}" if larger else "",
    )
    return Experiment(name="batch_size", families=(family,))


def answer(study: Study) -> Answer:
    """Compare the speed of each batch size, and show the largest that fits."""
    found = compared(study, notes=[batch_sizes.sentence(study)])
    shown = speeds(study, found, views=trained_views(study))
    return replace(shown, figure=lambda: figure_batch_sizes.figure(study, found.headline) or shown.figure())
