"""The configurations of the lost scaling, and what is planted in real ranks and found again."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import records as make
from conftest import code_of
from setups import setup

from ddpm_lab import plan
from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.explain.questions.lost_scaling import splits
from ddpm_lab.measure import hardware
from ddpm_lab.measure.sets import Instrument, Member, measure_set
from ddpm_lab.plan import Plan
from ddpm_lab.questions.lost_scaling import lost_scaling
from ddpm_lab.questions.multi_gpu import multi_gpu
from ddpm_lab.training.setting import Setup

OVERSUBSCRIBED = dataclasses.replace(setup(cores=2), oversubscribe=True)


def on_two(one: RunConfig) -> RunConfig:
    return dataclasses.replace(one, world_size=2)


@pytest.mark.parametrize(("device", "threads"), [("cpu", 2), ("cuda", 0)])
def test_each_configuration_has_its_own_thing_off(device: str, threads: int) -> None:
    one = RunConfig(device=device, global_batch_size=16, loader="files", loader_workers=2)
    family = lost_scaling(one, on_two(one), name="work", ranks_label="2 ranks", usable_cores=4)
    rows = dict(family.candidates)
    assert family.together
    assert family.baseline == dataclasses.replace(one, loader="still", loader_workers=0)
    assert set(rows["2 ranks"].differences(one)) == {"world_size"}
    assert set(rows[plan.NO_EXCHANGE].differences(rows["2 ranks"])) == {"exchange"}
    assert set(rows[plan.READY_BATCHES].differences(rows["2 ranks"])) == {"loader", "loader_workers"}
    assert set(rows[plan.ALL_OFF].differences(rows["2 ranks"])) == {"exchange", "loader", "loader_workers"}
    assert rows[plan.ONE_RANK] == one
    assert rows[plan.ONE_SMALL] == dataclasses.replace(family.baseline, global_batch_size=8)
    assert (plan.ONE_SMALL_THREADS in rows) == bool(threads)
    if threads:
        assert rows[plan.ONE_SMALL_THREADS] == dataclasses.replace(rows[plan.ONE_SMALL], threads=threads)


def test_it_is_measured_in_full_or_when_asked_for_with_a_profile_of_all_ranks() -> None:
    for preset, asked, there in (("full", None, True), ("full", False, False), ("quick", None, False)):
        found = multi_gpu(setup(preset, cores=4), lost_scaling=asked)
        assert any(f.name.endswith(plan.LOST) for f in found.families) == there
        assert len(found.profiles) == there
    found = multi_gpu(setup(gpus=8), lost_scaling=True, global_batch_sizes=[4, 64, 32])
    (family,) = (f for f in found.families if f.together)
    label, config = family.candidates[0]
    assert (label, config.world_size, config.global_batch_size) == ("8 GPUs", 8, 32), "the smallest that 8 can share"
    assert found.profiles == ((family.name, label, dataclasses.replace(config, purpose="profile")),)
    others = {f.baseline.run_id for f in found.families if f is not family}
    assert family.baseline.run_id not in others, "sets of the question would count as sets of the split"
    assert not multi_gpu(setup(cores=1), lost_scaling=True).profiles


def test_ranks_that_share_cores_say_so_in_every_part_and_in_the_profile() -> None:
    sharing = dataclasses.replace(setup(cores=2), oversubscribe=True)
    found = multi_gpu(sharing, world_sizes=[4], lost_scaling=True)
    assert found.profiles
    assert any(f.together for f in found.families)
    assert {(c.world_size, c.oversubscribe) for c in found.configurations} == {(1, False), (4, True)}


@pytest.mark.parametrize(
    ("machine", "asked", "split"),
    [
        (setup(cores=4), {"world_sizes": [1, 2, 4]}, ("4 ranks", 16)),
        (setup(gpus=6), {}, ("4 GPUs", 128)),
        (OVERSUBSCRIBED, {"world_sizes": [1, 2, 3], "global_batch_sizes": [24, 18]}, ("2 ranks", 18)),
        (OVERSUBSCRIBED, {"world_sizes": [1, 3], "global_batch_sizes": [18]}, ("3 ranks", 18)),
        (OVERSUBSCRIBED, {"world_sizes": [1, 2, 3], "global_batch_sizes": [16], "scaling": "weak"}, ("2 ranks", 16)),
    ],
)
def test_of_many_ranks_the_most_that_have_a_speed_and_a_batch_to_share_are_split(
    machine: Setup, asked: dict[str, Any], split: tuple[str, int]
) -> None:
    (family,) = (f for f in multi_gpu(machine, lost_scaling=True, **asked).families if f.together)
    label, config = family.candidates[0]
    assert (label, config.global_batch_size) == split


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"world_sizes": [1]}, "one rank alone was asked for: give world_sizes"),
        ({"world_sizes": [1, 2], "global_batch_sizes": [9], "scaling": "weak"}, "2 ranks cannot share a batch of 9"),
        ({"world_sizes": [1, 2, 3]}, "16 cannot be shared by 3 ranks: give a multiple"),
    ],
)
def test_what_cannot_be_split_is_refused_and_not_left_out_in_silence(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        multi_gpu(dataclasses.replace(OVERSUBSCRIBED, preset="smoke"), lost_scaling=True, **asked)


@pytest.mark.alone
@pytest.mark.slow
def test_what_is_planted_in_real_ranks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of known length, so that ranks do not fight for cores; each is of its own size."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    workload = "lab_workloads:waiting"
    planted = {"image": 0.008, "fixed": 0.040, "loader": 0.048, "slow": 0.032, "exchange": 0.072}
    one = RunConfig(workload=workload, global_batch_size=8, oversubscribe=True, options=tuple(planted.items()))
    cores = hardware.usable_cores()
    family = lost_scaling(one, on_two(one), name="waits", ranks_label="2 ranks", usable_cores=cores)
    instrument = Instrument(code=code_of(workload), cache=tmp_path, usable_cores=cores, data_name="none")
    members = [
        Member("baseline", family.baseline_label, family.baseline),
        *(Member("candidate", label, config) for label, config in family.candidates),
    ]
    short = Plan(turns=3, window_seconds=0.1, window_steps=2, warmup_steps=5)
    records = [
        # Ranks that wait do not share a core: what several of them show is a speed here.
        dataclasses.replace(r, mechanism_only=False)
        for _ in range(2)
        for r in measure_set(instrument, experiment="multi_gpu", family=family.name, plan=short, members=members)
    ]
    assert {r.status for r in records} == {"ok"}
    (found,) = splits(make.study(records, "multi_gpu"))
    expected = {
        "exposed communication": planted["exchange"],
        "waiting for data": planted["loader"] / 2,
        "slowest rank": planted["slow"],
        "smaller batch of a rank": planted["fixed"] / 2,
        "fewer threads for a rank": 0.0,
        "shared memory and cores": 0.0,
    }
    room = planted["fixed"] / 4  # what busy neighbours of the tests add to a step: below half of any part
    assert {p.name: p.seconds.value for p in found.parts} == pytest.approx(expected, abs=room)
    assert found.loss.value == pytest.approx(sum(expected.values()), abs=2 * room)
    assert abs(found.interaction.value) < 2 * room
