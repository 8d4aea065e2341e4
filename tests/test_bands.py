"""Names of parallel efficiency: the two published tables literally, and what is refused of one's own."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.checks import ConfigError
from ddpm_lab.explain.bands import DOCUMENTS, S000, S001, bands


def test_the_published_tables() -> None:
    shown = (1.02, 1.0, 0.99, 0.90, 0.89, 0.75, 0.74, 0.50, 0.49, 0.0)
    s001 = ["perfect", "perfect", "excellent", "excellent", "good", "good", *["overhead"] * 4]
    s000 = ["perfect", "perfect", *["good"] * 4, "acceptable", "acceptable", "poor", "poor"]
    assert [S001.name(e) for e in shown] == s001
    assert [S000.name(e) for e in shown] == s000
    assert (S000.threshold, S001.threshold) == (0.75, 0.75)
    assert bands("s000") is S000
    assert bands("S001") is S001


def test_an_efficiency_is_named_as_it_is_shown() -> None:
    assert S001.name(0.7451) == "good", "it is shown as 75 %"
    assert S001.name(0.7449) == "overhead", "it is shown as 74 %"


@pytest.mark.parametrize(
    ("efficiency", "nodes", "words"),
    [
        (0.86, 1, "good scaling on one node (above 85 %)"),
        (0.85, 1, "short of good scaling on one node (above 85 %)"),
        (0.70, 1, "short of good scaling on one node (above 85 %)"),
        (0.69, 1, "poor scaling (below 70 %)"),
        (0.76, 2, "good scaling on several nodes (above 75 %)"),
        (0.75, 4, "short of good scaling on several nodes (above 75 %)"),
        (0.60, 2, "poor scaling (below 70 %)"),
    ],
)
def test_what_s001_asks_of_good_scaling(efficiency: float, nodes: int, words: str) -> None:
    assert S001.verdict(efficiency, nodes) == words
    assert S000.verdict(efficiency, nodes) == ""


@pytest.mark.parametrize(
    "value", [{"good": 0.8, "fair": 0.55, "poor": 0}, "good=80%, fair=55 %, poor=0", "good=0.8,fair=0.55,poor=0%"]
)
def test_a_table_of_ones_own(value: object) -> None:
    own = bands(value)
    assert own.table == (("good", 0.8), ("fair", 0.55), ("poor", 0.0))
    assert own.threshold == 0.8
    assert own.sentence() == "good from 80 %, fair from 55 %, poor below"


def test_the_line_of_a_table_without_good_is_the_lowest_bound() -> None:
    assert bands({"top": 0.9, "middle": 0.6, "rest": 0}).threshold == 0.6


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("s002", ["'s002'", "s000, s001"]),
        ({"good": 0.5, "better": 0.8, "poor": 0}, ["'better'", "0.8", "not below 'good'"]),
        ({"good": 0.5, "same": 0.5, "poor": 0}, ["'same'", "not below"]),
        ({"good": 0.75, "fair": 0.5}, ["'fair'", "0.5", "no name"]),
        ({"good": 75, "poor": 0}, ["'good'", "75", "0.75 for 75 %"]),
        ({"good": True, "poor": 0}, ["'good'", "True"]),
        ({"good": -0.1, "poor": 0}, ["'good'", "-0.1"]),
        ({"good": float("nan"), "poor": 0}, ["'good'", "nan"]),
        ({" ": 0.5, "poor": 0}, ["' '", "name"]),
        ({1: 0.5, "poor": 0}, ["1", "name"]),
        ({"poor": 0}, ["poor", "falling"]),
        ({}, ["{}", "falling"]),
        (0.75, ["0.75", "falling"]),
        ("good=high,poor=0", ["'good=high'"]),
        ("good=0.9,good=0.5,poor=0", ["'good'", "twice"]),
    ],
)
def test_what_is_no_table_is_refused_in_one_sentence(value: object, words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--bands") as refused:
        bands(value, "--bands")
    said = str(refused.value)
    assert "\n" not in said
    for word in words:
        assert word in said


@given(st.floats(min_value=0, max_value=3), st.floats(min_value=0, max_value=3))
def test_a_better_efficiency_never_gets_a_worse_name(one: float, other: float) -> None:
    low, high = sorted((one, other))
    for table in (S000, S001, bands("a=0.9,b=0.3,c=0")):
        names = [name for name, _ in table.table]
        assert names.index(table.name(high)) <= names.index(table.name(low))


@pytest.mark.parametrize("page", ["docs/measuring.md", "notebooks/09_claims.ipynb"])
def test_what_the_published_studies_are_is_told_the_same_everywhere(page: str) -> None:
    text = " ".join((Path(__file__).parents[1] / page).read_text().split())
    assert [key for key, what in DOCUMENTS.items() if f"{key}, {what}" not in text] == []


def test_every_published_study_that_is_named_is_defined() -> None:
    package = Path(__file__).parents[1] / "ddpm_lab"
    named = {key for file in package.rglob("*.py") for key in re.findall(r"\bS00\d\b", file.read_text())}
    assert named == DOCUMENTS.keys()
