"""The campaign beside other processes: crowded sets are measured again, or the question starts again with free cores.

The machine of the laboratory has two cores, which two threads fill: another process that takes one crowds a set.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import campaign_lab
import pytest
from campaign_lab import BOTH, Lab, config, experiment, family, laboratory

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import OVERRUN
from ddpm_lab.measure.progress import Progress
from ddpm_lab.plan import PRIMARY, Experiment
from ddpm_lab.questions import planning
from ddpm_lab.questions.planning import Planned

ONE = experiment(family("f", 1, primary="c1"))
ON_ONE_CORE = experiment(
    dataclasses.replace(
        family("f", 1, primary="c1"), baseline=config(0, threads=1), candidates=(("c1", config(1, threads=1)),)
    )
)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return laboratory(tmp_path, monkeypatch)


def test_a_crowded_set_is_kept_does_not_count_and_is_measured_again(lab: Lab) -> None:
    lab.loads = [0.0, 1.0, 0.0, 1.0]
    made = lab.run(ONE, sets=4)
    assert len(lab.sets) == len(lab.records("baseline")) == 6
    assert len(made.held.sets(config(0).run_id, config(1).run_id)) == 4
    assert (made.disturbed, made.crowded_out) == (2, False)
    (look,) = lab.records("look")
    quiet = [r.set_id for r in lab.records("baseline") if r.windows[0].others_cores == 0]
    assert (look.look or {})["sets"] == quiet
    lab.run(ONE, sets=4, exact=True)
    assert lab.sets == [], "nothing is left to measure"


@pytest.mark.parametrize(("load", "crowds"), [(0.25, True), (0.249, False)])
def test_load_decides_and_not_time(lab: Lab, load: float, crowds: bool) -> None:
    lab.loads = [load]
    lab.seconds_per_image = {config(1).run_id: 100.0}
    assert lab.run(ONE, sets=4, exact=True).disturbed == crowds
    assert len(lab.sets) == 4 + crowds


def test_where_nothing_can_be_called_disturbed_sets_are_as_good_as_others(lab: Lab) -> None:
    lab.loads = [1.0] * 50
    made = lab.run(ONE, sets=1, exact=True)
    assert (len(lab.sets), made.disturbed, made.crowded_out, made.held.any) == (1, 0, False, True)
    lab.run(ONE, sets=1, exact=True)
    assert lab.sets == []
    lab.loads = []
    lab.run(ONE, sets=4, exact=True)
    assert len(lab.sets) == 4, "for a verdict it does not count"


def test_after_as_many_replacements_as_planned_sets_four_quiet_ones_are_the_answer(lab: Lab) -> None:
    lab.loads = [0.0] * 4 + [1.0] * 50
    made = lab.run(experiment(family("f", 2, primary="c1")), sets=6)
    assert lab.sets[:10] == [("f", [*BOTH, "c1"])] * 10
    assert len(made.held.sets(config(0).run_id, config(1).run_id)) == 4
    assert not made.crowded_out
    assert lab.sets[10:] == [("f", [*BOTH, "c2"])] * 6, "the others are tried as often"
    assert (made.disturbed, len(lab.records("look"))) == (12, 1)


def test_with_fewer_quiet_ones_the_machine_is_too_busy_and_nothing_is_shown(lab: Lab) -> None:
    lab.loads = [0.0] * 3 + [1.0] * 50
    made = lab.run(experiment(family("f", 2, primary="c1")), sets=6)
    assert lab.sets == [("f", [*BOTH, "c1"])] * 9
    assert made.crowded_out
    assert lab.records("look") == []


def test_a_busy_gpu_is_not_measured_with_fewer_cores(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    base, other = config(0, device="cuda"), config(1, device="cuda")
    asked = dataclasses.replace(family("f", 0), baseline=base, candidates=(("c1", other),), primary="c1")
    busy = dataclasses.replace(campaign_lab.WINDOW, state={"gpu_others_percent": 10.0})
    monkeypatch.setattr(campaign_lab, "WINDOW", busy)
    made = lab.run(experiment(asked), sets=4)
    assert (len(lab.sets), made.disturbed, made.crowded_out) == (4, 4, False)


# --- starting again with the cores that are free ---------------------------------------------------------------------


class Planning:
    """Questions for a number of cores, in the laboratory; ``asked`` are the cores."""

    def __init__(self, lab: Lab, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lab, self.asked, self.refuses = lab, list[int | None](), ""
        self.lines: list[str] = []
        monkeypatch.setattr(hardware, "usable_cores", lambda: 2)
        monkeypatch.setattr(planning, "free_cores", lambda: free)
        monkeypatch.setattr(planning, "sweep", lambda: None)

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
    crowded = [r for r in lab.records("baseline") if r.config.threads == 0]
    alone = [r for r in lab.records("baseline") if r.config.threads == 1]
    assert found.disturbed == len(crowded)
    assert len(alone) >= 4
    assert found.measured_sets == len(crowded) + len(alone), "one thread beside a process that takes one core is quiet"
    assert found.experiment == ON_ONE_CORE
    assert found.planned.campaign.experiment == ON_ONE_CORE
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

    monkeypatch.setattr(planning, "measuring", waited)
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
