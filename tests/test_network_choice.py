"""The network that fits: the largest whose forecast fills no more than the budget, chosen once for a machine."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import network_choice
from ddpm_lab.measure.code_version import CodeVersion
from ddpm_lab.measure.network_choice import choose_network, forecast_seconds
from ddpm_lab.measure.seat import Instrument, Member
from ddpm_lab.measure.shortfall import Target
from ddpm_lab.plan import USUAL_TURNS, Plan
from ddpm_lab.record import RunRecord

SECONDS = {"tiny": 1.0, "seed": 3.0, "ddpm": 9.0}
CANDIDATES = [(name, RunConfig(network=name)) for name in SECONDS]


class Trials:
    """Tries a network at once: its group costs the SECONDS of its name, or fails."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger(folder / "ledger.jsonl")
        self.tried: list[str] = []
        self.statuses: dict[str, str] = {}

    def measure_alone(self, *_: Any, member: Member, plan: Plan, **values: Any) -> RunRecord:
        self.tried.append(member.label)
        return make.record(
            member.config,
            role=member.role,
            label=member.label,
            plan=plan,
            stages={"start": SECONDS[member.label]},
            status=self.statuses.get(member.label, "ok"),
            **values,
        )

    def choose(self, places: float, *, code: str = "code-1", plan: Plan | None = None) -> str:
        """Choose with a budget that holds so many times the cost of a one-second group."""
        self.tried = []
        target = Target(plan=plan or Plan(), sets=1, cold_compiles=1)
        one = make.record(RunConfig(), plan=target.plan, stages={"start": 1.0})
        instrument = Instrument(code=CodeVersion(code), cache=Path(), usable_cores=2, data_name="")
        budget = places * forecast_seconds(one, target.plan, 1) / network_choice.SHARE
        return choose_network(CANDIDATES, instrument, self.ledger, target, budget_seconds=budget)


@pytest.fixture
def trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trials:
    """Trials on an empty ledger."""
    made = Trials(tmp_path)
    monkeypatch.setattr(network_choice, "measure_alone", made.measure_alone)
    monkeypatch.setattr(network_choice, "machine", lambda: make.CPU)
    return made


@pytest.mark.parametrize(
    ("places", "chosen", "tried"),
    [
        (0.1, "tiny", ["tiny", "seed"]),  # at least the smallest, whatever it costs
        (1.1, "tiny", ["tiny", "seed"]),
        (3.1, "seed", ["tiny", "seed", "ddpm"]),
        (99.0, "ddpm", ["tiny", "seed", "ddpm"]),
    ],
)
def test_the_largest_that_fits(trials: Trials, places: float, chosen: str, tried: list[str]) -> None:
    assert trials.choose(places) == chosen
    assert trials.tried == tried
    (record,) = trials.ledger.read()[0]
    assert (record.role, record.config.network) == ("choice", chosen)
    assert record.reason


def test_a_choice_is_remembered_for_its_machine_code_and_plan(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trials.choose(3.1) == "seed"
    assert trials.choose(99.0) == "seed"
    assert trials.tried == []
    assert trials.choose(99.0, plan=Plan(turns=3)) == "ddpm"
    assert trials.tried
    trials.choose(1.1, code="other")
    assert trials.tried
    monkeypatch.setattr(network_choice, "machine", lambda: make.GPUS)
    trials.choose(1.1)
    assert trials.tried


@pytest.mark.parametrize("status", ["oom", "crashed", "unsupported"])
def test_a_network_that_fails_ends_the_search(trials: Trials, status: str) -> None:
    trials.statuses = {"seed": status}
    assert trials.choose(99.0) == "tiny"
    assert trials.tried == ["tiny", "seed"]


def test_a_machine_on_which_nothing_runs_gets_the_smallest_and_no_record(trials: Trials) -> None:
    trials.statuses = {"tiny": "crashed"}
    assert trials.choose(99.0) == "tiny"
    assert trials.ledger.read()[0] == []


def test_the_forecast_counts_groups_windows_and_sets() -> None:
    plan = Plan(turns=6, window_seconds=0.4, window_steps=5, settle_steps=2)
    fast = make.record(RunConfig(), stages={"start": 2.0, "warmup": 0.2}, warmup_steps=10)
    # 6 turns of 0.4 s and two settling steps of 0.02 s, beside 2.2 s of start and warm-up.
    assert forecast_seconds(fast, plan, 3) == pytest.approx(3 * network_choice.PLACES * (2.2 + 6 * 0.44))
    computed = dataclasses.replace(plan, turns=0)
    assert forecast_seconds(fast, computed, 3) == pytest.approx(3 * network_choice.PLACES * (2.2 + USUAL_TURNS * 0.44))
    slow = dataclasses.replace(fast, stages={"start": 2.0, "warmup": 10.0})
    assert forecast_seconds(slow, plan, 1) == pytest.approx(network_choice.PLACES * (12.0 + 6 * 7.0))
