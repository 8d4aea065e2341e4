"""The campaign: what is missing, in which order it is measured, what the time gives, and what was shown.

The measuring of a set is replaced by one that returns records at once (``test_sets`` tests the real one), and the clock
by one that it moves: a set takes 10 s for each group, baseline and twin among them, 30 s with one candidate.
"""

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import records as make
from campaign_lab import BOTH, Lab, config, experiment, family
from records import gradient_check
from setups import setup

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import campaign, hardware, shortfall
from ddpm_lab.measure.campaign import NO_TIME, Campaign
from ddpm_lab.plan import MOST_CANDIDATES, PRIMARY, Experiment, Family, Plan
from ddpm_lab.questions.quality import quality
from ddpm_lab.training.setting import Images

ONE = experiment(family("f", 1, primary="c1"))
HERE = setup(images=Images(folder="", sha256="", name=""))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


def measured(lab: Lab) -> Counter[str]:
    """Sets that each candidate was in."""
    return Counter(label for _, labels in lab.sets for label in labels[2:])


def left_out(lab: Lab) -> list[str]:
    return [n.label for n in lab.records("note") if n.reason == NO_TIME]


# --- what is missing, and in which order -----------------------------------------------------------------------------


def test_what_the_ledger_has_is_not_measured_again_and_a_kill_costs_the_unfinished_set(lab: Lab) -> None:
    asked, whole = experiment(family("f", 2)), ("f", [*BOTH, "c1", "c2"])
    lab.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        lab.run(asked)
    lab.stop_after = None
    assert lab.campaign(asked).forecast() == 4 * 7.0, "one set, by the stages of the records"
    lab.run(asked)
    assert lab.sets == [whole]
    lines = lab.ledger.path.read_text().splitlines(keepends=True)
    assert lab.run(asked).measured_sets == 0
    assert lab.ledger.path.read_text().splitlines(keepends=True) == lines
    lab.ledger.path.write_text("".join(lines[:4] + lines[8:]))  # the second set is lost
    lab.run(asked)
    assert lab.sets == [whole]
    lab.run(experiment(family("f", 3)))
    assert lab.sets == [("f", [*BOTH, "c3"])] * 3, "a candidate added later has sets of its own"


def test_sets_of_another_code_plan_machine_or_data_do_not_count(lab: Lab) -> None:
    lab.run(ONE)
    here = lab.ledger.read()[0]
    for other in ({"code": "other"}, {"plan": Plan(window_steps=5)}):
        lab.run(ONE, **other)
        assert len(lab.sets) == 3
    lab.forget()
    lab.ledger.append(make.on(make.GPUS, here))
    lab.ledger.append([dataclasses.replace(r, config=dataclasses.replace(r.config, data_sha256="ff")) for r in here])
    lab.run(ONE)
    assert len(lab.sets) == 3


def test_failures_that_last_are_not_tried_again_and_others_twice_in_a_run(lab: Lab) -> None:
    """What found no memory is tried once a run: another process may have had it."""
    asked = experiment(family("f", 2))
    both, first = ("f", [*BOTH, "c1", "c2"]), ("f", [*BOTH, "c1"])
    once, twice = [both, first, first], [both, ("f", [*BOTH, "c2"]), first, first]
    for status, sets in {"diverged": once, "oom": once, "crashed": twice}.items():
        lab.forget()
        lab.failures = {config(2).run_id: status}
        lab.run(asked)
        assert lab.sets == sets
        lab.failures = {}
        lab.run(asked)
        assert lab.sets == ([] if status == "diverged" else [("f", [*BOTH, "c2"])] * 3)
    lab.forget()
    lab.failures = {config(0).run_id: "crashed"}
    assert lab.run(experiment(family("bad", 2), family("good", 1, first=10))).held.any
    assert Counter(name for name, _ in lab.sets) == {"bad": 2, "good": 3}, "a failed baseline ends its own family"


def test_many_candidates_are_spread_over_sets_unless_they_belong_together(lab: Lab) -> None:
    asked = family("f", 7)
    lab.run(experiment(asked), sets=2)
    assert all(labels[:2] == BOTH and len(labels) <= 2 + MOST_CANDIDATES for _, labels in lab.sets)
    assert (measured(lab), len(lab.sets)) == ({f"c{i}": 2 for i in range(1, 8)}, 4)
    lab.run(experiment(dataclasses.replace(asked, name="side by side", together=True)), sets=2)
    assert lab.sets == [("side by side", [*BOTH, *(f"c{i}" for i in range(1, 8))])] * 2, "the others do not count"


