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
from conftest import alive, busy_config

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure import cluster
from ddpm_lab.measure.cluster import Cluster, Place, Process, leading
from ddpm_lab.measure.group import Group
from ddpm_lab.measure.process import Store

TESTS = Path(__file__).parent
STORE = Store("127.0.0.1", 1, "job")
ENDLESS = {"micro_steps": 10**9}


def test_ranks_are_placed_host_by_host_and_a_wrong_number_of_hosts_is_refused() -> None:
    """Places called by a letter each; the first two are on the leader's host."""
    cluster = Cluster([[Place(i, name, None) for i, name in enumerate(names)] for names in ("ab", "cde")], STORE)
    for ranks, nodes, expected in ((1, 1, "a"), (2, 1, "ab"), (2, 2, "ac"), (4, 2, "abcd"), (3, 1, ""), (3, 3, "")):
        config = dataclasses.replace(busy_config(), world_size=ranks, nodes=nodes, global_batch_size=ranks)
        if expected:
            assert "".join(place.host for place in cluster.places(config)) == expected
        else:
            with pytest.raises(ConfigError, match=f"{ranks} ranks on {nodes} hosts.*2 hosts with places for 2"):
                cluster.places(config)


def test_ranks_use_an_interface_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    process = Process(0, 2, 0, 2, STORE)
    with pytest.raises(ConfigError, match=r"--interface lo$"):
        process.use(None)
    with pytest.raises(ConfigError, match="'nonsense0'"):
        process.use("nonsense0")
    with pytest.raises(ConfigError, match=r"MASTER_ADDR|TORCHELASTIC_RUN_ID"):
        Process.read({"RANK": "0"})
    assert os.environ == {}
    process._replace(hosts=1).use(None)
    assert os.environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "chosen"})
    process.use("lo")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"


def test_the_clocks_of_two_hosts_are_lined_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks leave the barrier before a window together; which second that is, each host says otherwise."""
    said = [("a", 5.0, 6.0), ("a", 5.25, 6.0), ("b", 100.0, 101.5), ("b", 100.5, 101.0)]
    reports = [{"host": host, "start": start, "end": end} for host, start, end in said]
    monkeypatch.setattr(Group, "ask", lambda *_, **__: reports)
    found = object.__new__(Group).window(settle=0, steps=1, limit=1, stage="testing")
    assert [(r["start"], r["end"]) for r in found] == [(5.0, 6.0), (5.25, 6.0), (5.0, 6.5), (5.5, 6.0)]


@pytest.fixture
def store() -> Iterator[Store]:
    """A store as torchrun has it."""
    import torch.distributed as dist  # noqa: PLC0415

    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield STORE._replace(port=served.port)
    del served


def test_unlike_hosts_and_a_peer_that_stays_away_are_refused(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    leader = Process(0, 2, 0, 1, store)
    channel = cluster.Channel(leader._replace(rank=1), "to 1", "from 1")

    def refused(leader: Process, match: str) -> None:
        with pytest.raises(ConfigError, match=match), leading(leader):
            pass
        assert cluster.current() is None
        assert channel.ear.poll(5)
        assert channel.receive() == {"do": "end"}

    for part, words in (("machine", "processor"), ("code", "the lab's code")):
        cluster.join(leader._replace(rank=1), host="elsewhere", **{part: "unlike"})
        refused(leader, f"elsewhere differs from .* in {words}")
    monkeypatch.setattr(cluster, "JOIN_SECONDS", 1.0)
    begun = time.monotonic()
    refused(leader._replace(world_size=3), "2 of 3 processes joined within 1 s, and not rank 2:")
    assert time.monotonic() - begun < 2.0
    channel.close()


Job = tuple[list["subprocess.Popen[str]"], Iterator[dict[str, Any]]]


@contextlib.contextmanager
def job(rows: list[Any]) -> Iterator[Job]:
    """A job of two torchruns with one process each, as on two hosts: these, and what the leader says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        store = ("--master-addr", "127.0.0.1", "--master-port", str(free.getsockname()[1]))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *store)
    told = (str(TESTS / "cluster_job.py"), json.dumps(rows))
    how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    how["env"] = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    jobs = [subprocess.Popen([*torchrun, "--node-rank", str(i), *told], **how) for i in range(2)]
    try:
        assert jobs[0].stdout is not None
        yield jobs, (json.loads(line) for line in jobs[0].stdout if line.startswith("{"))
    finally:
        for each in jobs:
            for process in below(each):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            each.kill()
            each.communicate()


