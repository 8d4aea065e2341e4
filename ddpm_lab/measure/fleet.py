"""Several hosts as one machine: one process leads, every other one serves a rank on its host when it is told to.

They are the processes that torchrun starts. The leading one (rank 0) runs a command of the lab as on one machine; what
it starts on other hosts goes over one wire for each serving process. torchrun's own store is used once, to tell them
where the leader listens; that is on one address, and whoever connects must know the job's token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.measure import hardware
from ddpm_lab.measure.process import host_id
from ddpm_lab.measure.wire import Wire

JOIN_SECONDS = 120.0
"""How long the leader waits for the others, whose imports may come from a slow shared file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """What torchrun tells a process of itself and of the others."""

    rank: int
    world_size: int
    local_rank: int
    hosts: int
    master_address: str
    master_port: int
    run_id: str

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Process:
        """Read from environment variables. Raises ConfigError where torchrun did not set them."""
        try:
            return cls(
                rank=int(environment["RANK"]),
                world_size=int(environment["WORLD_SIZE"]),
                local_rank=int(environment["LOCAL_RANK"]),
                hosts=int(environment["GROUP_WORLD_SIZE"]),
                master_address=environment["MASTER_ADDR"],
                master_port=int(environment["MASTER_PORT"]),
                run_id=environment["TORCHELASTIC_RUN_ID"],
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"ddpm-lab rank needs what torchrun tells its processes, and {error} is missing: "
                "start it as torchrun ... -m ddpm_lab rank COMMAND"
            ) from error

    def store(self) -> Any:
        """The store of torchrun, the part of it that belongs to this job."""
        from ddpm_lab.measure.meeting import store_at  # noqa: PLC0415 - torch only in what torchrun started

        return store_at(self.master_address, self.master_port, f"ddpm_lab/{self.run_id}", seconds=JOIN_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Introduction:
    """What a process says of itself when it joins."""

    token: str
    rank: int
    local_rank: int
    host: str
    host_id: str
    pid: int
    machine: str

    @classmethod
    def of(cls, process: Process, token: str) -> Introduction:
        """That of this process."""
        return cls(
            token=token,
            rank=process.rank,
            local_rank=process.local_rank,
            host=socket.gethostname(),
            host_id=host_id(),
            pid=os.getpid(),
            machine=hardware.machine().key,
        )


@dataclass(slots=True)
class Slot:
    """A place for a rank: a process of torchrun's. The leader's own has no wire."""

    number: int
    device_index: int
    host: str
    pid: int
    wire: Wire | None
    watches: bool = False
    relatives: tuple[int, ...] = ()
    lost: str = ""
    """``watches``: whether it reads for its host what others take, beside its ``relatives``, the other slots there."""


class Fleet:
    """The places for ranks on all hosts, those of one host beside each other; the leader's host comes first."""

    def __init__(self, hosts: list[list[Slot]], address: str) -> None:
        self.hosts, self.address = hosts, address

    @property
    def node_size(self) -> int:
        """Ranks that each host has a place for."""
        return min(map(len, self.hosts))

    @property
    def relatives(self) -> tuple[int, ...]:
        """The other processes of this job on the leader's host."""
        return tuple(slot.pid for slot in self.hosts[0][1:])

    def places(self, config: RunConfig) -> list[Slot]:
        """A place for every rank, in order. Raises ConfigError if there are too few."""
        if config.nodes > len(self.hosts) or config.node_size > self.node_size:
            raise ConfigError(
                f"{config.world_size} ranks on {config.nodes} hosts were asked for, and this job has {len(self.hosts)} "
                f"hosts with places for {self.node_size} ranks each: start it with more, or ask for fewer"
            )
        return [slot for slots in self.hosts[: config.nodes] for slot in slots[: config.node_size]]

    def listen(self) -> socket.socket:
        """A socket on the leader's address alone, with a port that the kernel chose."""
        return socket.create_server((self.address, 0), family=_family(self.address), backlog=128)

    def dismiss(self) -> None:
        """Tell the other processes that there is nothing more to do."""
        for slot in (slot for slots in self.hosts for slot in slots):
            if slot.wire:
                with contextlib.suppress(OSError):
                    slot.wire.send(do="end")
                slot.wire.close()


def fewest_hosts(ranks: int, hosts: int, places: int) -> int:
    """The fewest hosts, of ``hosts``, that have room for so many ranks, ``places`` on each (0: no limit)."""
    return min(hosts, -(-ranks // places)) if places else 1


_current: Fleet | None = None


def current() -> Fleet | None:
    """The hosts that this process leads; None where it is alone."""
    return _current


def spread(ranks: object) -> int:
    """Over how many of the hosts that this process leads so many ranks are spread; what is no number has no say."""
    if _current is None or not isinstance(ranks, int) or ranks < 1:
        return 1
    return fewest_hosts(ranks, len(_current.hosts), _current.node_size)


@contextlib.contextmanager
def leading(process: Process, interface: str | None = None) -> Iterator[Fleet]:
    """Lead the processes of a job for as long as the context lasts.

    Raises:
        ConfigError: they do not join, are unlike, or cannot reach this host.
    """
    global _current  # noqa: PLW0603 - a process leads one job or none
    fleet = _gather(process, interface)
    _current = fleet
    try:
        yield fleet
    finally:
        _current = None
        fleet.dismiss()


def join(process: Process) -> Wire:
    """Join the job's leader. Raises ConfigError if it cannot be found or reached.

    What the store says may be of a leader that has ended, where torchrun has started the job again: so ask again.
    """
    deadline = time.monotonic() + JOIN_SECONDS
    while True:
        try:
            told = json.loads(process.store().get("leader"))
            left = max(1.0, deadline - time.monotonic())
            wire = Wire(socket.create_connection((told["address"], told["port"]), timeout=left))
            wire.send(**dataclasses.asdict(Introduction.of(process, told["token"])))
            return wire
        except (OSError, RuntimeError) as error:
            if time.monotonic() < deadline and isinstance(error, ConnectionError):
                time.sleep(1)
                continue
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"rank {process.rank} on {socket.gethostname()} cannot reach the leading process: {reason}; "
                "is its address one that this host can reach (ddpm-lab rank --interface)?"
            ) from error


def _gather(process: Process, interface: str | None) -> Fleet:
    address = own_address(process, interface)
    token = secrets.token_hex(16)
    with socket.create_server((address, 0), family=_family(address), backlog=process.world_size) as listener:
        port = listener.getsockname()[1]
        process.store().set("leader", json.dumps({"address": address, "port": port, "token": token}))
        joined = _accept(listener, process.world_size - 1, token)
    me = Introduction.of(process, token)
    unlike = [there for _, there in joined if there.machine != me.machine]
    if unlike:
        _send_home([wire for wire, _ in joined])
        raise ConfigError(
            f"{unlike[0].host} is another machine than {me.host} (processor, cores, GPUs, driver, torch or Python "
            "differ): measure like hosts together"
        )
    hosts: dict[str, list[Slot]] = {me.host_id: [_slot(me, None)]}
    for wire, there in sorted(joined, key=lambda pair: pair[1].rank):
        hosts.setdefault(there.host_id, []).append(_slot(there, wire))
    for slots in list(hosts.values())[1:]:
        slots[0].watches = True
        slots[0].relatives = tuple(slot.pid for slot in slots[1:])
    return Fleet(list(hosts.values()), address)


def _slot(who: Introduction, wire: Wire | None) -> Slot:
    return Slot(number=who.rank, device_index=who.local_rank, host=who.host, pid=who.pid, wire=wire)


def _accept(listener: socket.socket, count: int, token: str) -> list[tuple[Wire, Introduction]]:
    """Wait for ``count`` processes that know the token; whoever else connects is sent away."""
    deadline = time.monotonic() + JOIN_SECONDS
    found: list[tuple[Wire, Introduction]] = []
    while len(found) < count:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            knocking = listener.accept()[0]
        except TimeoutError:
            _send_home([wire for wire, _ in found])
            raise ConfigError(
                f"{len(found)} of {count} other processes joined within {JOIN_SECONDS:.0f} s: do all hosts run the "
                f"same command, and can they reach {listener.getsockname()[0]} (ddpm-lab rank --interface)?"
            ) from None
        # Whoever connects and says nothing, or half a word, must not keep the others waiting.
        knocking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 10, 0))
        wire = Wire(knocking)
        try:
            said = Introduction(**wire.receive())
            invited = hmac.compare_digest(str(said.token).encode(), token.encode())
        except (OSError, EOFError, TypeError):
            invited = False
        if not invited:
            wire.close()
            continue
        wire.wait_for_ever()
        found.append((wire, said))
    return found


