"""The lost scaling: its configurations, records in which each part is planted, the slowest rank, and real ranks."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import records as make
from cells import by
from conftest import code_of
from setups import setup

from ddpm_lab import plan
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import phrases
from ddpm_lab.explain.selection import Study
from ddpm_lab.measure import hardware
from ddpm_lab.measure.sets import Instrument, Member, measure_set
from ddpm_lab.plan import Family, Plan
from ddpm_lab.questions import lost_scaling as question
from ddpm_lab.questions.lost_scaling import Split, excess_shares, lost_scaling, slowest_rank, splits
from ddpm_lab.record import RunRecord
from ddpm_lab.training.setting import Setup

BATCH, RANKS, IMAGE = 16, 2, 1.0
PARTS = {
    "communication": "exposed communication",
    "data": "waiting for data",
    "slow": "slowest rank",
    "fixed": "smaller batch of a rank",
    "threads": "fewer threads for a rank",
    "shared": "shared memory and cores",
    "interaction": "interaction",
}
# One rank pays for its data too, so that half of it is no loss; half of what is fixed is one.
LOST = {"data": 0.5, "fixed": 0.5}


def family_of(machine: Setup, **settings: Any) -> Family:
    found = lost_scaling(machine, [RANKS], [settings.pop("batch", BATCH)], settings)
    assert found is not None
    return found


FAMILY = family_of(setup(cores=2))


# --- planted losses ---------------------------------------------------------------------------------------------------


def steps(**plants: float) -> dict[str, float]:
    """Milliseconds of a step of each configuration, with planted losses; ``fixed`` is what no batch makes smaller."""
    p = {**dict.fromkeys(PARTS, 0.0), **plants}
    small = p["fixed"] + IMAGE * BATCH / RANKS
    off = small + p["threads"] + p["shared"] + p["slow"]
    many = off + p["communication"] + p["data"] + p["interaction"]
    one_off = p["fixed"] + IMAGE * BATCH
    return {
        "2 ranks": many,
        plan.NO_EXCHANGE: many - p["communication"],
        plan.READY_BATCHES: many - p["data"],
        plan.ALL_OFF: off,
        plan.ONE_OFF: one_off,
        plan.ONE_RANK: one_off + p["data"],
        plan.ONE_SMALL: small,
        plan.ONE_SMALL_THREADS: small + p["threads"],
    }


def measured(count: int = 6, noise: float = 0.001, seed: int = 0, /, **plants: float) -> list[RunRecord]:
    """Records of the family with planted losses, in milliseconds."""
    times = steps(**plants)
    base = times[plan.ONE_OFF]
    candidates = {
        label: (config, base * config.global_batch_size / BATCH / times[label]) for label, config in FAMILY.candidates
    }
    values: dict[str, Any] = {"baseline": FAMILY.baseline, "baseline_label": plan.ONE_OFF, "experiment": "multi_gpu"}
    values |= {"count": count, "set_noise": noise, "seed": seed, "step_seconds": base / 1e3}
    found = make.sets(candidates, family=FAMILY.name, **values)
    share = 1 - plants.get("slow", 0.0) / times[plan.ALL_OFF]
    return [_uneven(r, share) if r.label == plan.ALL_OFF else r for r in found]


def _uneven(record: RunRecord, share: float) -> RunRecord:
    """Rank 1 takes as long as the window, rank 0 a ``share`` of it."""
    windows = [dataclasses.replace(w, rank_seconds=(share * w.seconds, w.seconds)) for w in record.windows]
    return dataclasses.replace(record, windows=tuple(windows))


def study(*records: Sequence[RunRecord]) -> Study:
    return make.study([r for part in records for r in part], "multi_gpu")


def split(of: Study) -> Split:
    (found,) = splits(of)
    return found


def table(of: Study) -> dict[str, dict[str, str]]:
    return by(question.table(splits(of)), "Part")


def scaling() -> list[RunRecord]:
    """The question beside which the losses are shown."""
    two = {"2 ranks": (RunConfig(world_size=2), 1.5)}
    return make.sets(two, experiment="multi_gpu", baseline_label="1 rank")


@pytest.mark.parametrize("plant", PARTS)
def test_a_planted_loss_is_found_by_its_own_part_and_by_no_other(plant: str) -> None:
    found = split(study(measured(**{plant: 4.0})))
    expected = {name: 4.0 * LOST.get(key, 1.0) if key == plant else 0.0 for key, name in PARTS.items()}
    for p in (*found.parts, found["interaction"]):
        assert 1e3 * p.value == pytest.approx(expected[p.name], abs=0.15), p.name
        half = (p.high - p.low) / 2
        assert abs(p.value - expected[p.name] / 1e3) <= 2 * half, f"{p.name} is far outside its interval"
        assert half < 0.2e-3
    assert 1e3 * found["loss"].value == pytest.approx(sum(expected.values()), abs=0.15)
    assert 1e3 * found["ideal"].value == pytest.approx(steps(**{plant: 4.0})[plan.ONE_RANK] / 2, rel=0.02)


def test_what_is_no_part_of_the_loss_is_seldom_named() -> None:
    """Beside one that is, in sets with noise: of five that are none any in at most a twentieth."""
    named = [[p.name for p in split(study(measured(6, 0.02, seed, communication=4.0))).largest] for seed in range(60)]
    assert all(PARTS["communication"] in names for names in named)
    assert sum(len(names) > 1 for names in named) <= 3


def test_an_interaction_above_a_third_makes_the_split_unreliable() -> None:
    fine, bad = (splits(study(measured(communication=4.0, interaction=x))) for x in (1.0, 3.0))
    assert (fine[0].reliable, bad[0].reliable) == (True, False)
    lost = splits(study(measured(communication=2.0, slow=4.0)))
    assert question.headline(lost) == "Lost to slowest rank and exposed communication"
    assert [(p.name, p.note) for p in lost[0].largest] == [("slowest rank", "rank 1"), ("exposed communication", "")]
    assert "Lost" not in question.headline(bad) + question.headline(splits(study(measured())))


def test_with_too_few_sets_the_parts_are_shown_and_no_loss_is_claimed() -> None:
    of = study(measured(3, communication=4.0, slow=3.0))
    found, shown = split(of), table(of)
    assert found["loss"].low > 0, "an interval alone would claim it"
    assert found.doubt == shown["loss"]["Note"] != ""
    assert {p.note for p in found.parts} == {""}, "no rank is named"
    assert shown["exposed communication"]["Time in a step"].startswith("4.")
    assert {row["Share of the loss"] for row in shown.values()} == {phrases.DASH}
    assert split(study(measured(4, communication=4.0, slow=3.0))).doubt == ""


def test_a_part_that_could_not_be_measured_says_why_and_the_others_stay() -> None:
    values = {"family": FAMILY.name, "baseline_id": FAMILY.baseline.run_id, "experiment": "multi_gpu"}
    values |= {"role": "candidate", "label": plan.READY_BATCHES, "status": "oom", "reason": "no memory"}
    failed = make.record(dict(FAMILY.candidates)[plan.READY_BATCHES], **values)
    of = study([r for r in measured(communication=4.0) if r.label != plan.READY_BATCHES], [failed])
    assert 1e3 * split(of)["exposed communication"].value == pytest.approx(4.0, abs=0.15)
    lacking = split(of)["waiting for data"]
    assert (lacking.sets, lacking.note) == (0, f"not measured: {plan.READY_BATCHES} (no memory)")
    assert table(of)["interaction"]["Time in a step"] == "not measured"


# --- the slowest rank -------------------------------------------------------------------------------------------------

NOISE = 0.01


def ranked(seconds: npt.NDArray[np.float64], config: RunConfig) -> list[RunRecord]:
    """A record for each row of (sets, ranks) own seconds."""
    (base, *_) = make.sets({}, baseline=config, count=1, turns=1)
    (window,) = base.windows
    windows = [dataclasses.replace(window, seconds=max(own), rank_seconds=tuple(own), steps=1) for own in seconds]
    return [dataclasses.replace(base, windows=(w,)) for w in windows]


def noisy(rng: np.random.Generator, sets: int, ranks: int) -> npt.NDArray[np.float64]:
    return np.exp(rng.normal(0, NOISE, (sets, ranks)) + rng.normal(0, 0.1, (sets, 1)))


@pytest.mark.parametrize("ranks", [2, 8])
def test_identical_ranks_have_no_excess_and_are_rarely_named(ranks: int) -> None:
    rng, config = np.random.default_rng(ranks), RunConfig(world_size=ranks, global_batch_size=ranks)
    trials = [ranked(noisy(rng, 6, ranks), config) for _ in range(300)]
    means = np.array([np.mean(excess_shares(found)) for found in trials])
    assert abs(means.mean()) < 3 * means.std() / len(means) ** 0.5
    assert abs(means.mean()) < NOISE / 10, "chosen where it is measured, it would be half the noise"
    assert np.mean([slowest_rank(found) != "" for found in trials]) <= 0.05


# --- real ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.slow
def test_what_is_planted_in_real_ranks_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of known length, so that ranks do not fight for cores; each is of its own size."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    workload = "lab_workloads:waiting"
    planted = {"image": 0.008, "fixed": 0.040, "loader": 0.048, "slow": 0.032, "exchange": 0.072}
    cores = hardware.usable_cores()
    machine = setup(cores=cores, oversubscribe=True)
    family = family_of(machine, batch=8, workload=workload, options=tuple(planted.items()), oversubscribe=True)
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
    found = split(study(records))
    expected = {
        "exposed communication": planted["exchange"],
        "waiting for data": planted["loader"] / 2,
        "slowest rank": planted["slow"],
        "smaller batch of a rank": planted["fixed"] / 2,
        "fewer threads for a rank": 0.0,
        "shared memory and cores": 0.0,
    }
    room = planted["fixed"] / 4  # what busy neighbours of the tests add to a step: below half of any part
    assert {p.name: p.value for p in found.parts} == pytest.approx(expected, abs=room)
    assert found["loss"].value == pytest.approx(sum(expected.values()), abs=2 * room)
    assert abs(found["interaction"].value) < 2 * room


def test_a_slower_rank_is_named_with_its_excess() -> None:
    seconds = noisy(np.random.default_rng(0), 6, 16)
    seconds[:, 12] *= 1.1
    found = ranked(seconds, RunConfig(world_size=16, global_batch_size=16))
    assert np.mean(excess_shares(found)) == pytest.approx(1 - 1 / 1.1, abs=NOISE)
    assert np.isnan(excess_shares(found[:1])).all(), "no other set to say which it is"
    assert (slowest_rank(found), slowest_rank(found[:3])) == ("rank 12", ""), "a claim needs four sets"
