"""Jobs on SLURM, from the job script to the table: with a stand-in for srun, and with a real one of two nodes."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import records as make
import slurm_cluster
from conftest import Call

from ddpm_lab.config import RunConfig
from ddpm_lab.data.packed import prepare
from ddpm_lab.files import CHECKOUT, LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.record import RunRecord
from ddpm_lab.reports.summary import RUNS, Summary, append_new, read_log, tell

SCRIPT = CHECKOUT / "scripts" / "slurm.sh"
ODD = """it's a "job" $(touch made) `touch made` %j;&\\ --"""
SRUN = '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n'
SETS = make.sets({"bf16": (RunConfig(precision="bf16"), 1.2)}, count=3, turns=2)


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to submit from, with a stand-in for srun and without SLURM's other programs."""
    (bin_folder := tmp_path / "bin").mkdir()
    program(bin_folder / "srun", SRUN)
    for name in ("bash", "cut", "hostname"):
        (bin_folder / name).symlink_to(Path("/bin", name))
    monkeypatch.setenv("PATH", str(bin_folder))
    (folder := tmp_path / "work").mkdir()
    monkeypatch.chdir(folder)
    return folder


def job(number: int, *words: object, python: str = sys.executable, task: int | None = None, last: int = 1) -> Path:
    """Run the job script as SLURM does; returns the log."""
    log = Path(f"slurm-{number}.out")
    told = {**os.environ, "SLURM_JOB_ID": str(number), "SLURM_CPUS_PER_TASK": "1", "DDPM_LAB_PYTHON": python}
    if task is not None:
        told |= {"SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_TASK_MAX": str(last)}
    with log.open("wb") as file:
        subprocess.run(["/bin/bash", SCRIPT, *map(str, words)], env=told, stdout=file, stderr=file, check=False)
    return log


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

WRONG = [f'{{"{RUNS}": [{{"seconds": {value}}}]}}' for value in ('"x"', "-1", "NaN", "1" * 5000)]


def test_what_a_job_tells_is_read_back(tmp_path: Path) -> None:
    """Between other lines, after the number that ``srun --label`` gives it; a line that was cut off is left out."""
    log, run = tmp_path / "slurm-7.out", Summary(log=str(tmp_path / "slurm-7.out"))
    runs = [dataclasses.replace(run, seconds=1.5, gpus=2), dataclasses.replace(run, loss=0.25, note='a "b"')]
    told = ["0: " + line(*runs) + "\x1b[0m", "RuntimeError", line(runs[0]), line(runs[1])[:40]]
    log.write_text("\n".join([*WRONG, f'{{"{RUNS}": 3}}', *told]))
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
    twice = call("collect", "slurm-42.out", Path("slurm-42.out").absolute(), "--output-dir", tmp_path, "--json")
    assert len(json.loads(twice[1])["runs"]) == 1, "a log that is named twice"


# --- a real SLURM ----------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    if why := slurm_cluster.missing():
        pytest.skip(why)
    with slurm_cluster.cluster() as folder:
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        yield folder
    assert slurm_cluster.left(folder) == [], "something of the cluster is left"


@pytest.mark.slow
def test_a_cluster_of_two_nodes(call: Call, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = tmp_path / """it's a "job" $(touch made)"""
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    monkeypatch.setenv("DDPM_LAB_PYTHON", sys.executable)
    prepare("synthetic", tmp_path / "data", image_size=8)

    def submitted(*words: object, options: tuple[str, ...] = (), minutes: int = 5) -> str:
        command = ["sbatch", "--parsable", f"--time={minutes}", *options, str(SCRIPT), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return done.stdout.strip().partition(";")[0]

    small = "--network tiny --image-size 8 --batch-size 4 --sample-every 0"
    train = ("train", "--data", tmp_path / "data", *small.split())
    monkeypatch.setenv("DDPM_LAB_REQUEUE", "1")
    long = submitted(*train, "--steps", 10**6, minutes=2)
    monkeypatch.delenv("DDPM_LAB_REQUEUE")
    both = submitted(*train, "--world-size", 2, "--steps", 4, options=("--nodes=2",))
    single = ("multi_gpu", "--preset", "smoke", "--world-sizes", 1, "--data", tmp_path / "data", "--image-size", 8)
    tasks = ("--", "--device", "cpu", "--", "--device", "cuda")
    array = submitted("run", *single, *tasks, options=("--gpus-per-node=1", "--array=0-1"))

    def ended() -> bool:
        queue = subprocess.run(["squeue", "--noheader", "--format=%A|%T"], capture_output=True, text=True, check=True)
        return [row.partition("|")[0] for row in queue.stdout.split()] == [long] and "PENDING" in queue.stdout

    slurm_cluster.wait_for(ended, cluster, 270)
    logs = {log.stem: log.read_text(errors="replace") for log in Path().glob("slurm-*.out")}
    found = {run["job_id"]: run for run in json.loads(call("collect", "--output-dir", tmp_path, "--json")[1])["runs"]}
    assert (found[both]["ranks"], found[both]["steps"]) == (2, 4), logs  # one rank from the torchrun of each node
    assert found[both]["seconds"] > 0
    assert Path(f"slurm-{both}/checkpoints/step-00000004.pt").is_file()
    told = sorted(found.keys() - {long, both})
    assert array in told
    assert [found[job]["seconds"] is None for job in told].count(True) == 1, logs
    failed = next(found[job] for job in told if found[job]["seconds"] is None)
    assert failed["note"].startswith("no summary found; its last line: ddpm-lab: ")
    assert {r.environment.slurm_job_id for r in held(tmp_path / LEDGER)} == set(told) - {failed["job_id"]}
    # It saved before its time limit, and waits in the queue to go on from there.
    saved = int(re.findall(r"SIGTERM, saved after step ([\d,]+)", logs[f"slurm-{long}"])[0].replace(",", ""))
    assert max(Path(f"slurm-{long}/checkpoints").iterdir()).name == f"step-{saved:08d}.pt"
    assert not list(tmp_path.rglob("made")), "a shell has read a name"
