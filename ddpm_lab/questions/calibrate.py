"""The instrument checks itself: a baseline against itself, and against a slowdown that was planted.

Every calibration measures afresh, since what it asks is how the machine measures now; its records stay in the ledger.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.files import LEDGER, output_folder
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure.others import free_cores, measuring
from ddpm_lab.measure.process import sweep
from ddpm_lab.measure.progress import Progress
from ddpm_lab.measure.seat import Member
from ddpm_lab.measure.sets import measure_set
from ddpm_lab.plan import USUAL_TURNS, Plan
from ddpm_lab.questions.planning import instrument_for
from ddpm_lab.record import LedgerError, RunRecord, crowded
from ddpm_lab.training.setting import usual_device

EXPERIMENT = "calibrate"
WORKLOAD = "ddpm_lab.training.planted:pieces"
PIECES = 100
MOST_FAILURES = 2


def calibrate(
    *,
    minutes: float = 5.0,
    planted: float = 0.05,
    device: str | None = None,
    output_dir: str | Path | None = None,
    quiet: bool = False,
    progress: Callable[[str], None] | None = None,
) -> list[RunRecord]:
    """Measure sets of a baseline, its twin and a planted slowdown until the time is over; returns their records.

    On a CPU they have as many threads as there are cores that other processes leave free.

    Args:
        minutes: how long to measure; at least one set is measured.
        planted: the slowdown, as a share of the work of a step: a whole number of per cent, 0.01 to 1.
        device: cpu or cuda; None is the GPU where there is one.
        output_dir: folder whose ledger receives the records; None is the checkout.
        quiet: show no progress.
        progress: called with each line instead of showing it.

    Raises:
        ConfigError: a value cannot be measured.
        LedgerError: no set could be completed, or other processes disturbed each; the sentence gives the reason.
    """
    if not (isinstance(minutes, int | float) and 0 < minutes < 1e6):
        raise ConfigError(f"minutes is {minutes!r}: give a number above 0")
    extra = round(planted * PIECES) if isinstance(planted, int | float) and 0 < planted <= 1 else 0
    if not extra or abs(extra / PIECES - planted) > 1e-9:
        raise ConfigError(f"planted is {planted!r}: give whole per cents from 0.01 to 1, such as 0.05")
    output = output_folder(output_dir)
    show = Progress(EXPERIMENT, quiet=quiet)
    instrument = instrument_for(output, progress or show)
    ledger = Ledger(output / LEDGER)
    sweep()
    device = usual_device(device)
    plan = Plan(turns=USUAL_TURNS)
    family = f"calibration of {datetime.now().astimezone().isoformat(timespec='seconds')}"
    with measuring(show.always):
        free = free_cores() if device == "cpu" else instrument.usable_cores
        baseline = RunConfig(
            workload=WORKLOAD,
            device=device,
            global_batch_size=1,
            threads=free if free < instrument.usable_cores else 0,
            options=(("pieces", PIECES),),
        )
        slower = dataclasses.replace(baseline, options=(("pieces", PIECES + extra),))
        members = [
            Member("baseline", "baseline", baseline),
            Member("twin", "baseline again", baseline),
            Member("candidate", f"{extra} % more work", slower),
        ]
        begun, found = time.monotonic(), list[RunRecord]()
        done = quiet_sets = 0
        while True:
            elapsed = time.monotonic() - begun
            left = minutes * 60 - elapsed
            if done and left < elapsed / done:
                break
            show.prefix = f"set {done + 1}, {max(0, left):.0f} s left;"
            records = measure_set(instrument, experiment=EXPERIMENT, family=family, plan=plan, members=members)
            ledger.append(records)
            failed = [r for r in records if r.status != "ok"]
            found += records
            done += 1
            quiet_sets += not crowded(records)
            if len([r for r in found if r.status != "ok"]) >= MOST_FAILURES:
                raise LedgerError(f"the calibration cannot run here: {failed[-1].label}: {failed[-1].reason}")
    if not quiet_sets:
        raise LedgerError("other processes took the cores of every set of the calibration: try again without them")
    show.done(f"{done} set{'s' if done > 1 else ''} in {(time.monotonic() - begun) / 60:.1f} min")
    return found
