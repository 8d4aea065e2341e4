"""First losses of two sides: identical, different, or not to be compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.frames import Study
from ddpm_lab.questions.answers import answer
from ddpm_lab.questions.comparison import answer_text, first_losses

ONE = [1.25, 1.1, 1.05]


def study(base: Sequence[float], other: Sequence[float], twin: Sequence[float] | None = None, ranks: int = 1) -> Study:
    baseline = RunConfig(world_size=ranks)
    candidate = dataclasses.replace(baseline, seed=1)
    said = {"baseline": base, "twin": base if twin is None else twin, "candidate": other}
    made = make.sets({"working tree": (candidate, 1.0)}, baseline=baseline, baseline_label="main", count=2)
    witnessed = [
        dataclasses.replace(r, witness={"ranks": [{"first_losses": list(said[r.role])} for _ in range(ranks)]})
        for r in made
    ]
    return make.study(witnessed)


@pytest.mark.parametrize(
    ("base", "other", "twin", "verdict", "words"),
    [
        (ONE, ONE, ONE, "identical", "identical: the first 3 losses agree to the last bit"),
        (ONE, [*ONE, 0.9], ONE, "identical", "the first 3 losses"),
        (ONE, [1.25, 1.1, 1.05 + 2**-50], ONE, "differs", "by up to 8e-16 of the loss, where main repeats its own"),
        (ONE, [1.25, 1.0, 1.05], ONE, "differs", "differs: the first 3 losses by up to 9.1 %"),
        (ONE, [1.25, 1.0, 1.05], [1.25, 1.2, 1.05], "not comparable", "from one run to the next by 8.3 %"),
        ([0.0] * 3, ONE, [0.0] * 3, "not measured", "not measured: main gives no loss"),
        ([0.0] * 3, [0.0] * 3, [0.0] * 3, "not measured", "main and working tree give no loss"),
        ([], [], [], "not measured", "give no loss"),
    ],
)
def test_what_is_said_of_two_sides(
    base: list[float], other: list[float], twin: list[float], verdict: str, words: str
) -> None:
    found = first_losses(study(base, other, twin))
    assert found.verdict == verdict
    assert words in found.sentence
    assert found.sentence.startswith(verdict)


def test_every_rank_and_every_set_counts() -> None:
    one = study(ONE, ONE, ranks=2)
    last = next(i for i, r in reversed(list(enumerate(one.records))) if r.role == "candidate")
    witness = {"ranks": [{"first_losses": ONE}, {"first_losses": [1.25, 1.1, 1.06]}]}
    changed = dataclasses.replace(one.records[last], witness=witness)
    records = (*one.records[:last], changed, *one.records[last + 1 :])
    assert first_losses(one).verdict == "identical"
    assert first_losses(dataclasses.replace(one, records=records)).verdict == "differs"


def test_unfinished_sets_say_nothing() -> None:
    alone = [r for r in study(ONE, ONE).records if r.role == "baseline"]
    assert first_losses(make.study(alone)).sentence == "not measured: no set has both sides"


@pytest.mark.parametrize("reason", ["rank 0: KeyError: 'mine' (bad.py, line 118)", "rank 0 was killed by SIGKILL"])
def test_the_place_of_a_failure_is_told_once(reason: str) -> None:
    place = " (bad.py, line 118)"
    failure = {"status": "crashed", "reason": reason, "windows": ()}
    witness = {"traceback": 'File "/home/me/bad.py", line 118, in gen_raises'}
    records = [
        dataclasses.replace(r, witness=witness, **failure)  # type: ignore[arg-type]
        if r.role == "candidate"
        else dataclasses.replace(r, witness={})
        for r in study(ONE, ONE).records
    ]
    failed = make.study(records)
    told = answer_text(failed, answer(failed).finding).splitlines()[-1]
    assert told == f"  working tree: crashed: {reason.removesuffix(place)}{place}"
