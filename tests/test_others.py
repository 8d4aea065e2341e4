"""What other processes take of the cores, and one measurement at a time on a core."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import psutil
import pytest

from ddpm_lab.measure import others
from ddpm_lab.measure.others import LOCK_VARIABLE, CpuClock, measuring


def others_beside(command: list[str]) -> float | None:
    """Cores that a second of watching ascribes to others while ``command`` runs, which says its process id."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        before = CpuClock.read()
        time.sleep(0.8)
        after = CpuClock.read()
        os.kill(pid, signal.SIGKILL)
    return before.until(after).others_cores


@pytest.mark.alone
@pytest.mark.slow
def test_a_busy_stranger_is_seen_and_a_busy_child_is_not() -> None:
    spin = "import os, time\nprint(os.getpid(), flush=True)\nwhile True: time.monotonic()"
    mine = others_beside([sys.executable, "-c", spin])
    if mine is None:
        pytest.skip("a CPU quota holds here: what others take is unknown")
    # An orphan belongs to init: a stranger, as far as this process can tell.
    stranger = others_beside([sys.executable, "-c", f"import os\nif os.fork(): os._exit(0)\n{spin}"])
    assert stranger is not None
    assert stranger - mine > 0.4, "one core, less what the machine's other processes changed meanwhile"


Times = namedtuple("Times", "user nice system idle iowait irq softirq steal guest guest_nice")


def listed(files: dict[str, str], monkeypatch: pytest.MonkeyPatch, *cores: tuple[float, float]) -> None:
    """Plant what each core was busy and had stolen, in seconds."""
    files["/proc/stat"] = f"cpu{len(cores) - 1} 1\n"
    times = [Times(busy - 0.5, 0, 0.5, 9, 9, 0, 0, stolen, 1, 0) for busy, stolen in cores]
    monkeypatch.setattr(psutil, "cpu_times", lambda **_: times)


def test_only_the_cores_of_this_process_count(machine_files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Core 0 is a neighbour's."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2})
    listed(machine_files, monkeypatch, (7, 0), (1, 0.5), (2, 1))
    before = CpuClock.read()
    assert (before.busy, before.stolen) == (3, 1.5)
    listed(machine_files, monkeypatch, (90, 9), (2, 0.5), (4, 1.25))
    use = before.until(CpuClock.read()._replace(own=before.own, moment=before.moment + 2))
    assert (use.others_cores, use.stolen) == (1.5, 0.25)


def test_what_others_take_is_unknown_under_a_quota_and_where_the_kernel_shows_no_such_cores(
    machine_files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    listed(machine_files, monkeypatch, *[(1, 1)] * 15)
    use = CpuClock.read().until(CpuClock.read())  # sixteen cores, as far as the affinity says
    assert (use.others_cores, use.stolen) == (None, None)
    listed(machine_files, monkeypatch, *[(1, 1)] * 16)
    assert CpuClock.read().until(CpuClock.read()).others_cores == 0.0
    machine_files |= {"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "500000 100000\n"}
    use = CpuClock.read().until(CpuClock.read())
    assert (use.busy, use.stolen, use.others_cores) == (0.0, None, None)
    machine_files["/sys/fs/cgroup/cpu.max"] = "1600000 100000\n"  # as a pod has that owns its cores
    use = CpuClock.read().until(CpuClock.read())
    assert (use.stolen, use.others_cores) == (0.0, 0.0), "a quota of all cores leaves none to others"
    machine_files["/proc/stat"] = "cpu16 1\n"
    assert CpuClock.read().busy is None, "one of the first sixteen is switched off"


# Free cores


def test_free_cores_are_those_that_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four; what others take at the first look and at a longer one. Half a core counts as taken, one is left."""
    rows: list[tuple[list[float | None], int]] = [([0.24], 4), ([0.25, 0.49], 4), ([0.25, 0.5], 3), ([3.0, 0.0], 4)]
    looks: list[float | None] = []
    monkeypatch.setattr(others, "usable_cores", lambda: 4)
    monkeypatch.setattr(others, "others_cores", lambda _: looks.pop(0))
    rows += [([64.0, 64.0], 1), ([None], 4), ([2.0, None], 4)]
    for taken, found in rows:
        looks += taken
        assert (others.free_cores(), looks) == (found, []), taken


def test_a_watch_says_after_a_minute_how_many_cores_were_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of two minutes that agree; of four cores, with what others take from one reading to the next."""
    now, busy, alone = [0.0], [0.0], [True]
    monkeypatch.setattr(others, "CpuClock", SimpleNamespace(read=lambda: CpuClock(now[0], 0.0, busy[0], 0.0)))
    monkeypatch.setattr(others, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(others, "side_by_side", lambda: not alone[0])
    monkeypatch.setattr(others, "usable_cores", lambda: 4)
    watch, found = others.CoreWatch(), []
    for cores in (1.2, 1.4, 0.0, 0.1, None, 9.0, 9.0):
        alone[0] = cores is not None
        now[0] += 59
        assert watch.free() is None, "a minute has not passed"
        now[0] += 1
        busy[0] += 60 * (cores or 0.0)
        found.append(watch.free())
    assert found == [None, 3, None, 4, None, None, 1]


# One measurement at a time

HOLDER = """
import os, sys, time
from ddpm_lab.measure.others import measuring
os.sched_setaffinity(0, {int(c) for c in sys.argv[1].split(",")})
with measuring(lambda text: print(text, flush=True)) as waited:
    print("has it", waited, flush=True)
    sys.stdin.readline()
"""
CORES = sorted(os.sched_getaffinity(0))
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts processes that measure on some cores, with a lock of the test's own."""
    monkeypatch.setenv(LOCK_VARIABLE, f"ddpm_lab-test-{os.getpid()}")
    with contextlib.ExitStack() as stack:

        def start(*cores: int) -> subprocess.Popen[str]:
            words = [sys.executable, "-c", HOLDER, ",".join(map(str, cores))]
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield start


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_second_process_waits_until_the_first_is_killed_unless_it_measures_on_other_cores(start: Start) -> None:
    said: list[str] = []
    holder = start(CORES[0])
    assert line(holder) == "has it False"
    if len(CORES) > 1:
        assert line(start(CORES[1])) == "has it False"

    def say(text: str) -> None:
        said.append(text)
        holder.send_signal(signal.SIGKILL)

    os.sched_setaffinity(0, CORES[:1])
    try:
        with measuring(say) as waited:
            assert waited
    finally:
        os.sched_setaffinity(0, CORES)
    assert len(said) == 1


def test_it_is_taken_once_and_a_search_may_measure_within_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    with measuring(print) as first:
        with measuring(print) as second:
            assert (first, second) == (False, False)
        process = start(*CORES)
        assert "another process" in line(process), "the inner one let go of what the outer one holds"
    assert line(process) == "has it True"
    monkeypatch.setenv(LOCK_VARIABLE, "")
    with measuring(print) as waited:
        assert not waited, "without a name nobody waits"