def test_the_primary_comparison_comes_first_in_sets_of_its_own_or_of_those_that_belong_together(lab: Lab) -> None:
    first, beside = family("f", 3, primary="c2"), family("g", 1, first=10)
    lab.run(experiment(first, beside), sets=4)
    assert lab.sets[:4] == [("f", [*BOTH, "c2"])] * 4
    assert Counter(map(str, lab.sets[4:])) == {str(("f", [*BOTH, "c1", "c3"])): 4, str(("g", [*BOTH, "c1"])): 4}
    lab.forget()
    lab.run(experiment(dataclasses.replace(first, together=True), beside), sets=4)
    assert lab.sets[:4] == [("f", [*BOTH, "c1", "c2", "c3"])] * 4, "those that are measured together come with it"
    assert lab.sets[4:] == [("g", [*BOTH, "c1"])] * 4


# --- what is measured alone ------------------------------------------------------------------------------------------


def test_what_is_measured_alone_comes_first_and_once_and_again_where_a_failure_may_pass(lab: Lab) -> None:
    compiled, profiled = config(0, compile="whole"), config(0, purpose="profile", world_size=2)
    profile = Experiment(name="profile", families=(), profiles=(("f", "fp32, 2 ranks", profiled),))
    eager = Family(name="f", baseline=config(0), baseline_label="eager", candidates=(("compiled", compiled),))
    for asked, config_, status, alone, again, sets in (
        (experiment(eager), compiled, "ok", 2, 0, 3),
        (experiment(eager), compiled, "diverged", 1, 0, 0),
        (experiment(eager), compiled, "crashed", 1, 1, 0),
        (profile, profiled, "ok", 1, 0, 0),
        (profile, profiled, "refused", 1, 0, 0),
        (profile, profiled, "oom", 1, 1, 0),  # another process may have had the memory
        (profile, profiled, "crashed", 1, 1, 0),
    ):
        lab.forget()
        lab.failures = {config_.run_id: status}
        lab.run(asked)
        assert (len(lab.alone), len(lab.sets)) == (alone, sets)
        assert asked is not profile or len({p for p in lab.traces if p.parent == lab.ledger.path.parent}) == 2
        lab.run(asked)
        assert (len(lab.alone), lab.sets) == (again, [])


def test_a_search_comes_before_the_sets_and_leaves_out_what_is_larger(lab: Lab) -> None:
    base = RunConfig(device="cuda", global_batch_size=8)
    larger = {n: dataclasses.replace(base, global_batch_size=n) for n in (16, 24, 32)}
    candidates = (("c16", larger[16]), ("c32", larger[32]))
    sizes = Family(name="f", baseline=base, baseline_label="base", candidates=candidates, search_up_to=64)
    lab.failures = {larger[32].run_id: "oom", larger[24].run_id: "oom"}
    # Sets of the sizes that do not fit are forecast until the search has said so.
    assert lab.campaign(experiment(sizes)).forecast() == campaign.SEARCH_SECONDS + 3 * 4 * shortfall.PLACE_SECONDS
    assert lab.run(experiment(sizes)).held.any
    assert lab.alone == [("search", f"batch {n}") for n in (8, 16, 32, 24, 20, 22, 23)]
    assert lab.sets == [("f", [*BOTH, "c16"])] * 3
    assert [(r.label, r.config.global_batch_size) for r in lab.records("largest")] == [("memory", 23)]
    lab.run(experiment(sizes))
    assert [(n.label, n.status) for n in lab.records("note")] == [("c32", "left out")], "noted once"
    assert (lab.alone, lab.sets) == ([("search", "batch 24")], []), "another process may have had the memory"


# --- trials ----------------------------------------------------------------------------------------------------------


def test_what_fails_its_gradient_check_is_measured_and_not_trained(lab: Lab) -> None:
    asked = quality(HERE, seeds=3, images=800, candidates=["bf16", "2 micro-batches"])
    lab.qualities = {c.config.run_id: gradient_check(0.9 if c.label == "bf16" else 0.0) for c in asked.checks}
    lab.run(asked, sets=1)
    assert lab.alone[:2] == [("check", "bf16"), ("check", "2 micro-batches")]
    assert lab.alone[2:] == [("quality", "fp32"), ("quality", "2 micro-batches")] * 3
    assert [labels[2:] for _, labels in lab.sets] == [["bf16", "2 micro-batches"]]
    (note,) = lab.records("note")
    assert (note.label, note.status, note.config.purpose) == ("bf16", "left out", "quality")
    assert "90 %" in str(note.reason)
    assert lab.campaign(asked, sets=1).forecast() == 0, "what is not trained takes no time"
    lab.run(asked, sets=1)
    assert (lab.alone, len(lab.records("note"))) == ([], 1)


