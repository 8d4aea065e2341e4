"""The campaign: what is missing, in which order it is measured, what is measured alone, and what was shown.

The measuring of a set is replaced by one that returns records at once (``test_sets`` tests the real one), and the clock
by one that it moves.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import records as make
from campaign_lab import BOTH, Lab, config, experiment, family, laboratory
from records import gradient_check
from setups import setup

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import campaign, shortfall
from ddpm_lab.measure.campaign import NO_TIME
from ddpm_lab.plan import MOST_CANDIDATES, Experiment, Family, Plan
from ddpm_lab.questions.quality import quality
from ddpm_lab.training.setting import Images


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return laboratory(tmp_path, monkeypatch)


def test_a_set_holds_the_baseline_its_twin_and_all_candidates(lab: Lab) -> None:
    lab.run(experiment(family("f", 2)))
    assert lab.sets == [("f", [*BOTH, "c1", "c2"])] * 3
    assert {(r.role, r.baseline_id) for r in lab.ledger.read()[0]} == {
        (role, config(0).run_id) for role in ("baseline", "twin", "candidate")
    }


def test_what_the_ledger_has_is_not_measured_again(lab: Lab) -> None:
    asked = experiment(family("f", 2))
    lab.run(asked)
    lines = lab.ledger.path.read_text().splitlines(keepends=True)
    assert lab.run(asked).measured_sets == 0
    assert lab.ledger.path.read_text().splitlines(keepends=True) == lines
    lab.ledger.path.write_text("".join(lines[:4] + lines[8:]))  # the second set is lost
    lab.run(asked)
    assert lab.sets == [("f", [*BOTH, "c1", "c2"])]
    lab.run(asked, sets=5)
    assert len(lab.sets) == 2


def test_an_interrupt_costs_the_unfinished_set(lab: Lab) -> None:
    asked = experiment(family("f", 1))
    lab.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        lab.run(asked)
    lab.stop_after = None
    lab.run(asked)
    assert len(lab.sets) == 1
    assert len(lab.records("baseline")) == 3


@pytest.mark.parametrize("other", [{"code": "other"}, {"plan": Plan(window_steps=5)}])
def test_sets_of_another_code_or_plan_do_not_count(lab: Lab, other: dict[str, Any]) -> None:
    asked = experiment(family("f", 1))
    lab.run(asked, **other)
    lab.run(asked)
    assert len(lab.sets) == 3


def test_sets_of_another_machine_or_data_do_not_count(lab: Lab) -> None:
    asked = experiment(family("f", 1))
    lab.run(asked)
    here = lab.ledger.read()[0]
    lab.ledger.path.unlink()
    lab.ledger.append(make.on(make.GPUS, here))
    elsewhere = [dataclasses.replace(r, config=dataclasses.replace(r.config, data_sha256="ff")) for r in here]
    lab.ledger.append(elsewhere)
    lab.run(asked)
    assert len(lab.sets) == 3


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["oom", "diverged", "refused"])
def test_a_lasting_failure_is_not_tried_again(lab: Lab, status: str) -> None:
    asked = experiment(family("f", 2))
    lab.failures = {config(2).run_id: status}
    lab.run(asked)
    assert lab.sets == [("f", [*BOTH, "c1", "c2"]), ("f", [*BOTH, "c1"]), ("f", [*BOTH, "c1"])]
    lab.run(asked)
    assert lab.sets == []
    assert [r.status for r in lab.records("candidate") if r.label == "c2"] == [status]


@pytest.mark.parametrize("status", ["crashed", "timed out"])
def test_a_failure_that_may_pass_is_tried_twice_and_then_left_to_the_next_run(lab: Lab, status: str) -> None:
    asked = experiment(family("f", 2))
    lab.failures = {config(2).run_id: status}
    lab.run(asked)
    assert lab.sets == [("f", [*BOTH, "c1", "c2"]), ("f", [*BOTH, "c2"]), ("f", [*BOTH, "c1"]), ("f", [*BOTH, "c1"])]
    lab.failures = {}
    lab.run(asked)
    assert lab.sets == [("f", [*BOTH, "c2"])] * 3
    lab.run(asked)
    assert lab.sets == []


def test_a_failed_baseline_ends_its_family_and_no_other(lab: Lab) -> None:
    asked = experiment(family("bad", 2), family("good", 1, first=10))
    lab.failures = {config(0).run_id: "crashed"}
    made = lab.run(asked)
    assert Counter(name for name, _ in lab.sets) == {"bad": 2, "good": 3}
    assert made.held.any
    lab.run(asked)
    assert [name for name, _ in lab.sets] == ["bad", "bad"]


# --- order -----------------------------------------------------------------------------------------------------------


def test_families_grow_at_the_same_pace(lab: Lab) -> None:
    names = ("a", "b", "c")
    lab.run(experiment(*(family(name, 1, first=10 * i) for i, name in enumerate(names))), sets=4)
    for so_far in accumulate(([name] for name, _ in lab.sets), lambda one, other: one + other):
        counts = [so_far.count(name) for name in names]
        assert max(counts) - min(counts) <= 1
    assert len(lab.sets) == 12


def test_a_candidate_added_later_gets_sets_of_its_own_with_baseline_and_twin(lab: Lab) -> None:
    lab.run(experiment(family("f", 1)))
    lab.run(experiment(family("f", 2)))
    assert lab.sets == [("f", [*BOTH, "c2"])] * 3


def test_many_candidates_are_spread_over_sets(lab: Lab) -> None:
    asked = experiment(family("f", 7))
    before = lab.campaign(asked, sets=2)
    assert before.forecast() > 0
    lab.run(asked, sets=2)
    assert all(labels[:2] == BOTH and len(labels) <= 2 + MOST_CANDIDATES for _, labels in lab.sets)
    measured = Counter(label for _, labels in lab.sets for label in labels[2:])
    assert measured == {f"c{i}": 2 for i in range(1, 8)}
    assert len(lab.sets) == 4


def test_candidates_that_belong_together_are_in_every_set(lab: Lab) -> None:
    lab.run(experiment(dataclasses.replace(family("f", 7), together=True)), sets=2)
    assert lab.sets == [("f", [*BOTH, *(f"c{i}" for i in range(1, 8))])] * 2


def test_a_family_without_candidates_is_measured_against_its_twin(lab: Lab) -> None:
    lab.run(experiment(family("alone", 0)))
    assert lab.sets == [("alone", BOTH)] * 3
    lab.run(experiment(family("alone", 0)))
    assert lab.sets == []


HERE = setup(images=Images(folder="", sha256="", name=""))


COMPILED = Family(
    name="f",
    baseline=config(0),
    baseline_label="eager",
    candidates=(("compiled", config(0, compile="whole")),),
)


def test_cold_compiles_come_first_and_once(lab: Lab) -> None:
    lab.run(experiment(COMPILED), cold_compiles=1)
    assert lab.alone == [("cold", "compiled")]
    assert len(lab.sets) == 3
    assert [r.baseline_id for r in lab.records("cold")] == [config(0).run_id]
    lab.run(experiment(COMPILED))
    assert (lab.alone, lab.sets) == ([("cold", "compiled")], [])
    lab.run(experiment(COMPILED))
    assert lab.alone == []


@pytest.mark.parametrize(("status", "tried_again"), [("diverged", 0), ("unsupported", 1), ("crashed", 1)])
def test_a_compile_that_fails_is_tried_once(lab: Lab, status: str, tried_again: int) -> None:
    lab.failures = {config(0, compile="whole").run_id: status}
    lab.run(experiment(COMPILED))
    assert (len(lab.alone), lab.sets) == (1, [])
    lab.run(experiment(COMPILED))
    assert (len(lab.alone), lab.sets) == (tried_again, [])


@pytest.mark.parametrize(("status", "tried_again"), [("ok", 0), ("oom", 0), ("crashed", 1)])
def test_a_profile_is_taken_once(lab: Lab, status: str, tried_again: int) -> None:
    profiled = config(0, purpose="profile", world_size=2)
    asked = Experiment(name="profile", families=(), profiles=(("f", "fp32, 2 ranks", profiled),))
    lab.failures = {profiled.run_id: status}
    lab.run(asked)
    assert lab.alone == [("profile", "fp32, 2 ranks")]
    assert [p.parent for p in lab.traces] == [lab.folder] * 2
    assert all(profiled.run_id in p.name and p.name.endswith(".json.gz") for p in lab.traces)
    assert len(set(lab.traces)) == 2
    lab.run(asked)
    assert len(lab.alone) == tried_again


def test_a_search_comes_before_the_sets_and_leaves_out_what_is_larger(lab: Lab) -> None:
    base = RunConfig(device="cuda", global_batch_size=8)
    larger = {n: dataclasses.replace(base, global_batch_size=n) for n in (16, 32, 64)}
    sizes = Family(
        name="f",
        baseline=base,
        baseline_label="base",
        candidates=tuple((f"c{n}", c) for n, c in larger.items()),
        search_up_to=64,
    )
    lab.failures = {larger[32].run_id: "oom", dataclasses.replace(base, global_batch_size=24).run_id: "oom"}
    unknown = lab.campaign(experiment(sizes)).forecast()
    made = lab.run(experiment(sizes))
    assert lab.alone == [("search", f"batch {n}") for n in (8, 16, 32, 24, 20, 22, 23)]
    assert lab.sets == [("f", [*BOTH, "c16"])] * 3
    assert [(r.label, r.config.global_batch_size) for r in lab.records("largest")] == [("memory", 23)]
    assert {(r.set_id, r.baseline_id) for r in (*lab.records("search"), *lab.records("largest"))} == {("", "")}
    notes = {(n.label, n.reason) for n in lab.records("note")}
    assert notes == {(f"c{n}", "larger than 23, where the search ended") for n in (32, 64)}
    assert made.held.any
    lines = len(lab.ledger.read()[0])
    lab.run(experiment(sizes))
    assert (lab.alone, lab.sets, len(lab.ledger.read()[0])) == ([], [], lines)
    # Sets of the sizes that do not fit are forecast until the search has said so.
    assert unknown == campaign.SEARCH_SECONDS + 3 * 5 * shortfall.PLACE_SECONDS


def test_what_was_left_out_is_noted_once(lab: Lab) -> None:
    rows = (("f", "fp16", "needs a CUDA device"), ("f", "tf32", "needs a CUDA device"))
    for _ in range(2):
        lab.run(experiment(family("f", 1), left_out=rows))
    notes = lab.records("note")
    assert [(n.family, n.label, n.reason) for n in notes] == list(rows)
    assert {(n.status, n.set_id, n.baseline_id) for n in notes} == {("left out", "", config(0).run_id)}
    assert all(not n.windows for n in notes)


# --- gradient checks and what they keep from being trained -----------------------------------------------------------


def test_what_fails_its_gradient_check_is_measured_and_not_trained(lab: Lab) -> None:
    asked = quality(HERE, seeds=3, images=800, candidates=["bf16", "2 micro-batches"])
    lab.qualities = {c.config.run_id: gradient_check(0.9 if c.label == "bf16" else 0.0) for c in asked.checks}
    unknown = lab.campaign(asked).forecast()
    lab.run(asked, sets=1)
    assert lab.alone[:2] == [("check", "bf16"), ("check", "2 micro-batches")]
    assert lab.alone[2:] == [("quality", "fp32"), ("quality", "2 micro-batches")] * 3
    assert lab.sets == [(asked.families[0].name, ["fp32", "fp32 again", "bf16", "2 micro-batches"])]
    (note,) = lab.records("note")
    assert (note.label, note.status, note.config.purpose) == ("bf16", "left out", "quality")
    assert "not trained: its gradient check failed (the gradient is off by 90 %" in str(note.reason)
    again = lab.campaign(asked, sets=1)
    assert again.forecast() == 0 < unknown, "what is not trained takes no time"
    lab.run(asked, sets=1)
    assert (lab.alone, len(lab.records("note"))) == ([], 1)


def test_a_check_that_crashes_or_whose_baseline_fails_too_keeps_nobody_from_training(lab: Lab) -> None:
    asked = quality(HERE, seeds=2, images=800, candidates=["bf16"])
    (check,) = asked.checks
    of_base = dataclasses.replace(check, label="fp32", config=dataclasses.replace(check.config, precision="fp32"))
    both = dataclasses.replace(asked, checks=(of_base, check))
    lab.qualities = {c.config.run_id: gradient_check(0.9) for c in both.checks}
    lab.run(both, sets=1)
    assert [label for role, label in lab.alone if role == "quality"] == ["fp32", "bf16"] * 2
    lab.ledger.path.unlink()
    lab.qualities, lab.failures = {}, {check.config.run_id: "crashed"}
    lab.run(asked, sets=1)
    assert [label for role, label in lab.alone if role == "quality"] == ["fp32", "bf16"] * 2
    assert not lab.records("note")


ONE = experiment(family("f", 1, primary="c1"))


def measured(lab: Lab) -> Counter[str]:
    """Sets that each candidate was in."""
    return Counter(label for _, labels in lab.sets for label in labels[2:])


def left_out(lab: Lab) -> list[str]:
    assert {n.reason for n in lab.records("note")} <= {NO_TIME}
    return [n.label for n in lab.records("note")]


def test_an_answer_is_recorded_once_for_the_sets_it_rests_on(lab: Lab) -> None:
    lab.seconds_per_image = {config(1).run_id: 1 / 64}
    lab.run(ONE, sets=4)
    (look,) = lab.records("look")
    assert (look.baseline_id, look.set_id, look.windows) == (config(0).run_id, "", ())
    sets = [r.set_id for r in lab.records("baseline")]
    logs = {config(1).run_id: [round(math.log(2), 6)] * 4, "twin": [0.0] * 4}
    assert look.look == {"sets": sets, "log_ratios": logs}
    lab.run(ONE, sets=4, exact=True)
    assert (lab.sets, lab.records("look")) == ([], [look])
    lab.run(ONE, sets=4)
    assert [len((r.look or {})["sets"]) for r in lab.records("look")] == [4, 8], "typed again it goes on"


def test_no_answer_is_recorded_where_there_can_be_none(lab: Lab) -> None:
    lab.run(ONE, sets=1, exact=True)
    lab.run(experiment(family("g", 1, first=10)), sets=4, look=False)
    assert lab.records("look") == []


def test_all_answers_of_one_date_are_one_look(lab: Lab) -> None:
    made = lab.run(experiment(family("a", 1), family("b", 1, first=10)), sets=4, look=False)
    made.look("2026-02-02T00:00:00+00:00")
    assert [(r.family, r.date) for r in lab.records("look")] == [
        ("a", "2026-02-02T00:00:00+00:00"),
        ("b", "2026-02-02T00:00:00+00:00"),
    ]
    made.look()
    assert len(lab.records("look")) == 2


def test_decided_comparisons_get_no_more_sets(lab: Lab) -> None:
    asked = experiment(family("f", 2))
    lab.run(asked, sets=4, decided=[(config(0).run_id, config(1).run_id)])
    assert measured(lab) == {"c1": 4, "c2": 4}, "nothing is decided before it was shown"
    lab.run(asked, sets=4, decided=[(config(0).run_id, config(1).run_id)])
    assert measured(lab) == {"c2": 4}
    lab.run(asked, seconds=300, decided=[(config(0).run_id, config(1).run_id)])
    assert measured(lab) == {"c2": 10}
    lab.run(asked, sets=4, decided=[(config(0).run_id, config(n).run_id) for n in (1, 2)])
    assert lab.sets == []


def test_what_was_shown_gets_nothing_further(lab: Lab) -> None:
    """Sets, a failure and what had no time were all shown; what is asked for since was not."""
    asked = experiment(family("f", 4, primary="c1"), family("g", 1, first=10))
    lab.failures = {config(2).run_id: "crashed"}
    lab.run(asked, seconds=400)
    assert {"c4", "c3"} & set(left_out(lab))
    lines = len(lab.ledger.read()[0])
    assert lab.campaign(asked, seconds=400).missing()
    assert not lab.campaign(asked, seconds=400, further=False).missing()
    lab.run(asked, seconds=400, further=False)
    assert (lab.sets, len(lab.ledger.read()[0])) == ([], lines)
    added = experiment(family("f", 5, primary="c1"))
    assert lab.campaign(added, seconds=400, further=False).missing()
    lab.run(added, seconds=400, further=False)
    assert measured(lab).keys() == {"c5"}


def test_sets_of_another_family_do_not_count_as_shown_where_candidates_belong_together(lab: Lab) -> None:
    """Both families compare the same two configurations with one baseline."""
    lab.run(experiment(family("apart", 2)), sets=6)
    together = dataclasses.replace(family("side by side", 2), together=True)
    lab.run(experiment(together), sets=4)
    assert lab.sets == [("side by side", [*BOTH, "c1", "c2"])] * 4
