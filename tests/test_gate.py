"""The working tree against a revision, in real repositories: what is refused, what runs where, how it exits."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import records as make
from conftest import Call
from git_repository import commit, git, repository, write

import ddpm_lab
from ddpm_lab.config import RunConfig
from ddpm_lab.explain import stats
from ddpm_lab.explain.selection import Study
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.questions import gate
from ddpm_lab.questions.ask import answer
from ddpm_lab.questions.gate import outcome

MINE = """
import torch

from pack.inner import work

def step():
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        work()
        loss = model(torch.ones(4, 8)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss
"""
WORK = "def work():\n    for _ in range({}):\n        sum(range(20_000))\n"
FILES = {"mine.py": MINE, "pack/__init__.py": "", "pack/inner.py": WORK.format(10)}
FILES |= {"settings.toml": 'workload = "mine:step"\nglobal_batch_size = 1\n', ".gitignore": "__pycache__/\n"}


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody's repository, in which they work; what they type puts their folder on the Python path."""
    folder = repository(tmp_path / "mine", FILES).resolve()
    write(tmp_path / "site-packages", {"installed.py": "def step():\n    while True:\n        yield\n"})
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    monkeypatch.syspath_prepend(folder)  # and takes away again what the command adds
    monkeypatch.chdir(folder)
    monkeypatch.setattr(hardware, "gpus", tuple)
    return folder


def against(call: Call, out: Path, *words: str, sets: int = 1) -> tuple[int, str, str]:
    return call("compare", *words, "--sets", sets, "--output-dir", out)


# --- without a rank --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("mine:step --against nowhere", "--against is 'nowhere'"),
        pytest.param("mine:stop --against main", "'mine:stop' cannot be measured", marks=pytest.mark.slow),
        ("mine:fresh --against main", r"main \(.*'fresh'"),
        ("new:step --against main", r"main \(.*'new'"),
        ("revised.toml --against main", "revision is 'main'.*compare --against"),
        ("--against main", "nothing that ddpm_lab.training.train:ddpm imports belongs to"),
        ("installed:step --against main", "lies in .*site-packages/installed.py.*pip install -e"),
        ("mine:step mine:step --against main", "leave out mine:step"),
        ("mine:step", "--against"),
        ("mine:step mine:fresh --strict", "--strict.*--threshold"),
        ("mine:step --against main --threshold 150%", "--threshold is '150%'"),
    ],
)
def test_what_cannot_be_decided_is_refused(mine: Path, tmp_path: Path, call: Call, words: str, said: str) -> None:
    write(mine, {"mine.py": f"{MINE}\ndef fresh():\n    yield\n", "new.py": MINE})
    write(mine, {"revised.toml": 'workload = "mine:step"\nrevision = "main"\n'})
    code, out, err = against(call, tmp_path / "out", *words.split())
    assert (code, out) == (2, "")
    *shown, refusal = err.splitlines()
    assert refusal.startswith("ddpm-lab: ")
    assert not [line for line in shown if "ddpm-lab" in line], "nothing but progress comes before it"
    assert re.search(said, refusal)
    assert not (tmp_path / "out" / "trace_output" / "ledger.jsonl").exists()


def test_code_in_a_submodule_is_refused_and_one_that_nothing_imports_is_no_obstacle(
    mine: Path, tmp_path: Path, call: Call
) -> None:
    sub = repository(tmp_path / "sub", {"__init__.py": "", "part.py": "x = 1\n"})
    git(mine, "submodule", "--quiet", "add", str(sub), "vendor")
    git(mine, "commit", "--quiet", "--message", "with a submodule")
    write(mine, {"vendor/part.py": "x = 2\n"})
    assert against(call, tmp_path / "out", "mine:step", "--against", "main")[0] == 0
    write(mine, {"mine.py": f"import vendor.part\n{MINE}"})
    code, _, err = against(call, tmp_path / "out", "mine:step", "--against", "main")
    assert (code, "submodule vendor of" in err) == (2, True)


