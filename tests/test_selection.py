"""From records to studies."""

from dataclasses import replace

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import selection
from ddpm_lab.plan import PRESETS, Plan
from ddpm_lab.record import LedgerError

BF16 = RunConfig(precision="bf16")


def test_trials_come_with_the_speeds_of_their_data_whatever_the_plan() -> None:
    late = make.environment(date="2026-02-01T00:00:00+00:00")
    speeds = make.sets({"bf16": (BF16, 1.5)})
    trials = make.trials({"bf16": (BF16, 0.0)}, seeds=3)
    later = make.trials({"bf16": (BF16, 0.0)}, seeds=1, images=320, plan=Plan(turns=2), environment=late)
    edited = make.trials({"bf16": (BF16, 0.0)}, seeds=1, code_version="old")
    found = selection.study([*trials, *speeds, *later, *edited], "amp")
    assert list(found.records) == speeds
    assert sorted(map(id, found.trials)) == sorted(map(id, [*trials, *later]))


def test_claims_stand_beside_what_other_questions_measured() -> None:
    speeds = make.sets({"bf16": (BF16, 1.5)})
    claims = make.sets({"bf16": (BF16, 1.4)}, experiment="claims")
    shown = selection.study([*claims, *speeds], "claims")
    assert (list(shown.records), list(shown.beside)) == (claims, speeds)


def test_study_takes_the_latest_cohort() -> None:
    before, then, late = (
        make.environment(date=f"2026-{when}")
        for when in ("01-01T00:00:00+00:00", "01-02T00:00:00+02:00", "02-01T00:00:00Z")
    )
    old = make.sets({"bf16": (BF16, 1.5)}, code_version="old", environment=before)
    new = make.sets({"bf16": (BF16, 1.5)}, environment=then)
    other = make.sets({}, experiment="workers", environment=late)
    note = make.record(RunConfig(), role="note", set_id="", plan=Plan(window_seconds=9.0), environment=late)
    found = selection.study([*new, *old, *other, note], "amp")
    assert (list(found.records), found.date) == (new, "2026-01-02")
    assert selection.study(old + new, "amp", cohort=old[0].cohort).records == tuple(old)


def test_a_smoke_run_hides_no_answer_of_the_same_code_and_images() -> None:
    late = make.environment(date="2026-02-01T00:00:00+00:00")
    whole, smoke = make.sets({"bf16": (BF16, 1.5)}), make.sets({}, plan=PRESETS["smoke"].plan, environment=late)
    edited = [replace(r, code_version="new") for r in smoke]
    for told, shown in (([*whole, *smoke], whole), (smoke, smoke), ([*whole, *edited], edited)):
        assert list(selection.study(told, "amp").records) == shown
        assert list(selection.study(told, "recommendation").records) == shown
    assert list(selection.study(whole + smoke, "amp", cohort=smoke[0].cohort).records) == smoke


def test_machines_are_never_mixed() -> None:
    cpu = make.sets({"bf16": (BF16, 1.5)})
    both = cpu + make.on(make.GPUS, cpu)
    with pytest.raises(LedgerError, match=r"2 machines.*Example CPU 9000, 2 cores.*Example GPU X"):
        selection.study(both, "amp")
    for wanted in ("gpu x", make.GPUS.key, make.GPUS.name):
        assert {r.environment.machine for r in selection.study(both, "amp", machine=wanted).records} == {make.GPUS}
    with pytest.raises(LedgerError, match="'example' fits 2 machines"):
        selection.study(both, "amp", machine="example")
    with pytest.raises(LedgerError, match="'cray' is not in the records"):
        selection.study(both, "amp", machine="cray")


def test_run_ids_select_what_a_call_asked_for() -> None:
    records = make.sets({"bf16": (BF16, 1.5), "seed 1": (RunConfig(seed=1), 1.0)})
    common = {"role": "note", "set_id": "", "status": "left out", "baseline_id": RunConfig().run_id}
    earlier = make.record(RunConfig(seed=1), label="seed 1", reason="of an earlier call", **common)
    general = make.record(RunConfig(), label="fp16", reason="needs a CUDA device", **common)
    found = selection.study([*records, earlier, general], "amp", run_ids=[RunConfig().run_id, BF16.run_id])
    assert {r.label for r in found.records} == {"fp32", "fp32 again", "bf16", "fp16"}
    assert selection.study(records, "amp", run_ids=[BF16.run_id]).records == ()


def test_recommendation_takes_the_latest_cohort_of_each_experiment() -> None:
    records = make.sets({"bf16": (BF16, 1.5)}) + make.sets({}, experiment="workers", plan=Plan(turns=7))
    old = make.sets({}, code_version="old", environment=make.environment(date="2020-01-01T00:00:00+00:00"))
    assert selection.study(old + records, "recommendation").records == tuple(records)


def test_a_comparison_takes_nothing_from_others_that_share_its_baseline() -> None:
    base, one, two = RunConfig(), RunConfig(seed=1), RunConfig(seed=2)
    first = make.sets({"one": (one, 1.5)}, count=6, seed=1)
    second = make.sets({"two": (two, 1.1)}, count=4, seed=2)
    both = make.sets({"one": (one, 1.5), "two": (two, 1.1)}, count=2, seed=3)
    alone = make.sets({}, count=3, seed=4)
    lost = make.record(base, role="baseline", set_id="lost", status="crashed", reason="killed")
    records = [*first, *second, *both, *alone, lost]
    found = selection.study(records, "amp", run_ids={base.run_id, one.run_id}).records
    assert {r.set_id for r in found} == {r.set_id for r in (*first, *both, lost)}
    assert {r.label for r in found if r.role == "candidate"} == {"one"}
    only = selection.study(records, "amp", run_ids={base.run_id}).records
    assert {r.set_id for r in only} >= {r.set_id for r in alone}, "against itself: the sets without a rival"
    assert not {r.set_id for r in only} & {r.set_id for r in (*first, *second, *both)}
