"""Several hosts: who joins, where ranks are placed, and what is left when one of them is lost."""

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from conftest import busy_config

from ddpm_lab.checks import ConfigError
from ddpm_lab.measure import cluster
from ddpm_lab.measure.cluster import Cluster, Place, Process, leading
from ddpm_lab.measure.process import Store

# Hosts on one machine: two network namespaces with addresses of their own, joined by a cable


class Host(NamedTuple):
    """A namespace with an address on the cable."""

    namespace: str
    address: str

    def command(self, *arguments: str) -> list[str]:
        """The argument list that runs `arguments` here; `ip` becomes the command, so the process id is its own."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def pids(self) -> set[int]:
        """Processes that run here."""
        return set(map(int, _ip("netns", "pids", self.namespace).split()))

    def cut(self, other: str) -> None:
        """Send what is for another host to an address that nobody has: packets get lost, nobody is told."""
        _ip("-n", self.namespace, "neigh", "replace", other, "lladdr", "02:00:00:00:00:01", "dev", "eth0")


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Hosts with the addresses 10.77.0.1 and .2; both are gone at the end. Raises CalledProcessError without leave."""
    made = [Host(f"ddpm-lab-{os.getpid()}-{i}", f"10.77.0.{i + 1}") for i in range(2)]
    first, second = (host.namespace for host in made)
    with contextlib.ExitStack() as stack:
        for host in made:
            _ip("netns", "add", host.namespace)
            stack.callback(_ip, "netns", "del", host.namespace)
        _ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for host in made:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield made


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


try:
    with two_hosts():
        why_not = ""
except (FileNotFoundError, subprocess.CalledProcessError) as error:
    why_not = f"`ip` (iproute2) makes no network namespaces here: {error}"
several_hosts = pytest.mark.skipif(bool(why_not), reason=why_not)
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
    with pytest.raises(ConfigError, match=r"GLOO_SOCKET_IFNAME=lo$"):
        process.use_interface()
    with pytest.raises(ConfigError, match=r"MASTER_ADDR|TORCHELASTIC_RUN_ID"):
        Process.read({"RANK": "0"})
    assert os.environ == {}
    process._replace(hosts=1).use_interface()
    assert os.environ == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    monkeypatch.setattr(os, "environ", {"GLOO_SOCKET_IFNAME": "chosen"})
    process.use_interface()
    assert os.environ == {"GLOO_SOCKET_IFNAME": "chosen", "NCCL_SOCKET_IFNAME": "=chosen"}


@pytest.fixture
def store() -> Iterator[Store]:
    """A store as torchrun has it."""
    import torch.distributed as dist  # noqa: PLC0415

    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    yield STORE._replace(port=served.port)
    del served


