"""Planted records of the question claims: sets with known ratios, and wrong ways with known numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.selection import Study
from ddpm_lab.measure.alone import WORKLOAD
from ddpm_lab.record import Machine, RunRecord

BASE = RunConfig(global_batch_size=8)
STEP = 0.010
"""Seconds of a step of the baseline."""
CONFIGS = {
    "bf16": replace(BASE, precision="bf16"),
    "compiled": replace(BASE, compile="whole"),
    "batch 32": replace(BASE, global_batch_size=32),
    "2 ranks": replace(BASE, world_size=2),
}
RATIOS = {"bf16": 0.8, "compiled": 1.5, "batch 32": 1.25, "2 ranks": 1.8}


def sets(ratios: Mapping[str, float] = RATIOS, **values: Any) -> list[RunRecord]:
    """Six sets of the baseline and candidates, in step with STEP but for a little noise."""
    candidates = {label: (CONFIGS[label], ratio) for label, ratio in ratios.items()}
    quiet = {"set_noise": 0.002, "turn_noise": 0.002, "drift": 0.002, "step_seconds": STEP, **values}
    return make.sets(candidates, baseline=BASE, experiment="claims", family="tiny, batch 8", **quiet)


def wrong(label: str = "fp32", *, repeats: int = 6, **ways: Any) -> list[RunRecord]:
    """Repeats of wrong ways whose answers are ``ways``; a function is asked with the number of the repeat."""
    config = BASE if label == "fp32" else CONFIGS[label]
    common = {"experiment": "claims", "family": "tiny, batch 8", "role": "wrong", "baseline_id": BASE.run_id}
    return [
        make.record(
            replace(config, purpose="check", workload=WORKLOAD, seed=i),
            label=label,
            set_id=f"wrong-{label}-{i}",
            stages={"start": 0.7, "build": 0.3},
            profile={"wrong_ways": {name: way(i) if callable(way) else way for name, way in ways.items()}},
            **common,
        )
        for i in range(repeats)
    ]


def study(records: Sequence[RunRecord], *, beside: Sequence[RunRecord] = (), machine: Machine = make.CPU) -> Study:
    """A study of claims on a machine."""
    of = make.study(make.on(machine, records), "claims")
    return replace(of, beside=tuple(make.on(machine, beside)))
