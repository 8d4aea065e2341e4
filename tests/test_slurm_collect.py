"""Collecting: whole sets, once each, whatever state the jobs and their ledgers are in; failures become rows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import records as make
from conftest import Call
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.frames import study
from ddpm_lab.files import LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.record import JOB, RunRecord
from ddpm_lab.slurm import Submission, Task
from ddpm_lab.slurm_collect import collect, whole_sets

BASE, FAST = RunConfig(), RunConfig(precision="bf16")
SETS = make.sets({"bf16": (FAST, 1.2)}, count=3, turns=2)
NOTE = make.record(BASE, role="note", set_id="", status="left out", reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A SLURM that has forgotten every job."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "scontrol"
    program.write_text("#!/bin/bash\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return program


def submission(
    folder: Path, tasks: int = 1, job_id: str | None = "12", command: tuple[str, ...] = ("run", "amp")
) -> Submission:
    made = Submission(
        folder=folder,
        job_id=job_id,
        tasks=tuple(Task(arguments=(*command, f"--seed={i}")) for i in range(tasks)),
        sbatch=("sbatch",),
        date="2026-01-03T10:00:00+00:00",
    )
    for i in range(tasks):
        made.results(i).mkdir(parents=True)
    made.write()
    return made


def ended(made: Submission, task: int, code: int = 0, log: str = "") -> None:
    (made.results(task) / "state").write_text(f"started 2026-01-03T10:00:00 12\nended 2026-01-03T10:01:00 {code}\n")
    made.log(task).write_text(log)


def held(output: Path) -> list[RunRecord]:
    records, damaged = Ledger(output / LEDGER).read()
    assert damaged == []
    return records


def test_tasks_of_an_array_come_together_once(tmp_path: Path) -> None:
    made = submission(tmp_path / "jobs" / "a", tasks=2)
    Ledger(made.results(0) / LEDGER).append([*SETS[:4], NOTE])
    ended(made, 0)
    Ledger(made.results(1) / LEDGER).append(SETS[4:])
    ended(made, 1)
    output = tmp_path / "all"
    first = collect(tmp_path / "jobs", output)
    # Four lines are a set and a part of the next.
    assert [(c.job_id, c.found, c.added, c.failed) for c in first] == [("12_0", 4, 4, False), ("12_1", 3, 3, False)]
    assert {r.set_id for r in held(output) if r.set_id} == {SETS[0].set_id, SETS[-1].set_id}
    before = (output / LEDGER).read_bytes()
    assert [c.added for c in collect(made.folder, output)] == [0, 0]
    assert (output / LEDGER).read_bytes() == before
    # What came meanwhile is added, and nothing else.
    Ledger(made.results(0) / LEDGER).append(SETS[3:6])
    assert [c.added for c in collect(made.folder, output)] == [3, 0]


TEXTS = [json.dumps(r.as_dict(), separators=(",", ":")) + "\n" for r in SETS]


@given(st.integers(0, len("".join(TEXTS))))
def test_a_set_counts_if_all_its_lines_are_there(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    """Wherever a full disk, or a writer that is not ready, has cut the file."""
    path = tmp_path_factory.mktemp("job") / "ledger.jsonl"
    path.write_text("".join(TEXTS)[:length])
    lines = path.read_text().splitlines()
    whole = sum(line == text.strip() for line, text in zip(lines, TEXTS, strict=False))
    sets = {r.set_id for r in SETS[: whole // 3 * 3]}
    torn = lines[whole] if whole < len(lines) else ""
    if torn and '",' not in torn[:60] and whole:  # it does not say whose line it is
        sets.discard(SETS[whole - 1].set_id)
    if not torn and whole % 3 == 2:  # nothing tells that there was to be a candidate
        sets.add(SETS[whole].set_id)
    assert {r.set_id for r in whole_sets(path)} == sets


@pytest.mark.parametrize(
    ("state", "status", "words"),
    [
        ("ended 2026-01-03T10:01:00 3\n", "crashed", "failed with exit code 3; its log ends: RuntimeError: no"),
        ("signalled 2026-01-03T10:01:00\nended 2026-01-03T10:01:01 143\n", "timed out", "told to stop"),
        ("", "crashed", "was killed before its script could end"),
    ],
)
def test_a_failure_is_one_row(call: Call, tmp_path: Path, state: str, status: str, words: str) -> None:
    made = submission(tmp_path / "jobs" / "a")
    (made.results(0) / "state").write_text(f"started 2026-01-03T10:00:00 12\n{state}")
    made.log(0).write_text("\n".join(f"line {i}" for i in range(30)) + "\nRuntimeError: \x1b[31mno\x1b[0m\n")
    for _ in range(3):
        code, out, err = call("slurm", "collect", made.folder, "--output-dir", tmp_path)
        assert (code, err) == (1, "")
    assert out.splitlines()[0].startswith(f"job 12, run amp --seed=0: {status}: ")
    assert "  | RuntimeError: no" in out.splitlines()
    (row,) = held(tmp_path)
    assert (row.role, row.status, row.experiment, row.label) == (JOB, status, "amp", "run amp --seed=0")
    assert words in str(row.reason)
    assert row.witness["log_tail"] == [*(f"line {i}" for i in range(21, 30)), "RuntimeError: no"]


def test_rows_of_jobs_change_no_answer(tmp_path: Path) -> None:
    """Where a job failed nobody knows what ran: it is no machine, no cohort, no configuration."""
    made = submission(tmp_path / "jobs")
    ended(made, 0, code=1)
    collect(tmp_path / "jobs", tmp_path)
    (row,) = held(tmp_path)
    later = dataclasses.replace(row, environment=dataclasses.replace(row.environment, date="2099-01-01T00:00:00+00:00"))
    assert study([*SETS, later], "amp").records == study(SETS, "amp").records


def test_what_was_measured_before_a_failure_stays(tmp_path: Path) -> None:
    made = submission(tmp_path / "jobs")
    Ledger(made.results(0) / LEDGER).append(SETS[:3])
    ended(made, 0, code=1)
    collect(tmp_path / "jobs", tmp_path)
    records = held(tmp_path)
    assert [r.role for r in records] == ["baseline", "twin", "candidate", JOB]
    assert records[-1].environment.machine == SETS[0].environment.machine


def test_a_cluster_that_does_not_answer_fails_nobody(call: Call, tmp_path: Path, forgotten: Path) -> None:
    made = submission(tmp_path / "jobs")
    (made.results(0) / "state").write_text("started 2026-01-03T10:00:00 12\n")
    forgotten.write_text("#!/bin/bash\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n")
    code, out, _ = call("slurm", "collect", made.folder, "--output-dir", tmp_path, "--json")
    (job,) = json.loads(out)["jobs"]
    assert (code, job["status"]) == (0, None)
    assert "Unable to contact slurm controller" in job["reason"]
    forgotten.unlink()
    code, out, _ = call("slurm", "collect", made.folder, "--output-dir", tmp_path, "--json")
    assert "there is no scontrol here" in json.loads(out)["jobs"][0]["reason"]
    assert not (tmp_path / LEDGER).exists()


@pytest.mark.parametrize("broken", ["{", "[]", '{"job_id": 1}'])
def test_a_folder_without_a_submission_is_refused(call: Call, tmp_path: Path, broken: str) -> None:
    def refused(folder: Path, words: str) -> None:
        code, out, err = call("slurm", "collect", folder, "--output-dir", tmp_path)
        assert (code, out) == (2, "")
        assert words in err
        assert len(err.splitlines()) == 1

    refused(tmp_path / "none", "has no submission")
    (tmp_path / "submission.json").write_text(broken)
    refused(tmp_path, "submission.json cannot be read")


def test_what_sbatch_never_accepted_is_passed_over(tmp_path: Path) -> None:
    submission(tmp_path / "jobs", job_id=None)
    assert collect(tmp_path / "jobs", tmp_path) == []


def test_only_what_may_be_the_same_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger may be large."""
    made = submission(tmp_path / "jobs")
    Ledger(made.results(0) / LEDGER).append(SETS[:3])
    ended(made, 0)
    others = [dataclasses.replace(r, experiment="workers") for r in SETS]
    Ledger(tmp_path / LEDGER).append(others)
    read: list[str] = []
    original = RunRecord.from_dict

    def noted(values: dict[str, Any]) -> RunRecord:
        read.append(values["experiment"])
        return original(values)

    monkeypatch.setattr(RunRecord, "from_dict", noted)
    collect(tmp_path / "jobs", tmp_path)
    assert set(read) == {"amp"}
