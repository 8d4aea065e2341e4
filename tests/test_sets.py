"""Sets of real groups: roles, turns, equal work, compile caches, failures as rows, refused labels."""

import dataclasses
import math
import os
import time
from collections import Counter
from contextlib import nullcontext
from itertools import pairwise, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import numpy as np
import pytest
import records as make
from conftest import busy_config
from hypothesis import given
from hypothesis import strategies as st
from recorded_noise import MACHINES, recorded
from scipy import special

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import sets, shortfall
from ddpm_lab.measure.group import Group, GroupFailed
from ddpm_lab.measure.sets import CACHE_DAYS, Instrument, Member, Slot, balanced_orders, measure_set, steps_of_windows
from ddpm_lab.measure.shortfall import best_turns, sets_that_resolve
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
        assert run.record(run.slots[0]).mechanism_only is mechanism


@pytest.mark.parametrize(
    ("first", "later", "expected"),
    [([0.6], 0.4, 3), ([0.6, 0.5], 0.4, 4), ([0.03], 0.02, 12), ([3.0, 0.2, 0.2, 0.4], 0.1, 10)],
)
def test_a_warm_up_ends_when_windows_agree(
    instrument: Instrument, first: list[float], later: float, expected: int
) -> None:
    """Slow steps are windows of their own; of fast ones ten at least are taken."""
    seconds = iter([*first, *[later] * 20])

    def window(*, steps: int, **_: Any) -> list[dict[str, Any]]:
        ends = np.cumsum([next(seconds) for _ in range(steps)]).tolist()
        return [{"start": 0.0, "step_ends": ends, "losses": [1.0] * steps}]

    slot = Slot(Member("baseline", "busy", busy_config()), Plan(), instrument)
    slot.group = cast(Any, SimpleNamespace(window=window))
    slot._warm_up()
    assert slot.warmup_steps == expected


@pytest.mark.parametrize(("seconds", "most"), [(0.02, 10), (0.4, 2), (0.75, 1), (1.5, 0)])
def test_untimed_steps_drawn_at_random_take_a_second_at_most(instrument: Instrument, seconds: float, most: int) -> None:
    slot, settled = Slot(Member("baseline", "busy", busy_config()), Plan(), instrument), list[int]()
    slot.warm_step_seconds = seconds

    def window(*, settle: int, **_: Any) -> list[dict[str, Any]]:
        settled.append(settle)
        report = {"start": 0.0, "end": seconds, "step_ends": [seconds], "data_seconds": 0.0, "losses": [1.0]}
        return [report | {"memory": {}}]

    slot.group = cast(Any, SimpleNamespace(window=window, suspended=False, pids=[]))
    for drawn in range(sets.FIRST_EXTRA + 1):
        slot.window(0, 0, 1, drawn)
    assert set(settled) == {slot.settle_steps + extra for extra in range(most + 1)}


def test_own_code_may_replace_the_clock_and_steps_that_take_no_time_are_a_failure(
    instrument: Instrument, short_plan: Plan
) -> None:
    stopped = measured(instrument, short_plan, ("stops", busy_config(stops_clocks=True)))[2]
    assert (stopped.status, len(stopped.windows)) == ("ok", short_plan.turns)
    assert all(w.seconds > 0 for w in stopped.windows)
    with pytest.raises(GroupFailed, match="its steps took no time by time"):
        sets.slowest([{"start": 3.0, "step_ends": [0.0, 0.0]}])


def test_threads_that_change_while_steps_are_timed_are_refused(
    instrument: Instrument, short_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sets, "WARMUP_SECONDS", 0.0)  # which ends after two steps
    changes = measured(instrument, short_plan, ("changes", busy_config(fault="threads", fault_step=3)))[2]
    assert (changes.status, changes.windows) == ("refused", ())
    assert "rank 0 changed its threads from" in str(changes.reason)


@pytest.mark.slow
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
def test_groups_that_do_not_fit_on_the_card_together_take_turns_alone(
    instrument: Instrument, short_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Slot, "card_share", 0.8)
    monkeypatch.setattr(sets, "TURNS_ALONE", 1)
    for planned, turns in ((short_plan, short_plan.turns), (dataclasses.replace(short_plan, turns=0), 1)):
        records = measured(instrument, planned)
        assert [(r.status, r.plan.turns, len(r.windows)) for r in records] == [("ok", turns, turns)] * 2
        assert len({w.images for r in records for w in r.windows}) == 1
        assert all(r.stages["start"] > 0 for r in records)


COMPILED = dataclasses.replace(busy_config(), compile="whole")


