"""The witness: every way in which a label can lie is named."""

import dataclasses
from typing import Any

from ddpm_lab.config import NCCL, RunConfig
from ddpm_lab.measure.rank import nccl_seen
from ddpm_lab.measure.witness import mismatches

LABEL = RunConfig(
    device="cuda", world_size=2, precision="bf16", compile="whole", loader="files", loader_workers=2, data_sha256="abc"
)
CUDA_GRAPHS = dataclasses.replace(LABEL, compile_mode="reduce-overhead")
RECORDED = {"compile_mode": "reduce-overhead", "cuda_graphs": 2, "cuda_graph_skips": 0}
FP16 = dataclasses.replace(LABEL, precision="fp16")
ONE = RunConfig()


def saw(rank: int, **changes: Any) -> dict[str, Any]:
    """What an honest rank of LABEL says, with ``changes``."""
    return {
        **{"rank": rank, "world_size": 2, "device": f"cuda:{rank}", "device_uuid": f"GPU-{rank}"},
        **{"precision": "bf16", "compile": "whole", "loader": "files", "loader_workers": 2, "data_sha256": "abc"},
        **{"unlisted_modules": [], "steps": 10, "images": 10 * LABEL.rank_batch_size},
        **{"indices_sha256": f"share {rank}", **changes},
    }


def alone(**said: Any) -> dict[str, Any]:
    """A workload that says nothing of itself is judged only on what the lab sees."""
    return {"rank": 0, "world_size": 1, "device": "cpu", "device_uuid": None, **said}


def test_honest_labels_pass() -> None:
    assert mismatches(LABEL, [saw(0), saw(1)]) == mismatches(LABEL, [saw(1), saw(0)]) == []
    assert mismatches(CUDA_GRAPHS, [saw(0, **RECORDED), saw(1, **RECORDED)]) == []
    early = RECORDED | {"cuda_graphs": 0, "steps": 2, "images": 32}
    assert mismatches(CUDA_GRAPHS, [saw(0, **RECORDED), saw(1, **early)]) == [], "not recorded yet"
    assert mismatches(FP16, [saw(rank, precision="fp16", autocast_scaler=True) for rank in (0, 1)]) == []
    assert mismatches(ONE, [alone()]) == []


LIES: list[tuple[RunConfig, dict[str, Any], str]] = [
    (LABEL, {"world_size": 1}, "world_size 2, rank 1 ran with 1"),
    (LABEL, {"device": "cpu"}, "device cuda, rank 1 ran on cpu"),
    (LABEL, {"precision": "fp32"}, "precision bf16, rank 1 ran with fp32"),
    (LABEL, {"compile": "off"}, "compile whole, rank 1 ran with off"),
    (LABEL, {"loader_workers": 0}, "loader_workers 2, rank 1 ran with 0"),
    (LABEL, {"data_sha256": "xyz"}, "data_sha256 abc, rank 1 ran with xyz"),
    (LABEL, {"exchange_hook": "bf16"}, "exchange_hook none, rank 1 ran with bf16"),
    (LABEL, {"nccl": "pcie"}, "nccl default, rank 1 ran with pcie"),
    (LABEL, {"images": 159}, "16 images a step on a rank, 160 in 10 steps, rank 1 used 159"),
    (LABEL, {"images": 320}, "160 in 10 steps, rank 1 used 320"),
    (LABEL, {"indices_sha256": "share 0"}, "2 ranks share each batch, some of them used the same images"),
    (LABEL, {"device_uuid": "GPU-0"}, "2 ranks ran on 1 distinct GPUs"),
    (LABEL, {"unlisted_modules": ["helper", "other"]}, "rank 1 loaded helper, other, which one step of the workload"),
    (CUDA_GRAPHS, RECORDED | {"cuda_graphs": 0}, "rank 1 recorded 0 and skipped 0; TORCH_LOGS=cudagraphs says why"),
    (CUDA_GRAPHS, RECORDED | {"cuda_graphs": 1, "cuda_graph_skips": 1}, "rank 1 recorded 1 and skipped 1;"),
    (CUDA_GRAPHS, {"compile_mode": "default"}, "compile_mode reduce-overhead, rank 1 ran with default"),
    (FP16, {"precision": "fp16", "autocast_scaler": False}, "without a gradient scaler"),
]


def test_each_lie_is_named_with_its_rank() -> None:
    for label, lie, words in LIES:
        honest: dict[str, Any] = RECORDED if label == CUDA_GRAPHS else {"precision": label.precision}
        found = mismatches(label, [saw(0, **honest), saw(1, **lie)])
        assert [words in sentence for sentence in found] == [True], found
        assert "\n" not in "".join(found)
    hosts = [saw(0, host="f3"), saw(1, host="0a")]
    assert mismatches(LABEL, hosts) == ["the label says 1 hosts, the ranks ran on 2"]
    shared = [saw(0), saw(1, device_uuid="GPU-0")]
    assert mismatches(dataclasses.replace(LABEL, oversubscribe=True), shared) == [], "the label says so"


def test_missing_doubled_and_additional_ranks_are_named() -> None:
    for ranks in ([0], [0, 0], [0, 1, 2], [1, 2], []):
        reports = [saw(rank, device_uuid=f"GPU-{i}", indices_sha256=str(i)) for i, rank in enumerate(ranks)]
        assert mismatches(LABEL, reports) == [f"the label says 2 ranks, these ran: {ranks}"]


def test_what_the_machine_chooses_is_judged_only_where_it_was_asked_for() -> None:
    """Another allocator may keep freed memory by itself, and threads are else what the machine had."""
    assert [mismatches(ONE, [alone(freed_memory=kind, threads=2)]) for kind in ("kept", "default")] == [[], []]
    assert mismatches(RunConfig(freed_memory="kept", threads=2), [alone(freed_memory="kept", threads=2)]) == []
    found = mismatches(RunConfig(freed_memory="kept", threads=1), [alone(freed_memory="default", threads=2)])
    assert found == [
        "the label says freed_memory kept, rank 0 ran with default",
        "the label says threads 1, rank 0 ran with 2",
    ]


def test_a_revision_that_ran_the_working_trees_modules_is_named() -> None:
    label = RunConfig(revision="1234567890ab")
    (sentence,) = mismatches(label, [alone(astray_modules=["mine", "pack.inner"])])
    assert "the label says revision 1234567890ab, rank 0 loaded mine, pack.inner from the working tree" in sentence
    assert mismatches(label, [alone(astray_modules=[])]) == []


def test_the_settings_of_nccl_are_read_back_from_the_environment() -> None:
    for changes, seen in (({}, "pcie"), ({"NCCL_ALGO": "Ring"}, "default"), ({"NCCL_SOCKET_IFNAME": "eth0"}, "pcie")):
        said = nccl_seen({"PATH": "/bin", **NCCL["pcie"], **changes})
        assert said == {"nccl": seen, "nccl_environment": {**NCCL["pcie"], **changes}}
    assert nccl_seen({"PATH": "/bin"}) == {"nccl": "default", "nccl_environment": {}}
