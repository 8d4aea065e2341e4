"""Sets of real groups: roles, turns, equal work, compile caches, time budgets, failures as rows, refused labels."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import busy_config, code_of
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.config import OptimizerConfig, RunConfig
from ddpm_lab.measure.seat import CACHE_DAYS, Instrument, Member, Seat
from ddpm_lab.measure.sets import (
    BUDGET_SECONDS,
    balanced_orders,
    measure_alone,
    measure_set,
    mechanism_only,
    profile_alone,
    steps_of_windows,
    take_budget,
)
from ddpm_lab.plan import USUAL_TURNS, Plan
from ddpm_lab.record import RunRecord


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


def test_what_shows_nothing_about_speed() -> None:
    assert not mechanism_only(RunConfig(), machine_has_gpu=False)
    assert mechanism_only(RunConfig(), machine_has_gpu=True)
    assert mechanism_only(RunConfig(oversubscribe=True), machine_has_gpu=False)
    assert not mechanism_only(RunConfig(device="cuda"), machine_has_gpu=True)


@pytest.mark.parametrize("count", range(1, 8))
@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_a_whole_square_balances_positions_and_neighbours(count: int, seed: int) -> None:
    turns = count if count % 2 == 0 else 2 * count
    orders = balanced_orders(count, turns, seed)
    assert all(sorted(order) == list(range(count)) for order in orders)
    positions = Counter(pair for order in orders for pair in enumerate(order))
    assert positions == {(p, c): turns // count for p in range(count) for c in range(count)}
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert follows == dict.fromkeys(permutations(range(count), 2), turns // count)


@given(
    batches=st.lists(st.sampled_from([1, 6, 16, 32, 48, 128]), min_size=1, max_size=6),
    data=st.data(),
    seconds=st.floats(0.01, 2.0),
    least=st.integers(1, 20),
)
def test_all_configurations_process_the_same_images(
    batches: list[int], data: st.DataObject, seconds: float, least: int
) -> None:
    steps = data.draw(
        st.lists(st.floats(1e-4, 5.0), min_size=len(batches), max_size=len(batches)), label="step seconds"
    )
    prefetch = data.draw(st.lists(st.integers(0, 8), min_size=len(batches), max_size=len(batches)), label="prefetch")
    plan = Plan(window_seconds=seconds, window_steps=least)
    counts = steps_of_windows(plan, batches, steps, prefetch)
    assert len({count * batch for count, batch in zip(counts, batches, strict=True)}) == 1
    fewest = max(least, 20, 10 * max(prefetch)) if max(prefetch) > 1 else least
    assert min(counts) >= fewest


def test_the_fastest_fills_the_window() -> None:
    plan = Plan(window_seconds=0.4, window_steps=5)
    assert steps_of_windows(plan, [32, 32], [0.010, 0.020], [0, 0]) == [40, 40]
    # Half the batch, twice the steps; the images are those that 0.4 s of the fastest take.
    assert steps_of_windows(plan, [32, 16], [0.010, 0.010], [0, 0]) == [40, 80]


def test_a_prefetch_queue_lengthens_the_window_of_the_whole_set() -> None:
    plan = Plan(window_seconds=0.1, window_steps=5)
    assert steps_of_windows(plan, [32, 32], [0.1, 0.1], [0, 2]) == [20, 20]
    assert steps_of_windows(plan, [32, 32], [0.1, 0.1], [0, 1]) == steps_of_windows(plan, [32, 32], [0.1, 0.1], [0, 0])
    assert steps_of_windows(plan, [32, 32], [0.1, 0.1], [0, 4]) == [40, 40]


def test_the_slowest_window_is_held_to_ten_times_the_planned_one() -> None:
    plan = Plan(window_seconds=0.4, window_steps=5)
    (fast, slow) = steps_of_windows(plan, [32, 32], [0.001, 0.1], [0, 0])
    assert fast == slow == 40  # 400 would fill the fast one's window and take the slow one 40 s
    # The fewest steps come first: a cap must not leave a configuration with too few.
    assert steps_of_windows(plan, [32, 32], [0.001, 3.0], [0, 0]) == [5, 5]


COMPILED = dataclasses.replace(busy_config(), compile="whole")


def seat(instrument: Instrument, role: str, key: str = "a" * 12) -> Seat:
    code = dataclasses.replace(instrument.code, key=key)
    return Seat(Member(role, "compiled", COMPILED), Plan(), dataclasses.replace(instrument, code=code))


def start(sitting: Seat) -> Path:
    """Choose the caches as when a group starts, and fill them as the compiler does."""
    environment, filled = sitting._compile_cache()
    assert filled is not None
    inductor = Path(environment["TORCHINDUCTOR_CACHE_DIR"])
    assert not inductor.exists() or (inductor / "kernel").exists()
    inductor.mkdir(exist_ok=True)
    (inductor / "kernel").touch()
    return filled


def test_caches_of_a_cold_compile_are_removed_and_those_that_sets_start_from_stay(instrument: Instrument) -> None:
    first, second, candidate = (seat(instrument, role) for role in ("cold", "cold", "candidate"))
    warm = start(first)
    warm.touch()
    first.close()
    cold = start(second)
    assert cold.parent != warm.parent
    second.close()
    assert not cold.parent.exists()
    assert start(candidate) == warm
    candidate.close()
    assert warm.exists()
    assert [s.compile_cache for s in (first, second, candidate)] == ["cold", "cold", "warm"]


def age(folder: Path, days: float) -> None:
    then = time.time() - days * 86400
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (then, then), follow_symlinks=False)


def test_a_new_code_version_removes_caches_that_nobody_used_for_long(instrument: Instrument) -> None:
    root = instrument.cache / "compile"
    start(seat(instrument, "candidate")).touch()
    old, used, young = (root / (digit * 12) for digit in "123")
    strangers = [root / "notes", root / "ABCDEF012345", root.parent / ("4" * 12), root / "1234"]
    for folder in (old, used, young, *strangers):
        (folder / "run").mkdir(parents=True)
        (folder / "run" / "filled").touch()
        age(folder, CACHE_DAYS + 1)
    age(young, CACHE_DAYS - 1)
    (used / "run" / "filled").touch()
    start(seat(instrument, "candidate"))
    assert old.exists(), "only a new version looks"
    start(seat(instrument, "candidate", "b" * 12))
    assert not old.exists()
    assert all(folder.exists() for folder in (used, young, *strangers, root / ("a" * 12)))


@pytest.mark.parametrize("above", [False, True])
def test_nothing_that_a_link_leads_to_is_removed(instrument: Instrument, tmp_path: Path, above: bool) -> None:
    elsewhere = tmp_path / "elsewhere"
    target = elsewhere / ("1" * 12)
    (target / "run").mkdir(parents=True)
    age(elsewhere, CACHE_DAYS + 1)
    root = instrument.cache / "compile"
    if above:
        instrument.cache.mkdir()
        root.symlink_to(elsewhere)
    else:
        root.mkdir(parents=True)
        (root / target.name).symlink_to(target)
        os.utime(root / target.name, (0, 0), follow_symlinks=False)
    start(seat(instrument, "candidate"))
    assert (target / "run").exists()


@pytest.mark.parametrize(
    ("step_seconds", "prefetch", "settle"),
    [(0.01, 0, 2), (0.05, 0, 2), (0.1, 0, 1), (0.9, 0, 1), (1.0, 0, 0), (20.0, 0, 0), (20.0, 4, 4), (0.01, 8, 8)],
)
def test_long_steps_need_none_to_wake_up_and_prefetched_batches_are_always_used_up(
    instrument: Instrument, step_seconds: float, prefetch: int, settle: int
) -> None:
    sitting = seat(instrument, "candidate")
    sitting.warm_step_seconds, sitting.witness = step_seconds, [{"prefetch_batches": prefetch}]
    assert sitting.settle_steps == settle
    assert sitting.window_seconds(5) == pytest.approx((5 + settle) * step_seconds)


@pytest.mark.parametrize("step_seconds", [1e-5, 0.004, 0.03, 0.7, 9.0])
@pytest.mark.parametrize(("ema_every", "prefetch"), [(10, 0), (7, 0), (1, 4)])
def test_windows_hold_whole_cycles_and_end_in_time(step_seconds: float, ema_every: int, prefetch: int) -> None:
    asked: dict[str, Any] = {}

    class Group:
        pids = (1,)

        def budget(self, **values: Any) -> list[dict[str, Any]]:
            asked.update(values)
            return [{"memory": {"rss_bytes": 3}}, {"memory": {"rss_bytes": 5}}]

    instrument = cast("Instrument", None)
    config = RunConfig(purpose="profile", optimizer=OptimizerConfig(ema_every=ema_every))
    seat = Seat(Member("profile", "p", config), Plan(), instrument)
    seat.instrument = Instrument(code=code_of("lab_workloads:busy"), cache=Path(), usable_cores=2, data_name="")
    seat.group, seat.warm_step_seconds = cast("Any", Group()), step_seconds
    seat.witness = [{"prefetch_batches": prefetch}]
    taken = take_budget(seat)
    steps, rounds = asked["steps"], asked["rounds"]
    assert steps % ema_every == 0
    assert steps >= max(seat.plan.window_steps, 10 * prefetch)
    assert steps * step_seconds >= seat.plan.window_seconds * 0.999
    assert asked["settle"] >= prefetch
    assert 1 <= rounds <= USUAL_TURNS
    assert rounds == USUAL_TURNS or 2 * (rounds + 1) * steps * step_seconds > BUDGET_SECONDS
    assert rounds == 1 or 2 * rounds * steps * step_seconds <= BUDGET_SECONDS
    assert taken["steps"] == steps * rounds
    assert taken["state"]["rss_bytes"] == 5, "the largest rank's"
    assert taken["state"]["watched_seconds"] >= 0


@pytest.mark.slow
def test_a_profile_record_holds_the_budget_and_no_speed(instrument: Instrument, tmp_path: Path) -> None:
    workload = "lab_workloads:phased"
    config = RunConfig(workload=workload, purpose="profile", global_batch_size=8)
    record = measure_alone(
        replace(instrument, code=code_of(workload)),
        experiment="profile",
        family="phased",
        plan=Plan(turns=2, window_seconds=0.1, warmup_steps=5),
        member=Member("profile", "phased", config),
        work=profile_alone([tmp_path / "trace.json.gz"]),
    )
    assert (record.status, record.windows) == ("ok", ())
    record = RunRecord.from_dict(json.loads(json.dumps(record.as_dict())))
    assert record.profile is not None
    budget = record.profile["budget"]
    (rank,) = budget["ranks"]
    assert budget["state"]["rss_bytes"] <= record.ranks[0].peak_rss_bytes
    running, profiled = rank["unsynchronised"], rank["profiled"]
    # the trace saw the same phases; a step's sleeps and busy loops take as long under the profiler
    assert set(profiled["phases"]) == set(running["phases"])
    for phase in ("forward", "backward"):
        shares = (values["phases"][phase] / values["step_seconds"] for values in (running, profiled))
        assert next(shares) == pytest.approx(next(shares), abs=0.05)
    # the ranges of the phases are no operators
    assert not any(op["name"].startswith("phase") for op in record.profile["operators"])
