"""May a change pass? Planted ratios against thresholds, how often the rule errs, and what is said of it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import decisions, stats
from ddpm_lab.explain.comparisons import comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.questions import gate
from ddpm_lab.questions.answers import answer
from ddpm_lab.questions.gate import Outcome, outcome, summary

MAIN = RunConfig(workload="mine:step", global_batch_size=1, revision="1234567890ab")
TREE = dataclasses.replace(MAIN, revision="")


def study(ratio: float, **values: float) -> Study:
    made = make.sets(
        {"working tree": (TREE, ratio)},
        baseline=MAIN,
        baseline_label="main",
        experiment="compare",
        family="working tree against main",
        **{"count": 8, "set_noise": 0.003, "turn_noise": 0.002, **values},  # type: ignore[arg-type]
    )
    return make.study(made)


@pytest.mark.parametrize(
    ("ratio", "threshold", "status", "words"),
    [
        (0.80, 0.03, gate.SLOWER, "failed: working tree is slower than main by 20 %, and at least by"),
        (0.80, 0.03, gate.SLOWER, "where 3 % is allowed"),
        (0.80, 0.0, gate.SLOWER, "where none is allowed"),
        (0.97, 0.0, gate.SLOWER, "failed"),
        (0.97, 0.10, gate.PASSED, "passed: working tree is slower than main by at most 3"),
        (1.00, 0.03, gate.PASSED, "passed: "),
        (1.20, 0.03, gate.PASSED, "passed: working tree is not slower than main"),
        (0.97, 0.03, decisions.INCONCLUSIVE, "inconclusive: working tree may be slower than main by up to"),
        (1.00, 0.0, decisions.INCONCLUSIVE, "where none is allowed: measure longer, or on a quieter machine"),
    ],
)
def test_a_planted_ratio_is_judged_by_its_interval(ratio: float, threshold: float, status: str, words: str) -> None:
    judged = outcome(answer(study(ratio)), threshold)
    assert judged.status == status
    assert words in judged.sentence
    assert not judged.sentence.endswith(".")


def test_few_sets_what_is_within_the_twin_and_a_side_that_failed_let_nothing_pass() -> None:
    few = outcome(answer(study(0.5, count=3)), 0.03)
    assert (few.status, few.exit_code(), few.exit_code(strict=True)) == (decisions.INCONCLUSIVE, 0, 4)
    assert outcome(answer(study(0.5)), 0.03).status == gate.SLOWER
    assert outcome(answer(study(0.5, twin_ratio=0.2)), 0.03).status != gate.SLOWER
    config = dataclasses.replace(TREE, seed=1)
    failed = make.sets({}, baseline=MAIN, failures={"working tree": (config, "crashed", "rank 0: planted")})
    judged = outcome(answer(make.study(failed)), 0.03)
    assert (judged.status, judged.exit_code()) == (gate.NO_RESULT, 1)
    assert "working tree" in judged.sentence


def test_exit_codes_tell_the_outcomes_apart() -> None:
    codes = {status: Outcome(status=status, sentence="").exit_code() for status in gate.EXIT_CODES}
    assert codes == {"passed": 0, "identical code": 0, "failed": 1, "no result": 1, decisions.INCONCLUSIVE: 0}
    strict = {s for s, code in codes.items() if Outcome(status=s, sentence="").exit_code(strict=True) != code}
    assert strict == {decisions.INCONCLUSIVE}


def _fails(true_ratio: float, *, spread: float, threshold: float, resolution: float, tries: int) -> float:
    """How often a change fails that is measured until the width suffices, by the formula written down once more."""
    rng = np.random.default_rng(int(1e6 * true_ratio + 1e4 * spread))
    failed = 0
    for _ in range(tries):
        logs: list[float] = []
        while not logs or decisions.sets_to_come(logs, resolution):
            logs.append(math.log(true_ratio) + rng.normal(0, spread))
        found = stats.estimate(logs)
        failed += found.p < decisions.FIRST_LOOK and found.high < 1 - threshold
    return failed / tries


@pytest.mark.parametrize("spread", [0.005, 0.015])
def test_the_rule_errs_as_seldom_as_it_says(spread: float) -> None:
    """The threshold itself fails in some 3 %, half of it never, and threshold and resolution together in 97 %."""
    common = {"spread": spread, "threshold": 0.03, "resolution": 0.03, "tries": 400}
    assert _fails(0.97, **common) <= 0.06  # type: ignore[arg-type]
    assert _fails(0.985, **common) <= 0.005  # type: ignore[arg-type]
    assert _fails(0.97 * 0.97, **common) >= 0.94  # type: ignore[arg-type]


def test_the_simulated_rule_is_the_one_that_judges() -> None:
    for seed in range(20):
        one = study(0.955, seed=seed, set_noise=0.01)
        twin, row = (r for r in comparisons(one) if r.role in ("twin", "candidate"))
        called = row.p < decisions.FIRST_LOOK and decisions.beyond_twin(row.ratio, twin.ratio)
        assert (outcome(answer(one), 0.03).status == gate.SLOWER) == (called and bool(row.ratio.high < 0.97))


def test_the_summary_is_a_table_of_what_was_decided() -> None:
    one = study(0.8)
    text = summary(answer(one), outcome(answer(one), 0.03), 0.03)
    head, names, rule, values = (line for line in text.splitlines()[:5] if line)
    assert head.startswith("### failed: working tree is slower than main by 20 %")
    assert names.count("|") == rule.count("|") == values.count("|") == 6
    for word in ("failed", "0.80", "8 sets", "3 %", "not measured"):
        assert word in values
    assert one.hardware in text
    assert text.endswith("\n")
