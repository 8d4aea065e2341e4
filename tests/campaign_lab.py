"""A laboratory for campaigns: its sets return records at once, and it moves the clock."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.files import LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import campaign, hardware
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.measure.code_version import CodeVersion
from ddpm_lab.measure.sets import Instrument, Member
from ddpm_lab.measure.shortfall import Target
from ddpm_lab.output import Progress
from ddpm_lab.plan import Experiment, Family, Plan
from ddpm_lab.record import RunRecord

PLACE_SECONDS, START_SECONDS = 10.0, 4.0
BOTH = ["base", "base again"]
WINDOW = make.sets({}, count=1, turns=1)[0].windows[0]
TRIED: dict[str, Any] = {"steps": 0, "losses": [], "held_out": [], "weights_sha256": ""}


class Lab:
    """Measures at once and without fail, except where ``failures`` (run id -> status) says otherwise."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ledger, self.folder, self.now = Ledger(folder / LEDGER), folder, 0.0
        self.failures: dict[str, str] = {}
        self.qualities: dict[str, dict[str, Any]] = {}  # by run id: what a check or a trial found
        self.sets: list[tuple[str, list[str]]] = []
        self.turns: list[int] = []  # of each set
        self.loads: list[float] = []  # cores that others take in the sets to come; none once it is empty
        self.seconds_per_image: dict[str, float] = {}  # by run id; 1 / 32 for all others
        self.alone: list[tuple[str, str]] = []
        self.traces: list[Path] = []
        self.lines: list[str] = []  # of progress
        self.stop_after: int | None = None
        monkeypatch.setattr(campaign, "measure_set", self.measure_set)
        monkeypatch.setattr(campaign, "measure_alone", self.measure_alone)
        monkeypatch.setattr(hardware, "environment", make.environment)
        monkeypatch.setattr(campaign, "time", SimpleNamespace(monotonic=lambda: self.now))

    def measure_set(
        self, instrument: Instrument, *, plan: Plan, members: list[Member], turns: Any, gives_up: bool, **where: str
    ) -> list[RunRecord]:
        del gives_up  # which ends real sets early
        if len(self.sets) == self.stop_after:
            raise KeyboardInterrupt
        assert len(self.sets) < 50, "the campaign never ends"
        self.sets.append((where["family"], [m.label for m in members]))
        places, load = len(members), self.loads.pop(0) if self.loads else 0.0
        plan = plan if plan.turns else dataclasses.replace(plan, turns=turns(START_SECONDS * places, 0.3 * places))
        self.turns.append(plan.turns)
        self.now += PLACE_SECONDS * places
        baseline, twin, *_ = members
        assert (baseline.role, twin.role, baseline.config) == ("baseline", "twin", twin.config)
        how: dict[str, Any] = {**where, "plan": plan, "set_id": f"set-{self.now}", "code_version": instrument.code.key}
        records = [self._record(m, baseline, load, **how) for m in members]
        return [r for r in records if r.role in ("baseline", "twin") and r.status != "ok"] or records

    def measure_alone(
        self, instrument: Instrument, *, plan: Plan, member: Member, work: Any, **where: str
    ) -> RunRecord:
        self.traces += work.keywords["traces"] if member.role == "profile" else []
        self.alone.append((member.role, member.label))
        self.now += PLACE_SECONDS
        how: dict[str, Any] = {**where, "plan": plan, "set_id": f"one-{self.now}", "code_version": instrument.code.key}
        return self._record(member, member, 0.0, **how, compile_cache="cold")

    def _record(self, member: Member, baseline: Member, load: float, **values: Any) -> RunRecord:
        status = self.failures.get(member.config.run_id, "ok")
        seconds = 32 * self.seconds_per_image.get(member.config.run_id, 1 / 32)
        how: dict[str, Any] = {"seconds": seconds, "images": 32, "steps": 1, "others_cores": load}
        how["rank_seconds"] = (1.0,) * member.config.world_size
        window = dataclasses.replace(WINDOW, **how)
        return make.record(
            member.config,
            role=member.role,
            label=member.label,
            baseline_id=baseline.config.run_id,
            status=status,
            stages={"start": 3.0, "steady": 4.0},
            quality=(TRIED if member.role == "quality" else {}) | self.qualities.get(member.config.run_id, {}) or None,
            windows=(window,) if status == "ok" else (),
            primary=member.primary,
            **values,
        )

    def campaign(self, experiment: Experiment, *, code: str = "code", **target: Any) -> Campaign:
        """A new campaign, as a new process would make it."""
        values = {"plan": Plan(), "sets": 6 if "seconds" in target else 3, "cold_compiles": 2, **target}
        how: dict[str, Any] = {"cache": self.folder / "cache", "usable_cores": 2, "data_name": "synthetic images"}
        instrument = Instrument(code=CodeVersion(code), progress=Progress("test", say=self.lines.append), **how)
        return Campaign(experiment, Target(**values), instrument, self.folder)

    def run(self, experiment: Experiment, *, look: bool = True, yields: bool = False, **target: Any) -> Campaign:
        """Run a new campaign; ``sets`` and ``alone`` then hold what it measured."""
        self.sets, self.turns, self.alone = [], [], []
        self.traces.clear()
        made = self.campaign(experiment, **target)
        made.run(look=look, yields=yields)
        assert made.measured_sets == len(self.sets) + len(self.alone)
        return made

    def forget(self) -> None:
        """Begin with an empty ledger."""
        self.ledger.path.unlink(missing_ok=True)

    def records(self, role: str) -> list[RunRecord]:
        return [r for r in self.ledger.read()[0] if r.role == role]


def config(number: int, **settings: Any) -> RunConfig:
    """Configurations that differ."""
    return RunConfig(seed=number, **settings)


def family(name: str, candidates: int, first: int = 0, **settings: Any) -> Family:
    """A family of candidates c1, c2, ... beside the baseline; ``shared`` are settings of all of them."""
    shared = settings.pop("shared", {})
    rows = tuple((f"c{n}", config(first + n, **shared)) for n in range(1, candidates + 1))
    return Family(name=name, baseline=config(first, **shared), baseline_label="base", candidates=rows, **settings)


def experiment(*families: Family, **values: Any) -> Experiment:
    return Experiment(name="amp", families=families, **values)
