"""What the ledger holds: sets are complete or do not count, and failures that last are told from those that pass."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.held import Held
from ddpm_lab.plan import Fid, Plan

BASE, FAST = RunConfig(), RunConfig(precision="bf16")
SETS = make.sets({"bf16": (FAST, 1.5)}, count=3)


def test_a_set_counts_where_both_sides_and_the_twin_are_whole() -> None:
    assert len(Held(SETS).sets(BASE.run_id, FAST.run_id)) == 3
    assert len(Held(SETS).sets(BASE.run_id, BASE.run_id)) == len(Held(SETS).sets(BASE.run_id)) == 3
    without_twin = [r for r in SETS if not (r.role == "twin" and r.set_id == SETS[0].set_id)]
    assert len(Held(without_twin).sets(BASE.run_id, FAST.run_id)) == 2
    crashed = [dataclasses.replace(r, status="crashed") if r.role == "candidate" else r for r in SETS]
    assert len(Held(crashed).sets(BASE.run_id, FAST.run_id)) == 0
    assert len(Held(crashed).sets(BASE.run_id)) == 3
    assert len(Held(SETS).sets(FAST.run_id, BASE.run_id)) == 0, "another baseline is another comparison"


def test_failures_that_last_and_what_is_measured_alone() -> None:
    for status, lasts in (("oom", True), ("crashed", False)):
        held = Held([make.record(FAST, role="candidate", status=status, baseline_id=BASE.run_id)])
        assert (FAST.run_id in held.lasting) == lasts
        assert (held.met(BASE.run_id, FAST.run_id), held.met(FAST.run_id, BASE.run_id), held.any) == (
            True,
            False,
            False,
        )
        one = Held([dataclasses.replace(make.profile(BASE), status=status)])
        assert (one.settled(BASE.run_id, "profile"), one.any) == (lasts, False)
    held = Held()
    assert (held.settled(BASE.run_id, "profile"), held.any) == (False, False)
    held.records += [make.profile(BASE)]
    assert (held.settled(BASE.run_id, "profile"), held.any) == (True, True)
    held = Held(make.cold(FAST, [50.0, 60.0]))
    assert (held.compile_seconds, held.any) == ([50.0, 60.0], True)
    note = make.record(BASE, role="note", set_id="", label="fp16", status="left out", reason="needs a CUDA device")
    held = Held([note])
    assert held.noted(note)
    assert (held.noted(dataclasses.replace(note, reason="did not fit")), held.any) == (False, False)


def test_a_trial_without_the_fid_that_is_asked_for_is_not_there() -> None:
    trial = make.trials({}, seeds=1)[0]
    plain, measured = Held([trial]), Held([make.drew(trial, np.zeros((1, 4, 4, 3), dtype=np.uint8), fid=1.0)])
    asked = Fid(inception="weights.pth", sha256="ab" * 32, images=2_500)
    assert plain.trained(trial.run_id)
    assert not plain.trained(trial.run_id, asked)
    assert measured.trained(trial.run_id, dataclasses.replace(asked, inception="elsewhere.pth"))
    assert not measured.trained(trial.run_id, dataclasses.replace(asked, images=5_000))
    assert not measured.trained(trial.run_id, dataclasses.replace(asked, sha256="cd" * 32))
    failed = dataclasses.replace(trial, quality={**(trial.quality or {}), "fid": {"images": 2_500, "reason": "oom"}})
    assert not Held([failed]).trained(trial.run_id, asked)


def test_sets_count_together_only_in_their_own_family_and_where_all_took_part() -> None:
    two = RunConfig(world_size=2)
    both = make.sets({"bf16": (FAST, 1.5), "2 ranks": (two, 1.2)}, family="both", count=2, turns=2)
    held = Held([*make.sets({"bf16": (FAST, 1.5)}, family="one", count=6, turns=2), *both])
    ids = (FAST.run_id, two.run_id)
    assert len(held.sets(BASE.run_id, FAST.run_id)) == 8
    assert held.sets(BASE.run_id, *ids, family="both").keys() == {r.set_id for r in both}
    assert held.sets(BASE.run_id, *ids, family="one").keys() == set()
    assert len(held.sets(BASE.run_id, FAST.run_id, family="one")) == 6


def test_crowded_sets_are_kept_and_do_not_count() -> None:
    found = make.sets({"bf16": (FAST, 1.5)}, count=6, crowded=[1, 4], set_noise=0, turn_noise=0, family="f")
    held, ids = Held(found), list(dict.fromkeys(r.set_id for r in found))
    assert list(held.sets(BASE.run_id, FAST.run_id)) == [ids[i] for i in (0, 2, 3, 5)]
    assert held.log_ratios(BASE.run_id, FAST.run_id) == pytest.approx([math.log(1.5)] * 4)
    twin = Held(make.sets({"bf16": (FAST, 1.5)}, twin_ratio=1.1, count=1, set_noise=0, turn_noise=0))
    assert twin.log_ratios(BASE.run_id, BASE.run_id) == pytest.approx([math.log(1.1)])
    mean_of_both = math.log(1.5) - math.log(1.1) / 2
    assert twin.log_ratios(BASE.run_id, FAST.run_id) == pytest.approx([mean_of_both])
    assert len(Held(found, disturbed=True).sets(BASE.run_id)) == 6
    assert not Held(r for r in found if r.set_id == ids[1]).any
    assert Held(found[3:6]).turns(BASE.run_id, FAST.run_id) == Plan().turns


def test_a_set_that_is_read_in_parts_is_judged_when_it_is_whole() -> None:
    found = make.sets({"bf16": (FAST, 1.5)}, count=1)
    alone = [dataclasses.replace(w, others_cores=0.9) for w in found[2].windows]
    held = Held(found[:2])
    assert len(held.sets(BASE.run_id)) == 1
    held.records += [dataclasses.replace(found[2], windows=tuple(alone))]
    assert len(held.sets(BASE.run_id)) == 0, "0.3 cores of others in each turn, on average over three groups"


def test_turns_are_those_of_the_first_set_of_a_comparison() -> None:
    slow = RunConfig(compile="whole")
    one = make.sets({"bf16": (FAST, 1.5)}, count=1, plan=Plan(turns=9))
    other = make.sets({"compiled": (slow, 0.5)}, count=1, plan=Plan(turns=5), seed=1)
    held = Held([*one, *other])
    assert [held.turns(BASE.run_id, c.run_id) for c in (FAST, slow)] == [9, 5]
    assert held.turns(BASE.run_id, BASE.run_id) == 0, "no set has the baseline and its twin alone"
    assert Held(make.sets({}, count=1, plan=Plan(turns=3))).turns(BASE.run_id, BASE.run_id) == 3


def test_what_an_answer_rests_on() -> None:
    found = make.sets({"bf16": (FAST, 1.5)}, count=5, crowded=[0], set_noise=0, turn_noise=0)
    held = Held(found)
    rests_on = held.evaluated(BASE.run_id)
    assert rests_on["sets"] == list(held.sets(BASE.run_id))
    assert rests_on["log_ratios"] == {FAST.run_id: [round(math.log(1.5), 6)] * 4, "twin": [0.0] * 4}
    assert held.looked(BASE.run_id) == set()
    held.records += [make.record(BASE, role="look", set_id="", look={**rests_on, "sets": rests_on["sets"][:3]})]
    held.records += [make.record(BASE, role="look", set_id="", look=rests_on)]
    assert held.looked(BASE.run_id) == set(rests_on["sets"])
    assert held.looked(FAST.run_id) == set()
