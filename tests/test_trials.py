"""Trials: made once whoever asks, never begun where they cannot end in time; what real ones record and refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import records as make
from conftest import BUSY, code_of
from setups import setup

from ddpm_lab.config import TRAINING, UNLEARNED, OptimizerConfig, RunConfig
from ddpm_lab.explain import quality, samples
from ddpm_lab.explain.quality import GOOD, IDENTICAL, WORSE
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.measure.code_version import CodeVersion
from ddpm_lab.measure.hardware import environment
from ddpm_lab.measure.held import Held
from ddpm_lab.measure.progress import Progress
from ddpm_lab.measure.seat import Instrument, Member
from ddpm_lab.measure.sets import measure_alone
from ddpm_lab.measure.shortfall import Target
from ddpm_lab.measure.trials import LOOKS, MOST_BYTES, MOST_IMAGES, SAMPLER_STEPS, TRIAL_SECONDS, Trials, train_once
from ddpm_lab.plan import Experiment, Family, Plan, Trial
from ddpm_lab.questions.quality import with_trials
from ddpm_lab.record import RunRecord
from ddpm_lab.training.setting import Images, usual_settings

BASE, BF16 = RunConfig(global_batch_size=8), RunConfig(global_batch_size=8, precision="bf16")
FAMILY = Family(name="tiny", baseline=BASE, baseline_label="fp32", candidates=(("bf16", BF16),))
HERE = setup(images=Images(folder="", sha256="", name=""))


def planned(name: str = "amp", *, seeds: int = 5, families: Sequence[Family] = (FAMILY,)) -> Experiment:
    return with_trials(Experiment(name=name, families=tuple(families)), HERE, seeds=seeds, images=800)


def made(trial: Trial, seconds: float = 10.0, **values: Any) -> RunRecord:
    """A trial as its record, which took so long."""
    stages = {"start": 1.0, "training": seconds - 1.0}
    learned = {"steps": 100, "losses": [], "held_out": [{"images": 800, "loss": 0.5}], "weights_sha256": trial.label}
    told: dict[str, Any] = {"role": "quality", "label": trial.label, "family": trial.family, "quality": learned}
    return make.record(trial.config, **{**told, "stages": stages, **values})


def trained(seconds_of: dict[str, float], budget: float | None, held: Held | None = None) -> tuple[list[str], int]:
    """Labels of what fits into a budget where each trial takes ``seconds_of`` its label, and how many do not fit."""
    held, now, done = held or Held(), 0.0, []
    trials = Trials(planned().trials, held)

    def train(trial: Trial) -> None:
        nonlocal now
        now += seconds_of[trial.label]
        done.append(trial.label)
        held.add([made(trial, seconds_of[trial.label])])

    left = trials.run(
        trials.missing(), Progress("test", quiet=True), lambda: None if budget is None else budget - now, train
    )
    assert budget is None or now <= budget
    assert len(left) == len(trials.missing())
    return done, len(left)


def test_seed_after_seed_is_trained_as_far_as_the_time_allows() -> None:
    assert trained({"fp32": 10, "bf16": 20}, None) == (["fp32", "bf16"] * 5, 0)
    assert trained({"fp32": 10, "bf16": 20}, 150) == (["fp32", "bf16"] * 5, 0)
    assert trained({"fp32": 10, "bf16": 20}, 89) == (["fp32", "bf16", "fp32", "bf16", "fp32"], 5)


def test_what_sets_have_shown_keeps_a_trial_from_being_begun() -> None:
    """10 ms a step of 8 images: 800 images take a second."""
    sets = make.sets({"bf16": (BF16, 1.0)}, baseline=BASE, count=2, drift=0.0)
    assert trained({"fp32": 1, "bf16": 1}, 0.5, Held(sets)) == ([], 10)
    assert len(trained({"fp32": 1, "bf16": 1}, 4, Held(sets))[0]) > 1
    unknown = Trials(planned().trials, Held())
    assert unknown.seconds(unknown.missing()) == 10 * TRIAL_SECONDS
    known = Trials(planned().trials, Held(sets))
    assert 9 < known.seconds(known.missing()) < 11
    compiled = replace(FAMILY, candidates=(("compiled", replace(BASE, compile="whole")),))
    slow = Trials(
        planned(families=[compiled]).trials,
        Held(make.sets({"compiled": (compiled.candidates[0][1], 1.0)}, baseline=BASE)),
    )
    assert slow.seconds(slow.missing()) > 5 * 60, "compiling is forecast too"


def test_a_failure_that_lasts_is_not_repeated() -> None:
    trials = planned().trials
    held = Held([made(trials[0], status="diverged"), made(trials[1], status="crashed")])
    assert [t.config.seed for t in Trials(trials, held).missing() if t.label == "fp32"] == [1, 2, 3, 4]
    assert trials[1] in Trials(trials, held).missing()


def campaign(folder: Path, experiment: Experiment, code: str = "code") -> Campaign:
    instrument = Instrument(code=CodeVersion(code), cache=folder, usable_cores=2, data_name="")
    target = Target(plan=Plan(), sets=1, cold_compiles=0)
    return Campaign(experiment, target, instrument, Ledger(folder / "ledger.jsonl"), folder)


def test_another_question_made_them_already(tmp_path: Path) -> None:
    """By what they are: the same work, machine, data and code of the trials, whatever the plan of a set."""
    trials = planned().trials
    here: dict[str, Any] = {
        "environment": environment(),
        "experiment": "quality",
        "plan": Plan(turns=2),
        "code_version": "code",
    }
    Ledger(tmp_path / "ledger.jsonl").append([made(t, **here) for t in trials[:4]])
    Ledger(tmp_path / "ledger.jsonl").append([made(t, **{**here, "code_version": "older"}) for t in trials[4:]])
    found = campaign(tmp_path, planned())
    assert found.trials.missing() == list(trials[4:])
    assert not found.held.any, "trials alone answer nothing"
    assert campaign(tmp_path, planned(), code="newer").trials.missing() == list(trials)
    assert campaign(tmp_path, planned(seeds=2)).trials.missing() == []


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