def start(instrument: Instrument, role: str, key: str = "a" * 12) -> tuple[str | None, Path]:
    """Choose caches as a group does and fill them as the compiler does; returns how they were, and the folder."""
    code = dataclasses.replace(instrument.code, key=key)
    slot = Slot(Member(role, "compiled", COMPILED), Plan(), dataclasses.replace(instrument, code=code))
    environment = slot._compile_cache()
    # Nothing is timed while an empty cache is filled.
    threads = instrument.usable_cores if slot.compile_cache == "cold" else 1
    assert environment["TORCHINDUCTOR_COMPILE_THREADS"] == str(threads)
    inductor = Path(environment["TORCHINDUCTOR_CACHE_DIR"])
    assert inductor.exists() == (slot.compile_cache == "warm")
    inductor.mkdir(exist_ok=True)
    inductor.with_name("filled").touch()
    return slot.compile_cache, inductor


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
    monkeypatch.setenv("XDG_CACHE_HOME", str(instrument.cache))
    for name in ("my project", "it's mine"):  # torch takes the name of a folder for words of its compiler's command
        there = dataclasses.replace(instrument, cache=instrument.cache / name)
        places = [start(there, role) for role in ("cold", "candidate")]
        assert [cache for cache, _ in places] == ["cold", "warm"]
        assert name not in str(places[0][1])


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


# --- orders, lengths and numbers of windows, and the noise that these follow from ---


