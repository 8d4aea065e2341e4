"""Jobs on SLURM, from the job script to the table, with stand-ins for srun, scancel and scontrol."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import records as make
from conftest import Call, wait_for

from ddpm_lab.config import RunConfig
from ddpm_lab.data.packed import prepare
from ddpm_lab.files import CHECKOUT, LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.record import RunRecord
from ddpm_lab.reports.summary import RUNS, Summary, append_new, read_log, tell

SCRIPT = CHECKOUT / "scripts" / "slurm.sh"
ODD = """it's a "job" $(touch made) `touch made` %j;&\\ --"""
STAND_INS = {
    "srun": 'while [[ $1 == -* ]]; do shift; done; echo $$ >"$STEP"\n'
    'if ((${SLURM_JOB_NUM_NODES:-1} == 2)); then SLURM_NODEID=1 "$@" & fi\nSLURM_NODEID=0 exec "$@"',
    "scancel": 'kill -TERM "$(<"$STEP")"',
    "scontrol": 'echo "$@" JobState=RUNNING | tee -a said',
}
SETS = make.sets({"bf16": (RunConfig(precision="bf16"), 1.2)}, count=3, turns=2)


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, and stand-ins for SLURM's programs."""
    (bin_folder := tmp_path / "bin").mkdir()
    for name, text in STAND_INS.items():
        program(bin_folder / name, f"#!/bin/bash\n{text}\n")
    monkeypatch.setenv("STEP", str(bin_folder / "step"))
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    for name in ("bash", "cut", "hostname", "tee"):
        (bin_folder / name).symlink_to(Path("/bin", name))
    monkeypatch.setenv("PATH", str(bin_folder))
    (folder := tmp_path / "work").mkdir()
    monkeypatch.chdir(folder)
    return folder


def job(number: int, *words: object, python: str = sys.executable, task: int | None = None, last: int = 1) -> Path:
    """Run the job script as SLURM does; returns the log."""
    with submitted(number, *words, python=python, task=task, last=last) as script:
        script.wait()
    return Path(f"slurm-{number}.out")


def submitted(
    number: int, *words: object, python: str = sys.executable, task: int | None = None, last: int = 1, **more: str
) -> subprocess.Popen[bytes]:
    told = {**os.environ, "SLURM_JOB_ID": str(number), "SLURM_CPUS_PER_TASK": "1", "DDPM_LAB_PYTHON": python, **more}
    if task is not None:
        told |= {"SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MAX": str(last)}
    with Path(f"slurm-{number}.out").open("wb") as file:
        return subprocess.Popen(["/bin/bash", SCRIPT, *map(str, words)], env=told, stdout=file, stderr=file)


def line(*runs: Summary) -> str:
    return json.dumps({RUNS: [run.as_json() for run in runs]})


