"""The campaign: primary comparisons before others, and how many sets and turns the time gives.

A set of the laboratory takes 10 s for each group, baseline and twin among them: 30 s with one candidate.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import records as make
from campaign_lab import BOTH, Lab, experiment, family, laboratory

from ddpm_lab.measure import shortfall, turn_plan
from ddpm_lab.measure.campaign import NO_TIME
from ddpm_lab.plan import by_stage

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


# --- the primary comparison ------------------------------------------------------------------------------------------


def test_the_primary_comparison_comes_first_and_alone_in_its_sets(lab: Lab) -> None:
    lab.run(experiment(family("f", 3, primary="c2"), family("g", 1, first=10)), sets=4)
    assert lab.sets[:4] == [("f", [*BOTH, "c2"])] * 4
    assert Counter(map(str, lab.sets[4:])) == {str(("f", [*BOTH, "c1", "c3"])): 4, str(("g", [*BOTH, "c1"])): 4}
    assert lab.primaries == [["c2"]] * 4 + [[]] * 8
    assert {r.label for r in lab.ledger.read()[0] if r.primary} == {"c2"}


def test_without_a_primary_comparison_everything_is_needed() -> None:
    plain, alone = family("f", 2), family("alone", 0, first=10)
    assert by_stage([plain, alone]) == ([plain, alone], [])
    with_primary = dataclasses.replace(plain, primary="c2")
    (first,), (second, third) = by_stage([with_primary, alone])
    assert [label for label, _ in first.candidates] == ["c2"]
    assert [label for label, _ in second.candidates] == ["c1"]
    assert third == alone
    together = dataclasses.replace(with_primary, together=True)
    assert by_stage([together]) == ([together], [])


def test_a_primary_comparison_takes_most_of_the_time_and_others_the_rest(lab: Lab) -> None:
    lab.run(experiment(family("f", 3, primary="c1")), seconds=600)
    assert measured(lab) == {"c1": 12, "c2": 6, "c3": 6}, "360 s in sets of 30 s, 240 s in sets of 40 s"
    assert lab.now == 600


# --- what fits into the time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "sets"), [(330, 11), (329, 10), (80, 4), (79, 3), (1, 1)], ids=str)
def test_sets_fill_the_time_and_the_least_may_overrun_it_by_half(lab: Lab, seconds: float, sets: int) -> None:
    lab.run(ONE, seconds=seconds)
    assert len(lab.sets) == sets
    assert len(lab.sets) == 1 or lab.now <= 1.5 * seconds


def test_no_more_sets_are_planned_than_resolve_the_usual_difference(lab: Lab) -> None:
    lab.run(ONE, seconds=30_000)
    unknown = len(lab.sets)
    assert unknown == turn_plan.sets_that_resolve(0.03, lab.turns[0], turn_plan.WITHIN, turn_plan.BETWEEN)
    lab.ledger.append(make.sets({}, experiment="other", count=60, turns=20, set_noise=0.005, turn_noise=1e-3))
    lab.run(experiment(family("g", 1, first=10)), seconds=30_000)
    assert 4 <= len(lab.sets) < unknown / 2, "on a machine that scatters little fewer are enough"


@pytest.mark.parametrize(
    ("seconds", "sets", "notes"),
    [
        (400, {"c1": 8, "c2": 4, "c3": 4}, []),  # the primary took 240 s, and 160 s are four sets of 40 s
        (300, {"c1": 6, "c2": 4}, ["c3"]),
        (200, {"c1": 4}, ["c3", "c2"]),
    ],
)
def test_others_are_measured_where_their_least_sets_fit_and_noted_where_not(
    lab: Lab, seconds: float, sets: dict[str, int], notes: list[str]
) -> None:
    lab.run(experiment(family("f", 3, primary="c1")), seconds=seconds)
    assert (measured(lab), left_out(lab)) == (sets, notes)
    assert lab.now <= seconds


def test_a_mechanism_lacks_one_set_and_not_four(lab: Lab) -> None:
    lab.run(experiment(family("p", 1, primary="c1"), family("m", 1, first=10, mechanism=True)), seconds=200)
    assert Counter(name for name, _ in lab.sets) == {"p": 4, "m": 1}


# --- so many sets and no others --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sets", [2, 5])
def test_exact_sets_are_just_so_many(lab: Lab, sets: int) -> None:
    for expected in (sets, 0):
        lab.run(ONE, sets=sets, exact=True, seconds=10_000)
        assert len(lab.sets) == expected
    lab.run(ONE, sets=sets + 2, exact=True)
    assert len(lab.sets) == 2


def test_exact_sets_leave_nothing_out_that_was_asked_for(lab: Lab) -> None:
    lab.run(experiment(family("f", 3)), sets=6, exact=True, seconds=130)
    assert (measured(lab), left_out(lab)) == ({"c1": 3, "c2": 3, "c3": 3}, [])


def test_sets_by_resolution_end_when_the_width_says_so(lab: Lab) -> None:
    asked: list[int] = []

    def to_come(logs: object) -> int:
        asked.append(len(list(logs)))  # type: ignore[call-overload]
        return max(0, 5 - asked[-1])

    lab.run(ONE, sets=100, sets_to_come=to_come)
    assert len(lab.sets) == max(asked) == 5


# --- turns -----------------------------------------------------------------------------------------------------------


def test_turns_are_computed_at_the_first_set_and_stay(lab: Lab) -> None:
    lab.run(ONE, seconds=600)
    first = lab.turns[0]
    assert lab.turns == [first] * 20
    assert {r.plan.turns for r in lab.records("candidate")} == {first}
    lab.run(ONE, seconds=90)
    assert lab.turns
    assert set(lab.turns) == {first}, "whatever time there is later"


def test_a_candidate_that_joins_others_has_their_turns(lab: Lab) -> None:
    lab.run(experiment(family("f", 1)), seconds=600, look=False)
    first = lab.turns[0]
    lab.run(experiment(family("f", 2)), sets=12)
    assert lab.sets[0] == ("f", [*BOTH, "c2"])
    assert set(lab.turns) == {first}


@pytest.mark.parametrize(
    ("set_noise", "turn_noise", "turns"),
    # What is assumed where nothing is known: sqrt(12 s / 0.9 s) * 10 % / 3 % = 12.
    [(0.0, 0.5, turn_plan.MOST_TURNS), (0.5, 1e-3, turn_plan.LEAST_TURNS), (None, None, 12)],
)
def test_turns_follow_from_how_this_machine_scatters(
    lab: Lab, set_noise: float | None, turn_noise: float | None, turns: int
) -> None:
    if set_noise is not None and turn_noise is not None:
        known = make.sets({}, experiment="other", count=60, turns=20, set_noise=set_noise, turn_noise=turn_noise)
        lab.ledger.append(known)
    lab.run(ONE, sets=1)
    assert lab.turns == [turns]


def test_crowded_sets_sets_of_one_turn_and_other_machines_say_nothing_of_the_scatter(lab: Lab) -> None:
    wild = {"count": 30, "set_noise": 0.5, "turn_noise": 1e-3}
    lab.ledger.append(make.sets({}, experiment="busy", turns=20, crowded=range(30), **wild))  # type: ignore[arg-type]
    lab.ledger.append(make.sets({}, experiment="short", turns=1, **wild))  # type: ignore[arg-type]
    lab.ledger.append(make.on(make.GPUS, make.sets({}, experiment="there", turns=20, **wild)))  # type: ignore[arg-type]
    lab.run(ONE, sets=1)
    assert lab.turns == [12]


# --- the forecast ----------------------------------------------------------------------------------------------------


def test_the_forecast_is_what_is_missing_times_what_it_took(lab: Lab) -> None:
    asked = experiment(family("f", 2))
    unknown = lab.campaign(asked).forecast()
    assert unknown == 3 * 4 * shortfall.PLACE_SECONDS
    lab.run(asked, sets=1)
    assert lab.campaign(asked).forecast() == 2 * 4 * 7.0  # the stages of a record add up to 7 s
    lab.run(asked)
    assert lab.campaign(asked).forecast() == 0
