"""Scripts that know nothing of the lab take turns: counted steps, what they say of themselves, and how they end."""

import ast
import os
import py_compile
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from conftest import wait_for
from git_repository import write

from ddpm_lab.config import COMMAND, RunConfig
from ddpm_lab.measure import command, hook, process
from ddpm_lab.measure.command import HOOK, CommandGroup
from ddpm_lab.measure.group import GroupFailed, Limits

TRAIN = """
import importlib.util, os, sys, time
importlib.util.find_spec("torch")  # as libraries ask whether it is installed
import torch

torch.manual_seed(0)
net = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(net.parameters())
BEFORE
for i in range(int(os.environ.get("STEPS", 10**9))):
    net(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    with open("steps", "a") as file:
        file.write(f"{os.getpid()} {i + 1}\\n")
    AFTER
"""
LIMITS = Limits(build_seconds=100, window_seconds=20)
Start = Callable[..., CommandGroup]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Starts a script with some lines before its loop and after a step; ended with the test."""
    groups: list[CommandGroup] = []
    monkeypatch.chdir(tmp_path)

    def start(
        *, before: str = "", after: str = "", run: str = "{python} train.py", limits: Limits = LIMITS, **options: Any
    ) -> CommandGroup:
        text = TRAIN.replace("BEFORE", before).replace("    AFTER", textwrap.indent(after, "    "))
        Path("train.py").write_text(text)
        given = (("command", run.format(python=sys.executable)), *options.items())
        config = RunConfig(workload=COMMAND, options=given)
        groups.append(CommandGroup(config, threads=1, log=tmp_path / "log", limits=limits))
        return groups[-1]

    yield start
    for group in groups:
        group.kill()


def steps_made(folder: Path) -> dict[str, int]:
    """The last step that each process noted."""
    return {pid: int(step) for pid, step in map(str.split, (folder / "steps").read_text().splitlines())}


def window(group: CommandGroup, settle: int, steps: int) -> dict[str, Any]:
    return group.window(settle=settle, steps=steps, limit=30, stage="measuring")[0]


ODD = """
class Warm(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)
optimizer = Warm(net.parameters())
class Tee:
    def write(self, text): pass
sys.stdout.flush()
sys.stdout = Tee()
"""
"""An optimizer whose step calls its parent's, which torch tells of too, and an output that cannot be flushed."""


