"""What is published tells nothing of a person or a machine, and still says what happened."""

import ast
import dataclasses
import getpass
from pathlib import Path
from typing import Any

import pytest
import records as make

from ddpm_lab.anonymous import WITNESSED, anonymous
from ddpm_lab.config import RunConfig
from ddpm_lab.ledger import Ledger
from ddpm_lab.record import RunRecord

UUIDS = ("GPU-1f0e7a62-aaaa-bbbb-cccc-0123456789ab", "GPU-2f0e7a62-aaaa-bbbb-cccc-0123456789ab")
FOLDER = "/home/alice/my secret pictures/prepared"
PNG = "iVBORw0KGgo-" * 5_000
SECRETS = (
    *("alice", "secret", "pictures", "holiday", "nightowl", "example.org", "1f0e7a62", "2f0e7a62", "4711", "31337"),
    *("10.1.2.3", "fe80", "6.1.0-private", "/home", "/scratch", "/tmp", "/mnt", "train_it.py", "hunter2"),
)
REASONS = {
    f"cannot read {FOLDER}/holiday/beach 1.png: it is damaged": "cannot read <path> 1.png: it is damaged",
    "cannot read '/mnt/holiday pictures/a b.png'; leave it out": "cannot read '<path>'; leave it out",
    "rank 0: FileNotFoundError: /home/alice/train_it.py:12: no such file": (
        "rank 0: FileNotFoundError: <path>:12: no such file"
    ),
    "holiday/beach.png and ../up/x are no images, see ~alice/notes.": "<path> and <path> are no images, see <path>.",
    "rank 1 lost nightowl.example.org, tcp://10.1.2.3:29500 and [fe80:1:2:3::7]": (
        "rank 1 lost <host>, <address> and [<address>]"
    ),
    "nightowl: out of memory, process 31337 (pid: 4711) holds 70 GiB": (
        "<host>: out of memory, process <number> (pid: <number>) holds 70 GiB"
    ),
    f"2 ranks ran on 1 distinct GPUs: {UUIDS[1]}": "2 ranks ran on 1 distinct GPUs: GPU 1",
    "write to alice@example.org or alice, SLURM job 4711": "write to <address> or <user>, SLURM job <number>",
    "the dataset 'holiday snaps' is empty": "the dataset '<path>' is empty",
    # Nothing to hide, nothing to lose.
    "needs a CUDA device": "needs a CUDA device",
    "the label says precision bf16, rank 0 ran with fp32; 2.5 GiB of 8 GiB": (
        "the label says precision bf16, rank 0 ran with fp32; 2.5 GiB of 8 GiB"
    ),
    "no C++ compiler (g++); on Debian or Ubuntu: apt install g++": (
        "no C++ compiler (g++); on Debian or Ubuntu: apt install g++"
    ),
    "630 images/s and/or 1/2 of it at 12:30:05, aten::add::out of 3 processes": (
        "630 images/s and/or 1/2 of it at 12:30:05, aten::add::out of 3 processes"
    ),
}


def personal() -> list[RunRecord]:
    """Records full of what is nobody's business."""
    config = RunConfig(
        device="cuda",
        world_size=2,
        data=FOLDER,
        workload="mine:step",
        options=(("checkpoint", "/scratch/alice/last.pt"), ("depth", 3)),
    )
    environment = dataclasses.replace(
        make.environment(make.GPUS),
        hostname="nightowl.example.org",
        kernel="6.1.0-private",
        slurm_job_id="4711",
        gpu_uuids=UUIDS,
    )
    ranks = tuple(dataclasses.replace(make.rank_record(i), device_uuid=UUIDS[i]) for i in range(2))
    seen = [
        {
            "rank": i,
            "device": f"cuda:{i}",
            "device_uuid": UUIDS[i],
            "threads_wait": {"OMP_WAIT_POLICY": "/home/alice/policy"},
            "pid": 31337,
            "password": "hunter2",
            "parameters": 44332,
        }
        for i in range(2)
    ]
    profile = {
        "steps": 4,
        "operators": [{"name": "aten::add", "calls": 4.0}, {"name": "load /home/alice/train_it.py", "calls": 1.0}],
        "traces": ["profile-c0de9bb0abbf-rank0.json.gz"],
    }
    common = {
        "environment": environment,
        "ranks": ranks,
        "data_name": "4,750 images from holiday snaps",
        "profile": profile,
        "quality": {"samples": {"png": PNG}, "fid": {"reason": f"cannot read {FOLDER}/weights.pth", "images": 64}},
        "baseline_id": config.run_id,
    }
    return [
        make.record(
            config,
            role="candidate",
            label="/home/alice/mine.toml",
            status="crashed",
            reason=reason,
            witness={"ranks": seen, "traceback": "File /home/alice/train_it.py", "argv": ["hunter2"]},
            **common,
        )
        for reason in REASONS
    ]


