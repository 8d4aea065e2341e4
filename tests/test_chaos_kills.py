"""Kills at random moments: nothing runs on, nothing lies about, no record is lost, and the same command goes on.

CHAOS=full takes ten minutes: some 200 kills, with those of ``test_training_run_processes.py``, and 2,000 groups.
"""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import psutil
import pytest
from conftest import busy_config, marked, wait_for
from test_group import group
from test_report import write

from ddpm_lab.files import LEDGER
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure.process import sweep

SHARED = Path("/dev/shm")
FULL = os.environ.get("CHAOS") == "full"
MARK = "CHAOS_COMMAND"  # in the environment of all processes of a command
GONE_SECONDS = 9.0  # three times the three seconds that are promised
MINE = """
import os, sys, time
from torch import nn, optim
from torch.utils.data import DataLoader

def leave_a_service():
    if not os.fork():
        os.setsid()
        if not os.fork():
            time.sleep(600)
        os._exit(0)
    os.wait()

def loop():
    leave_a_service()
    net = nn.Linear(1, 1)
    optimizer = optim.SGD(net.parameters(), lr=1e-6)
    for batch in DataLoader(range(10**9), batch_size=4, num_workers=1):
        loss = net(batch.float().unsqueeze(1) % 7).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()

def again():
    return loop()

if __name__ == "__main__":
    for _ in loop():
        pass
"""
LONG = ("--resolution", "0.1%", "--minutes", "2", "--output-dir", "out")  # which no measurement here reaches
PYTHON = f"{sys.executable} mine.py"
NOTEBOOK = """import ddpm_lab
ddpm_lab.compare("mine:loop", "mine:again", resolution=1e-3, minutes=2, sets=SETS, output_dir="out")"""


def kind(process: psutil.Process) -> str:
    """What a process of a command is, as far as its command line and its parent's say."""
    words, above = (p.cmdline() if p else [] for p in (process, process.parent()))
    server = "forkserver import main"  # a fork has the words of what it was forked from
    if server in " ".join(words):
        return "rank" if server in " ".join(above) else "server"
    if words == above and "mine.py" in words:
        return "worker"
    if "-I" in words:
        return "guard"
    known = {"ipykernel_launcher": "kernel", "papermill": "papermill", "mine.py": "script"}
    return next((name for word, name in known.items() if word in words), "")


def of_kind(mark: str, wanted: str) -> list[int]:
    found = []
    for process in marked(MARK, mark):
        with contextlib.suppress(psutil.Error):
            if kind(process) == wanted:
                found.append(process.pid)
    return found


ATTACKS = {
    "compare": (
        ["compare", "mine:loop", "mine:again", *LONG],
        "SIGTERM parent, SIGKILL rank, SIGKILL parent, SIGINT parent, SIGHUP parent, SIGKILL server",
    ),
    "compare of scripts": (
        ["compare", PYTHON, f"{PYTHON} again", *LONG],
        "SIGKILL parent, SIGKILL script, SIGTERM parent, SIGINT parent, SIGHUP parent, SIGKILL worker",
    ),
    "report": (
        ["report", "--notebook", "01_mine.ipynb", "--preset", "smoke", "--output-dir", "out"],
        "SIGKILL parent, SIGKILL kernel, SIGTERM parent, SIGINT parent, SIGHUP parent, SIGKILL papermill, SIGKILL rank",
    ),
}
"""Commands, and what is done to whom: the first two, or, in full, all of them in turn."""


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, whose name is short enough for sockets, with a folder for temporary files."""
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    (folder / "tmp").mkdir()
    (folder / "mine.py").write_text(MINE)
    write(folder / "01_mine.ipynb", NOTEBOOK, parameters="SETS = 99")
    monkeypatch.setattr(tempfile, "tempdir", str(folder / "tmp"))
    heeded = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # commands inherit it: under nohup they would go on
    yield folder
    signal.signal(signal.SIGHUP, heeded)
    shutil.rmtree(folder)


def start(words: list[str], folder: Path, mark: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, MARK: mark, "TMPDIR": str(folder / "tmp"), "PYTHONUNBUFFERED": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "compiled")  # which is everybody's, and stays
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), str(folder)])
    with (folder / "said").open("wb") as said:
        how: dict[str, Any] = {"cwd": folder, "env": environment, "stdout": said, "stderr": said}
        return subprocess.Popen([sys.executable, "-m", "ddpm_lab", *words], **how, start_new_session=True)


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; Python itself, while it starts, has one for SIGINT only."""
    caught = re.search(r"SigCgt:\s*(\w+)", Path("/proc", str(pid), "status").read_text())
    return bool(caught and int(caught[1], 16) >> (number - 1) & 1)


def strangers() -> set[Path]:
    """Files of shared memory that no process uses any more."""
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used += maps.read_text()
    return {path for path in SHARED.iterdir() if str(path) not in used}