@pytest.mark.slow
def test_a_script_makes_the_steps_that_it_is_told_and_says_what_it_is(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.machine = 'set up'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    (tmp_path / "helper.py").write_text("")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    shown = "print(machine, os.environ.get('MALLOC_MMAP_MAX_'))"
    group = start(before=f"import helper, numpy\n{shown}\ntorch.autocast('cpu', torch.bfloat16).__enter__(){ODD}")
    report = window(group, 2, 3)
    # The last step sleeps within the optimizer, so what follows it in the script has not run.
    assert list(steps_made(tmp_path).values()) == [5]
    ends = report["step_ends"]
    assert len(ends) == 3
    assert ends == sorted(ends)
    assert report["end"] - report["start"] >= ends[-1]
    second = window(group, 0, 4)
    assert list(steps_made(tmp_path).values()) == [9]
    assert len(second["step_ends"]) == 4
    assert second["start"] > report["end"]
    seen = group.witness()[0]
    assert (seen["parameters"], seen["weights"], seen["optimizer"]) == (72, ["float32"], "Warm")
    assert seen["argv"] == ["train.py"]
    assert (seen["autocast"], seen["compiled"], seen["world_size"]) == (["bfloat16"], False, 1)
    assert seen["versions"]["torch"]
    assert "json" not in seen["versions"]
    assert group.files == sorted(map(str, (tmp_path / "helper.py", tmp_path / "train.py")))
    assert "set up 0" in (tmp_path / "log").read_text()  # by the sitecustomize that was there before
    summary = group.finish()[0]
    assert summary["peak_rss_bytes"] > 10_000_000
    assert summary["threads"] == 1


READS = """
import ctypes, importlib.util, subprocess, torch.utils.data.dataloader
class Data(torch.utils.data.Dataset):
    def __len__(self): return 10**6
    def __getitem__(self, i): return len(open("data.json").read())
for name in ("a.yaml", b"b.toml", "module.py", "data.txt", "kernels.cu", "a.ipynb"): open(name).close()
for name in ("a.txt", os.path.abspath("b.txt"), "large.txt"): open(name).close()
open("log.txt", "w").close()
path = importlib.util.spec_from_file_location("config", "conf/run.py")
path.loader.exec_module(importlib.util.module_from_spec(path))
exec(open("conf/text.py").read())
ctypes.CDLL(os.path.abspath("linked.so"))
importlib.util.module_from_spec(importlib.util.spec_from_file_location("_psutil_linux", "imported.so"))
try: open("none.json")
except OSError: pass
subprocess.run([sys.executable, "-c", "import os; os.chdir('conf'); open('child.cfg'); open('made.json', 'w')"])
open("made.tmp", "w").close()
os.replace("made.tmp", "renamed.ini")
batches = iter(torch.utils.data.DataLoader(Data(), num_workers=1))
next(batches)
"""


@pytest.mark.slow
def test_files_of_settings_are_those_read_before_a_step_and_what_is_written_is_told(
    start: Start, tmp_path: Path
) -> None:
    """Whichever Python process of the command opens them, but for workers of a loader; so does what it runs by path."""
    names = ("a.yaml", "b.toml", "module.py", "data.txt", "kernels.cu", "data.json", "late.json", "conf/child.cfg")
    write(tmp_path, dict.fromkeys((*names, "a.ipynb", "conf/run.py", "conf/text.py"), ""))
    py_compile.compile(str(tmp_path / "conf" / "run.py"))  # which is then read in place of it
    for name in ("linked.so", "imported.so"):
        shutil.copyfile(str(import_module("psutil._psutil_linux").__file__), tmp_path / name)
    write(tmp_path, dict.fromkeys(("a.txt", "b.txt"), ""))
    (tmp_path / "large.txt").write_bytes(bytes(hook.SHORT_BYTES))
    how = {"before": READS, "run": "{python} train.py --config=a.txt ./b.txt large.txt log.txt"}
    group = start(**how, after="open('late.json').close()\nif i == 2: open('log.json', 'a').close()")
    assert {name.removeprefix(f"{tmp_path}/") for name in group.read if name.startswith(str(tmp_path))} == {
        *("a.yaml", "b.toml", "none.json", "conf/child.cfg", "kernels.cu", "linked.so", "imported.so"),
        *("a.ipynb", "conf/run.py", "conf/text.py", "train.py", "module.py", "a.txt", "b.txt"),
    }
    assert not [name for name in group.read if name.endswith(("torch/__init__.py", "/ctypes/__init__.py"))]
    window(group, 0, 4)
    assert not group.written
    group.kill()
    assert group.written == {str(tmp_path / name) for name in ("conf/made.json", "renamed.ini", "log.json", "log.txt")}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["{python} -m pack.train", "{python} bin/train"])
def test_the_programs_own_package_is_told_where_it_is_installed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """As a module or by an entry point; and no other package, whose version is told."""
    held = {"pack/train.py": TRAIN.replace("BEFORE", "import other").replace("    AFTER", ""), "other.py": ""}
    held["other-3.dist-info/METADATA"] = "Name: other\nVersion: 3\n"
    held["pack-1.dist-info/entry_points.txt"] = "[console_scripts]\ntrain = pack.train:main\n"
    write(tmp_path, {f"site-packages/{name}": text for name, text in held.items()})
    write(tmp_path, {"bin/train": "import pack.train\n"})
    installed = (tmp_path / "site-packages", Path(psutil.__file__).parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, installed)))
    group = start(run=run)
    assert group.witness()[0]["versions"]["other"] == "3"
    program = [str(tmp_path / "bin" / "train")] if "bin/train" in run else []
    assert group.files == [*program, str(tmp_path / "site-packages" / "pack" / "train.py")]


@pytest.mark.parametrize(("places", "devices"), [(["cpu"], [0]), (["cuda:2", "cpu", "cuda:1"], [1, 2])])
def test_a_script_is_timed_where_its_weights_lie(places: list[str], devices: list[int]) -> None:
    """Of weights on the CPU alone, on the current GPU, which is 0."""
    waited: list[int] = []
    recorded: list[int] = []
    cuda = SimpleNamespace(is_available=lambda: True, is_initialized=lambda: True, current_device=lambda: 0)
    cuda.synchronize, cuda.current_stream = waited.append, lambda device: device
    cuda.Event = lambda **_: SimpleNamespace(record=recorded.append)
    cuda.memory_allocated = cuda.memory_reserved = lambda device: 10**device
    turns = hook.Turns(SimpleNamespace(cuda=cuda))
    weights = [SimpleNamespace(device=torch.device(place)) for place in places]
    turns.taken = lambda: SimpleNamespace(param_groups=[{"params": weights}])
    turns._find_devices()
    turns._begin()
    assert (waited, recorded) == (devices, devices[:1])
    assert hook.bytes_held(cuda, turns.devices)["allocated_bytes"] == sum(10**device for device in devices)


