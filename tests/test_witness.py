"""The witness: every way in which a label can lie is named."""

import dataclasses
from typing import Any

import pytest

from ddpm_lab.config import NCCL, RunConfig
from ddpm_lab.measure.rank import nccl_seen
from ddpm_lab.measure.witness import mismatches

TWO_GPUS = RunConfig(
    device="cuda",
    world_size=2,
    precision="bf16",
    compile="whole",
    loader="files",
    loader_workers=2,
    data_sha256="abc",
)


def saw(rank: int, **changes: Any) -> dict[str, Any]:
    """What an honest rank of TWO_GPUS says, with ``changes``."""
    return {
        "rank": rank,
        "world_size": 2,
        "device": f"cuda:{rank}",
        "device_uuid": f"GPU-{rank}",
        "precision": "bf16",
        "compile": "whole",
        "loader": "files",
        "loader_workers": 2,
        "data_sha256": "abc",
        "unlisted_modules": [],
        "steps": 10,
        "images": 10 * TWO_GPUS.rank_batch_size,
        "indices_sha256": f"share {rank}",
        **changes,
    }


def _on(uuid: str, rank: int) -> dict[str, Any]:
    return {"rank": rank, "device": "cuda:0", "device_uuid": uuid}


def test_ranks_share_a_gpu_only_where_the_label_says_so() -> None:
    config = RunConfig(device="cuda", world_size=2)
    (found,) = mismatches(config, [_on("GPU-1", 0), _on("GPU-1", 1)])
    assert "2 ranks ran on 1 distinct GPUs" in found
    assert mismatches(dataclasses.replace(config, oversubscribe=True), [_on("GPU-1", 0), _on("GPU-1", 1)]) == []


def test_honest_labels_pass() -> None:
    assert mismatches(TWO_GPUS, [saw(0), saw(1)]) == []
    assert mismatches(TWO_GPUS, [saw(1), saw(0)]) == []
    cpu = RunConfig(world_size=2)
    assert mismatches(cpu, [saw_on_cpu(0), saw_on_cpu(1)]) == []


def saw_on_cpu(rank: int) -> dict[str, Any]:
    """A workload that says nothing of itself is judged only on what the lab sees."""
    return {"rank": rank, "world_size": 2, "device": "cpu", "device_uuid": None}


def test_freed_memory_is_held_against_the_label_only_where_keeping_it_was_asked_for() -> None:
    """Another allocator may keep it by itself."""
    seen = [saw_on_cpu(0) | {"world_size": 1, "freed_memory": kind} for kind in ("kept", "default")]
    assert mismatches(RunConfig(freed_memory="kept"), seen[:1]) == []
    (found,) = mismatches(RunConfig(freed_memory="kept"), seen[1:])
    assert "freed_memory kept, rank 0 ran with default" in found
    assert [mismatches(RunConfig(), [one]) for one in seen] == [[], []]


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ({"world_size": 1}, "world_size 2, rank 1 ran with 1"),
        ({"device": "cpu"}, "device cuda, rank 1 ran on cpu"),
        ({"precision": "fp32"}, "precision bf16, rank 1 ran with fp32"),
        ({"compile": "off"}, "compile whole, rank 1 ran with off"),
        ({"loader_workers": 0}, "loader_workers 2, rank 1 ran with 0"),
        ({"data_sha256": "xyz"}, "data_sha256 abc, rank 1 ran with xyz"),
        ({"loader": "packed"}, "loader files, rank 1 ran with packed"),
        ({"images": 159}, "16 images a step on a rank, 160 in 10 steps, rank 1 used 159"),
        ({"exchange_hook": "bf16"}, "exchange_hook none, rank 1 ran with bf16"),
        ({"nccl": "pcie"}, "nccl default, rank 1 ran with pcie"),
        ({"images": 320}, "160 in 10 steps, rank 1 used 320"),
        ({"indices_sha256": "share 0"}, "2 ranks share each batch, some of them used the same images"),
        (
            {"unlisted_modules": ["helper", "other"]},
            "rank 1 loaded helper, other, which one step of the workload did not",
        ),
    ],
)
def test_each_lie_is_named_with_its_rank(lie: dict[str, Any], words: str) -> None:
    (sentence,) = mismatches(TWO_GPUS, [saw(0), saw(1, **lie)])
    assert words in sentence
    assert "\n" not in sentence


