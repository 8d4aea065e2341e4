"""Submitting: what sbatch and the tasks are told, to the letter, and what is refused before anything is submitted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Call
from hypothesis import given
from hypothesis import strategies as st

from ddpm_lab.checks import ConfigError
from ddpm_lab.slurm import SCRIPTS, Request, read_submission, tasks_of

ODD = """it's a "job" $(touch made) `touch made` %j;&\\"""


@pytest.fixture
def sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for sbatch that writes down its words and its environment; the folder where they lie is the work's."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "sbatch"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], dict(os.environ)], open({str(tmp_path / 'told')!r}, 'w'))\n"
        "if 'refuse' in os.environ: sys.exit('sbatch: error: Batch job submission failed: Invalid account')\n"
        "print('42;east')\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    return tmp_path


def told(folder: Path) -> tuple[list[str], dict[str, str]]:
    words, environment = json.loads((folder / "told").read_text())
    return words, environment


def read_as_the_script_does(arguments: Path) -> list[str]:
    """By the very line of the job script."""
    (line,) = [line for line in (SCRIPTS / "job.sh").read_text().splitlines() if "mapfile -d ''" in line]
    script = f'task=$1\n{line}\nprintf "%s\\0" "${{arguments[@]}}"'
    done = subprocess.run(["/bin/bash", "-c", script, "-", arguments.parent], capture_output=True, check=True)
    return [word.decode() for word in done.stdout.split(b"\0")[:-1]]


def test_a_job_is_submitted_word_by_word(call: Call, sbatch: Path) -> None:
    """No text of the user's is read by a shell."""
    folder = Path(ODD)
    options = ("--name", ODD, "--time", "2:00:00", "--partition", ODD, "--account", "a b", "--folder", folder)
    code, out, err = call("slurm", "submit", *options, "--gpus-per-node", 1, "--", "run", "amp", "--data", ODD)
    assert (code, err) == (0, "")
    words, environment = told(sbatch)
    (place,) = folder.absolute().iterdir()
    assert words == [
        *("--parsable", "--export=ALL", f"--chdir={Path.cwd()}"),
        f"--output={str(place).replace('%', '%%')}/slurm-%j.out",
        *(f"--job-name={ODD}", "--nodes=1", "--gres=gpu:1", "--time=2:00:00", f"--partition={ODD}", "--account=a b"),
        str(SCRIPTS / "one_gpu.sh"),
    ]
    assert environment["DDPM_LAB_TASKS"] == str(place)
    assert environment["DDPM_LAB_PYTHON"] == sys.executable
    assert read_as_the_script_does(place / "task-0" / "arguments") == [
        *("run", "amp", "--data", ODD, f"--output-dir={place}/task-0")
    ]
    assert out.startswith(f"job 42: {place}\n")
    submission = read_submission(place)
    assert (submission.job_id, submission.task_id(0)) == ("42", "42")
    assert submission.tasks[0].arguments == ("run", "amp", "--data", ODD)
    assert not Path("made").exists()


def test_an_array_has_a_task_for_each_configuration(call: Call, sbatch: Path) -> None:
    Path("two.toml").write_text(
        '[[task]]\nbatch_size = 8\nskip_bad = true\n[[task]]\nparts = ["peers", "levers"]\njson = false\n'
    )
    Path("one.toml").write_text('held_out = "-x"\n')
    code, out, err = call(
        "slurm", "submit", "--json", "--folder", "jobs", "--array", "two.toml", "one.toml", "--", "run", "peers"
    )
    assert (code, err) == (0, "")
    place = Path(json.loads(out)["folder"])
    words, _ = told(sbatch)
    assert "--array=0-2" in words
    assert f"--output={place}/slurm-%A_%a.out" in words
    each = [read_as_the_script_does(place / f"task-{i}" / "arguments") for i in range(3)]
    assert each == [
        ["run", "peers", "--batch-size=8", "--skip-bad", f"--output-dir={place}/task-0"],
        ["run", "peers", "--parts=peers,levers", f"--output-dir={place}/task-1"],
        ["run", "peers", "--held-out=-x", f"--output-dir={place}/task-2"],
    ]
    submission = read_submission(place)
    assert [submission.task_id(i) for i in range(3)] == ["42_0", "42_1", "42_2"]
    assert submission.log(2) == place / "slurm-42_2.out"


def test_settings_of_a_training_run_stay_as_they_were(call: Call, sbatch: Path) -> None:
    for name, rate in (("a.toml", 1e-4), ("b.toml", 2e-4)):
        Path(name).write_text(f"[optimizer]\nlearning_rate = {rate}\n")
    code, out, err = call(
        "slurm", "submit", "--json", "--folder", "jobs", "--array", "a.toml", "b.toml", "--", "train", "--steps", 5
    )
    assert (code, err) == (0, "")
    place = Path(json.loads(out)["folder"])
    Path("b.toml").write_text("changed since")
    words = read_as_the_script_does(place / "task-1" / "arguments")
    assert words == ["train", "--steps", "5", f"--config={place}/task-1/settings.toml", f"--output-dir={place}/task-1"]
    assert (place / "task-1" / "settings.toml").read_text() == "[optimizer]\nlearning_rate = 0.0002\n"
    assert told(sbatch)[1]["DDPM_LAB_REQUEUE"] == "0"


