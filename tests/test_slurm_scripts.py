"""The job scripts, run by a real SLURM: jobs that succeed, fail, run out of time, span two nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster
from conftest import Call

from ddpm_lab.data.packed import prepare
from ddpm_lab.files import CHECKOUT, LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.record import JOB
from ddpm_lab.slurm_logs import read_log

ODD = """it's a "job" $(touch made) %j;x"""
LOOPS = """
import time
def before(seconds=0.004):
    while True:
        time.sleep(seconds)
        yield
def after():
    return before(0.002)
"""
COMPARE = ("compare", "mine:before", "mine:after")
FROZEN = "#!/bin/bash\ntrap '' TERM\necho 'Job hangs here'\nexec sleep 300\n"


def executable(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if why := slurm_cluster.missing():
        pytest.skip(why)
    with slurm_cluster.cluster() as folder:
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        yield folder
    monkeypatch.delenv("SLURM_CONF")
    assert slurm_cluster.left(folder) == [], "something of the cluster is left"
    assert not folder.exists()


def submitted(call: Call, *arguments: object) -> dict[str, Any]:
    code, out, err = call("slurm", "submit", "--json", "--folder", "outputs", *arguments)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    assert Path(found["folder"]).parent == Path("outputs").absolute()
    return found


def scheduler(*words: object, cwd: Path | None = None) -> str:
    done = subprocess.run([*map(str, words)], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def collected(call: Call, output: Path) -> dict[str, Any]:
    code, out, err = call("slurm", "collect", "outputs", "--output-dir", output, "--json")
    assert code in (0, 1), err
    return {job["job_id"]: job for job in json.loads(out)["jobs"]}


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_a_port_that_is_taken_meanwhile_ends_all_nodes_with_one_sentence(tmp_path: Path, rendezvous: str) -> None:
    """Not with torchrun's traceback on one node, and minutes of waiting on the others."""
    executable(tmp_path / "scancel", '#!/bin/bash\necho cancels "$@"\n')
    told = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "3", "SLURM_NODEID": "0", "SLURM_JOB_NUM_NODES": "2"}
    settings = {"DDPM_LAB_PYTHON": sys.executable, "DDPM_LAB_RDZV": rendezvous}
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        node = subprocess.run(
            ["/bin/bash", CHECKOUT / "slurm" / "node.sh", "127.0.0.1", str(port), "run", "amp"],
            env={**os.environ, **told, **settings, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (node.returncode, node.stdout) == (1, "cancels 7.3\n"), node.stderr
    assert node.stderr.count("\n") == 1
    assert f"port {port} of {socket.gethostname()} (127.0.0.1)" in node.stderr
    assert "is held by another process: submit the job again" in node.stderr


def test_a_job_takes_the_first_port_that_is_free() -> None:
    script = (CHECKOUT / "slurm" / "job.sh").read_text()
    function = script[script.index("free_port() {") : script.index("\n}\n", script.index("free_port() {")) + 3]

    def found(first: int) -> int:
        words = ["/bin/bash", "-c", f'set -euo pipefail\n{function}free_port "$1"', "-", str(first)]
        environment = {**os.environ, "DDPM_LAB_PYTHON": sys.executable}
        return int(subprocess.run(words, env=environment, capture_output=True, check=True).stdout)

    start = found(15000)
    with socket.create_server(("127.0.0.1", start)):
        assert start < found(start) < start + 100


@pytest.mark.slow
def test_jobs_from_submission_to_ledger(
    call: Call, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / ODD
    (work / "outputs").mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")])))
    Path("mine.py").write_text(LOOPS)
    prepare("synthetic", tmp_path / "data", image_size=8)
    lab = sys.executable

    # First, since a time limit is a whole minute, and looked at every thirty seconds.
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "frozen", FROZEN))
    late = submitted(call, "--time", 1, "--", "run", "amp")
    monkeypatch.setattr(sys, "executable", lab)
    train = ("train", "--data", tmp_path / "data", "--image-size", 8, "--batch-size", 4, "--sample-every", 0)
    both = submitted(call, "--nodes", 2, "--time", 5, "--", *train, "--world-size", 2, "--steps", 4)
    monkeypatch.setenv("DDPM_LAB_RDZV", "c10d")
    other = submitted(call, "--nodes", 2, "--time", 5, "--", *train, "--world-size", 2, "--steps", 4)
    monkeypatch.delenv("DDPM_LAB_RDZV")
    Path("good.toml").write_text("sets = 1\n")
    Path("bad.toml").write_text('sets = 1\ndevice = "cuda"\n')
    files = ("--array", "good.toml", "bad.toml")
    array = submitted(call, "--name", ODD, "--time", 5, "--gpus-per-node", 1, *files, "--", *COMPARE)
    # By hand, from a copy of the folder.
    by_hand = tmp_path / "by hand"
    (by_hand / "outputs").mkdir(parents=True)
    shutil.copytree(CHECKOUT / "slurm", by_hand / "slurm")
    monkeypatch.setenv("DDPM_LAB_PYTHON", lab)
    monkeypatch.setenv("DDPM_LAB_REQUEUE", "1")
    sbatch = ("sbatch", "--parsable", "--time=2", "--gres=none", "slurm/one_gpu.sh")
    queued = scheduler(*sbatch, *train, "--steps", 10**6, "--output-dir", "a run", cwd=by_hand).strip()

    names = [late["job_id"], both["job_id"], other["job_id"], f"{array['job_id']}_0", f"{array['job_id']}_1"]
    first = collected(call, tmp_path)
    assert list(first) == names
    assert first[late["job_id"]]["status"] is None, "a job that runs is no failure"

    def ended() -> bool:
        time.sleep(1)
        return all(job["status"] for job in collected(call, tmp_path).values())

    slurm_cluster.wait_for(ended, cluster, 270)
    found = collected(call, tmp_path)
    told_how_they_ended(*found.values())
    both_nodes_trained(found[both["job_id"]], "static")
    both_nodes_trained(found[other["job_id"]], "c10d")
    assert not list(tmp_path.rglob("made")), "a shell has read a name"
    kept_once(call, tmp_path, names, found)
    went_back_into_the_queue(by_hand, queued)


def told_how_they_ended(*jobs: dict[str, Any]) -> None:
    late, _, _, _, bad = jobs
    assert [job["status"] for job in jobs] == ["timed out", "ok", "ok", "ok", "crashed"]
    assert late["reason"] == "reached its time limit of 00:01:00"
    assert "Job hangs here" in late["log_tail"]
    assert "no GPU is visible" in bad["reason"]
    assert bad["log_tail"][-1] in bad["reason"]


def both_nodes_trained(job: dict[str, Any], rendezvous: str) -> None:
    results = Path(job["results"])
    assert (results / "checkpoints" / "step-00000004.pt").is_file()
    log = results.parent / f"slurm-{job['job_id']}.out"
    assert f"rendezvous: {rendezvous} at " in log.read_text()
    (row,) = read_log(log)
    assert (row.summary.job_id, row.summary.ranks, row.summary.gpus) == (job["job_id"], 2, 0)
    assert row.summary.seconds is not None


def saved(log: str) -> int:
    return int(re.findall(r"SIGTERM, saved after step ([\d,]+)", log)[0].replace(",", ""))


def kept_once(call: Call, output: Path, names: list[str], found: dict[str, Any]) -> None:
    """All that was measured is in one ledger, once, each record with its job; each failure is a row."""
    ledger = Ledger(output / LEDGER)
    records, damaged = ledger.read()
    assert damaged == []
    measured = [r for r in records if r.role != JOB]
    assert sorted(r.role for r in measured) == ["baseline", "candidate", "twin"]
    assert len(measured) == found[names[3]]["records"]
    assert all(r.environment.slurm_job_id for r in measured)
    rows = {r.witness["slurm_job_id"]: r for r in records if r.role == JOB}
    assert {name: row.status for name, row in rows.items()} == {names[0]: "timed out", names[4]: "crashed"}
    assert rows[names[4]].witness["configuration"] == str(Path("bad.toml").absolute())
    assert rows[names[4]].witness["log_tail"] == found[names[4]]["log_tail"]
    before = ledger.path.read_bytes()
    assert all(job["added"] == 0 for job in collected(call, output).values())
    assert ledger.path.read_bytes() == before


def went_back_into_the_queue(folder: Path, job: str) -> None:
    """It saved at the warning before its time limit."""
    log = (folder / f"outputs/slurm-{job}.out").read_text()
    saved_last = max((folder / "a run" / "checkpoints").iterdir())
    assert saved_last.name == f"step-{saved(log):08d}.pt"
    assert re.search(r"JobState=PENDING .*\n.*Restarts=1 ", scheduler("scontrol", "show", "job", job))
