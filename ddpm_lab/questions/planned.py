"""A question that is ready to be measured, and what measuring it came to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure import hardware
from ddpm_lab.measure.campaign import OVERRUN, Campaign
from ddpm_lab.measure.others import free_cores, measuring
from ddpm_lab.measure.process import sweep
from ddpm_lab.measure.progress import Progress
from ddpm_lab.plan import OTHERS, PRIMARY, Experiment


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a call to ``measure`` answered with: the question's run ids, their cohort, and how many sets it added.

    ``completed`` says whether the ledger now holds an answer; ``seconds_left`` is below 0 where time was overrun.
    """

    planned: Planned
    experiment: Experiment
    ledger: Path
    output_dir: Path
    cohort: tuple[str, str, str, str]
    measured_sets: int
    completed: bool
    seconds_left: float | None = None
    disturbed: int = 0
    """Sets that did not count, since other processes took the cores that they needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """An experiment that is checked and ready to be measured: nothing is refused any more."""

    campaign: Campaign
    output: Path
    progress: Progress
    on_cores: Callable[[int | None], Planned] | None = None
    """The same question for so many cores; None where they were asked for, and are not chosen by what is free."""

    def renewed(self, experiment: Experiment | None = None, **changes: Any) -> Planned:
        """The same with what the ledger holds by now, or for another experiment, or with ``changes`` of the target."""
        c = self.campaign
        target = dataclasses.replace(c.target, **changes)
        same = experiment is None or experiment.name == c.experiment.name
        again = Campaign(experiment or c.experiment, target, c.instrument, c.ledger, c.traces)
        return dataclasses.replace(self, campaign=again, on_cores=self.on_cores if same else None)

    def measure(
        self,
        *,
        seconds: float | None = None,
        stages: Sequence[str] = (PRIMARY, OTHERS),
        look: bool = True,
    ) -> Measured:
        """Measure what the ledger lacks, once no other process measures here; see ``Campaign.run``.

        ``seconds`` takes the place of the time that was planned.
        """
        sweep()
        planned = self
        with measuring(self.progress.always) as waited:
            if waited and self.on_cores:  # what was measured meanwhile took cores, and may have chosen them
                planned = self.on_cores(None)
            if waited or seconds is not None:
                target = self.campaign.target
                time = target.seconds if seconds is None else seconds
                planned = planned.renewed(seconds=time, decided=target.decided)
            campaign = planned.campaign
            if campaign.target.seconds != 0:
                campaign.run(self.progress, stages=stages, look=look)
            elif look:
                campaign.look()
            if campaign.crowded_out and (again := self._on_free_cores()):
                left = campaign.seconds_left()
                if left is not None:  # an answer is worth more than the time
                    left = max(left, (OVERRUN - 1) * (campaign.target.seconds or 0.0))
                found = again.measure(seconds=left, stages=stages, look=look)
                return dataclasses.replace(
                    found,
                    measured_sets=campaign.measured_sets + found.measured_sets,
                    disturbed=campaign.disturbed + found.disturbed,
                    seconds_left=campaign.seconds_left(),
                )
        count = campaign.measured_sets
        self.progress.done(f"measured {count} set{'s' * (count != 1)} now" if count else "all is measured")
        return planned.result()

    def result(self) -> Measured:
        """What the ledger holds by now."""
        campaign = self.campaign
        return Measured(
            planned=self,
            experiment=campaign.experiment,
            ledger=campaign.ledger.path,
            output_dir=self.output,
            cohort=(
                campaign.machine_key,
                campaign.instrument.code.key,
                campaign.experiment.configurations[0].data_sha256,
                campaign.target.plan.key,
            ),
            measured_sets=campaign.measured_sets,
            completed=campaign.held.any,
            seconds_left=campaign.seconds_left(),
            disturbed=campaign.disturbed,
        )

    def _on_free_cores(self) -> Planned | None:
        """The same question for the cores that other processes leave; None where these are all, or too few for it."""
        cores, free = hardware.usable_cores(), free_cores() if self.on_cores else 0
        if self.on_cores is None or free == cores:
            return None
        try:
            again = self.on_cores(free)
        except ConfigError as error:
            self.progress.stay(str(error))
            return None
        self.progress.stay(f"too busy for all cores: measured with {free} of {cores} instead")
        return again
