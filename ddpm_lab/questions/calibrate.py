"""The instrument checks itself: a baseline against itself, and against a slowdown that was planted.

Every calibration measures afresh, since what it asks is how the machine measures now; its records stay in the ledger.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ddpm_lab.checks import ConfigError, number
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import phrases, stats
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.table import values
from ddpm_lab.files import output_folder
from ddpm_lab.measure.campaign import Campaign
from ddpm_lab.measure.others import free_cores, measuring
from ddpm_lab.measure.shortfall import Target
from ddpm_lab.output import Progress
from ddpm_lab.plan import USUAL_TURNS, Experiment, Family, Plan
from ddpm_lab.questions.planning import instrument_for
from ddpm_lab.record import TWIN, LedgerError, RunRecord
from ddpm_lab.training.setting import usual_device

EXPERIMENT = "calibrate"
WORKLOAD = "ddpm_lab.training.pieces:pieces"
PIECES, EXTRA = 100, 5  # of the work of a step, and how many the planted slowdown adds
PLANTED, TRUTH = EXTRA / PIECES, PIECES / (PIECES + EXTRA)  # the slowdown as a share of the work, and its ratio
MOST_FAILURES = 2


def calibrate(
    *, minutes: float = 5.0, device: str | None = None, output_dir: str | Path | None = None, quiet: bool = False
) -> "Calibration":
    """Measure sets of a baseline, its twin and a slowdown of 5 % until ``minutes`` are over, one at least.

    On a CPU they have as many threads as there are cores that other processes leave free. The records are in the
    ledger of ``output_dir``. Raises ConfigError for ``minutes`` that are none, and LedgerError where no set counts.
    """
    if not (number(minutes) and 0 < minutes < 1e6):
        raise ConfigError(f"minutes is {minutes!r}: give a number above 0")
    output, show = output_folder(output_dir), Progress(EXPERIMENT, quiet=quiet)
    instrument, date = instrument_for(output, show), datetime.now().astimezone().isoformat(timespec="seconds")
    with measuring(show.always):
        device, cores = usual_device(device), instrument.usable_cores
        free = free_cores() if device == "cpu" else cores
        how: dict[str, Any] = {"device": device, "global_batch_size": 1, "threads": free if free < cores else 0}
        one, more = (RunConfig(workload=WORKLOAD, options=(("pieces", n),), **how) for n in (PIECES, PIECES + EXTRA))
        rows, name = ((f"{EXTRA} % more work", more),), f"calibration of {date}"
        family = Family(name=name, baseline=one, baseline_label="baseline", candidates=rows)
        target = Target(plan=Plan(turns=USUAL_TURNS), sets=1, seconds=60 * minutes)
        asked = Experiment(name=EXPERIMENT, families=(family,))
        campaign, records, took = Campaign(asked, target, instrument, output), list[RunRecord](), 0.0
        while (left := campaign.seconds_left()) >= took or not records:
            show.prefix = f"set {campaign.measured_sets + 1}, {max(0.0, left):.0f} s left;"
            records += campaign.add_set(family, rows)
            took = (target.seconds - campaign.seconds_left()) / campaign.measured_sets
            failed = [r for r in records if r.status != "ok"]
            if len(failed) >= MOST_FAILURES:
                raise LedgerError(f"the calibration cannot run here: {failed[-1].label}: {failed[-1].reason}")
    found = calibration(records)
    if found is None:
        raise LedgerError("in every set of the calibration a side failed, or other processes took cores: try again")
    show.done(f"{phrases.plural(campaign.measured_sets, 'set')} in {campaign.measured_sets * took / 60:.1f} min")
    return found


# --- what it says ----------------------------------------------------------------------------------------------------

MINUTES = (1, 5, 20)
FINE = 0.03  # a machine is fit to measure when it resolves a difference of this size within 20 minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the sets of a calibration that count say of the baseline's ``twin`` and of the ``slower`` candidate.

    ``first`` is the record of the latter in the first set.
    """

    first: RunRecord
    twin: Comparison
    slower: Comparison
    seconds_per_set: float

    @property
    def noise(self) -> float:
        """Standard deviation over sets of the twin's log ratio; NaN for one set."""
        return float(np.std([log for _, log in self.twin.logs], ddof=1)) if self.twin.sets > 1 else math.nan

    @property
    def null_called(self) -> bool:
        """Whether the baseline was called different from itself, at the 99 % level."""
        return self.twin.sets >= stats.LEAST_SETS and self.twin.ratio.p < 0.01

    @property
    def planted_found(self) -> bool:
        """Whether the planted slowdown was called slower."""
        slow = self.slower.ratio
        return stats.verdict(slow, slow.p, stats.level_of_look(1)) == stats.SLOWER

    @property
    def resolvable(self) -> dict[int, float | None]:
        """The smallest difference that so many minutes resolve here; None where they have fewer than four sets."""
        sets = {m: int(m * 60 / self.seconds_per_set) if self.seconds_per_set else 0 for m in MINUTES}
        found = {m: stats.resolvable(self.noise, n) for m, n in sets.items()}
        return {m: value if math.isfinite(value) else None for m, value in found.items()}

    @property
    def passed(self) -> bool:
        """Whether the planted slowdown was found and the null was not called at the 99 % level."""
        return self.planted_found and not self.null_called

    @property
    def fit(self) -> bool:
        """Whether the check passed, and 20 minutes resolve a difference of 3 %."""
        finest = self.resolvable[max(MINUTES)]
        return self.passed and finest is not None and finest <= FINE

    def as_dict(self) -> dict[str, Any]:
        ratios = (self.twin.ratio, self.slower.ratio)
        null, slow = (values({"ratio": e.value, "low": e.low, "high": e.high}) for e in ratios)
        machine = self.first.environment.machine
        return {
            "hardware": machine.name,
            "date": self.first.environment.date,
            **{name: getattr(self, name) for name in ("passed", "fit", "planted_found")},
            "step_seconds": self.twin.step_seconds,
            "planted": PLANTED,
            "sets": self.slower.sets,
            "verdict": self.verdict(),
            "disturbed_sets": self.slower.disturbed_sets,
            "threads": self.first.config.threads or machine.usable_cores,
            "seconds_per_set": round(self.seconds_per_set, 2),
            "noise_between_sets": None if math.isnan(self.noise) else self.noise,
            "null": null,
            "null_called_at_99": self.null_called,
            "planted_ratio": TRUTH,
            "planted_measured": slow,
            "planted_in_95_interval": self.slower.ratio.contains(TRUTH),
            "resolvable": {f"{m} min": v for m, v in self.resolvable.items()},
        }

    def verdict(self) -> str:
        """One sentence: may one measure here, and how finely?"""
        if (sets := self.slower.sets) < stats.LEAST_SETS:
            needed = f"a verdict needs {stats.LEAST_SETS}; give more minutes"
            return f"Not judged: {phrases.plural(sets, 'set')} in the time given, and {needed}"
        if self.null_called:
            return "Not fit to measure now: the baseline differs from itself at the 99 % level"
        if not self.planted_found:
            return f"Not fit to measure now: a planted slowdown of {_percent(PLANTED)} was not found"
        how = "Fit to measure: {} a difference of" if self.fit else "Fit for large differences only: {}"
        return f"{how.format(f'{max(MINUTES)} minutes resolve')} {_percent(self.resolvable[max(MINUTES)])}"