def test_identical_code_passes_unmeasured(
    mine: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(mine, {"README": "new"})
    page = tmp_path / "page.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    code, out, _ = against(call, tmp_path / "out", "settings.toml", "--against", "main", "--json")
    assert (code, json.loads(out)["gate"]["status"]) == (0, "identical code")
    assert page.read_text().startswith("### identical code\n")
    assert not (tmp_path / "out" / "trace_output" / "ledger.jsonl").exists()


def test_settings_of_a_revision_are_part_of_its_code(mine: Path, tmp_path: Path, call: Call) -> None:
    """But not those that both sides read from the same place: they are refused where the revision has others."""
    reads = "import pathlib\nopen(pathlib.Path(__file__).with_name('own.json')), open('both.json')\n"
    commit(mine, {"mine.py": f"{reads}{MINE}", "own.json": "1", "both.json": "1"})
    write(mine, {"both.json": "2"})
    code, _, err = against(call, tmp_path / "out", "mine:step", "--against", "main")
    assert (code, "both sides read both.json of the working tree, and main has another" in err) == (2, True)
    write(mine, {"own.json": "2", "both.json": "1"})
    code, _, err = against(call, tmp_path / "out", "mine:step", "--against", "main", "--minutes", "0")
    assert (code, ": own.json changed" in err, "minutes is 0" in err) == (2, True, True)


# --- with ranks ------------------------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_more_work_fails(mine: Path, tmp_path: Path, call: Call) -> None:
    write(mine, {"pack/inner.py": WORK.format(20)})
    page, asked = tmp_path / "page.md", ("settings.toml", "--threshold", "10%", "--json", "--markdown")
    code, out, err = against(call, tmp_path / "out", *asked, page, "--against", "main", sets=6)  # type: ignore[arg-type]
    said = json.loads(out)
    assert "pack.inner changed" in err
    assert 0.4 < said["ratio"] < 0.65
    assert (code, said["gate"]["status"]) == (1, "failed")
    assert said["losses"]["verdict"] == "identical"
    assert said["gate"]["sentence"] in page.read_text()
    assert git(mine, "status", "--porcelain") == "M pack/inner.py"


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_each_side_runs_its_own_sources_and_settings(mine: Path, tmp_path: Path, call: Call) -> None:
    trace = tmp_path / "trace"

    def version(number: int) -> dict[str, str]:
        note = f"open({str(trace)!r}, 'a').write(__file__ + ' {number}\\n')\n"
        return {
            "pack/inner.py": WORK.format(number) + note,
            "settings.toml": f"{FILES['settings.toml']}seed = {number}\n",
        }

    commit(mine, version(2))
    write(mine, version(3))
    code, out, _ = against(call, tmp_path / "out", "settings.toml", "--against", "main", "--strict")
    assert (code, "\ninconclusive: 1 set" in out) == (4, True)
    assert "losses: differs" in out, "other seeds give other weights"
    ran = [line.split() for line in trace.read_text().splitlines()]
    # Each side is looked at once before its groups of the set.
    assert [number for file, number in ran if file == str(mine / "pack" / "inner.py")] == ["3", "3"]
    assert [number for file, number in ran if file != str(mine / "pack" / "inner.py")] == ["2", "2", "2"]
    records = Ledger(tmp_path / "out" / "trace_output" / "ledger.jsonl").read()[0]
    assert {(r.role, r.config.seed, bool(r.config.revision)) for r in records} == {
        ("baseline", 2, True),
        ("twin", 2, True),
        ("candidate", 3, False),
    }


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_a_module_from_the_wrong_tree_is_refused(mine: Path, tmp_path: Path, call: Call) -> None:
    commit(mine, {"mine.py": f"import sys\nsys.path.insert(0, {str(mine)!r})\n{MINE}"})
    write(mine, {"pack/inner.py": WORK.format(12)})
    code, out, err = against(call, tmp_path / "out", "mine:step", "--against", "main")
    assert (code, out, "rank 0 loaded pack, pack.inner from the working tree" in err) == (2, "", True)


@pytest.mark.slow
def test_two_revisions_of_the_lab_itself_run_whole_unless_the_instrument_changed(tmp_path: Path) -> None:
    lab, trace = tmp_path / "lab", tmp_path / "trace"
    shutil.copytree(Path(ddpm_lab.__file__).parent, lab / "ddpm_lab", ignore=shutil.ignore_patterns("__pycache__"))
    repository(lab, {".gitignore": "__pycache__/\nout/\n"})
    environment = {**os.environ, "PYTHONPATH": str(lab), "TRACE": str(trace)}

    def compared(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-m", "ddpm_lab", "compare", *words, "--output-dir", "out", "--device", "cpu"]
        return subprocess.run(command, cwd=lab, env=environment, capture_output=True, text=True, check=False)

    for changed in ("measure.phases", "config"):
        with (lab / "ddpm_lab" / f"{changed.replace('.', '/')}.py").open("a") as file:
            file.write("\nANOTHER = 1\n")
        refused = compared("--against", "main")
        assert (refused.returncode, f"(ddpm_lab.{changed})" in refused.stderr) == (2, True)
        git(lab, "restore", ".")
    planted = lab / "ddpm_lab" / "training" / "pieces.py"
    note = "__import__('pathlib').Path(__import__('os').environ['TRACE']).open('a').write(__file__ + '\\n')"
    planted.write_text(f"{planted.read_text()}\n{note}\n")
    done = compared("ddpm_lab.training.pieces:pieces", "--against", "main", "--sets", "1")
    assert done.returncode == 0, done.stderr
    assert "ddpm_lab.training.pieces changed" in done.stderr
    assert trace.read_text().splitlines() == [str(planted.resolve())], "the revision's ranks have their own lab"


# --- the decision: planted ratios against thresholds, and how often the rule errs ---

MAIN = RunConfig(workload="mine:step", global_batch_size=1, revision="1234567890ab")
TREE = replace(MAIN, revision="")


def study(ratio: float, **values: Any) -> Study:
    made = make.sets(
        {"working tree": (TREE, ratio)},
        baseline=MAIN,
        baseline_label="main",
        experiment="compare",
        family="working tree against main",
        **{"count": 8, "set_noise": 0.003, "turn_noise": 0.002, **values},
    )
    return make.study(made)


@pytest.mark.parametrize(
    ("ratio", "threshold", "status", "words"),
    [
        (0.80, 0.03, gate.SLOWER, "by 20 %, and at least by"),
        (0.80, 0.0, gate.SLOWER, "none is allowed"),
        (0.97, 0.0, gate.SLOWER, ""),
        (0.97, 0.10, gate.PASSED, "by at most 3"),
        (1.00, 0.03, gate.PASSED, ""),
        (1.20, 0.03, gate.PASSED, "is not slower"),
        (0.97, 0.03, stats.INCONCLUSIVE, "by up to"),
        (1.00, 0.0, stats.INCONCLUSIVE, "none is allowed"),
    ],
)
def test_a_planted_ratio_is_judged_by_its_interval(ratio: float, threshold: float, status: str, words: str) -> None:
    judged = outcome(answer(study(ratio)), threshold)
    assert judged.status == status
    assert judged.sentence.startswith(f"{status}: ")
    assert words in judged.sentence
    assert (judged.exit_code(), judged.exit_code(strict=True)) == {
        gate.SLOWER: (1, 1),
        gate.PASSED: (0, 0),
        stats.INCONCLUSIVE: (0, 4),
    }[status]


def test_few_sets_what_is_within_the_twin_and_a_side_that_failed_let_nothing_pass() -> None:
    assert outcome(answer(study(0.5, count=3)), 0.03).status == stats.INCONCLUSIVE
    assert outcome(answer(study(0.5, twin_ratio=0.2)), 0.03).status != gate.SLOWER
    hidden = outcome(answer(study(0.98, twin_ratio=0.9)), 0.03)
    assert (hidden.status, "differs from itself" in hidden.sentence) == (stats.INCONCLUSIVE, True)
    busy = outcome(answer(study(0.5, crowded=range(8))), 0.03)
    assert (busy.exit_code(), "disturbed 8 more" in busy.sentence) == (0, True), "nothing is known of the change"
    same: dict[str, Any] = {"experiment": "compare", "family": "working tree against main", "baseline_label": "main"}
    crashed = make.sets({}, baseline=MAIN, failures={"working tree": (TREE, "crashed", "planted")}, seed=1, **same)
    lost = [replace(r, label="main", role="baseline", config=MAIN) for r in crashed if r.role == "candidate"]
    rows = [[*study(0.5, count=1, crowded=[0]).records, *crashed], crashed]
    for records in (*rows, *([*study(1.0, count=3).records, *more] for more in (crashed, lost))):
        some = outcome(answer(make.study(records)), 0.03)
        assert (some.status, some.exit_code()) == (gate.NO_RESULT, 1), "a side that failed, in all or most of its sets"


def test_sets_after_the_first_answer_count_for_the_gate() -> None:
    """Slower it is called at the first look; whether by more than is allowed is what further sets say."""
    few, many = (study(0.91, count=count, set_noise=0.06, seed=5) for count in (8, 60))
    sets = list(dict.fromkeys(r.set_id for r in many.records))
    told = make.record(MAIN, experiment="compare")
    looks = (make.look(told, sets[:8], "2026-01-04T10:00:00Z"), make.look(told, sets, "2026-01-05T10:00:00Z"))
    assert outcome(answer(few), 0.05).status == stats.INCONCLUSIVE
    assert outcome(answer(replace(many, looks=looks)), 0.05).status == gate.SLOWER
