"""Do published claims hold here? Sets of what they are about, and beside them the wrong ways to measure, really run."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from ddpm_lab.config import RunConfig
from ddpm_lab.declared import Opt
from ddpm_lab.measure.alone import WORKLOAD
from ddpm_lab.plan import Experiment, Family, Trial
from ddpm_lab.training.setting import Batch, Setup

Repeats = Annotated[int | None, Opt("times that each wrong way is run", least=1)]
BAR_STEPS = 6
"""Steps of the smaller batch in a bar; the larger batch does as many as fit into the same images, which is fewer."""
_REPEATS = {"smoke": 1, "quick": 6, "full": 12}
_WAYS = ("fresh", "bars", "runs", "profiled", "phases", "counted")
_CPU_WAYS = ("one_thread",)
_CUDA_WAYS = ("loss_read", "unsynchronised", "phases_waited_for", "hidden_devices")


def claims(setup: Setup, *, global_batch_size: Batch = None, repeats: Repeats = None) -> Experiment:
    """Which published claims hold here? Settings that the claims are about, in sets, and wrong ways to measure them.

    Each wrong way is run ``repeats`` times, in processes of its own. Its records have the role "wrong", and no figure
    or table takes a speed from them. ``smoke`` leaves compiling out, which takes most of a minute.
    """
    cuda = setup.device == "cuda"
    batch = setup.batch_size(global_batch_size) if cuda or global_batch_size else 8
    count = _REPEATS[setup.preset] if repeats is None else repeats
    base = setup.config(global_batch_size=batch)
    narrow = "fp16" if cuda else "bf16"
    reduced = replace(base, precision=narrow)
    # The images of a bar hold one step of it, and half as many images again.
    larger = replace(base, global_batch_size=4 * batch)
    rows = [(narrow, reduced)]
    rows += [("compiled", replace(base, compile="whole"))] if setup.preset != "smoke" else []
    rows += [(f"batch {larger.global_batch_size}", larger)]
    two = setup.ranks_label(2)
    several = setup.most_ranks > 1 and batch % 2 == 0 and 2 % setup.nodes(2) == 0
    rows += [(two, setup.config(global_batch_size=batch, world_size=2))] if several else []
    name = setup.family_name(batch)
    family = Family(name=name, baseline=base, baseline_label="fp32", candidates=tuple(rows), together=True)
    why = "the batch is odd" if setup.most_ranks > 1 else "each rank needs a device of its own"
    # A thread and a core are one on a CPU alone, and where there is one core no other can be idle.
    idle = _CPU_WAYS if not cuda and setup.usable_cores > 1 else ()
    wrong = [
        Trial(family=name, label=label, baseline=base, config=_wrong(config, ways, BAR_STEPS * batch, setup.seed + i))
        for i in range(count)
        for label, config, ways in (
            ("fp32", base, (*_WAYS, *idle, *(_CUDA_WAYS if cuda else ()))),
            (narrow, reduced, ("bars", "profiled")),
            (f"batch {larger.global_batch_size}", larger, ("bars",)),
        )
    ]
    left_out = () if several else ((name, two, why),)
    return Experiment(name="claims", families=(family,), left_out=left_out, checks=tuple(wrong))


def _wrong(config: RunConfig, ways: tuple[str, ...], images: int, seed: int) -> RunConfig:
    options = (("ways", " ".join(ways)), ("bar_images", images))
    return replace(config, purpose="check", workload=WORKLOAD, seed=seed, options=options)
