"""Hosts on one machine: network namespaces with addresses of their own, joined by a bridge in one more namespace."""

import contextlib
import itertools
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PREFIX = "ddpm-lab"
_serial = itertools.count()


class Host(NamedTuple):
    """A namespace with an address on the bridge, at one of its ports."""

    namespace: str
    address: str
    bridge: str
    port: str

    def command(self, *arguments: str) -> list[str]:
        """The argument list that runs `arguments` here; `ip` becomes the command, so the process id is its own."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def pids(self) -> set[int]:
        """Processes that run here."""
        return set(map(int, _ip("netns", "pids", self.namespace).split()))

    def cut(self) -> None:
        """Pull the cable out of the bridge: packets get lost, nobody is told."""
        _ip("-n", self.bridge, "link", "set", self.port, "down")


def why_not() -> str | None:
    """Why hosts cannot be made here, as the reason of a skip; None where they can."""
    try:
        with hosts(1) as (first,):
            subprocess.run(first.command("true"), check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        return f"`ip` (iproute2) makes no network namespaces here: {error}"
    return None


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts with the addresses 10.77.0.1, .2, ...; all of them are gone at the end, whatever happens.

    Raises subprocess.CalledProcessError where it is not permitted: ask `why_not` first.
    """
    for name, pid in re.findall(rf"^({PREFIX}-(\d+)-\S+)", _ip("netns", "list"), re.MULTILINE):
        if not Path("/proc", pid).exists():  # left by a process that was killed
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", name)
    name = f"{PREFIX}-{os.getpid()}-{next(_serial)}"
    bridge = f"{name}-bridge"
    made = [Host(f"{name}-{i}", f"10.77.0.{i + 1}", bridge, f"port{i}") for i in range(count)]
    with contextlib.ExitStack() as stack:
        for namespace in (bridge, *(host.namespace for host in made)):
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "del", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        for host in made:
            veth = ("type", "veth", "peer", "name", host.port, "netns", bridge)
            _ip("-n", host.namespace, "link", "add", "eth0", *veth)
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
            _ip("-n", bridge, "link", "set", host.port, "master", "bridge", "up")
            _ip("-n", host.namespace, "link", "set", "eth0", "up")
        yield made


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