def test_each_task_gets_its_words(work: Path, tmp_path: Path) -> None:
    """No text of the user's is read by a shell."""
    lab = program(tmp_path / "python", f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    words = ("run", "amp", "--data", ODD, "--", "--seed", 1, "--", "--skip-bad")
    for task, own in enumerate((["--seed", "1"], ["--skip-bad"])):
        log = job(42 + task, *words, python=lab, task=task)
        expected = ["-m", "ddpm_lab", "run", f"--output-dir=slurm-{42 + task}", "amp", "--data", ODD, *own]
        assert json.loads(log.read_text()) == expected
    for other in (0, 1, 2, None):  # of an array that begins at 1, or has one task too many; and of none
        said = job(50, *words, python=lab, task=other, last=2).read_text()
        assert said == "slurm.sh: 2 parts begin with --, for the tasks of --array=0-1\n"
    alone = json.loads(job(7, "train", "--steps", 5, python=lab).read_text())
    assert alone == ["-m", "ddpm_lab", "train", "--output-dir=slurm-7", "--steps", "5"]
    assert not (work / "made").exists()


# --- logs ------------------------------------------------------------------------------------------------------------

WRONG = [f'{{"{RUNS}": [{{"seconds": {value}}}]}}' for value in ('"x"', "-1", "NaN")]


def test_what_a_job_tells_is_read_back(tmp_path: Path) -> None:
    """Between other lines, after the number that ``srun --label`` gives it; a line that was cut off is left out."""
    log, run = tmp_path / "slurm-7.out", Summary(log=str(tmp_path / "slurm-7.out"))
    runs = [dataclasses.replace(run, seconds=1.5, gpus=2), dataclasses.replace(run, loss=0.25, note='a "b"')]
    lines = [
        *WRONG,
        f'{{"{RUNS}": 3}}',
        "0: " + line(*runs) + "\x1b[0m",
        "RuntimeError",
        line(runs[0]),
        line(runs[1])[:40],
    ]
    log.write_text("\n".join(lines))
    assert read_log(log) == [*runs, runs[0]]


def test_only_a_job_tells(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    tell([Summary(seconds=1.0)])
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    tell([Summary(seconds=1.0, loss=float("nan"))])
    (run,) = json.loads(capsys.readouterr().err)[RUNS]
    assert (run["seconds"], run["loss"]) == (1.0, None)


# --- collection ------------------------------------------------------------------------------------------------------


def held(path: Path) -> list[RunRecord]:
    records, damaged = Ledger(path).read()
    assert damaged == []
    return records


def test_every_record_is_collected_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """While jobs write, and two records that differ in one value are two."""
    logs, output = [tmp_path / f"slurm-{job}.out" for job in (42, 43)], tmp_path / "all.jsonl"
    first, second = (Ledger(log.with_suffix("") / LEDGER) for log in logs)
    first.append(SETS[:4])
    other = dataclasses.replace(SETS[0], label="another")
    second.append([SETS[0], other])
    assert append_new(logs, output) == 5
    before = output.read_bytes()
    assert append_new(logs, output) == 0
    assert output.read_bytes() == before
    with first.path.open("a") as file:
        file.write('{"set_id": "torn')
    first.append(SETS[3:])
    assert append_new(logs, output) == len(SETS) - 4
    assert "line 5" in capsys.readouterr().err
    assert held(output) == [*SETS[:4], other, *SETS[4:]]


@pytest.mark.usefixtures("work")
def test_the_table_of_jobs(call: Call, tmp_path: Path) -> None:
    assert call("collect")[0] == 2, "there is no log"
    for number, gpus, seconds in ((42, 1, 362.45), (43, 4, 95.23)):
        values: dict[str, Any] = {"gpus": gpus, "nodes": 1, "seconds": seconds, "epoch_seconds": seconds, "loss": 0.12}
        Path(f"slurm-{number}.out").write_text(line(Summary(job_id=str(number), configuration='one, "two"', **values)))
    assert call("collect", "--output-dir", tmp_path)[0] == 0
    Path("slurm-44.out").write_text("RuntimeError: no \x1b[31mkernel\n")
    code, out, err = call("collect", "--output-dir", tmp_path, "--json")
    assert (code, err) == (1, f"0 new records: {tmp_path / LEDGER}\n")
    found = json.loads(out)
    assert [run["speed_up"] for run in found["runs"]] == [None, pytest.approx(3.81, abs=0.005), None]
    assert [run["seconds"] for run in found["runs"]] == [362.45, 95.23, None]
    assert "RuntimeError: no" in found["runs"][2]["note"]


@pytest.mark.slow
def test_a_job_of_two_nodes_and_one_that_nears_its_time_limit(work: Path, call: Call, tmp_path: Path) -> None:
    """The first with one rank from the torchrun of each node; the second saves, and waits in the queue to go on."""
    prepare("synthetic", tmp_path / "data", image_size=8)
    settings = ("--network", "tiny", "--image-size", 8, "--batch-size", 4, "--sample-every", 0, "--no-probe")
    train = ("train", "--data", tmp_path / "data", *settings, "--steps")
    with submitted(7, *train, 4, "--world-size", 2, SLURM_JOB_NUM_NODES="2", GLOO_SOCKET_IFNAME="lo") as both:
        assert both.wait(300) == 0, Path("slurm-7.out").read_text()
    with submitted(8, *train, 20_000, DDPM_LAB_REQUEUE="1") as long:
        log = work / "slurm-8" / "log.jsonl"
        wait_for(lambda: log.is_file() and log.stat().st_size)
        long.send_signal(signal.SIGTERM)
        assert long.wait(60)
    assert "requeue 8" in Path("said").read_text()
    saved = int(re.findall(r"SIGTERM, saved after step ([\d,]+)", Path("slurm-8.out").read_text())[0].replace(",", ""))
    assert max(Path("slurm-8/checkpoints").iterdir()).name == f"step-{saved:08d}.pt"
    (run, _) = json.loads(call("collect", "--output-dir", tmp_path, "--json")[1])["runs"]
    assert (run["job_id"], run["ranks"], run["steps"]) == ("7", 2, 4)
