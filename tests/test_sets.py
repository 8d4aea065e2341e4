"""Sets of real groups: roles, turns, equal work, planted differences, failures as rows, refused labels."""

from __future__ import annotations

import dataclasses
import math

import pytest
from conftest import busy_config

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.seat import Instrument, Member
from ddpm_lab.measure.sets import measure_alone, measure_set, mechanism_only
from ddpm_lab.plan import Plan


def members(*candidates: tuple[str, RunConfig], baseline: RunConfig | None = None) -> list[Member]:
    base = baseline or busy_config()
    return [
        Member("baseline", "busy", base),
        Member("twin", "busy again", base),
        *(Member("candidate", label, config) for label, config in candidates),
    ]


def test_a_set_holds_every_member_with_equal_work(instrument: Instrument, short_plan: Plan) -> None:
    records = measure_set(
        instrument,
        experiment="test",
        family="busy",
        plan=short_plan,
        members=members(("2 ranks", busy_config(2)), ("longer", busy_config(micro_steps=40))),
    )
    assert [(r.role, r.status) for r in records] == [
        ("baseline", "ok"),
        ("twin", "ok"),
        ("candidate", "ok"),
        ("candidate", "ok"),
    ]
    assert len({r.set_id for r in records}) == 1
    assert {r.baseline_id for r in records} == {records[0].run_id}
    assert len({(w.turn, w.position) for r in records for w in r.windows}) == 4 * short_plan.turns
    assert len({w.images for r in records for w in r.windows}) == 1
    for r in records:
        assert len(r.ranks) == r.config.world_size
        assert r.ranks[0].threads * r.config.world_size <= max(instrument.usable_cores, r.config.world_size)
        for w in r.windows:
            assert w.images == w.steps * r.config.global_batch_size
            # throughput a second way: the steps fill the window
            assert math.fsum(w.step_seconds) == pytest.approx(w.seconds, rel=0.02)
            assert sum(w.rank_seconds) <= w.seconds * r.config.world_size * 1.001
        trained = sum(rank.images or 0 for rank in r.ranks)
        timed = sum(w.images for w in r.windows)
        assert trained >= timed + r.warmup_steps * r.config.global_batch_size
        assert {"start", "build", "warmup", "steady", "teardown"} <= set(r.stages)
        assert all(len(rank.losses) == sum(w.steps for w in r.windows) for rank in r.ranks)


def test_turns_are_computed_from_what_start_and_turns_cost(instrument: Instrument, short_plan: Plan) -> None:
    plan = dataclasses.replace(short_plan, turns=0)
    asked: list[tuple[float, float]] = []

    def turns(start_seconds: float, turn_seconds: float) -> int:
        asked.append((start_seconds, turn_seconds))
        return 3

    pair = members()
    records = measure_set(instrument, experiment="test", family="busy", plan=plan, members=pair, turns=turns)
    ((start, turn),) = asked
    assert [(r.plan.turns, len(r.windows)) for r in records] == [(3, 3)] * 2
    assert {r.cohort for r in records} == {dataclasses.replace(records[0], plan=short_plan).cohort}
    built = sum(seconds for r in records for name, seconds in r.stages.items() if name in ("start", "build", "warmup"))
    assert start >= 0.5 * built
    assert turn >= 2 * plan.window_seconds, "both windows, and what lies between them"
    measure_set(instrument, experiment="test", family="busy", plan=short_plan, members=pair, turns=turns)
    assert len(asked) == 1, "a plan that has turns keeps them"


def test_the_primary_candidate_is_marked_and_side_by_side_no_load_is_recorded(
    instrument: Instrument, short_plan: Plan
) -> None:
    first, second = members()
    other = dataclasses.replace(members(("longer", busy_config(micro_steps=40)))[2], primary=True)
    records = measure_set(instrument, experiment="test", family="busy", plan=short_plan, members=[first, second, other])
    assert [r.primary for r in records] == [False, False, True]
    loads = {(w.others_cores, w.stolen_seconds) for r in records for w in r.windows}
    assert loads == {(None, None)}, "tests that measure at once would crowd each other"


@pytest.mark.slow
def test_failures_are_rows_and_the_rest_goes_on(instrument: Instrument, short_plan: Plan) -> None:
    records = measure_set(
        instrument,
        experiment="test",
        family="busy",
        plan=short_plan,
        members=members(
            ("raises", busy_config(fault="raise", fault_step=3)),
            ("diverges", busy_config(fault="nan")),
            ("hangs", busy_config(fault="hang", fault_step=15)),
            ("lies", busy_config(says=(("precision", "bf16"),))),
            ("fine", busy_config(micro_steps=21)),
        ),
    )
    rows = {r.label: r for r in records}
    assert {label: r.status for label, r in rows.items()} == {
        "busy": "ok",
        "busy again": "ok",
        "raises": "crashed",
        "diverges": "diverged",
        "hangs": "timed out",
        "lies": "refused",
        "fine": "ok",
    }
    assert rows["lies"].reason == "the label says precision fp32, rank 0 ran with bf16"
    assert "planted fault" in rows["raises"].witness["traceback"]
    assert all(not r.windows for r in records if r.status != "ok")
    assert len(rows["fine"].windows) == short_plan.turns


