"""Groups of real processes: how they work, how they fail, and that nothing is left of them."""

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from conftest import BUSY, alive, busy_config, code_of, wait_for

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import group as group_module
from ddpm_lab.measure import process
from ddpm_lab.measure.code_version import PACKAGE
from ddpm_lab.measure.group import Group, GroupFailed, Limits
from ddpm_lab.measure.others import tree_seconds
from ddpm_lab.measure.process import Life, LocalRank, sweep
from ddpm_lab.measure.witness import mismatches

MODULES = code_of(BUSY).modules


def group(config: RunConfig) -> Group:
    limits = Limits(build_seconds=60, window_seconds=3)
    return Group(config, threads=1, modules=MODULES, limits=limits)


def test_two_ranks_work_and_leave_nothing() -> None:
    with group(busy_config(2)) as g:
        pids, folder = g.pids, g.folder
        windows = g.window(settle=1, steps=4, limit=30, stage="testing")
        witness = g.witness()
        sockets = [c for pid in pids for c in psutil.Process(pid).net_connections("tcp")]
        summaries = g.finish()
    for w, s in zip(windows, summaries, strict=True):
        assert len(w["step_ends"]) == 4
        assert sorted(w["step_ends"]) == w["step_ends"]
        assert 0 < w["step_ends"][-1] <= w["end"] - w["start"]
        assert s["images"] == 5 * 4
        assert s["peak_rss_bytes"] >= w["memory"]["rss_bytes"] > 1 << 26
    assert [(w["rank"], w["world_size"], w["unlisted_modules"]) for w in witness] == [(0, 2, []), (1, 2, [])]
    assert mismatches(busy_config(2), witness) == []
    listening = {c.laddr.ip for c in sockets if c.status == psutil.CONN_LISTEN}
    assert listening, "gloo connects its ranks by sockets"
    assert listening <= {"127.0.0.1", "::1"}
    assert alive(pids) == []
    assert not folder.exists()


@pytest.mark.parametrize("chosen", ["", "FASTEST_FIRST"])
def test_cuda_numbers_gpus_as_nvml_does_unless_the_user_says_otherwise(chosen: str) -> None:
    name = "CUDA_DEVICE_ORDER"
    environment = {name: chosen} if chosen else {}
    with Group(busy_config(), threads=1, modules=MODULES, environment=environment) as g:
        assert g.call("variable", 60, name=name) == [chosen or "PCI_BUS_ID"]


@pytest.mark.gpu
@pytest.mark.calls
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("ranks", "backend"), [(1, "nccl"), (2, "gloo")])
def test_nccl_on_a_gpu_of_its_own_and_gloo_where_two_ranks_share_one(
    synthetic: RunConfig, ranks: int, backend: str
) -> None:
    how: dict[str, Any] = {"device": "cuda", "world_size": ranks, "loader": "resident", "oversubscribe": ranks > 1}
    config = dataclasses.replace(synthetic, **how)
    with Group(config, threads=1) as g:
        g.window(settle=1, steps=3, limit=120, stage="testing")
        witness, hashes = g.witness(), g.call("weights_sha256", 60)
        g.finish()
    assert {(w["backend"], w["device"]) for w in witness} == {(backend, "cuda:0")}
    assert mismatches(config, witness) == []
    assert len(set(hashes)) == 1, "one network"


@pytest.mark.slow
def test_batches_that_a_loader_of_the_users_holds_ready_are_known() -> None:
    """Or short windows would time what was loaded while the group slept."""
    with group(RunConfig(workload="lab_workloads:looping", global_batch_size=4)) as g:
        g.window(settle=0, steps=3, limit=60, stage="testing")
        assert [rank["prefetch_batches"] for rank in g.witness()] == [2 * 3]


def all_stopped(pids: Iterable[int]) -> bool:
    """Whether every thread has stopped, for which it takes a moment."""
    states = [stat.read_text() for pid in pids for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in states)


@pytest.mark.slow
def test_threads_of_own_code_rest_until_the_next_window() -> None:
    with group(busy_config(hums=True)) as g:
        for told in ("window", "witness"):
            if told == "window":
                g.window(settle=0, steps=3, limit=60, stage="testing")
            else:
                g.witness()
            wait_for(partial(all_stopped, g.pids), 5)
            before = tree_seconds(map(psutil.Process, g.pids))
            time.sleep(0.5)
            assert tree_seconds(map(psutil.Process, g.pids)) == before
        assert g.finish()[0]["images"]


