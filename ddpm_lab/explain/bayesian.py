"""A search for the fastest configuration: what short sets say of each combination, and which to measure next.

A search is a race. The first sets try each setting alone, and the combination that is thought to be fast. From then
on a Gaussian process over all combinations says which may still be the fastest: the logarithm of a cell's speed is the
sum of what each value is worth, each pair of values beyond that, and each cell beyond both (an additive kernel;
Duvenaud et al. 2011). The next set has the best so far and those by which most would be lost if the search ended now,
for the time they cost. It ends where that loss is small. What wins was measured itself, and is measured again, in other
sets, by ``recommend``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ddpm_lab.config import RunConfig
from ddpm_lab.record import LASTING, RunRecord, crowded, set_log_ratio
from ddpm_lab.space import BATCH, Cell, Space

Array = npt.NDArray[np.float64]
Ratios = dict[str, float]
"""ln(baseline's time / another's) in one set, by run id; the twin's under TWIN. NaN: it failed, -inf: for good."""
TWIN = "twin"
NOT_WORSE, WORSE = ("not worse", "identical"), "worse"
"""Verdicts of trials that let a batch be chosen, and the one that keeps anything out."""

MAIN, PAIR, OWN = 0.25, 0.12, 0.05
"""Standard deviations, in logarithm, of what a value is worth, a pair of values beyond that, and a cell beyond both."""
NOISE, NOISE_SETS = 0.015, 2
"""What a configuration's logarithm scatters by from set to set until twins have shown it, and the sets this weighs."""
FEW_SETS = -1.2816
"""The 10 % point of the normal distribution: noise is taken to be as large as so few twins can leave open."""
SAMPLES = 256
TOLERANCE = 0.002
"""The expected loss, in logarithm, at which a search ends."""
SIMPLER = 0.005
"""Of cells whose speed differs by less the one with the fewest changes wins."""
LEAST_SETS = 2
TRIES = 2
AT_ONCE = 5
COMPILE_SHARE = 0.5
"""Of the time that is left: no more is spent on a first compile."""


