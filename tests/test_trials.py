"""Trials are made once whoever asks, never begun where they cannot end in time, and what is missing is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import records as make
from setups import setup

from ddpm_lab.config import RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.measure.code_version import CodeVersion
from ddpm_lab.measure.hardware import environment
from ddpm_lab.measure.held import Held
from ddpm_lab.measure.progress import Progress
from ddpm_lab.measure.seat import Instrument
from ddpm_lab.measure.shortfall import Target
from ddpm_lab.measure.trials import TRIAL_SECONDS, Trials
from ddpm_lab.plan import Experiment, Family, Plan, Trial
from ddpm_lab.quality import with_trials
from ddpm_lab.record import RunRecord
from ddpm_lab.setting import Images

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


def test_an_earlier_run_tells_what_a_trial_takes() -> None:
    trials = planned().trials
    earlier = Held([made(trials[0], 40.0)])
    assert Trials(trials, earlier).seconds([trials[2]]) == 40.0, "another seed of the same"
    assert Trials(trials, earlier).seconds([trials[1]]) == 40.0, "the best that is known"


def test_what_the_sets_leave_out_is_not_trained() -> None:
    wide = replace(FAMILY, candidates=(*FAMILY.candidates, ("2 ranks", replace(BASE, world_size=2))))
    trials = Trials(planned(families=[wide]).trials, Held())
    assert {t.label for t in trials.of({BASE.run_id, BF16.run_id})} == {"fp32", "bf16"}
    assert trials.of(set()) == []
    assert {t.label for t in trials.missing()} == {"fp32", "bf16", "2 ranks"}


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
