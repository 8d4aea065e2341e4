"""What is published tells nothing of a person or a machine, and still says what happened."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.ledger import PUBLISHED, Ledger
from ddpm_lab.record import Environment, RunRecord
from ddpm_lab.reports.published import FIELDS, anonymous

UUIDS = ("GPU-1f0e7a62-aaaa-bbbb-cccc-0123456789ab", "GPU-2f0e7a62-aaaa-bbbb-cccc-0123456789ab")
FOLDER = "/home/alice/my secret pictures/prepared"
PNG = "iVBORw0KGgo-" * 5_000
DRAWN = {"png": PNG, "images": 8, "sampler": "ddim", "steps": 50}
FID = {"images": 64, "steps": 50, "inception_sha256": "ab12"}
SECRETS = (
    *("alice", "secret", "pictures", "holiday", "nightowl", "example.org", "1f0e7a62", "2f0e7a62", "4711", "31337"),
    *("10.1.2.3", "6.1.0-private", "/home", "/scratch", "/mnt", "train_it", "hunter2"),
)
REASONS = {
    f"cannot read {FOLDER}/holiday/beach 1.png: it is damaged": None,
    "rank 0: FileNotFoundError: /home/alice/train_it.py:12: no such file": "rank 0: FileNotFoundError",
    "rank 1 was killed by SIGKILL in 'forward' of step 143": "rank 1 was killed by SIGKILL in 'forward' of step 143",
    "rank 1 lost nightowl.example.org, tcp://10.1.2.3:29500, user alice, process 31337": None,
    f"2 ranks ran on 1 distinct GPUs: {UUIDS[1]}": None,
}


def personal(reason: str, status: str = "crashed", workload: str = "ddpm_lab.training.train:ddpm") -> RunRecord:
    """A record full of what is nobody's business."""
    options = (("checkpoint", "/scratch/alice/last.pt"), ("depth", 3), ("package", "diffusers 0.36"))
    config = RunConfig(device="cuda", world_size=2, data=FOLDER, workload=workload, options=options)
    private: dict[str, Any] = {"hostname": "nightowl.example.org", "kernel": "6.1.0-private", "slurm_job_id": "4711"}
    seen = {
        "threads_wait": {"OMP_WAIT_POLICY": "/home/alice/policy"},
        "pid": 31337,
        "unlisted_modules": ["train_it.py"],
    }
    return make.record(
        config,
        role="candidate",
        status=status,
        reason=reason,
        environment=dataclasses.replace(make.environment(make.GPUS), gpu_uuids=UUIDS, **private),
        ranks=tuple(dataclasses.replace(make.rank_record(i), device_uuid=UUIDS[i]) for i in range(2)),
        data_name="4,750 images from holiday snaps",
        profile={"steps": 4, "operators": [{"name": "aten::add", "calls": 4.0}], "command": "train_it.py"},
        quality={"samples": DRAWN, "fid": {**FID, "reason": f"cannot read {FOLDER}/weights.pth"}},
        baseline_id=config.run_id,
        witness={
            "ranks": [seen | {"rank": i, "device_uuid": UUIDS[i], "parameters": 44332} for i in range(2)],
            "traceback": "File /home/alice/train_it.py",
            "argv": ["hunter2"],
        },
    )


def test_nothing_of_a_person_or_a_machine_is_left(tmp_path: Path) -> None:
    for status in ("ok", "oom", "crashed"):
        found = anonymous([personal(reason, status) for reason in REASONS])
        assert [r.reason for r in found] == list(REASONS.values())
        Ledger(tmp_path / f"{status}.jsonl").append(found)
        text = (tmp_path / f"{status}.jsonl").read_text()
        assert [secret for secret in SECRETS if secret in text] == []
    assert anonymous([personal("", workload=name) for name in ("mine:step", "ddpm_lab.training.own:own")]) == []
    names = {"10,000 synthetic images": "10,000 synthetic images", "4,750 images": "4,750 images", "alice's own": ""}
    found = anonymous([make.record(RunConfig(), data_name=name) for name in names])
    assert [r.data_name for r in found] == list(names.values())


def test_what_was_measured_stays() -> None:
    old = personal("needs a CUDA device", status="left out")
    (new,) = anonymous([old])
    for name in ("windows", "stages", "plan", "code_version", "cohort", "machine", "date", "label", "reason", "status"):
        assert getattr(new, name) == getattr(old, name), name
    assert new.data_name == "4,750 images"
    # That each rank had a GPU of its own can still be seen.
    assert [r.device_uuid for r in new.ranks] == ["GPU 0", "GPU 1"] == list(new.environment.gpu_uuids)
    assert new.witness["ranks"][1] == {"rank": 1, "device_uuid": "GPU 1", "parameters": 44332, "threads_wait": {}}
    assert new.profile == {"steps": 4, "operators": [{"name": "aten::add", "calls": 4.0}]}
    assert new.quality == {"samples": DRAWN, "fid": FID}
    # The path is gone from the configuration, so the record names the changed baseline.
    assert new.config.options == (("depth", 3), ("package", "diffusers 0.36"))
    assert new.baseline_id == new.run_id != old.run_id
    assert anonymous([new]) == [new]


def test_every_field_is_listed_or_private() -> None:
    assert {field.name for field in dataclasses.fields(RunRecord)} == {*FIELDS["record"].split()}
    private = {"hostname", "kernel", "slurm_job_id"}
    assert {field.name for field in dataclasses.fields(Environment)} - private == {*FIELDS["environment"].split()}


def test_the_published_records_are_what_would_be_published_again() -> None:
    ledgers = sorted((Path(__file__).parents[1] / PUBLISHED).glob("*.jsonl"))
    assert ledgers
    for ledger in ledgers:
        lines = ledger.read_text().splitlines()[::27]
        again = anonymous([RunRecord.from_dict(json.loads(line)) for line in lines])
        assert [json.dumps(r.as_dict(), separators=(",", ":")) for r in again] == lines, "byte by byte"
