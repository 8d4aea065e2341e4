"""The campaign: what is missing, in which order it is measured, and what fits into the time.

The measuring of a set is replaced by one that returns records at once (``test_sets`` tests the real one), and the clock
by one that it moves.
"""

import dataclasses
import re
from collections import Counter
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import campaign
from ddpm_lab.measure.campaign import Campaign, Target
from ddpm_lab.measure.code_version import CodeVersion
from ddpm_lab.measure.progress import Progress
from ddpm_lab.measure.seat import Instrument, Member
from ddpm_lab.measure.trials import COMPILE_SECONDS
from ddpm_lab.plan import MOST_CANDIDATES, Experiment, Family, Plan
from ddpm_lab.record import RunRecord, Window

WINDOW = Window(
    turn=0,
    position=0,
    start_seconds=0.0,
    seconds=1.0,
    images=32,
    steps=1,
    rank_seconds=(1.0,),
    step_seconds=(1.0,),
    data_seconds=(0.0,),
)
PLACE_SECONDS = 10.0


class Lab:
    """Measures at once and without fail, except where ``failures`` (run id -> status) says otherwise."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.folder = folder
        self.now = 0.0
        self.failures: dict[str, str] = {}
        self.passing = False
        self.sets: list[tuple[str, list[str]]] = []
        self.alone: list[tuple[str, str]] = []
        self.traces: list[Path] = []
        self.stop_after: int | None = None

    def measure_set(
        self, instrument: Instrument, *, experiment: str, family: str, plan: Plan, members: list[Member]
    ) -> list[RunRecord]:
        if len(self.sets) == self.stop_after:
            raise KeyboardInterrupt
        assert len(self.sets) < 50, "the campaign never ends"
        self.sets.append((family, [m.label for m in members]))
        self.now += PLACE_SECONDS * len(members)
        baseline, twin, *_ = members
        assert (baseline.role, twin.role) == ("baseline", "twin")
        assert baseline.config == twin.config
        values: dict[str, Any] = {"experiment": experiment, "family": family, "plan": plan, "set_id": f"set-{self.now}"}
        records = [self._record(m, baseline, instrument.code, **values) for m in members]
        lost = [r for r in records if r.role in ("baseline", "twin") and r.status != "ok"]
        if self.passing:
            self.failures = {}
        return lost or records

    def measure_alone(
        self,
        instrument: Instrument,
        *,
        experiment: str,
        family: str,
        plan: Plan,
        member: Member,
        work: object,
    ) -> RunRecord:
        del work  # how it is done is not for this laboratory
        self.alone.append((member.role, member.label))
        self.now += PLACE_SECONDS
        values: dict[str, Any] = {"experiment": experiment, "family": family, "plan": plan, "set_id": f"one-{self.now}"}
        found = self._record(member, member, instrument.code, **values)
        return dataclasses.replace(found, compile_cache="cold")

    def _record(self, member: Member, baseline: Member, code: CodeVersion, **values: Any) -> RunRecord:
        status = self.failures.get(member.config.run_id, "ok")
        return make.record(
            member.config,
            role=member.role,
            label=member.label,
            baseline_id=baseline.config.run_id,
            code_version=code.key,
            status=status,
            stages={"start": 3.0, "steady": 4.0},
            windows=(WINDOW,) if status == "ok" else (),
            **values,
        )

    def campaign(self, experiment: Experiment, *, code: str = "code", **target: Any) -> Campaign:
        """A new campaign, as a new process would make it."""
        values = {"plan": Plan(), "sets": 3, "cold_compiles": 2, **target}
        instrument = Instrument(
            code=CodeVersion(code, (), {}), cache=self.folder / "cache", usable_cores=2, data_name="synthetic images"
        )
        return Campaign(experiment, Target(**values), instrument, self.ledger, self.folder)

    def run(self, experiment: Experiment, **target: Any) -> Campaign:
        """Run a new campaign; ``sets`` and ``alone`` then hold what it measured."""
        self.sets, self.alone = [], []
        self.traces.clear()
        made = self.campaign(experiment, **target)
        made.run(Progress("test", quiet=True))
        assert made.measured_sets == len(self.sets) + len(self.alone)
        return made

    def records(self, role: str) -> list[RunRecord]:
        return [r for r in self.ledger.read()[0] if r.role == role]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A laboratory on an empty ledger."""
    made = Lab(tmp_path)
    monkeypatch.setattr(campaign, "measure_set", made.measure_set)
    monkeypatch.setattr(campaign, "measure_alone", made.measure_alone)
    monkeypatch.setattr(campaign, "profile_alone", made.traces.extend)
    monkeypatch.setattr(campaign, "environment", make.environment)
    monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def config(number: int, **settings: Any) -> RunConfig:
    """Configurations that differ."""
    return RunConfig(seed=number, **settings)