@pytest.mark.slow
def test_of_several_optimizers_the_named_one_is_counted_and_replaced_where_it_is_gone(
    start: Start, tmp_path: Path
) -> None:
    """As where each stage of a training makes its own."""
    make = "second = torch.optim.SGD(net.parameters(), 0.1)"
    group = start(before=make, after=f"if i == 1: {make}\nfor _ in range(2):\n    second.step()", optimizer="SGD")
    window(group, 0, 6)
    seen = group.witness()[0]
    assert (seen["optimizer"], seen["several_optimizers"]) == ("SGD", True)
    assert list(steps_made(tmp_path).values()) == [4]


@pytest.mark.slow
def test_as_is_neither_threads_nor_memory_are_set_and_batches_that_workers_hold_ready_are_told(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    loader = "batches = iter(torch.utils.data.DataLoader(range(10**6), num_workers=1, prefetch_factor=3))"
    group = start(before=f"print(os.environ.get('MALLOC_MMAP_MAX_'))\n{loader}\nnext(batches)", as_is=True)
    seen = group.witness()[0]
    assert (seen["threads"], seen["prefetch_batches"]) == (2, 3)
    assert (tmp_path / "log").read_text().split() == ["None"]


@pytest.mark.slow
def test_what_loads_ahead_in_a_thread_or_process_of_its_own_is_stopped_with_the_script(start: Start) -> None:
    before = """
import multiprocessing, queue, subprocess, threading
ended = subprocess.Popen(["true"])
ahead = queue.Queue(20), multiprocessing.Queue(20)
def load(into):
    while True:
        time.sleep(0.05)
        into.put(0)
threading.Thread(target=load, args=ahead[:1], daemon=True).start()
multiprocessing.Process(target=load, args=ahead[1:], daemon=True).start()
"""
    group = start(before=before, after="[q.get() for q in ahead]")
    for _ in range(3):
        report = window(group, 0, 10)
        time.sleep(1)
    assert report["end"] - report["start"] > 8 * 0.05


@pytest.mark.slow
def test_stopped_processes_end_with_a_guard_that_is_killed(start: Start, tmp_path: Path) -> None:
    group = start(before="import multiprocessing\nmultiprocessing.Process(target=time.sleep, args=[99]).start()")
    window(group, 0, 5)
    while any(process.status() != psutil.STATUS_STOPPED for process in group._paused._stopped):
        time.sleep(0.01)  # a signal that was sent has not yet arrived
    assert group._process
    below = psutil.Process(group._process.pid).children(recursive=True)
    wait_for(lambda: {process.status() for process in below} == {psutil.STATUS_STOPPED}, 10)  # each when it is its turn
    group._process.kill()
    group._process.wait()
    assert not left(tmp_path)


@pytest.mark.slow
def test_a_step_that_a_gradient_scaler_skips_is_counted(start: Start, tmp_path: Path) -> None:
    before = """
real = optimizer.step
scaler = torch.amp.GradScaler("cpu")
scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
def step():
    if len(open("steps").readlines() if os.path.exists("steps") else ()) % 3 == 1:
        net.weight.grad.fill_(float("inf"))
    optimizer.step = real
    scaler.step(optimizer)
    scaler.update()
    optimizer.step = step
optimizer.step = step
"""
    group = start(before=before)
    report = window(group, 0, 6)
    assert report["state"] == {"skipped_steps": 2.0}
    assert list(steps_made(tmp_path).values()) == [6]


TORCHRUN = {
    "before": """
torch.distributed.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(net)
""",
    "run": "{python} -m torch.distributed.run --standalone --nproc-per-node 2 train.py",
}


@pytest.mark.slow
@pytest.mark.parametrize("asleep", [True, False])
def test_ranks_of_torchrun_make_the_same_steps_and_end_with_a_killed_guard_which_is_blamed(
    start: Start, tmp_path: Path, asleep: bool
) -> None:
    """Each is in a session of its own, and was stopped."""
    group = start(**TORCHRUN)
    assert len(window(group, 1, 2)["step_ends"]) == 2
    assert list(steps_made(tmp_path).values()) == [3, 3]
    assert group.witness()[0]["world_size"] == 2
    if not asleep:
        group._paused.resume()
    assert group._process
    group._process.kill()
    with pytest.raises(GroupFailed, match=r"^its guard, a process of the lab, was killed by SIGKILL after 4 steps or"):
        window(group, 0, 10**6)
    group.kill()
    assert not left(tmp_path)


def left(folder: Path) -> list[int]:
    """Processes that still run in a folder, some seconds later at most."""
    for _ in range(60):
        found = [p.pid for p in psutil.process_iter(["cwd"]) if p.info["cwd"] == str(folder) and p.pid != os.getpid()]
        if not found:
            break
        time.sleep(0.1)
    return found


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "has no optimizer": ({"before": "sys.exit()"}, "crashed", "before a step of a torch optimizer"),
    "never steps": (
        {"before": "time.sleep(1000)", "optimizer": "SGD", "limits": Limits(build_seconds=2)},
        "timed out",
        "2.3 or newer), and keeps PYTHONPATH; SGD has to be the class of an optimizer that steps",
    ),
    "daemonises": ({"before": "if os.fork(): os._exit(0)\nos.setsid()\ntime.sleep(1000)"}, "crashed", "exit code 0"),
    "ends": ({"after": "if i == 4: sys.exit()"}, "crashed", "give it more steps"),
    "fills memory": (
        {"after": "if i == 4: raise RuntimeError('CUDNN_STATUS_ALLOC_FAILED')"},
        "oom",
        "exit code 1 after",
    ),
    "fails in a pipe": (
        {"after": "if i == 4: raise RuntimeError('my fault')", "run": "{python} train.py 2>&1 | cat"},
        "crashed",
        "while measuring; it printed last: ",
    ),
    "is killed": ({"after": "if i == 4: os.kill(os.getpid(), 9)"}, "crashed", "killed by SIGKILL"),
    "hangs": ({"after": "if i == 4: time.sleep(1000)"}, "timed out", "made no step of the first optimizer for 3 s"),
}


