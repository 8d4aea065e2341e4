"""Several hosts: who joins, where ranks are placed, and what is left when one of them is lost."""

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Call, busy_config
from namespaces import Host, Link, hosts, why_not

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.measure import fleet
from ddpm_lab.measure.fleet import Fleet, Slot, fewest_hosts

several_hosts = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
TESTS = Path(__file__).parent
TOLD = {
    **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "job"},
}
FOUND_SECONDS = 45
"""Three times the fifteen seconds within which a lost host is promised to be named."""


def slots(*hosts_of: str) -> list[list[Slot]]:
    """One slot for each letter, hosts apart: of "aa", "bb" the first is the leader's own."""
    numbers = iter(range(100))
    return [
        [Slot(number=next(numbers), device_index=i, host=name, pid=1, wire=None) for i, name in enumerate(names)]
        for names in hosts_of
    ]


def config(ranks: int, nodes: int) -> RunConfig:
    return dataclasses.replace(busy_config(), world_size=ranks, nodes=nodes, global_batch_size=ranks)


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected"), [(1, 1, [0]), (2, 1, [0, 1]), (2, 2, [0, 2]), (4, 2, [0, 1, 2, 3])]
)
def test_ranks_are_placed_host_by_host(ranks: int, nodes: int, expected: list[int]) -> None:
    led = Fleet(slots("aa", "bbb"), "127.0.0.1")
    assert [slot.number for slot in led.places(config(ranks, nodes))] == expected


@pytest.mark.parametrize(("ranks", "nodes"), [(3, 1), (3, 3), (6, 2)])
def test_too_few_places_are_refused(ranks: int, nodes: int) -> None:
    with pytest.raises(ConfigError, match=f"{ranks} ranks on {nodes} hosts.*2 hosts with places for 2"):
        Fleet(slots("aa", "bbb"), "127.0.0.1").places(config(ranks, nodes))


@pytest.mark.parametrize(
    ("ranks", "hosts_", "places", "expected"),
    [(1, 1, 0, 1), (8, 1, 4, 1), (1, 2, 4, 1), (4, 2, 4, 1), (5, 2, 4, 2), (9, 4, 4, 3)],
)
def test_ranks_go_to_as_few_hosts_as_hold_them(ranks: int, hosts_: int, places: int, expected: int) -> None:
    assert fewest_hosts(ranks, hosts_, places) == expected


@pytest.mark.parametrize("missing", TOLD)
def test_it_must_be_started_by_torchrun(missing: str, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TOLD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    code, _, err = call("rank", "run", "amp")
    assert code == 2
    assert missing in err
    assert "torchrun" in err


@pytest.mark.parametrize("words", [(), ("report",), ("rank", "run", "amp")])
def test_only_commands_that_start_ranks_run_on_several_hosts(words: tuple[str, ...], call: Call) -> None:
    code, _, err = call("rank", *words)
    assert code == 2
    assert "choose one of run, train, sample" in err


@pytest.mark.parametrize("option", [("--interface", "lo"), ("--interface=lo",)])
def test_an_option_of_rank_behind_the_command_is_told_its_place(option: tuple[str, ...], call: Call) -> None:
    code, _, err = call("rank", "run", "amp", *option)
    assert (code, err.count("\n")) == (2, 1)
    assert "give it before the command, as in rank --interface lo run" in err


@pytest.mark.parametrize(("led", "nodes", "ranks"), [(None, None, 1), (("aa",), None, 2), (("aa", "bb"), None, 4)])
def test_every_place_is_used_unless_it_is_said_otherwise(
    led: tuple[str, ...] | None, nodes: int | None, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "_current", led and Fleet(slots(*led), "127.0.0.1"))
    assert fleet.usual_ranks(nodes) == ranks
    assert fleet.idle(ranks) == ""
    if led:
        assert fleet.usual_ranks(1) == 2
        assert fleet.idle(1).endswith(f"{ranks - 1} stay idle")


def test_help_of_a_command_needs_no_torchrun(call: Call) -> None:
    code, out, err = call("rank", "run", "--help")
    assert (code, err) == (0, "")
    assert "--preset" in out


class Job:
    """A job of two hosts, one process on each, started by torchrun in two network namespaces."""

    def __init__(self, made: list[Host], rows: list[Any], environments: list[dict[str, str]]) -> None:
        self.made = made
        self.processes = []
        for i, (there, environment) in enumerate(zip(made, environments, strict=True)):
            meeting = ["--node-rank", str(i), "--master-addr", made[0].address, "--master-port", "29511"]
            script = [str(TESTS / "fleet_job.py"), json.dumps(rows)]
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
            self.processes.append(
                subprocess.Popen(
                    there.command(*torchrun, *meeting, *script),
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]), **environment},
                )
            )
        self.rows = self._lines()
        first = next(self.rows)
        self.leader, self.serving = first["leads"], first["serving"]

    def _lines(self) -> Iterator[dict[str, Any]]:
        out = self.processes[0].stdout
        assert out is not None
        for line in out:
            if line.startswith("{"):
                yield json.loads(line)

    def on(self, host: int) -> list[int]:
        """Processes in a host's namespace."""
        name = self.made[host].namespace
        shown = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True).stdout
        return [int(pid) for pid in shown.split() if psutil.pid_exists(int(pid))]

    def left(self, host: int) -> list[str]:
        """What is still running on a host after a while, torchrun's own agent aside."""
        agent = self.processes[host].pid
        deadline = time.monotonic() + FOUND_SECONDS
        while time.monotonic() < deadline and set(self.on(host)) - {agent}:
            time.sleep(0.2)
        names = []
        for pid in set(self.on(host)) - {agent}:
            with contextlib.suppress(psutil.Error):
                names.append(" ".join(psutil.Process(pid).cmdline()))
        return names

    def end(self) -> None:
        for pid in [p.pid for p in self.processes] + self.on(0) + self.on(1):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.communicate()


