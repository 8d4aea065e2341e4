"""Sets of real groups: roles, turns, equal work, compile caches, failures as rows, refused labels."""

import dataclasses
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import records as make
from conftest import busy_config

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import sets
from ddpm_lab.measure.sets import CACHE_DAYS, Instrument, Member, Seat, measure_set
from ddpm_lab.plan import Plan
from ddpm_lab.record import RunRecord


def measured(instrument: Instrument, plan: Plan, *candidates: tuple[str, RunConfig], **of: Any) -> list[RunRecord]:
    base = of.pop("baseline", busy_config())
    members = [
        Member("baseline", "busy", base),
        Member("twin", "busy again", base),
        *(Member("candidate", label, config) for label, config in candidates),
    ]
    return measure_set(instrument, **{"experiment": "test", **of}, family="busy", plan=plan, members=members)


def test_a_set_holds_every_member_with_equal_work(instrument: Instrument, short_plan: Plan) -> None:
    """Turns are computed from what start and turns cost; a plan that has them keeps them."""
    asked: list[tuple[float, float]] = []

    def turns(start_seconds: float, turn_seconds: float) -> int:
        asked.append((start_seconds, turn_seconds))
        return 3

    plan = dataclasses.replace(short_plan, turns=0)
    records = measured(instrument, plan, ("2 ranks", busy_config(2)), turns=turns)
    ((start, turn),) = asked
    built = sum(seconds for r in records for name, seconds in r.stages.items() if name in ("start", "build", "warmup"))
    assert start >= 0.5 * built
    assert turn >= 4 * plan.window_seconds, "all windows, and what lies between them"
    assert [r.role for r in records] == ["baseline", "twin", "candidate"]
    assert {(r.status, r.plan.turns, len(r.windows)) for r in records} == {("ok", 3, 3)}
    assert {r.mechanism_only for r in records} == {True}, "they may have more ranks than cores"
    assert len({r.set_id for r in records}) == len({r.baseline_id for r in records} | {records[0].run_id}) == 1
    assert len({(w.turn, w.position) for r in records for w in r.windows}) == 3 * 3
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
        assert trained >= sum(w.images for w in r.windows) + r.warmup_steps * r.config.global_batch_size
        assert {"start", "build", "warmup", "steady", "teardown"} <= set(r.stages)
        assert all(len(rank.losses) == sum(w.steps for w in r.windows) for rank in r.ranks)


