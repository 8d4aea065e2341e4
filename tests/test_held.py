"""What the ledger holds: sets are complete or do not count, and failures that last are told from those that pass."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.measure.held import Held
from ddpm_lab.plan import Fid, Plan

BASE, FAST, TWO = RunConfig(), RunConfig(precision="bf16"), RunConfig(world_size=2)
EXACT: dict[str, Any] = {"set_noise": 0.0, "turn_noise": 0.0}


def test_a_set_counts_where_both_sides_and_the_twin_are_whole() -> None:
    whole = make.sets({"bf16": (FAST, 1.5)}, count=3)
    without_twin = [r for r in whole if not (r.role == "twin" and r.set_id == whole[0].set_id)]
    crashed = [dataclasses.replace(r, status="crashed") if r.role == "candidate" else r for r in whole]
    for records, both, alone in ((whole, 3, 3), (without_twin, 2, 2), (crashed, 0, 3)):
        held = Held(records)
        assert len(held.sets(BASE.run_id, FAST.run_id)) == both
        assert len(held.sets(BASE.run_id)) == len(held.sets(BASE.run_id, BASE.run_id)) == alone
        assert len(held.sets(FAST.run_id, BASE.run_id)) == 0, "another baseline is another comparison"


def test_sets_count_together_only_in_their_own_family_and_where_all_took_part() -> None:
    both = make.sets({"bf16": (FAST, 1.5), "2 ranks": (TWO, 1.2)}, family="both", count=2, turns=2)
    held = Held([*make.sets({"bf16": (FAST, 1.5)}, family="one", count=6, turns=2), *both])
    ids = (FAST.run_id, TWO.run_id)
    assert len(held.sets(BASE.run_id, FAST.run_id)) == 8
    assert held.sets(BASE.run_id, *ids, family="both").keys() == {r.set_id for r in both}
    assert held.sets(BASE.run_id, *ids, family="one").keys() == set()
    assert len(held.sets(BASE.run_id, FAST.run_id, family="one")) == 6


def test_what_is_measured_alone() -> None:
    assert not Held().settled(BASE.run_id, "profile")
    held = Held([make.profile(BASE)])
    assert (held.settled(BASE.run_id, "profile"), held.any) == (True, True)
    held = Held(make.cold(FAST, [50.0, 60.0]))
    assert (held.compile_seconds, held.any) == ([50.0, 60.0], True)
    note = make.record(BASE, role="note", set_id="", label="fp16", status="left out", reason="needs a CUDA device")
    held = Held([note])
    assert (held.noted(note), held.noted(dataclasses.replace(note, reason="did not fit"))) == (True, False)
    assert not held.any


def test_a_trial_without_the_fid_that_is_asked_for_is_not_there() -> None:
    trial = make.trials({}, seeds=1)[0]
    measured = Held([make.drew(trial, np.zeros((1, 4, 4, 3), dtype=np.uint8), fid=1.0)])
    asked = Fid(inception="weights.pth", sha256="ab" * 32, images=2_500)
    assert Held([trial]).trained(trial.run_id)
    assert not Held([trial]).trained(trial.run_id, asked)
    for changes, there in (({"inception": "elsewhere"}, True), ({"images": 5_000}, False), ({"sha256": "cd"}, False)):
        assert measured.trained(trial.run_id, dataclasses.replace(asked, **changes)) == there
    failed = dataclasses.replace(trial, quality={**(trial.quality or {}), "fid": {"images": 2_500, "reason": "oom"}})
    assert not Held([failed]).trained(trial.run_id, asked)


def test_crowded_sets_are_kept_and_do_not_count() -> None:
    found = make.sets({"bf16": (FAST, 1.5)}, count=6, crowded=[1, 4], family="f", **EXACT)
    held, ids = Held(found), list(dict.fromkeys(r.set_id for r in found))
    assert list(held.sets(BASE.run_id, FAST.run_id)) == [ids[i] for i in (0, 2, 3, 5)]
    assert held.log_ratios(BASE.run_id, FAST.run_id) == pytest.approx([math.log(1.5)] * 4)
    assert len(Held(found, disturbed=True).sets(BASE.run_id)) == 6
    assert not Held(r for r in found if r.set_id == ids[1]).any
    assert Held(found[3:6]).turns(BASE.run_id, FAST.run_id) == Plan().turns
    alone = tuple(dataclasses.replace(w, others_cores=0.9) for w in found[2].windows)
    held = Held(found[:2])
    assert len(held.sets(BASE.run_id)) == 1
    held.records += [dataclasses.replace(found[2], windows=alone)]
    assert len(held.sets(BASE.run_id)) == 0, "0.3 cores of others in each turn, on average over three groups"


def test_the_time_of_the_baseline_is_the_mean_with_its_twins() -> None:
    held = Held(make.sets({"bf16": (FAST, 1.5)}, twin_ratio=1.1, count=1, **EXACT))
    assert held.log_ratios(BASE.run_id, BASE.run_id) == pytest.approx([math.log(1.1)])
    assert held.log_ratios(BASE.run_id, FAST.run_id) == pytest.approx([math.log(1.5) - math.log(1.1) / 2])


def test_turns_are_those_of_the_first_set_of_a_comparison() -> None:
    one = make.sets({"bf16": (FAST, 1.5)}, count=1, plan=Plan(turns=9))
    other = make.sets({"2 ranks": (TWO, 0.5)}, count=1, plan=Plan(turns=5), seed=1)
    held = Held([*one, *other])
    assert [held.turns(BASE.run_id, c.run_id) for c in (FAST, TWO)] == [9, 5]
    assert held.turns(BASE.run_id, BASE.run_id) == 0, "no set has the baseline and its twin alone"
    assert Held(make.sets({}, count=1, plan=Plan(turns=3))).turns(BASE.run_id, BASE.run_id) == 3
