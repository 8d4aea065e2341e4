"""What a step says of itself: what torch.compile did, and whether gradients were really exchanged."""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fresh_processes import context
from torch import Tensor, nn

from ddpm_lab.config import OWN, RunConfig
from ddpm_lab.diffusion.step import allow_tf32, compile_seen, require
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.training.own import OwnTraining
from ddpm_lab.training.train import Trainer
from ddpm_lab.workload import Training, Unsupported


class Block(nn.Module):
    """What is compiled in a moment."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1


@pytest.fixture
def fresh() -> None:
    import torch._dynamo  # noqa: PLC0415

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(("mode", "whole"), [("default", False), ("reduce-overhead", True), ("max-autotune", False)])
def test_the_mode_is_read_back_and_a_silent_fall_back_is_counted(mode: str, whole: bool) -> None:
    """On a CPU inductor leaves CUDA graphs out, and says nothing."""
    how = "whole" if whole else "regional"
    label = RunConfig(device="cuda", compile=how, compile_mode=mode)
    model: Any = nn.Sequential(Block(), Block())
    for block in () if whole else model:
        block.compile(mode=mode, dynamic=False)
    model = torch.compile(model, mode=mode) if whole else model
    for _ in range(3):
        model(torch.ones(8))
    seen = compile_seen(label, model)
    assert (seen["compile"], seen["compile_mode"]) == (how, mode)
    if mode != "default":
        assert seen["cuda_graphs"] == 0
        assert seen["cuda_graph_skips"] >= 1
        (sentence,) = mismatches(label, [{"rank": 0, "device": "cuda:0", "steps": 3, **seen}])
        assert "rank 0 recorded 0 and skipped" in sentence


def test_old_and_new_names_of_tf32_say_the_same() -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    for allowed in (True, False, True, False):
        allow_tf32(allowed)
        assert (matmul.allow_tf32, cudnn.allow_tf32) == (allowed, allowed)
        kind = "tf32" if allowed else "ieee"
        new: list[Any] = [matmul, cudnn, cudnn.conv, cudnn.rnn]  # type: ignore[attr-defined]
        assert [settings.fp32_precision for settings in new] == [kind] * 4
        assert torch.get_float32_matmul_precision() == ("high" if allowed else "highest")
        with cudnn.flags(enabled=True):  # as libraries set it for a while
            """Reads all old names, and writes them back."""


@pytest.fixture
def ampere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))


@pytest.mark.usefixtures("ampere")
def test_the_compiler_that_is_demanded_is_the_one_that_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_cpu = RunConfig(compile="whole")
    on_gpu = dataclasses.replace(on_cpu, device="cuda")
    rows = [
        ("g++", on_gpu, r"C compiler \(gcc\).*install gcc.*--compile off"),
        ("clang", on_cpu, r"C\+\+ compiler \(g\+\+\).*install g\+\+"),
    ]
    for present, lacking, words in rows:
        monkeypatch.setenv("PATH", str(tmp_path / present))
        for variable in ("CC", "CXX"):
            monkeypatch.delenv(variable, raising=False)
        program = tmp_path / present / present
        program.parent.mkdir()
        program.touch(mode=0o755)
        require(on_gpu if lacking is on_cpu else on_cpu)
        with pytest.raises(Unsupported, match=words):
            require(lacking)
        monkeypatch.setenv("CC" if lacking is on_gpu else "CXX", str(program))
        require(lacking)


@pytest.mark.usefixtures("ampere")
def test_a_variable_by_which_fp32_would_run_in_tf32_unseen_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require(RunConfig(device="cuda"))
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    require(RunConfig())
    with pytest.raises(Unsupported, match="NVIDIA_TF32_OVERRIDE is set"):
        require(RunConfig(device="cuda"))


@pytest.fixture
def usual_kernels() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(mode=False)


@pytest.mark.usefixtures("ampere", "usual_kernels")
def test_weights_that_are_compared_to_the_last_bit_are_computed_the_same_way_each_time(synthetic: RunConfig) -> None:
    """What GPUs add up in any order, and kernels that are chosen by timing them, would tell equal runs apart."""
    label = dataclasses.replace(synthetic, device="cuda", purpose="quality")
    for draws, same in ((2, False), (0, True)):
        Trainer(dataclasses.replace(label, options=(("images", 160), ("draws", draws))), context())
        assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == (same, not same)
    assert not torch.is_deterministic_algorithms_warn_only_enabled(), "which leaves flash attention as it is"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")  # torch 2.11's, of a graph that it tries
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_cuda_graphs_are_recorded_on_a_gpu(synthetic: RunConfig, mode: str) -> None:
    label = dataclasses.replace(
        synthetic, device="cuda", precision="bf16", compile="whole", compile_mode=mode, global_batch_size=8
    )
    trainer = Trainer(label, context(device="cuda:0"))
    for batch in itertools.islice(trainer.batches(), 4):
        trainer.step(batch)
    seen = {"rank": 0, "device": "cuda:0", "steps": 4, **trainer.witness()}
    assert seen["compile_mode"] == mode
    assert seen["cuda_graphs"] >= 2, "forward and backward"
    assert mismatches(label, [seen]) == []
    assert mode != "max-autotune" or seen["autotuned"] > 0


LABEL = RunConfig(workload=OWN, options=(("make", "mine:make"),), world_size=2, global_batch_size=2)
OFFERED = {"rank": 0, "device": "cpu", "maker": "mine.py, line 32", "place": "mine.py, line 27"}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group in this process, in which a network can be wrapped as in one of two ranks."""
    store = dist.FileStore(str(tmp_path / "store"), 1)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    moved: Tensor

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.unused = nn.Linear(3, 1) if unused else None
        self.register_buffer("moved", torch.zeros(1))

    def forward(self, images: Tensor) -> Tensor:
        self.moved += 1  # a buffer that is each rank's own
        return self.own_loss(images)

    def own_loss(self, images: Tensor) -> Tensor:
        out: Tensor = self.layer(images)
        return out.square().mean()


