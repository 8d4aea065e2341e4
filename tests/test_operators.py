"""Profiles: every second once, every operator in its class."""

import pytest
import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain import operators


def test_class_of_an_operator() -> None:
    for name, expected in (
        ("void cudnn::winograd_nonfused::winogradForwardData4x4", "convolution"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matrix product, attention"),
        ("aten::_scaled_dot_product_flash_attention", "matrix product, attention"),
        ("aten::addmm", "matrix product, attention"),
        ("aten::add_", "element-wise, sums"),
        ("aten::native_group_norm_backward", "normalisation"),
        ("aten::linalg_vector_norm", "optimizer and averaging"),
        ("aten::_foreach_mul_", "optimizer and averaging"),
        ("Memcpy HtoD (Pinned -> Device)", "copy and memory"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("(other operators)", "other"),
    ):
        assert operators.operator_class(name) == expected


def test_shares_count_each_second_once() -> None:
    record = make.profile(RunConfig(purpose="profile"))
    assert record.profile is not None
    frame, classes = operators.operators(record), operators.classes(record)
    total = sum(s for name, (s, _) in make.OPERATORS.items() if name != "ProfilerStep*")
    assert sum(op.share for op in frame) == pytest.approx(1)
    assert sum(kind.share for kind in classes) == pytest.approx(1)
    (convolution,) = (kind.share for kind in classes if kind.name == "convolution")
    assert convolution == pytest.approx((5.0 + 7.0) / total)
    assert classes[-1].name == "other"


def test_device_time_decides_where_there_is_any() -> None:
    record = make.profile(RunConfig(purpose="profile"))
    assert record.profile is not None
    record.profile["operators"][3]["self_device_seconds"] = 2.0
    frame = operators.operators(record)
    assert operators.on_device(record)
    assert [(op.name, op.seconds) for op in frame] == [("aten::native_group_norm_backward", 2.0)]
