"""The instrument checks itself: a baseline against itself, and against a slowdown that was planted.

Every calibration measures afresh, since what it asks is how the machine measures now; its records stay in the ledger.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import phrases, stats
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.lines import Line, Plot
from ddpm_lab.explain.charts.lines import lines as draw
from ddpm_lab.files import LEDGER, output_folder
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure.others import free_cores, measuring
from ddpm_lab.measure.process import sweep
from ddpm_lab.measure.progress import Progress
from ddpm_lab.measure.sets import Member, measure_set
from ddpm_lab.plan import USUAL_TURNS, Plan
from ddpm_lab.questions.planning import instrument_for
from ddpm_lab.record import LedgerError, RunRecord, crowded, set_log_ratio
from ddpm_lab.training.setting import usual_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPERIMENT = "calibrate"
WORKLOAD = "ddpm_lab.training.limits:pieces"
PIECES = 100
MOST_FAILURES = 2


def calibrate(
    *,
    minutes: float = 5.0,
    planted: float = 0.05,
    device: str | None = None,
    output_dir: str | Path | None = None,
    quiet: bool = False,
) -> list[RunRecord]:
    """Measure sets of a baseline, its twin and a planted slowdown until ``minutes`` are over, one at least.

    On a CPU they have as many threads as there are cores that other processes leave free. ``planted`` is the slowdown,
    as a share of the work of a step: a whole number of per cent, 0.01 to 1. Returns the records, which are in the
    ledger of ``output_dir`` too. Raises ConfigError for a value that cannot be measured, and LedgerError where no set
    could be completed, or other processes disturbed each.
    """
    if not (isinstance(minutes, int | float) and 0 < minutes < 1e6):
        raise ConfigError(f"minutes is {minutes!r}: give a number above 0")
    extra = round(planted * PIECES) if isinstance(planted, int | float) and 0 < planted <= 1 else 0
    if not extra or abs(extra / PIECES - planted) > 1e-9:
        raise ConfigError(f"planted is {planted!r}: give whole per cents from 0.01 to 1, such as 0.05")
    output = output_folder(output_dir)
    show = Progress(EXPERIMENT, quiet=quiet)
    instrument = instrument_for(output, show)
    ledger = Ledger(output / LEDGER)
    sweep()
    plan = Plan(turns=USUAL_TURNS)
    family = f"calibration of {datetime.now().astimezone().isoformat(timespec='seconds')}"
    with measuring(show.always):
        members = _members(usual_device(device), extra, instrument.usable_cores)
        begun, sets = time.monotonic(), list[list[RunRecord]]()
        while not sets or minutes * 60 - (elapsed := time.monotonic() - begun) >= elapsed / len(sets):
            left = max(0.0, minutes * 60 - (time.monotonic() - begun))
            show.prefix = f"set {len(sets) + 1}, {left:.0f} s left;"
            sets.append(measure_set(instrument, experiment=EXPERIMENT, family=family, plan=plan, members=members))
            ledger.append(sets[-1])
            failed = [r for records in sets for r in records if r.status != "ok"]
            if len(failed) >= MOST_FAILURES:
                raise LedgerError(f"the calibration cannot run here: {failed[-1].label}: {failed[-1].reason}")
    if all(map(crowded, sets)):
        raise LedgerError("other processes took the cores of every set of the calibration: try again without them")
    show.done(f"{phrases.plural(len(sets), 'set')} in {(time.monotonic() - begun) / 60:.1f} min")
    return [r for records in sets for r in records]


def _members(device: str, extra: int, cores: int) -> list[Member]:
    """Baseline, twin and ``extra`` per cent more work, with as many threads as cores are free."""
    free = free_cores() if device == "cpu" else cores
    threads, pieces = free if free < cores else 0, (("pieces", PIECES),)
    baseline = RunConfig(workload=WORKLOAD, device=device, global_batch_size=1, threads=threads, options=pieces)
    slower = dataclasses.replace(baseline, options=(("pieces", PIECES + extra),))
    return [
        Member("baseline", "baseline", baseline),
        Member("twin", "baseline again", baseline),
        Member("candidate", f"{extra} % more work", slower),
    ]


# --- what it says ----------------------------------------------------------------------------------------------------

MINUTES = (1, 5, 20)
LEAST_SETS = stats.LEAST_SETS
FINE = 0.03
"""A machine is fit to measure when it resolves a difference of this size within 20 minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A calibration, computed from its records. Ratios are the baseline's time divided by the other's.

    ``disturbed`` sets are beside the ``sets`` that count: other processes took the cores that they needed. ``threads``
    are those of a rank; 0 is as many as there are ``cores``. ``noise`` is the standard deviation over sets of the
    null's log ratio. ``minutes`` is when each set began, after the first.
    """

    hardware: str
    date: str
    sets: int
    disturbed: int
    threads: int
    cores: int
    seconds_per_set: float
    step_seconds: float
    noise: float
    null: stats.Estimate
    planted: float
    planted_estimate: stats.Estimate
    null_ratios: tuple[float, ...]
    planted_ratios: tuple[float, ...]
    minutes: tuple[float, ...]

    @property
    def null_called(self) -> bool:
        """Whether the baseline was called different from itself, at the 99 % level."""
        return self.null.sets >= LEAST_SETS and self.null.p < 0.01

    @property
    def truth(self) -> float:
        """The ratio that was planted."""
        return 1 / (1 + self.planted)

    @property
    def planted_found(self) -> bool:
        """Whether the planted slowdown was called slower."""
        slow = self.planted_estimate
        return stats.verdict(slow, slow.p, stats.level_of_look(1)) == stats.SLOWER

    @property
    def planted_in_interval(self) -> bool:
        """Whether the interval holds the planted ratio."""
        return self.planted_estimate.contains(self.truth)

    @property
    def resolvable(self) -> dict[int, float | None]:
        """The smallest difference that so many minutes resolve here; None where they have fewer than four sets."""
        sets = {m: int(m * 60 / self.seconds_per_set) if self.seconds_per_set else 0 for m in MINUTES}
        return {m: _known(stats.resolvable(self.noise, n)) for m, n in sets.items()}

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
        """Plain values for JSON; what is unknown is null."""
        null, slow = (
            {"ratio": _known(e.value), "low": _known(e.low), "high": _known(e.high)}
            for e in (self.null, self.planted_estimate)
        )
        told = ("hardware", "date", "passed", "fit", "sets", "step_seconds", "planted")
        return {
            **{name: getattr(self, name) for name in told},
            "verdict": self.verdict(),
            "disturbed_sets": self.disturbed,
            "threads": self.threads or self.cores,
            "seconds_per_set": round(self.seconds_per_set, 2),
            "noise_between_sets": _known(self.noise),
            "null": null,
            "null_called_at_99": self.null_called,
            "planted_ratio": self.truth,
            "planted_measured": slow,
            "planted_found": self.planted_found,
            "planted_in_95_interval": self.planted_in_interval,
            "resolvable": {f"{m} min": v for m, v in self.resolvable.items()},
        }

    def verdict(self) -> str:
        """One sentence: may one measure here, and how finely?"""
        if (sets := self.planted_estimate.sets) < LEAST_SETS:
            needed = f"a verdict needs {LEAST_SETS}; give more minutes"
            return f"Not judged: {phrases.plural(sets, 'set')} in the time given, and {needed}"
        if self.null_called:
            return "Not fit to measure now: the baseline differs from itself at the 99 % level"
        if not self.planted_found:
            return f"Not fit to measure now: a planted slowdown of {_percent(self.planted)} was not found"
        how = "Fit to measure: {} a difference of" if self.fit else "Fit for large differences only: {}"
        return f"{how.format(f'{max(MINUTES)} minutes resolve')} {_percent(self.resolvable[max(MINUTES)])}"


def calibration(records: Sequence[RunRecord]) -> Calibration | None:
    """What the records of one calibration say; None where no set is complete, or other processes disturbed each."""
    sets: dict[str, dict[str, RunRecord]] = {}
    for r in records:
        if r.status == "ok":
            sets.setdefault(r.set_id, {})[r.role] = r
    complete = [s for s in sets.values() if {"baseline", "twin", "candidate"} <= s.keys()]
    whole = [s for s in complete if not crowded(list(s.values()))]
    if not whole:
        return None
    first, several = whole[0]["candidate"], len(whole) > 1
    null_logs = np.array([set_log_ratio(s["baseline"], s["twin"]) for s in whole])
    planted_logs = np.array([set_log_ratio(s["baseline"], s["candidate"], s["twin"]) for s in whole])
    starts = [datetime.fromisoformat(s["baseline"].environment.date) for s in whole]
    minutes = np.array([(t - starts[0]).total_seconds() / 60 for t in starts])
    # A set's cost is the time to the next one; the last set's is not known from dates.
    stages = sum(sum(r.stages.values()) for r in whole[0].values())
    steps = [w.seconds / w.steps for s in whole for w in s["baseline"].windows if w.steps]
    return Calibration(
        hardware=first.environment.machine.name,
        date=first.environment.date,
        sets=len(whole),
        disturbed=len(complete) - len(whole),
        threads=first.config.threads,
        cores=first.environment.machine.usable_cores,
        seconds_per_set=float(np.diff(minutes).mean() * 60) if several else stages,
        step_seconds=float(np.median(steps)) if steps else math.nan,
        noise=float(np.nanstd(null_logs, ddof=1)) if several else math.nan,
        null=stats.estimate(null_logs),
        planted=first.config.option("pieces", 0) / whole[0]["baseline"].config.option("pieces", 1) - 1,
        planted_estimate=stats.estimate(planted_logs),
        null_ratios=tuple(np.exp(null_logs)),
        planted_ratios=tuple(np.exp(planted_logs)),
        minutes=tuple(minutes),
    )


def _percent(value: float | None) -> str:
    return "unknown" if value is None or math.isnan(value) else f"{phrases.significant(100 * value, 2)} %"


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def lines(found: Calibration) -> list[str]:
    """The calibration in words, for a terminal and for the report."""
    judged = "not judged" if found.sets < LEAST_SETS else "found" if found.planted_found else "missed"
    if found.sets > 1:
        judged += f", and the truth lies {'inside' if found.planted_in_interval else 'outside'} the interval"
    some = f", with {found.threads} of {phrases.plural(found.cores, 'core')}" if found.threads else ""
    lost = f"; {found.disturbed} more were disturbed by other processes and do not count" if found.disturbed else ""
    resolved = [f"{'none' if v is None else _percent(v)} in {m} min" for m, v in found.resolvable.items()]
    return [
        f"{found.verdict()}.",
        f"Measured: {_measured(found)}{some}{lost}.",
        f"Baseline against itself: {_estimate(found.null)}; {'' if found.null_called else 'not '}called different at "
        "the 99 % level.",
        f"{_percent(found.planted)} more work planted (true ratio {found.truth:.3f}): "
        f"{_estimate(found.planted_estimate)}; {judged}.",
        f"Noise between sets: {_percent(found.noise)}.",
        f"Smallest difference that can be resolved: {', '.join(resolved)}.",
    ]


def _measured(found: Calibration) -> str:
    sets = f"{phrases.plural(found.sets, 'set')} of {found.seconds_per_set:.1f} s"
    return f"{sets}, steps of {phrases.seconds(found.step_seconds)}"


def _estimate(estimate: stats.Estimate) -> str:
    return f"{estimate.value:.3f} ({phrases.evidence_of(estimate)})" if math.isfinite(estimate.value) else "no value"


def save_figure(found: Calibration, output: Path) -> Path:
    """Draw into ``image_output/``; returns the path."""
    path = output / "image_output" / "calibration.png"
    style.save(figure(found), path)
    return path


def figure(found: Calibration) -> Figure:
    """Ratios of single sets over time, with the truth and the interval of their mean."""
    ends = [0.0, max(1e-3, *found.minutes)]
    more = f"{100 * found.planted:.0f} % more work"
    drawn = []
    for name, truth, estimate, ratios, colour in (
        ("itself", 1.0, found.null, found.null_ratios, style.SERIES[0]),
        (more, found.truth, found.planted_estimate, found.planted_ratios, style.SERIES[1]),
    ):
        low, high = ([estimate.low] * 2, [estimate.high] * 2) if math.isfinite(estimate.low) else ((), ())
        true = Line(name="", x=ends, y=[truth] * 2, low=low, high=high, colour=colour, look="--", shade=True, width=1.0)
        drawn += [true, Line(name=name, x=found.minutes, y=ratios, colour=colour, look="o")]
    x_label, y_label = "minutes since the first set", "speed relative to the baseline"
    return draw(
        [Plot(lines=drawn, x_label=x_label, y_label=y_label, from_zero=False)],
        title=found.verdict(),
        context=style.SEPARATOR.join([found.hardware, found.date[:16].replace("T", " "), _measured(found)]),
        note="The same work was measured against itself, and with more work planted. Dots: single sets; shades: 95 % "
        "interval of the geometric mean; dashed: the truth.",
    )