def family(name: str, candidates: int, first: int = 0, **settings: Any) -> Family:
    """A family of candidates c1, c2, ... beside the baseline."""
    return Family(
        name=name,
        baseline=config(first),
        baseline_label="base",
        candidates=tuple((f"c{i}", config(first + i)) for i in range(1, candidates + 1)),
        **settings,
    )


def experiment(*families: Family, **values: Any) -> Experiment:
    return Experiment(name="amp", families=families, **values)


BOTH = ["base", "base again"]


def test_a_set_holds_the_baseline_its_twin_and_all_candidates(lab: Lab) -> None:
    lab.run(experiment(family("f", 2)))
    assert lab.sets == [("f", [*BOTH, "c1", "c2"])] * 3
    assert {(r.role, r.baseline_id) for r in lab.ledger.read()[0]} == {
        (role, config(0).run_id) for role in ("baseline", "twin", "candidate")
    }


def test_what_the_ledger_has_is_not_measured_again(lab: Lab) -> None:
    asked = experiment(family("f", 2))
    lab.run(asked)
    lines = lab.ledger.path.read_text().splitlines(keepends=True)
    assert lab.run(asked).measured_sets == 0
    assert lab.ledger.path.read_text().splitlines(keepends=True) == lines
    lab.ledger.path.write_text("".join(lines[:4] + lines[8:]))  # the second set is lost
    lab.run(asked)
    assert lab.sets == [("f", [*BOTH, "c1", "c2"])]
    lab.run(asked, sets=5)
    assert len(lab.sets) == 2


def test_a_set_without_its_twin_is_no_set(lab: Lab) -> None:
    asked = experiment(family("f", 1))
    lab.run(asked, sets=1)
    base, _twin, candidate = lab.ledger.path.read_text().splitlines(keepends=True)
    lab.ledger.path.write_text(base + candidate)
    lab.run(asked, sets=1)
    assert len(lab.sets) == 1


def test_an_interrupt_costs_the_unfinished_set(lab: Lab) -> None:
    asked = experiment(family("f", 1))
    lab.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        lab.run(asked)
    lab.stop_after = None
    lab.run(asked)
    assert len(lab.sets) == 1
    assert len(lab.records("baseline")) == 3


@pytest.mark.parametrize("other", [{"code": "other"}, {"plan": Plan(turns=5)}])
def test_sets_of_another_code_or_plan_do_not_count(lab: Lab, other: dict[str, Any]) -> None:
    asked = experiment(family("f", 1))
    lab.run(asked, **other)
    lab.run(asked)
    assert len(lab.sets) == 3


def test_sets_of_another_machine_or_data_do_not_count(lab: Lab) -> None:
    asked = experiment(family("f", 1))
    lab.run(asked)
    here = lab.ledger.read()[0]
    lab.ledger.path.unlink()
    lab.ledger.append(make.on(make.GPUS, here))
    elsewhere = [dataclasses.replace(r, config=dataclasses.replace(r.config, data_sha256="ff")) for r in here]
    lab.ledger.append(elsewhere)
    lab.run(asked)
    assert len(lab.sets) == 3


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["oom", "diverged", "refused"])
def test_a_lasting_failure_is_not_tried_again(lab: Lab, status: str) -> None:
    asked = experiment(family("f", 2))
    lab.failures = {config(2).run_id: status}
    lab.run(asked)
    assert lab.sets == [("f", [*BOTH, "c1", "c2"]), ("f", [*BOTH, "c1"]), ("f", [*BOTH, "c1"])]
    lab.run(asked)
    assert lab.sets == []
    assert [r.status for r in lab.records("candidate") if r.label == "c2"] == [status]


