"""A question that is too crowded for all cores starts again with those that are free.

The machine of the laboratory has two cores, which two threads fill: another process that takes one crowds a set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from campaign_lab import Lab, config, experiment, family

from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import OVERRUN
from ddpm_lab.measure.progress import Progress
from ddpm_lab.plan import PRIMARY, Experiment
from ddpm_lab.questions import planning
from ddpm_lab.questions.planning import Planned

ONE = experiment(family("f", 1, primary="c1"))
ON_ONE_CORE = experiment(family("f", 1, primary="c1", shared={"threads": 1}))


class Planning:
    """Questions for a number of cores, in the laboratory, of which one is free; ``asked`` are the cores."""

    def __init__(self, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab, self.asked, self.lines = lab, list[int | None](), list[str]()
        monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
        monkeypatch.setattr(planning, "free_cores", lambda: 1)
        monkeypatch.setattr(planning, "sweep", lambda: None)

    def planned(self, asked: Experiment = ONE, **target: Any) -> Planned:
        progress = Progress("test", say=self.lines.append)
        campaign = self.lab.campaign(asked, **target)
        return Planned(campaign=campaign, output=self.lab.folder, progress=progress, on_cores=self._on)

    def _on(self, free: int | None) -> Planned:
        self.asked.append(free)
        return self.planned(ON_ONE_CORE, seconds=300)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(tmp_path, monkeypatch)


@pytest.fixture
def asking(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> Planning:
    return Planning(lab, monkeypatch)


def test_a_question_that_is_crowded_out_starts_again_with_the_free_cores(lab: Lab, asking: Planning) -> None:
    lab.loads = [1.0] * 100
    found = asking.planned(seconds=300).measure()
    assert asking.asked == [1]
    crowded, alone = ([r for r in lab.records("baseline") if r.config.threads == n] for n in (0, 1))
    assert found.disturbed == len(crowded)
    assert len(alone) >= 4, "one thread beside a process that takes one core is quiet"
    assert found.measured_sets == len(crowded) + len(alone)
    assert found.experiment == found.planned.campaign.experiment == ON_ONE_CORE
    assert found.completed
    assert [r.baseline_id for r in lab.records("look")] == [config(0, threads=1).run_id]
    assert any("1 of 2" in line for line in asking.lines)


def test_cores_are_chosen_again_after_waiting_for_another_measurement(
    asking: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took cores while these were chosen, and may have measured the same question."""

    @contextlib.contextmanager
    def waited(_: object) -> Iterator[bool]:
        yield True

    monkeypatch.setattr(planning, "measuring", waited)
    found = asking.planned(seconds=300).measure(seconds=60)
    assert (asking.asked, found.experiment) == ([None], ON_ONE_CORE)
    assert found.planned.campaign.target.seconds == 60


def test_it_has_time_to_start_again_even_where_none_is_left(lab: Lab, asking: Planning) -> None:
    lab.loads = [1.0] * 100
    found = asking.planned(sets=6).measure(seconds=120, stages=(PRIMARY,), look=False)
    assert found.planned.campaign.target.seconds == (OVERRUN - 1) * 120
    assert (found.seconds_left or 0) < 0
    assert lab.records("look") == []


def test_without_time_nothing_is_measured_and_what_is_there_is_shown(lab: Lab, asking: Planning) -> None:
    lab.run(ONE, sets=4, look=False)
    lab.sets = []
    for _ in range(2):
        found = asking.planned(seconds=0.0).measure()
        assert (lab.sets, found.measured_sets, found.completed) == ([], 0, True)
        assert len(lab.records("look")) == 1
