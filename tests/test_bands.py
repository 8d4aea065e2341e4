"""Names of parallel efficiency: the two published tables literally, and what is refused of one's own."""

import pytest

from ddpm_lab.checks import ConfigError
from ddpm_lab.explain.bands import S000, S001, bands


def test_the_published_tables_and_one_of_ones_own() -> None:
    shown = (1.02, 1.0, 0.99, 0.90, 0.89, 0.7451, 0.7449, 0.50, 0.49, 0.0)  # 0.7451 is shown as 75 %
    s001 = ["perfect", "perfect", "excellent", "excellent", "good", "good", *["overhead"] * 4]
    s000 = ["perfect", "perfect", *["good"] * 4, "acceptable", "acceptable", "poor", "poor"]
    assert [S001.name(e) for e in shown] == s001
    assert [S000.name(e) for e in shown] == s000
    assert (bands("s000"), bands("S001")) == (S000, S001)
    own = bands("good=80%, fair=0.55 ,poor=0%")
    assert (own.table, own.threshold) == ((("good", 0.8), ("fair", 0.55), ("poor", 0.0)), 0.8)
    assert bands("top=0.9,middle=60%,rest=0").threshold == 0.6, "the line of a table without good"


@pytest.mark.parametrize(
    "value",
    [
        *("s002", "good=high,poor=0", "good=0.9,good=0.5,poor=0", "good=0.5,same=0.5,poor=0", "good=75%,fair=50%"),
        *("good=75,poor=0", "good=nan,poor=0", " =0.5,poor=0", "poor=0", "", 0.75),
    ],
)
def test_what_is_no_table_is_refused(value: object) -> None:
    with pytest.raises(ConfigError) as refused:
        bands(value, "--bands")
    assert str(refused.value).startswith(f"--bands is {value!r}: choose one of s000, s001, or ")