def attack(words: list[str], kill: tuple[int, str, float], folder: Path, mark: str) -> None:
    """Kill one process of a command, and look at what is left."""
    number, target, moment = kill
    ledger = folder / "out" / LEDGER
    shared = strangers()
    before = ledger.read_text() if ledger.exists() else ""
    process = start(words, folder, mark)
    if target != "parent":
        wait_for(lambda: of_kind(mark, target) or process.poll() is not None)
    time.sleep(moment)
    found = [process.pid] if target == "parent" else of_kind(mark, target)[:1]
    said = (folder / "said").read_text
    assert process.poll() is None, said()
    ready = catches(process.pid, SIGTERM)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    if target != "parent":  # it goes on without, or ends, and is ended
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
        process.send_signal(SIGTERM)
    code = process.wait(GONE_SECONDS)
    if target == "parent":
        assert code == (128 + number if ready and number != SIGKILL else -number), f"{code}: {said()}"
    else:
        assert code in (1, 2, 128 + SIGTERM, -SIGTERM), f"{code}: {said()}"  # the last where it was just ending
    assert not ready or "Traceback" not in said(), said()
    wait_for(lambda: not marked(MARK, mark), GONE_SECONDS)
    if code < 0:  # as the next command does
        sweep()
    new = [*(folder / "tmp").iterdir()]
    assert not new, f"{new} of {kill}; {said()}"
    wait_for(lambda: not strangers() - shared, GONE_SECONDS)
    if before or ledger.exists():
        assert ledger.read_text().startswith(before)
        assert not Ledger(ledger).read()[1]


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize("name", ATTACKS)
def test_kills(name: str, place: Path, record_property: Callable[[str, object], None]) -> None:
    words, said = ATTACKS[name]
    chance = random.Random(name)
    kills = [kill.split() for kill in said.split(", ")]
    kills = (kills * 10)[:60] if FULL else kills[:2]
    for i, (number, target) in enumerate(kills):
        moment = chance.uniform(0, 8 if target == "parent" else 2)
        attack(words, (signal.Signals[number], target, moment), place, f"{place.name} {i}")
    last = start([*words, "--sets", "1"] if name != "report" else [*words, "-p", "SETS", "1"], place, place.name)
    assert last.wait(300) == 0, (place / "said").read_text()
    assert Ledger(place / "out" / LEDGER).read()[0]
    wait_for(lambda: not marked(MARK, place.name), GONE_SECONDS)
    record_property("chaos", (f"kills: {name}", len(kills), "nothing left, nothing lost; goes on"))


@pytest.mark.slow
def test_ranks_that_sleep_end_with_the_process_group_of_their_parent(place: Path) -> None:
    """As by the keys that quit, or ``timeout --signal=KILL``."""
    process = start(ATTACKS["compare"][0], place, place.name)

    def asleep() -> bool:
        with contextlib.suppress(psutil.Error):
            return any(p.status() == psutil.STATUS_STOPPED and kind(p) == "rank" for p in marked(MARK, place.name))
        return False

    wait_for(lambda: asleep() or process.poll() is not None)
    os.killpg(process.pid, SIGKILL)
    process.wait()
    wait_for(lambda: not marked(MARK, place.name), GONE_SECONDS)


@pytest.mark.slow
def test_a_second_signal_ends_a_command_at_once(place: Path) -> None:
    process = start(ATTACKS["compare of scripts"][0], place, place.name)
    wait_for(lambda: of_kind(place.name, "worker") or process.poll() is not None)
    for pid in of_kind(place.name, "guard"):
        os.kill(pid, signal.SIGSTOP)
    process.send_signal(SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(3) == 128 + signal.SIGINT
    wait_for(lambda: not marked(MARK, place.name), GONE_SECONDS)


@pytest.mark.slow
@pytest.mark.chaos
def test_many_groups_in_a_row_cost_what_one_does(record_property: Callable[[str, object], None]) -> None:
    """Nothing grows: not the memory, descriptors or processes of the parent and its fork server, nor the start."""
    seconds: list[float] = []
    seen: list[tuple[int, int, int]] = []
    begun = time.monotonic()
    while len(seconds) < (2000 if FULL else 20) and time.monotonic() - begun < 300:
        with group(busy_config(micro_steps=1)) as g:
            g.window(settle=0, steps=1, limit=30, stage="testing")
            g.finish()
        seconds.append(g.start_seconds)
        tree = [psutil.Process(), *psutil.Process().children(recursive=True)]
        memory = sum(process.memory_info().rss for process in tree)
        seen.append((len(tree), sum(process.num_fds() for process in tree), memory))
    assert seen[-1][:2] == seen[5][:2]
    assert seen[-1][2] < seen[5][2] + (8 << 20)
    part = len(seconds) // 4
    first, last = (sorted(some)[part // 2] for some in (seconds[1 : part + 1], seconds[-part:]))
    assert last < 3 * first
    record_property("chaos", ("groups in a row", len(seconds), "no growth of memory, descriptors or start time"))
