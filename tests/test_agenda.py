"""The agenda of a report: the primary comparisons of all questions before any other, and how the time is divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import records as make

from ddpm_lab.checks import ConfigError, LabError
from ddpm_lab.measure.shortfall import COMPILE_SECONDS
from ddpm_lab.plan import OTHERS, PRIMARY
from ddpm_lab.questions import agenda, experiments
from ddpm_lab.record import LedgerError

BOTH = (PRIMARY, OTHERS)


@dataclass
class Question:
    """A question of the laboratory: measuring it takes a share of the time that it gets, and adds a set a stage."""

    name: str
    lab: Laboratory
    takes: float = 1.0
    complete: bool = False
    compiles: int = 0
    restarts_as: Question | None = None
    refusal: LabError | None = None
    looks: list[str | None] = field(default_factory=list)
    told: Callable[[str], None] = lambda _: None

    @property
    def campaign(self) -> Any:
        return SimpleNamespace(
            experiment=SimpleNamespace(families=()),
            missing=lambda: not self.complete,
            compiling_seconds=lambda: self.compiles * COMPILE_SECONDS,
            look=self.looks.append,
        )

    def measure(self, *, seconds: float, stages: Sequence[str], look: bool) -> Any:
        assert not look, "all answers are shown at once, at the end"
        if self.refusal:
            raise self.refusal
        self.lab.done.append((self.name, tuple(stages), seconds))
        self.lab.now += self.takes * seconds
        self.told("a line")
        return SimpleNamespace(planned=self.restarts_as or self, measured_sets=len(stages))


class Laboratory:
    """What was measured of which questions, and the clock that it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.done: list[tuple[str, tuple[str, ...], float]] = []
        self.questions: dict[str, Question] = {}
        self.combined: Question | None = None
        self.combines: list[object] = []
        self.settings: dict[str, dict[str, Any]] = {}
        self.refused: list[str] = []
        self.lines: list[tuple[str, str]] = []
        monkeypatch.setattr(agenda, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(agenda, "plan_question", self.plan)
        monkeypatch.setattr(agenda, "environment", make.environment)
        monkeypatch.setattr(experiments, "combination", self.combination)

    def plan(self, name: str, *, further: bool, say: Callable[[str], None], **settings: Any) -> Question:
        assert not further, "what was shown gets no more sets"
        self.settings[name] = settings
        if name in self.refused:
            raise ConfigError("it cannot be asked here")
        self.questions[name].told = say
        return self.questions[name]

    def combination(self, planned: Question) -> Question | None:
        self.combines.append(planned)
        return self.combined

    def add(self, *names: str, **values: Any) -> None:
        self.questions |= {name: Question(name, self, **values) for name in names}

    def measure(self, seconds: float = 600.0) -> int:
        def say(name: str, line: str) -> None:
            self.lines.append((name, line))

        return agenda.measure({name: {"preset": "quick"} for name in self.questions}, seconds=seconds, say=say)

    def order(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(name, stages) for name, stages, _ in self.done]

    def times(self, *stages: str) -> dict[str, float]:
        return {name: seconds for name, found, seconds in self.done if found == stages}


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Laboratory:
    return Laboratory(monkeypatch)


def test_all_primary_comparisons_come_before_any_other(lab: Laboratory) -> None:
    lab.add("multi_gpu", "amp", "workers")
    assert lab.measure() == 6
    names = ["multi_gpu", "amp", "workers"]
    assert lab.order() == [*((name, (PRIMARY,)) for name in names), *((name, (OTHERS,)) for name in names)]
    assert lab.settings == {name: {"preset": "quick"} for name in names}
    assert lab.lines == [(name, "a line") for name in names * 2]


def test_what_can_be_recommended_together_is_measured_before_the_others(lab: Laboratory) -> None:
    lab.add("multi_gpu", "amp")
    lab.combined = Question("recommendation", lab)
    assert lab.measure() == 6
    assert lab.order()[2:] == [("recommendation", BOTH), ("multi_gpu", (OTHERS,)), ("amp", (OTHERS,))]
    assert lab.combines == [lab.questions["amp"]]


def test_a_question_gets_an_equal_share_of_what_the_primary_comparisons_may_take(lab: Laboratory) -> None:
    lab.add("a", "b", "c", takes=1.0)
    lab.measure(600)
    share = agenda.PRIMARY_SHARE
    left = 600.0
    for name, waiting in (("a", 3), ("b", 2), ("c", 1)):
        assert lab.times(PRIMARY)[name] == pytest.approx(left * share / waiting)
        left -= left * share / waiting
    for name, waiting in (("a", 3), ("b", 2), ("c", 1)):
        assert lab.times(OTHERS)[name] == pytest.approx(left / waiting)
        left -= left / waiting
    assert lab.now == pytest.approx(1600.0)


def test_time_that_a_question_leaves_goes_to_those_after_it(lab: Laboratory) -> None:
    lab.add("a", takes=0.0)
    lab.add("b", takes=1.0)
    lab.measure(400)
    assert lab.times(PRIMARY) == pytest.approx({"a": 150.0, "b": 300.0})
    assert lab.times(OTHERS) == pytest.approx({"a": 50.0, "b": 100.0})


def test_a_question_that_compiles_gets_the_time_for_it(lab: Laboratory) -> None:
    lab.add("torch_compile", compiles=1)
    lab.add("b", "c")
    lab.measure(400)
    assert lab.times(PRIMARY)["torch_compile"] == pytest.approx(400 * 0.75 * 2 / 4)
    assert lab.times(PRIMARY)["b"] == pytest.approx(250 * 0.75 / 2)


def test_a_question_gets_no_less_than_is_worth_its_start(lab: Laboratory) -> None:
    lab.add("a", "b", "c", "d")
    lab.measure(20)
    assert set(lab.times(PRIMARY).values()) == {agenda.LEAST_SECONDS}
    assert set(lab.times(OTHERS).values()) == {1.0}, "and the others no time below 0"


def test_nothing_is_measured_where_nothing_is_missing(lab: Laboratory) -> None:
    lab.add("amp", "workers", complete=True)
    lab.combined = Question("recommendation", lab)
    assert lab.measure() == 0
    assert (lab.done, lab.combines) == ([], [])
    assert lab.questions["amp"].looks == []


def test_only_what_lacks_something_is_measured(lab: Laboratory) -> None:
    lab.add("amp", complete=True)
    lab.add("workers")
    lab.measure(400)
    assert lab.order() == [("workers", (PRIMARY,)), ("workers", (OTHERS,))]
    assert lab.times(PRIMARY) == {"workers": pytest.approx(300.0)}
    assert lab.combines == [lab.questions["workers"]]


def test_what_is_refused_of_one_question_is_said_and_the_others_go_on(lab: Laboratory) -> None:
    lab.add("multi_gpu", "workers")
    lab.add("amp", refusal=LedgerError("the code was changed"))
    lab.refused = ["multi_gpu"]
    assert lab.measure() == 2
    assert lab.order() == [("workers", (PRIMARY,)), ("workers", (OTHERS,))]
    assert ("multi_gpu", "not measured: it cannot be asked here") in lab.lines
    assert ("amp", "not measured: the code was changed") in lab.lines
    assert lab.questions["workers"].looks == [make.environment().date]


def test_all_answers_are_shown_at_one_date(lab: Laboratory) -> None:
    lab.add("amp", "workers")
    lab.combined = Question("recommendation", lab)
    lab.measure()
    looks = [question.looks for question in (*lab.questions.values(), lab.combined)]
    assert looks == [[make.environment().date]] * 3


def test_a_question_that_started_again_with_fewer_cores_goes_on_with_these(lab: Laboratory) -> None:
    again = Question("amp on one core", lab)
    lab.add("amp", restarts_as=again)
    lab.measure()
    assert lab.order() == [("amp", (PRIMARY,)), ("amp on one core", (OTHERS,))]
    assert again.looks == [make.environment().date]
    assert lab.questions["amp"].looks == []
