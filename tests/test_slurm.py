"""Jobs on SLURM, from submission to the table: with stand-ins for its programs, and with a real one of two nodes."""

from __future__ import annotations

import csv
import dataclasses
import json
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
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpm_lab.config import RunConfig
from ddpm_lab.data.packed import prepare
from ddpm_lab.files import CHECKOUT, LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.record import RunRecord
from ddpm_lab.reports import slurm
from ddpm_lab.reports.slurm import append_new, read_log, states
from ddpm_lab.reports.summary import NO_SUMMARY, RUNS, Summary, tell

ODD = """it's a "job" $(touch made) `touch made` %j;&\\ --"""
SBATCH = """
import json, os, subprocess, sys
words = sys.argv[1:]
json.dump(words, open("words.json", "w"))
if "--account=none" in words: sys.exit("sbatch: error: Batch job submission failed: Invalid account")
at = next(i for i, word in enumerate(words) if word.endswith("slurm.sh"))
last = next((int(word.rpartition("-")[2]) for word in words[:at] if word.startswith("--array")), -1)
for task in range(max(last, 0) + 1):
    job = 42 + task
    array = {"SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": str(task)} if last >= 0 else {}
    with open(f"slurm-{job}.out", "wb") as log:
        told = {**os.environ, **array, "SLURM_JOB_ID": str(job), "SLURM_CPUS_PER_TASK": "1"}
        subprocess.run(["/bin/bash", *words[at:]], env=told, stdout=log, stderr=log)
print("42;east")
"""
SRUN = '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n'
SETS = make.sets({"bf16": (RunConfig(precision="bf16"), 1.2)}, count=3, turns=2)