GRAPHS = dataclasses.replace(TWO_GPUS, compile_mode="reduce-overhead")
RECORDED = {"compile_mode": "reduce-overhead", "cuda_graphs": 2, "cuda_graph_skips": 0}


@pytest.mark.parametrize(
    ("counted", "words"),
    [
        ({}, ""),
        ({"cuda_graphs": 0}, "rank 1 recorded 0 and skipped 0; TORCH_LOGS=cudagraphs says why"),
        ({"cuda_graphs": 0, "cuda_graph_skips": 2}, "rank 1 recorded 0 and skipped 2;"),
        ({"cuda_graphs": 1, "cuda_graph_skips": 1}, "rank 1 recorded 1 and skipped 1;"),
        ({"compile_mode": "default"}, "compile_mode reduce-overhead, rank 1 ran with default"),
        ({"cuda_graphs": 0, "steps": 2, "images": 32}, ""),  # not recorded yet
    ],
)
def test_a_fall_back_from_cuda_graphs_is_named(counted: dict[str, Any], words: str) -> None:
    found = mismatches(GRAPHS, [saw(0, **RECORDED), saw(1, **(RECORDED | counted))])
    assert [words in sentence for sentence in found] == ([True] if words else [])


def test_a_revision_that_ran_the_working_trees_modules_is_named() -> None:
    label = RunConfig(revision="1234567890ab")
    seen = {**saw_on_cpu(0), "world_size": 1, "astray_modules": ["mine", "pack.inner"]}
    (sentence,) = mismatches(label, [seen])
    assert "the label says revision 1234567890ab, rank 0 loaded mine, pack.inner from the working tree" in sentence
    assert mismatches(label, [{**seen, "astray_modules": []}]) == []


def test_threads_are_judged_where_they_were_asked_for() -> None:
    """Else they are what the machine had."""
    seen = {**saw_on_cpu(0), "world_size": 1, "threads": 2}
    assert mismatches(RunConfig(), [seen]) == mismatches(RunConfig(threads=2), [seen]) == []
    assert mismatches(RunConfig(threads=1), [seen]) == ["the label says threads 1, rank 0 ran with 2"]


@pytest.mark.parametrize(
    ("changes", "seen"),
    [({}, "pcie"), ({"NCCL_ALGO": "Ring"}, "default"), ({"NCCL_SOCKET_IFNAME": "eth0"}, "pcie")],
)
def test_the_settings_of_nccl_are_read_back_from_the_environment(changes: dict[str, str], seen: str) -> None:
    environment = {"PATH": "/bin", **NCCL["pcie"], **changes}
    said = nccl_seen(environment)
    assert said["nccl"] == seen
    assert said["nccl_environment"] == {**NCCL["pcie"], **changes}
    assert nccl_seen({"PATH": "/bin"}) == {"nccl": "default", "nccl_environment": {}}


def test_fp16_without_a_scaler_is_named() -> None:
    label = RunConfig(device="cuda", precision="fp16")
    seen = {**saw_on_cpu(0), "world_size": 1, "device": "cuda:0", "precision": "fp16"}
    (sentence,) = mismatches(label, [{**seen, "autocast_scaler": False}])
    assert "without a gradient scaler" in sentence
    assert mismatches(label, [{**seen, "autocast_scaler": True}]) == []


@pytest.mark.parametrize("ranks", [[0], [0, 0], [0, 1, 2], [1, 2], []])
def test_missing_doubled_and_additional_ranks_are_named(ranks: list[int]) -> None:
    reports = [saw(rank, device_uuid=f"GPU-{i}", indices_sha256=str(i)) for i, rank in enumerate(ranks)]
    (sentence,) = mismatches(TWO_GPUS, reports)
    assert f"the label says 2 ranks, these ran: {ranks}" == sentence