def test_unlike_hosts_and_a_peer_that_stays_away_are_refused(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    assert capsys.readouterr().err == "waiting up to 1 s for rank 2 to join\n"
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_0")  # like hosts whose network cards have other names
    cluster.join(leader._replace(rank=1))
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5_1")
    with leading(leader):
        assert cluster.current()
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    refused(leader, "or variables such as NCCL_ALGO")
    channel.close()


@contextlib.contextmanager
def job(rows: list[Any]) -> Iterator[tuple[list[Host], list["subprocess.Popen[str]"], Iterator[dict[str, Any]]]]:
    """A job of two hosts, one process on each: the hosts, the torchruns, and what the leader says."""
    with two_hosts() as made:
        store = ("--master-addr", made[0].address, "--master-port", "29511")
        words = ("--nnodes", "2", "--nproc-per-node", "1", *store)
        told = (str(TESTS / "cluster_job.py"), json.dumps(rows))
        how: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        how["env"] = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
        torchrun = (sys.executable, "-m", "torch.distributed.run", *words)
        commands = [made[i].command(*torchrun, "--node-rank", str(i), *told) for i in range(2)]
        jobs = [subprocess.Popen(command, **how) for command in commands]
        try:
            assert jobs[0].stdout is not None
            yield made, jobs, (json.loads(line) for line in jobs[0].stdout if line.startswith("{"))
        finally:
            for pid in set.union(*(host.pids() for host in made)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for each in jobs:
                each.communicate()


def left(there: Host, agent: "subprocess.Popen[str]") -> list[str]:
    """What still runs on a host after a while, torchrun itself aside."""
    deadline = time.monotonic() + 30
    while (pids := there.pids() - {agent.pid}) and time.monotonic() < deadline:
        time.sleep(0.2)
    return [" ".join(psutil.Process(pid).cmdline()) for pid in pids]


FAULTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "raises in forward": ({"fault": "raise"}, "crashed", ": RuntimeError: planted fault"),
    "raises in build": ({"fault": "raise", "fault_place": "build", "fault_step": 0}, "crashed", ": RuntimeError: "),
    "is killed": ({"fault": "kill"}, "crashed", " was killed by SIGKILL in 'forward' of step 3"),
    "hangs": ({"fault": "hang"}, "timed out", " for 3 s while testing, in 'forward' of step 3"),
    "kills what starts ranks": (
        {"fault": "kill parent"},
        "crashed",
        ": the process that starts ranks was killed in its turn",
    ),
}


@several_hosts
@pytest.mark.slow
def test_two_hosts_work_as_one_and_each_fault_is_named_until_the_network_is_cut() -> None:
    planted = [(name, 2, 2, {"fault_rank": 1, "fault_step": 2, **options}) for name, (options, _, _) in FAULTS.items()]
    works: tuple[Any, ...] = ("works", 2, 2, {})
    lost = [("cut off", 2, 2, ENDLESS), ("lost", 2, 2, {}), ("goes on", 1, 1, {})]
    with job([works, *planted, works, *lost]) as (made, jobs, rows):
        found = next(rows)
        assert (found["status"], found["images"]) == ("ok", [5 * 4, 5 * 4]), found
        assert len(set(found["hosts"])) == 2
        starts, ends = zip(*found["windows"], strict=True)
        assert max(starts) < min(ends), "the clocks of two hosts were mixed up"
        assert found["listening"] == [made[0].address], "somebody listens for more than this network"
        name = f"rank 1 (host {socket.gethostname()})"
        for fault, (_, status, words) in FAULTS.items():
            found = next(rows)
            assert (found["name"], found["status"]) == (fault, status), found
            assert found["reason"].startswith(name), found["reason"]
            assert words in found["reason"], found["reason"]
            assert "raises" not in fault or "in step\n" in found["detail"] or ", line " in found["detail"]
        assert next(rows)["status"] == "ok"
        assert next(rows)["at work"] == "cut off"
        serving = psutil.Process(jobs[1].pid).children()[0]
        for meant_for_the_leader in (signal.SIGTERM, signal.SIGHUP):
            serving.send_signal(meant_for_the_leader)
        with pytest.raises(psutil.TimeoutExpired):
            serving.wait(1)
        for one, other in itertools.permutations(made):
            one.cut(other.address)
        found = next(rows)
        assert found["reason"].startswith(f"{name} was lost: "), found["reason"]
        assert found["seconds"] < 20
        assert "was lost" in next(rows)["reason"]
        assert next(rows)["status"] == "ok"
        assert left(made[1], jobs[1]) == []
        assert left(made[0], jobs[0]) == []


@several_hosts
@pytest.mark.slow
def test_the_death_of_the_leader_leaves_nothing() -> None:
    with job([("at work", 2, 2, ENDLESS)]) as (made, jobs, rows):
        assert next(rows)["at work"]
        psutil.Process(jobs[0].pid).children()[0].kill()
        assert next(rows, None) is None
        assert [left(there, agent) for there, agent in zip(made, jobs, strict=True)] == [[], []]
        assert "rank 0, which leads, no longer answers" in jobs[1].communicate(timeout=60)[1]
