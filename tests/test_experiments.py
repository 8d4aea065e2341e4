"""Questions measured for real and what is kept of them; what a report measures, and how its time is divided."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import records as make

from ddpm_lab.checks import ConfigError, LabError
from ddpm_lab.config import OWN, RunConfig
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.quality import NOT_ENOUGH
from ddpm_lab.explain.selection import machine_key
from ddpm_lab.files import LEDGER
from ddpm_lab.ledger import PUBLISHED, Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.plan import OTHERS, PRIMARY
from ddpm_lab.questions import experiments
from ddpm_lab.questions.planning import plan_question
from ddpm_lab.record import LedgerError
from ddpm_lab.training.setting import own_data

BF16 = RunConfig(precision="bf16")


def test_published_records_of_this_machine_go_before_later_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiments, "CHECKOUT", tmp_path / "checkout")
    later = make.environment(date="2026-02-01T10:00:00+00:00")
    records = make.sets({"slow": (RunConfig(read_loss=True), 0.5)}, experiment="peers")
    mine, others = make.on(hardware.machine(), records), [dataclasses.replace(r, environment=later) for r in records]
    for name, found in (("mine", mine), ("others", others)):
        Ledger(tmp_path / "checkout" / PUBLISHED / f"{name}.jsonl").append(found)
    shown = experiments.run("peers", output_dir=tmp_path).study
    assert {r.machine.key for r in shown.records} == {hardware.machine().key}
    assert shown.published
    ledger = Ledger(tmp_path / "checkout" / PUBLISHED / "others.jsonl")
    large = RunConfig(network="s000")
    slow = {"slow": (dataclasses.replace(large, read_loss=True), 0.5)}
    ledger.append(make.sets(slow, baseline=large, experiment="peers"))
    for asked, of in (("s000", "s000"), ("ddpm", RunConfig().network)):
        answered = experiments.run("peers", network=asked, output_dir=tmp_path)
        assert {r.config.network for r in answered.study.records} == {of}, "of this network, if there are any"


def test_the_labs_trainer_and_ones_own_answer_apart(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a ledger holds a question of one's own training alone, that answers it, and no published claim."""
    monkeypatch.setattr(experiments, "CHECKOUT", tmp_path / "checkout")
    own = RunConfig(workload=OWN, options=(("make", "mine:make"),), data_sha256=f"{own_data('mine:make')}1")
    rows = {"bf16": (dataclasses.replace(own, precision="bf16"), 1.7)}
    ledger = Ledger(tmp_path / LEDGER)
    ledger.append(make.on(hardware.machine(), make.sets(rows, baseline=own)))

    def configs(name: str, **how: Any) -> set[str]:
        return {r.config.work_name for r in experiments.run(name, ledger=ledger.path, **how).study.records}

    assert configs("amp") == configs("amp", workload="mine:make") == {"mine:make"}
    assert configs("amp", workload="other:make") == configs("multi_gpu") == set()
    asked = {"output_dir": tmp_path, "data": str(data), "image_size": 8, "cores": 1, "quiet": True}
    assert experiments.study_of(plan_question("claims", **asked)).beside == ()
    elsewhere = Ledger(tmp_path / "elsewhere.jsonl")
    elsewhere.append(make.on(make.GPUS, make.sets({"bf16": (BF16, 1.1)})))
    both = experiments.run("amp", ledger=[ledger.path, elsewhere.path], machine=hardware.machine().key)
    assert {r.config.work_name for r in both.study.records} == {"mine:make"}, "another machine's hides nothing"
    mine = make.on(hardware.machine(), make.sets(rows, baseline=own))
    ledger.append([make.look(mine[0], [mine[0].set_id], "2026-01-04T10:00:00+00:00")])
    ledger.append(make.on(hardware.machine(), make.sets({"bf16": (BF16, 1.1)})))
    assert configs("amp") == {"tiny"}
    looks = experiments.run("amp", ledger=ledger.path).study.looks
    assert [r.config.work_name for r in looks] == ["mine:make"], "it tells how much the machine's sets scatter"


@pytest.mark.slow
def test_a_question_is_measured_once(tmp_path: Path) -> None:
    study = experiments.run("amp", preset="smoke", output_dir=tmp_path).study
    measured = [r for r in study.records if r.set_id]
    members = [("baseline", "fp32"), ("candidate", "bf16"), ("twin", "fp32 again")]
    assert (sorted((r.role, r.label) for r in measured), {r.status for r in measured}) == (members, {"ok"})
    assert {(r.label, r.status) for r in study.records if not r.set_id} == {("fp16", "left out"), ("tf32", "left out")}
    assert measured[0].environment.date
    again = experiments.run("amp", preset="smoke", output_dir=tmp_path).study
    assert [r.set_id for r in again.records] == [r.set_id for r in study.records]
    assert plan_question("amp", preset="smoke", output_dir=tmp_path).forecast() == 0

    tried = experiments.run("amp", preset="smoke", seeds=1, images=80, output_dir=tmp_path).study
    assert [r.label for r in tried.records if r.role == "check"] == ["bf16"]
    assert sorted((r.label, r.status) for r in tried.trials) == [("bf16", "ok"), ("fp32", "ok")]
    mine = dataclasses.replace(tried, published_trials=())  # which hold a verdict on more images
    (judged,) = [row.equivalence for row in comparisons(mine) if row.role == "candidate"]
    assert (judged.verdict, judged.images, judged.seeds) == (NOT_ENOUGH, 80, 1)
    assert {r.code_version for r in tried.trials} == {code_version().key}, "it speaks for the speeds of every question"
    campaign = plan_question(
        "quality", preset="smoke", seeds=1, images=80, candidates=["bf16"], output_dir=tmp_path, quiet=True
    )
    assert campaign.held.trials_to_come(campaign.experiment.trials) == [], "another question does not train them again"