@pytest.mark.parametrize("status", ["crashed", "timed out"])
def test_a_failure_that_may_pass_is_tried_twice_and_then_left_to_the_next_run(lab: Lab, status: str) -> None:
    asked = experiment(family("f", 2))
    lab.failures = {config(2).run_id: status}
    lab.run(asked)
    assert lab.sets == [("f", [*BOTH, "c1", "c2"]), ("f", [*BOTH, "c2"]), ("f", [*BOTH, "c1"]), ("f", [*BOTH, "c1"])]
    lab.failures = {}
    lab.run(asked)
    assert lab.sets == [("f", [*BOTH, "c2"])] * 3
    lab.run(asked)
    assert lab.sets == []


def test_what_is_not_supported_is_left_to_the_next_run(lab: Lab) -> None:
    asked = experiment(family("f", 1))
    lab.failures = {config(1).run_id: "unsupported"}
    lab.run(asked)
    assert len(lab.sets) == 1
    lab.run(asked)
    assert len(lab.sets) == 1


def test_a_failed_baseline_ends_its_family_and_no_other(lab: Lab) -> None:
    asked = experiment(family("bad", 2), family("good", 1, first=10))
    lab.failures = {config(0).run_id: "crashed"}
    made = lab.run(asked)
    assert Counter(name for name, _ in lab.sets) == {"bad": 2, "good": 3}
    assert made.held.any
    lab.run(asked)
    assert [name for name, _ in lab.sets] == ["bad", "bad"]


def test_a_baseline_that_crashes_once_costs_one_set(lab: Lab) -> None:
    lab.failures = {config(0).run_id: "crashed"}
    lab.passing = True
    assert lab.run(experiment(family("f", 1))).held.any
    assert len(lab.sets) == 4


@pytest.mark.parametrize(("status", "ending"), [("crashed", "measured again"), ("oom", "not tried again now")])
def test_a_lost_set_is_told_with_its_reason_and_counted(
    lab: Lab, capsys: pytest.CaptureFixture[str], status: str, ending: str
) -> None:
    lab.failures = {config(0).run_id: status}
    lab.passing = status == "crashed"
    lab.campaign(experiment(family("a", 1), family("b", 1, first=20)), sets=2).run(Progress("test"))
    said = capsys.readouterr().err.splitlines()
    (told,) = [line for line in said if "lost: " in line]
    assert f"base {status} (" in told
    assert told.endswith(ending)
    counts = [tuple(map(int, re.findall(r"set (\d+) of (\d+),", line)[0])) for line in said if "starting" in line]
    assert [done for done, _ in counts] == list(range(1, len(lab.sets) + 1))
    assert all(done <= total for done, total in counts)
    assert counts[-1][0] == counts[-1][1]


def test_a_campaign_in_which_all_fails_holds_nothing(lab: Lab) -> None:
    lab.failures = {config(0).run_id: "crashed"}
    assert not lab.run(experiment(family("f", 1))).held.any


# --- order -----------------------------------------------------------------------------------------------------------


def test_families_grow_at_the_same_pace(lab: Lab) -> None:
    names = ("a", "b", "c")
    lab.run(experiment(*(family(name, 1, first=10 * i) for i, name in enumerate(names))), sets=4)
    for so_far in accumulate(([name] for name, _ in lab.sets), lambda one, other: one + other):
        counts = [so_far.count(name) for name in names]
        assert max(counts) - min(counts) <= 1
    assert len(lab.sets) == 12