def program(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for sbatch, which runs jobs at once, and srun; SLURM's other programs are not here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program(folder / "sbatch", f"#!{sys.executable}\n{SBATCH}")
    program(folder / "srun", SRUN)
    for name in ("bash", "cut", "hostname"):
        (folder / name).symlink_to(Path("/bin", name))
    monkeypatch.setenv("PATH", str(folder))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the lab in jobs, which prints the words that reach it."""
    text = f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    monkeypatch.setattr(sys, "executable", program(tmp_path / "python", text))


def words_of(job: int) -> Any:
    return json.loads(Path(f"slurm-{job}.out").read_text())


def line(*runs: Summary) -> str:
    return json.dumps({RUNS: [run.as_json() for run in runs]})


# --- submission ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("bin_folder", "lab")
def test_each_task_gets_its_words(call: Call) -> None:
    """No text of the user's is read by a shell."""
    options = ("--gpus-per-node", 2, "--sbatch", "--time=2:00:00 --comment='a b'", "--json")
    code, out, err = call("submit", *options, "--", "run", "amp", "--data", ODD, "--", "--seed", 1, "--", "--skip-bad")
    assert (code, json.loads(out), err) == (0, {"job_id": "42", "tasks": 2}, "")
    common = ["--nodes=1", "--cpus-per-task=8", "--gpus-per-node=2", "--array=0-1", "--time=2:00:00", "--comment=a b"]
    assert json.loads(Path("words.json").read_text())[: len(common) + 2] == ["--parsable", *common, str(slurm.SCRIPT)]
    start = ["-m", "ddpm_lab", "run"]
    assert words_of(42) == [*start, "--output-dir=slurm-42", "amp", "--data", ODD, "--seed", "1"]
    assert words_of(43) == [*start, "--output-dir=slurm-43", "amp", "--data", ODD, "--skip-bad"]
    assert call("submit", "--", "train", "--steps", 5)[0] == 0
    assert words_of(42) == ["-m", "ddpm_lab", "train", "--output-dir=slurm-42", "--steps", "5"]
    assert not Path("made").exists()


REFUSED = {
    "": "no command",
    "-- report": "'report'",
    "-- run sums": "'sums'",
    "-- run amp --output-dir x": "--output-dir",
    "-- run amp -- --seed 1 -- --colour": "--colour",
    "-- run amp --help": "--help",
    "--nodes 2 -- check": "'check'",
    "--gpus-per-node -1 -- run amp": "--gpus-per-node is -1",
    "--sbatch ' -- run amp": "--sbatch",
    "--sbatch=--account=none -- run amp": "Invalid account",
}


@pytest.mark.usefixtures("bin_folder", "lab")
def test_what_cannot_run_is_refused_in_one_sentence(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, named in REFUSED.items():
        code, out, err = call("submit", *arguments.split())
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert named in err
    assert not list(Path().glob("slurm-*"))
    assert call("collect")[0] == 2, "there is no log"
    monkeypatch.setenv("PATH", "")
    assert call("submit", "--", "run", "amp")[0] == 2


# --- logs ------------------------------------------------------------------------------------------------------------

NUMBERS = st.none() | st.floats(0, 1e7)
COUNTS = st.none() | st.integers(0, 64)
SUMMARIES = st.builds(
    Summary,
    configuration=st.none() | st.text(max_size=9),
    note=st.text(max_size=9),
    **dict.fromkeys(("gpus", "ranks", "nodes", "steps"), COUNTS),
    **dict.fromkeys(("epochs", "seconds", "loss", "gpu_percent"), NUMBERS),
)
WRONG = [f'{{"{RUNS}": [{{"seconds": {value}}}]}}' for value in ('"x"', "-1", "NaN", "[]", "1" * 5000)]
NOISE = st.sampled_from([*WRONG, f'{{"{RUNS}": 3}}', "\x1b[1mx\x1b[0m"]) | st.binary(max_size=99).map(bytes.hex)


@settings(max_examples=15)
@given(st.lists(st.lists(SUMMARIES, min_size=1, max_size=3), min_size=1, max_size=3), NOISE, st.integers(0, 9))
def test_what_a_job_tells_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, tasks: list[list[Summary]], noise: str, cut: int
) -> None:
    """Between other lines, after the number that ``srun --label`` gives it; a line that was cut off is left out."""
    log = tmp_path_factory.mktemp("log") / "slurm-7.out"
    lines = [text for runs in tasks for text in (noise, f"0: {line(*runs)}\x1b[0m")]
    log.write_text("\n".join([*lines, f"{line(Summary())}"[: 20 + cut]]))
    assert read_log(log) == [dataclasses.replace(run, log=str(log)) for runs in tasks for run in runs]


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


def test_the_table_of_jobs_and_their_states(call: Call, bin_folder: Path, tmp_path: Path) -> None:
    assert states(["42"]) == {}
    program(bin_folder / "squeue", "#!/bin/bash\necho '42|RUNNING'\necho '43|COMPLETING'\n")
    program(bin_folder / "sacct", "#!/bin/bash\necho 'Slurm accounting storage is disabled' >&2\nexit 1\n")
    assert states(["42"])["42"] == "RUNNING"
    assert states(["odd name"]) == {}
    program(bin_folder / "sacct", '#!/bin/bash\necho "42|COMPLETED"\necho "43|CANCELLED by 0"\necho "44|TIMEOUT"\n')
    assert states(["42", "43", "44"]) == {"42": "COMPLETED", "43": "CANCELLED", "44": "TIMEOUT"}
    for job, gpus, seconds in ((42, 1, 362.45), (43, 4, 95.23)):
        run = Summary(job_id=str(job), configuration='one, "two"', gpus=gpus, nodes=1, seconds=seconds, loss=0.12)
        Path(f"slurm-{job}.out").write_text(line(run))
    Path("slurm-44.out").write_text("RuntimeError: no \x1b[31mkernel\n")
    code, out, err = call("collect", "--output-dir", tmp_path, "--json", "--csv", "table.csv")
    assert (code, err) == (1, f"0 new records: {tmp_path / LEDGER}\n")
    found = json.loads(out)
    assert [run["speed_up"] for run in found["runs"]] == [None, pytest.approx(3.81, abs=0.005), None]
    assert [run["seconds"] for run in found["runs"]] == [362.45, 95.23, None]
    assert all(part in found["runs"][2]["note"] for part in ("timeout", "RuntimeError: no"))
    with Path("table.csv").open(newline="") as file:
        table = [(row["Configuration"], row["Time (s)"]) for row in csv.DictReader(file)]
    assert table == [('one, "two"', "362.45"), ('one, "two"', "95.23"), (NO_SUMMARY, "")]
    assert call("collect", "slurm-42.out", "--output-dir", tmp_path)[0] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("bin_folder")
def test_submitted_and_collected(call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real lab, in a job of the real script."""
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    single = ("multi_gpu", "--preset", "smoke", "--world-sizes", 1, "--data", data, "--image-size", 8)
    assert call("submit", "--", "run", *single, "--batch-sizes", 8)[0] == 0
    code, out, err = call("collect", "slurm-42.out", "--json", "--output-dir", tmp_path)
    records = held(tmp_path / LEDGER)
    assert (code, len(records)) == (0, int(err.split()[0])), Path("slurm-42.out").read_text()
    assert {r.environment.slurm_job_id for r in records} == {"42"}
    (run,) = json.loads(out)["runs"]
    assert run["seconds"] == pytest.approx(sum(w.seconds for r in records if r.role == "baseline" for w in r.windows))


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
    prepare("synthetic", tmp_path / "data", image_size=8)

    def submitted(*arguments: object, minutes: int = 5) -> str:
        return str(json.loads(call("submit", "--json", f"--sbatch=--time={minutes}", *arguments)[1])["job_id"])

    train = ("train", "--data", tmp_path / "data", "--image-size", 8, "--batch-size", 4, "--sample-every", 0)
    monkeypatch.setenv("DDPM_LAB_REQUEUE", "1")
    long = submitted("--", *train, "--steps", 10**6, minutes=2)
    monkeypatch.delenv("DDPM_LAB_REQUEUE")
    both = submitted("--nodes", 2, "--", *train, "--world-size", 2, "--steps", 4)
    single = ("multi_gpu", "--preset", "smoke", "--world-sizes", 1, "--data", tmp_path / "data", "--image-size", 8)
    array = submitted("--gpus-per-node", 1, "--", "run", *single, "--", "--device", "cpu", "--", "--device", "cuda")

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
    assert failed["note"].startswith("failed; no summary found; its last line: ddpm-lab: ")
    assert {r.environment.slurm_job_id for r in held(tmp_path / LEDGER)} == set(told) - {failed["job_id"]}
    # It saved before its time limit, and waits in the queue to go on from there.
    saved = int(re.findall(r"SIGTERM, saved after step ([\d,]+)", logs[f"slurm-{long}"])[0].replace(",", ""))
    assert max(Path(f"slurm-{long}/checkpoints").iterdir()).name == f"step-{saved:08d}.pt"
    assert found[long]["note"].startswith("pending")
    assert not list(tmp_path.rglob("made")), "a shell has read a name"
