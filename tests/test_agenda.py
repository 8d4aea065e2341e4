"""What a report measures: the primary comparisons of all questions before any other, and how the time is divided."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import records as make

from ddpm_lab.checks import ConfigError, LabError
from ddpm_lab.measure import hardware
from ddpm_lab.measure.shortfall import COMPILE_SECONDS
from ddpm_lab.plan import OTHERS, PRIMARY
from ddpm_lab.questions import experiments
from ddpm_lab.record import LedgerError

SHOWN = [make.environment().date]


class Question:
    """A question of the laboratory: measuring it takes a share of the time that it gets, and adds a set a stage."""

    def __init__(
        self, name: str, lab: Laboratory, takes: float = 1.0, complete: bool = False, compiles: int = 0
    ) -> None:
        self.name, self.lab, self.takes, self.looks = name, lab, takes, list[str | None]()
        self.restarts_as, self.refusal, self.measured_sets = self, LabError(""), 0
        self.told: Callable[[str], None] = lambda _: None
        self.experiment = SimpleNamespace(families=())
        self.campaign = SimpleNamespace(
            missing=lambda: not complete,
            compiling_seconds=lambda: compiles * COMPILE_SECONDS,
            look=self.looks.append,
        )

    def measure(self, *, seconds: float, stages: Sequence[str], look: bool) -> Question:
        assert not look, "all answers are shown at once, at the end"
        if str(self.refusal):
            raise self.refusal
        self.lab.done.append((self.name, "+".join(stages), seconds))
        self.lab.now += self.takes * seconds
        self.told("a line")
        self.restarts_as.measured_sets = len(stages)
        return self.restarts_as


class Laboratory:
    """What was measured of which questions, and the clock that it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.done, self.lines = 1000.0, list[Any](), list[tuple[str, str]]()
        self.questions: dict[str, Question] = {}
        self.refused: list[str] = []
        self.combined: Question | None = None
        monkeypatch.setattr(experiments, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(experiments, "plan_question", self.plan)
        monkeypatch.setattr(hardware, "environment", make.environment)
        monkeypatch.setattr(experiments, "combination", lambda planned: planned.name == "amp" and self.combined)

    def plan(self, name: str, *, further: bool, say: Callable[[str], None], preset: str) -> Question:
        assert (further, preset) == (False, "quick"), "what was shown gets no more sets"
        if name in self.refused:
            raise ConfigError("it cannot be asked here")
        self.questions[name].told = say
        return self.questions[name]

    def add(self, *names: str, **values: Any) -> None:
        self.questions |= {name: Question(name, self, **values) for name in names}

    def measure(self, seconds: float = 600.0) -> int:
        asked = {name: {"preset": "quick"} for name in self.questions}
        return experiments.measure_all(asked, seconds=seconds, say=lambda name, line: self.lines.append((name, line)))

    def times(self, stage: str) -> dict[str, float]:
        return {name: seconds for name, mine, seconds in self.done if mine == stage}


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Laboratory:
    return Laboratory(monkeypatch)


def test_all_primary_comparisons_come_before_any_other_in_equal_shares(lab: Laboratory) -> None:
    lab.add("a", "b", "c")
    assert lab.measure(600) == 6
    assert [row[:2] for row in lab.done] == [(name, stage) for stage in (PRIMARY, OTHERS) for name in "abc"]
    assert lab.lines == [(name, "a line") for name in "abcabc"]
    left = 600.0
    for stage, share in ((PRIMARY, experiments.PRIMARY_SHARE), (OTHERS, 1.0)):
        for name, waiting in (("a", 3), ("b", 2), ("c", 1)):
            assert lab.times(stage)[name] == pytest.approx(left * share / waiting)
            left -= left * share / waiting
    assert lab.now == pytest.approx(1600.0)
    assert [question.looks for question in lab.questions.values()] == [SHOWN] * 3


def test_too_little_time_for_the_first_comparison_is_refused_before_anything_is_measured(
    lab: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_short(seconds: float) -> None:
        raise ConfigError(f"{seconds:.0f} s are too short")

    monkeypatch.setattr(experiments, "check_time", too_short)
    lab.add("profile", "amp")
    amp = lab.questions["amp"]
    amp.experiment = SimpleNamespace(families=(SimpleNamespace(candidates=("bf16",)),))
    monkeypatch.setattr(amp, "renewed", lambda *, seconds: SimpleNamespace(campaign=seconds), raising=False)
    with pytest.raises(ConfigError, match="600 s"):
        lab.measure(600)
    assert lab.done == []
    amp.campaign.missing = lambda: False
    assert lab.measure(600) == 2, "what has been measured needs no time"


def test_what_can_be_recommended_together_is_measured_before_the_others(lab: Laboratory) -> None:
    lab.add("multi_gpu", "amp")
    lab.combined = Question("recommendation", lab)
    assert lab.measure() == 6
    after = [("recommendation", f"{PRIMARY}+{OTHERS}"), ("multi_gpu", OTHERS), ("amp", OTHERS)]
    assert [row[:2] for row in lab.done[2:]] == after
    assert lab.combined.looks == SHOWN


def test_time_goes_to_what_compiles_and_what_is_left_to_those_after_it(lab: Laboratory) -> None:
    lab.add("a", takes=0.0)
    lab.add("torch_compile", compiles=1)
    lab.add("c")
    lab.measure(400)
    times = {"a": 400 * 0.75 / 3, "torch_compile": 400 * 0.75 * 2 / 3, "c": 200 * 0.75}
    assert lab.times(PRIMARY) == pytest.approx(times)


def test_only_what_lacks_something_is_measured_and_what_is_refused_is_said(lab: Laboratory) -> None:
    lab.add("all_there", complete=True)
    lab.add("multi_gpu", "workers", "amp")
    lab.questions["amp"].refusal = LedgerError("the code was changed")
    lab.refused = ["multi_gpu"]
    assert lab.measure() == 2
    assert [row[:2] for row in lab.done] == [("workers", PRIMARY), ("workers", OTHERS)]
    assert lab.lines.count(("multi_gpu", "not measured: it cannot be asked here")) == 1
    assert ("amp", "not measured: the code was changed") in lab.lines
    assert (lab.questions["all_there"].looks, lab.questions["amp"].looks) == ([], [])


def test_a_question_that_started_again_with_fewer_cores_goes_on_with_these(lab: Laboratory) -> None:
    lab.add("amp")
    again = lab.questions["amp"].restarts_as = Question("amp on one core", lab)
    lab.measure()
    assert [row[:2] for row in lab.done] == [("amp", PRIMARY), ("amp on one core", OTHERS)]
    assert (again.looks, lab.questions["amp"].looks) == (SHOWN, [])
