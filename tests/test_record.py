"""What two records of a set say of each other, which sets do not count, and which records make a study."""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import pytest
import records as make
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import selection
from ddpm_lab.plan import PRESETS, Plan
from ddpm_lab.record import LedgerError, Machine, RunRecord, Window, crowded, set_log_ratio, turn_log_ratios

BOTH_CORES = RunConfig()
WINDOW = make.sets({}, count=1, turns=1)[0].windows[0]
SECONDS = st.lists(st.tuples(st.floats(0.2, 5.0), st.floats(0.2, 5.0)), min_size=1, max_size=8)


def window(turn: int, seconds: float, *, images: int = 10, **changes: Any) -> Window:
    return dataclasses.replace(WINDOW, turn=turn, seconds=seconds, images=images, **changes)


def record(*windows: Window) -> RunRecord:
    return make.record(RunConfig(), windows=windows)


def of(seconds: list[float]) -> RunRecord:
    return record(*(window(turn, value) for turn, value in enumerate(seconds)))


@given(SECONDS, st.floats(0.01, 100))
def test_what_slows_both_sides_of_a_turn_alike_changes_nothing(pairs: list[tuple[float, float]], scale: float) -> None:
    base, other = (list(side) for side in zip(*pairs, strict=True))
    scales = [scale ** (i / len(pairs)) for i in range(len(pairs))]
    drifting = [[s * v for s, v in zip(scales, side, strict=True)] for side in (base, other)]
    plain = set_log_ratio(of(base), of(other))
    assert set_log_ratio(of(drifting[0]), of(drifting[1])) == pytest.approx(plain, abs=1e-9)
    assert set_log_ratio(of(other), of(base)) == pytest.approx(-plain, abs=1e-9)


def test_a_set_is_the_mean_over_equal_turns_and_the_twin_is_half_of_the_baseline() -> None:
    assert set_log_ratio(of([1.0, 2.0]), of([0.5, 1.0])) == pytest.approx(math.log(2))
    assert set_log_ratio(of([1.0] * 4), of([1.0, 1.0, 1.0, 16.0])) == pytest.approx(-math.log(2))
    assert set_log_ratio(record(window(0, 1.0)), record(window(0, 1.0, images=20))) == pytest.approx(math.log(2))
    base = record(window(0, 1.0), window(1, 9.0), window(3, 1.0))
    assert set_log_ratio(base, record(window(0, 0.5), window(2, 7.0))) == pytest.approx(math.log(2))
    for nothing in (record(window(3, math.nan), window(4, 1.0)), record(window(0, 1.0, images=0)), record()):
        assert math.isnan(set_log_ratio(base, nothing))
    base, twin, other = of([1.0, 2.0]), of([4.0, 2.0]), of([1.0, 1.0])
    assert set_log_ratio(base, other) == pytest.approx(math.log(2) / 2)
    assert turn_log_ratios(base, other, twin) == pytest.approx([math.log(2), math.log(2)])
    only_second = record(window(1, 2.0))
    assert turn_log_ratios(base, other, only_second) == pytest.approx([math.log(2)]), "a turn that all have"


# --- which sets do not count: two usable cores, unless a test says otherwise -----------------------------------------


def loaded(*loads: float | None, config: RunConfig = BOTH_CORES, **changes: Any) -> RunRecord:
    """A record whose turns had so much taken by others."""
    windows = tuple(window(turn, 1.0, others_cores=load, **changes) for turn, load in enumerate(loads))
    return make.record(config, windows=windows)


def test_a_turn_is_crowded_when_threads_and_others_exceed_the_cores_by_a_quarter() -> None:
    for threads, most in ((0, 0.25), (1, 1.25), (2, 0.25)):  # 0: as many threads as cores
        config = RunConfig(threads=threads)
        assert crowded([loaded(most, config=config)])
        assert not crowded([loaded(most - 0.001, config=config)])
    ranks = RunConfig(world_size=2, global_batch_size=32, threads=1)
    assert crowded([loaded(0.25, config=ranks)]), "threads of all ranks count"
    assert crowded([loaded(0.0, stolen_seconds=0.125, state={"watched_seconds": 0.5})]), "the hypervisor counts too"
    assert not crowded([loaded(0.0, stolen_seconds=0.124, state={"watched_seconds": 0.5})])
    assert not crowded([loaded(0.0, stolen_seconds=9.0)]), "how long it was watched is unknown"


