"""How much tighter is a ratio from groups that take turns than from runs one after the other?

    python benchmarks/design.py --repeats 15 --neighbour

Both designs measure the same work against itself, in fresh isolated groups, with equally many windows of equal length.
*Turns* is what the lab does: both groups live, and a window of one follows a window of the other. *Sequential* is the
plain design: all windows of one group, then all of the other. The two alternate, so that both meet the same machine.
With ``--neighbour`` a process keeps one core busy about half of the time, at random.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import random
import statistics
import time
from pathlib import Path

from ddpm_lab.calibrate import PIECES, WORKLOAD
from ddpm_lab.config import RunConfig
from ddpm_lab.measure.progress import Progress
from ddpm_lab.measure.seat import Instrument, Member, Seat
from ddpm_lab.measure.sets import measure_set
from ddpm_lab.plan import Plan
from ddpm_lab.planning import instrument_for
from ddpm_lab.record import set_log_ratio

PLAN = Plan(turns=12)
BASELINE = RunConfig(workload=WORKLOAD, global_batch_size=1, options=(("pieces", PIECES),))


def _neighbour() -> None:
    """Busy and idle spells of some seconds, as those of other people's work."""
    while True:
        end = time.monotonic() + random.expovariate(1 / 5)
        while time.monotonic() < end:
            pass
        time.sleep(random.expovariate(1 / 5))


def turns(instrument: Instrument) -> float:
    """Log ratio of one set of the lab's own design."""
    members = [Member("baseline", "one", BASELINE), Member("twin", "two", BASELINE)]
    one, two = measure_set(instrument, experiment="design", family="design", plan=PLAN, members=members)
    return set_log_ratio(one, two)


def sequential(instrument: Instrument, steps: int) -> float:
    """Log ratio of the medians of two runs, one after the other."""
    medians = []
    for _ in range(2):
        seat = Seat(Member("baseline", "one", BASELINE), PLAN, instrument)
        try:
            seat.open()
            for turn in range(PLAN.turns):
                seat.window(turn, 0, steps or math.ceil(PLAN.window_seconds / seat.warm_step_seconds))
            seat.finish()
            medians.append(statistics.median(w.seconds_per_image for w in seat.windows))
        finally:
            seat.close()
    return math.log(medians[0] / medians[1])


def main() -> None:
    """Run both designs in alternation and compare their spreads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--neighbour", action="store_true")
    parser.add_argument("--output-dir", default="benchmarks/results")
    options = parser.parse_args()
    output = Path(options.output_dir).absolute()
    instrument = instrument_for(output, Progress("design", quiet=True))
    busy = multiprocessing.Process(target=_neighbour, daemon=True)
    if options.neighbour:
        busy.start()
    logs: dict[str, list[float]] = {"turns": [], "sequential": []}
    seconds = dict.fromkeys(logs, 0.0)
    for i in range(options.repeats):
        for name in logs if i % 2 else reversed(logs):
            begun = time.monotonic()
            logs[name].append(turns(instrument) if name == "turns" else sequential(instrument, 0))
            seconds[name] += time.monotonic() - begun
    if options.neighbour:
        busy.terminate()
    spreads = {name: statistics.stdev(v for v in values if math.isfinite(v)) for name, values in logs.items()}
    for name, spread in spreads.items():
        print(f"{name}: spread {100 * spread:.2f} %, {seconds[name] / options.repeats:.1f} s each")
    print(f"sequential / turns: {spreads['sequential'] / spreads['turns']:.1f}")
    output.mkdir(parents=True, exist_ok=True)
    target = output / f"design-{time.strftime('%Y%m%d-%H%M%S')}.json"
    target.write_text(json.dumps({"logs": logs, "seconds": seconds, "neighbour": options.neighbour}, indent=1))
    print(f"raw numbers: {target}")


if __name__ == "__main__":
    main()