def test_trials_are_made_seed_after_seed_as_far_as_the_time_allows_whichever_question_asks(lab: Lab) -> None:
    """A trial is forecast to take 25 s by the speed of the set, which takes 40 s; then 7 s, and it takes 10 s."""
    asked = dataclasses.replace(quality(HERE, seeds=5, images=800, candidates=["bf16", "2 micro-batches"]), checks=())
    lab.qualities = {t.config.run_id: {"fid": None} for t in asked.trials}  # a reader takes it
    lab.failures = {next(t for t in asked.trials if t.label == "bf16").config.run_id: "diverged"}
    lab.run(asked, sets=1, exact=True, seconds=97)
    assert [label for _, label in lab.alone] == ["fp32", "bf16", "2 micro-batches", "fp32"]
    missing = {n.label: str(n.reason).partition(" runs")[0] for n in lab.records("note")}
    assert missing == {"fp32": "3 of 5", "bf16": "4 of 5", "2 micro-batches": "4 of 5"}
    other = dataclasses.replace(asked, name="amp", families=())
    here, newer = lab.campaign(other), lab.campaign(other, code="newer")
    assert len(here.held.trials_to_come(asked.trials)) == 15 - 4, "what diverged is not repeated"
    assert not here.held.any, "trials alone answer nothing"
    assert len(newer.held.trials_to_come(asked.trials)) == 15


def test_sets_leave_time_to_the_trials_that_were_asked_for(lab: Lab) -> None:
    """Half of it at most, although sets could use it all."""
    asked = dataclasses.replace(quality(HERE, seeds=20, images=800, candidates=["bf16"]), checks=())
    lab.qualities = {t.config.run_id: {"fid": None} for t in asked.trials}
    lab.run(asked, seconds=600)
    assert (30 * len(lab.sets), 10 * len(lab.alone)) == (300, 300)
    lab.forget()
    lab.campaign(asked, seconds=90).run(stages=(PRIMARY,))
    assert len(lab.sets) == 10 + 4, "in a call that makes no trials they need no time"


# --- what the time gives ---------------------------------------------------------------------------------------------


def test_sets_fill_the_time_and_the_least_may_overrun_it_by_half(lab: Lab) -> None:
    for seconds, sets in ((330, 11), (329, 10), (80, 4), (79, 3), (1, 1)):
        lab.forget()
        begun = lab.now
        lab.run(ONE, seconds=seconds)
        assert len(lab.sets) == sets
        assert sets == 1 or lab.now - begun <= 1.5 * seconds
    for asked, expected in ((2, 1), (2, 0), (5, 3)):  # just so many, whatever the time
        lab.run(ONE, sets=asked, exact=True, seconds=10_000)
        assert len(lab.sets) == expected
    lab.run(ONE, sets=100, sets_to_come=lambda logs: max(0, 7 - len(logs)))
    assert len(lab.sets) == 2, "by the width of the interval"


@pytest.mark.parametrize(("seconds", "sets"), [(79, 1), (81, 4)])
def test_a_question_whose_least_sets_do_not_fit_leaves_its_time_to_others_that_wait(
    lab: Lab, seconds: float, sets: int
) -> None:
    found = lab.run(ONE, seconds=seconds, yields=True)
    assert (len(lab.sets), found.least_seconds()) == (sets, 30 * (4 - sets))
    lab.run(ONE, seconds=600, yields=True)
    assert measured(lab)["c1"] >= 4 - sets, "its set counts"


def test_others_are_measured_where_their_least_sets_fit_and_noted_where_not(lab: Lab) -> None:
    asked = experiment(family("f", 3, primary="c1"))
    for seconds, sets, notes in (
        (600, {"c1": 12, "c2": 6, "c3": 6}, []),  # 360 s in sets of 30 s, 240 s in sets of 40 s
        (300, {"c1": 6, "c2": 4}, ["c3"]),
        (200, {"c1": 4}, ["c3", "c2"]),
    ):
        lab.forget()
        begun = lab.now
        lab.run(asked, seconds=seconds)
        assert (measured(lab), left_out(lab)) == (sets, notes)
        assert lab.now - begun <= seconds
    lab.forget()
    lab.run(experiment(family("p", 1, primary="c1"), family("m", 1, first=10, mechanism=True)), seconds=200)
    assert Counter(name for name, _ in lab.sets) == {"p": 4, "m": 1}, "a mechanism needs one set"


