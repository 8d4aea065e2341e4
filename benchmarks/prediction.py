"""How far off are predicted step times, at numbers of ranks and over links that were not measured?

    sudo python benchmarks/prediction.py

Real groups of gloo ranks on hosts made of network namespaces, over links of a known delay and rate. Latency and
bandwidth are fitted to all-reduces over two of the links with 2 and 4 ranks; the steps of all others are predicted,
measured and compared. Takes about ten minutes; raw numbers go to benchmarks/results/prediction.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT), str(CHECKOUT / "tests")]

from emulated_links import EXCHANGES, STEPS, measure, median_error, outcomes  # noqa: E402
from namespaces import Link, why_no_shaping  # noqa: E402

FITTED = (
    Link(delay_seconds=1e-3, bits_per_second=1e8),
    Link(delay_seconds=4e-3, bits_per_second=2e8),
)
HELD_OUT = (
    Link(delay_seconds=2e-3, bits_per_second=5e7),
    Link(delay_seconds=5e-4, bits_per_second=2e8),
    Link(delay_seconds=3e-3, bits_per_second=1.5e8),
)
FITTED_RANKS, HELD_OUT_RANKS = (2, 4), (3, 5, 6, 8)


def main() -> None:
    """Measure, predict, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9, help="steps whose median counts (default: 9)")
    options = parser.parse_args()
    if (reason := why_no_shaping()) is not None:
        sys.exit(f"benchmarks/prediction.py: {reason}")
    held_out = dict.fromkeys(HELD_OUT_RANKS, STEPS)
    known = {**dict.fromkeys(FITTED_RANKS, EXCHANGES), **held_out}
    measured = {link: measure(link, known, options.steps) for link in FITTED}
    measured |= {link: measure(link, held_out, options.steps) for link in HELD_OUT}
    found = list(outcomes(measured, FITTED_RANKS))
    print("delay ms  Mbit/s  ranks  wait ms  KiB x buckets  measured ms  predicted ms (90 % interval)   error")
    for o in found:
        p, kib = o.predicted, o.step["message_bytes"] / 2**10
        print(
            f"{1e3 * o.link.delay_seconds:8.1f}  {(o.link.bits_per_second or 0) / 1e6:6.0f}  {o.ranks:5}  "
            f"{1e3 * o.step['compute_seconds']:7.0f}  {kib:7.0f} x {o.step['buckets']}    {1e3 * o.measured:11.1f}  "
            f"{1e3 * p.seconds:8.1f} ({1e3 * p.low:.1f} to {1e3 * p.high:.1f})  {100 * o.error:+6.1f} %"
        )
    for name, some in (
        ("links that were fitted, other ranks", [o for o in found if not o.new_link]),
        ("links that were not fitted", [o for o in found if o.new_link]),
        ("all", found),
    ):
        inside = sum(o.predicted.low <= o.measured <= o.predicted.high for o in some)
        print(f"{name}: median error {100 * median_error(some):.1f} %, {inside} of {len(some)} in their interval")
    target = CHECKOUT / "benchmarks" / "results" / "prediction.json"
    target.parent.mkdir(exist_ok=True)
    raw = {
        "exchanges": EXCHANGES,
        "steps": STEPS,
        "fitted_ranks": FITTED_RANKS,
        "seconds": [[dataclasses.asdict(link), rows] for link, rows in measured.items()],
    }
    target.write_text(json.dumps(raw, indent=1))
    print(f"raw numbers: {target.relative_to(CHECKOUT)}")


if __name__ == "__main__":
    main()
