"""The machine is read as it is: affinity, quotas, visible GPUs, and what others take."""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ddpm_lab.measure import hardware
from ddpm_lab.measure.hardware import CpuClock


def test_cores_are_those_the_affinity_allows() -> None:
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{one}}})\n"
        "from ddpm_lab.measure.hardware import usable_cores; print(usable_cores())"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "1"
    assert 1 <= hardware.usable_cores() <= len(os.sched_getaffinity(0))


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Sixteen cores, and the cgroup files that the test puts into the dictionary instead of the machine's own."""
    files: dict[str, str] = {}
    real = Path.read_text

    def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
        name = str(path)
        if name.startswith(("/sys/fs/cgroup", "/proc/self/cgroup", "/proc/stat")):
            if name not in files:
                raise FileNotFoundError(name)
            return files[name]
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    yield files
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "max 100000\n"}, 16),
        ({"/proc/self/cgroup": "0::/\n", "/sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
        (
            {  # the tightest of the groups above holds
                "/proc/self/cgroup": "0::/user/job\n",
                "/sys/fs/cgroup/user/job/cpu.max": "max 100000\n",
                "/sys/fs/cgroup/user/cpu.max": "350000 100000\n",
                "/sys/fs/cgroup/cpu.max": "800000 100000\n",
            },
            3,
        ),
        ({"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}, 16),
        (
            {  # version 1, a job's own group, as a scheduler makes it
                "/proc/self/cgroup": "5:cpuset:/\n4:cpu,cpuacct:/user/job\n",
                "/sys/fs/cgroup/cpu/user/job/cpu.cfs_quota_us": "-1\n",
                "/sys/fs/cgroup/cpu/user/cpu.cfs_quota_us": "600000\n",
                "/sys/fs/cgroup/cpu/user/cpu.cfs_period_us": "100000\n",
            },
            6,
        ),
        ({"/proc/self/cgroup": "nonsense\n", "/sys/fs/cgroup/cpu.max": "nonsense\n"}, 16),
    ],
)
def test_cores_are_cut_by_the_quota(cgroup: dict[str, str], files: dict[str, str], cores: int) -> None:
    cgroup.update(files)
    assert hardware.usable_cores() == cores


def test_the_environment_is_complete_and_dated() -> None:
    found = hardware.environment()
    assert found.machine == hardware.machine()
    assert found.machine.cpu
    assert found.machine.python == "{}.{}".format(*sys.version_info)
    assert set(found.packages) >= {"torch", "numpy", "pillow"}
    assert all(found.packages.values())
    assert found.ram_bytes
    assert found.ram_bytes > 1 << 28
    moment = datetime.fromisoformat(found.date)
    assert moment.tzinfo is not None
    assert abs(moment.timestamp() - time.time()) < 60


SPIN = "import time\nprint('go', flush=True)\nend = time.monotonic() + 30\nwhile time.monotonic() < end: pass"


def others_beside(command: list[str]) -> float | None:
    """Cores that a second of watching ascribes to others while ``command`` runs."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            pid = process.stdout.readline()
            before, begun = CpuClock.read(), time.monotonic()
            time.sleep(0.8)
            after, seconds = CpuClock.read(), time.monotonic() - begun
        finally:
            process.kill()
            if pid.strip().isdigit():
                os.kill(int(pid), 9)
    return before.others_cores(after, seconds)


@pytest.mark.alone
@pytest.mark.slow
def test_a_busy_stranger_is_seen_and_a_busy_child_is_not() -> None:
    mine = others_beside([sys.executable, "-c", SPIN])
    if mine is None:
        pytest.skip("a CPU quota holds here: what others take is unknown")
    # An orphan belongs to init: a stranger, as far as this process can tell.
    orphan = (
        "import os, time\npid = os.fork()\nif pid: print(pid, flush=True); os._exit(0)\nwhile True: time.monotonic()"
    )
    stranger = others_beside([sys.executable, "-c", orphan])
    assert stranger is not None
    assert stranger - mine > 0.4, "one core, less what the machine's other processes changed meanwhile"


def test_a_child_that_has_ended_is_no_stranger() -> None:
    code = "import time\nwhile time.process_time() < 0.5: pass"
    before = CpuClock.read()
    subprocess.run([sys.executable, "-c", code], check=True)
    after = CpuClock.read()
    assert after.own_seconds - before.own_seconds >= 0.45


# Ticks of user, nice, system, idle, iowait, irq, softirq, steal, guest (part of user), guest_nice
STAT = (
    "cpu  9999 0 0 0 0 0 0 999 0 0\ncpu0 {0} 0 0 9 9 0 0 {1} 0 0\ncpu1 1 1 1 9 9 1 1 {2} 1 0\n"
    "cpu4 {3} 0 0 9 9 0 0 {4} 0 0\nintr 1 2 3\n"
)


def test_only_the_cores_of_this_process_count(cgroup: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Core 0 is a neighbour's; cores 2 and 3 are switched off, so core 4 is third in the list."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4})
    tick = 1 / os.sysconf("SC_CLK_TCK")
    cgroup["/proc/stat"] = STAT.format(0, 0, 2, 100, 3)
    before = CpuClock.read()
    assert before.busy_seconds == pytest.approx(105 * tick)
    assert before.stolen_seconds == pytest.approx(5 * tick)
    cgroup["/proc/stat"] = STAT.format(7000, 7000, 2, 400, 10)
    after = dataclasses.replace(CpuClock.read(), own_seconds=before.own_seconds)
    assert before.others_cores(after, 2.0) == pytest.approx(150 * tick)
    assert before.stolen(after) == pytest.approx(7 * tick)


def test_under_a_quota_the_share_of_others_is_unknown(cgroup: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    cgroup |= {"/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "500000\n", "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"}
    cgroup["/proc/stat"] = STAT.format(1, 1, 1, 1, 1)
    now = CpuClock.read()
    assert now.others_cores(now, 1.0) is None
    assert (now.busy(now), now.stolen(now)) == (0.0, 0.0)
    cgroup["/sys/fs/cgroup/cpu/cpu.cfs_quota_us"] = "-1\n"
    free = CpuClock.read()
    assert free.others_cores(free, 1.0) == 0.0
    assert free.others_cores(now, 1.0) is None


@pytest.mark.parametrize("stat", [None, "cpux 1\n", "cpu0 1 2\n", STAT.format(1, 1, 1, 1, 1)])
def test_cores_that_the_kernel_does_not_show_are_unknown(cgroup: dict[str, str], stat: str | None) -> None:
    cgroup |= {} if stat is None else {"/proc/stat": stat}
    now = CpuClock.read()  # sixteen cores, as far as the affinity says
    assert now.others_cores(now, 1.0) is None
    assert now.stolen(now) is None


@pytest.mark.parametrize(
    ("files", "seconds"),
    [
        ({}, None),
        (
            {
                "/proc/self/cgroup": "0::/user/job\n",
                "/sys/fs/cgroup/user/job/cpu.stat": "throttled_usec 1500000\n",
                "/sys/fs/cgroup/user/cpu.stat": "throttled_usec 500000\n",
                "/sys/fs/cgroup/cpu.stat": "usage_usec 9\n",
            },
            2.0,
        ),
        ({"/sys/fs/cgroup/cpu/cpu.stat": "nr_periods 1\nnr_throttled 1\nthrottled_time 250000000\n"}, 0.25),
    ],
)
def test_time_that_a_quota_took_is_read_from_every_level(
    cgroup: dict[str, str], files: dict[str, str], seconds: float | None
) -> None:
    cgroup |= files
    assert hardware.cgroup_throttled_seconds() == (None if seconds is None else pytest.approx(seconds))