def test_nothing_of_a_person_or_a_machine_is_left(tmp_path: Path) -> None:
    Ledger(tmp_path / "out.jsonl").append(anonymous(personal()))
    text = (tmp_path / "out.jsonl").read_text()
    assert [secret for secret in SECRETS if secret in text] == []
    found, damaged = Ledger(tmp_path / "out.jsonl").read()
    assert len(found) == len(REASONS)
    assert not damaged


def test_reasons_can_still_be_understood() -> None:
    assert [r.reason for r in anonymous(personal())] == list(REASONS.values())


def test_what_was_measured_stays() -> None:
    before, after = personal(), anonymous(personal())
    for old, new in zip(before, after, strict=True):
        assert new.environment.machine == old.environment.machine
        assert (new.windows, new.stages, new.plan, new.code_version) == (
            old.windows,
            old.stages,
            old.plan,
            old.code_version,
        )
        assert new.cohort == old.cohort
        assert new.data_name == "4,750 images"
        # That each rank had a GPU of its own can still be seen.
        assert [r.device_uuid for r in new.ranks] == ["GPU 0", "GPU 1"] == list(new.environment.gpu_uuids)
        assert [w["device_uuid"] for w in new.witness["ranks"]] == ["GPU 0", "GPU 1"]
        assert new.witness["ranks"][0]["parameters"] == 44332
        assert new.profile is not None
        assert new.profile["operators"][0] == {"name": "aten::add", "calls": 4.0}
        assert new.quality == {"samples": {"png": PNG}, "fid": {"reason": "cannot read <path>", "images": 64}}
        # The option's path is gone from the configuration, so the record links to the changed baseline.
        assert new.config.option("depth", 0) == 3
        assert new.baseline_id == new.run_id != old.run_id


def test_doing_it_again_changes_nothing() -> None:
    once = anonymous(personal())
    assert anonymous(once) == once


def test_a_name_that_is_a_word_does_not_eat_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(getpass, "getuser", lambda: "root")
    monkeypatch.setattr(Path, "home", lambda: Path("/root"))
    record = make.record(
        RunConfig(data="/data/train"),
        status="crashed",
        reason="the root of the train data is at rank 0",
        data_name="10 images from train",
    )
    (found,) = anonymous([record])
    assert found.reason == record.reason
    assert found.data_name == "10 images"


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("10,000 synthetic images", "10,000 synthetic images"),
        ("4,750 images from alice/pictures", "4,750 images"),
        ("4,750 images", "4,750 images"),
        ("alice's own", "images"),
        ("", ""),
    ],
)
def test_names_of_data(name: str, published: str) -> None:
    (found,) = anonymous([make.record(RunConfig(), data_name=name)])
    assert found.data_name == published


def test_what_the_lab_witnesses_is_published() -> None:
    """Fields that the lab's own ranks report are known here, so that none is left out as a stranger's."""
    package = Path(__file__).resolve().parents[1] / "ddpm_lab"
    fields: set[Any] = set()
    for path in (package / "measure" / "rank.py", *sorted((package / "model").glob("*.py"))):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and (
                function.name in ("witness", "compile_counters") or function.name.endswith("_seen")
            ):
                for node in ast.walk(function):
                    keys: list[ast.expr | None] = []
                    if isinstance(node, ast.Dict):
                        keys = node.keys
                    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                        keys = [node.slice]
                    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "seen":
                        fields |= {word.arg for word in node.keywords}
                    fields |= {key.value for key in keys if isinstance(key, ast.Constant)}
    fields -= {"enabled", "bucket_view", "static_graph", "bucket_mb"}  # inside "exchange"
    fields -= {"host", "nccl_environment"}  # which name machines and network interfaces
    fields -= {"maker", "place", "sample", "samples", "offers", "dataset", "loss", "held_out_loss"}  # a user's own
    assert fields >= {"precision", "kernels", "flop", "graphs"}
    assert fields <= WITNESSED
