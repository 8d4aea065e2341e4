"""The job scripts, run by a real SLURM: jobs that succeed, fail, run out of time, span two nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
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
from ddpm_lab.ledger import Ledger
from ddpm_lab.planning import CHECKOUT, LEDGER
from ddpm_lab.record import JOB

ODD = """it's a "job" $(touch made) %j;x"""
TESTS = Path(__file__).parent
# torchrun runs the stand-in in the place of the lab's ranks.
STAND_IN = f"""\
#!/bin/bash
words=()
while (($#)); do
  if [[ "$1 ${{2-}} ${{3-}}" == "-m ddpm_lab rank" ]]; then words+=("{TESTS}/rank_stand_in.py"); shift 3
  else words+=("$1"); shift; fi
done
exec {sys.executable} "${{words[@]}}"
"""
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


def scheduler(*words: object) -> str:
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def collected(call: Call, output: Path) -> dict[str, Any]:
    code, out, err = call("slurm", "collect", "outputs", "--output-dir", output, "--json")
    assert code in (0, 1), err
    return {job["job_id"]: job for job in json.loads(out)["jobs"]}


@pytest.mark.slow
def test_jobs_from_submission_to_ledger(
    call: Call, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = time.monotonic()
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
    monkeypatch.setattr(sys, "executable", executable(tmp_path / "python", STAND_IN))
    both = submitted(call, "--nodes", 2, "--time", 5, "--", *COMPARE)
    monkeypatch.setattr(sys, "executable", lab)
    Path("good.toml").write_text("sets = 1\n")
    Path("bad.toml").write_text('sets = 1\ndevice = "cuda"\n')
    files = ("--array", "good.toml", "bad.toml")
    array = submitted(call, "--name", ODD, "--time", 5, "--gpus-per-node", 1, *files, "--", *COMPARE)
    # By hand, from a copy of the folder.
    shutil.copytree(CHECKOUT / "slurm", "slurm")
    monkeypatch.setenv("DDPM_LAB_PYTHON", lab)
    monkeypatch.setenv("DDPM_LAB_REQUEUE", "1")
    train = ("train", "--data", tmp_path / "data", "--image-size", 8, "--steps", 10**6, "--output-dir", "a run")
    by_hand = scheduler("sbatch", "--parsable", "--time=1", "--gres=none", "slurm/one_gpu.sh", *train).strip()

    names = [late["job_id"], both["job_id"], f"{array['job_id']}_0", f"{array['job_id']}_1"]
    first = collected(call, tmp_path)
    assert list(first) == names
    assert first[late["job_id"]]["status"] is None, "a job that runs is no failure"

    def ended() -> bool:
        time.sleep(1)
        return all(job["status"] for job in collected(call, tmp_path).values())

    slurm_cluster.wait_for(ended, cluster, 270)
    Path("/tmp/w/times").write_text(
        f"{time.monotonic() - begun}\n" + scheduler("scontrol", "show", "job") + (cluster / "slurmctld.log").read_text()
    )
    late_row, both_row, good, bad = collected(call, tmp_path).values()
    assert [row["status"] for row in (late_row, both_row, good, bad)] == ["timed out", "ok", "ok", "crashed"]
    assert late_row["reason"] == "reached its time limit of 00:01:00"
    assert "Job hangs here" in late_row["log_tail"]
    assert {"rank 0 met 1 other", "rank 1 met 1 other"} <= set(both_row["log_tail"])
    assert "this machine has 0" in bad["reason"]
    assert bad["log_tail"][-1] in bad["reason"]
    assert not list(tmp_path.rglob("made")), "a shell has read a name"

    # Everything that was measured is in one ledger, once, each record with its job; each failure is a row.
    ledger = Ledger(tmp_path / LEDGER)
    records, damaged = ledger.read()
    assert damaged == []
    measured = [r for r in records if r.role != JOB]
    assert {r.role for r in measured} == {"baseline", "twin", "candidate"}
    assert {r.environment.slurm_job_id for r in measured} == {both["job_id"], str(int(array["job_id"]) + 1)} | {
        r.environment.slurm_job_id for r in measured
    }
    assert len(measured) == both_row["records"] + good["records"] == 6
    rows = {r.witness["slurm_job_id"]: r for r in records if r.role == JOB}
    assert {name: row.status for name, row in rows.items()} == {names[0]: "timed out", names[3]: "crashed"}
    assert rows[names[3]].witness["configuration"] == str(Path("bad.toml").absolute())
    assert rows[names[3]].witness["log_tail"] == bad["log_tail"]
    before = ledger.path.read_bytes()
    assert all(job["added"] == 0 for job in collected(call, tmp_path).values())
    assert ledger.path.read_bytes() == before

    # The job by hand saved at the warning before its time limit, and waits for its next turn.
    log = Path(f"outputs/slurm-{by_hand}.out").read_text()
    step = int(re.findall(r"SIGTERM, saved after step ([\d,]+)", log)[0].replace(",", ""))
    assert [p.name for p in Path("a run", "checkpoints").iterdir()] == [f"step-{step:08d}.pt"]
    assert re.search(r"JobState=PENDING .*\n.*Restarts=1 ", scheduler("scontrol", "show", "job", by_hand))