def test_what_cannot_be_asked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LedgerError, match="there is no ledger"):
        experiments.run("amp", ledger=[tmp_path / "none.jsonl"])
    numbers: dict[str, Any] = {"ledger": 5, "machine": 17}  # as papermill reads what is typed
    with pytest.raises(ConfigError, match="ledger is 5: give a list"):
        experiments.run("amp", **numbers)
    with pytest.raises(LedgerError, match="'17' is not in the records: choose one"):
        machine_key(make.sets({}), numbers["machine"])
    assert experiments.recommendation(output_dir=tmp_path / "out").study.records == (), (
        "quick without minutes measures nothing"
    )
    monkeypatch.delattr(experiments, "plan_question")
    for network in ("huge", ["tiny"]):
        with pytest.raises(ConfigError, match=r"network is .*choose one of tiny"):
            experiments.run("peers", published=True, network=network, output_dir=tmp_path)
    for published in ("False", 0, "yes"):
        with pytest.raises(ConfigError, match=f"published is {published!r}"):
            experiments.run("peers", published=published, output_dir=tmp_path)  # type: ignore[arg-type]


SHOWN = [make.environment().date]


class Question:
    """A question of the laboratory: measuring it takes a share of the time that it gets, and adds a set a stage."""

    def __init__(self, name: str, lab: "Laboratory", takes: float = 1.0, complete: bool = False) -> None:
        self.name, self.lab, self.takes, self.looks = name, lab, takes, list[str | None]()
        self.lacks, self.yields = 0.0, list[bool]()
        self.missing, self.look = (lambda: not complete), self.looks.append
        self.compiling_seconds, self.least_seconds = (lambda: 0.0), (lambda: self.lacks)
        self.restarts_as, self.refusal, self.measured_sets = self, LabError(""), 0
        self.told: Callable[[str], None] = lambda _: None

    def measure(self, *, seconds: float, stages: Sequence[str], look: bool, yields: bool = False) -> "Question":
        assert not look, "all answers are shown at once, at the end"
        self.yields.append(yields)
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
        monkeypatch.setattr(experiments, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(experiments, "plan_question", self.plan)
        monkeypatch.setattr(hardware, "environment", make.environment)

    def plan(self, name: str, *, further: bool, say: Callable[[str], None], preset: str) -> "Question":
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


def test_what_yielded_to_others_is_measured_with_what_they_left_where_its_least_sets_fit(lab: Laboratory) -> None:
    lab.add("a", "b", "c", takes=0.5)
    lab.questions["a"].lacks, lab.questions["b"].lacks = 500.0, 100.0
    lab.measure(600)
    primary = [(name, seconds) for name, stage, seconds in lab.done if stage == PRIMARY]
    assert [name for name, _ in primary] == ["a", "b", "c", "b"]
    used = sum(seconds for _, seconds in primary[:3]) / 2
    assert primary[3][1] == pytest.approx(600 - used), "the whole rest: an answer is worth more than rows"
    assert [q.yields[0] for q in lab.questions.values()] == [True, True, False]


@pytest.mark.parametrize(("lacking", "expected"), [(200.0, "abac"), (380.0, "aba")])
def test_what_compiles_waits_for_the_least_sets_of_others(lab: Laboratory, lacking: float, expected: str) -> None:
    """And is left out where they leave less time than it takes."""
    lab.add("a", "b", "c")
    a, b, c = lab.questions.values()
    a.takes = b.takes = 0.5
    c.compiling_seconds = lambda: 60.0
    a.lacks = lacking

    def again(**how: Any) -> Question:
        if lab.done:  # it takes what it lacks, and then lacks nothing
            a.takes, a.lacks = 1.0, 0.0
        return Question.measure(a, **how)

    a.measure = again  # type: ignore[method-assign]
    lab.measure(600)
    primary = [(name, seconds) for name, stage, seconds in lab.done if stage == PRIMARY]
    assert "".join(name for name, _ in primary) == expected
    assert primary[2] == ("a", lacking), "no more than it lacks"
    left_out = ("c", "not measured: compiling would take longer than the time that is left")
    assert (left_out in lab.lines) == (expected == "aba")


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
