"""Hosts on one machine: network namespaces with real addresses, joined by a bridge, over links with a delay and a rate.

    with hosts([Link(delay_seconds=1e-3, bits_per_second=1e8)] * 2) as (first, second):
        subprocess.run(first.command("ping", "-c", "1", second.address))

Each host has an `eth0` and a loopback of its own. The bridge lies in one more namespace, so that nothing of the
machine's own network is touched and any number of these may exist at once. A link shapes what its host *sends*, as
`tc qdisc add dev eth0 root netem delay D rate R` does; kernels without netem get the same from a small relay between
two TAP devices (`python tests/namespaces.py relay ...`), which costs a core some 20 us for each frame.
"""

import contextlib
import dataclasses
import fcntl
import functools
import heapq
import itertools
import json
import os
import re
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PREFIX = "ddpm-lab"
INTERFACE = "eth0"
# A relay pays for each frame, so frames are large; the same with netem, so that both ways measure the same thing.
MTU_BYTES = 9000
_serial = itertools.count()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The cable from a host to the bridge: one-way delay and rate of what the host sends; None: as fast as it goes."""

    delay_seconds: float = 0.0
    bits_per_second: float | None = None

    @property
    def shaped(self) -> bool:
        return self.delay_seconds > 0 or self.bits_per_second is not None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A namespace with an address on the bridge. `interface` is what GLOO_SOCKET_IFNAME wants."""

    namespace: str
    address: str
    bridge: str
    port: str
    interface: str = INTERFACE

    def command(self, *arguments: str) -> list[str]:
        """The argument list that runs `arguments` here; `ip` becomes the command, so the process id is its own."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def cut(self) -> None:
        """Pull the cable out of the bridge: packets get lost, nobody is told."""
        _ip("-n", self.bridge, "link", "set", self.port, "down")

    def mend(self) -> None:
        _ip("-n", self.bridge, "link", "set", self.port, "up")


@functools.cache
def why_not() -> str | None:
    """Why hosts cannot be made here, as the reason of a skip; None where they can."""
    try:
        with hosts([Link()] * 2) as (first, _):
            subprocess.run(first.command("true"), check=True, capture_output=True)
    except FileNotFoundError:
        return "no `ip` command here (iproute2)"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here: {error.stderr.decode(errors='replace').strip()}"
    return None


@functools.cache
def why_no_shaping() -> str | None:
    """Why links cannot be given a delay and a rate here; None where they can."""
    if (reason := why_not()) is not None:
        return reason
    if not _has_netem() and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "this kernel has neither netem nor TAP devices"
    return None


@contextlib.contextmanager
def hosts(links: Sequence[Link]) -> Iterator[list[Host]]:
    """One host for each link, named by this process's id; all of them are gone at the end, whatever happens.

    Addresses are 10.77.0.1, .2, ... in the order of `links`; the bridge has 10.77.0.254.
    Raises subprocess.CalledProcessError where it is not permitted: ask `why_not` or `why_no_shaping` first.
    """
    _sweep()
    name = f"{PREFIX}-{os.getpid()}-{next(_serial)}"
    bridge = f"{name}-bridge"
    made = [
        Host(namespace=f"{name}-{i}", address=f"10.77.0.{i + 1}", bridge=bridge, port=f"port{i}")
        for i in range(len(links))
    ]
    with contextlib.ExitStack() as stack:
        for namespace in (bridge, *(host.namespace for host in made)):
            _ip("netns", "add", namespace)
            stack.callback(_ip, "netns", "del", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", bridge, "link", "add", "bridge", "mtu", str(MTU_BYTES), "type", "bridge")
        _ip("-n", bridge, "address", "add", "10.77.0.254/24", "dev", "bridge")
        _ip("-n", bridge, "link", "set", "bridge", "up")
        relayed = {} if _has_netem() else {i: link for i, link in enumerate(links) if link.shaped}
        if relayed:
            stack.enter_context(_relay_process(bridge, relayed))
        for index, (host, link) in enumerate(zip(made, links, strict=True)):
            if index in relayed:
                _ip("-n", bridge, "link", "set", f"host{index}", "netns", host.namespace, "name", INTERFACE)
            else:
                veth = ("type", "veth", "peer", "name", host.port, "netns", bridge)
                _ip("-n", host.namespace, "link", "add", INTERFACE, *veth)
                if link.shaped:
                    _netem(host.namespace, link)
            for namespace, device in ((host.namespace, INTERFACE), (bridge, host.port)):
                _ip("-n", namespace, "link", "set", device, "mtu", str(MTU_BYTES))
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip("-n", bridge, "link", "set", host.port, "master", "bridge")
            _ip("-n", bridge, "link", "set", host.port, "up")
            _ip("-n", host.namespace, "link", "set", INTERFACE, "up")
        yield made


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _sweep() -> None:
    """Remove what a killed process has left: its namespaces, and with them their devices."""
    names = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    for match in re.finditer(rf"^({PREFIX}-(\d+)-\S+)", names, re.MULTILINE):
        if not Path("/proc", match[2]).exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # another sweep was faster
                _ip("netns", "del", match[1])


@functools.cache
def _has_netem() -> bool:
    name = f"{PREFIX}-{os.getpid()}-netem"
    _ip("netns", "add", name)
    try:
        _netem(name, Link(delay_seconds=1e-3), device="lo")
    except subprocess.CalledProcessError:
        return False
    finally:
        _ip("netns", "del", name)
    return True


def _netem(namespace: str, link: Link, device: str = INTERFACE) -> None:
    rate = [] if link.bits_per_second is None else ["rate", f"{link.bits_per_second:.0f}bit"]
    # The default queue of 1,000 packets would drop what a window of TCP sends; a loss is not what is emulated.
    netem = ["netem", "limit", "100000", "delay", f"{link.delay_seconds * 1e6:.0f}us", *rate]
    subprocess.run(
        ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *netem], check=True, capture_output=True
    )


@contextlib.contextmanager
def _relay_process(bridge: str, links: dict[int, Link]) -> Iterator[None]:
    """TAP devices host<i> and port<i> in the bridge's namespace, and the process that moves frames between them.

    It ends with its standard input, so also when this process is killed, and its devices end with it.
    """
    settings = json.dumps({index: (link.delay_seconds, link.bits_per_second) for index, link in links.items()})
    command = ["ip", "netns", "exec", bridge, sys.executable, "-S", __file__, "relay", settings]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not process.stdout.readline():
                raise subprocess.CalledProcessError(process.wait(), command, stderr=b"no TAP device")
            yield
        finally:
            process.stdin.close()
            process.wait()


def _tap(name: str) -> int:
    tun_set_iff, iff_tap, iff_no_pi = 0x400454CA, 0x0002, 0x1000
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, tun_set_iff, struct.pack("16sH22x", name.encode(), iff_tap | iff_no_pi))
    return device


def _relay(links: dict[int, tuple[float, float | None]]) -> None:
    """Frames leave a host one after the other at the rate of its link, and arrive after its delay, as with netem."""
    with contextlib.suppress(OSError):  # it stands for hardware, which does not wait for a busy core
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(2))
    outgoing: dict[int, tuple[int, float, float]] = {}
    incoming: dict[int, int] = {}
    for index, (delay, rate) in links.items():
        host, port = _tap(f"host{index}"), _tap(f"port{index}")
        outgoing[host] = (port, delay, 0.0 if rate is None else 8 / rate)
        incoming[port] = host
    print("ready", flush=True)
    free_at = dict.fromkeys(outgoing, 0.0)
    waiting: list[tuple[float, int, int, bytes]] = []
    order = itertools.count()
    watched = [0, *outgoing, *incoming]
    while True:
        until_due = None if not waiting else max(waiting[0][0] - time.monotonic(), 0.0)
        readable, _, _ = select.select(watched, [], [], until_due)
        if 0 in readable:
            return
        for device in readable:
            with contextlib.suppress(BlockingIOError):
                frame = os.read(device, 1 << 16)
                if device in incoming:
                    _send(incoming[device], frame)
                    continue
                port, delay, seconds_per_byte = outgoing[device]
                now = time.monotonic()
                free_at[device] = max(free_at[device], now) + len(frame) * seconds_per_byte
                heapq.heappush(waiting, (free_at[device] + delay, next(order), port, frame))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, port, frame = heapq.heappop(waiting)
            _send(port, frame)


def _send(device: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # a device that is down loses the frame, as a cable does
        os.write(device, frame)


if __name__ == "__main__" and sys.argv[1:2] == ["relay"]:
    _relay({int(index): link for index, link in json.loads(sys.argv[2]).items()})