def test_a_family_that_comes_last_waits_for_all_others(lab: Lab) -> None:
    late = family("late", 1, first=20, last=True)
    asked = experiment(late, family("a", 1), family("b", 1, first=10))
    lab.run(asked)
    names = [name for name, _ in lab.sets]
    assert Counter(names[:6]) == {"a": 3, "b": 3}
    assert names[6:] == ["late"] * 3


def test_a_family_that_comes_last_gets_the_time_that_is_left_and_takes_none(lab: Lab) -> None:
    late = family("late", 4, first=20, last=True)
    lab.run(experiment(family("a", 2), late), sets=6, seconds=6 * 40 + 60 + 1)
    assert [name for name, _ in lab.sets] == ["a"] * 6 + ["late"]
    assert not lab.records("note"), "what is certain to fit leaves nothing out for what may not"


def test_a_candidate_added_later_gets_sets_of_its_own_with_baseline_and_twin(lab: Lab) -> None:
    lab.run(experiment(family("f", 1)))
    lab.run(experiment(family("f", 2)))
    assert lab.sets == [("f", [*BOTH, "c2"])] * 3


def test_unequal_candidates_end_with_equally_many_sets(lab: Lab) -> None:
    lab.run(experiment(family("f", 1)), sets=2)
    lab.run(experiment(family("f", 2)))
    assert lab.sets == [("f", [*BOTH, "c2"]), ("f", [*BOTH, "c2"]), ("f", [*BOTH, "c1", "c2"])]


def test_many_candidates_are_spread_over_sets(lab: Lab) -> None:
    asked = experiment(family("f", 7))
    before = lab.campaign(asked, sets=2)
    assert before.forecast() > 0
    lab.run(asked, sets=2)
    assert all(labels[:2] == BOTH and len(labels) <= 2 + MOST_CANDIDATES for _, labels in lab.sets)
    measured = Counter(label for _, labels in lab.sets for label in labels[2:])
    assert measured == {f"c{i}": 2 for i in range(1, 8)}
    assert len(lab.sets) == 4


def test_candidates_that_belong_together_are_in_every_set(lab: Lab) -> None:
    lab.run(experiment(dataclasses.replace(family("f", 7), together=True)), sets=2)
    assert lab.sets == [("f", [*BOTH, *(f"c{i}" for i in range(1, 8))])] * 2


def test_a_family_without_candidates_is_measured_against_its_twin(lab: Lab) -> None:
    lab.run(experiment(family("alone", 0)))
    assert lab.sets == [("alone", BOTH)] * 3
    lab.run(experiment(family("alone", 0)))
    assert lab.sets == []


def test_a_mechanism_needs_one_set(lab: Lab) -> None:
    lab.run(experiment(family("f", 1, mechanism=True)))
    assert len(lab.sets) == 1


# --- time ------------------------------------------------------------------------------------------------------------


def test_a_budget_leaves_the_last_candidates_out_and_says_so(lab: Lab) -> None:
    asked = experiment(family("f", 4))
    # The first set takes 60 s; six sets of one candidate fit into what is left, of two they do not.
    lab.run(asked, sets=6, seconds=60 + 5 * 30 + 1)
    assert lab.sets == [("f", [*BOTH, "c1", "c2", "c3", "c4"])] + [("f", [*BOTH, "c1"])] * 5
    notes = lab.records("note")
    assert [(n.label, n.run_id, n.baseline_id, n.status, n.set_id) for n in notes] == [
        (f"c{i}", config(i).run_id, config(0).run_id, "left out", "") for i in (4, 3, 2)
    ]
    assert {n.reason for n in notes} == {"did not fit into the time that was given"}
    lab.run(asked, sets=6)
    assert lab.sets == [("f", [*BOTH, "c2", "c3", "c4"])] * 5, "with more time they are measured after all"


def test_the_family_with_most_candidates_gives_way_first(lab: Lab) -> None:
    asked = experiment(family("small", 1), family("large", 3, first=10))
    # First sets: 30 s and 50 s. Five more of each with one and two candidates: 150 s and 200 s.
    lab.run(asked, sets=6, seconds=80 + 150 + 200 + 1)
    assert [(n.family, n.label) for n in lab.records("note")] == [("large", "c3")]
    assert Counter(name for name, _ in lab.sets) == {"small": 6, "large": 6}


