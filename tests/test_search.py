"""The search: what sets say of all combinations, which come next, and how often the best is found."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import records as make
from setups import MACHINES, machine_setup, setup

from ddpm_lab.config import RunConfig
from ddpm_lab.plan import Cell, Space, Value
from ddpm_lab.questions import search
from ddpm_lab.questions.ask import ask
from ddpm_lab.questions.search import Ratios, believe, race
from ddpm_lab.record import TWIN
from ddpm_lab.training.setting import usual_settings

NOISE: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "noise.json").read_text())
CHANGES: dict[str, tuple[Any, ...]] = {
    "seed": (0, 1, 2, 3),
    "threads": (0, 1, 2),
    "image_size": (32, 64, 128),
    "global_batch_size": (32, 64, 128),
}
SETS, TURNS = 6, 0.57
"""A verdict's sets for each cell of a grid, and what a short set takes of a long one's time."""


def space(*counts: int) -> Space:
    """Settings with so many values each; what they stand for does not matter here."""
    settings = {
        name: tuple(Value(str(v), f"{name} {v}", {name: v}) for v in values[:count])
        for (name, values), count in zip(CHANGES.items(), counts, strict=False)
    }
    return Space(baseline=RunConfig(), settings=settings, guess=(1,) * len(counts))


class Machine:
    """A machine whose every cell has a planted speed, and sets whose noise was recorded on a real one."""

    def __init__(self, seed: int, where: Space, kind: str = "quiet") -> None:
        self.rng, self.runs = np.random.default_rng(seed), {cell: c.run_id for cell, c in where.cells.items()}
        self.cells, self.places = list(self.runs), 0
        codes = np.array(self.cells)
        speeds = self.rng.normal(0, 0.03, len(codes))
        for f in range(codes.shape[1]):
            speeds += self.rng.normal(0, 0.2, codes[:, f].max() + 1)[codes[:, f]]
        for f, g in combinations(range(codes.shape[1]), 2):
            table = self.rng.normal(0, 0.1, (codes[:, f].max() + 1, codes[:, g].max() + 1))
            speeds += table[codes[:, f], codes[:, g]]
        self.speeds = dict(zip(self.cells, speeds - speeds[0], strict=True))
        # A twin's ratio is the noise of two; half the turns have twice its variance.
        self.pool = np.log(np.concatenate([np.array(run) for run in NOISE[kind]["null_ratios"]]))

    def measure(self, cells: Sequence[Cell]) -> Ratios:
        self.places += len(cells) + 2
        base, twin, *others = self.rng.choice(self.pool, len(cells) + 2) * self.rng.choice([-1, 1], len(cells) + 2)
        found = {self.runs[c]: self.speeds[c] + noise - base for c, noise in zip(cells, others, strict=True)}
        return {TWIN: twin - base, **found}

    @property
    def share(self) -> float:
        """The search's time as a share of a grid's: five cells, baseline and twin in each of its sets."""
        return self.places * TURNS / ((len(self.cells) - 1) / 5 * 7 * SETS)


def run(machine: Machine, where: Space, measure: Any = None, **changes: Any) -> search.Belief:
    most = search.most_sets(len(machine.cells))
    settings: dict[str, Any] = {"seconds_of": lambda _: 1.0, "seconds_left": lambda: math.inf, "most_sets": most}
    settings |= changes
    return race(where, settings.pop("found", []), machine.cells, measure or machine.measure, **settings)


@pytest.mark.parametrize(
    ("kind", "counts", "count"), [("quiet", (2, 2, 3, 2), 80), ("busy", (2, 2, 3, 2), 80), ("quiet", (4, 3, 2, 3), 12)]
)
def test_the_best_is_found_in_a_fraction_of_the_grids_time(kind: str, counts: tuple[int, ...], count: int) -> None:
    """Machines with planted effects and interactions: within 3 % of the best in nine of ten, in a third at most."""
    where, lost, shares = space(*counts), [], []
    for seed in range(count):
        machine = Machine(seed, where, kind)
        winner = run(machine, where).winner(machine.cells)
        lost.append(max(machine.speeds.values()) - machine.speeds[winner])
        shares.append(machine.share)
    assert np.mean(np.array(lost) <= math.log(1.03)) >= 0.9
    assert max(shares) <= 1 / 3
    assert np.mean(shares) <= 1 / 5


def test_each_setting_is_tried_alone_first_and_what_compiles_only_where_there_is_time() -> None:
    where = space(2, 2, 2)
    belief, cells, machine = believe(where, []), list(where.cells), Machine(1, where)

    def seconds_of(cell: Cell) -> float:
        return 61.0 if cell[2] else 1.0

    assert belief.next_cells(cells, seconds_of, 60) == [(1, 0, 0), (0, 1, 0)]
    assert belief.next_cells(cells, seconds_of, 600) == [(1, 0, 0), (0, 1, 0), (1, 1, 1), (0, 0, 1)]
    left = iter([60.0] * 5 + [0.0] * 50)
    found = run(machine, where, seconds_of=seconds_of, seconds_left=lambda: next(left))
    assert not any(cell[2] for cell in found.sets)
    assert run(machine, where, seconds_left=lambda: 0.0).sets, "one set is always measured"


def test_what_fails_is_tried_twice_at_most_and_never_wins() -> None:
    where = space(2, 3)
    machine = Machine(2, where)
    machine.speeds |= {(1, 0): 1.0, (0, 1): 0.5, (1, 1): 2.0}
    tries: dict[Cell, int] = {}

    def measure(cells: list[Cell]) -> Ratios:
        for cell in cells:
            tries[cell] = tries.get(cell, 0) + 1
        broken = {machine.runs[c]: math.nan if c == (1, 1) else -math.inf for c in cells if c in ((1, 0), (1, 1))}
        return {**machine.measure(cells), **broken}

    belief = run(machine, where, measure, most_sets=40)
    assert belief.lost == {(1, 0), (1, 1)}
    assert (tries[1, 0], tries[1, 1]) == (1, 2), "a failure that lasts is not tried again, another once"
    assert belief.winner(machine.cells) == (0, 1)


def test_the_belief_is_that_of_a_linear_model_with_normal_weights() -> None:
    """The same from the other side: weights of values, pairs and cells, found by ridge regression."""
    where = space(2, 3, 2)
    machine = Machine(5, where)
    cells = machine.cells
    found = [machine.measure(cells[1:4]), machine.measure(cells[3:7])]
    codes, columns, scales = np.array(cells), [], []
    pairs = [(list(pair), search.PAIR) for pair in combinations(range(3), 2)]
    for chosen, scale in [([f], search.MAIN) for f in range(3)] + pairs:
        for values in np.unique(codes[:, chosen], axis=0):
            columns.append((codes[:, chosen] == values).all(axis=1))
            scales.append(scale)
    features = np.hstack([np.array(columns).T.astype(float) * np.array(scales), search.OWN * np.eye(len(cells))])
    belief = believe(where, found)
    seen = [(n, cells.index(c), s[machine.runs[c]]) for n, s in enumerate(found) for c in cells if machine.runs[c] in s]
    design = np.vstack([features[0] * 1e6, *(features[i] for _, i, _ in seen)])
    targets = np.array([0.0, *(y for _, _, y in seen)])
    # Each set has an unknown of its own, the noise of its baseline.
    sets = np.zeros((len(targets), len(found)))
    for row, (n, _, _) in enumerate(seen, 1):
        sets[row, n] = belief.noise
    weight = np.diag([1.0, *[belief.noise**-2] * len(seen)])
    both = np.hstack([design, sets])
    weights = np.linalg.solve(both.T @ weight @ both + np.eye(both.shape[1]), both.T @ weight @ targets)
    assert belief.mean == pytest.approx(features @ weights[: features.shape[1]], abs=2e-4)


def test_gains_are_those_of_draws() -> None:
    where = space(2, 3)
    machine = Machine(8, where)
    belief = believe(where, [machine.measure(machine.cells[1:3])])
    draws = np.random.default_rng(0).multivariate_normal(belief.mean, belief.covariance, 100_000, method="eigh")
    one, other, apart = machine.cells[4], machine.cells[1], draws[:, 4] - draws[:, 1]
    assert belief.gain(one, other) == pytest.approx((apart.mean(), apart.std()), abs=0.01, rel=0.02)
    assert belief.expected_gain(one, other) == pytest.approx(np.maximum(apart, 0).mean(), rel=0.03)


def test_twins_that_scatter_make_it_doubt_and_of_equals_the_simplest_wins() -> None:
    where = space(2, 2)
    runs = {cell: config.run_id for cell, config in where.cells.items()}
    calm, wild = (believe(where, [{TWIN: twin, runs[1, 0]: 0.1}] * 4) for twin in (0.001, 0.1))
    assert wild.noise > 3 * calm.noise
    assert wild.gain((1, 0), (0, 0))[1] > 1.5 * calm.gain((1, 0), (0, 0))[1]
    same = {TWIN: 0.0, runs[1, 0]: 0.2, runs[0, 1]: 0.0, runs[1, 1]: 0.203}
    assert believe(where, [same] * 6).winner(list(runs)) == (1, 0)
    assert believe(where, [{**same, runs[1, 1]: 0.25}] * 6).winner(list(runs)) == (1, 1)


def test_a_path_has_one_change_more_in_each_step_the_largest_gain_first_and_the_batch_last() -> None:
    batch = (Value("32", "", {}), Value("64", "", {"global_batch_size": 64}))
    where = replace(space(2, 2), settings={**space(2, 2).settings, "batch": batch})
    runs = {cell: config.run_id for cell, config in where.cells.items()}
    gains = {cell: 0.05 * cell[0] + 0.2 * cell[1] + 0.4 * cell[2] for cell in runs}
    belief = believe(where, [{TWIN: 0.0, **{runs[c]: gain for c, gain in gains.items() if any(c)}}] * 3)
    assert search.path(belief, (1, 1, 1)) == [(0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 1, 1)]
    assert search.path(belief, (0, 0, 0)) == [(0, 0, 0)]
    alone = replace(belief, lost=frozenset({(1, 0, 0), (0, 1, 0)}))
    assert search.path(alone, (1, 1, 0)) == [(0, 0, 0), (1, 1, 0)], "what only works together comes together"


def test_quality_says_what_may_win() -> None:
    batches = tuple(Value(str(n), f"batch {n}", {"global_batch_size": n}) for n in (32, 64, 128))
    precision = (Value("fp32", "fp32", {}), Value("bf16", "bf16", {"precision": "bf16"}))
    where = Space(baseline=RunConfig(), settings={"precision": precision, "batch": batches})
    known = {
        RunConfig(precision="bf16"): "worse",
        RunConfig(global_batch_size=64): "not worse",
        RunConfig(global_batch_size=128): "not enough data",
    }
    assert search.admissible(where, lambda config: known.get(config, "not measured")) == [(0, 0), (0, 1)]
    assert search.admissible(where, lambda _: "") == [(0, 0), (1, 0)]


def test_observations_are_those_of_complete_sets_in_order() -> None:
    base, bf16, two = RunConfig(), RunConfig(precision="bf16"), RunConfig(world_size=2)
    noiseless: dict[str, Any] = {"experiment": "search", "set_noise": 0, "turn_noise": 0, "count": 2}
    records = make.sets({"bf16": (bf16, 1.5)}, failures={"2 ranks": (two, "diverged", "nan")}, **noiseless)
    found = search.observations(records, base.run_id)
    assert found == [{TWIN: pytest.approx(0), bf16.run_id: pytest.approx(math.log(1.5)), two.run_id: -math.inf}] * 2
    for passing in ("crashed", "oom"):  # another process may have had the memory
        other = [replace(r, status=passing) if r.config == two else r for r in records]
        assert math.isnan(search.observations(other, base.run_id)[0][two.run_id])
    lost = [replace(r, status="crashed") if r.role == "baseline" else r for r in records]
    assert search.observations(lost, base.run_id) == search.observations(records, bf16.run_id) == []


# --- what there is to choose from -------------------------------------------------------------------------------------


def space_of(machine: str = "2 cores", preset: str = "quick", **grid: Any) -> Space:
    found = search.search(machine_setup(machine, preset), **grid).space
    assert found is not None
    return found


@pytest.mark.parametrize("machine", MACHINES)
def test_every_combination_runs_here_and_the_plain_step_comes_first(machine: str) -> None:
    gpus, cores = MACHINES[machine]
    here, space = machine_setup(machine, "full"), space_of(machine, "full")
    cells, (family,) = space.cells, search.search(here).families
    plain = here.config(global_batch_size=family.baseline.global_batch_size)
    assert cells[space.start] == family.baseline == plain
    assert [config for _, config in family.candidates] == list(cells.values())[1:]
    assert len({label for label, _ in family.candidates}) == len(family.candidates)
    for config in cells.values():
        assert config.world_size <= (gpus or cores)
        assert config.loader_workers <= cores
        assert gpus or config.precision in ("fp32", "bf16")
    # Every value of every setting is in some combination: what is not is left out and named.
    for place, (name, values) in enumerate(space.settings.items()):
        assert name == "ranks" or {cell[place] for cell in cells} == set(range(len(values)))
    assert gpus or {"tf32", "fp16"} <= {label for label, _ in space.left_out}
    usual = usual_settings(here.device)
    assert {name: getattr(cells[space.guess], name) for name in usual} == usual


def test_what_was_found_is_measured_with_every_step_to_it_in_the_same_sets() -> None:
    space = space_of()
    cells = space.cells

    def cell(**places: int) -> tuple[int, ...]:
        return tuple(places.get(name, 0) for name in space.settings)

    steps = [space.start, cell(precision=1), cell(precision=1, ranks=1), cell(precision=1, ranks=1, loader=2)]
    experiment = search.recommendation(setup(), space=space, steps=steps)
    (family,) = experiment.families
    assert (family.together, family.baseline) == (True, space.baseline)
    assert [config for _, config in family.candidates] == [cells[steps[3]], cells[steps[1]], cells[steps[2]]]
    trained = [replace(t.config, purpose="timing", options=()) for t in experiment.trials]
    assert trained == [cells[steps[2]], cells[steps[3]]], "a loader alone must learn the same, which seconds show"
    for other in (steps[:2], [space.start, cell(ranks=1), steps[3]]):  # sets that compare others are others
        assert search.recommendation(setup(), space=space, steps=other).families[0].name != family.name
    alone = search.recommendation(setup(), space=space, steps=[space.start])
    assert (alone.families[0].candidates, alone.trials) == ((), ())
    found = ask("recommendation", setup(), space=space, steps=steps[:2], seeds=2, images=80).trials
    assert [(t.label, t.config.seed) for t in found] == [(label, i) for i in range(2) for label in ("baseline", "bf16")]
