"""Several hosts as one machine: one process leads, every other one serves a rank on its host when it is told to.

They are the processes that torchrun starts. The leading one (rank 0) runs a command of the lab as on one machine; what
it starts on other hosts goes over one wire for each serving process. torchrun's own store is used once, to tell them
where the leader listens; that is on one address, and whoever connects must know the job's token: that of the store, or
a secret with which every process was started.
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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ddpm_lab.checks import ConfigError, LabError
from ddpm_lab.config import RunConfig
from ddpm_lab.measure import hardware
from ddpm_lab.measure.others import fair_cores, free_cores
from ddpm_lab.measure.process import host_id
from ddpm_lab.measure.torchrun import JOIN_SECONDS, Process, own_address
from ddpm_lab.measure.wire import Wire

GONE_SECONDS = 5.0
"""For so long nobody listens where torchrun's store was before the job is believed to be gone."""

SECRET = "DDPM_LAB_SECRET"
"""The job's token, where every process is started with it: then torchrun's store, which anybody can read, lacks it."""


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


LOOK_SECONDS = 0.2
"""Each sample of what others take of the cores, before training and sampling."""


def training_cores() -> int:
    """Cores of this host to train or sample with now: a fair share beside others (``fair_cores``).

    All of them in a job, whose ranks others have started: they would be taken for strangers.
    """
    return hardware.usable_cores() if _current else fair_cores(free_cores(seconds=LOOK_SECONDS))


def current() -> Fleet | None:
    """The hosts that this process leads; None where it is alone."""
    return _current


def usual_ranks(nodes: object = None) -> int:
    """Ranks of a run that does not say how many: all places of a job, on ``nodes`` of its hosts; one without a job."""
    if _current is None:
        return 1
    hosts = len(_current.hosts)
    return _current.node_size * (min(hosts, nodes) if isinstance(nodes, int) and nodes > 0 else hosts)


def idle(ranks: int) -> str:
    """What to say of a job's processes that serve no rank; empty where all do."""
    count = sum(map(len, _current.hosts)) if _current else 0
    if count <= ranks:
        return ""
    return f"{ranks} of the job's {count} processes serve{'s' if ranks == 1 else ''} a rank; {count - ranks} stay idle"


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
    told: dict[str, Any] | None = None
    while True:
        try:
            _await_store(process)
            store = process.store()
            told = json.loads(store.get("leader"))
            if "refused" in told:
                store.add("told", 1)
                raise ConfigError(f"the leading process (rank 0) has refused: {told['refused']}")
            left = max(1.0, deadline - time.monotonic())
            wire = Wire(socket.create_connection((told["address"], told["port"]), timeout=left))
            wire.send(**dataclasses.asdict(Introduction.of(process, _token_of(process, told))))
            return wire
        except (OSError, RuntimeError) as error:
            if time.monotonic() < deadline and isinstance(error, ConnectionError):
                time.sleep(1)
                continue
            reason = " ".join(str(error).split())[:200]
            if told is None:
                raise _gone(process, reason) from error
            raise ConfigError(
                f"rank {process.rank} on {socket.gethostname()} cannot reach the leading process: {reason}; "
                "is its address one that this host can reach (ddpm-lab rank --interface)?"
            ) from error


def _token_of(process: Process, told: dict[str, Any]) -> str:
    """The job's token: what every process was started with, or what the store says. Raises ConfigError without it."""
    token = told.get("token") or os.environ.get(SECRET)
    if not token:
        raise ConfigError(
            f"rank {process.rank} on {socket.gethostname()}: {SECRET} is set for rank 0 and not here: set it to the "
            "same on every host"
        )
    return str(token)


def _await_store(process: Process) -> None:
    """Return once somebody listens where torchrun's store is, which torchrun sees to before it starts a process.

    torch's own client would go on asking for minutes. Raises ConfigError where nobody does.
    """
    begun = time.monotonic()
    while True:
        try:
            socket.create_connection((process.master_address, process.master_port), timeout=GONE_SECONDS).close()
        except OSError as error:
            if time.monotonic() - begun > GONE_SECONDS:
                raise _gone(process, error.strerror or str(error)) from error
            time.sleep(0.5)
        else:
            return


def _gone(process: Process, reason: str) -> ConfigError:
    return ConfigError(
        f"rank {process.rank} on {socket.gethostname()}: the leading process (rank 0) did not come, and torchrun's "
        f"store at {process.master_address} port {process.master_port} does not answer ({reason}): see what rank 0 said"
    )


def _refuse(process: Process, reason: LabError) -> None:
    """Tell the others why the leader does not come, and wait until they know: the store goes when this process does."""
    with contextlib.suppress(RuntimeError, OSError):
        store = process.store()
        store.set("leader", json.dumps({"refused": str(reason)}))
        deadline = time.monotonic() + JOIN_SECONDS / 4
        while store.add("told", 0) < process.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.1)


def _gather(process: Process, interface: str | None) -> Fleet:
    try:
        address = own_address(process, interface)
    except LabError as refused:
        _refuse(process, refused)
        raise
    secret = os.environ.get(SECRET)
    token = secret or secrets.token_hex(16)
    with socket.create_server((address, 0), family=_family(address), backlog=process.world_size) as listener:
        port = listener.getsockname()[1]
        told = {"address": address, "port": port} | ({} if secret else {"token": token})
        process.store().set("leader", json.dumps(told))
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