def test_what_fits_is_decided_when_every_family_has_its_cost(lab: Lab) -> None:
    """Also where a family begins with more sets than another, or fails."""
    lab.run(experiment(family("small", 1)), sets=2)
    lab.failures = {config(20).run_id: "crashed"}
    asked = experiment(family("small", 1), family("large", 3, first=10), family("broken", 1, first=20))
    # Two sets of large, two tries of broken, one of small; then three of small and four of large with two candidates.
    lab.run(asked, sets=6, seconds=(2 * 50 + 2 * 30 + 30) + 3 * 30 + 4 * 40 + 1)
    assert [(n.family, n.label) for n in lab.records("note")] == [("large", "c3")]


def test_enough_time_leaves_nothing_out(lab: Lab) -> None:
    lab.run(experiment(family("f", 4)), sets=6, seconds=361)
    assert len(lab.sets) == 6
    assert lab.records("note") == []


def test_time_that_is_too_short_gives_fewer_sets_but_at_least_one(lab: Lab) -> None:
    lab.run(experiment(family("f", 1)), sets=6, seconds=100)
    assert len(lab.sets) == 3  # of 30 s each
    assert lab.now <= 100
    lab.ledger.path.unlink()
    lab.run(experiment(family("f", 1)), sets=6, seconds=1)
    assert len(lab.sets) == 1


def test_the_forecast_is_what_is_missing_times_what_it_took(lab: Lab) -> None:
    asked = experiment(family("f", 2))
    unknown = lab.campaign(asked).forecast()
    assert unknown == 3 * 4 * campaign.PLACE_SECONDS
    lab.run(asked, sets=1)
    assert lab.campaign(asked).forecast() == 2 * 4 * 7.0  # the stages of a record add up to 7 s
    lab.run(asked)
    assert lab.campaign(asked).forecast() == 0


def test_the_forecast_counts_profiles_and_compiles(lab: Lab) -> None:
    compiled = dataclasses.replace(family("f", 0), candidates=(("compiled", config(0, compile="whole")),))
    profile = ("f", "fp32", config(0, purpose="profile"))
    assert lab.campaign(Experiment(name="profile", families=(), profiles=(profile,))).forecast() > 0
    with_compiles = lab.campaign(experiment(compiled)).forecast()
    without = lab.campaign(experiment(compiled), cold_compiles=0).forecast()
    assert with_compiles - without == 2 * COMPILE_SECONDS


# --- alone: cold compiles, profiles; and notes -----------------------------------------------------------------------

COMPILED = Family(
    name="f",
    baseline=config(0),
    baseline_label="eager",
    candidates=(("compiled", config(0, compile="whole")),),
)


def test_cold_compiles_come_first_and_once(lab: Lab) -> None:
    lab.run(experiment(COMPILED), cold_compiles=1)
    assert lab.alone == [("cold", "compiled")]
    assert len(lab.sets) == 3
    assert [r.baseline_id for r in lab.records("cold")] == [config(0).run_id]
    lab.run(experiment(COMPILED))
    assert (lab.alone, lab.sets) == ([("cold", "compiled")], [])
    lab.run(experiment(COMPILED))
    assert lab.alone == []


@pytest.mark.parametrize(("status", "tried_again"), [("diverged", 0), ("unsupported", 1), ("crashed", 1)])
def test_a_compile_that_fails_is_tried_once(lab: Lab, status: str, tried_again: int) -> None:
    lab.failures = {config(0, compile="whole").run_id: status}
    lab.run(experiment(COMPILED))
    assert (len(lab.alone), lab.sets) == (1, [])
    lab.run(experiment(COMPILED))
    assert (len(lab.alone), lab.sets) == (tried_again, [])


