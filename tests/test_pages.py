"""What an index says before its questions: what to use, what gains nothing, and what is open."""

from dataclasses import replace
from typing import Any

import pytest

from ddpm_lab.explain.pages import Page, answers

HERE = "This CPU, 2 cores, no GPU"


def page(experiment: str, headline: str, *, state: str = "done", preset: str = "quick", **finding: Any) -> Page:
    given = {"experiment": experiment, "headline": headline, "status": "answered", "verdict": "faster", **finding}
    return Page(name=experiment, title=experiment, state=state, preset=preset, finding=given)


USE = page("recommendation", "Use bf16")
SLOWER = page("multi_gpu", "2 ranks are slower", verdict="slower")
OPEN = page("amp", "No clear answer", status="inconclusive", way_out="ddpm-lab run amp")
FEW = page("recommendation", "Too few sets", status="too few sets", way_out="make report")


@pytest.mark.parametrize(
    ("pages", "found"),
    [
        ([page("amp", "bf16 is 50 % faster"), USE], [("Use", ["bf16"])]),
        ([SLOWER, USE], [("Use", ["bf16"]), ("No gain", ["2 ranks are slower"])]),
        ([OPEN], [("Open", ["No clear answer: ddpm-lab run amp"])]),
        ([page("exchange", "Every candidate failed", status="failed")], [("Open", ["Every candidate failed"])]),
        ([FEW], [("Open", ["Too few sets: make report"])]),
        ([replace(SLOWER, state=state) for state in ("failed", "stopped", "not run")], []),
        ([page(name, "?", verdict="slower") for name in ("profile", "claims", "peers", "quality")], []),
        ([replace(USE, preset="smoke")], [("Open", ["Use bf16"])]),
        ([replace(USE, earlier=True), SLOWER], [("No gain", ["2 ranks are slower"])]),
    ],
)
def test_what_to_use_what_gains_nothing_and_what_is_open(pages: list[Page], found: list[Any]) -> None:
    assert answers(pages) == found


@pytest.mark.parametrize(
    ("values", "preset", "status"),
    [
        ({}, "quick", "answered"),
        ({"hardware": "That GPU"}, "quick", "another machine"),
        ({"published": True}, "quick", "published"),
        ({"hardware": "", "status": "not measured"}, "quick", "not measured"),
        ({}, "smoke", "smoke: only tried"),
        ({"status": "failed"}, "smoke", "failed"),
    ],
)
def test_only_an_answer_of_this_machine_is_green(values: dict[str, Any], preset: str, status: str) -> None:
    """An earlier report may lie in a checkout that several machines share."""
    given = {"hardware": HERE, "verdict": "slower", **values}
    found = replace(page("amp", "bf16 is slower", preset=preset, **given), here=HERE)
    assert (found.status, found.kind == "answered") == (status, status == "answered")
    assert (answers([found]) == []) == (status in ("another machine", "published"))