def _send_home(wires: list[Wire]) -> None:
    for wire in wires:
        with contextlib.suppress(OSError):
            wire.send(do="end")
        wire.close()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET


def addresses() -> dict[str, str]:
    """The network interface of each IP address of this host."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        a.address.split("%")[0]: n for n, found in psutil.net_if_addrs().items() for a in found if a.family in kinds
    }


def interface_of(address: str) -> str | None:
    """The name of the network interface that has an address of this host; None is unknown."""
    return addresses().get(address.split("%", maxsplit=1)[0])


def network_settings(address: str) -> dict[str, str]:
    """Environment that has ranks exchange gradients by the interface of an address, unless the user chose another."""
    own = interface_of(address)
    if own is None:
        return {}
    names = {"GLOO_SOCKET_IFNAME": own, "NCCL_SOCKET_IFNAME": f"={own}"}  # NCCL would take eth1 for eth10 too
    return {name: value for name, value in names.items() if name not in os.environ}


def own_address(process: Process, interface: str | None) -> str:
    """The address on which this host is reached by the others: that of ``interface``, or the one torchrun knows.

    Raises ConfigError where that is none of this host's, or is one that only this host itself can reach.
    """
    here = addresses()
    if interface is not None:
        own = [a for a, name in here.items() if interface in (a, name)]
        if not own:
            raise ConfigError(f"--interface is {interface!r}: choose one of {', '.join(sorted(set(here.values())))}")
        return min(own, key=lambda a: ipaddress.ip_address(a).version)
    try:
        named = [str(found[4][0]) for found in socket.getaddrinfo(process.master_address, None)]
    except OSError:
        named = []
    own = [a for a in named if a in here or ipaddress.ip_address(a).is_loopback]
    if not own:
        raise ConfigError(
            f"torchrun's address {process.master_address} is none of this host's: give ddpm-lab rank --interface"
        )
    if process.hosts > 1 and all(ipaddress.ip_address(a).is_loopback for a in own):
        raise ConfigError(
            f"torchrun's address {process.master_address} is {own[0]} here, which other hosts cannot reach: give "
            "torchrun --local-addr, or ddpm-lab rank --interface"
        )
    return next((a for a in own if not ipaddress.ip_address(a).is_loopback), own[0])
