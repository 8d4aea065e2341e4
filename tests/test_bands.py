"""Names of parallel efficiency: the two published tables literally, and what is refused of one's own."""

import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.explain.bands import S000, S001, bands


def test_the_published_tables() -> None:
    shown = (1.02, 1.0, 0.99, 0.90, 0.89, 0.7451, 0.7449, 0.50, 0.49, 0.0)  # 0.7451 is shown as 75 %
    s001 = ["perfect", "perfect", "excellent", "excellent", "good", "good", *["overhead"] * 4]
    s000 = ["perfect", "perfect", *["good"] * 4, "acceptable", "acceptable", "poor", "poor"]
    assert [S001.name(e) for e in shown] == s001
    assert [S000.name(e) for e in shown] == s000
    assert (S000.threshold, S001.threshold) == (0.75, 0.75)
    assert (bands("s000"), bands("S001")) == (S000, S001)


def test_what_s001_asks_of_good_scaling() -> None:
    for low, high, nodes, words in (
        (0.86, 0.86, 1, "good scaling on one node"),
        (0.85, 0.85, 1, "short of good scaling on one node"),
        (0.60, 0.70, 1, "short of good scaling on one node"),
        (0.60, 0.69, 1, "poor scaling"),
        (0.60, 0.90, 1, "the interval does not decide"),
        (0.76, 0.80, 2, "good scaling on several nodes"),
        (0.60, 0.60, 2, "poor scaling"),
    ):
        assert S001.verdict(low, high, nodes).startswith(words)
        assert S000.verdict(low, high, nodes) == ""


def test_a_table_of_ones_own() -> None:
    texts = ("good=80%, fair=55 %, poor=0", "good=0.8,fair=0.55,poor=0%")
    for value in ({"good": 0.8, "fair": 0.55, "poor": 0}, *texts):
        own = bands(value)
        assert own.table == (("good", 0.8), ("fair", 0.55), ("poor", 0.0))
        assert own.threshold == 0.8
    assert bands({"top": 0.9, "middle": 0.6, "rest": 0}).threshold == 0.6, "the line of a table without good"


@pytest.mark.parametrize(
    "value",
    [
        *("s002", "good=high,poor=0", "good=0.9,good=0.5,poor=0", 0.75, {}),
        *({"good": 0.5, "same": 0.5, "poor": 0}, {"good": 0.75, "fair": 0.5}, {"good": 75, "poor": 0}),
        *({"good": True, "poor": 0}, {"good": float("nan"), "poor": 0}, {" ": 0.5, "poor": 0}, {1: 0.5, "poor": 0}),
    ],
)
def test_what_is_no_table_is_refused(value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        bands(value, "--bands")
    assert str(refused.value).startswith(f"--bands is {value!r}: choose one of s000, s001, or ")