@given(count=st.integers(1, 7), seed=st.integers(0, 2**24))
def test_a_whole_square_balances_positions_and_neighbours(count: int, seed: int) -> None:
    turns = count if count % 2 == 0 else 2 * count
    orders = balanced_orders(count, turns, seed)
    assert all(sorted(order) == list(range(count)) for order in orders)
    positions = Counter(pair for order in orders for pair in enumerate(order))
    assert positions == {(p, c): turns // count for p in range(count) for c in range(count)}
    follows = Counter(pair for order in orders for pair in pairwise(order))
    assert follows == dict.fromkeys(permutations(range(count), 2), turns // count)


configurations = st.tuples(st.sampled_from([1, 6, 16, 32, 48, 128]), st.floats(1e-4, 5.0), st.integers(0, 8))


@given(rows=st.lists(configurations, min_size=1, max_size=6), least=st.integers(1, 20))
def test_all_configurations_process_the_same_images(rows: list[tuple[int, float, int]], least: int) -> None:
    batches, steps, fewest = (list(values) for values in zip(*rows, strict=True))
    counts = steps_of_windows(Plan(window_steps=least), batches, steps, fewest)
    assert len({count * batch for count, batch in zip(counts, batches, strict=True)}) == 1
    assert min(counts) >= max(least, *fewest)


def test_the_fastest_fills_the_window_and_the_slowest_is_held_to_ten_times_it() -> None:
    plan = Plan(window_seconds=0.4, window_steps=5)
    assert steps_of_windows(plan, [32, 32], [0.010, 0.020], [0, 0]) == [40, 40]
    assert steps_of_windows(plan, [32, 16], [0.010, 0.010], [0, 0]) == [40, 80], "the images of the fastest in 0.4 s"
    assert steps_of_windows(plan, [32, 32], [0.001, 0.1], [0, 0]) == [40, 40], "400 would take the slow one 40 s"
    assert steps_of_windows(plan, [32, 32], [0.001, 3.0], [0, 0]) == [5, 5], "no cap leaves one with too few"
    assert steps_of_windows(plan, [32, 32], [0.1, 0.1], [0, 40]) == [40, 40], "a queue lengthens the whole set's"
    assert steps_of_windows(plan, [250, 256], [2.0, 2.0], [0, 0]) == [5, 5], "128 and 125 would take four minutes"


def half_width(sets: int, turns: int, within: float, between: float) -> float:
    """Of a 95 % interval of a comparison, by scipy's quantile of Student's t."""
    variance = shortfall.VARIANCE_OF_CANDIDATE * (between**2 + within**2 / turns)
    return float(special.stdtrit(sets - 1, 0.975)) * math.sqrt(variance / sets)


def test_turns_narrow_the_interval_most_for_the_time() -> None:
    for start, turn, within, between in ((1, 0.5, 0.1, 0.03), (20, 0.5, 0.1, 0.03), (6, 1, 0.05, 0.02)):
        turns = best_turns(start, turn, within, between)
        widths = [  # of the many sets of a long time
            half_width(int(1e5 / (start + t * turn)), t, within, between) for t in (turns // 2, turns, 2 * turns)
        ]
        assert min(widths) == widths[1]
    assert best_turns(20, 0.5, 0.1, 0.0) == shortfall.MOST_TURNS
    assert best_turns(1e-3, 0.5, 0.1, 0.1) == shortfall.LEAST_TURNS
    assert 6 * (10 + 0.5 * best_turns(10, 0.5, 0.1, 0.01, 120)) <= 120, "six sets fit into the time"
    assert best_turns(10, 0.5, 0.1, 0.03, 12) == shortfall.LEAST_TURNS


@given(effect=st.floats(0.01, 0.1), turns=st.integers(4, 60), within=st.floats(0.01, 0.2), between=st.floats(0, 0.1))
def test_so_many_sets_resolve_an_effect(effect: float, turns: int, within: float, between: float) -> None:
    sets = sets_that_resolve(effect, turns, within, between)
    assert sets >= 4
    assert half_width(sets, turns, within, between) <= 1.05 * math.log1p(effect) / 2
    assert sets < 6 or half_width(sets - 2, turns, within, between) > math.log1p(effect) / 2


@pytest.mark.parametrize("machine", MACHINES)
def test_recorded_sets_scatter_as_predicted_whole_and_cut_to_fewer_turns(machine: str) -> None:
    long = [row.twin for row in recorded(machine) if row.quiet and len(row.twin) == 12]
    assert len(long) >= 50
    within, between = shortfall.variances([list(v) for v in long])
    for turns in (2, 3, 4, 6, 12):
        pieces = [values[i : i + turns].mean() for values in long for i in range(0, 12, turns)]
        said = np.sqrt(2 * (between**2 + within**2 / turns))
        assert np.sqrt(np.mean(np.square(pieces))) == pytest.approx(said, rel=0.15), turns


@pytest.mark.parametrize(("nodes", "settles"), [(1, [10, 2]), (2, [10, 10])])
def test_a_window_comes_after_what_workers_prefetched_meanwhile(
    instrument: Instrument, nodes: int, settles: list[int]
) -> None:
    """In the start, and on other hosts, where they are not stopped, between turns too."""
    settled = list[int]()

    def window(**asked: Any) -> NoReturn:
        settled.append(asked["settle"])
        raise GroupFailed("crashed", "heard enough")

    files = RunConfig(loader="files", loader_workers=1, world_size=nodes, nodes=nodes)
    slot = Slot(Member("candidate", "files", files), Plan(), instrument)
    slot.group = cast("Any", SimpleNamespace(window=window, pids=()))
    slot.witness, slot.warm_step_seconds = [{"prefetch_batches": 2}], 0.5
    for turn in range(2):
        with pytest.raises(GroupFailed):
            slot.window(turn, 0, 4)
    assert settled == settles


@pytest.mark.parametrize(("steps", "period"), [(1, 2), (1, 4), (2, 3), (2, 6), (5, 6)])
def test_windows_time_what_happens_at_every_nth_step_as_often_as_it_happens(
    instrument: Instrument, monkeypatch: pytest.MonkeyPatch, steps: int, period: int
) -> None:
    """Whatever the number of steps from window to window: it and the warm-up are the same in all sets."""
    unseen = nullcontext(SimpleNamespace(others_cores=None, stolen_seconds=None, state={}))
    monkeypatch.setattr(Slot, "watched", lambda _: unseen)
    monkeypatch.setattr(sets, "environment", make.environment)
    timed, made = Counter[int](), 0

    def window(*, settle: int, steps: int, **_: object) -> list[dict[str, Any]]:
        nonlocal made
        timed.update(step % period for step in range(made + settle, made + settle + steps))
        made += settle + steps
        ends = {"end": float(steps), "step_ends": [1.0 + step for step in range(steps)]}
        return [{"start": 0.0, **ends, "losses": [1.0] * steps, "memory": {}, "data_seconds": 0.0}]

    for _ in range(100):
        made = 12  # in the warm-up
        member = Member("baseline", "busy", RunConfig())
        run = sets._Set(instrument, [member], Plan(), {"experiment": "test", "family": "busy"})
        run.slots[0].group = cast("Any", SimpleNamespace(window=window, pids=(), suspended=False))
        run.slots[0].warm_step_seconds = 0.15  # one settle step
        run._take_turns(Slot.window, {member: steps}, 8)
    shares = np.array([timed[phase] for phase in range(period)]) / timed.total()
    assert shares == pytest.approx(1 / period, rel=0.2)


def test_a_window_in_which_the_job_was_suspended_is_made_once_more(
    instrument: Instrument, short_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, Any]] = []
    window = Group.window

    def noting(group: Group, **how: Any) -> list[dict[str, Any]]:
        reports = window(group, **how)
        if how["stage"].startswith("measuring"):
            group.suspended = not made
            made.extend(reports)
        return reports

    monkeypatch.setattr(Group, "window", noting)
    records = measured(instrument, short_plan)
    kept = [w.start_seconds for r in records for w in r.windows]
    assert sorted(kept) == [round(report["start"], 6) for report in made[1:]]


def test_windows_outlast_what_loader_workers_hold_ready() -> None:
    def steps_of(prefetch_batches: int) -> int:
        config = SimpleNamespace(global_batch_size=8)
        how: dict[str, Any] = {"failure": None, "warm_step_seconds": 0.5, "config": config, "member": "it"}
        slot: Any = SimpleNamespace(prefetch_batches=prefetch_batches, **how)
        of: Any = SimpleNamespace(slots=[slot], plan=Plan())
        return sets._Set._steps(of)["it"]  # type: ignore[index]

    assert list(map(steps_of, (0, 1, 2, 4, 16))) == [1, 1, 4, 8, 32]
