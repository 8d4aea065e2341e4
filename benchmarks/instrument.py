"""What does this machine's instrument find? Planted slowdowns of 0 to 10 %, in the same sets, alone and disturbed.

    python benchmarks/instrument.py --sets 200
    python benchmarks/instrument.py --sets 200 --neighbour

Each set holds the baseline, its repeat, and one configuration for each planted share of more work. A try is a run of
consecutive sets that count, as many as one minute or five hold at the cost of a single comparison (baseline, repeat,
candidate); each is judged as the primary comparison of a question. With ``--neighbour`` a process keeps one core busy
for spells of 20 s on average. Records go to ``benchmarks/results/instrument.jsonl`` (a killed run goes on from there),
the table and the figure, the *instrument card*, beside them. ``--draw`` only draws.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from scipy import stats as distributions

from ddpm_lab import turn_plan
from ddpm_lab.calibrate import PIECES, WORKLOAD
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import decisions
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure.progress import Progress
from ddpm_lab.measure.seat import Member
from ddpm_lab.measure.sets import measure_set
from ddpm_lab.plan import Plan
from ddpm_lab.planning import instrument_for
from ddpm_lab.record import RunRecord, crowded, set_log_ratio

PLANTED = (0, 1, 2, 3, 5, 10)
"""Per cent more work."""
TRY_MINUTES = (1, 5)
ALONE, BESIDE = "alone", "beside a neighbour"


def configuration(extra: int, threads: int) -> RunConfig:
    """A step with so many per cent more work; of none, another name than the baseline's."""
    options = (("pieces", PIECES + extra), ("planted", extra))
    return RunConfig(workload=WORKLOAD, global_batch_size=1, threads=threads, options=options)


def _spells() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        end = time.monotonic() + random.expovariate(1 / 20)
        while time.monotonic() < end:
            pass
        time.sleep(random.expovariate(1 / 20))


@contextlib.contextmanager
def neighbour(busy: bool) -> Iterator[None]:
    """A process that comes and goes, while entered."""
    process = multiprocessing.get_context("spawn").Process(target=_spells, daemon=True)
    if busy:
        process.start()
    try:
        yield
    finally:
        if busy:
            process.terminate()
            process.join()


def measure(ledger: Ledger, output: Path, sets: int, kind: str, threads: int) -> None:
    """Measure until the ledger holds so many sets of this kind that count."""
    baseline = RunConfig(workload=WORKLOAD, global_batch_size=1, threads=threads, options=(("pieces", PIECES),))
    members = [Member("baseline", "baseline", baseline), Member("twin", "baseline, repeated", baseline)]
    members += [Member("candidate", f"{p} % more work", configuration(p, threads)) for p in PLANTED]
    progress = Progress("instrument")
    instrument = instrument_for(output, progress)
    turns = 0
    with neighbour(kind == BESIDE):
        while (done := len(counted(ledger, kind))) < sets:
            progress.prefix = f"{kind}: set {done + 1} of {sets};"
            records = measure_set(
                instrument,
                experiment="instrument",
                family=kind,
                plan=Plan(turns=turns),
                members=members,
                turns=lambda start, turn: turn_plan.best_turns(start, turn, turn_plan.WITHIN, turn_plan.BETWEEN),
            )
            turns = records[0].plan.turns
            ledger.append(records)


def counted(ledger: Ledger, kind: str) -> list[list[RunRecord]]:
    """The sets of a kind that are whole and count, in order."""
    by_set: dict[str, list[RunRecord]] = {}
    for r in ledger.read(lambda heads: [h for h in heads if h.experiment == "instrument"])[0]:
        if r.family == kind and r.status == "ok":
            by_set.setdefault(r.set_id, []).append(r)
    whole = [members for members in by_set.values() if len(members) == len(PLANTED) + 2]
    return [members for members in whole if not crowded(members)]