@pytest.mark.slow
def test_what_compiled_has_ended_before_others_are_timed() -> None:
    with group(RunConfig(workload="lab_workloads:pooling", global_batch_size=1)) as g:

        def helpers() -> list[str]:
            below = psutil.Process(g.pids[0]).children(recursive=True)
            return [" ".join(child.cmdline()) for child in below if child.status() != psutil.STATUS_ZOMBIE]

        g.window(settle=0, steps=1, limit=60, stage="testing")
        assert any("compile_worker" in command for command in helpers())
        g.witness()
        assert not any("compile_worker" in command for command in helpers())


FAULTS = {
    "raise": ("crashed", "rank 1: RuntimeError: planted fault"),
    "end of file": ("crashed", "rank 1: EOFError: planted end of a file"),
    "kill": ("crashed", "rank 1 was killed by SIGKILL"),
    "exit": ("crashed", "rank 1 ended with exit code 3"),
    "leave": ("crashed", "rank 1 ended with exit code 0"),
    "oom": ("oom", "rank 1: OutOfMemoryError"),
    "unsupported": ("unsupported", "install g++"),
}


@pytest.mark.parametrize(("fault", "place"), [*((fault, "forward") for fault in FAULTS), ("raise", "build")])
def test_a_failing_rank_is_named_with_its_own_reason(fault: str, place: str) -> None:
    status, words = FAULTS[fault]
    config = busy_config(2, fault=fault, fault_rank=1, fault_place=place)
    with pytest.raises(GroupFailed) as caught, group(config) as g:
        g.window(settle=0, steps=3, limit=30, stage="testing")
    assert caught.value.status == status
    assert words in caught.value.reason
    assert fault != "raise" or "lab_workloads.py" in caught.value.detail


def test_a_rank_that_the_kernel_kills_for_want_of_memory_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its count tells, for it says so to nobody; what it counted before the rank's last report was another process."""
    for counts, status, words in (([0, 1], "crashed", "SIGKILL in"), ([0, 0, 1], "oom", "SIGKILL for want of memory")):
        kills = iter(counts)
        monkeypatch.setattr(process, "oom_kills", lambda kills=kills, last=counts[-1]: next(kills, last))
        with pytest.raises(GroupFailed) as caught, group(busy_config(fault="kill")) as g:
            g.window(settle=0, steps=3, limit=30, stage="testing")
        assert caught.value.status == status
        assert f"rank 0 was killed by {words}" in caught.value.reason


def test_a_service_that_left_its_session_ends_with_its_group_and_no_other(tmp_path: Path) -> None:
    """Also where the rank died first."""
    for fault in ("", "kill"):
        with group(busy_config(service=str(tmp_path / "other"))) as other:
            with contextlib.suppress(GroupFailed), group(busy_config(service=str(tmp_path / "one"), fault=fault)) as g:
                g.window(settle=0, steps=1, limit=30, stage="testing")
                g.finish()
            one, kept = (int((tmp_path / name).read_text()) for name in ("one", "other"))
            assert alive([one, kept]) == [kept]
            other.finish()
        assert alive([kept]) == []


def test_who_kills_the_process_that_starts_ranks_is_blamed_and_others_go_on() -> None:
    with group(busy_config(2)) as innocent, group(busy_config(fault="kill parent", fault_step=1)) as guilty:
        server = psutil.Process(guilty.pids[0]).ppid()
        with contextlib.suppress(GroupFailed):
            guilty.window(settle=0, steps=3, limit=30, stage="testing")
        wait_for(lambda: not alive([server]), 30)  # a killed process takes a while to end
        innocent.window(settle=0, steps=3, limit=30, stage="testing")
        with pytest.raises(GroupFailed, match="rank 0: the process that starts ranks was killed in its turn"):
            guilty.window(settle=0, steps=3, limit=30, stage="testing")
        with group(busy_config()) as later:
            for g in (innocent, later):
                pids = g.pids
                assert g.window(settle=0, steps=2, limit=30, stage="testing")
                g.finish()
                wait_for(lambda: not alive(pids), 5)  # noqa: B023 - it is called at once


