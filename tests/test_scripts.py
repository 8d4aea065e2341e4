"""Two command lines compared: what is a command, what differs, and a planted difference found from end to end."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Call
from git_repository import commit, repository, write

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure import hardware
from ddpm_lab.measure.code_version import Tree
from ddpm_lab.measure.command import files_named, sets_threads
from ddpm_lab.measure.group import GroupFailed
from ddpm_lab.measure.sets import Instrument
from ddpm_lab.questions import scripts

TRAIN = """
import time, torch
torch.manual_seed(0)
net = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
while True:
    net(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
    time.sleep(0.02)
"""
SEEN: dict[str, Any] = {
    **{"device": "cpu", "world_size": 1, "threads": 2, "parameters": 72, "weights": ["float32"], "gradients": []},
    **{"autocast": [], "compiled": False, "optimizer": "SGD", "several_optimizers": False, "python": "3.12.1"},
    **{"cuda": None, "versions": {"torch": "2.11.0", "numpy": "2.0"}},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a script, as the working folder."""
    monkeypatch.setattr(hardware, "gpus", tuple)
    monkeypatch.chdir(repository(tmp_path / "work", {"train.py": TRAIN, "sub/train": TRAIN}))
    return Path.cwd()


def test_what_is_a_command_and_which_files_are_part_of_it(tmp_path: Path) -> None:
    script, settings = tmp_path / "run.sh", tmp_path / "my settings" / "a.toml"
    settings.parent.mkdir()
    settings.touch()
    script.touch(mode=0o755)
    long = f"python train.py {'x' * 3000} --config a.toml"
    assert all(map(scripts.is_command, ("python train.py", long, str(script))))
    assert not any(map(scripts.is_command, ("mine:before", "settings.toml", settings, "mine.py", "", 3, print)))
    for name, text in {"run": "#!/bin/sh\n", "a.yaml": "", "data": "0 1 2", "b.json": "{}"}.items():
        (tmp_path / name).write_text(text)
    words = f"./run --config=a.yaml --data data b.json c.json --note {'x' * 3000}"
    named = files_named(words, tmp_path)
    assert [file.name for file in named] == ["run", "a.yaml", "data", "b.json"]
    assert [file.name for file in named if scripts.is_script(file)] == ["run"]
    assert scripts.is_script(Path("no.py"))
    for path in ("src:$PYTHONPATH", '"a b:$PYTHONPATH"'):
        scripts.configuration(f"PYTHONPATH={path} python train.py", "A", device="cpu")
    with pytest.raises(ConfigError, match="A has PYTHONPATH='src"):  # which no shell replaces
        scripts.configuration("PYTHONPATH='src:$PYTHONPATH' python train.py", "A", device="cpu")
    with pytest.raises(ConfigError, match=r"A has PYTHONPATH=src, .* PYTHONPATH=src:\$PYTHONPATH"):
        scripts.configuration("cd x; PYTHONPATH=src python train.py", "A", device="cpu")
    assert not sets_threads("sh run", tmp_path)
    (tmp_path / "run").write_text("torchrun train.py\n")
    assert sets_threads("sh run", tmp_path)
    for command in (
        "python accelerate/train.py  # srun a",
        "python deepspeed.py",
        "python train.py --config srun.yaml",
    ):
        assert not sets_threads(command, tmp_path)
    ways = "accelerate  launch|bash -c 'torchrun|$(which torchrun)|python -m accelerate.commands.launch|/bin/torchrun"
    ways += "|taskset -c 0 python|numactl -C 0-7 python"
    assert all(sets_threads(f"{way} train.py", tmp_path) for way in ways.split("|"))


def test_what_cannot_be_measured_is_refused_before_a_script_runs(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "look", lambda *_: pytest.fail("a script ran"))
    for option in ("--sets", "--minutes", "--cores"):
        code, _, err = call("compare", "python a.py", "python b.py", option, "0", "--output-dir", str(tmp_path))
        assert (code, err.count("\n")) == (2, 1), err
        assert f"{option[2:]} is 0" in err


@pytest.mark.parametrize(
    ("command", "named"),
    [("A=1 python train.py", "; python is /bin/python here; c1 has"), ("cd x && python train.py", "directory; c1 has")],
)
def test_the_python_that_lacks_a_module_and_the_files_that_a_revision_lacks_are_named(
    command: str, named: str, instrument: Instrument, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise GroupFailed("crashed", "No module named 'x': No such file or directory")

    monkeypatch.setattr(scripts, "CommandGroup", fail)
    monkeypatch.setattr(shutil, "which", {"python": "/bin/python"}.get)
    config = scripts.configuration(command, "A", device="cpu")
    with pytest.raises(ConfigError, match=f"^A .* cannot be measured: .*{named}"):
        scripts.look(config, instrument, "A", Tree(revision="c1", folders=(".",), apart="/"))


def test_differences_are_listed_and_other_work_is_told() -> None:
    other = SEEN | {"parameters": 90, "versions": {"torch": "2.15.0", "numpy": "2.0"}}
    assert scripts.differences(SEEN, other) == ["parameters 72 against 90", "torch 2.11.0 against 2.15.0"]
    assert scripts.unequal(SEEN, SEEN, (8, 8)) == []
    assert "parameters and images of a step" in scripts.unequal(SEEN, other, (8, 16))[0]


@pytest.mark.slow
def test_a_script_against_a_revision(call: Call, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder of the repository, and under a name that does not say what it is.

    Settings of a revision are part of its code, but not those that both sides read from the same place.
    """
    monkeypatch.chdir(folder / "sub")
    reads = f"import json\nown, both = (json.load(open(name)) for name in ('pause.json', '{folder}/both.json'))"
    settings = {"sub/pause.json": "0.02", "both.json": "1"}
    commit(folder, {"sub/train": reads + TRAIN.replace("0.02", "own"), **settings})
    write(folder, {"both.json": "2"})
    words = ("compare", f"{sys.executable} train", "--against", "main", "--output-dir", folder / "out", "--sets", 1)
    assert "identical code" in call(*words)[1]
    write(folder, {"sub/pause.json": "0.04"})
    code, out, _ = call(*words, "--json")
    found = json.loads(out)
    assert code == 0  # one set says nothing surely
    assert 0.4 < found["ratio"] < 0.75  # the pauses alone: 0.5
    assert [side["status"] for side in found["sides"]] == ["ok"] * 3
    traces = folder / "out" / "trace_output"
    assert (traces / "scripts").is_dir()
    before = (traces / "ledger.jsonl").read_text()
    assert call(*words)[0] == 0
    assert (traces / "ledger.jsonl").read_text() == before, "though the revision lies in another folder each time"
    write(tmp_path, {"elsewhere.py": TRAIN})
    write(folder, {"sub/named.yaml": ""})
    run = f"SETTINGS=named.yaml {sys.executable} {tmp_path}/elsewhere.py"  # of the repository, but nothing it loads
    code, _, err = call("compare", run, *words[2:])
    assert (code, "elsewhere.py loads belongs to the repository" in err) == (2, True)
    commit(folder, {"sub/imports.py": f"import packed_here\n{TRAIN}", "lib/packed_here.py": ""})
    (tmp_path / "link").symlink_to(folder)
    run = f"PYTHONPATH={tmp_path}/link/lib:$PYTHONPATH {sys.executable} -m imports"
    code, _, err = call("compare", run, *words[2:])
    assert (code, "packed_here.py of the working tree" in err) == (2, True), err
    commit(folder, {"sub/train": "raise SystemExit('not today')"})
    write(folder, {"sub/train": TRAIN.replace("0.02", "0.04")})
    code, _, err = call(*words)
    assert code == 2
    assert "not today" in err


@pytest.mark.slow
def test_an_edited_script_or_file_of_settings_is_other_code(
    folder: Path, instrument: Instrument, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its command line names it or not, elsewhere in the repository; but no file that the script writes."""
    monkeypatch.chdir(folder / "sub")
    config = scripts.configuration(f"{sys.executable} train --log log.json", "A", device="cpu")
    train = "open('../settings.yaml')\n" + TRAIN
    write(folder, {"sub/train": train + "    open('log.json', 'a').write('{}')\n", "settings.yaml": "width: 64"})

    def key() -> str:
        return scripts.look(config, instrument, "A")[1].key

    before = key()
    assert key() == before, "sets of the same code are used again"
    write(folder, {"sub/train": train})
    edited = key()
    assert edited != before
    write(folder, {"settings.yaml": "width: 128"})
    assert key() != edited
    write(folder, {"sub/run.sh": f". ./a.conf\n{sys.executable} train\n", "sub/a.conf": "A=1\n"})
    config = scripts.configuration("sh run.sh a.conf", "A", device="cpu")
    sourced = key()
    write(folder, {"sub/a.conf": "A=2\n"})
    assert key() != sourced, "read by the shell"
    write(folder, {"sub/train": "open('a.ipynb')\n" + TRAIN, "sub/a.ipynb": "{}"})
    config = scripts.configuration(f"{sys.executable} train --kernel $$", "A", device="cpu")
    notebook = key()
    assert key() == notebook, "whatever file tells a kernel its connection"
    write(folder, {"sub/a.ipynb": "[]"})
    assert key() != notebook
    config = scripts.configuration(f"{sys.executable} train", "A", device="cpu")
    write(folder, {"sub/train": TRAIN.replace("64, 64", "64, len(__import__('os').environ['WIDTH'])")})
    monkeypatch.setenv("WIDTH", "1")
    narrow = key()
    assert key() == narrow
    monkeypatch.setenv("WIDTH", "22")
    assert key() != narrow, "another network by a variable of the environment"


@pytest.mark.slow
def test_what_a_script_writes_in_a_set_is_no_edit_of_it(call: Call, folder: Path, short: None) -> None:  # noqa: ARG001
    log = "    if made > 10: open('log.json', 'w').write(str(made))\n"  # no step of the look
    write(folder, {"train.py": TRAIN.replace("while True", "for made in range(10**9)") + log, "log.json": "{}"})
    run = f"{sys.executable} train.py --log log.json"
    words = ("compare", run, f"{run} --other", "--output-dir", folder / "out", "--sets", 1)
    ledger = folder / "out" / "trace_output" / "ledger.jsonl"
    assert call(*words)[0] == 0
    assert (folder / "log.json").read_text() != "{}"
    before = ledger.read_text()
    assert call(*words)[0] == 0
    assert ledger.read_text() == before, "its sets are used again"
