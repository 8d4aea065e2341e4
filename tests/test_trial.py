"""Real trials: what is recorded, what is refused, and verdicts on planted faults that are the right ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import BUSY, code_of
from underflow import underflow

from ddpm_lab.config import TRAINING, UNLEARNED, OptimizerConfig, RunConfig
from ddpm_lab.explain import quality, samples
from ddpm_lab.explain.quality import GOOD, IDENTICAL, WORSE
from ddpm_lab.measure import hardware
from ddpm_lab.measure.seat import Instrument, Member
from ddpm_lab.measure.sets import measure_alone
from ddpm_lab.measure.trial import LOOKS, MOST_BYTES, MOST_IMAGES, SAMPLER_STEPS, train_once
from ddpm_lab.plan import Plan
from ddpm_lab.record import RunRecord
from ddpm_lab.setting import usual_settings
from ddpm_lab.workload import RankContext

UNDERFLOW = "underflow:underflow"
TOO_LARGE_RATE = 2.0
"""Ten times the largest with which anything is learned; 0.002, ten times the usual, only learns faster."""


@pytest.fixture(scope="module")
def config(synthetic: RunConfig) -> RunConfig:
    """A trial on the synthetic images."""
    return replace(
        synthetic,
        purpose="quality",
        workload=TRAINING,
        options=(("images", 160), ("draws", 40)),
    )


@pytest.fixture
def tried(tmp_path: Path) -> Callable[..., RunRecord]:
    """Runs one trial of a configuration and returns its record."""

    def run(config: RunConfig, **asked: Any) -> RunRecord:
        instrument = Instrument(
            code=code_of(BUSY if config.workload == TRAINING else config.workload),
            cache=tmp_path / "cache",
            usable_cores=hardware.usable_cores(),
            data_name="synthetic",
        )
        member = Member("quality", "trial", config)
        return measure_alone(
            instrument,
            experiment="quality",
            family="trials",
            plan=Plan(),
            member=member,
            work=partial(train_once, **asked),
        )

    return run


def learned(record: RunRecord) -> dict[str, Any]:
    assert record.status == "ok", record.reason
    assert record.quality is not None
    return record.quality


def test_a_trial_records_every_loss_and_looks_on_the_way(config: RunConfig, tried: Callable[..., RunRecord]) -> None:
    record = tried(config, draw=True)
    found = learned(record)
    assert found["steps"] == len(found["losses"]) == 20
    assert [look["images"] for look in found["held_out"]] == sorted({8 * round(share * 20) for share in LOOKS})
    assert all(len(look["by_time"]) == quality_strata(look) for look in found["held_out"])
    assert found["held_out"][-1]["loss"] < found["held_out"][0]["loss"]
    assert record.windows == (), "a trial supplies no speed"
    assert record.stages["training"] > 0, "what it took says when the next one would end"
    told = found["samples"]
    assert samples.pixels(record).shape == (MOST_IMAGES, 32, 32, 3)
    assert {k: v for k, v in told.items() if k != "png"} == {
        **{"images": MOST_IMAGES, "seed": config.seed, "sampler": "ddim", "steps": SAMPLER_STEPS}
    }
    assert len(told["png"]) < 1.4 * MOST_BYTES
    assert record.run_id == config.run_id, "what is drawn at the end is no part of what is trained"
    assert RunRecord.from_dict(record.as_dict()) == record


def quality_strata(look: dict[str, Any]) -> int:
    assert look["loss"] == pytest.approx(sum(look["by_time"]) / 10, rel=0.2)
    return 10


def test_what_diverges_is_a_row_and_says_where(config: RunConfig, tried: Callable[[RunConfig], RunRecord]) -> None:
    record = tried(replace(config, optimizer=OptimizerConfig(learning_rate=1e30, clip_norm=None)))
    assert record.status == "diverged"
    assert "no longer finite after step" in str(record.reason)


@pytest.mark.slow
def test_what_is_not_learned_is_identical_and_two_ranks_agree(
    config: RunConfig, tried: Callable[[RunConfig], RunRecord]
) -> None:
    base = tried(config)
    assert quality.compare([base], [tried(config)]).verdict == IDENTICAL, "the same seed, the same weights"
    assert learned(tried(replace(config, seed=1)))["weights_sha256"] != learned(base)["weights_sha256"]
    changes: list[dict[str, Any]] = [{"loader": "files", "loader_workers": 1}, {"loader": "resident"}]
    changes += [{"read_loss": True}, {"freed_memory": "kept"}]
    assert {name for change in changes for name in change} == UNLEARNED.keys()
    for change in changes:
        assert quality.compare([base], [tried(replace(config, **change))]).verdict == IDENTICAL
    two = learned(tried(replace(config, world_size=2)))
    assert two["losses"] == pytest.approx(learned(base)["losses"], rel=1e-3)
    assert two["held_out"][-1]["loss"] == pytest.approx(learned(base)["held_out"][-1]["loss"], rel=1e-3)


@pytest.mark.slow
def test_planted_faults_are_worse_and_another_rounding_is_not(
    config: RunConfig, tried: Callable[[RunConfig], RunRecord]
) -> None:
    """With a rate that gets to the loss that shows harm in 120 steps; ``docs/measured`` has the usual one."""
    quick = OptimizerConfig(learning_rate=5e-3)
    config = replace(config, optimizer=quick, options=(("images", 960), ("draws", 64)))
    fine = {"the default on a CPU, in bf16": replace(config, **usual_settings("cpu"))}
    faults = {
        "a learning rate ten times too large": replace(config, optimizer=OptimizerConfig(learning_rate=TOO_LARGE_RATE)),
        "a frozen average": replace(config, optimizer=dataclasses.replace(quick, ema_every=1000)),
        "underflow": replace(config, workload=UNDERFLOW),
    }
    seeds = range(5)
    base = [tried(replace(config, seed=seed)) for seed in seeds]
    runs = {name: [tried(replace(c, seed=seed)) for seed in seeds] for name, c in (fine | faults).items()}
    verdicts = {name: quality.compare(base, found).verdict for name, found in runs.items()}
    assert {name for name, verdict in verdicts.items() if verdict in GOOD} == fine.keys(), verdicts
    assert {name for name, verdict in verdicts.items() if verdict == WORSE} == faults.keys(), verdicts


def test_an_underflow_is_one(config: RunConfig) -> None:
    """What is planted above: no gradient is left."""
    torch.manual_seed(0)
    context = RankContext(rank=0, world_size=1, device="cpu", threads=1, mark=lambda _: None)
    made = underflow(config, context)
    made.step(next(made.batches()))
    assert all(p.grad is None or not p.grad.any() for p in made.parameters)
    made.close()
