"""What a profile says: whose budget it is, what it sums to, when it explains nothing; every operator counted once."""

import math
from typing import Any

import pytest
import records as make
from cells import column

from ddpm_lab.config import RunConfig
from ddpm_lab.questions import bottleneck
from ddpm_lab.questions import profile as tb
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.profile import Budget
from ddpm_lab.record import RunRecord

SLOW = {**make.PHASES, "communication": 2.0}
FAST = {**make.PHASES, "forward": 16.0, "backward": 28.0, "communication": 15.4}


def taken(*ranks: dict[str, float], **values: Any) -> Budget:
    return of(make.time_budget(*ranks, **values))


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


def test_the_slowest_rank_answers_and_a_straggler_is_named() -> None:
    found = taken(FAST, SLOW)
    assert (found.rank, list(found.others)) == (1, [0])
    assert "Rank 1 computes 28 %" in found.straggler
    even = taken(SLOW, {**SLOW, "backward": 36.0})
    assert (even.rank, even.straggler) == (1, "")
    assert taken(SLOW, {**SLOW, "communication": 30.0}).straggler == "", "a rank that waits longer computes no longer"
    shown = answer(make.study([make.time_budget(FAST, SLOW, residual=1.0)]))
    times = [float(text.removesuffix(" ms")) for text in column(shown.table(), "Time per step, rank 1 (slowest)")]
    assert sum(times[:-1]) == pytest.approx(times[-1], rel=0.01)
    assert "Rank 0" in shown.table()[0]
    (_, operators), *_ = shown.tables()
    assert "aten::convolution_backward" in column(operators, "Operator")


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


def test_names_that_mean_the_same_are_one_and_unknown_ones_are_shown() -> None:
    line = taken({"all-reduce": 2.0, "communication": 1.0, "augmentation": 7.0}).running
    assert line.phases == pytest.approx({"communication": 0.003, "augmentation": 0.007})
    assert (line.share(tb.OTHER), line.share(tb.TRANSFER)) == pytest.approx((0.7, 0.3))


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


def test_a_busy_machine_is_told() -> None:
    record = make.time_budget()
    for others, told in ((None, "unknown"), (0.1, ""), (0.9, "0.9 of 2 cores")):
        stored(record)["others_cores"] = others
        assert told in of(record).disturbance
        assert bool(of(record).disturbance) == bool(told)


# --- operators ---


def test_class_of_an_operator() -> None:
    for name, expected in (
        ("void cudnn::winograd_nonfused::winogradForwardData4x4", "convolution"),
        ("aten::_scaled_dot_product_flash_attention", "matrix product, attention"),
        ("aten::add_", "element-wise, sums"),
        ("aten::native_group_norm_backward", "normalisation"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("(other operators)", "other"),
    ):
        assert tb.operator_class(name) == expected


def test_shares_count_each_second_once_and_answer_where_there_is_no_budget() -> None:
    record = make.profile(RunConfig(purpose="profile"))
    assert record.profile is not None
    classes = tb.operator_classes(record)
    total = sum(s for name, (s, _) in make.OPERATORS.items() if name != "ProfilerStep*")
    assert sum(op.share for op in tb.operators(record)) == pytest.approx(1)
    assert sum(kind.share for kind in classes) == pytest.approx(1)
    (convolution,) = (kind.share for kind in classes if kind.name == "convolution")
    assert convolution == pytest.approx((5.0 + 7.0) / total)
    assert classes[-1].name == "other"
    shown = answer(make.study([record]))
    assert "62 %" in shown.finding.headline
    assert "Operator" in shown.table()[0]
    record.profile["operators"][3]["self_device_seconds"] = 2.0
    assert [(op.name, op.seconds) for op in tb.operators(record)] == [("aten::native_group_norm_backward", 2.0)]


def test_a_profile_that_saw_nothing_of_the_gpu_says_so() -> None:
    for device, seconds, told in (("cuda", 0.0, True), ("cuda", 2.0, False), ("cpu", 0.0, False)):
        record = make.profile(RunConfig(purpose="profile", device=device))
        assert record.profile is not None
        record.profile["operators"][3]["self_device_seconds"] = seconds
        shown = answer(make.study([record]))
        assert ("saw nothing of the GPU" in shown.finding.claim) == told
