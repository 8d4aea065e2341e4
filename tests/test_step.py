"""What a step says of itself, and every way in which a label can lie is named."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fresh_processes import advance, context
from torch import Tensor, nn

from ddpm_lab.config import NCCL, OWN, RunConfig
from ddpm_lab.diffusion.step import allow_tf32, compile_seen, require
from ddpm_lab.measure.rank import nccl_seen
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.training.own import OwnTraining
from ddpm_lab.training.setting import Own
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
    advance(trainer, 4)
    found = {"rank": 0, "device": "cuda:0", "steps": 4, **trainer.witness()}
    assert found["compile_mode"] == mode
    assert found["cuda_graphs"] >= 2, "forward and backward"
    assert mismatches(label, [found]) == []


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
    advance(training, 3)
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


# --- the witness ---

SETTINGS = {"precision": "bf16", "compile": "whole", "loader": "files", "loader_workers": 2, "data_sha256": "abc"}
WITNESSED = RunConfig(device="cuda", world_size=2, **SETTINGS)  # type: ignore[arg-type]
CUDA_GRAPHS = dataclasses.replace(WITNESSED, compile_mode="reduce-overhead")
RECORDED = {"compile_mode": "reduce-overhead", "cuda_graphs": 2, "cuda_graph_skips": 0}
FP16 = dataclasses.replace(WITNESSED, precision="fp16")
ONE = RunConfig()


def saw(rank: int, **changes: Any) -> dict[str, Any]:
    """What an honest rank of WITNESSED says, with ``changes``."""
    return {
        **{"rank": rank, "world_size": 2, "device": f"cuda:{rank}", "device_uuid": f"GPU-{rank}", **SETTINGS},
        **{"unlisted_modules": [], "steps": 10, "images": 10 * WITNESSED.rank_batch_size},
        **{"indices_sha256": f"share {rank}", **changes},
    }


def alone(**said: Any) -> dict[str, Any]:
    """A workload that says nothing of itself is judged only on what the lab sees."""
    return {"rank": 0, "world_size": 1, "device": "cpu", "device_uuid": None, **said}


def test_honest_labels_pass() -> None:
    early = RECORDED | {"cuda_graphs": 0, "steps": 2, "images": 32}  # not recorded yet
    asked = RunConfig(freed_memory="kept", threads=2)
    for label, ranks in (
        (WITNESSED, [saw(0), saw(1)]),
        (WITNESSED, [saw(1), saw(0)]),
        (dataclasses.replace(WITNESSED, oversubscribe=True), [saw(0), saw(1, device_uuid="GPU-0")]),
        (CUDA_GRAPHS, [saw(0, **RECORDED), saw(1, **RECORDED)]),
        (CUDA_GRAPHS, [saw(0, **RECORDED), saw(1, **early)]),
        (FP16, [saw(rank, precision="fp16", autocast_scaler=True) for rank in (0, 1)]),
        (ONE, [alone()]),
        # Another allocator may keep freed memory by itself, and threads are else what the machine had.
        *((ONE, [alone(freed_memory=kind, threads=2)]) for kind in ("kept", "default")),
        (asked, [alone(freed_memory="kept", threads=2)]),
        (RunConfig(revision="1234567890ab"), [alone(astray_modules=[])]),
    ):
        assert mismatches(label, ranks) == []


@pytest.mark.parametrize(
    ("label", "lie", "words"),
    [
        (WITNESSED, {"world_size": 1}, "world_size 2, rank 1 ran with 1"),
        (WITNESSED, {"device": "cpu"}, "device cuda, rank 1 ran on cpu"),
        (WITNESSED, {"precision": "fp32"}, "precision bf16, rank 1 ran with fp32"),
        (WITNESSED, {"compile": "off"}, "compile whole, rank 1 ran with off"),
        (WITNESSED, {"loader_workers": 0}, "loader_workers 2, rank 1 ran with 0"),
        (WITNESSED, {"data_sha256": "xyz"}, "data_sha256 abc, rank 1 ran with xyz"),
        (WITNESSED, {"exchange_hook": "bf16"}, "exchange_hook none, rank 1 ran with bf16"),
        (WITNESSED, {"nccl": "pcie"}, "nccl default, rank 1 ran with pcie"),
        (WITNESSED, {"images": 159}, "160 in 10 steps, rank 1 used 159"),
        (WITNESSED, {"indices_sha256": "share 0"}, "used the same images"),
        (WITNESSED, {"device_uuid": "GPU-0"}, "2 ranks ran on 1 distinct GPUs"),
        (WITNESSED, {"host": "elsewhere"}, "1 hosts, the ranks ran on 2"),
        (WITNESSED, {"unlisted_modules": ["helper", "other"]}, "rank 1 loaded helper, other,"),
        (CUDA_GRAPHS, RECORDED | {"cuda_graphs": 0}, "rank 1 recorded 0 and skipped 0;"),
        (CUDA_GRAPHS, RECORDED | {"cuda_graphs": 1, "cuda_graph_skips": 1}, "rank 1 recorded 1 and skipped 1;"),
        (CUDA_GRAPHS, {"compile_mode": "default"}, "compile_mode reduce-overhead, rank 1 ran with default"),
        (FP16, {"precision": "fp16", "autocast_scaler": False}, "without a gradient scaler"),
    ],
)
def test_each_lie_is_named_with_its_rank(label: RunConfig, lie: dict[str, Any], words: str) -> None:
    honest: dict[str, Any] = RECORDED if label == CUDA_GRAPHS else {"precision": label.precision}
    (sentence,) = mismatches(label, [saw(0, host="here", **honest), saw(1, **{"host": "here", **lie})])
    assert words in sentence
    assert "\n" not in sentence


def test_what_was_asked_for_and_a_revision_are_judged_too() -> None:
    label, lies = RunConfig(freed_memory="kept", threads=1), alone(freed_memory="default", threads=2)
    assert len(mismatches(label, [lies])) == 2
    assert [len(mismatches(WITNESSED, [saw(rank) for rank in ranks])) for ranks in ([0], [1, 2], [])] == [1, 1, 1]
    (sentence,) = mismatches(RunConfig(revision="1234567890ab"), [alone(astray_modules=["mine", "pack.inner"])])
    assert "revision 1234567890ab, rank 0 loaded mine, pack.inner from the working tree" in sentence


def test_the_settings_of_nccl_are_read_back_from_the_environment() -> None:
    for changes, seen in (({}, "pcie"), ({"NCCL_ALGO": "Ring"}, "default"), ({"NCCL_SOCKET_IFNAME": "eth0"}, "pcie")):
        said = nccl_seen({"PATH": "/bin", **NCCL["pcie"], **changes})
        assert said == {"nccl": seen, "nccl_environment": {**NCCL["pcie"], **changes}}
    assert nccl_seen({"PATH": "/bin"}) == {"nccl": "default", "nccl_environment": {}}


def test_a_training_of_the_users_that_nothing_of_was_compiled_is_refused() -> None:
    label = RunConfig(**Own(name="mine:make").settings(), compile="whole")
    told = {"maker": "mine.py, line 3", "steps": 20, "compile": "whole", "compiled_frames": 1}
    assert not [line for line in mismatches(label, [alone(**told, graphs=1)]) if "mine:make" in line]
    (line,) = [line for line in mismatches(label, [alone(**told, graphs=0)]) if "mine:make" in line]
    assert line.startswith("mine:make (mine.py, line 3) compiled nothing in 20 steps")
    skipped = alone(**told | {"compile": "off", "compiled_frames": 0}, graphs=0, frames_tried=1)
    assert any("compiled nothing in 20 steps" in line for line in mismatches(label, [skipped]))
    (line,) = [line for line in mismatches(label, [alone(**told, graphs=8, frames_given_up=1)]) if "mine:make" in line]
    assert "until torch went on eagerly" in line


@pytest.mark.usefixtures("fresh")
def test_what_torch_compiles_anew_is_counted() -> None:
    class Counting(torch.nn.Module):
        calls = 0

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return images * (self.calls / 10)

    model = torch.compile(Counting(), backend="eager")
    for _ in range(12):
        model(torch.ones(2))
    seen = compile_seen(RunConfig(compile="whole", kernels="aten"), model)
    assert (seen["frames_given_up"], seen["recompiles"] >= 8) == (1, True)
