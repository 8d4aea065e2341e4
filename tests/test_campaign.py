"""The campaign: what is missing, in which order it is measured, and what fits into the time.

The measuring of a set is replaced by one that returns records at once (``test_sets`` tests the real one), and the clock
by one that it moves.
"""

import dataclasses
import re
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import records as make
from campaign_lab import BOTH, Lab, config, experiment, family, laboratory

from ddpm_lab.measure.progress import Progress
from ddpm_lab.plan import MOST_CANDIDATES, Plan


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


def test_a_baseline_that_crashes_once_costs_one_set(lab: Lab) -> None:
    lab.failures = {config(0).run_id: "crashed"}
    lab.passing = True
    assert lab.run(experiment(family("f", 1))).held.any
    assert len(lab.sets) == 4


@pytest.mark.parametrize(("status", "ending"), [("crashed", "measured again"), ("oom", "not tried again now")])
def test_a_lost_set_is_told_with_its_reason_and_counted(
    lab: Lab, capsys: pytest.CaptureFixture[str], status: str, ending: str
) -> None:
    lab.failures = {config(0).run_id: status}
    lab.passing = status == "crashed"
    lab.campaign(experiment(family("a", 1), family("b", 1, first=20)), sets=2).run(Progress("test"))
    said = capsys.readouterr().err.splitlines()
    (told,) = [line for line in said if "lost: " in line]
    assert f"base {status} (" in told
    assert told.endswith(ending)
    counts = [tuple(map(int, re.findall(r"set (\d+) of about (\d+),", line)[0])) for line in said if "starting" in line]
    assert [done for done, _ in counts] == list(range(1, len(lab.sets) + 1))
    assert all(done <= total for done, total in counts)
    assert counts[-1][0] == counts[-1][1]


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