def card(sets: list[list[RunRecord]]) -> list[dict[str, float]]:
    """For tries of each length and each planted share: tries, how many called it and how many the same, coverage."""
    logs: dict[int, list[float]] = {p: [] for p in PLANTED}
    seconds = []
    for members in sets:
        base, twin, *others = members
        for r in others:
            logs[int(r.config.option("planted", 0))].append(set_log_ratio(base, r, twin))
        seconds.append(sum(sum(r.stages.values()) for r in (base, twin, others[0])))
    rows = []
    for minutes in TRY_MINUTES:
        each = max(decisions.LEAST_SETS, int(60 * minutes / float(np.mean(seconds))))
        for planted, values in logs.items():
            tries = [values[i : i + each] for i in range(0, len(values) - each + 1, each)]
            found = [decisions.decided([np.array(v)], [each])[0] for v in tries]
            truth = 1 / (1 + planted / 100)
            rows.append(
                {
                    "minutes": minutes,
                    "planted": planted,
                    "sets": each,
                    "tries": len(tries),
                    "called": sum(d.word in (decisions.FASTER, decisions.SLOWER) for d in found),
                    "same": sum(d.word == decisions.SAME for d in found),
                    "covered": sum(d.estimate.contains(truth) for d in found),
                    "width": float(np.mean([2 * d.estimate.half_width for d in found])) if found else math.nan,
                }
            )
    return rows


def interval(count: float, tries: float) -> tuple[float, float]:
    """The 95 % interval of a share (Clopper and Pearson 1934)."""
    found = distributions.binomtest(int(count), int(tries)).proportion_ci()
    return float(found.low), float(found.high)


def draw(cards: dict[str, list[dict[str, float]]], target: Path) -> None:
    """The instrument card: the share of tries in which each planted slowdown was called."""
    figure, axes = plt.subplots(1, len(cards), figsize=(4.8 * len(cards), 3.6), sharey=True, squeeze=False)
    for ax, (kind, rows) in zip(axes[0], cards.items(), strict=True):
        for minutes, color, marker, shift in zip(TRY_MINUTES, ("#de8f05", "#0173b2"), "so", (-0.1, 0.1), strict=True):
            shown = [r for r in rows if r["minutes"] == minutes and r["tries"]]
            for row in shown:
                low, high = interval(row["called"], row["tries"])
                ax.plot([row["planted"] + shift] * 2, [100 * low, 100 * high], color=color, lw=2, alpha=0.6)
            label = f"{minutes} min: {shown[0]['tries']:.0f} tries of {shown[0]['sets']:.0f} sets" if shown else ""
            shares = [100 * r["called"] / r["tries"] for r in shown]
            ax.plot([r["planted"] + shift for r in shown], shares, color=color, marker=marker, ms=6, lw=1, label=label)
        ax.axhline(90, color="#9aa5b1", lw=1, ls="--")
        ax.set_title(kind.capitalize(), fontsize=10)
        ax.set_xlabel("planted slowdown, % more work")
        ax.set_xticks(PLANTED)
        ax.set_ylim(-3, 103)
        ax.legend(fontsize=8, loc="lower right", frameon=False)
    axes[0][0].set_ylabel("called in % of tries\n(95 % interval)")
    figure.tight_layout()
    figure.savefig(target, dpi=150)


def main() -> None:
    """Measure, and draw the card of what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", type=int, default=200)
    parser.add_argument("--neighbour", action="store_true")
    parser.add_argument("--threads", type=int, default=1, help="of each group (default: 1, which leaves a core free)")
    parser.add_argument("--draw", action="store_true")
    parser.add_argument("--output-dir", default="benchmarks/results")
    options = parser.parse_args()
    output = Path(options.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(output / "instrument.jsonl")
    if not options.draw:
        measure(ledger, output, options.sets, BESIDE if options.neighbour else ALONE, options.threads)
    cards = {kind: card(sets) for kind in (ALONE, BESIDE) if len(sets := counted(ledger, kind)) >= decisions.LEAST_SETS}
    for kind, rows in cards.items():
        print(kind)
        for row in rows:
            spans = [f"{name} {row[name]:.0f} of {row['tries']:.0f}" for name in ("called", "same", "covered")]
            spans += [f"interval {100 * row['width']:.1f} % wide"]
            print(f"  {row['minutes']} min, {row['planted']:2.0f} %: {', '.join(spans)}")
    (output / "instrument.json").write_text(json.dumps(cards, indent=1))
    if cards:
        draw(cards, output / "instrument.png")


if __name__ == "__main__":
    main()
