"""Does a search find the best cell of a grid, and in what share of the grid's time?

    python benchmarks/search.py path/to/cifar-10/train

24 combinations of batch, precision, loader workers, ranks and memory format, with the tiny network on CPU ranks (two
ranks have the smaller batch alone). First they are searched, any batch allowed; then each is measured in the six sets
that a verdict needs; then both winners are measured again in the same eight sets, whose ratio decides. Takes some half
an hour on two cores; what is complete is kept in benchmarks/results/search, and the same command goes on.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(CHECKOUT)]

import numpy as np  # noqa: E402

from ddpm_lab import search  # noqa: E402
from ddpm_lab.explain import stats  # noqa: E402
from ddpm_lab.ledger import Ledger  # noqa: E402
from ddpm_lab.plan import Experiment, Family  # noqa: E402
from ddpm_lab.planning import plan_experiment, plan_question  # noqa: E402
from ddpm_lab.recommend import find  # noqa: E402
from ddpm_lab.record import RunRecord, set_log_ratio  # noqa: E402
from ddpm_lab.space import Cell  # noqa: E402

ONLY = {
    "batch": [8, 16],
    "precision": ["fp32", "bf16"],
    "memory": ["nchw", "channels_last"],
    "ranks": [1, 2],
    "loader": ["files-0", "files-1"],
    "compile": ["off"],
}
GRID, SETS, AGAIN = "grid", 6, 8


def seconds_of(records: list[RunRecord]) -> float:
    """What sets took: the stages of all their groups, one after the other."""
    return sum(sum(r.stages.values()) for r in records if r.set_id)


def held(ledger: Ledger, experiment: str) -> list[RunRecord]:
    """Records of an experiment."""
    return ledger.read(lambda heads: [h for h in heads if h.experiment == experiment])[0]


def main() -> None:
    """Search, measure the grid, compare the winners."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a folder of images")
    parser.add_argument("--output-dir", default=str(CHECKOUT / "benchmarks" / "results" / "search"))
    parser.add_argument("--sets", type=int, default=SETS, help="sets of the grid (default: 6)")
    parser.add_argument("--again", type=int, default=AGAIN, help="sets of both winners (default: 8)")
    options = parser.parse_args()
    output = Path(options.output_dir).absolute()
    asked: dict[str, Any] = {"only": ONLY, "any_batch": True, "data": options.data, "device": "cpu"}
    planned = plan_question("search", network="tiny", output_dir=output, **asked)
    campaign, space = planned.campaign, planned.campaign.experiment.space
    assert space is not None
    cells = {cell: c for cell, c in space.cells().items() if (c.world_size, c.global_batch_size) != (2, 16)}
    began = time.monotonic()
    belief = find(planned, list(cells))
    winner = belief.winner(list(cells))
    print(f"the search took {time.monotonic() - began:.0f} s of this run")

    name, data_name = campaign.experiment.families[0].name, campaign.instrument.data_name
    label = {cell: space.changed(cell, space.start) or "as it was" for cell in cells}

    def measure(experiment: str, chosen: list[Cell], sets: int) -> list[RunRecord]:
        family = Family(
            name=name,
            baseline=space.baseline,
            baseline_label=label[space.start],
            candidates=tuple((label[c], cells[c]) for c in chosen if c != space.start),
        )
        made = plan_experiment(
            Experiment(name=experiment, families=(family,)),
            data_name=data_name,
            plan=dataclasses.replace(campaign.target.plan, turns=12),
            sets=sets,
            resolution=None,
            minutes=None,
            output=output,
        )
        made.measure()
        return held(campaign.ledger, experiment)

    grid = measure(GRID, list(cells), options.sets)
    logs = search.observations(grid, space.baseline.run_id)

    def speed(cell: Cell) -> float:
        known = [s[cells[cell].run_id] for s in logs if cells[cell].run_id in s]
        return float(np.mean(known)) if cell != space.start else 0.0

    best = max(cells, key=speed)
    print(f"{'combination':46}  search (sets)   grid")
    for cell in sorted(cells, key=speed, reverse=True):
        sets = belief.sets.get(cell, 0)
        mean = f"{np.exp(belief.mean[belief.index[cell]]):6.2f} ({sets})" if sets else f"{'':6} -  "
        print(f"{label[cell]:46}  {mean:14}  {np.exp(speed(cell)):5.2f}")
    share = seconds_of(held(campaign.ledger, "search")) / seconds_of(grid)
    print(f"\nthe search tried {len(belief.sets)} of {len(cells) - 1}, in {100 * share:.0f} % of the grid's time")
    print(f"winner of the search: {label[winner]}\nbest of the grid: {label[best]}")
    if winner == best:
        print("both are the same cell: within 3 %: yes")
        return
    again = measure("again", [winner, best], options.again)
    pairs: dict[str, dict[str, RunRecord]] = {}
    for r in again:
        if r.role in ("baseline", "candidate") and r.status == "ok":
            pairs.setdefault(r.set_id, {})[r.run_id] = r
    ours, its = cells[winner].run_id, cells[best].run_id
    found = stats.estimate([set_log_ratio(s[its], s[ours]) for s in pairs.values() if {ours, its} <= s.keys()])
    print(
        f"measured again in the same {found.sets} sets, the search's winner is {found.value:.3f} times as fast as the "
        f"grid's ({found.low:.3f} to {found.high:.3f})\nwithin 3 %: {'yes' if found.value >= 1 / 1.03 else 'no'}"
    )


if __name__ == "__main__":
    main()
