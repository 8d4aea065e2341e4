"""How often is a planted slowdown of 3 % found in five minutes, on this machine as it is?

    python benchmarks/power.py --tries 10 --minutes 5 --planted 3%

Each try is a calibration of its own. Prints one line a try and the count, and writes the ratios of all sets to a file:
``tests/data/noise.json``, which ``tests/test_stats.py`` replays, is made of such files. With ``--neighbour`` a process
keeps one core busy during the second half of each try.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from pathlib import Path

from ddpm_lab.calibrate import calibrate
from ddpm_lab.checks import percent
from ddpm_lab.explain.calibration import calibration


def _keep_busy(wait: float, seconds: float) -> None:
    time.sleep(wait)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def main() -> None:
    """Run the tries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--planted", default="3%")
    parser.add_argument("--neighbour", action="store_true", help="load one core in the second half of each try")
    parser.add_argument("--output-dir", default="benchmarks/results")
    options = parser.parse_args()
    planted, output = percent(options.planted), Path(options.output_dir)
    rows, found_count, false_calls = [], 0, 0
    for i in range(options.tries):
        half = options.minutes * 30
        busy = multiprocessing.Process(target=_keep_busy, args=(half, half), daemon=True)
        if options.neighbour:
            busy.start()
        found = calibration(calibrate(minutes=options.minutes, planted=planted, output_dir=output, quiet=True))
        if options.neighbour:
            busy.terminate()
            busy.join()
        if found is None:
            print(f"try {i + 1}: no complete set")
            continue
        found_count += found.planted_found
        false_calls += found.null_called
        rows.append({**found.as_dict(), "null_ratios": found.null_ratios, "planted_ratios": found.planted_ratios})
        said = found.planted_estimate
        print(
            f"try {i + 1}: {found.sets} sets, planted ratio {1 / (1 + planted):.4f} read as {said.value:.4f} "
            f"({said.low:.4f} to {said.high:.4f}), {'found' if found.planted_found else 'missed'}; "
            f"null {found.null.value:.4f} ({found.null.low:.4f} to {found.null.high:.4f}); "
            f"noise between sets {100 * found.noise:.2f} %",
            flush=True,
        )
    print(f"found {found_count} of {len(rows)}; the null called different at 99 %: {false_calls} of {len(rows)}")
    output.mkdir(parents=True, exist_ok=True)
    target = output / f"power-{time.strftime('%Y%m%d-%H%M%S')}.json"
    target.write_text(json.dumps(rows, indent=1))
    print(f"raw numbers: {target}")


if __name__ == "__main__":
    main()