def test_a_large_difference_needs_fewer_sets_than_a_small_one(lab: Lab) -> None:
    """As few as an answer needs; and the others' time is theirs."""
    lab.seconds_per_image = {config(1).run_id: 1 / 64, config(2).run_id: 1 / 31}
    lab.run(experiment(family("f", 2)), seconds=640)
    large, small = (sum(name in row for _, row in lab.sets) for name in ("c1", "c2"))
    assert (large, small) == (4, 4 + (640 - 4 * 40) // 30)
    lab.forget()
    lab.run(experiment(family("f", 2, together=True)), seconds=640)
    assert {tuple(row) for _, row in lab.sets} == {(*BOTH, "c1", "c2")}, "each set of such a family has both"
    assert len(lab.sets) == 16


def test_turns_follow_from_the_scatter_of_this_machine_and_stay(lab: Lab) -> None:
    """Crowded sets and those of other machines say nothing of it."""
    wild: dict[str, Any] = {"count": 20, "set_noise": 0.5, "turn_noise": 1e-3, "turns": 6}
    lab.ledger.append(make.sets({}, experiment="busy", crowded=range(20), **wild))
    lab.ledger.append(make.on(make.GPUS, make.sets({}, experiment="there", **wild)))
    lab.run(ONE, seconds=600, look=False)
    assert set(lab.turns) == {12}, "sqrt(12 s / 0.9 s) * 10 % / 3 %"
    lab.ledger.append(make.sets({}, experiment="other", **wild))
    lab.run(experiment(family("g", 1, first=5)), sets=1)
    assert lab.turns == [shortfall.LEAST_TURNS]
    lab.run(experiment(family("f", 2)), sets=24)
    assert ("f", [*BOTH, "c2"]) in lab.sets
    assert set(lab.turns) == {12}, "whatever scatter there is later, and of a candidate that joins others"


# --- what was shown --------------------------------------------------------------------------------------------------


def test_an_answer_is_recorded_once_for_the_sets_it_rests_on(lab: Lab) -> None:
    lab.seconds_per_image = {config(1).run_id: 1 / 64}
    lab.run(ONE, sets=1, exact=True)
    assert lab.records("look") == [], "few sets give no answer"
    lab.run(ONE, sets=4, exact=True)
    (look,) = lab.records("look")
    assert (look.baseline_id, look.set_id, look.windows) == (config(0).run_id, "", ())
    logs = {config(1).run_id: [round(math.log(2), 6)] * 4, "twin": [0.0] * 4}
    assert look.look == {"sets": [r.set_id for r in lab.records("baseline")], "log_ratios": logs}
    lab.run(ONE, sets=4, exact=True)
    assert (lab.sets, lab.records("look")) == ([], [look])
    lab.run(ONE, sets=4)
    assert [len((r.look or {})["sets"]) for r in lab.records("look")] == [4, 8], "typed again it goes on"
    made = lab.run(experiment(family("a", 1), family("b", 1, first=10)), sets=4, look=False)
    made.look(date := "2026-02-02T00:00:00+00:00")
    made.look()
    assert [(r.family, r.date) for r in lab.records("look")[2:]] == [("a", date), ("b", date)], "one look"


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
    lab.forget()
    asked = experiment(family("f", 2, together=True))
    for known, sets in (((), 4), (decided[:1], 4), (decided, 0)):
        lab.run(asked, sets=4, decided=known)
        assert lab.sets == [("f", [*BOTH, "c1", "c2"])] * sets, "sets without one of them would not count"
    lab.forget()
    lab.seconds_per_image = {config(1).run_id: 1 / 64}
    lab.run(asked, sets=6, sets_to_come=lambda logs: int(not any(logs)))  # of c2 whatever there is
    assert lab.sets == [("f", [*BOTH, "c1", "c2"])] * 6


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
    lab.run(experiment(family("f", 5, primary="c1")), seconds=400, further=False)
    assert measured(lab).keys() == {"c5"}


# --- beside other processes: two threads fill the machine's two cores ------------------------------------------------


def test_a_crowded_set_is_kept_does_not_count_and_is_measured_again(lab: Lab) -> None:
    lab.loads = [0.0, 1.0, 0.0, 0.249, 0.25]  # load decides, and not time
    lab.seconds_per_image = {config(1).run_id: 100.0}
    made = lab.run(ONE, sets=4)
    assert len(lab.sets) == len(lab.records("baseline")) == 6
    assert not made.crowded_out
    (look,) = lab.records("look")
    quiet = [r.set_id for r in lab.records("baseline") if r.windows[0].others_cores in (0.0, 0.249)]
    assert (look.look or {})["sets"] == quiet
    lab.run(ONE, sets=4, exact=True)
    assert lab.sets == [], "nothing is left to measure"


def test_after_as_many_crowded_sets_as_planned_four_quiet_ones_are_an_answer_and_fewer_are_none(lab: Lab) -> None:
    asked = experiment(family("f", 2, primary="c1"))
    lab.loads = [0.0] * 4 + [1.0] * 50
    made = lab.run(asked, sets=6)
    assert lab.sets == [("f", [*BOTH, "c1"])] * 10 + [("f", [*BOTH, "c2"])] * 6, "the others are tried as often"
    assert (made.crowded_out, len(lab.records("look"))) == (False, 1)
    for quiet, target, sets in ((3, {"sets": 6}, 9), (0, {"seconds": 300}, 6), (0, {"seconds": 80}, 4)):
        lab.forget()
        lab.loads = [0.0] * quiet + [1.0] * 50
        made = lab.run(ONE, **target)  # type: ignore[arg-type]
        assert (made.crowded_out, len(lab.sets), lab.records("look")) == (True, sets, [])
    lab.forget()
    lab.loads = [2.0]
    assert not lab.run(ONE, seconds=60).crowded_out, "one disturbed set where the time ends is no busy machine"


ON_ONE_CORE = experiment(family("f", 1, primary="c1", shared={"threads": 1}))


class Planning:
    """Questions for a number of cores, in the laboratory, of which one is free; ``asked`` are the cores."""

    def __init__(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab, self.asked = lab, list[int]()
        monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
        monkeypatch.setattr(campaign, "free_cores", lambda: 1)

    def planned(self, asked: Experiment = ONE, **target: Any) -> Campaign:
        made = self.lab.campaign(asked, **target)
        made.on_cores = self._on
        return made

    def _on(self, free: int) -> Campaign:
        self.asked.append(free)
        return self.planned(ON_ONE_CORE, seconds=300)


@pytest.fixture
def asking(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Planning:
    return Planning(lab, monkeypatch)


def test_a_question_that_is_crowded_out_starts_again_with_the_free_cores(lab: Lab, asking: Planning) -> None:
    lab.loads = [1.0] * 100
    found = asking.planned(seconds=300).measure()
    assert asking.asked == [1]
    crowded, alone = ([r for r in lab.records("baseline") if r.config.threads == n] for n in (0, 1))
    assert len(alone) >= 4, "one thread beside a process that takes one core is quiet"
    assert found.measured_sets == len(crowded) + len(alone)
    assert found.experiment == ON_ONE_CORE
    assert found.held.any
    assert [r.baseline_id for r in lab.records("look")] == [config(0, threads=1).run_id]
    assert any("1 of 2" in line for line in lab.lines)


def test_what_too_many_threads_could_not_measure_is_tried_with_fewer(
    lab: Lab, asking: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may disturb every set, and take less than counts as a core; with one thread there are no fewer."""
    monkeypatch.setattr(hardware, "usable_cores", lambda: 3)
    rows: list[tuple[dict[str, Any], int, float, list[int]]] = [
        ({}, 3, 0.3, [2]),
        ({"threads": 3}, 3, 2.0, [2]),
        ({"world_size": 2}, 2, 2.0, [1]),  # of three cores they take two
        ({"threads": 1}, 1, 2.0, []),
    ]
    for shared, free, load, asked in rows:
        monkeypatch.setattr(campaign, "free_cores", lambda free=free: free)
        lab.forget()
        lab.sets, lab.loads, asking.asked = [], [load] * 100, []
        found = asking.planned(experiment(family("f", 1, primary="c1", shared=shared)), seconds=80).measure()
        assert (asking.asked, found.held.any) == (asked, load < 1)


def test_without_time_nothing_is_measured_and_what_is_there_is_shown(lab: Lab, asking: Planning) -> None:
    lab.run(ONE, sets=4, look=False)
    lab.sets = []
    for _ in range(2):
        found = asking.planned(seconds=0.0).measure()
        assert (lab.sets, found.measured_sets, found.held.any) == ([], 0, True)
        assert len(lab.records("look")) == 1
