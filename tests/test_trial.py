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
from conftest import BUSY
from torch import Tensor

from ddpm_lab.config import TRAINING, RunConfig
from ddpm_lab.data.loader import Batch
from ddpm_lab.explain import quality, samples
from ddpm_lab.explain.quality import IDENTICAL, NOT_WORSE, WORSE
from ddpm_lab.measure import hardware
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.measure.seat import Instrument, Member
from ddpm_lab.measure.sets import measure_alone
from ddpm_lab.measure.trial import LOOKS, MOST_BYTES, MOST_IMAGES, SAMPLER_STEPS, train_once
from ddpm_lab.model.training import Training
from ddpm_lab.optimizer_settings import OptimizerConfig
from ddpm_lab.plan import Plan
from ddpm_lab.record import RunRecord
from ddpm_lab.workload import RankContext

UNDERFLOW = "test_trial:underflow"
LARGEST_RATE = 0.02
"""Of Adam in 40 steps of 8 synthetic images: at 0.05 runs of some seeds end where they began."""


class Underflow(Training):
    """fp16 without a scaler on a loss so small that every gradient is rounded to nothing."""

    def loss(self, batch: Batch, part: slice) -> Tensor:
        return super().loss(batch, part) * 1e-9

    def step(self, batch: Batch) -> Tensor:
        hooks = [p.register_hook(lambda g: g.half().float()) for p in self.parameters]  # type: ignore[no-untyped-call]
        try:
            return super().step(batch) * 1e9
        finally:
            for hook in hooks:
                hook.remove()


def underflow(config: RunConfig, context: RankContext) -> Underflow:
    return Underflow(config, context)


@pytest.fixture(scope="module")
def config(synthetic: RunConfig) -> RunConfig:
    """A trial on the synthetic images."""
    return replace(
        synthetic,
        purpose="quality",
        workload=TRAINING,
        optimizer=OptimizerConfig(ema_every=1, ema_decay=0.9),
        options=(("images", 160), ("draws", 40)),
    )


@pytest.fixture
def tried(tmp_path: Path) -> Callable[..., RunRecord]:
    """Runs one trial of a configuration and returns its record."""

    def run(config: RunConfig, **asked: Any) -> RunRecord:
        instrument = Instrument(
            code=code_version(config.workload, BUSY),
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
def test_loaders_and_workers_are_identical_and_two_ranks_agree(
    config: RunConfig, tried: Callable[[RunConfig], RunRecord]
) -> None:
    base = tried(config)
    assert quality.compare([base], [tried(config)]).verdict == IDENTICAL, "the same seed, the same weights"
    assert learned(tried(replace(config, seed=1)))["weights_sha256"] != learned(base)["weights_sha256"]
    for change in ({"loader": "files", "loader_workers": 1}, {"loader": "resident"}):
        assert quality.compare([base], [tried(replace(config, **change))]).verdict == IDENTICAL
    two = learned(tried(replace(config, world_size=2)))
    assert two["losses"] == pytest.approx(learned(base)["losses"], rel=1e-3)
    assert two["held_out"][-1]["loss"] == pytest.approx(learned(base)["held_out"][-1]["loss"], rel=1e-3)


@pytest.mark.slow
def test_planted_faults_are_worse_and_another_rounding_is_not(
    config: RunConfig, tried: Callable[[RunConfig], RunRecord]
) -> None:
    config = replace(config, options=(("images", 320), ("draws", 64)))

    def at(rate: float) -> RunConfig:
        return replace(config, optimizer=dataclasses.replace(config.optimizer, learning_rate=rate))

    fine = {"bf16": replace(config, precision="bf16"), "the largest learning rate that trains": at(LARGEST_RATE)}
    faults = {
        "a learning rate ten times too large": at(10 * LARGEST_RATE),
        "a frozen average": replace(config, optimizer=dataclasses.replace(config.optimizer, ema_decay=0.999999)),
        "underflow": replace(config, workload=UNDERFLOW),
    }
    seeds = range(5)
    base = [tried(replace(config, seed=seed)) for seed in seeds]
    runs = {name: [tried(replace(c, seed=seed)) for seed in seeds] for name, c in (fine | faults).items()}
    verdicts = {name: quality.compare(base, found).verdict for name, found in runs.items()}
    assert {name for name, verdict in verdicts.items() if verdict == NOT_WORSE} == fine.keys(), verdicts
    assert {name for name, verdict in verdicts.items() if verdict == WORSE} == faults.keys(), verdicts


def test_an_underflow_is_one(config: RunConfig) -> None:
    """What is planted above: no gradient is left."""
    torch.manual_seed(0)
    context = RankContext(rank=0, world_size=1, device="cpu", threads=1, mark=lambda _: None)
    made = underflow(config, context)
    made.step(next(made.batches()))
    assert all(p.grad is None or not p.grad.any() for p in made.parameters)
    made.close()
