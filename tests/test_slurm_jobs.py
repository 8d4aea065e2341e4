"""How a job ended, from SLURM's own words, from what its script wrote, from its log."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.slurm_jobs import Told, _numbers, ask, ending, tail

SHOWN = """\
JobId=5 ArrayJobId=4 ArrayTaskId=1 JobName=x JobState=COMPLETED ExitCode=0:0
   UserId=root(0) GroupId=root(0) MCS_label=N/A
   JobState={state} Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}
   RunTime=00:00:10 TimeLimit=00:01:00 TimeMin=N/A
   WorkDir=/a   JobState=RUNNING

JobId=4 ArrayJobId=4 ArrayTaskId=3-4,7%2 JobName=x
   JobState=PENDING Reason=None Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:00 TimeLimit=00:01:00 TimeMin=N/A
   \n
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of programs that stand in for SLURM's, and nothing else is found."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def says(folder: Path, text: str) -> None:
    (folder / "answer").write_text(text)
    program(folder, "scontrol", f"/bin/cat {folder}/answer")


def test_tasks_of_an_array_are_told_apart(slurm: Path) -> None:
    """Whatever a job's name or folder says."""
    says(slurm, SHOWN.format(state="FAILED", code="3:0"))
    waiting = Told(state="PENDING", exit_code="0:0", limit="00:01:00")
    assert ask("4") == {
        "4_1": Told(state="FAILED", exit_code="3:0", limit="00:01:00"),
        **dict.fromkeys(("4_3", "4_4", "4_7"), waiting),
    }


def test_accounting_knows_what_the_controller_forgot(slurm: Path) -> None:
    program(slurm, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert ask("4") == {}
    program(slurm, "sacct", "echo '4_0|CANCELLED by 0|0:15|00:05:00'; echo '4_[1-9]|PENDING|0:0|'")
    assert ask("4") == {"4_0": Told(state="CANCELLED", exit_code="0:15", limit="00:05:00")}
    program(slurm, "sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")
    assert ask("4") == {}


@given(st.sets(st.integers(0, 50), min_size=1))
def test_numbers_of_tasks(numbers: set[int]) -> None:
    assert set(_numbers(",".join(map(str, sorted(numbers))) + "%3")) == numbers
    assert list(_numbers(f"{min(numbers)}-{max(numbers)}")) == list(range(min(numbers), max(numbers) + 1))


@pytest.mark.parametrize(
    ("state", "code", "status", "words"),
    [
        ("COMPLETED", "0:0", "ok", "completed"),
        ("RUNNING", "0:0", None, "running"),
        ("REQUEUE_HOLD", "0:0", None, "requeue_hold"),
        ("TIMEOUT", "0:15", "timed out", "reached its time limit of 00:01:00"),
        ("CANCELLED", "0:15", "cancelled", "was cancelled"),
        ("OUT_OF_MEMORY", "0:125", "oom", "more memory"),
        ("NODE_FAIL", "0:0", "crashed", "lost its node"),
        ("FAILED", "2:0", "crashed", "failed with exit code 2; its log ends: the last words"),
        ("FAILED", "0:9", "crashed", "killed by signal 9"),
    ],
)
def test_states_of_slurm(tmp_path: Path, state: str, code: str, status: str | None, words: str) -> None:
    found = ending(Told(state=state, exit_code=code, limit="00:01:00"), "", tmp_path / "state", ["the last words"])
    assert found.status == status
    assert words in found.reason


STARTED, SIGNALLED = "started 2026-01-01T00:00:00 5\n", "signalled 2026-01-01T00:00:01\n"
BEFORE = f"{STARTED}{SIGNALLED}requeued 2026-01-01T00:00:01\nended 2026-01-01T00:00:02 143\n"


@pytest.mark.parametrize(
    ("state", "log", "silent", "told"),
    [
        (f"{STARTED}ended 2026-01-01T00:00:02 0\n", [], "", ("ok", "completed")),
        (f"{STARTED}ended 2026-01-01T00:00:02 3\n", ["why"], "", ("crashed", "exit code 3; its log ends: why")),
        (f"{STARTED}{SIGNALLED}ended 2026-01-01T00:00:02 143\n", [], "", ("timed out", "told to stop")),
        (f"{STARTED}ended 2026-01-01T00:00:02 0\n", [], "no scontrol here", ("ok", "completed")),
        (f"{BEFORE}{STARTED}ended 2026-01-01T00:00:02 0\n", [], "", ("ok", "completed")),
        (BEFORE, [], "", ("crashed", "put back into the queue and did not run again")),
        (BEFORE, [], "no scontrol here", (None, "no scontrol here")),
        (STARTED, [], "", ("crashed", "was killed before its script could end, and SLURM has forgotten it")),
        (STARTED, [], "no scontrol here", (None, "unknown: no scontrol here")),
        (STARTED, ["*** JOB 5 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***"], "", ("timed out", "time limit")),
        (STARTED, ["slurmstepd: error: Detected 1 oom_kill event"], "", ("oom", "memory")),
        (f"{STARTED}ended 20", [], "", ("crashed", "killed before")),
        ("", [], "", ("crashed", "never started, and SLURM has forgotten it")),
        (None, [], "", ("crashed", "never started")),
        (None, [], "no scontrol here", (None, "no scontrol here")),
    ],
)
def test_a_job_that_slurm_has_forgotten(
    tmp_path: Path, state: str | None, log: list[str], silent: str, told: tuple[str | None, str]
) -> None:
    file = tmp_path / "state"
    if state is not None:
        file.write_text(state)
    found = ending(None, silent, file, log)
    assert found.status == told[0]
    assert told[1] in found.reason


def test_the_tail_of_a_log_of_any_length(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == []
    log.write_bytes(
        b"x" * 200_000 + b"\n" + b"".join(b"\x1b[31mline %d\x1b[0m \r\n\n" % i for i in range(1000)) + b"cut \xff"
    )
    assert tail(log) == [*(f"line {i}" for i in range(991, 1000)), "cut ÿ"]


def test_state_files_are_as_the_scripts_write_them(tmp_path: Path) -> None:
    """The script's own words, from a job that needs no SLURM: one node, a command that fails, SIGTERM."""
    scripts = Path(__file__).resolve().parents[1] / "slurm"
    results = tmp_path / "a folder" / "task-0"
    results.mkdir(parents=True)
    (results / "arguments").write_bytes(b"train\0--name=it's $(touch made)\0")
    lab = tmp_path / "python"
    lab.write_text(
        '#!/bin/bash\nprintf "[%s]" "$@"; echo\ntrap "exit 143" TERM\nfor i in {1..300}; do sleep 0.1; done\n'
    )
    lab.chmod(0o755)
    environment = {
        **{"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "5", "DDPM_LAB_PYTHON": str(lab)},
        **{"DDPM_LAB_SLURM": str(scripts), "DDPM_LAB_TASKS": str(results.parent)},
    }
    words = ["/bin/bash", str(scripts / "one_gpu.sh")]
    with subprocess.Popen(words, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        said = [job.stdout.readline() for _ in range(4)]
        assert said == [
            "Job ID: 5\n",
            "Nodes: 1\n",
            "GPUs per node: 0\n",
            "[-m][ddpm_lab][train][--name=it's $(touch made)]\n",
        ]
        assert ending(None, "", results / "state", []).reason.startswith("was killed before its script")
        time.sleep(0.1)
        job.terminate()
        assert job.wait(30) == 143
    found = ending(None, "", results / "state", [])
    assert (found.status, found.exit_code) == ("timed out", "143:0")
    assert not (tmp_path / "made").exists()
