"""Workloads with a known answer: the counted work of a step, the machine's peaks, an all-reduce, planted pieces."""

from functools import partial

import pytest
import torch
from fresh_processes import context

from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion.unet import build_network, count_flops, count_parameters
from ddpm_lab.measure.group import Group
from ddpm_lab.questions.exchange import WORKLOAD as ALL_REDUCE
from ddpm_lab.training import limits
from ddpm_lab.training.limits import CONVOLUTION, NORM, POINTWISE, PRODUCT, count_work, pieces

CONTEXT = context()


@pytest.mark.parametrize("network", ["tiny", *(pytest.param(n, marks=pytest.mark.slow) for n in ("seed", "ddpm"))])
def test_the_operations_are_those_of_the_flop_counter(network: str) -> None:
    work = count_work(network)
    assert sum(part["flop"] for part in work.values()) == pytest.approx(
        count_flops(partial(build_network, network)), rel=1e-6
    )
    assert work[CONVOLUTION]["flop"] > 5 * work[PRODUCT]["flop"] / 2 > 0
    assert work[NORM]["flop"] == work[POINTWISE]["flop"] == 0
    with torch.device("meta"):
        assert work["weights"]["elements"] == count_parameters(build_network(network))


def test_elements_of_a_kernel_are_what_it_reads_and_writes() -> None:
    with torch.device("meta"):
        x, weight = torch.empty(2, 8, 4, 4), torch.empty(8, 8, 3, 3)
        with limits._Counter() as counter:
            y = torch.nn.functional.conv2d(x, weight, padding=1)
            y = y.reshape(2, 8, 16).transpose(1, 2).transpose(1, 2).reshape(2, 8, 4, 4)  # views move nothing
            torch.add(y, x)
    assert counter.work[CONVOLUTION] == {"elements": 2 * 256 + 8 * 8 * 9, "flop": 2 * 2 * 16 * 8 * 8 * 9}
    assert counter.work[POINTWISE]["elements"] == 3 * 256


def test_joined_upsampling_needs_sixteen_products_where_there_were_thirty_six() -> None:
    """The seed network: 256 -> 128 channels from 8x8 pixels and 128 -> 64 from 16x16, forward and twice backward."""
    plain, joined = (count_work("seed", joined=joined)[CONVOLUTION]["flop"] for joined in (False, True))
    assert plain - joined == 3 * 2 * (36 - 16) * (256 * 128 * 8**2 + 128 * 64 * 16**2)


def test_peaks_do_the_work_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in (("MATRIX", 64), ("COPY_BYTES", 4096), ("CONVOLVED", 1)):
        monkeypatch.setitem(getattr(limits, name), "cpu", size)
    for precision, dtype in (("fp32", "torch.float32"), ("bf16", "torch.bfloat16")):
        config = RunConfig(precision=precision, global_batch_size=1, network="tiny")
        peaks = [f(config, CONTEXT) for f in (limits.product, limits.convolution, limits.copy)]
        assert [peak.step(next(peak.batches())) for peak in peaks] == [0.0] * 3
        product, convolution, copy = (peak.witness() for peak in peaks)
        assert (product["images"], convolution["images"], copy["images"]) == (1, 1, 1)
        assert product["dtype"] == convolution["dtype"] == dtype
        assert (product["flop"], convolution["flop"]) == (2 * 64**3, 2 * 256 * 128 * 128 * 9)
        assert copy["bytes"] == 2 * 4096
        assert set(product["work"]) >= {CONVOLUTION, PRODUCT, "weights"}


def test_a_planted_step_does_so_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, forward = 0, torch.nn.Conv2d.forward

    def counted(self: torch.nn.Conv2d, values: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return forward(self, values)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", counted)
    workload = pieces(RunConfig(global_batch_size=1, options=(("pieces", 105),)), CONTEXT)
    for _ in range(2):
        workload.step(None)
    assert calls == 2 * 105
    assert workload.witness() == {"pieces": 105, "images": 2}


@pytest.mark.slow
def test_two_ranks_add_up_each_message() -> None:
    config = RunConfig(workload=ALL_REDUCE, world_size=2, global_batch_size=2, options=(("message_bytes", 1024),))
    with Group(config, threads=1) as group:
        group.window(settle=0, steps=2, limit=60, stage="testing")
        assert [[rank[n] for n in ("summed_over", "hosts", "message_bytes")] for rank in group.witness()] == [
            [2, 1, 1024]
        ] * 2
