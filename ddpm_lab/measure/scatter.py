"""How much turns and sets scatter on a machine, by its recent records: how many there are follows from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ddpm_lab import turn_plan
from ddpm_lab.ledger import Ledger, load
from ddpm_lab.record import RunRecord, crowded, turn_log_ratios

RECENT_RECORDS = 150
"""Windows of so many records of a machine say how much it scatters."""


def scatter(ledger: Ledger, machine_key: str) -> tuple[float, float]:
    """Standard deviations of turns within a set and of sets, of a log ratio; see ``turn_plan.variances``."""
    heads = [h for h in ledger.heads()[0] if h.machine.key == machine_key]
    recent = [h for h in heads if h.role in ("baseline", "twin", "candidate")][-RECENT_RECORDS:]
    return turn_plan.variances(*_turn_logs(load(recent)[0]))


def _turn_logs(records: Sequence[RunRecord]) -> tuple[list[list[float]], list[list[list[float]]]]:
    """Log ratios by turn: of each set's twin, and for each comparison, of each set's candidate to baseline and twin.

    Only of sets that count, with two turns or more: of one turn nothing can be told.
    """
    sets: dict[str, dict[str, RunRecord]] = defaultdict(dict)
    for r in records:
        if r.windows:
            sets[r.set_id][r.role if r.role != "candidate" else r.run_id] = r
    twins, others = list[list[float]](), defaultdict[tuple[str, str], list[list[float]]](list)
    for held in sets.values():
        if {"baseline", "twin"} <= held.keys() and not crowded(list(held.values())):
            base, twin = held.pop("baseline"), held.pop("twin")
            twins.append(turn_log_ratios(base, twin))
            for r in held.values():
                others[r.baseline_id, r.run_id].append(turn_log_ratios(base, r, twin))
    return [v for v in twins if len(v) > 1], [[v for v in found if len(v) > 1] for found in others.values()]
