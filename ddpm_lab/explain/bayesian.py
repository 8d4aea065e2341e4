"""A search for the fastest configuration: what short sets say of each combination, and which to measure next.

The first sets try each setting alone, and the combination that is thought to be fast. From then on a Gaussian process
predicts the speed of every combination: the logarithm of a cell's speed is the sum of what each value is worth, each
pair of values beyond that, and each cell beyond both (an additive kernel; Duvenaud et al. 2011). The next set has the
best so far and those with the largest expected improvement (Jones et al. 1998) for the time they cost. The search ends
where little improvement is expected. ``questions.search`` measures the winner again, in sets of their own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from ddpm_lab.config import RunConfig
from ddpm_lab.record import LASTING, TWIN, RunRecord, crowded, set_log_ratio
from ddpm_lab.space import BATCH, Cell, Space

Array = npt.NDArray[np.float64]
Ratios = dict[str, float]
"""ln(baseline's time / another's) in one set, by run id; the twin's under TWIN. NaN: it failed, -inf: for good."""
NOT_WORSE, WORSE = ("not worse", "identical"), "worse"
"""Verdicts of trials that let a batch be chosen, and the one that excludes anything."""

MAIN, PAIR, OWN = 0.25, 0.12, 0.05
"""Standard deviations, in logarithm, of what a value is worth, a pair of values beyond that, and a cell beyond both."""
NOISE, NOISE_SETS = 0.015, 2
"""Prior standard deviation of a configuration's logarithm between sets, and the sets that the prior weighs."""
FEW_SETS = -1.2816
"""The 10 % point of the normal distribution: noise is taken to be as large as so few twins can leave open."""
TOLERANCE, RIVALS = 0.001, 10
"""Expected improvement, in logarithm, at which a search ends; no rival has less than so many parts of the largest."""
SIMPLER = 0.005
"""Of cells whose speed differs by less the one with the fewest changes wins."""
LEAST_SETS, TRIES, AT_ONCE = 2, 2, 5
"""Sets of a winner, failures after which a cell is given up, and cells in a set."""
COMPILE_SHARE = 0.5
"""Of the time that is left: no more is spent on a first compile."""


def observations(records: Iterable[RunRecord], baseline_id: str) -> list[Ratios]:
    """Return what each complete set with this baseline found, in the order of measuring."""
    sets: dict[str, list[RunRecord]] = {}
    for r in records:
        if r.baseline_id == baseline_id and r.role in ("baseline", "twin", "candidate"):
            sets.setdefault(r.set_id, []).append(r)
    found = []
    for members in sets.values():
        base = next((r for r in members if r.role == "baseline" and r.status == "ok"), None)
        if base is not None and not crowded(members):
            others = [r for r in members if r.role != "baseline"]
            found.append({TWIN if r.role == "twin" else r.run_id: _log_ratio(base, r) for r in others})
    return found


def _log_ratio(base: RunRecord, other: RunRecord) -> float:
    if other.status == "ok":
        return set_log_ratio(base, other)
    return -math.inf if other.status in LASTING else math.nan


@dataclass(frozen=True, kw_only=True)
class Belief:
    """Mean and covariance (n, n) of ln(speed of a cell / the baseline's), for every cell, given the sets so far.

    ``sets`` counts the sets that measured each cell. ``noise`` is the standard deviation of one configuration between
    sets, at the upper end of what the twins say. Cells that are ``lost`` fail here.
    """

    space: Space
    mean: Array
    covariance: Array
    sets: Mapping[Cell, int]
    lost: frozenset[Cell]
    noise: float

    @cached_property
    def index(self) -> dict[Cell, int]:
        """The place of each cell."""
        return {cell: i for i, cell in enumerate(self.space.cells)}

    def speed(self, cell: Cell) -> float:
        """Return the expected ln(speed of a cell / the baseline's)."""
        return float(self.mean[self.index[cell]])

    def winner(self, among: Sequence[Cell]) -> Cell:
        """Return the fastest that was measured; of those within ``SIMPLER`` of it the one with fewest changes."""
        measured = [c for c in among if self.sets.get(c, 0) or c == self.space.start]
        most = max(map(self.speed, measured))
        near = [c for c in measured if self.speed(c) >= most - SIMPLER]
        return min(near, key=lambda c: (sum(map(bool, c)), -self.speed(c)))

    def gain(self, cell: Cell, over: Cell) -> tuple[float, float]:
        """Return mean and standard deviation of ln(speed of a cell / speed of another)."""
        i, j = self.index[cell], self.index[over]
        spread = self.covariance[i, i] + self.covariance[j, j] - 2 * self.covariance[i, j]
        return float(self.mean[i] - self.mean[j]), math.sqrt(max(float(spread), 0.0))

    def expected_gain(self, cell: Cell, over: Cell) -> float:
        """Return the expected improvement, E[max(0, ln(speed of a cell / speed of another))]."""
        mean, spread = self.gain(cell, over)
        if not spread:
            return max(mean, 0.0)
        normal = NormalDist()
        return mean * normal.cdf(mean / spread) + spread * normal.pdf(mean / spread)

    def next_cells(self, among: Sequence[Cell], seconds_of: Callable[[Cell], float], seconds_left: float) -> list[Cell]:
        """Return the cells of the next set; none if the search may end."""
        start, usual = self.space.start, min(map(seconds_of, among), default=0.0)
        affordable = usual + COMPILE_SHARE * seconds_left
        open_ = [c for c in among if c != start and c not in self.lost and seconds_of(c) <= affordable]
        alone = [c for c in open_ if not self.sets.get(c) and (c == self.space.guess or sum(map(bool, c)) == 1)]
        if alone:  # earlier settings first, which are put first because they gain most
            alone.sort(key=lambda c: (seconds_of(c), c != self.space.guess, [not value for value in c]))
            return alone[:AT_ONCE]
        lead = max([start, *open_], key=self.speed)
        gains = {c: self.expected_gain(c, lead) for c in open_ if c != lead}
        most = max(gains.values(), default=0.0)
        if most <= TOLERANCE and (lead == start or self.sets.get(lead, 0) >= LEAST_SETS):
            return []
        rivals = [c for c in gains if gains[c] > most / RIVALS]
        rivals.sort(key=lambda c: -gains[c] / seconds_of(c))
        return [*([lead] if lead != start else []), *rivals][:AT_ONCE]