def measured(start: Start, limit: float, **how: Any) -> None:
    with start(**how) as group:
        group.window(settle=0, steps=20, limit=limit, stage="measuring")


def test_of_what_prints_without_end_the_beginning_and_the_end_are_kept(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LOG_BYTES", 100_000)
    prints = "print('many words' * 1000 if i < 60 else sys.exit('last words'), flush=True)"
    group = start(before="print('first words')", after=prints)
    window(group, settle=0, steps=50)
    assert (tmp_path / "log").stat().st_size < 60_000
    with pytest.raises(GroupFailed, match=r"last words$"):
        window(group, settle=0, steps=50)
    assert (tmp_path / "log").read_text().startswith("first words")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_script_that_ends_or_hangs_before_its_first_step_or_in_a_window(
    start: Start, tmp_path: Path, name: str
) -> None:
    how, status, words = FAULTS[name]
    with pytest.raises(GroupFailed) as failed:
        measured(start, 3 if name == "hangs" else 60, **how)
    assert failed.value.status == status
    assert words in failed.value.reason
    assert not left(tmp_path)


@pytest.mark.slow
def test_shared_memory_of_a_killed_script_is_removed(start: Start, tmp_path: Path) -> None:
    held = "from multiprocessing.shared_memory import SharedMemory\nheld = SharedMemory(create=True, size=1000)"
    group = start(before=f"{held}\nopen('held', 'w').write(held.name)")
    file = Path("/dev/shm", (tmp_path / "held").read_text())
    assert file.exists()
    group.kill()
    assert not file.exists()
    assert not left(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"before": "os.fork()"}, {"after": "if i == 20: os.fork()"}])
def test_processes_that_train_apart_are_refused(how: dict[str, str], start: Start, tmp_path: Path) -> None:
    """One of them would be measured while the others sleep, or both would answer in one's name."""
    group = start(**how)
    with pytest.raises(GroupFailed, match="several of its processes make steps"):
        [window(group, 0, 20) for _ in range(10_000)]
    group.kill()
    assert not left(tmp_path)


def test_whoever_says_what_no_script_says_is_not_heard(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor waited for, where the rest of a message never comes."""
    monkeypatch.setattr(command, "MESSAGE_SECONDS", 1)
    says = r"""
import socket
strangers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
for stranger, said in zip(strangers, (b"\0\0\0\5hello", b"\0\0\0\5he", b"\0")):
    stranger.connect(os.environ["DDPM_LAB_TURNS"] + "/turns")
    stranger.sendall(said)
"""
    assert len(window(start(before=says), 0, 3)["step_ends"]) == 3


@pytest.mark.parametrize(
    "given", [(), (3, None, 0), ("a.json", "r", 0), ("a.json", None, None), (None, "r", 0), ("a\0.json", "r", 0)]
)
def test_no_event_that_is_audited_raises(
    given: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook, "FOLDER", str(tmp_path / "gone"))
    for event in ("open", "os.rename", "import"):
        hook.note_file(event, given)


def test_what_is_put_into_the_script_runs_with_python_39() -> None:
    tree = ast.parse(HOOK.read_text(), feature_version=(3, 9))
    imported = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert {name.partition(".")[0] for name in imported} <= set(sys.stdlib_module_names)
