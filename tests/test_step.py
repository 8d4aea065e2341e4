"""What torch.compile did, read back from torch: the mode, and whether CUDA graphs were made of it."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import Tensor, nn

from ddpm_lab.config import RunConfig
from ddpm_lab.diffusion.network import compile_seen
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.training.train import Trainer
from ddpm_lab.workload import RankContext

GRAPHS = RunConfig(device="cuda", compile="whole", compile_mode="reduce-overhead")


class Block(nn.Module):
    """What is compiled in a moment."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1


@pytest.fixture(autouse=True)
def fresh() -> None:
    import torch._dynamo  # noqa: PLC0415

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("whole", [True, False])
def test_the_mode_is_read_back_and_a_silent_fall_back_is_counted(mode: str, whole: bool) -> None:
    """On a CPU inductor leaves CUDA graphs out, and says nothing."""
    model = nn.Sequential(Block(), Block())
    if whole:
        model = torch.compile(model, mode=mode)  # type: ignore[assignment]
    else:
        for block in model:
            block.compile(mode=mode, dynamic=False)
    for _ in range(3):
        model(torch.ones(8))
    seen = compile_seen(dataclasses.replace(GRAPHS, compile="whole" if whole else "regional"), model)
    assert seen["compile"] == ("whole" if whole else "regional")
    assert seen["compile_mode"] == mode
    assert ("cuda_graphs" in seen) == (mode != "default")
    if mode != "default":
        assert seen["cuda_graphs"] == 0
        assert seen["cuda_graph_skips"] >= 1
        label = dataclasses.replace(GRAPHS, compile=seen["compile"], compile_mode=mode)
        (sentence,) = mismatches(label, [{"rank": 0, "device": "cuda:0", "steps": 3, **seen}])
        assert f"compile_mode {mode}, which runs as CUDA graphs: rank 0 recorded 0 and skipped" in sentence


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_recorded_on_a_gpu(synthetic: RunConfig, mode: str) -> None:
    label = dataclasses.replace(
        synthetic, device="cuda", precision="bf16", compile="whole", compile_mode=mode, global_batch_size=8
    )
    context = RankContext(rank=0, world_size=1, device="cuda:0", threads=1, mark=lambda _: None)
    trainer = Trainer(label, context)
    for batch in itertools.islice(trainer.batches(), 4):
        trainer.step(batch)
    seen = {"rank": 0, "device": "cuda:0", "steps": 4, **trainer.witness()}
    assert seen["compile_mode"] == mode
    assert seen["cuda_graphs"] >= 2, "forward and backward"
    assert mismatches(label, [seen]) == []
    assert mode != "max-autotune" or seen["autotuned"] > 0
