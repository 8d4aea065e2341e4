"""A question that is too crowded for all cores starts again with those that are free.

The machine of the laboratory has two cores, which two threads fill: another process that takes one crowds a set.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from campaign_lab import Lab, config, experiment, family, laboratory

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import OVERRUN
from ddpm_lab.measure.progress import Progress
from ddpm_lab.plan import PRIMARY, Experiment
from ddpm_lab.questions import planned
from ddpm_lab.questions.planned import Planned

ONE = experiment(family("f", 1, primary="c1"))
ON_ONE_CORE = experiment(
    dataclasses.replace(
        family("f", 1, primary="c1"), baseline=config(0, threads=1), candidates=(("c1", config(1, threads=1)),)
    )
)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return laboratory(tmp_path, monkeypatch)


class Planning:
    """Questions for a number of cores, in the laboratory; ``asked`` are the cores."""

    def __init__(self, lab: Lab, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab, self.asked, self.refuses = lab, list[int | None](), ""
        self.lines: list[str] = []
        monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
        monkeypatch.setattr(planned, "free_cores", lambda: free)
        monkeypatch.setattr(planned, "sweep", lambda: None)

    def question(self, asked: Experiment = ONE, **target: Any) -> Planned:
        progress = Progress("test", say=self.lines.append)
        return Planned(
            campaign=self.lab.campaign(asked, **target), output=self.lab.folder, progress=progress, on_cores=self._on
        )

    def _on(self, free: int | None) -> Planned:
        self.asked.append(free)
        if self.refuses:
            raise ConfigError(self.refuses)
        again = self.lab.campaign(ON_ONE_CORE, seconds=300)
        return Planned(campaign=again, output=self.lab.folder, progress=Progress("test", say=self.lines.append))


def test_a_question_that_is_crowded_out_starts_again_with_the_free_cores(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = Planning(lab, 1, monkeypatch)
    lab.loads = [1.0] * 100
    found = questions.question(seconds=300).measure()
    assert questions.asked == [1]
    crowded, alone = ([r for r in lab.records("baseline") if r.config.threads == n] for n in (0, 1))
    assert found.disturbed == len(crowded)
    assert len(alone) >= 4
    assert found.measured_sets == len(crowded) + len(alone), "one thread beside a process that takes one core is quiet"
    assert found.experiment == found.planned.campaign.experiment == ON_ONE_CORE
    assert found.completed
    assert [r.baseline_id for r in lab.records("look")] == [config(0, threads=1).run_id]
    assert any("1 of 2" in line for line in questions.lines)


def test_cores_are_chosen_again_after_waiting_for_another_measurement(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took cores while these were chosen, and may have measured the same question."""

    @contextlib.contextmanager
    def waited(_: object) -> Iterator[bool]:
        yield True

    monkeypatch.setattr(planned, "measuring", waited)
    questions = Planning(lab, 1, monkeypatch)
    found = questions.question(seconds=300).measure(seconds=60)
    assert questions.asked == [None]
    assert found.experiment == ON_ONE_CORE
    assert found.planned.campaign.target.seconds == 60


def test_it_has_time_to_start_again_even_where_none_is_left(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = Planning(lab, 1, monkeypatch)
    lab.loads = [1.0] * 100
    found = questions.question(sets=6).measure(seconds=120, stages=(PRIMARY,), look=False)
    assert found.planned.campaign.target.seconds == (OVERRUN - 1) * 120
    assert (found.seconds_left or 0) < 0
    assert lab.records("look") == []


def test_without_time_nothing_is_measured_and_what_is_there_is_shown(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = Planning(lab, 2, monkeypatch)
    lab.run(ONE, sets=4, look=False)
    lab.sets = []
    found = questions.question(seconds=0.0).measure()
    assert (lab.sets, found.measured_sets, found.completed) == ([], 0, True)
    assert len(lab.records("look")) == 1
    questions.question(seconds=0.0).measure(look=True)
    assert len(lab.records("look")) == 1
