"""What compiling costs: the break-even's interval holds what is uncertain, and the counters are the witness's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.selection import Study
from ddpm_lab.questions import torch_compile as compiling

COMPILED = RunConfig(compile="whole")


def study(cold: Sequence[float], ratio: float = 1.25, **values: Any) -> tuple[Study, Comparison]:
    """A step of 100 ms that compiling makes faster, and so many cold compiles; with the compiled row."""
    records = make.sets(
        {"compiled": (COMPILED, ratio)}, baseline_label="eager", experiment="torch_compile", step_seconds=0.1, **values
    )
    common = {"experiment": "torch_compile", "baseline_id": RunConfig().run_id, "label": "compiled"}
    found = make.study(records + make.cold(COMPILED, cold, **common))
    rows = comparisons(found)
    return found, next(r for r in rows if r.role == "candidate")


def test_several_compiles_widen_the_interval_and_one_tells_no_spread() -> None:
    alike, row = study([30.0])
    one, three = (compiling.break_even(of, row) for of in (alike, study([27.0, 30.0, 100 / 3])[0]))
    step = row.step_seconds * row.ratio.value
    assert (one.cold_seconds, one.steps) == pytest.approx((30, 30 / (step * (1 - 1 / row.ratio.value))))
    assert three.steps == pytest.approx(one.steps)
    assert math.isnan(one.cost.low)
    assert one.steps_low == pytest.approx(30 / (step * (1 - 1 / row.ratio.high)))
    assert one.steps_high == pytest.approx(30 / (step * (1 - 1 / row.ratio.low)))
    # ln(10 / 9) between neighbours, 4.30 standard errors of three.
    wide = math.exp(4.303 * math.log(10 / 9) / math.sqrt(3))
    assert three.cost.high / three.cold_seconds == pytest.approx(wide, rel=1e-3)
    assert three.steps_low < one.steps_low < one.steps < one.steps_high < three.steps_high


def test_without_a_bound_it_pays_off_after_so_many_or_more() -> None:
    found, row = study([30.0])
    row = dataclasses.replace(row, ratio=dataclasses.replace(row.ratio, low=0.999))
    cost = compiling.break_even(found, row)
    assert cost.steps_high == math.inf
    assert compiling.pays_off(cost, row).endswith(" or more)")
    found, row = study([30.0], 0.9)
    assert compiling.break_even(found, row).steps == math.inf
    assert compiling.pays_off(compiling.break_even(found, row), row) == "never, at this speed"
    nothing = compiling.break_even(*study([]))
    assert math.isnan(nothing.cold_seconds)
    assert math.isnan(nothing.steps_low)


def test_the_counters_are_those_of_the_witness() -> None:
    found, row = study([30.0])
    assert compiling.counters(found, row.run_id) == ""
    seen = {"ranks": [{"compiled_frames": 2, "graphs": 3, "graph_breaks": 1, "recompiles": 0}]}
    records = (dataclasses.replace(r, witness=seen) if r.run_id == COMPILED.run_id else r for r in found.records)
    found = dataclasses.replace(found, records=tuple(records))
    assert compiling.counters(found, row.run_id) == "2 compiled frames, 3 graphs, 1 graph break and 0 recompiles"
