"""Records of other trainers, with planted ratios."""

import dataclasses
from pathlib import Path
from typing import Any

import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import OURS, Plan
from ddpm_lab.questions.peers import BOTH_FP32
from ddpm_lab.record import RunRecord

OWN = RunConfig(network="seed", precision="bf16", global_batch_size=32)
FAMILY = "seed, batch 32"
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
    """A family of published records."""
    base = dataclasses.replace(OWN, precision="fp32")
    label = {"slow": (other("a", precision="fp32"), 0.8)}
    return make.sets(label, baseline=base, baseline_label=OURS, family=FAMILY + BOTH_FP32, primary="", **COMMON)


def study(*records: RunRecord, **values: Any) -> Study:
    return Study(experiment="peers", records=records, output_dir=Path(), **values)


WHOLE = study(*against(), *in_fp32())