def _low_chi_square(degrees: int) -> float:
    """Return the 10 % point of the chi-square distribution (Wilson & Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + FEW_SETS * math.sqrt(spread)) ** 3


def believe(space: Space, found: Sequence[Ratios]) -> Belief:
    """Return what sets say of all cells, with the baseline's own speed known."""
    cells, place = list(space.cells), {config.run_id: i for i, config in enumerate(space.cells.values())}
    codes = np.array(cells)
    shared = sum((codes[:, f, None] == codes[None, :, f]).astype(float) for f in range(codes.shape[1]))
    prior = MAIN**2 * shared + PAIR**2 * shared * (shared - 1) / 2 + OWN**2 * np.eye(len(cells))
    twins = [s[TWIN] for s in found if math.isfinite(s.get(TWIN, math.nan))]
    variance = (NOISE_SETS * NOISE**2 + sum(t * t for t in twins) / 2) / _low_chi_square(NOISE_SETS + len(twins))
    seen = [(n, place[run], y) for n, s in enumerate(found) for run, y in s.items() if run in place]
    known = [row for row in seen if math.isfinite(row[2])]
    failures = Counter(i for _, i, y in seen if math.isnan(y))
    failures.update({i: TRIES for _, i, y in seen if y == -math.inf})
    at = np.array([place[space.baseline.run_id], *(i for _, i, _ in known)])
    which = np.array([-1, *(n for n, _, _ in known)])
    # Whatever befalls the baseline of a set befalls all ratios of the set.
    noise = variance * (np.eye(len(at)) + (which[:, None] == which[None, :]))
    noise[0, 0] = 1e-9
    gain = np.linalg.solve(prior[np.ix_(at, at)] + noise, prior[at]).T
    return Belief(
        space=space,
        mean=gain @ np.array([0.0, *(y for _, _, y in known)]),
        covariance=prior - gain @ prior[at],
        sets=Counter(cells[i] for _, i, _ in known),
        lost=frozenset(cells[i] for i, count in failures.items() if count >= TRIES),
        noise=math.sqrt(variance),
    )


def most_sets(cells: int) -> int:
    """Return the most sets of a race: about a third of the time that six long sets of each cell take, five a set."""
    return max(4, 3 * cells // 5)


def race(
    space: Space,
    found: list[Ratios],
    among: Sequence[Cell],
    measure: Callable[[list[Cell]], Ratios | None],
    *,
    seconds_of: Callable[[Cell], float],
    seconds_left: Callable[[], float],
    most_sets: int,
) -> Belief:
    """Measure set after set until the best of ``among`` is known well enough, or the time or the sets are over.

    ``found`` is what earlier sets said, and grows; ``measure`` measures cells beside the baseline, and gives None where
    nothing came of it, which ends the race.
    """
    for count in range(most_sets):
        belief, left = believe(space, found), seconds_left()
        cells = belief.next_cells(among, seconds_of, left)
        # Baseline and twin are in every set.
        if not cells or (count and left < sum(map(seconds_of, cells)) + 2 * min(map(seconds_of, cells))):
            return belief
        new = measure(cells)
        if new is None:
            return belief
        found.append(new)
    return believe(space, found)


def admissible(space: Space, verdict: Callable[[RunConfig], str]) -> list[Cell]:
    """Return the cells that may win, by the ``verdict`` of trials on a configuration's quality.

    Nothing that is worse, in all or by any of its values alone; and, unless the space takes any batch, another batch
    only where it is known to learn as much from as many images.
    """
    verdicts = {cell: verdict(config) for cell, config in space.cells.items()}

    def may(cell: Cell, place: int, name: str) -> bool:
        alone = verdicts.get(tuple(value if i == place else 0 for i, value in enumerate(cell)), "")
        return alone in NOT_WORSE if name == BATCH and not space.any_batch else alone != WORSE

    names = list(enumerate(space.settings))
    return [c for c, word in verdicts.items() if word != WORSE and all(may(c, i, n) for i, n in names if c[i])]


def path(belief: Belief, winner: Cell) -> list[Cell]:
    """Return cells from the baseline to the winner, each with one more change: the largest expected gain comes first.

    The batch comes last, and what only works together comes together.
    """
    at, names = belief.space.start, list(belief.space.settings)
    found = [at]
    while at != winner:
        open_ = [i for i, (mine, its) in enumerate(zip(at, winner, strict=True)) if mine != its]
        steps = [(*at[:i], winner[i], *at[i + 1 :]) for i in open_ if names[i] != BATCH or len(open_) == 1]
        at = max((c for c in steps if c in belief.index and c not in belief.lost), key=belief.speed, default=winner)
        found.append(at)
    return found
