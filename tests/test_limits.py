"""The work of a step, counted against what is known of it by hand; the workloads that measure the machine's peaks."""

from __future__ import annotations

import pytest
import torch

from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion.unet import build_network, count_flops, count_parameters
from ddpm_lab.training import limits
from ddpm_lab.training.limits import CONVOLUTION, NORM, POINTWISE, PRODUCT, count_work
from ddpm_lab.workload import RankContext


@pytest.mark.parametrize("network", ["tiny", "seed", pytest.param("ddpm", marks=pytest.mark.slow)])
def test_the_operations_are_those_of_the_flop_counter(network: str) -> None:
    work = count_work(network)
    assert sum(part["flop"] for part in work.values()) == pytest.approx(count_flops(network)[1], rel=1e-6)
    assert work[CONVOLUTION]["flop"] > 5 * work[PRODUCT]["flop"] / 2 > 0
    assert work[NORM]["flop"] == work[POINTWISE]["flop"] == 0
    with torch.device("meta"):
        assert work["weights"]["elements"] == count_parameters(build_network(network))


def test_elements_of_a_kernel_are_what_it_reads_and_writes() -> None:
    with torch.device("meta"):
        x = torch.empty(2, 8, 4, 4)
        weight = torch.empty(8, 8, 3, 3)
        with limits._Counter() as counter:
            y = torch.nn.functional.conv2d(x, weight, padding=1)
            y = y.reshape(2, 8, 16).transpose(1, 2).transpose(1, 2).reshape(2, 8, 4, 4)  # views move nothing
            torch.add(y, x)
    assert counter.work[CONVOLUTION]["elements"] == 2 * 256 + 8 * 8 * 9
    assert counter.work[CONVOLUTION]["flop"] == 2 * 2 * 16 * 8 * 8 * 9
    assert counter.work[POINTWISE]["elements"] == 3 * 256


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_peaks_do_the_work_they_say(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(limits.MATRIX, "cpu", 64)
    monkeypatch.setitem(limits.COPY_BYTES, "cpu", 4096)
    monkeypatch.setitem(limits.CONVOLVED, "cpu", 1)
    config = RunConfig(precision=precision, global_batch_size=1, network="tiny")
    context = RankContext(rank=0, world_size=1, device="cpu", threads=1, mark=lambda _: None)
    product, convolution, copy = (f(config, context) for f in (limits.product, limits.convolution, limits.copy))
    for peak in (product, convolution, copy):
        assert peak.step(next(peak.batches())) == 0.0
        assert peak.witness()["images"] == 1
        peak.close()
    dtype = {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[precision]
    assert product.witness()["flop"] == 2 * 64**3
    assert product.witness()["dtype"] == convolution.witness()["dtype"] == dtype
    assert convolution.witness()["flop"] == 2 * 256 * 128 * 128 * 9
    assert copy.witness()["bytes"] == 2 * 4096
    assert set(product.witness()["work"]) >= {CONVOLUTION, PRODUCT, "weights"}


def test_joined_upsampling_needs_sixteen_products_where_there_were_thirty_six() -> None:
    """The seed network: 256 -> 128 channels from 8x8 pixels and 128 -> 64 from 16x16, forward and twice backward."""
    plain, joined = (count_work("seed", joined=joined)[CONVOLUTION]["flop"] for joined in (False, True))
    assert plain - joined == 3 * 2 * (36 - 16) * (256 * 128 * 8**2 + 128 * 64 * 16**2)
