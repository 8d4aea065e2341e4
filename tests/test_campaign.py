"""The campaign: what is missing, in which order it is measured, what the time gives, and what was shown.

The measuring of a set is replaced by one that returns records at once (``test_sets`` tests the real one), and the clock
by one that it moves: a set takes 10 s for each group, baseline and twin among them, 30 s with one candidate.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import campaign_lab
import pytest
import records as make
from campaign_lab import BOTH, Lab, config, experiment, family, laboratory
from records import gradient_check
from setups import setup

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import campaign, shortfall, turn_plan
from ddpm_lab.measure.campaign import NO_TIME
from ddpm_lab.plan import MOST_CANDIDATES, Experiment, Family, Plan, by_stage
from ddpm_lab.questions.quality import quality
from ddpm_lab.training.setting import Images

ONE = experiment(family("f", 1, primary="c1"))
HERE = setup(images=Images(folder="", sha256="", name=""))
COMPILED = Family(
    name="f", baseline=config(0), baseline_label="eager", candidates=(("compiled", config(0, compile="whole")),)
)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return laboratory(tmp_path, monkeypatch)


def measured(lab: Lab) -> Counter[str]:
    """Sets that each candidate was in."""
    return Counter(label for _, labels in lab.sets for label in labels[2:])


def left_out(lab: Lab) -> list[str]:
    assert {n.reason for n in lab.records("note")} <= {NO_TIME}
    return [n.label for n in lab.records("note")]


# --- what is missing -------------------------------------------------------------------------------------------------


def test_what_the_ledger_has_is_not_measured_again(lab: Lab) -> None:
    asked = experiment(family("f", 2))
    lab.run(asked)
    assert lab.sets == [("f", [*BOTH, "c1", "c2"])] * 3
    roles = {(role, config(0).run_id) for role in ("baseline", "twin", "candidate")}
    assert {(r.role, r.baseline_id) for r in lab.ledger.read()[0]} == roles
    lines = lab.ledger.path.read_text().splitlines(keepends=True)
    assert lab.run(asked).measured_sets == 0
    assert lab.ledger.path.read_text().splitlines(keepends=True) == lines
    lab.ledger.path.write_text("".join(lines[:4] + lines[8:]))  # the second set is lost
    lab.run(asked)
    assert lab.sets == [("f", [*BOTH, "c1", "c2"])]
    lab.run(experiment(family("f", 3)))
    assert lab.sets == [("f", [*BOTH, "c3"])] * 3, "a candidate added later has sets of its own"
    lab.run(asked, sets=5)
    assert len(lab.sets) == 2


def test_an_interrupt_costs_the_unfinished_set(lab: Lab) -> None:
    lab.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        lab.run(ONE)
    lab.stop_after = None
    lab.run(ONE)
    assert len(lab.sets) == 1
    assert len(lab.records("baseline")) == 3


def test_sets_of_another_code_plan_machine_or_data_do_not_count(lab: Lab) -> None:
    lab.run(ONE)
    here = lab.ledger.read()[0]
    lab.run(ONE, code="other")
    lab.run(ONE, plan=Plan(window_steps=5))
    assert len(lab.sets) == 3
    lab.ledger.path.unlink()
    lab.ledger.append(make.on(make.GPUS, here))
    lab.ledger.append([dataclasses.replace(r, config=dataclasses.replace(r.config, data_sha256="ff")) for r in here])
    lab.run(ONE)
    assert len(lab.sets) == 3


def test_failures_that_last_are_not_tried_again_and_others_twice_in_a_run(lab: Lab) -> None:
    asked = experiment(family("f", 2))
    both, first = ("f", [*BOTH, "c1", "c2"]), ("f", [*BOTH, "c1"])
    for status, sets in {"oom": [both, first, first], "crashed": [both, ("f", [*BOTH, "c2"]), first, first]}.items():
        lab.ledger.path.unlink(missing_ok=True)
        lab.failures = {config(2).run_id: status}
        lab.run(asked)
        assert lab.sets == sets
        lab.failures = {}
        lab.run(asked)
        assert lab.sets == ([] if status == "oom" else [("f", [*BOTH, "c2"])] * 3)


def test_a_failed_baseline_ends_its_family_and_no_other(lab: Lab) -> None:
    asked = experiment(family("bad", 2), family("good", 1, first=10))
    lab.failures = {config(0).run_id: "crashed"}
    assert lab.run(asked).held.any
    assert Counter(name for name, _ in lab.sets) == {"bad": 2, "good": 3}
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


def test_many_candidates_are_spread_over_sets_unless_they_belong_together(lab: Lab) -> None:
    asked = family("f", 7)
    lab.run(experiment(asked), sets=2)
    assert all(labels[:2] == BOTH and len(labels) <= 2 + MOST_CANDIDATES for _, labels in lab.sets)
    assert measured(lab) == {f"c{i}": 2 for i in range(1, 8)}
    assert len(lab.sets) == 4
    lab.run(experiment(dataclasses.replace(asked, name="side by side", together=True)), sets=2)
    assert lab.sets == [("side by side", [*BOTH, *(f"c{i}" for i in range(1, 8))])] * 2, "the others do not count"
    lab.run(experiment(family("alone", 0, first=20)))
    assert lab.sets == [("alone", BOTH)] * 3


def test_the_primary_comparison_comes_first_and_alone_in_its_sets(lab: Lab) -> None:
    lab.run(experiment(family("f", 3, primary="c2"), family("g", 1, first=10)), sets=4)
    assert lab.sets[:4] == [("f", [*BOTH, "c2"])] * 4
    assert Counter(map(str, lab.sets[4:])) == {str(("f", [*BOTH, "c1", "c3"])): 4, str(("g", [*BOTH, "c1"])): 4}
    assert lab.primaries == [["c2"]] * 4 + [[]] * 8
    plain, alone = family("f", 2), family("alone", 0, first=10)
    assert by_stage([plain, alone]) == ([plain, alone], []), "without one everything is needed"
    together = family("f", 2, primary="c2", together=True)
    assert by_stage([together]) == ([together], [])


# --- what is measured alone ------------------------------------------------------------------------------------------


def test_cold_compiles_come_first_and_once(lab: Lab) -> None:
    lab.run(experiment(COMPILED), cold_compiles=1)
    assert (lab.alone, len(lab.sets)) == ([("cold", "compiled")], 3)
    assert [r.baseline_id for r in lab.records("cold")] == [config(0).run_id]
    for alone in ([("cold", "compiled")], []):
        lab.run(experiment(COMPILED))
        assert (lab.alone, lab.sets) == (alone, [])


def test_what_fails_alone_is_tried_once_and_again_where_that_may_pass(lab: Lab) -> None:
    profiled = config(0, purpose="profile", world_size=2)
    profile = Experiment(name="profile", families=(), profiles=(("f", "fp32, 2 ranks", profiled),))
    cases: Sequence[tuple[Experiment, str, str, int]] = (
        *(
            (experiment(COMPILED), config(0, compile="whole").run_id, s, n)
            for s, n in (("diverged", 0), ("crashed", 1))
        ),
        *((profile, profiled.run_id, status, again) for status, again in (("ok", 0), ("oom", 0), ("crashed", 1))),
    )
    for asked, run_id, status, again in cases:
        lab.ledger.path.unlink(missing_ok=True)
        lab.failures = {run_id: status}
        lab.run(asked)
        assert (len(lab.alone), lab.sets) == (1, [])
        if asked is profile:
            assert [p.parent for p in lab.traces] == [lab.folder] * 2
            assert len({p.name for p in lab.traces if profiled.run_id in p.name}) == 2
        lab.run(asked)
        assert (len(lab.alone), lab.sets) == (again, [])


def test_a_search_comes_before_the_sets_and_leaves_out_what_is_larger(lab: Lab) -> None:
    base = RunConfig(device="cuda", global_batch_size=8)
    larger = {n: dataclasses.replace(base, global_batch_size=n) for n in (16, 32, 64)}
    candidates = tuple((f"c{n}", c) for n, c in larger.items())
    sizes = Family(name="f", baseline=base, baseline_label="base", candidates=candidates, search_up_to=64)
    lab.failures = {larger[32].run_id: "oom", dataclasses.replace(base, global_batch_size=24).run_id: "oom"}
    # Sets of the sizes that do not fit are forecast until the search has said so.
    assert lab.campaign(experiment(sizes)).forecast() == campaign.SEARCH_SECONDS + 3 * 5 * shortfall.PLACE_SECONDS
    assert lab.run(experiment(sizes)).held.any
    assert lab.alone == [("search", f"batch {n}") for n in (8, 16, 32, 24, 20, 22, 23)]
    assert lab.sets == [("f", [*BOTH, "c16"])] * 3
    assert [(r.label, r.config.global_batch_size) for r in lab.records("largest")] == [("memory", 23)]
    assert {(r.set_id, r.baseline_id) for r in (*lab.records("search"), *lab.records("largest"))} == {("", "")}
    notes = {(n.label, n.reason) for n in lab.records("note")}
    assert notes == {(f"c{n}", "larger than 23, where the search ended") for n in (32, 64)}
    lines = len(lab.ledger.read()[0])
    lab.run(experiment(sizes))
    assert (lab.alone, lab.sets, len(lab.ledger.read()[0])) == ([], [], lines)


def test_what_was_left_out_is_noted_once(lab: Lab) -> None:
    rows = (("f", "fp16", "needs a CUDA device"), ("f", "tf32", "needs a CUDA device"))
    for _ in range(2):
        lab.run(experiment(family("f", 1), left_out=rows))
    notes = lab.records("note")
    assert [(n.family, n.label, n.reason) for n in notes] == list(rows)
    assert {(n.status, n.set_id, n.baseline_id, n.windows) for n in notes} == {("left out", "", config(0).run_id, ())}


# --- trials ----------------------------------------------------------------------------------------------------------


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
    assert lab.campaign(asked, sets=1).forecast() == 0 < unknown, "what is not trained takes no time"
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


def test_trials_are_made_seed_after_seed_as_far_as_the_time_allows_whichever_question_asks(lab: Lab) -> None:
    """A trial is forecast to take 25 s by the speed of the set, which takes 40 s; then 7 s, and it takes 10 s."""
    asked = quality(HERE, seeds=5, images=800, candidates=["bf16", "2 micro-batches"])
    asked = dataclasses.replace(asked, checks=())
    lab.qualities = {t.config.run_id: {} for t in asked.trials}
    lab.failures = {next(t for t in asked.trials if t.label == "bf16").config.run_id: "diverged"}
    lab.run(asked, sets=1, exact=True, seconds=97)
    assert [label for _, label in lab.alone] == ["fp32", "bf16", "2 micro-batches", "fp32"]
    missing = {n.label: str(n.reason).partition(" runs")[0] for n in lab.records("note")}
    assert missing == {"fp32": "3 of 5", "bf16": "4 of 5", "2 micro-batches": "4 of 5"}
    other = dataclasses.replace(asked, name="amp", families=())
    here, newer = lab.campaign(other), lab.campaign(other, code="newer")
    assert len(here.lacks.trials(asked.trials)) == 15 - 4, "what diverged is not repeated"
    assert not here.held.any, "trials alone answer nothing"
    assert len(newer.lacks.trials(asked.trials)) == 15


# --- what the time gives ---------------------------------------------------------------------------------------------


def test_sets_fill_the_time_and_the_least_may_overrun_it_by_half(lab: Lab) -> None:
    for seconds, sets in ((330, 11), (329, 10), (80, 4), (79, 3), (1, 1)):
        lab.ledger.path.unlink(missing_ok=True)
        begun = lab.now
        lab.run(ONE, seconds=seconds)
        assert len(lab.sets) == sets
        assert sets == 1 or lab.now - begun <= 1.5 * seconds


def test_no_more_sets_are_measured_than_resolve_the_usual_difference(lab: Lab) -> None:
    lab.ledger.append(make.sets({}, experiment="other", count=60, turns=20, set_noise=0.005, turn_noise=1e-3))
    made = lab.run(ONE, seconds=30_000)
    assert len(lab.sets) == turn_plan.sets_that_resolve(0.03, lab.turns[0], *made.lacks.scatter)
    assert 4 <= len(lab.sets) < turn_plan.sets_that_resolve(0.03, lab.turns[0], turn_plan.WITHIN, turn_plan.BETWEEN)


def test_others_are_measured_where_their_least_sets_fit_and_noted_where_not(lab: Lab) -> None:
    asked = experiment(family("f", 3, primary="c1"))
    for seconds, sets, notes in (
        (600, {"c1": 12, "c2": 6, "c3": 6}, []),  # 360 s in sets of 30 s, 240 s in sets of 40 s
        (400, {"c1": 8, "c2": 4, "c3": 4}, []),
        (300, {"c1": 6, "c2": 4}, ["c3"]),
        (200, {"c1": 4}, ["c3", "c2"]),
    ):
        lab.ledger.path.unlink(missing_ok=True)
        begun = lab.now
        lab.run(asked, seconds=seconds)
        assert (measured(lab), left_out(lab)) == (sets, notes)
        assert lab.now - begun <= seconds
    lab.ledger.path.unlink()
    lab.run(experiment(family("p", 1, primary="c1"), family("m", 1, first=10, mechanism=True)), seconds=200)
    assert Counter(name for name, _ in lab.sets) == {"p": 4, "m": 1}, "a mechanism needs one set"


def test_families_grow_at_one_pace_in_the_time_that_there_is(lab: Lab) -> None:
    lab.run(experiment(family("f", 1), family("g", 1, first=10), family("h", 0, first=20)), seconds=360)
    counts = Counter(name for name, _ in lab.sets)
    assert set(counts) == {"f", "g", "h"}
    assert max(counts.values()) - min(counts.values()) <= 1


def test_one_disturbed_set_where_the_time_ends_is_no_busy_machine(lab: Lab) -> None:
    lab.loads = [2.0]
    assert not lab.run(ONE, seconds=60).crowded_out
    lab.ledger.path.unlink()
    lab.loads = [2.0] * 9
    assert lab.run(ONE, seconds=60).crowded_out


def test_exact_sets_are_just_so_many_whatever_the_time(lab: Lab) -> None:
    for asked, expected in ((2, 2), (2, 0), (5, 3)):
        lab.run(ONE, sets=asked, exact=True, seconds=10_000)
        assert len(lab.sets) == expected
    lab.run(experiment(family("g", 3, first=10)), sets=6, exact=True, seconds=130)
    assert (measured(lab), left_out(lab)) == ({"c1": 3, "c2": 3, "c3": 3}, [])


def test_sets_by_resolution_end_when_the_width_says_so(lab: Lab) -> None:
    lab.run(ONE, sets=100, sets_to_come=lambda logs: max(0, 5 - len(logs)))
    assert len(lab.sets) == 5


def test_turns_follow_from_the_scatter_of_this_machine_and_stay(lab: Lab) -> None:
    """Crowded sets, sets of one turn and those of other machines say nothing of it."""
    wild: dict[str, Any] = {"count": 60, "set_noise": 0.5, "turn_noise": 1e-3}
    lab.ledger.append(make.sets({}, experiment="busy", turns=20, crowded=range(60), **wild))
    lab.ledger.append(make.sets({}, experiment="short", turns=1, **wild))
    lab.ledger.append(make.on(make.GPUS, make.sets({}, experiment="there", turns=20, **wild)))
    lab.run(ONE, seconds=600, look=False)
    assert set(lab.turns) == {12}, "sqrt(12 s / 0.9 s) * 10 % / 3 %"
    for set_noise, turn_noise, turns in ((0.5, 1e-3, turn_plan.LEAST_TURNS), (0.0, 0.5, turn_plan.MOST_TURNS)):
        noise = {"set_noise": set_noise, "turn_noise": turn_noise}
        lab.ledger.append(make.sets({}, experiment="other", count=60, turns=20, **noise))  # type: ignore[arg-type]
        lab.run(experiment(family(f"g{turns}", 1, first=turns)), sets=1)
        assert lab.turns == [turns]
    lab.run(ONE, seconds=60, exact=True, sets=22, look=False)
    assert set(lab.turns) == {12}, "whatever time and scatter there are later"
    lab.run(experiment(family("f", 2)), sets=24)
    assert ("f", [*BOTH, "c2"]) in lab.sets
    assert set(lab.turns) == {12}, "a candidate that joins others has their turns"


def test_the_forecast_is_what_is_missing_times_what_it_took(lab: Lab) -> None:
    asked = experiment(family("f", 2))
    assert lab.campaign(asked).forecast() == 3 * 4 * shortfall.PLACE_SECONDS
    lab.run(asked, sets=1)
    assert lab.campaign(asked).forecast() == 2 * 4 * 7.0  # the stages of a record add up to 7 s
    lab.run(asked)
    assert lab.campaign(asked).forecast() == 0


# --- what was shown --------------------------------------------------------------------------------------------------


def test_an_answer_is_recorded_once_for_the_sets_it_rests_on(lab: Lab) -> None:
    lab.seconds_per_image = {config(1).run_id: 1 / 64}
    lab.run(ONE, sets=4)
    (look,) = lab.records("look")
    assert (look.baseline_id, look.set_id, look.windows) == (config(0).run_id, "", ())
    logs = {config(1).run_id: [round(math.log(2), 6)] * 4, "twin": [0.0] * 4}
    assert look.look == {"sets": [r.set_id for r in lab.records("baseline")], "log_ratios": logs}
    lab.run(ONE, sets=4, exact=True)
    assert (lab.sets, lab.records("look")) == ([], [look])
    lab.run(ONE, sets=4)
    assert [len((r.look or {})["sets"]) for r in lab.records("look")] == [4, 8], "typed again it goes on"


def test_all_answers_of_one_date_are_one_look_and_few_sets_give_none(lab: Lab) -> None:
    lab.run(ONE, sets=1, exact=True)
    assert lab.records("look") == []
    made = lab.run(experiment(family("a", 1), family("b", 1, first=10)), sets=4, look=False)
    date = "2026-02-02T00:00:00+00:00"
    made.look(date)
    made.look()
    assert [(r.family, r.date) for r in lab.records("look")] == [("a", date), ("b", date)]


def test_decided_comparisons_get_no_more_sets(lab: Lab) -> None:
    asked, decided = experiment(family("f", 2)), [(config(0).run_id, config(n).run_id) for n in (1, 2)]
    lab.run(asked, sets=4, decided=decided[:1])
    assert measured(lab) == {"c1": 4, "c2": 4}, "nothing is decided before it was shown"
    lab.run(asked, sets=4, decided=decided[:1])
    assert measured(lab) == {"c2": 4}
    lab.run(asked, seconds=300, decided=decided[:1])
    assert measured(lab) == {"c2": 10}
    lab.run(asked, sets=4, decided=decided)
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


# --- beside other processes: two threads fill the machine's two cores ------------------------------------------------


def test_a_crowded_set_is_kept_does_not_count_and_is_measured_again(lab: Lab) -> None:
    lab.loads = [0.0, 1.0, 0.0, 0.249, 0.25]  # load decides, and not time
    lab.seconds_per_image = {config(1).run_id: 100.0}
    made = lab.run(ONE, sets=4)
    assert len(lab.sets) == len(lab.records("baseline")) == 6
    assert len(made.held.sets(config(0).run_id, config(1).run_id)) == 4
    assert (made.disturbed, made.crowded_out) == (2, False)
    (look,) = lab.records("look")
    quiet = [r.set_id for r in lab.records("baseline") if r.windows[0].others_cores in (0.0, 0.249)]
    assert (look.look or {})["sets"] == quiet
    lab.run(ONE, sets=4, exact=True)
    assert lab.sets == [], "nothing is left to measure"


def test_where_nothing_can_be_called_disturbed_sets_are_as_good_as_others(lab: Lab) -> None:
    lab.loads = [1.0] * 50
    made = lab.run(ONE, sets=1, exact=True)
    assert (len(lab.sets), made.disturbed, made.crowded_out, made.held.any) == (1, 0, False, True)
    lab.loads = []
    lab.run(ONE, sets=4, exact=True)
    assert len(lab.sets) == 4, "for a verdict it does not count"


def test_after_as_many_crowded_sets_as_planned_four_quiet_ones_are_an_answer_and_fewer_are_none(lab: Lab) -> None:
    asked = experiment(family("f", 2, primary="c1"))
    lab.loads = [0.0] * 4 + [1.0] * 50
    made = lab.run(asked, sets=6)
    assert lab.sets == [("f", [*BOTH, "c1"])] * 10 + [("f", [*BOTH, "c2"])] * 6, "the others are tried as often"
    assert (made.crowded_out, made.disturbed, len(lab.records("look"))) == (False, 12, 1)
    for quiet, target, sets in ((3, {"sets": 6}, 9), (0, {"seconds": 300}, 6), (0, {"seconds": 80}, 4)):
        lab.ledger.path.unlink()
        lab.loads = [0.0] * quiet + [1.0] * 50
        made = lab.run(ONE, **target)  # type: ignore[arg-type]
        assert (made.crowded_out, len(lab.sets), lab.records("look")) == (True, sets, [])


def test_a_busy_gpu_is_not_measured_with_fewer_cores(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    base, other = config(0, device="cuda"), config(1, device="cuda")
    asked = dataclasses.replace(family("f", 0), baseline=base, candidates=(("c1", other),), primary="c1")
    busy = dataclasses.replace(campaign_lab.WINDOW, state={"gpu_others_percent": 10.0})
    monkeypatch.setattr(campaign_lab, "WINDOW", busy)
    made = lab.run(experiment(asked), sets=4)
    assert (len(lab.sets), made.disturbed, made.crowded_out) == (4, 4, False)
