"""What an index says before its questions: what to use, what gains nothing, and what is open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ddpm_lab.explain.pages import Page, answers


def page(experiment: str, headline: str, *, state: str = "done", preset: str = "quick", **finding: Any) -> Page:
    given = {"experiment": experiment, "headline": headline, "status": "answered", "verdict": "faster", **finding}
    return Page(name=experiment, title=experiment, state=state, preset=preset, finding=given)


USE = page("recommendation", "Use bf16")


def test_three_lines_say_what_to_use_what_gains_nothing_and_what_is_open() -> None:
    found = answers(
        [
            page("amp", "bf16 is 50 % faster"),
            page("workers", "Training with 2 workers is as fast", verdict="same speed"),
            page("multi_gpu", "2 ranks are slower", verdict="slower"),
            page("torch_compile", "No clear answer", status="inconclusive", way_out="ddpm-lab run torch_compile"),
            page("exchange", "Every candidate failed", status="failed"),
            USE,
        ]
    )
    assert found == [
        ("Use", ["bf16"]),
        ("No gain", ["Training with 2 workers is as fast", "2 ranks are slower"]),
        ("Open", ["No clear answer: ddpm-lab run torch_compile", "Every candidate failed"]),
    ]


def test_lines_without_anything_are_left_out() -> None:
    assert answers([USE]) == [("Use", ["bf16"])]
    assert answers([]) == []


def test_a_recommendation_without_an_answer_is_open() -> None:
    few = page("recommendation", "Too few sets", status="too few sets", way_out="make report")
    assert answers([few]) == [("Open", ["Too few sets: make report"])]


def test_records_of_another_machine_and_pages_that_did_not_end_say_nothing() -> None:
    others = page("amp", "2 GPUs are slower", verdict="slower", published=True)
    assert (others.status, others.kind) == ("another machine", "unresolved")
    broken = [page("amp", "?", verdict="slower", state=state) for state in ("failed", "stopped", "not run")]
    assert answers([others, *broken]) == []


def test_pages_of_another_machine_are_no_answer_for_this_one() -> None:
    """An earlier report in a checkout that several machines share."""
    mine, others = (
        replace(page("amp", f"{name} says", hardware=name, verdict="slower"), here="This CPU, 2 cores, no GPU")
        for name in ("This CPU, 2 cores, no GPU", "That GPU")
    )
    nothing = replace(page("amp", "Nothing is measured yet", status="not measured", hardware=""), here=mine.here)
    assert (mine.status, mine.kind) == ("answered", "answered")
    assert (others.status, others.kind) == ("another machine", "unresolved")
    assert "That GPU" in others.facts
    assert replace(mine, finding={**mine.finding, "published": True}).status == "published"
    assert nothing.status == "not measured"
    assert answers([mine, others]) == [("No gain", [mine.headline])]


def test_questions_about_no_setting_are_no_gain_and_not_open() -> None:
    assert answers([page(name, "?", verdict="slower") for name in ("profile", "claims", "peers", "quality")]) == []


def test_smoke_is_never_green() -> None:
    tried = page("recommendation", "Use bf16", preset="smoke")
    assert tried.status == "smoke: only tried"
    assert tried.kind == "unresolved"
    assert [name for name, _ in answers([tried])] == ["Open"]
    assert page("amp", "failed", preset="smoke", status="failed").status == "failed"
