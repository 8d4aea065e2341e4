"""Where does the time of a training step go? One profiled run."""

from __future__ import annotations

from ddpm_lab.plan import Experiment
from ddpm_lab.training.setting import (
    Batch,
    Precision,
    Setup,
    WorldSize,
)


def profile(
    setup: Setup, *, global_batch_size: Batch = None, precision: Precision = "fp32", world_size: WorldSize = 1
) -> Experiment:
    """Where does the time of a training step go? One profiled run, which supplies no speed."""
    setup.check_ranks(world_size)
    config = setup.config(
        purpose="profile",
        global_batch_size=setup.batch_size(global_batch_size, world_size),
        precision=precision,
        world_size=world_size,
    )
    label = f"{setup.precision_name(precision)}, {setup.ranks_label(world_size)}"
    family = setup.family_name(config.global_batch_size, world_size)
    return Experiment(name="profile", families=(), profiles=((family, label, config),))