def test_a_set_does_not_count_with_more_than_a_fifth_of_its_time_crowded() -> None:
    for full, turns, crowds in ((1, 5, False), (2, 5, True), (2, 10, False), (3, 10, True)):
        assert crowded([loaded(*[1.0] * full, *[0.0] * (turns - full))]) == crowds
    six = loaded(1.0, *[0.0] * 5)
    slow = dataclasses.replace(six, windows=(dataclasses.replace(six.windows[0], seconds=60.0), *six.windows[1:]))
    assert not crowded([six])
    assert crowded([late := loaded(1.0, 1.0)], to_come=7)
    assert not crowded([late], to_come=8), "it may still count"
    assert crowded([six, slow]), "a crowded turn weighs as long as it took, whichever side was slow"
    assert crowded([loaded(0.5), loaded(0.0)]), "a turn is judged by the mean over its windows"
    assert not crowded([loaded(0.49), loaded(0.0)])
    shared = RunConfig(world_size=4, global_batch_size=32, oversubscribe=True)
    for calm in (loaded(None, None), loaded(9.0, config=shared), of([1e6, 1e-6]), record()):
        assert not crowded([calm]), "unknown load, ranks that share cores, and time alone crowd nothing"


@pytest.mark.parametrize(
    ("state", "crowds"),
    [
        ({"gpu_others_percent": 10.0}, True),
        ({"gpu_others_percent": 9.9}, False),
        ({"gpu_others": 3.0, "gpu_others_bytes": 9e9, "gpu_others_changed_bytes": 0.0}, False),
        ({"gpu_others_percent": None, "gpu_others_changed_bytes": 5.0}, True),
        ({"gpu_others_percent": None, "gpu_others_changed_bytes": None}, False),
    ],
)
def test_a_gpu_is_crowded_by_another_process_that_computes_on_it(state: dict[str, float | None], crowds: bool) -> None:
    assert crowded([loaded(0.0, config=RunConfig(device="cuda"), state=state)]) == crowds
    assert not crowded([loaded(0.0, config=BOTH_CORES, state=state)]), "a CPU's set does not care"


def test_a_gpu_is_crowded_by_who_takes_the_cores_that_launch_its_kernels() -> None:
    """Of sixteen cores two are enough for a rank, whatever else is at work."""
    many = make.environment(dataclasses.replace(make.GPUS, usable_cores=16))
    for load, crowds in ((14.24, False), (14.25, True)):
        one = loaded(load, config=RunConfig(device="cuda"))
        assert crowded([dataclasses.replace(one, environment=many)]) == crowds
    assert crowded([loaded(0.25, config=RunConfig(device="cuda"))]), "of two cores"


# --- machines and cohorts ---------------------------------------------------------------------------------------------


def test_machines_and_cohorts_compare_by_what_matters_and_have_names_for_people() -> None:
    base = make.GPUS
    changes: dict[str, Any] = {"cpu": "another", "usable_cores": 31, "gpus": base.gpus[:-1], "driver": "601"}
    changes |= {"torch": "2.16", "python": "3.12"}
    assert set(changes) == {f.name for f in dataclasses.fields(Machine)}
    keys = {dataclasses.replace(base, **{name: value}).key for name, value in changes.items()}
    assert len(keys | {base.key}) == len(changes) + 1
    assert dataclasses.replace(make.CPU, usable_cores=1).name == "Example CPU 9000, 1 core, no GPU"
    mixed = dataclasses.replace(base, gpus=("B", "A", "B"))
    assert mixed.name == "1 x A + 2 x B, Example CPU 9000, 32 cores"
    record, turned = make.record(RunConfig(data="here")), Plan(turns=31)
    others: list[dict[str, Any]] = [
        *({"code_version": "other"}, {"config": RunConfig(data_sha256="00")}),
        *({"plan": Plan(window_steps=6)}, {"environment": make.environment(make.GPUS)}),
    ]
    assert len({dataclasses.replace(record, **change).cohort for change in ({}, *others)}) == 5
    same = dataclasses.replace(record, set_id="another", config=RunConfig(seed=5, data="elsewhere"), plan=turned)
    assert same.cohort == record.cohort


# --- from records to studies ---

BF16 = RunConfig(precision="bf16")


def test_trials_come_with_the_speeds_of_their_data_whatever_the_plan() -> None:
    late = make.environment(date="2026-02-01T00:00:00+00:00")
    speeds = make.sets({"bf16": (BF16, 1.5)})
    trials = make.trials({"bf16": (BF16, 0.0)}, seeds=3)
    later = make.trials({"bf16": (BF16, 0.0)}, seeds=1, images=320, plan=Plan(turns=2), environment=late)
    edited = make.trials({"bf16": (BF16, 0.0)}, seeds=1, code_version="old")
    found = selection.study([*trials, *speeds, *later, *edited], "amp")
    assert list(found.records) == speeds
    assert sorted(map(id, found.trials)) == sorted(map(id, [*trials, *later, *edited]))


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
    workers = make.sets({}, experiment="workers", plan=Plan(turns=7))
    assert selection.study([*old, *new, *workers], "recommendation").records == (*new, *workers), "of each experiment"
    claims = make.sets({"bf16": (BF16, 1.4)}, experiment="claims")
    shown = selection.study([*claims, *new], "claims")
    assert (list(shown.records), list(shown.beside)) == (claims, new)


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
