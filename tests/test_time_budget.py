"""What a profile says, every operator counted once, and what compiling costs."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.selection import Study
from ddpm_lab.questions import bottleneck
from ddpm_lab.questions import profile as tb
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.profile import Budget
from ddpm_lab.questions.torch_compile import break_even, pays_off
from ddpm_lab.record import RunRecord

SLOW = {**make.PHASES, "communication": 2.0}


def of(record: RunRecord) -> Budget:
    found = tb.budget(record)
    assert found is not None
    return found


def stored(record: RunRecord) -> Any:
    """The values of its budget."""
    return (record.profile or {})["budget"]


@pytest.mark.parametrize(("residual", "explained"), [(2.0, True), (6.0, True), (8.0, False), (-8.0, False)])
def test_shares_and_the_rest_sum_to_one_and_a_large_rest_explains_nothing(residual: float, explained: bool) -> None:
    record = make.time_budget(residual=residual)
    line = of(record).running
    phases = sum(line.share(name) for name in line.phases)
    assert phases == pytest.approx(sum(line.share(name) for name in (tb.IO, tb.TRANSFER, tb.COMPUTE, tb.OTHER)))
    assert phases + line.residual_share == pytest.approx(1)
    assert line.share(tb.COMPUTE) == pytest.approx((23.4 + 34.0 + 3.4 + 0.1) / (65.1 + residual))
    assert of(record).explained == explained
    assert (answer(make.study([record])).finding.verdict == "not explained") == (not explained)


def test_the_trace_is_compared_share_by_share() -> None:
    record = make.time_budget()
    assert of(record).trace_difference == pytest.approx(0, abs=1e-9)
    assert of(record).profiler_slowdown == pytest.approx(1.5, rel=0.01)
    rank = stored(record)["ranks"][0]
    rank["profiled"]["phases"] = {"data": 0.05, "forward": 0.05}
    assert of(record).trace_difference == pytest.approx(0.5 - 3.9 / (3.9 + 23.4))
    del rank["profiled"]
    assert math.isnan(of(record).trace_difference)
    record = make.time_budget(SLOW)
    stored(record)["ranks"][0]["profiled"]["phases"]["backward"] += 1.5 * 2.0 / 1e3
    assert of(record).trace_difference == pytest.approx(0, abs=1e-9), "the trace has the wait in backward"


@pytest.mark.parametrize(
    ("ahead", "busy", "waits"), [(0.001, 58.0, True), (0.020, 58.0, False), (0.001, 95.0, False), (0.001, None, False)]
)
def test_a_gpu_that_waits_for_its_host_is_told(ahead: float, busy: float | None, waits: bool) -> None:
    """A step that waits for its own loss is not ahead of its GPU either: that one is busy."""
    record = make.time_budget(host_phases=make.PHASES, host_ahead_seconds=ahead)
    stored(record)["state"] = {"gpu_utilisation_percent": busy}
    assert of(record).waits_for_host == waits
    said = answer(make.study([record], "profile")).finding
    assert said.headline.endswith("the GPU waits for the host") == waits
    assert ("busy 58 % of the time" in said.claim) == waits
    about = bottleneck.subject(make.study([record], "bottleneck"))
    assert about is not None
    assert ("limited by the host" in bottleneck.verdict(about)) == waits
    starved = make.time_budget({**make.PHASES, "data": 100.0}, host_phases=make.PHASES, host_ahead_seconds=ahead)
    stored(starved)["state"] = {"gpu_utilisation_percent": busy}
    assert not of(starved).waits_for_host, "it waits for data, and so does the host"


# --- operators ---


def test_shares_count_each_second_once() -> None:
    record = make.profile(RunConfig(purpose="profile"))
    assert record.profile is not None
    total = sum(s for name, (s, _) in make.OPERATORS.items() if name != "ProfilerStep*")
    assert sum(op.share for op in tb.operators(record)) == pytest.approx(1)
    first = tb.operators(record)[0]
    assert first.name == "aten::convolution_backward"
    assert first.share == pytest.approx(7.0 / total)
    record.profile["operators"][3]["self_device_seconds"] = 2.0
    assert [(op.name, op.seconds) for op in tb.operators(record)] == [("aten::native_group_norm_backward", 2.0 / 4)]


# --- what compiling costs ---

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


def test_what_is_slower_or_was_not_compiled_cold_never_pays_off() -> None:
    slower = study([30.0], 0.9)
    steps = break_even(*slower)[1]
    assert (steps.value, pays_off(steps, slower[1])) == (math.inf, "never, at this speed")
    assert all(math.isnan(n.value) for n in break_even(*study([])))