def test_the_process_that_starts_ranks_goes_on_where_one_of_them_has_stopped_it() -> None:
    for fault in ("stop parent", ""):
        with group(busy_config(fault=fault, fault_step=1)) as g:
            g.window(settle=0, steps=3, limit=30, stage="testing")
            g.finish()


def test_a_copy_of_a_rank_does_not_answer_in_its_place() -> None:
    with group(busy_config(fault="fork")) as g, pytest.raises(GroupFailed, match="both processes make its steps"):
        # Until the copy is the first to hear a command.
        [g.window(settle=0, steps=3, limit=30, stage="testing") for _ in range(200)]


def test_a_group_is_seen_off_again_where_a_signal_came_before_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    seen_off = LocalRank.close

    def interrupted(rank: LocalRank) -> None:
        seen_off(rank)
        if rank.job.rank:
            monkeypatch.undo()
            raise KeyboardInterrupt

    g = group(busy_config(2))
    pids = g.pids
    monkeypatch.setattr(LocalRank, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        g.kill()
    g.kill()
    assert alive(pids) == []
    assert not g.folder.exists()


def test_ranks_that_exchange_nothing_are_no_training_on_several() -> None:
    config = busy_config(2, alone=True)
    with group(config) as g:
        g.window(settle=0, steps=2, limit=30, stage="testing")
        said = mismatches(config, g.witness())
    expected = [f"rank {rank} exchanged nothing with the others in 2 steps" for rank in range(2)]
    assert [line.partition(", ")[2].partition(":")[0] for line in said] == expected


def test_a_full_disk_loses_nothing_that_was_measured() -> None:
    with group(busy_config(fault="full disk")) as g:
        (window,) = g.window(settle=0, steps=3, limit=30, stage="testing")
        g.finish()
    assert len(window["losses"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("alone", "steps", "place", "named"),
    [(False, 5, "forward", "rank 1"), (True, 10**9, "forward", "rank 1"), (False, 5, "all-reduce", "rank 0, rank 1")],
)
def test_a_hung_rank_is_named_with_what_it_was_doing(alone: bool, steps: int, place: str, named: str) -> None:
    """Also where the others do not wait for it, and work on; with those that wait for it at the very same mark."""
    with group(busy_config(2, fault="hang", fault_rank=1, fault_step=2, fault_place=place, alone=alone)) as g:
        where = rf"^{named} showed .*in '{place}' of step 3 \(lab_workloads.py, line \d+\)"
        with pytest.raises(GroupFailed, match=where) as caught:
            g.window(settle=0, steps=steps, limit=2, stage="testing")
    assert caught.value.status == "timed out"
    assert "lab_workloads.py" in caught.value.detail  # the stack, written by faulthandler


def test_a_job_that_was_suspended_is_not_taken_for_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a scheduler, or in a container: parent and ranks stop together for longer than any limit."""
    clock = [0.0]
    said = iter([False, False, True])

    def wait(*_: Any, **__: Any) -> None:
        clock[0] += 100.0 if clock[0] == 0.0 else 0.5

    monkeypatch.setattr(group_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(group_module, "connection", SimpleNamespace(wait=wait))
    silent = {"hear": lambda: next(said), "life": lambda: Life(clock[0], 0, 0, "forward"), "stack": str}
    job = object.__new__(Group)
    job._ranks = [SimpleNamespace(**silent, ears=(), report={}, ending=None)]  # type: ignore[list-item]
    job.config, job.limits, job.progress = busy_config(), Limits(), lambda _: None
    job.patience, job.folder = (lambda: math.inf), tmp_path
    assert job._reports(10.0, "testing") == [{}]
    assert job.suspended


def test_a_frozen_rank_is_found_and_leaving_kills_a_group_at_work() -> None:
    with group(busy_config(2)) as g:
        pids = g.pids
        os.kill(pids[0], signal.SIGSTOP)
        with pytest.raises(GroupFailed, match="rank 0 showed no sign of life"):
            g.window(settle=0, steps=1, limit=1, stage="testing")
    assert alive(pids) == []


# --- folders ---------------------------------------------------------------------------------------------------------

OWN = """
import os, signal, sys
from ddpm_lab.measure.process import private_folder
folder = private_folder()
print(folder.name, flush=True)
os.kill(os.getpid(), signal.SIGKILL if sys.argv[1:] else signal.SIGSTOP)
"""


def owner(parent: Path, *words: str) -> tuple[Path, subprocess.Popen[str]]:
    """A group's folder, and the process that owns it, which is killed or stands still."""
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True, "env": {**os.environ, "TMPDIR": str(parent)}}
    process = subprocess.Popen([sys.executable, "-c", OWN, *words], **how)
    assert process.stdout is not None
    return Path(process.stdout.readline().strip()), process


def test_folders_of_killed_parents_are_swept_and_all_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (gone, killed), (used, lives) = owner(tmp_path, "killed"), owner(tmp_path)
    killed.communicate()
    host = gone.name.rpartition(".")[0]
    unmarked, elsewhere = tmp_path / f"{host}.new", tmp_path / "ddpm_lab.0123456789ab.other"
    for folder in (unmarked, elsewhere):  # one that is just being made, and one of another host
        folder.mkdir()
    (elsewhere / "owner").touch()
    link = tmp_path / f"{host}.link"
    link.symlink_to(elsewhere)
    sweep()
    assert not gone.exists()
    assert all(folder.exists() for folder in (used, unmarked, elsewhere, link))
    lives.kill()
    lives.communicate()
    sweep()
    assert not used.exists()


def test_a_folder_whose_name_is_too_long_for_a_socket_is_not_used() -> None:
    with tempfile.TemporaryDirectory(prefix="\u4eee" * 12, dir="/tmp") as long:  # three bytes each
        folder, killed = owner(Path(long), "killed")
        killed.communicate()
        assert folder.parents[1] == Path("/tmp")
    sweep()
    assert not folder.parent.exists()


@pytest.mark.slow
def test_ranks_are_of_the_lab_that_measures_where_another_one_is_installed(tmp_path: Path) -> None:
    shutil.copytree(PACKAGE, tmp_path / "ddpm_lab", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / "ddpm_lab").symlink_to(PACKAGE)
    (tmp_path / "mine.py").write_text("""
import os, sys
def where():
    said = sys.modules["ddpm_lab.measure.rank"].__file__, os.environ["PYTHONPATH"]
    while True:
        yield print(*said, file=open("said", "w"))
""")
    code = """if True:
        from ddpm_lab.config import RunConfig
        from ddpm_lab.measure.group import Group
        with Group(RunConfig(workload="mine:where"), threads=1) as g:
            g.window(settle=0, steps=1, limit=60, stage="testing")
    """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, timeout=120, check=True)
    assert (tmp_path / "said").read_text().split() == [
        str(tmp_path / "ddpm_lab" / "measure" / "rank.py"),
        environment["PYTHONPATH"],
    ]