@pytest.mark.parametrize(
    ("nodes", "gpus", "script", "gres"),
    [
        *((1, 0, "one_node.sh", "none"), (1, 1, "one_gpu.sh", "gpu:1")),
        *((1, 4, "one_node.sh", "gpu:4"), (2, 0, "many_nodes.sh", "none"), (2, 1, "many_nodes.sh", "gpu:1")),
    ],
)
def test_the_script_for_a_size(nodes: int, gpus: int, script: str, gres: str) -> None:
    request = Request(nodes=nodes, gpus_per_node=gpus)
    assert request.script == SCRIPTS / script
    assert request.script.is_file()
    assert {f"--nodes={nodes}", f"--gres={gres}"} <= set(request.options())


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@given(st.lists(WORDS, max_size=5))
def test_any_text_reaches_the_task(tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    file = tmp_path_factory.mktemp("task") / "arguments"
    file.write_bytes(b"".join(word.encode() + b"\0" for word in ["run", *words]))
    assert read_as_the_script_does(file) == ["run", *words]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("", "there is no command"),
        ("-- report", "the command of a job is 'report': choose one of run, train"),
        ("-- run sums", "experiment is 'sums'"),
        ("-- run amp --output-dir x", "every task has a results folder of its own"),
        ("-- run amp --colour", "unrecognized arguments: --colour"),
        ("-- run amp --help", "asks for help only"),
        ("--array bad.toml -- run amp", "is not TOML"),
        ("--array none.toml -- run amp", "cannot read none.toml"),
        ("--array nested.toml -- run amp", "data in nested.toml is {'a': 1}"),
        ("--array number.toml -- run amp", "task in number.toml is 3"),
        ("--array wrong.toml -- run amp", "wrong.toml cannot be run"),
        ("--nodes 0 -- run amp", "--nodes is 0"),
        ("--nodes 2 -- calibrate", "the command of a job on several nodes is 'calibrate': choose one of run, train"),
        ("--gpus-per-node -1 -- run amp", "--gpus-per-node is -1"),
        ("--folder file -- run amp", "cannot write to"),
    ],
)
def test_what_cannot_run_is_refused_in_one_sentence(call: Call, sbatch: Path, arguments: str, sentence: str) -> None:
    for name, text in (("bad", "a ="), ("nested", "data = {a = 1}"), ("number", "task = 3"), ("wrong", "sets = 'x'")):
        Path(f"{name}.toml").write_text(text)
    Path("file").touch()
    given = set(Path.cwd().iterdir())
    code, out, err = call(
        "slurm", "submit", *(("--folder", "jobs") if "--folder" not in arguments else ()), *arguments.split()
    )
    assert (code, out) == (2, "")
    assert err.startswith("ddpm-lab: ")
    assert len(err.splitlines()) == 1
    assert sentence in err
    assert set(Path.cwd().iterdir()) == given, "nothing was begun"
    assert not (sbatch / "told").exists()


def test_a_name_that_would_break_a_line_is_refused() -> None:
    with pytest.raises(ConfigError, match="give printable text"):
        Request(name="a\nb")


def test_refusals_of_slurm_leave_nothing(call: Call, sbatch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("refuse", "1")
    code, _, err = call("slurm", "submit", "--folder", "jobs", "--", "run", "amp")
    assert (code, err) == (
        2,
        "ddpm-lab: sbatch refused the job: error: Batch job submission failed: Invalid account\n",
    )
    assert list(Path("jobs").iterdir()) == []
    (sbatch / "bin" / "sbatch").unlink()
    monkeypatch.setenv("PATH", str(sbatch / "bin"))
    code, _, err = call("slurm", "submit", "--folder", "jobs", "--", "run", "amp")
    assert (code, err) == (2, "ddpm-lab: there is no sbatch here: submit from a login node of a SLURM cluster\n")


@pytest.mark.usefixtures("sbatch")
def test_submissions_of_one_second_have_folders_of_their_own(call: Call) -> None:
    for _ in range(4):
        assert call("slurm", "submit", "--folder", "jobs", "--", "run", "amp")[0] == 0
    assert len(list(Path("jobs").iterdir())) == 4
    assert tasks_of(["run", "amp"], [])[0].configuration is None


@pytest.mark.parametrize("script", ["one_gpu.sh", "one_node.sh", "many_nodes.sh"])
def test_the_scripts_are_as_users_need_them(script: str) -> None:
    text = (SCRIPTS / script).read_text()
    options = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --signal=B:TERM@60", "#SBATCH --output=outputs/slurm-%j.out", "#SBATCH --requeue"} <= set(options)
    assert "set -euo pipefail" in text
    assert "##SBATCH --partition=NAME\n##SBATCH --account=NAME\n" in text
    assert text.index(options[-1]) < text.index("set -euo"), "SLURM reads no option after the first command"
    for file in SCRIPTS.glob("*.sh"):
        subprocess.run(["/bin/bash", "-n", file], check=True)
