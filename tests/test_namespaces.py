"""Hosts made of network namespaces: they reach each other, over links as slow as was asked, and leave nothing."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from namespaces import PREFIX, Host, Link, hosts, why_no_shaping, why_not

pytestmark = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
shaping = pytest.mark.skipif(why_no_shaping() is not None, reason=str(why_no_shaping()))

SERVER = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    with server.accept()[0] as client:
        while data := client.recv(1 << 20):
            if data.endswith(b"?"):
                client.sendall(b"!")
"""
CLIENT = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5000)) as server:
    for size in map(int, sys.argv[2:]):
        start = time.monotonic()
        server.sendall(bytes(size) + b"?")
        server.recv(1)
        print(time.monotonic() - start)
"""


def _seconds(client: Host, server: Host, sizes: list[int]) -> list[float]:
    """How long it takes until `server` has acknowledged a message of each size, in bytes."""
    listening = server.command(sys.executable, "-S", "-c", SERVER)
    with subprocess.Popen(listening, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        asking = client.command(sys.executable, "-S", "-c", CLIENT, server.address, *map(str, sizes))
        answer = subprocess.run(asking, check=True, capture_output=True, text=True, timeout=60)
    return [float(line) for line in answer.stdout.split()]


def _left() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_hosts_have_addresses_and_only_their_own_interfaces() -> None:
    with hosts([Link()] * 2) as made:
        assert [host.address for host in made] == ["10.77.0.1", "10.77.0.2"]
        for host in made:
            shown = subprocess.run(host.command("ip", "-brief", "link"), capture_output=True, text=True, check=True)
            assert sorted(line.split()[0].split("@")[0] for line in shown.stdout.splitlines()) == ["eth0", "lo"]
        assert len(_seconds(made[0], made[1], [1])) == 1


@shaping
def test_a_link_delays_what_its_host_sends_and_no_more_than_that() -> None:
    slow, fast = Link(delay_seconds=30e-3), Link()
    with hosts([slow, slow, fast, fast]) as (a, b, c, d):
        both, one, none = (min(_seconds(*pair, [1] * 4)) for pair in ((a, b), (a, c), (c, d)))
    assert both >= 60e-3
    assert 30e-3 <= one < both
    assert none < one


@shaping
def test_a_link_sends_no_faster_than_its_rate() -> None:
    slow, fast = Link(bits_per_second=5e7), Link()
    with hosts([slow, fast]) as (sender, receiver):
        size = 1_000_000  # 0.16 s at this rate, headers not counted
        assert min(_seconds(sender, receiver, [size] * 2)) >= 8 * size / 5e7 * 0.95
        assert min(_seconds(receiver, sender, [size] * 4)) < 8 * size / 5e7


def test_a_cut_cable_loses_packets_until_it_is_mended() -> None:
    with hosts([Link()] * 2) as (first, second):
        ask = first.command("bash", "-c", f"timeout 0.3 bash -c '</dev/tcp/{second.address}/5000'")
        second.cut()
        asked = subprocess.run(ask, check=False, capture_output=True)
        assert asked.returncode == 124  # waited in vain: nobody refused either
        second.mend()
        assert len(_seconds(first, second, [1])) == 1


def test_nothing_is_left_even_after_a_failure() -> None:
    def fail() -> None:
        with hosts([Link(delay_seconds=1e-3), Link()]) as (first, _):
            raise ZeroDivisionError(first.namespace in _left())

    with pytest.raises(ZeroDivisionError, match="True"):
        fail()
    assert f"{PREFIX}-{os.getpid()}-" not in _left()


def test_what_a_killed_process_left_is_removed() -> None:
    holding = "from namespaces import *\nwith hosts([Link()]): print('made', flush=True); input()"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-S", "-c", holding], cwd=Path(__file__).parent, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"made\n"
        process.kill()
    assert f"{PREFIX}-{process.pid}-" in _left()
    with hosts([Link()]):
        assert f"{PREFIX}-{process.pid}-" not in _left()