@contextlib.contextmanager
def job(rows: list[Any], environments: list[dict[str, str]] | None = None) -> Iterator[Job]:
    with hosts([Link()] * 2) as made:
        started = Job(made, rows, environments or [{}, {}])
        try:
            yield started
        finally:
            started.end()


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "raises in forward": ({"fault": "raise"}, "crashed", ": RuntimeError: planted fault"),
    "raises in a collective": ({"fault": "raise", "fault_place": "all-reduce"}, "crashed", ": RuntimeError: planted"),
    "raises in the loader": ({"fault": "raise", "fault_place": "data"}, "crashed", ": RuntimeError: planted"),
    "raises while it is built": ({"fault": "raise", "fault_place": "build"}, "crashed", ": RuntimeError: planted"),
    "is killed": ({"fault": "kill"}, "crashed", " was killed by SIGKILL in 'forward' of step 3"),
    "runs out of memory": ({"fault": "oom"}, "oom", ": OutOfMemoryError"),
    "hangs": ({"fault": "hang"}, "timed out", " showed no sign of life for 3 s while testing, in 'forward' of step 3"),
    "is frozen": ({"fault": "stop"}, "timed out", " while testing, in 'forward' of step 3"),
    "cannot write": ({"fault": "full disk"}, "crashed", ": OSError: [Errno 27] File too large"),
}


@several_hosts
@pytest.mark.slow
def test_two_hosts_work_as_one_and_each_fault_is_named_until_the_network_is_cut() -> None:
    endless = {"micro_steps": 10**9}
    rows = [
        ("works", 2, 2, {}),
        *((name, 2, 2, {"fault_rank": 1, "fault_step": 2, **options}) for name, (options, _, _) in FAULTS.items()),
        ("works again", 2, 2, {}),
        ("cut off", 2, 2, endless),
        ("lost", 2, 2, {}),
        ("goes on", 1, 1, {}),
    ]
    for row in rows:
        if row[0] == "raises while it is built":
            row[3]["fault_step"] = 0
    with job(rows) as running:
        found = next(running.rows)
        assert found["status"] == "ok", found
        assert len(set(found["hosts"])) == 2
        assert found["images"] == [5 * 4, 5 * 4]
        starts, ends = zip(*found["windows"], strict=True)
        assert max(starts) < min(ends), "the clocks of two hosts were mixed up"
        assert [list(there) for there in found["watched"]] == [["others_cores", "stolen_seconds"]]
        assert found["listening"]
        assert set(found["listening"]) == {running.made[0].address}, "somebody listens for more than this network"
        name = socket.gethostname()
        for fault, (_, status, words) in FAULTS.items():
            found = next(running.rows)
            assert (found["name"], found["status"]) == (fault, status), found
            assert found["reason"].startswith(f"rank 1 (host {name})"), found["reason"]
            assert words in found["reason"], found["reason"]
            assert found["seconds"] < FOUND_SECONDS
        assert next(running.rows)["status"] == "ok"
        assert next(running.rows)["at work"] == "cut off"
        time.sleep(1)
        running.made[1].cut()
        found = next(running.rows)
        assert found["status"] == "crashed"
        assert found["reason"].startswith(f"rank 1 (host {name}) was lost: its host no longer answers"), found["reason"]
        assert found["seconds"] < FOUND_SECONDS
        assert "was lost" in next(running.rows)["reason"]
        assert next(running.rows)["status"] == "ok"
        assert running.left(1) == []
        assert running.left(0) == []


@several_hosts
@pytest.mark.slow
@pytest.mark.parametrize("victim", ["serving process", "leader"])
def test_a_process_of_the_job_that_is_killed_leaves_nothing(victim: str) -> None:
    beside = {"beside": True} if victim == "serving process" else {}
    rows = [("at work", 2, 2, {"micro_steps": 10**9, **beside}), ("goes on", 1, 1, {})]
    with job(rows) as running:
        assert next(running.rows)["at work"] == "at work"
        os.kill(running.leader if victim == "leader" else running.serving[0], signal.SIGKILL)
        if victim == "leader":
            assert next(running.rows, None) is None
        else:
            found = next(running.rows)
            assert "was lost: its process on that host has ended" in found["reason"]
            assert found["other"].startswith("rank 1 (host"), "a group that slept meanwhile blames somebody else"
            assert "its process on that host has ended" in found["other"]
            assert found["seconds"] < FOUND_SECONDS
            assert next(running.rows)["status"] == "ok"
        assert running.left(0) == []
        assert running.left(1) == []