def calibration(records: Sequence[RunRecord]) -> Calibration | None:
    """What the records of one calibration say; None where no set is complete, or other processes disturbed each."""
    ok = {(r.set_id, r.role): r for r in records if r.status == "ok"}
    complete = tuple(r for r in ok.values() if all((r.set_id, role) in ok for role in ("baseline", TWIN, "candidate")))
    compared = comparisons(Study(experiment=EXPERIMENT, records=complete, output_dir=Path()))
    by_role = {c.role: c for c in compared if c.sets}
    if "candidate" not in by_role:
        return None
    sets = [set_id for set_id, _ in by_role["candidate"].logs]
    starts = [datetime.fromisoformat(ok[set_id, "baseline"].environment.date) for set_id in sets]
    took = (starts[-1] - starts[0]).total_seconds()
    return Calibration(
        first=ok[sets[0], "candidate"],
        twin=by_role[TWIN],
        slower=by_role["candidate"],
        # A set's cost is the time to the next one; the last set's is not known from dates.
        seconds_per_set=took / (len(sets) - 1) if len(sets) > 1 else by_role["candidate"].set_seconds,
    )


def _percent(value: float | None) -> str:
    return "unknown" if value is None or math.isnan(value) else f"{phrases.significant(100 * value, 2)} %"


def lines(found: Calibration) -> list[str]:
    """The calibration in words, for a terminal and for the report."""
    slower, cores = found.slower, phrases.plural(found.first.environment.machine.usable_cores, "core")
    judged = "not judged" if slower.sets < stats.LEAST_SETS else "found" if found.planted_found else "missed"
    if slower.sets > 1:
        judged += f", and the truth lies {'inside' if slower.ratio.contains(TRUTH) else 'outside'} the interval"
    some = f", with {slower.config.threads} of {cores}" if slower.config.threads else ""
    sets = f"{phrases.plural(slower.sets, 'set')} of {found.seconds_per_set:.1f} s"
    step = phrases.seconds(found.twin.step_seconds)
    lost = f"; {slower.disturbed_sets} more were disturbed by other processes and do not count"
    resolved = [f"{'none' if v is None else _percent(v)} in {m} min" for m, v in found.resolvable.items()]
    return [
        f"{found.verdict()}.",
        f"Measured: {sets}, steps of {step}{some}{lost * bool(slower.disturbed_sets)}.",
        f"Baseline against itself: {_estimate(found.twin)}; {'' if found.null_called else 'not '}called different at "
        "the 99 % level.",
        f"{_percent(PLANTED)} more work planted (true ratio {TRUTH:.3f}): {_estimate(slower)}; {judged}.",
        f"Noise between sets: {_percent(found.noise)}.",
        f"Smallest difference that can be resolved: {', '.join(resolved)}.",
    ]


def _estimate(row: Comparison) -> str:
    return f"{row.ratio.value:.3f} ({phrases.evidence(row.ratio)})"
