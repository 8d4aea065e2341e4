"""A search for the fastest configuration: what it chooses from, what short sets say, and which to measure next.

The first sets try each setting alone, and the combination that is thought to be fast. From then on a Gaussian process
predicts the speed of every combination: the logarithm of a cell's speed is the sum of what each value is worth, each
pair of values beyond that, and each cell beyond both (an additive kernel; Duvenaud et al. 2011). The next set has the
best so far and those with the largest expected improvement (Jones et al. 1998) for the time they cost. The search ends
where little improvement is expected. ``recommend`` measures the winner again, in sets of their own.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from ddpm_lab.checks import ConfigError, choice, several
from ddpm_lab.config import RunConfig
from ddpm_lab.explain.quality import IDENTICAL, NOT_WORSE, WORSE
from ddpm_lab.plan import (
    BATCH,
    LEAST_SETS,
    RECOMMENDATION,
    SEARCH,
    START,
    Cell,
    Experiment,
    Family,
    Plan,
    Space,
    Trial,
    Value,
)
from ddpm_lab.questions.quality import identity_trials
from ddpm_lab.record import LASTING, TWIN, RunRecord, crowded, set_log_ratio
from ddpm_lab.training.setting import Batch, Setup, usual_settings

SEARCH_PLAN = Plan(turns=6)
"""Half as many turns as elsewhere: a search has no verdict to give, and more sets for those that stay in the race."""
_WORKERS = {"smoke": (0,), "quick": (0, 1, 2), "full": (0, 1, 2, 8)}
_BATCHES = {"smoke": (1,), "quick": (1, 2, 4), "full": (1, 2, 4)}  # multiples of the baseline's batch
_EAGER, _WHOLE = {"compile": "off"}, {"compile": "whole"}
_CUDA, _GPU = "needs a CUDA device", "need a GPU"


def search(
    setup: Setup, *, global_batch_size: Batch = None, only: Mapping[str, Sequence[object]] | None = None
) -> Experiment:
    """Every combination of settings that can apply here; the first value of each makes the baseline, a plain step.

    ``only`` names settings that are held to some of their values, by their short names: ``{"precision": ["bf16"]}``
    sets out from bf16 and stays there. Raises ConfigError for a setting or a value that there is not.
    """
    able: dict[str, list[Value]] = {}
    left_out: dict[str, str] = {}
    for name, value, why in _values(setup, setup.batch_size(global_batch_size)):
        if why:
            left_out[value.label] = why
        else:
            able.setdefault(name, []).append(value)
    settings = _only(able, only or {}, left_out)
    base = setup.config(**{name: new for values in settings.values() for name, new in values[0].changes.items()})
    omitted, guess = tuple(left_out.items()), _guess(settings, setup)
    held = tuple((name, tuple(value.key for value in settings[name])) for name in only or ())
    space = Space(baseline=base, settings=settings, guess=guess, left_out=omitted, only=held, preset=setup.preset)
    others = tuple((space.changed(cell), config) for cell, config in space.cells.items())[1:]
    if not others:
        raise ConfigError("only leaves one value of every setting: nothing is left to be searched; give more values")
    name = setup.family_name(base.global_batch_size)
    family = Family(name=name, baseline=base, baseline_label=START, candidates=others)
    return Experiment(name=SEARCH, families=(family,), space=space)


def _values(setup: Setup, batch: int) -> Iterator[tuple[str, Value, str]]:
    """Yield each value with its setting and why it cannot run here, if so; the plain step's values come first."""
    cuda, own, full = setup.device == "cuda", setup.own, setup.preset == "full"
    offers = own.offers if own else ("loss", "dataset", "eager")  # one's own is trained as it is written
    needs_cuda = "" if cuda else _CUDA
    formats = (("fp32", ""), ("bf16", ""), ("tf32", needs_cuda), ("fp16", needs_cuda))
    for name, why in sorted(formats, key=lambda each: each[0] != setup.plain_precision):
        if name == "fp32" or why or "loss" in offers:
            yield "precision", Value(name, name, {"precision": name}), why
    last = Value("channels_last", "channels_last", {"channels_last": True, "kernels": "aten"})
    nchw = Value("nchw", "NCHW", {"channels_last": False, "kernels": "aten"})
    fused = Value("fused", "fused kernels", {"channels_last": True, "kernels": "fused"})
    for value in (nchw, last) if own else (last, nchw, fused):
        yield "memory", value, ""
    yield "compile", Value("off", "eager", _EAGER), ""
    compiles = "" if "eager" in offers else "by itself, whatever is set"
    yield "compile", Value("whole", "compiled", _WHOLE), compiles
    if full and not own:
        yield "compile", Value("regional", "compiled block by block", {"compile": "regional"}), ""
    for mode, label in (("reduce-overhead", "compiled, CUDA graphs"), ("max-autotune", "compiled, max-autotune")):
        if full if cuda else not own:
            yield "compile", Value(mode, label, {**_WHOLE, "compile_mode": mode}), compiles or ("" if cuda else _GPU)
    for kind, end in (("default", "given back"), ("kept", "kept")) if not cuda else ():
        yield "freed_memory", Value(kind, f"freed memory {end}", {"freed_memory": kind}), ""
    ranks = setup.doubled_ranks
    for n in ranks if ranks != [1] else (1, 2):
        changes = {"world_size": n, "nodes": setup.nodes(n)} if n in ranks else {}
        yield "ranks", Value(str(n), setup.ranks_label(n), changes), "" if n in ranks else setup.why_alone
    if not own:
        yield "loader", Value("packed", "packed data", {"loader": "packed", "loader_workers": 0}), ""
        resident = Value("resident", "images on the GPU", {"loader": "resident", "loader_workers": 0})
        yield "loader", resident, "" if cuda else "need a CUDA device"
    elif "dataset" not in offers:
        yield "loader", Value("own", "batches of its own", {}), ""
    for count in _WORKERS[setup.preset] if "dataset" in offers else ():
        label = f"{'' if own else 'files, '}{count} worker{'s' * (count != 1)}"
        why = f"more than the {setup.cores_name}" if count > setup.usable_cores else ""
        yield "loader", Value(f"files-{count}", label, {"loader": "files", "loader_workers": count}), why
    for n in (batch * multiple for multiple in _BATCHES[setup.preset]):
        yield BATCH, Value(str(n), f"batch {n}", {"global_batch_size": n}), ""


