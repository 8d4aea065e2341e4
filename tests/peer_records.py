"""Records of other trainers and of a machine's limits, with planted ratios and peaks."""

import dataclasses
from pathlib import Path
from typing import Any

import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import BOTH_FP32, LIMITS, OURS, Plan
from ddpm_lab.record import RunRecord

OWN = RunConfig(network="seed", precision="bf16", global_batch_size=32)
FAMILY = "seed, batch 32"
PRODUCT, COPY = "ddpm_lab.training.limits:product", "ddpm_lab.training.limits:copy"
COMMON: dict[str, Any] = {"experiment": "peers", "plan": Plan(settle_steps=1), "warmup_steps": 3}


def other(name: str, **settings: Any) -> RunConfig:
    return dataclasses.replace(OWN, workload=f"peer:{name}", **settings)


def against(**values: Any) -> list[RunRecord]:
    """One takes 4 times as long as this trainer, the tuned one 1.6 times; a third is not installed."""
    candidates = {"slow": (other("a", precision="fp32"), 0.25), "slow, tuned": (other("a"), 1 / 1.6)}
    missing = {"absent": (other("b"), "unsupported", "absent is not installed: make peers")}
    values |= {"baseline": OWN, "baseline_label": OURS, "step_seconds": 1.0, "primary": "slow, tuned"}
    return make.sets(candidates, family=FAMILY, failures=missing, **COMMON, **values)


def in_fp32() -> list[RunRecord]:
    base = dataclasses.replace(OWN, precision="fp32")
    label = {"slow": (other("a", precision="fp32"), 0.8)}
    return make.sets(label, baseline=base, baseline_label=OURS, family=FAMILY + BOTH_FP32, primary="", **COMMON)


def machine(flops: float = 400e9, bandwidth: float = 40e9, *, work: float = 8e9, **of: Any) -> list[RunRecord]:
    """Peaks with a known answer: a product of 2 GFLOP and a copy of 1 GB, both at the peak."""
    single = dataclasses.replace(OWN, workload=PRODUCT, precision="fp32", global_batch_size=1, **of)
    own, copy = dataclasses.replace(single, precision="bf16"), dataclasses.replace(single, workload=COPY)
    seconds = 2e9 / (flops / 2)
    rows = {"product, bf16": (own, 2.0), "copy": (copy, seconds / (1e9 / bandwidth))}
    family = f"{LIMITS}, {single.network}"
    still: dict[str, Any] = {"drift": 0, "turn_noise": 0, "set_noise": 0}
    still |= {"baseline": single, "baseline_label": "product, fp32", "step_seconds": seconds, "primary": ""}
    found = make.sets(rows, family=family, **still, **COMMON)
    counted = {
        "convolution": {"flop": work, "elements": 10e6},
        "normalisation": {"flop": 0.0, "elements": 20e6},
        "weights": {"flop": 0.0, "elements": 10e6},
    }
    seen = {PRODUCT: {"flop": 2e9, "work": counted}, COPY: {"bytes": 1e9}}
    return [dataclasses.replace(r, witness={"ranks": [seen[r.config.workload]]}) for r in found]


def study(*records: RunRecord, **values: Any) -> Study:
    return Study(experiment="peers", records=records, output_dir=Path(), **values)


WHOLE = study(*against(), *in_fp32(), *machine())