@pytest.mark.parametrize(
    ("torch", "said"),
    [
        (
            "raise ImportError('only once' if hasattr(sys, 'tried') else 'libcudart is missing')",
            "ImportError: libcudart is missing (torch.py, line 3)",
        ),
        ("raise MemoryError", "MemoryError (torch.py, line 3)"),
        ("import threading; del threading.Thread.start", "AttributeError: 'Thread' object has no attribute 'start'"),
    ],
)
def test_a_torch_or_a_thread_that_cannot_be_had_is_told_with_its_own_reason(
    torch: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(f"import sys\ntry:\n    {torch}\nfinally:\n    sys.tried = True\n")
    code = """if True:
        from ddpm_lab.config import RunConfig
        from ddpm_lab.measure.group import Group
        Group(RunConfig(), threads=1)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(PACKAGE.parent)])}
    run: dict[str, Any] = {"env": environment, "timeout": 120, "capture_output": True, "text": True}
    told = subprocess.run([sys.executable, "-c", code], check=False, **run).stderr
    assert told.count("Traceback") == 1  # the parent's own
    assert told.splitlines()[-1].endswith(f"GroupFailed: rank 0: {said}")


# --- what a killed process leaves ------------------------------------------------------------------------------------

HEADER = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from conftest import busy_config
from test_group import group
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_can_measure_and_killed_ranks_leave_no_semaphores(tmp_path: Path) -> None:
    """Ranks do not run their parent's main module again; locks that libraries make in a rank end in no warning."""
    script = tmp_path / "script.py"
    script.write_text(f"""{HEADER}
with group(busy_config(lock=True)) as g:
    print(len(g.window(settle=0, steps=1, limit=60, stage="testing")))
    g.finish()
with group(busy_config(lock=True)) as g:
    pass
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
