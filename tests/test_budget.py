"""What a time budget says: whose it is, what it sums to, and when it explains nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import records as make
from cells import column

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import budget as bd
from ddpm_lab.explain.budget import Budget
from ddpm_lab.questions.ask import answer

SLOW = {**make.PHASES, "communication": 2.0}
FAST = {**make.PHASES, "forward": 16.0, "backward": 28.0, "communication": 15.4}


def taken(*ranks: dict[str, float], **values: Any) -> Budget:
    found = bd.budget(make.time_budget(*ranks, **values))
    assert found is not None
    return found


def test_shares_of_phases_classes_and_the_rest_sum_to_one() -> None:
    line = taken(residual=2.0).running
    phases = sum(line.share(name) for name in line.phases)
    classes = sum(line.share(name) for name in (bd.IO, bd.TRANSFER, bd.COMPUTE, bd.OTHER))
    assert phases == pytest.approx(classes)
    assert phases + line.residual_share == pytest.approx(1)
    assert line.share(bd.COMPUTE) == pytest.approx((23.4 + 34.0 + 3.4 + 0.1) / 67.1)
    assert list(line.phases) == ["data", "copy", "forward", "backward", "optimizer", "EMA"]


@pytest.mark.parametrize(("residual", "explained"), [(6.0, True), (8.0, False), (-8.0, False)])
def test_a_residual_above_ten_percent_explains_nothing(residual: float, explained: bool) -> None:
    record = make.time_budget(residual=residual)
    found = bd.budget(record)
    assert found is not None
    assert found.explained == explained
    assert (answer(make.study([record])).finding.verdict == "not explained") == (not explained)


def test_the_slowest_rank_answers_and_a_straggler_is_named() -> None:
    found = taken(FAST, SLOW)
    assert found.rank == 1
    assert list(found.others) == [0]
    assert found.straggler.startswith("Rank 1 computes 28 % longer")
    even = taken(SLOW, {**SLOW, "backward": 36.0})
    assert even.rank == 1
    assert even.straggler == ""
    # a rank that only waits longer computes no longer
    assert taken(SLOW, {**SLOW, "communication": 30.0}).straggler == ""


def test_the_trace_is_compared_share_by_share() -> None:
    found = taken({**make.PHASES, "communication": 0.0})
    assert found.trace_difference == pytest.approx(0, abs=1e-9)
    assert found.profiler_slowdown == pytest.approx(1.5, rel=0.01)
    record = make.time_budget()
    assert record.profile is not None
    rank = record.profile["budget"]["ranks"][0]
    rank["profiled"]["phases"] = {"data": 0.05, "forward": 0.05}
    checked = bd.budget(record)
    assert checked is not None
    assert checked.trace_difference == pytest.approx(0.5 - 3.9 / (3.9 + 23.4))
    del rank["profiled"]
    bare = bd.budget(record)
    assert bare is not None
    assert math.isnan(bare.trace_difference)
    record = make.time_budget(SLOW)
    assert record.profile is not None
    rank = record.profile["budget"]["ranks"][0]
    rank["profiled"]["phases"]["backward"] += 1.5 * 2.0 / 1e3
    waited = bd.budget(record)
    assert waited is not None
    assert waited.trace_difference == pytest.approx(0, abs=1e-9), "the trace has the wait in backward"


def test_what_ran_beside_the_phases_is_kept() -> None:
    spans = {"communication": {"seconds": 0.004, "overlapped_seconds": 0.003}}
    found = taken(SLOW, spans=spans, helpers_cpu_seconds=0.02, host_ahead_seconds=0.008, host_phases=SLOW)
    assert found.on_device
    assert found.beside == {"communication": (0.004, 0.003), bd.WORKERS: (0.02, 0.02)}
    assert found.ahead_seconds == 0.008


def test_names_that_mean_the_same_are_one_and_unknown_ones_are_shown() -> None:
    line = taken({"all-reduce": 2.0, "communication": 1.0, "augmentation": 7.0}).running
    assert line.phases == pytest.approx({"communication": 0.003, "augmentation": 0.007})
    assert line.share(bd.OTHER) == pytest.approx(0.7)
    assert line.share(bd.TRANSFER) == pytest.approx(0.3)


def test_table_adds_up_and_has_a_column_for_every_rank() -> None:
    record = make.time_budget(FAST, SLOW, residual=1.0)
    shown = answer(make.study([record])).table()
    assert list(shown[0])[:2] == ["Phase", "Class"]
    times = [float(text.removesuffix(" ms")) for text in column(shown, "Time per step, rank 1 (slowest)")]
    assert sum(times[:-1]) == pytest.approx(times[-1], rel=0.01)
    assert column(shown, "Phase")[-2:] == ["in no phase", "whole step"]
    assert "Rank 0" in shown[0]
    (_, operators), *_ = answer(make.study([record])).tables()
    assert "aten::convolution_backward" in column(operators, "Operator")


def test_a_record_without_a_budget_is_answered_by_its_operators() -> None:
    old = make.profile(RunConfig(purpose="profile"))
    assert bd.budget(old) is None
    found = answer(make.study([old])).finding
    assert found.headline.startswith("Convolutions take 62 %")
    assert answer(make.study([old])).tables() == []
    assert "Operator" in answer(make.study([old])).table()[0]


def test_a_busy_machine_is_told() -> None:
    record = make.time_budget()
    assert record.profile is not None
    for others, told in ((None, "unknown"), (0.1, ""), (0.9, "0.9 of 2 cores")):
        record.profile["budget"]["others_cores"] = others
        found = bd.budget(record)
        assert found is not None
        assert told in found.disturbance
        assert bool(found.disturbance) == bool(told)