def _only(
    settings: Mapping[str, Sequence[Value]], only: Mapping[str, Sequence[object]], left_out: Mapping[str, str]
) -> dict[str, tuple[Value, ...]]:
    found = {name: tuple(values) for name, values in settings.items()}
    if not isinstance(only, Mapping):
        raise ConfigError(f"only is {only!r}: give settings with lists of values, such as {{'precision': ['bf16']}}")
    for name, keys in only.items():
        choice("only", name, settings)
        several(f"only {name}", keys)
        known = {value.key: value for value in settings[name]}
        for key in map(str, keys):
            if name == BATCH and key.isdecimal() and int(key):
                known.setdefault(key, Value(key, f"batch {key}", {"global_batch_size": int(key)}))
            elif key not in known and key in left_out:
                raise ConfigError(f"only {name} has {key!r}, which {left_out[key]}: choose from {', '.join(known)}")
            else:
                choice(f"only {name}", key, known)
        found[name] = tuple(known[key] for key in dict.fromkeys(map(str, keys)))
    return found


def _guess(settings: Mapping[str, Sequence[Value]], setup: Setup) -> Cell:
    """Return the trainer's settings for speed on this kind of device, as far as they are among the values."""
    usual = usual_settings(setup.device).items()

    def fits(value: Value) -> bool:
        said = value.changes.items()
        return not said.isdisjoint(usual) and all(value.changes.get(name, new) == new for name, new in usual)

    return tuple(next((i for i, v in enumerate(values) if fits(v)), 0) for values in settings.values())


def recommendation(setup: Setup, *, space: Space, steps: Sequence[Cell]) -> Experiment:
    """What a search found, and before it each step on the way from the baseline, in one family.

    ``steps`` are cells, the baseline first, each with more changes than the one before; what was found is the last, and
    the candidate that time is taken for first. Where a step changes the loader alone, twenty steps of training show
    that it learns the same.
    """
    cells, name = space.cells, setup.family_name(space.baseline.global_batch_size)
    rows = [(space.changed(cell), cells[cell]) for cell in steps[1:]]
    trials: tuple[Trial, ...] = ()
    for (label, config), before in zip(rows, steps, strict=False):
        if config.differences(cells[before]).keys() <= {"loader", "loader_workers"}:
            pair = Family(name=name, baseline=cells[before], baseline_label=START, candidates=((label, config),))
            trials += identity_trials(pair)
    found = rows[-1][0] if rows else ""
    way, ordered = "; ".join(label for label, _ in rows), (*rows[-1:], *rows[:-1])
    family = Family(
        name=f"{name}, {way}" if found else name,
        baseline=space.baseline,
        baseline_label=START,
        candidates=ordered,
        together=True,
        primary=found,
    )
    return Experiment(name=RECOMMENDATION, families=(family,), trials=trials, space=space)


# --- what short sets say ----------------------------------------------------------------------------------------------

Array = npt.NDArray[np.float64]
Ratios = dict[str, float]
"""ln(baseline's time / another's) in one set, by run id; the twin's under TWIN. NaN: it failed, -inf: for good."""

