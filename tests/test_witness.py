"""The witness: every way in which a label can lie is named."""

import dataclasses
from typing import Any

import pytest

from ddpm_lab.config import NCCL, RunConfig
from ddpm_lab.measure.rank import nccl_seen
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.training.setting import Own

SETTINGS = {"precision": "bf16", "compile": "whole", "loader": "files", "loader_workers": 2, "data_sha256": "abc"}
LABEL = RunConfig(device="cuda", world_size=2, **SETTINGS)  # type: ignore[arg-type]
CUDA_GRAPHS = dataclasses.replace(LABEL, compile_mode="reduce-overhead")
RECORDED = {"compile_mode": "reduce-overhead", "cuda_graphs": 2, "cuda_graph_skips": 0}
FP16 = dataclasses.replace(LABEL, precision="fp16")
ONE = RunConfig()


def saw(rank: int, **changes: Any) -> dict[str, Any]:
    """What an honest rank of LABEL says, with ``changes``."""
    return {
        **{"rank": rank, "world_size": 2, "device": f"cuda:{rank}", "device_uuid": f"GPU-{rank}", **SETTINGS},
        **{"unlisted_modules": [], "steps": 10, "images": 10 * LABEL.rank_batch_size},
        **{"indices_sha256": f"share {rank}", **changes},
    }


def alone(**said: Any) -> dict[str, Any]:
    """A workload that says nothing of itself is judged only on what the lab sees."""
    return {"rank": 0, "world_size": 1, "device": "cpu", "device_uuid": None, **said}


def test_honest_labels_pass() -> None:
    early = RECORDED | {"cuda_graphs": 0, "steps": 2, "images": 32}  # not recorded yet
    asked = RunConfig(freed_memory="kept", threads=2)
    for label, ranks in (
        (LABEL, [saw(0), saw(1)]),
        (LABEL, [saw(1), saw(0)]),
        (dataclasses.replace(LABEL, oversubscribe=True), [saw(0), saw(1, device_uuid="GPU-0")]),
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
        (LABEL, {"world_size": 1}, "world_size 2, rank 1 ran with 1"),
        (LABEL, {"device": "cpu"}, "device cuda, rank 1 ran on cpu"),
        (LABEL, {"precision": "fp32"}, "precision bf16, rank 1 ran with fp32"),
        (LABEL, {"compile": "off"}, "compile whole, rank 1 ran with off"),
        (LABEL, {"loader_workers": 0}, "loader_workers 2, rank 1 ran with 0"),
        (LABEL, {"data_sha256": "xyz"}, "data_sha256 abc, rank 1 ran with xyz"),
        (LABEL, {"exchange_hook": "bf16"}, "exchange_hook none, rank 1 ran with bf16"),
        (LABEL, {"nccl": "pcie"}, "nccl default, rank 1 ran with pcie"),
        (LABEL, {"images": 159}, "160 in 10 steps, rank 1 used 159"),
        (LABEL, {"indices_sha256": "share 0"}, "used the same images"),
        (LABEL, {"device_uuid": "GPU-0"}, "2 ranks ran on 1 distinct GPUs"),
        (LABEL, {"host": "elsewhere"}, "1 hosts, the ranks ran on 2"),
        (LABEL, {"unlisted_modules": ["helper", "other"]}, "rank 1 loaded helper, other,"),
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
    assert [len(mismatches(LABEL, [saw(rank) for rank in ranks])) for ranks in ([0], [1, 2], [])] == [1, 1, 1]
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
