"""What compiling costs: the break-even's interval holds what is uncertain, and the counters are the witness's."""

import dataclasses
import math
from collections.abc import Sequence

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.selection import Study
from ddpm_lab.questions.torch_compile import break_even, pays_off

COMPILED = RunConfig(compile="whole")


def study(cold: Sequence[float], ratio: float = 1.25) -> tuple[Study, Comparison]:
    """A step of 100 ms that compiling makes faster, and so many cold compiles; with the compiled row."""
    common = {"experiment": "torch_compile", "baseline_label": "eager", "step_seconds": 0.1}
    records = make.sets({"compiled": (COMPILED, ratio)}, **common)  # type: ignore[arg-type]
    made = make.cold(COMPILED, cold, experiment="torch_compile", baseline_id=RunConfig().run_id, label="compiled")
    found = make.study(records + made)
    return found, next(r for r in comparisons(found) if r.role == "candidate")


def test_several_compiles_widen_the_interval_and_one_tells_no_spread() -> None:
    of, row = study([30.0])
    (cost, one), (widely, three) = break_even(of, row), break_even(study([27.0, 30.0, 100 / 3])[0], row)
    step = row.step_seconds * row.ratio.value

    def steps(ratio: float) -> float:
        return 30 / (step * (1 - 1 / ratio))

    assert (cost.value, one.value, three.value) == pytest.approx((30, *[steps(row.ratio.value)] * 2))
    assert math.isnan(cost.low)
    assert one.ends == pytest.approx((steps(row.ratio.high), steps(row.ratio.low)))
    # ln(10 / 9) between neighbours, 4.30 standard errors of three.
    wide = math.exp(4.303 * math.log(10 / 9) / math.sqrt(3))
    assert widely.high / widely.value == pytest.approx(wide, rel=1e-3)
    assert three.low < one.low < one.value < one.high < three.high


def test_without_a_bound_it_pays_off_after_so_many_or_more() -> None:
    found, row = study([30.0])
    row = dataclasses.replace(row, ratio=dataclasses.replace(row.ratio, low=0.999))
    _, steps = break_even(found, row)
    assert steps.high == math.inf
    assert pays_off(steps, row).endswith(" or more)")
    slower = study([30.0], 0.9)
    assert (break_even(*slower)[1].value, pays_off(steps, slower[1])) == (math.inf, "never, at this speed")
    cost, steps = break_even(*study([]))
    assert all(map(math.isnan, (cost.value, steps.value, *steps.ends)))