@pytest.mark.parametrize(("status", "tried_again"), [("ok", 0), ("oom", 0), ("crashed", 1)])
def test_a_profile_is_taken_once(lab: Lab, status: str, tried_again: int) -> None:
    profiled = config(0, purpose="profile", world_size=2)
    asked = Experiment(name="profile", families=(), profiles=(("f", "fp32, 2 ranks", profiled),))
    lab.failures = {profiled.run_id: status}
    lab.run(asked)
    assert lab.alone == [("profile", "fp32, 2 ranks")]
    assert [p.parent for p in lab.traces] == [lab.folder] * 2
    assert all(profiled.run_id in p.name and p.name.endswith(".json.gz") for p in lab.traces)
    assert len(set(lab.traces)) == 2
    lab.run(asked)
    assert len(lab.alone) == tried_again


def test_a_search_comes_before_the_sets_and_leaves_out_what_is_larger(lab: Lab) -> None:
    base = RunConfig(device="cuda", global_batch_size=8)
    larger = {n: dataclasses.replace(base, global_batch_size=n) for n in (16, 32, 64)}
    sizes = Family(
        name="f",
        baseline=base,
        baseline_label="base",
        candidates=tuple((f"c{n}", c) for n, c in larger.items()),
        search_up_to=64,
    )
    lab.failures = {larger[32].run_id: "oom", dataclasses.replace(base, global_batch_size=24).run_id: "oom"}
    unknown = lab.campaign(experiment(sizes)).forecast()
    made = lab.run(experiment(sizes))
    assert lab.alone == [("search", f"batch {n}") for n in (8, 16, 32, 24, 20, 22, 23)]
    assert lab.sets == [("f", [*BOTH, "c16"])] * 3
    assert [(r.label, r.config.global_batch_size) for r in lab.records("largest")] == [("memory", 23)]
    assert {(r.set_id, r.baseline_id) for r in (*lab.records("search"), *lab.records("largest"))} == {("", "")}
    notes = {(n.label, n.reason) for n in lab.records("note")}
    assert notes == {(f"c{n}", "larger than 23, where the search ended") for n in (32, 64)}
    assert made.held.any
    lines = len(lab.ledger.read()[0])
    lab.run(experiment(sizes))
    assert (lab.alone, lab.sets, len(lab.ledger.read()[0])) == ([], [], lines)
    # Sets of the sizes that do not fit are forecast until the search has said so.
    assert unknown == campaign.SEARCH_SECONDS + 3 * 5 * campaign.PLACE_SECONDS


def test_a_search_in_which_nothing_fits_holds_nothing(lab: Lab) -> None:
    base = RunConfig(device="cuda", global_batch_size=2)
    lab.failures = {dataclasses.replace(base, global_batch_size=n).run_id: "oom" for n in (1, 2)}
    asked = Family(name="f", baseline=base, baseline_label="base", candidates=(), search_up_to=8)
    assert not lab.run(experiment(asked)).held.any
    assert (lab.alone, lab.sets) == ([("search", "batch 2"), ("search", "batch 1")], [])
    assert [r.status for r in lab.records("largest")] == ["oom"]


def test_what_was_left_out_is_noted_once(lab: Lab) -> None:
    rows = (("f", "fp16", "needs a CUDA device"), ("f", "tf32", "needs a CUDA device"))
    for _ in range(2):
        lab.run(experiment(family("f", 1), left_out=rows))
    notes = lab.records("note")
    assert [(n.family, n.label, n.reason) for n in notes] == list(rows)
    assert {(n.status, n.set_id, n.baseline_id) for n in notes} == {("left out", "", config(0).run_id)}
    assert all(not n.windows for n in notes)


def test_progress_names_the_set_and_the_time_left(
    lab: Lab, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DDPM_LAB_PROGRESS", raising=False)
    lab.campaign(experiment(family("tiny, batch 32", 1))).run(Progress("amp"))
    lines = [line for line in capsys.readouterr().err.splitlines() if "starting" in line]
    assert len(lines) == 3
    assert all(f"set {i} of 3" in line and "tiny, batch 32" in line for i, line in enumerate(lines, 1))
    assert "left" in lines[0]
