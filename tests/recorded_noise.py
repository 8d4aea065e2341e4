"""The noise of published sets as it is: resampled set by set, with its skew, its drift and its outliers."""

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ddpm_lab.explain.stats import TWIN_SCALE, Array

SETS: dict[str, list[dict[str, Any]]] = json.loads((Path(__file__).parent / "data" / "recorded_sets.json").read_text())[
    "machines"
]
MACHINES = tuple(SETS)
NEIGHBOURS = 48
"""Of fewer, sets drawn twice are common enough to make spreads small by chance."""
BLOCK = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """One set: per-turn log ratios of baseline to twin, and of each candidate to the mean of both."""

    family: str
    quiet: bool
    twin: Array
    candidates: dict[str, Array]


@cache
def recorded(machine: str) -> tuple[Recorded, ...]:
    """The sets of a machine in the order of measuring. Quiet are those with at most a fifth of their time crowded."""
    found = []
    for row in SETS[machine]:
        logs = {label: np.array(values) for label, values in row["logs"].items()}
        base, twin = logs.pop("baseline"), logs.pop("twin")
        found.append(
            Recorded(
                family=f"{row['experiment']}: {row['family']}",
                quiet=row["crowded"] <= len(base) / 5,
                twin=base - twin,
                candidates={label: (base + twin) / 2 - other for label, other in logs.items()},
            )
        )
    return tuple(found)


@cache
def noise(machine: str) -> list[Array]:
    """For each set of a machine, in order, the noise of its candidates: their true ratios are taken as their means.

    Taking the mean of n sets off makes what is left smaller by sqrt(1 - 1/n) on average, which is put back. Of
    comparisons with fewer than four sets too little is known. Sets without one are left out.
    """
    compared: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for place, row in enumerate(recorded(machine)):
        for label, turns in row.candidates.items() if row.quiet else ():
            compared[row.family, label].append((place, turns.mean()))
    found: dict[int, list[float]] = defaultdict(list)
    for sets in compared.values():
        mean = np.mean([value for _, value in sets])
        for place, value in sets if len(sets) >= 4 else ():
            found[place].append(float((value - mean) / math.sqrt(1 - 1 / len(sets))))
    return [np.array(found[place]) for place in sorted(found)]


class Machine:
    """Null comparisons made of whole sets of a real machine, drawn with replacement. The true log ratio is 0 exactly.

    A candidate's sets are drawn from NEIGHBOURS that were measured one after the other, so that spells of noise stay
    together and comparisons differ in their spread. Their order is not kept: of so few sets the first ones are off by
    chance, which is no drift. A twin's sets are drawn as blocks of BLOCK in their order, from all of the machine.
    """

    def __init__(self, name: str, rng: np.random.Generator) -> None:
        self.rng, self.sets = rng, noise(name)
        logs = np.array([row.twin.mean() for row in recorded(name) if row.quiet])
        self.twin_logs = logs - logs.mean()
        self._known: dict[int, tuple[Array, Array]] = {}

    def question(self, sets: int, candidates: int = 1) -> Array:
        """Log ratios [candidate, set] of candidates that are all as fast as the baseline, measured in the same sets.

        Candidates of a set share its baselines. Where it had fewer, those of the sets that followed stand in.
        """
        values, order = self._rows(candidates)
        places = (self.rng.integers(len(values)) + np.arange(NEIGHBOURS)) % len(values)
        drawn_first = np.argsort(order[places] + self.rng.random((NEIGHBOURS, values.shape[1])), axis=1)[:, :candidates]
        pool = np.take_along_axis(values[places], drawn_first, axis=1).T
        pool = pool - pool.mean(axis=1, keepdims=True)
        drawn: Array = pool[:, self.rng.integers(NEIGHBOURS, size=sets)]
        return drawn

    def _rows(self, candidates: int) -> tuple[Array, Array]:
        """Values [set, place] of each set and of those that follow, until there are so many, and which of them it is.

        Places that are left over are of set infinity, and drawn last.
        """
        if candidates not in self._known:
            rows: list[tuple[list[float], list[float]]] = []
            for first in range(len(self.sets)):
                values, order = list[float](), list[float]()
                for n in range(len(self.sets)):
                    if len(values) < candidates:
                        values += list(more := self.sets[(first + n) % len(self.sets)])
                        order += [float(n)] * len(more)
                rows.append((values, order))
            width = max(len(values) for values, _ in rows)
            padded = [(v + [0.0] * (width - len(v)), o + [math.inf] * (width - len(o))) for v, o in rows]
            self._known[candidates] = (np.array([v for v, _ in padded]), np.array([o for _, o in padded]))
        return self._known[candidates]

    def twin(self, sets: int) -> Array:
        """Log ratios of a twin."""
        starts = self.rng.integers(len(self.twin_logs), size=-(-sets // BLOCK))
        places = (starts[:, None] + np.arange(BLOCK)).ravel()[:sets]
        drawn: Array = np.take(self.twin_logs, places, mode="wrap")
        return drawn

    def others(self, count: int, sets: int) -> list[Array]:
        """Log ratios of other comparisons of the machine, scaled as candidates: half are candidates, half are twins."""
        return [self.question(sets)[0] if i % 2 else self.twin(sets) * TWIN_SCALE for i in range(count)]
