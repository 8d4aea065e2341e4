"""The campaign and what was shown: an answer is recorded, and says what is measured further."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path

import pytest
from campaign_lab import BOTH, Lab, config, experiment, family, laboratory

from ddpm_lab.measure.campaign import NO_TIME

ONE = experiment(family("f", 1, primary="c1"))


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return laboratory(tmp_path, monkeypatch)


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


def test_sets_that_nobody_was_shown_are_shown_without_more(lab: Lab) -> None:
    lab.run(ONE, sets=4)
    lab.run(ONE, sets=4, look=False)
    made = lab.campaign(ONE, sets=4, further=False)
    assert made.missing()
    lab.run(ONE, sets=4, further=False)
    assert [len((r.look or {})["sets"]) for r in lab.records("look")] == [4, 8]
    assert lab.sets == []
    assert not lab.campaign(ONE, sets=4, further=False).missing()


def test_sets_of_another_family_do_not_count_as_shown_where_candidates_belong_together(lab: Lab) -> None:
    """Both families compare the same two configurations with one baseline."""
    lab.run(experiment(family("apart", 2)), sets=6)
    together = dataclasses.replace(family("side by side", 2), together=True)
    lab.run(experiment(together), sets=4)
    assert lab.sets == [("side by side", [*BOTH, "c1", "c2"])] * 4