def trained(label: RunConfig, way: str, *, whole: bool = False) -> dict[str, Any]:
    """What rank 0 says after three steps in which the loss reaches the network in one of several ways."""
    network = Net(unused=way == "unused")
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def loss(model: Any, batch: Tensor) -> Tensor:
        if way == "looked at":
            with torch.no_grad():
                model(batch)
        reached = {"given": model, "unused": model, "module": getattr(model, "module", network).own_loss}
        found: Tensor = reached.get(way, network)(batch)
        return found

    def step(model: Any, batch: Tensor) -> Tensor:
        found = loss(model, batch)
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return found

    given: dict[str, Any] = {"step": step} if whole else {"loss": loss}
    made = Training(model=network, data=[torch.ones(1, 3)], optimizer=optimizer, **given)
    training = OwnTraining(label, context(world_size=label.world_size), made, trained)
    for batch in itertools.islice(training.batches(), 3):
        training.step(batch)
    return {**training.witness(), **OFFERED, "steps": training.steps}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("whole", [False, True])
def test_ranks_exchange_where_the_loss_calls_what_it_is_given(whole: bool) -> None:
    ways = [("given", False), ("given", True), ("held", False), ("module", True), ("looked at", False)]
    for way, static_graph in ways:
        label = dataclasses.replace(LABEL, exchange=dataclasses.replace(LABEL.exchange, static_graph=static_graph))
        seen = trained(label, way, whole=whole)
        assert seen["exchange_enabled"] is (way == "given")
        found = mismatches(label, [seen, {**seen, "rank": 1}])
        assert len(found) == (way != "given")
        assert all("mine.py, line 27" in line for line in found)
    none = dataclasses.replace(LABEL, exchange=dataclasses.replace(LABEL.exchange, enabled=False))
    alone = dataclasses.replace(LABEL, world_size=1, global_batch_size=1)
    for way in ("given", "held"):  # without an exchange nothing is missed
        seen = trained(none, way)
        assert mismatches(none, [seen, {**seen, "rank": 1}]) == []
        assert mismatches(alone, [trained(alone, way)]) == []


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("whole", [False, True])
def test_a_parameter_that_ranks_would_wait_for_is_told_with_a_way_out(whole: bool) -> None:
    with pytest.raises(TypeError, match=r"mine:make .*: the loss leaves .*: freeze them .*, add 0 times their sum"):
        trained(LABEL, "unused", whole=whole)