@pytest.mark.slow
def test_a_set_without_a_living_candidate_ends_after_one_turn(instrument: Instrument, short_plan: Plan) -> None:
    pair = members(("raises", busy_config(fault="raise", fault_step=0)))
    records = measure_set(instrument, experiment="test", family="busy", plan=short_plan, members=pair)
    assert [(r.status, len(r.windows)) for r in records] == [("ok", 1), ("ok", 1), ("crashed", 0)]


LIES: list[tuple[str, tuple[str, object], str]] = [
    ("world size", ("world_size", 2), "the label says world_size 1, rank 0 ran with 2"),
    ("device", ("device", "cuda:0"), "the label says device cpu, rank 0 ran on cuda:0"),
    ("precision", ("precision", "bf16"), "the label says precision fp32, rank 0 ran with bf16"),
    ("compile, fallen back", ("compile", "whole"), "the label says compile off, rank 0 ran with whole"),
    ("workers", ("loader_workers", 3), "the label says loader_workers 0, rank 0 ran with 3"),
    ("batch", ("images", 1), "the label says 8 images a step on a rank"),
    ("source of data", ("data_sha256", "other"), "the label says data_sha256 , rank 0 ran with other"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("says", "words"), [lie[1:] for lie in LIES], ids=[lie[0] for lie in LIES])
def test_each_mislabelled_run_is_refused(
    instrument: Instrument, short_plan: Plan, says: tuple[str, object], words: str
) -> None:
    lying = Member("cold", "lying", busy_config(says=(says,)))
    record = measure_alone(instrument, experiment="test", family="busy", plan=short_plan, member=lying)
    assert record.status == "refused"
    assert record.reason is not None
    assert words in record.reason
    assert not record.windows


@pytest.mark.slow
def test_a_run_that_consumes_other_images_while_it_is_timed_is_refused(
    instrument: Instrument, short_plan: Plan
) -> None:
    """The eighth: honest while it was asked, and then not."""
    lying = busy_config(skips_after=short_plan.warmup_steps + 6)
    records = measure_set(
        instrument, experiment="test", family="busy", plan=short_plan, members=members(("lying", lying))
    )
    (record,) = [r for r in records if r.label == "lying"]
    assert record.status == "refused"
    assert record.reason is not None
    assert "images a step on a rank" in record.reason


def test_without_a_baseline_nothing_else_is_kept(instrument: Instrument, short_plan: Plan) -> None:
    broken = busy_config(fault="raise", fault_step=1)
    records = measure_set(
        instrument,
        experiment="test",
        family="busy",
        plan=short_plan,
        members=members(("fine", busy_config()), baseline=broken),
    )
    assert {r.status for r in records} == {"crashed"}
    assert {r.role for r in records} <= {"baseline", "twin"}


@pytest.mark.alone
@pytest.mark.slow
def test_planted_work_shows_in_the_ratio(instrument: Instrument) -> None:
    """Half as much work again takes half as long again; a wide tolerance, since one set is no measurement."""
    plan = Plan(turns=6, window_seconds=0.2)
    one = dataclasses.replace(instrument, usable_cores=1)
    records = measure_set(
        one,
        experiment="test",
        family="busy",
        plan=plan,
        members=members(("more", busy_config(micro_steps=600)), baseline=busy_config(micro_steps=400)),
    )
    base, _, more = records
    logs = [math.log(m.seconds / b.seconds) for b, m in zip(base.windows, more.windows, strict=True)]
    assert math.exp(sum(logs) / len(logs)) == pytest.approx(1.5, rel=0.2)


def test_one_group_alone(instrument: Instrument, short_plan: Plan) -> None:
    member = Member("cold", "compiled", busy_config())
    record = measure_alone(instrument, experiment="test", family="busy", plan=short_plan, member=member)
    assert (record.role, record.status, record.windows) == ("cold", "ok", ())


def test_what_shows_nothing_about_speed() -> None:
    assert not mechanism_only(RunConfig(), machine_has_gpu=False)
    assert mechanism_only(RunConfig(), machine_has_gpu=True)
    assert mechanism_only(RunConfig(oversubscribe=True), machine_has_gpu=False)
    assert not mechanism_only(RunConfig(device="cuda"), machine_has_gpu=True)