def test_a_cpu_beside_a_gpu_is_no_answer_but_for_a_users_own_code(
    instrument: Instrument, short_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = Member("baseline", "busy", dataclasses.replace(busy_config(), oversubscribe=False))
    rows = [(make.CPU, "amp", False), (make.GPUS, "amp", True), (make.GPUS, "compare", False)]
    for machine, experiment, mechanism in rows:
        monkeypatch.setattr(sets, "environment", lambda machine=machine: make.environment(machine))
        run = sets._Set(instrument, [member], short_plan, {"experiment": experiment, "family": "busy"})
        assert run.record(run.seats[0]).mechanism_only is mechanism


def test_failures_are_rows_and_the_rest_goes_on(
    instrument: Instrument, short_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sets, "in_lab", bool)  # so that a hang is noticed early
    records = measured(
        instrument,
        dataclasses.replace(short_plan, window_steps=20),  # however slow steps are here, a window reaches the hang
        ("raises", busy_config(fault="raise", fault_step=3)),
        ("diverges", busy_config(fault="nan")),
        ("hangs", busy_config(fault="hang", fault_step=40)),
        ("lies", busy_config(says=(("precision", "bf16"),))),
        ("lies later", busy_config(skips_after=short_plan.warmup_steps + 6)),
        ("fine", busy_config(micro_steps=21)),
    )
    rows = {r.label: r for r in records}
    assert [r.status for r in records[2:]] == ["crashed", "diverged", "timed out", "refused", "refused", "ok"]
    assert rows["lies"].reason == "the label says precision fp32, rank 0 ran with bf16"
    assert "images a step on a rank" in str(rows["lies later"].reason)
    assert "planted fault" in rows["raises"].witness["traceback"]
    assert [len(r.windows) for r in records] == [short_plan.turns] * 2 + [0] * 5 + [short_plan.turns]


@pytest.mark.slow
def test_a_set_without_a_living_candidate_or_baseline_ends(instrument: Instrument, short_plan: Plan) -> None:
    broken = busy_config(fault="raise", fault_step=0)
    records = measured(instrument, short_plan, ("raises", broken))
    assert [(r.status, len(r.windows)) for r in records] == [("ok", 1), ("ok", 1), ("crashed", 0)]
    records = measured(instrument, short_plan, ("fine", busy_config()), baseline=broken)
    assert {r.status for r in records} == {"crashed"}
    assert {r.role for r in records} <= {"baseline", "twin"}


@pytest.mark.slow
def test_a_set_that_cannot_count_any_more_ends_after_its_turn(
    instrument: Instrument, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sets, "crowded", lambda kept, to_come: len(kept) == 2 and to_come == 1)
    plan = Plan(turns=3, window_steps=2)
    assert [len(r.windows) for r in measured(instrument, plan, gives_up=True)] == [2, 2]


@pytest.mark.alone
@pytest.mark.slow
def test_planted_work_shows_in_the_ratio(instrument: Instrument) -> None:
    """Half as much work again takes half as long again; a wide tolerance, since one set is no measurement."""
    one = dataclasses.replace(instrument, usable_cores=1)
    more, base = busy_config(micro_steps=600), busy_config(micro_steps=400)
    records = measured(one, Plan(turns=6, window_seconds=0.2), ("more", more), baseline=base)
    logs = [math.log(m.seconds / b.seconds) for b, m in zip(records[0].windows, records[2].windows, strict=True)]
    assert math.exp(sum(logs) / len(logs)) == pytest.approx(1.5, rel=0.2)


@pytest.mark.slow
def test_groups_that_do_not_fit_on_the_card_together_take_turns_alone(
    instrument: Instrument, short_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer turns, also where they were found not to fit after their number was chosen."""

    def together(run: Any) -> None:
        run.plan = dataclasses.replace(run.plan, turns=40)
        raise sets._DoesNotFitTogether

    monkeypatch.setattr(sets, "TURNS_ALONE", 1)
    with monkeypatch.context() as full:
        full.setattr(Seat, "card_share", 0.8)
        found = [measured(instrument, short_plan)]
    monkeypatch.setattr(sets._Set, "together", together)
    found.append(measured(instrument, dataclasses.replace(short_plan, turns=0)))
    for records, turns in zip(found, (short_plan.turns, 1), strict=True):
        assert [(r.status, r.plan.turns, len(r.windows)) for r in records] == [("ok", turns, turns)] * 2
        assert len({w.images for r in records for w in r.windows}) == 1
        assert all(r.stages["start"] > 0 for r in records)


COMPILED = dataclasses.replace(busy_config(), compile="whole")


def start(instrument: Instrument, role: str, key: str = "a" * 12) -> tuple[str | None, Path]:
    """Choose caches as a group does and fill them as the compiler does; returns how they were, and the folder."""
    code = dataclasses.replace(instrument.code, key=key)
    seat = Seat(Member(role, "compiled", COMPILED), Plan(), dataclasses.replace(instrument, code=code))
    environment = seat._compile_cache()
    # Nothing is timed while an empty cache is filled.
    threads = instrument.usable_cores if seat.compile_cache == "cold" else 1
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == str(threads)
    inductor = Path(environment["TORCHINDUCTOR_CACHE_DIR"])
    assert inductor.exists() == (seat.compile_cache == "warm")
    inductor.mkdir(exist_ok=True)
    inductor.with_name("filled").touch()
    return seat.compile_cache, inductor


def test_a_cold_compile_starts_with_empty_caches_and_sets_start_from_what_it_left(
    instrument: Instrument, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [start(instrument, role) for role in ("cold", "cold", "candidate")]
    assert [cache for cache, _ in found] == ["cold", "cold", "warm"]
    with monkeypatch.context() as elsewhere:  # of a checkout that two machines share
        elsewhere.setattr(sets, "machine", lambda: make.CPU)
        assert start(instrument, "candidate")[0] == "cold"
    assert start(instrument, "candidate")[0] == "warm"
    found[-1][1].with_name("filled").unlink()  # as a compile that was killed
    assert start(instrument, "candidate")[0] == "cold"


def test_caches_of_other_code_versions_are_removed_once_nobody_used_them_for_long(instrument: Instrument) -> None:
    root, then = instrument.cache / "compile", time.time() - (CACHE_DAYS + 1) * 86400
    old, young, stranger = folders = [root / name for name in ("1" * 12, "2" * 12, "ABCDEF012345")]
    for folder in folders:
        (folder / "run").mkdir(parents=True)
    for folder in (old, stranger):
        os.utime(folder, (then, then))
    start(instrument, "candidate")
    assert [folder.exists() for folder in folders] == [False, True, True]
    assert (young / "run").exists()
