"""Sets and turns for a time: Student's t against scipy, the plan against all others, the variances against sets."""

import numpy as np
import pytest
import recorded_noise
from recorded_noise import MACHINES, recorded
from scipy import special

from ddpm_lab.explain import stats
from ddpm_lab.measure import turn_plan


def test_students_t_agrees_with_scipy() -> None:
    for df in (3.0, 3.5, 5.0, 9.3, 30.0, 1000.0):
        assert turn_plan.student_t(df) == pytest.approx(float(special.stdtrit(df, 0.975)), rel=0.002)


@pytest.mark.parametrize(("seconds", "start", "turn"), [(20, 1, 0.3), (60, 6, 0.9), (300, 3, 0.9), (300, 20, 4)])
@pytest.mark.parametrize("df_prior", [0.0, 4.0])
def test_no_other_sets_and_turns_that_fit_give_a_narrower_interval(
    seconds: float, start: float, turn: float, df_prior: float
) -> None:
    sets, turns = turn_plan.plan_of_sets(seconds, start, turn, df_prior=df_prior)
    least = min(6, int(seconds / (start + 2 * turn)))
    assert sets >= least >= 4
    assert sets * (start + turns * turn) <= seconds + 1e-6
    best = turn_plan.half_width(sets, turns, 0.1, 0.03, df_prior)
    for n in range(least, 80):
        for t in range(2, 101):
            if n * (start + t * turn) <= seconds:
                assert turn_plan.half_width(n, t, 0.1, 0.03, df_prior) >= best - 1e-12


def test_few_sets_where_only_few_fit_and_none_that_cannot_answer() -> None:
    assert turn_plan.plan_of_sets(46, 10, 0.5) == (4, 3)
    assert turn_plan.plan_of_sets(43, 10, 0.5) == (3, 2)
    assert turn_plan.plan_of_sets(44, 10, 0.5) == (4, 2)


def test_dear_starts_and_quiet_sets_ask_for_more_turns() -> None:
    _, cheap = turn_plan.plan_of_sets(600, 1, 0.5)
    _, dear = turn_plan.plan_of_sets(600, 20, 0.5)
    _, quiet = turn_plan.plan_of_sets(600, 20, 0.5, between=0.01)
    assert cheap < dear < quiet
    assert turn_plan.plan_of_sets(1e4, 20, 0.5, between=0.0)[1] <= 100


def planted(rng: np.random.Generator, sets: int, turns: int, within: float, between: float) -> list[stats.Array]:
    """Baseline, twin and one candidate 30 % faster: log times [group, turn] of each set, with drift that all share."""
    shared = rng.normal(0, 0.2, (sets, 1, turns))
    own = rng.normal(0, between, (sets, 3, 1)) - np.array([0, 0, 0.3])[:, None]
    return list(shared + own + rng.normal(0, within, (sets, 3, turns)))


@pytest.mark.parametrize(("within", "between"), [(0.1, 0.03), (0.05, 0.05), (0.15, 0.01)])
def test_planted_variances_come_back(within: float, between: float) -> None:
    rng = np.random.default_rng(0)
    sets = [*planted(rng, 300, 12, within, between), *planted(rng, 300, 4, within, between)]
    twins, candidates = [s[0] - s[1] for s in sets], [[(s[0] + s[1]) / 2 - s[2] for s in sets]]
    for found in (turn_plan.variances(twins), turn_plan.variances(twins, candidates)):
        assert found == pytest.approx((within, between), rel=0.15, abs=0.008)


def test_without_sets_the_variances_are_assumed_and_few_sets_change_little() -> None:
    assert turn_plan.variances([]) == (turn_plan.WITHIN, turn_plan.BETWEEN)
    _, between = turn_plan.variances([np.zeros(6)], [[np.zeros(6), np.zeros(6)]])
    assert 0.9 * turn_plan.BETWEEN < between < turn_plan.BETWEEN


def on_record(machine: str) -> tuple[float, float]:
    sets = [row for row in recorded(machine) if row.quiet]
    compared = recorded_noise.comparisons(machine).values()
    return turn_plan.variances([row.twin for row in sets], [[turns for _, turns in found] for found in compared])


@pytest.mark.parametrize("machine", MACHINES)
def test_intervals_of_recorded_sets_are_as_wide_as_predicted(machine: str) -> None:
    """Within 20 %, of twins and of candidates, from the variances of all sets of the machine.

    Of windows of 0.2 to 0.5 s, that is. Those of the question peers last 1.4 s and more and scatter less.
    """
    within, between = on_record(machine)

    def expected(turns: int) -> float:
        return between**2 + within**2 / turns

    short = [row for row in recorded(machine) if row.quiet and not row.family.startswith("peers")]
    assert len(short) >= 75
    seen, said = [row.twin.mean() ** 2 for row in short], [2 * expected(len(row.twin)) for row in short]
    assert np.sqrt(np.mean(seen) / np.mean(said)) == pytest.approx(1, abs=0.2)
    for peers in (False, True):
        seen, said = [], []
        for (family, _), sets in recorded_noise.comparisons(machine).items():
            means = np.array([turns.mean() for _, turns in sets])
            if len(means) >= 4 and family.startswith("peers") == peers:
                seen += list((means - means.mean()) ** 2)
                said += [1.5 * (1 - 1 / len(means)) * expected(len(turns)) for _, turns in sets]
        assert len(seen) >= 50
        ratio = np.sqrt(np.mean(seen) / np.mean(said))
        assert 0.5 < ratio < 1 if peers else ratio == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("machine", MACHINES)
def test_sets_cut_to_fewer_turns_scatter_as_predicted(machine: str) -> None:
    long = [row.twin for row in recorded(machine) if row.quiet and len(row.twin) == 12]
    assert len(long) >= 50
    within, between = turn_plan.variances(long)
    for turns in (2, 3, 4, 6, 12):
        pieces = [values[i : i + turns].mean() for values in long for i in range(0, 12, turns)]
        said = np.sqrt(2 * (between**2 + within**2 / turns))
        assert np.sqrt(np.mean(np.square(pieces))) == pytest.approx(said, rel=0.15), turns


@pytest.mark.parametrize(("start", "least"), [(1.0, 1.3), (0.35, 1.45)])
@pytest.mark.parametrize("machine", MACHINES)
def test_planned_sets_are_narrower_for_equal_seconds(machine: str, start: float, least: float) -> None:
    """Against six sets of 12 turns with a start of 1 s a group, a single baseline and no spread of others."""
    within, between = on_record(machine)
    groups, turn = 3, 0.28
    seconds = 6 * groups * (1.0 + 12 * turn)
    sets, turns = turn_plan.plan_of_sets(
        seconds, groups * start, groups * turn, within=within, between=between, df_prior=4
    )
    one_baseline = np.sqrt(turn_plan.TWIN / turn_plan.CANDIDATE) * turn_plan.half_width(6, 12, within, between)
    assert one_baseline / turn_plan.half_width(sets, turns, within, between, 4) >= least
