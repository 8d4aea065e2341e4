"""Advice: what is wrong with a planted machine comes first, with what curing it is worth; nothing is promised more."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import records as make
from planted_machines import MACHINES, Planted, profiled, seconds, study, told

from ddpm_lab.changes import NO_EXCHANGE
from ddpm_lab.config import RunConfig
from ddpm_lab.experiments import study_of
from ddpm_lab.explain import advice as adv
from ddpm_lab.explain import bottleneck, subject
from ddpm_lab.explain.advice import Advice
from ddpm_lab.plan import Experiment, Family, Plan
from ddpm_lab.planning import plan_experiment
from ddpm_lab.record import RunRecord

FILES = RunConfig(loader="files")
OVERSHOOT = 1.06


def by_title(found: Sequence[Advice], title: str) -> Advice:
    return next(a for a in found if a.title == title)


def phases_of(planted: Planted) -> list[dict[str, float]]:
    """What a time budget of the planted machine shows of each rank, in milliseconds."""
    config, costs = planted.config, dict(planted.config.options)
    loading = 1e3 * costs["loader"] if config.loader == "files" else 0.0
    fixed = 1e3 * costs["fixed"]
    step = 1e3 * seconds(config) - loading - fixed
    slow = 1e3 * costs["slow"] if config.world_size > 1 else 0.0
    every = {"data": loading, "forward": step, "optimizer": fixed}
    return [every] if config.world_size == 1 else [{**every, "forward": step - slow, "communication": slow}, every]


def records_of(planted: Planted) -> list[RunRecord]:
    """The records that measuring a planted machine makes."""
    config = planted.config
    per_image = seconds(config) / config.global_batch_size
    ratios = {n: (c, per_image / (seconds(c) / c.global_batch_size)) for n, c in planted.changes().items()}
    found = told(config, ratios, step_seconds=seconds(config))
    if NO_EXCHANGE in ratios:
        slow = dict(config.options)["slow"] / seconds(config)
        found = [
            r
            if r.label != NO_EXCHANGE
            else replace(
                r, windows=tuple(replace(w, rank_seconds=(w.seconds * (1 - slow), w.seconds)) for w in r.windows)
            )
            for r in found
        ]
    return [profiled(config, *phases_of(planted)), *found]


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_wrong_comes_first_with_what_curing_it_is_worth(name: str) -> None:
    planted = MACHINES[name]
    first, *others = adv.advice(study(*records_of(planted)))
    assert first.title == planted.title
    assert first.status in (adv.FASTER, adv.DERIVED)
    assert first.low <= planted.gain <= first.high
    assert first.impact == "high"
    assert all(a.rank >= first.rank for a in others)


def test_what_is_not_measured_is_ordered_by_the_phases_it_acts_on_and_promises_nothing() -> None:
    shown = study(profiled(FILES, {"data": 60.0, "forward": 30.0, "optimizer": 10.0}))
    found = adv.advice(shown)
    assert {a.status for a in found} == {adv.NOT_MEASURED}
    assert found[0].title == "Use packed data"
    assert found[0].share == pytest.approx(0.6)
    assert by_title(found, "Compile the step").share == pytest.approx(0.3)
    assert by_title(found, "Use batches of 64 images").share == 0
    assert {a.expected() for a in found} == {"not measured"}
    assert adv.table(shown).empty


def test_a_budget_that_explains_nothing_names_no_bottleneck() -> None:
    shown = study(profiled(FILES, {"data": 60.0, "forward": 40.0}, residual=30.0))
    about = subject.subject(shown)
    assert about is not None
    assert "no bottleneck is named" in bottleneck.verdict(about)


def test_what_is_resolved_goes_first() -> None:
    config = RunConfig(loader="files", global_batch_size=8)
    measured = {
        "bf16": (replace(config, precision="bf16"), 1.08),
        "compiled": (replace(config, compile="whole"), 1.30),
        "batch 16": (replace(config, global_batch_size=16), 0.8),
    }
    unsure = {"batch 32": (replace(config, global_batch_size=32), 1.2)}
    shown = study(
        profiled(config, {"data": 60.0, "forward": 40.0}),
        *told(config, measured),
        *told(config, unsure, set_noise=0.3, seed=1, count=6),
    )
    found = adv.advice(shown)
    assert [a.title for a in found[:2]] == ["Compile the step", "Train in bf16"]
    assert list(adv.table(shown)["Change"]) == [a.title for a in found if a.status != adv.NOT_MEASURED]
    ranks = [adv._TIERS[a.status] for a in found]
    assert ranks == sorted(ranks)
    assert by_title(found, "Use batches of 32 images").status == adv.NOT_RESOLVED
    assert by_title(adv.declined(shown), "Use batches of 16 images").status == adv.SLOWER


def test_a_single_set_settles_nothing() -> None:
    config = RunConfig()
    ratios = {
        "bf16": (replace(config, precision="bf16"), 0.5),
        "batch 64": (replace(config, global_batch_size=64), 1.6),
    }
    shown = study(profiled(config, {"forward": 80.0, "optimizer": 20.0}), *told(config, ratios, count=1))
    found = adv.advice(shown)
    assert {a.title for a in found if a.status == adv.NOT_RESOLVED} == {"Train in bf16", "Use batches of 64 images"}
    assert found[-1].title == "Train in bf16", "it reads slower, and nobody knows"
    assert "inconclusive" in found[-1].expected()
    about = subject.subject(shown)
    assert about is not None
    assert bottleneck.targets(shown, about, found)[-1].status == bottleneck.UNKNOWN


def test_what_is_known_to_cost_quality_is_not_recommended_and_said() -> None:
    config = RunConfig()
    bf16 = replace(config, precision="bf16")
    records = [profiled(config, {"forward": 100.0}), *told(config, {"bf16": (bf16, 1.5)})]
    costly = study(*records, trials=make.trials({"bf16": (bf16, 0.1)}, baseline=config))
    assert "Train in bf16" not in [a.title for a in adv.advice(costly)]
    left = by_title(adv.declined(costly), "Train in bf16")
    assert left.status == adv.WORSE
    assert "worse" in left.quality
    same = study(*records, trials=make.trials({"bf16": (bf16, 0.0)}, baseline=config))
    assert adv.advice(same)[0].quality.startswith("not worse")
    assert adv.advice(study(*records))[0].quality.startswith("not measured")


def test_other_code_other_baselines_and_failures_are_no_measurements_of_this() -> None:
    config = RunConfig()
    bf16 = replace(config, precision="bf16")
    budget = profiled(config, {"forward": 80.0, "optimizer": 20.0})
    other_code = [replace(r, code_version="code-2") for r in told(config, {"bf16": (bf16, 1.5)})]
    found = by_title(adv.advice(study(budget, *other_code)), "Train in bf16")
    assert found.status == adv.NOT_MEASURED
    compiled, both = replace(config, compile="whole"), replace(bf16, compile="whole")
    elsewhere = told(bf16, {"compiled": (both, 1.5)})
    near = by_title(adv.advice(study(budget, *elsewhere)), "Compile the step")
    assert near.status == adv.NOT_MEASURED
    assert "from other ones (1 CPU rank, bf16" in near.evidence
    lost = told(config, {}, failures={"compiled": (compiled, "unsupported", "no C++ compiler")})
    failed = by_title(adv.declined(study(budget, *lost)), "Compile the step")
    assert failed.status == adv.FAILED
    assert "no C++ compiler" in failed.evidence


def test_what_was_left_out_is_said_with_its_reason() -> None:
    config = RunConfig()
    note = make.record(config, role="note", label="compiled", status="left out", reason="it takes too long")
    note = replace(note, experiment="bottleneck", family="one change at a time", baseline_id=config.run_id)
    bf16 = replace(config, precision="bf16")
    shown = study(profiled(config, {"forward": 80.0, "optimizer": 20.0}), note, *told(config, {"bf16": (bf16, 1.5)}))
    left_out = by_title(adv.advice(shown), "Compile the step")
    assert left_out.evidence == "Not measured against the present settings; it takes too long"
    assert left_out.status == adv.NOT_MEASURED


def test_identical_ranks_have_no_straggler() -> None:
    planted = replace(MACHINES["straggler"], costs={"image": 0.002, "slow": 0.0})
    shown = study(*records_of(planted))
    assert not [a for a in adv.advice(shown) if "slow" in a.title]
    assert by_title(adv.declined(shown), "Find out why one rank is slow").status == adv.NO_GAIN


def test_commands_name_the_present_settings_and_the_change() -> None:
    config = RunConfig(loader="files", loader_workers=2, precision="bf16", global_batch_size=8)
    found = adv.advice(study(profiled(config, {"data": 50.0, "forward": 50.0})))
    assert found[0].command == (
        "ddpm-lab bottleneck --network tiny --batch-size 8 --precision bf16 --loader files --loader-workers 2 "
        "--changes 'packed data' --resolution 2%"
    )
    assert (found[0].current, found[0].recommended) == (
        'loader = "files", loader_workers = 2',
        'loader = "packed", loader_workers = 0',
    )


def test_without_a_time_budget_there_is_no_advice() -> None:
    assert adv.advice(study(*make.sets({}))) == ()
    assert adv.table(study(*make.sets({}))).empty


@pytest.mark.slow
@pytest.mark.parametrize("name", MACHINES)
def test_a_planted_machine_is_measured_and_cured(name: str, tmp_path: Path) -> None:
    planted = MACHINES[name]
    config = planted.config
    family = Family(
        name="planted", baseline=config, baseline_label="as it is", candidates=tuple(planted.changes().items())
    )
    experiment = Experiment(
        name="bottleneck",
        families=(family,),
        profiles=(("planted", "as it is", dataclasses.replace(config, purpose="profile")),),
    )
    # Where something else held a set up there are more of them, as its users have it.
    measured = plan_experiment(
        experiment,
        data_name="none",
        plan=Plan(turns=2, window_seconds=0.1, window_steps=3, settle_steps=1, warmup_steps=2),
        sets=16,
        resolution=0.05,
        minutes=None,
        output=tmp_path,
        quiet=True,
    ).measure()
    # Ranks that wait do not share a core: what several of them show is a speed here.
    records = [replace(r, mechanism_only=False) for r in study_of(measured).records]
    first = adv.advice(study(*records))[0]
    assert first.title == planted.title, (first, by_title(adv.advice(study(*records)), planted.title))
    assert first.status in (adv.FASTER, adv.DERIVED)
    # A wait of 10 ms ends up to half a millisecond late on a busy machine, which is planted nowhere.
    assert first.low / OVERSHOOT <= planted.gain <= first.high * OVERSHOOT