MAIN, PAIR, OWN = 0.25, 0.12, 0.05
"""Standard deviations, in logarithm, of what a value is worth, a pair of values beyond that, and a cell beyond both."""
NOISE, NOISE_SETS = 0.015, 2
"""Prior standard deviation of a configuration's logarithm between sets, and the sets that the prior weighs."""
FEW_SETS = -1.2816
"""The 10 % point of the normal distribution: noise is taken to be as large as so few twins can leave open."""
TOLERANCE, RIVALS = 0.001, 10
"""Expected improvement, in logarithm, at which a search ends; no rival has less than so many parts of the largest."""
SIMPLER = 0.005  # of cells whose speed differs by less the one with the fewest changes wins
WINNER_SETS, TRIES, AT_ONCE = 2, 2, 5  # sets of a winner, failures after which a cell is given up, and cells in a set
COMPILE_SHARE = 0.5  # of the time that is left: no more is spent on a first compile


def observations(records: Iterable[RunRecord], baseline_id: str) -> list[Ratios]:
    """Return what each complete set with this baseline found, in the order of measuring."""
    sets: dict[str, list[RunRecord]] = {}
    for r in records:
        if r.baseline_id == baseline_id and r.role in ("baseline", TWIN, "candidate"):
            sets.setdefault(r.set_id, []).append(r)
    found = []
    for members in sets.values():
        base = next((r for r in members if (r.role, r.status) == ("baseline", "ok")), None)
        if base is not None and not crowded(members):
            logs = {}
            for r in (r for r in members if r.role != "baseline"):
                failed = -math.inf if r.status in LASTING else math.nan
                logs[TWIN if r.role == TWIN else r.run_id] = set_log_ratio(base, r) if r.status == "ok" else failed
            found.append(logs)
    return found


@dataclass(frozen=True, kw_only=True)
class Belief:
    """Mean and covariance (n, n) of ln(speed of a cell / the baseline's), for every cell, given the sets so far.

    ``sets`` counts the sets that measured each cell, the baseline's all. ``noise`` is the standard deviation of one
    configuration between sets, at the upper end of what the twins say. Cells that are ``lost`` fail here.
    """

    space: Space
    mean: Array
    covariance: Array
    sets: Mapping[Cell, int]
    lost: frozenset[Cell]
    noise: float

    @cached_property
    def index(self) -> dict[Cell, int]:
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
            return sorted(alone, key=lambda c: (seconds_of(c), c != self.space.guess, [not v for v in c]))[:AT_ONCE]
        lead = max([start, *open_], key=self.speed)
        gains = {c: self.expected_gain(c, lead) for c in open_ if c != lead}
        most = max(gains.values(), default=0.0)
        enough = LEAST_SETS if lead == start else WINNER_SETS  # another is measured again
        if most <= TOLERANCE and self.sets.get(lead, 0) >= enough:
            return []
        rivals = sorted((c for c in gains if gains[c] > most / RIVALS), key=lambda c: -gains[c] / seconds_of(c))
        return [*([lead] if lead != start else []), *rivals][:AT_ONCE]


def believe(space: Space, found: Sequence[Ratios]) -> Belief:
    """Return what sets say of all cells, with the baseline's own speed known."""
    cells, place = list(space.cells), {config.run_id: i for i, config in enumerate(space.cells.values())}
    codes = np.array(cells)
    shared = sum((codes[:, f, None] == codes[None, :, f]).astype(float) for f in range(codes.shape[1]))
    prior = MAIN**2 * shared + PAIR**2 * shared * (shared - 1) / 2 + OWN**2 * np.eye(len(cells))
    twins = [s[TWIN] for s in found if math.isfinite(s.get(TWIN, math.nan))]
    degrees, spread = NOISE_SETS + len(twins), 2 / (9 * (NOISE_SETS + len(twins)))
    low_chi_square = degrees * (1 - spread + FEW_SETS * math.sqrt(spread)) ** 3  # 10 % point; Wilson & Hilferty 1931
    variance = (NOISE_SETS * NOISE**2 + sum(t * t for t in twins) / 2) / low_chi_square
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
        sets=Counter([space.start] * len(found) + [cells[i] for _, i, _ in known]),
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

    Nothing that is worse, in all or by a value alone; another batch only where it learns as much from as many images.
    """
    verdicts = {cell: verdict(config) for cell, config in space.cells.items()}

    def may(cell: Cell, place: int, name: str) -> bool:
        alone = verdicts.get(tuple(value if i == place else 0 for i, value in enumerate(cell)), "")
        return alone in (NOT_WORSE, IDENTICAL) if name == BATCH else alone != WORSE

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