def observations(records: Iterable[RunRecord], baseline_id: str) -> list[Ratios]:
    """What each set with this baseline says of the others, in the order they were measured."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Belief:
    """What the sets so far say of every cell: mean and covariance (n, n) of ln(its speed / the baseline's).

    ``sets`` counts the sets that measured each cell, and ``noise`` is the spread of one configuration between sets,
    at the upper end of what the twins say.
    ``lost`` are cells that fail here.
    """

    space: Space
    cells: tuple[Cell, ...]
    mean: Array
    covariance: Array
    sets: Mapping[Cell, int]
    lost: frozenset[Cell]
    noise: float
    index: Mapping[Cell, int] = field(repr=False)

    def best(self, among: Sequence[Cell]) -> Cell:
        """The cell that is expected to be the fastest."""
        return max(among, key=lambda cell: self.mean[self.index[cell]])

    def winner(self, among: Sequence[Cell]) -> Cell:
        """The fastest that was measured; of those that differ by less than ``SIMPLER`` the one with fewest changes."""
        measured = [c for c in among if self.sets.get(c, 0) or c == self.space.start]
        most = self.mean[self.index[self.best(measured)]]
        near = [c for c in measured if self.mean[self.index[c]] >= most - SIMPLER]
        return min(near, key=lambda c: (sum(map(bool, c)), -self.mean[self.index[c]]))

    def gain(self, cell: Cell, over: Cell) -> tuple[float, float]:
        """Mean and standard deviation of ln(speed of a cell / speed of another)."""
        i, j = self.index[cell], self.index[over]
        spread = self.covariance[i, i] + self.covariance[j, j] - 2 * self.covariance[i, j]
        return float(self.mean[i] - self.mean[j]), math.sqrt(max(float(spread), 0.0))

    def expected_gain(self, cell: Cell, over: Cell) -> float:
        """E[max(0, ln(speed of a cell / speed of another))] (expected improvement; Jones et al. 1998)."""
        mean, spread = self.gain(cell, over)
        if not spread:
            return max(mean, 0.0)
        z = mean / spread
        return mean * _below(z) + spread * math.exp(-z * z / 2) / math.sqrt(2 * math.pi)

    def losses(self, among: Sequence[Cell]) -> dict[Cell, float]:
        """What is lost on average by taking the best so far, by the cell that would have been the fastest.

        From joint draws of all cells' speeds, the same ones whenever the same sets are known.
        """
        places = [self.index[c] for c in among]
        mean = self.mean[places]
        root = np.linalg.cholesky(self.covariance[np.ix_(places, places)] + 1e-9 * np.eye(len(places)))
        draws = np.random.default_rng(sum(self.sets.values())).standard_normal((SAMPLES, len(places)))
        speeds = mean + draws @ root.T
        first = speeds.argmax(axis=1)
        lost = speeds.max(axis=1) - speeds[:, int(mean.argmax())]
        found = np.bincount(first, weights=lost, minlength=len(places)) / SAMPLES
        return {cell: float(loss) for cell, loss in zip(among, found, strict=True)}

    def next_cells(self, among: Sequence[Cell], seconds_of: Callable[[Cell], float], seconds_left: float) -> list[Cell]:
        """The cells of the next set; none where the search may end."""
        start, usual = self.space.start, min(map(seconds_of, among), default=0.0)
        affordable = usual + COMPILE_SHARE * seconds_left
        open_ = [c for c in among if c not in self.lost and (c == start or seconds_of(c) <= affordable)]
        alone = [c for c in open_ if c == self.space.guess or sum(map(bool, c)) == 1]
        first = [c for c in alone if not self.sets.get(c) and c != start]
        if first:
            return sorted(first, key=lambda c: (seconds_of(c), c != self.space.guess, alone_order(c)))[:AT_ONCE]
        losses = self.losses(open_)
        lead, total = self.best(open_), sum(losses.values())
        if total <= TOLERANCE and (lead == start or self.sets.get(lead, 0) >= LEAST_SETS):
            return []
        rivals = [c for c in open_ if losses[c] > total / 20 and c not in (lead, start)]
        rivals.sort(key=lambda c: -losses[c] / seconds_of(c))
        return [*([lead] if lead != start else []), *rivals][:AT_ONCE]


def _low_chi_square(degrees: int) -> float:
    """The 10 % point of the chi-square distribution (Wilson & Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + FEW_SETS * math.sqrt(spread)) ** 3


def _below(z: float) -> float:
    """The normal distribution function."""
    return 0.5 * math.erfc(-z / math.sqrt(2))


def believe(space: Space, found: Sequence[Ratios]) -> Belief:
    """What sets say of all cells, with the baseline's own speed known."""
    cells, place = tuple(space.cells), {config.run_id: i for i, config in enumerate(space.cells.values())}
    codes = np.array(cells)
    shared = sum((codes[:, f, None] == codes[None, :, f]).astype(float) for f in range(codes.shape[1]))
    prior = MAIN**2 * shared + PAIR**2 * shared * (shared - 1) / 2 + OWN**2 * np.eye(len(cells))
    twins = [s[TWIN] for s in found if math.isfinite(s.get(TWIN, math.nan))]
    variance = (NOISE_SETS * NOISE**2 + sum(t * t for t in twins) / 2) / _low_chi_square(NOISE_SETS + len(twins))
    seen = [(n, place[run], y) for n, s in enumerate(found) for run, y in s.items() if run in place]
    known = [row for row in seen if math.isfinite(row[2])]
    failures = Counter(i for _, i, y in seen if math.isnan(y)) + Counter(
        {i: TRIES for _, i, y in seen if y == -math.inf}
    )
    at = np.array([place[space.baseline.run_id], *(i for _, i, _ in known)])
    which = np.array([-1, *(n for n, _, _ in known)])
    # Whatever befalls the baseline of a set befalls all ratios of the set.
    noise = variance * (np.eye(len(at)) + (which[:, None] == which[None, :]))
    noise[0, 0] = 1e-9
    gain = np.linalg.solve(prior[np.ix_(at, at)] + noise, prior[at]).T
    return Belief(
        space=space,
        cells=cells,
        mean=gain @ np.array([0.0, *(y for _, _, y in known)]),
        covariance=prior - gain @ prior[at],
        sets=Counter(cells[i] for _, i, _ in known),
        lost=frozenset(cells[i] for i, count in failures.items() if count >= TRIES),
        noise=math.sqrt(variance),
        index={cell: i for i, cell in enumerate(cells)},
    )


def alone_order(cell: Cell) -> tuple[int, Cell]:
    """Where a cell with one change stands: earlier settings first, which are put first because they gain most."""
    return next((i for i, value in enumerate(cell) if value), 0), cell


def most_sets(cells: int) -> int:
    """The most sets of a race: about a third of the time that six long sets of each cell take, five in each set."""
    return max(4, 3 * cells // 5)


def race(
    space: Space,
    found: list[Ratios],
    among: Sequence[Cell],
    measure: Callable[[list[Cell]], Ratios | None],
    *,
    seconds_of: Callable[[Cell], float],
    seconds_left: Callable[[Belief], float],
    most_sets: int,
) -> Belief:
    """Measure set after set until the best of ``among`` is known well enough, or the time or the sets are over.

    ``found`` is what earlier sets said, and grows; ``measure`` measures cells beside the baseline, and gives None where
    nothing came of it, which ends the race. ``seconds_left`` is what may still be spent, by what is known by then.
    """
    for count in range(most_sets):
        belief = believe(space, found)
        left = seconds_left(belief)
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
    """The cells that may win, by the ``verdict`` of trials on a configuration's quality.

    Nothing that is worse, in all or by any of its values alone; and, unless the space takes any batch, another batch
    only where it is known to learn as much from as many images.
    """
    cells = space.cells
    verdicts = {cell: verdict(config) for cell, config in cells.items()}

    def may(cell: Cell, place: int, name: str) -> bool:
        alone = verdicts.get(tuple(value if i == place else 0 for i, value in enumerate(cell)), "")
        return alone in NOT_WORSE if name == BATCH and not space.any_batch else alone != WORSE

    return [
        cell
        for cell in cells
        if verdicts[cell] != WORSE and all(may(cell, i, n) for i, n in enumerate(space.settings) if cell[i])
    ]


def path(belief: Belief, winner: Cell, last: int | None = None) -> list[Cell]:
    """Cells from the baseline to the winner, one setting more in each, the one that is expected to gain most first.

    The setting at place ``last`` comes last. What only works together comes together.
    """
    at, found = belief.space.start, [belief.space.start]
    while at != winner:
        open_ = [i for i, (mine, its) in enumerate(zip(at, winner, strict=True)) if mine != its]
        steps = [(*at[:i], winner[i], *at[i + 1 :]) for i in open_ if i != last or len(open_) == 1]
        able = [c for c in steps if c in belief.index and c not in belief.lost]
        at = max(able, key=lambda c: belief.mean[belief.index[c]]) if able else winner
        found.append(at)
    return found
