"""The trials of an experiment: which the ledger lacks, what each will take, and as many as the time allows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from ddpm_lab.measure.held import Held
from ddpm_lab.measure.progress import Progress
from ddpm_lab.plan import NOT_TRAINED, Trial

TRIAL_SECONDS, COMPILE_SECONDS = 30.0, 60.0
"""Forecast for a trial, and for its compiling, until something like it has shown better."""


class Trials:
    """The trials of an experiment, in the order in which they are made."""

    def __init__(self, trials: Sequence[Trial], held: Held) -> None:
        self._trials, self._held = trials, held

    def of(self, timed: set[str]) -> list[Trial]:
        """Those of configurations that are timed under these run ids: what has no speed is not trained either."""
        return [t for t in self._trials if t.timed is None or t.timed.run_id in timed]

    def missing(self, trials: Sequence[Trial] | None = None) -> list[Trial]:
        """Those of ``trials``, or of all, that are still to be made: neither here, nor known to fail or to be wrong."""
        return [t for t in self._lacking(trials) if not self._unsound(t)]

    def unsound(self, trials: Sequence[Trial]) -> list[tuple[Trial, str]]:
        """The first that is missing of each configuration whose gradient check failed, with a sentence that says so."""
        first = {(t.family, t.label): (t, why) for t in reversed(self._lacking(trials)) if (why := self._unsound(t))}
        return [(t, f"{NOT_TRAINED}: its gradient check failed ({why})") for t, why in first.values()]

    def _lacking(self, trials: Sequence[Trial] | None) -> list[Trial]:
        held, lasting = self._held, self._held.lasting
        asked = (t for t in (self._trials if trials is None else trials) if t.config.run_id not in lasting)
        return [t for t in asked if not held.trained(t.config.run_id, t.fid)]

    def _unsound(self, trial: Trial) -> str:
        """Why a trial's gradients are wrong; empty where they are not, or where its baseline's are wrong too."""
        return "" if self._held.unsound(trial.baseline) else self._held.unsound(trial.config)

    def seconds(self, trials: Sequence[Trial]) -> float:
        """What ``trials`` will take."""
        seen = self._seen_so_far()
        usual = sum(seen) / len(seen) if seen else TRIAL_SECONDS
        return sum(usual if (known := self._known(t)) is None else known for t in trials)

    def run(
        self,
        trials: Sequence[Trial],
        progress: Progress,
        seconds_left: Callable[[], float | None],
        train: Callable[[Trial], object],
    ) -> Sequence[Trial]:
        """Make one after the other until the next cannot end in time; returns those that did not fit."""
        for i, trial in enumerate(trials):
            left, known = seconds_left(), self._known(trial)
            expected = max(self._seen_so_far(), default=0.0) / 2 if known is None else known
            if left is not None and left < expected:
                progress.prefix = ""
                progress.always(f"{len(trials) - i} trials did not fit into the time")
                return trials[i:]
            progress.prefix = f"trial {i + 1} of {len(trials)},"
            to_come = self.seconds(trials[i:])
            progress.expect(to_come if left is None else min(left, to_come))
            train(trial)
        return ()

    def _seen_so_far(self) -> list[float]:
        return [s for t in self._trials if (s := self._held.trial_seconds(t.config)) is not None]

    def _known(self, trial: Trial) -> float | None:
        """What a trial will take: as one with another seed, else its images at the speed that sets have shown."""
        if (seen := self._held.trial_seconds(trial.config)) is not None or trial.timed is None:
            return seen
        image = self._held.image_seconds(trial.timed.run_id)
        compiling = COMPILE_SECONDS if trial.config.compile != "off" else 0.0
        return None if image is None else image * trial.config.option("images", 0) + compiling


def short_of(trials: Sequence[Trial], left: Sequence[Trial]) -> list[tuple[Trial, str]]:
    """A sentence for each configuration of ``left``, with the first of its ``trials`` that is missing."""
    planned, lacking = (Counter((t.family, t.label) for t in some) for some in (trials, left))
    first = {(t.family, t.label): t for t in reversed(left)}
    return [
        (first[key], f"{count} of {planned[key]} runs for quality did not fit into the time that was given")
        for key, count in lacking.items()
    ]