def below(agent: "subprocess.Popen[str]") -> list[psutil.Process]:
    """What a torchrun has started, its process first, and what that has."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(agent.pid).children(recursive=True)
    return []


def left(processes: list[psutil.Process]) -> list[int]:
    """Those that still run after a while."""
    deadline = time.monotonic() + 30
    while (found := alive([process.pid for process in processes])) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "raises in forward": ({"fault": "raise"}, "crashed", ": RuntimeError: planted fault"),
    "raises in a collective": ({"fault": "raise", "fault_place": "all-reduce"}, "crashed", ": RuntimeError: planted"),
    "raises in build": ({"fault": "raise", "fault_place": "build", "fault_step": 0}, "crashed", ": RuntimeError: "),
    "is killed": ({"fault": "kill"}, "crashed", " was killed by SIGKILL in 'forward' of step 3"),
    "hangs": ({"fault": "hang"}, "timed out", " for 3 s while testing, in 'forward' of step 3"),
    "is frozen": ({"fault": "stop"}, "timed out", " while testing, in 'forward' of step 3"),
}
NAME = f"rank 1 (host {socket.gethostname()})"


@pytest.mark.slow
def test_two_processes_work_as_one_and_each_fault_is_named() -> None:
    planted = [(name, 2, {"fault_rank": 1, "fault_step": 2, **options}) for name, (options, _, _) in FAULTS.items()]
    works: tuple[Any, ...] = ("works", 2, {})
    with job([works, *planted, works]) as (jobs, rows):
        found = next(rows)
        assert (found["status"], found["images"]) == ("ok", [5 * 4, 5 * 4]), found
        assert [list(there) for there in found["watched"]] == [["others_cores", "stolen_seconds"]]
        assert found["listening"] == ["127.0.0.1"], "somebody listens for more than this network"
        held = [process for agent in jobs for process in below(agent)]
        for fault, (_, status, words) in FAULTS.items():
            found = next(rows)
            assert (found["name"], found["status"]) == (fault, status), found
            assert found["reason"].startswith(NAME), found["reason"]
            assert words in found["reason"], found["reason"]
            assert fault in ("is killed", "is frozen") or "in step\n" in found["detail"] or ", line " in found["detail"]
        assert next(rows)["status"] == "ok"
        assert next(rows, None) is None
        assert left(held) == []


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_serving_process_that_is_lost_is_named_within_seconds(how: signal.Signals) -> None:
    with job([("at work", 2, ENDLESS), ("goes on", 1, {})]) as (jobs, rows):
        assert next(rows)["at work"]
        serving, *ranks = below(jobs[1])
        serving.send_signal(how)
        found = next(rows)
        assert found["reason"].startswith(f"{NAME} was lost: "), found["reason"]
        assert found["seconds"] < 6
        assert next(rows)["status"] == "ok"
        serving.send_signal(signal.SIGCONT) if how == signal.SIGSTOP else None
        assert left([serving, *ranks]) == []


@pytest.mark.slow
def test_the_death_of_the_leader_leaves_nothing() -> None:
    with job([("at work", 2, ENDLESS)]) as (jobs, rows):
        assert next(rows)["at work"]
        held = [process for agent in jobs for process in below(agent)]
        below(jobs[0])[0].kill()
        assert next(rows, None) is None
        assert left(held) == []
        assert "rank 0, which leads, no longer answers" in jobs[1].communicate(timeout=60)[1]
