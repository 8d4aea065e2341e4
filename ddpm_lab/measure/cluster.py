"""Several hosts as one machine, by the processes and the store of torchrun.

Rank 0 leads: it runs a command of the lab as on one machine. Every other process serves: it holds ranks on its host for
the leader, a fresh one for each group. Commands and results are JSON in queues of torchrun's store; whoever reaches
that store can take part, as with torch.distributed.
"""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from multiprocessing import Pipe, connection, resource_tracker
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.declared import parsed
from ddpm_lab.measure import hardware
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.measure.others import fair_cores, free_cores
from ddpm_lab.measure.process import (
    Ending,
    Life,
    LocalRank,
    RankJob,
    Store,
    host_id,
    join_store,
    private_folder,
)
from ddpm_lab.output import say

OF_HOST = ("NCCL_IB_", "NCCL_SOCKET_", "NCCL_NET", "NCCL_TOPO_FILE")
"""How the names of variables begin that may differ between hosts: they name cards and networks."""
JOIN_SECONDS = 120.0  # how long processes wait for each other, whose imports may come from a slow shared file system
BEAT_SECONDS = 1.0
LOST_BEATS = 4  # of silence, and a process is lost; the leader is waited for longer
STORE_SECONDS = 12.0  # a store that answers more slowly has gone: a name look-up may stall it for 5 s
LOOK_SECONDS = 0.6  # how long is looked at what others take of the cores, before training and sampling


class Process(NamedTuple):
    """A process that torchrun has started, and where the job's store is."""

    rank: int
    world_size: int
    local_rank: int
    hosts: int
    store: Store

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "Process":
        """Read what torchrun sets in the environment. Raises ConfigError where it did not."""
        try:
            job = "ddpm_lab/{TORCHELASTIC_RUN_ID}/{TORCHELASTIC_RESTART_COUNT}".format_map(environment)
            store = Store(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), job)
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_WORLD_SIZE")
            rank, size, local, hosts = (int(environment[name]) for name in names)
            return cls(rank, size, local, hosts, store)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"ddpm-lab rank needs what torchrun sets in the environment, and {error} is missing: "
                "start it as torchrun ... -m ddpm_lab rank COMMAND"
            ) from error

    def use_interface(self) -> None:
        """Have ranks exchange gradients over the user's GLOO_SOCKET_IFNAME, or what leads to torchrun's store.

        Raises ConfigError where the store cannot be reached, or at the loopback of one of several hosts.
        """
        address, interface = self.store.address, os.environ.get("GLOO_SOCKET_IFNAME")
        if interface is None:
            try:
                family, kind, _, _, there = socket.getaddrinfo(*self.store[:2], type=socket.SOCK_DGRAM)[0]
                with socket.socket(family, kind) as towards:
                    towards.connect(there)  # sends nothing
                    own = towards.getsockname()[0].split("%")[0]
            except OSError as error:
                raise ConfigError(f"torchrun's address {address} cannot be reached: {error}") from error
            names = {a.address.split("%")[0]: name for name, found in psutil.net_if_addrs().items() for a in found}
            interface = names.get(own)
            if self.hosts > 1 and (own.startswith("127.") or own == "::1"):
                raise ConfigError(
                    f"torchrun's address {address} is {own} here, which other hosts cannot reach: give torchrun "
                    "--local-addr with an address that they can, or set GLOO_SOCKET_IFNAME to a network interface; for "
                    f"a trial on this machine alone, GLOO_SOCKET_IFNAME={interface or 'lo'}"
                )
        if interface:  # some sandboxes list none
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # it would take eth1 for eth10 too


class Channel:
    """Messages between the leader and a process that serves: JSON in two queues of the job's store.

    Silence is counted in one's own beats, so that a process that was stopped does not take the other for lost.
    """

    def __init__(self, process: Process, inbox: str, outbox: str) -> None:
        self.ear, self._received = Pipe(duplex=False)  # readable while there is a message
        self.silent_beats = -JOIN_SECONDS / BEAT_SECONDS  # so long may the first message take
        self._inbox, self._outbox, self._leads = inbox, outbox, process.rank == 0
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read at torch's import: else waits in vain log lines
        try:
            self._from, self._to = (join_store(*process.store, seconds=JOIN_SECONDS) for _ in range(2))
            self._to.set("alive", "")
        except RuntimeError as error:
            raise ConfigError(
                f"rank {process.rank} on {socket.gethostname()}: torchrun's store at {process.store.address} port "
                f"{process.store.port} does not answer: see what rank 0 said"
            ) from error
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._receive, self._beat)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads: one that is inside the store while Python ends would abort the process."""
        self._closed.set()
        with contextlib.suppress(RuntimeError):
            self._to.queue_push(self._inbox, "{}")  # wakes the one that receives
        for thread in self._threads:
            thread.join(2 * BEAT_SECONDS)

    def send(self, **message: Any) -> None:
        """Send a message; nobody hears it once the channel is lost."""
        with contextlib.suppress(RuntimeError):  # the store has gone, which is noticed where one receives
            self._to.queue_push(self._outbox, json.dumps(message))

    def receive(self) -> dict[str, Any] | None:
        """The next message; None where there is none now."""
        return self.ear.recv() if self.ear.poll() else None

    def _beat(self) -> None:
        """Send an empty message every ``BEAT_SECONDS`` until closed, and count those since the other was heard."""
        with contextlib.suppress(RuntimeError):  # the store has gone
            while not self._closed.is_set():
                self.send()
                if self._leads:  # nobody is lost while the store is slow
                    self._to.wait(["alive"], timedelta(seconds=STORE_SECONDS))
                self.silent_beats += 1
                self._closed.wait(BEAT_SECONDS)
        self.silent_beats = math.inf

    def _receive(self) -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the store has gone, or what came is no JSON
            while not self._closed.is_set():
                message = parsed(self._from.queue_pop(self._inbox))
                self.silent_beats = 0 if self.silent_beats < math.inf else math.inf
                if message:
                    self._received.send(message)
        self.silent_beats = math.inf
        self._received.send({})


class Place(NamedTuple):
    """A process of the job, in which ranks can be held. The leader's own has no channel."""

    device_index: int
    host: str
    channel: Channel | None


class Cluster(NamedTuple):
    """The places for ranks on all hosts, those of one host beside each other; the leader's host comes first."""

    hosts: list[list[Place]]
    store: Store

    @property
    def node_size(self) -> int:
        """Ranks that each host has a place for."""
        return min(map(len, self.hosts))

    def places(self, config: RunConfig) -> list[Place]:
        """A place for every rank, in order. Raises ConfigError if there are too few."""
        if config.nodes > len(self.hosts) or config.node_size > self.node_size:
            raise ConfigError(
                f"{config.world_size} ranks on {config.nodes} hosts were asked for, and this job has {len(self.hosts)} "
                f"hosts with places for {self.node_size} ranks each: start it with more, or ask for fewer"
            )
        return [place for places in self.hosts[: config.nodes] for place in places[: config.node_size]]


_current: Cluster | None = None


def current() -> Cluster | None:
    """The hosts that this process leads; None where it is alone."""
    return _current


@contextlib.contextmanager
def leading(process: Process) -> Iterator[Cluster]:
    """Lead the other processes of a job inside the context. Raises ConfigError if any of them is missing or differs."""
    global _current  # noqa: PLW0603 - a process leads one job or none
    channels = {rank: Channel(process, f"from {rank}", f"to {rank}") for rank in range(1, process.world_size)}
    try:
        hosts: dict[str, list[Place]] = {}
        for rank, joined in enumerate(_joined(process)):
            place = Place(joined["device_index"], joined["host"], channels.get(rank))
            hosts.setdefault(joined["host_id"], []).append(place)
        _current = Cluster(list(hosts.values()), process.store)
        yield _current
    finally:
        _current = None
        for channel in channels.values():
            channel.send(do="end")
            channel.close()


def join(process: Process, **differing: str) -> Any:
    """Say in the store what this process is; returns the store."""
    said = {"device_index": process.local_rank, "host": socket.gethostname(), "host_id": host_id()}
    alike = {name: value for name, value in os.environ.items() if not name.startswith(OF_HOST)}
    code = code_version(environment=alike).key
    said |= {"machine": hardware.machine().key, "code": code, **differing}
    store = join_store(*process.store, seconds=JOIN_SECONDS)
    store.set(f"joined {process.rank}", json.dumps(said))
    return store


def _joined(process: Process) -> list[dict[str, Any]]:
    """What each process said, by its rank. Raises ConfigError if one stays away, or differs from this one."""
    store = join(process)
    names = [f"joined {rank}" for rank in range(process.world_size)]

    def missing(seconds: float) -> list[int]:
        with contextlib.suppress(RuntimeError):
            store.wait(names, timedelta(seconds=seconds))
        return [rank for rank, name in enumerate(names) if not store.check([name])]

    if late := missing(JOIN_SECONDS / 24):
        say(f"waiting up to {JOIN_SECONDS:.0f} s for rank {late[0]} to join", error=True)
    if late := late and missing(JOIN_SECONDS * 23 / 24):
        raise ConfigError(
            f"{len(names) - len(late)} of {len(names)} processes joined within {JOIN_SECONDS:.0f} s, and not rank "
            f"{late[0]}: do all hosts run the same command? See what that rank said"
        )
    found: list[dict[str, Any]] = [parsed(store.get(name)) for name in names]
    parts = {
        "machine": "processor, cores, GPUs, driver, torch or Python",
        "code": "the lab's code, or variables such as NCCL_ALGO",
    }
    for (part, words), there in itertools.product(parts.items(), found):
        if there[part] != found[0][part]:
            raise ConfigError(
                f"{there['host']} differs from {found[0]['host']} in {words}: measure like hosts together"
            )
    return found


def spread(ranks: object) -> int:
    """How few of the hosts that this process leads have room for so many ranks; what is no number has no say."""
    if _current is None or not isinstance(ranks, int) or ranks < 1:
        return 1
    return min(len(_current.hosts), -(-ranks // _current.node_size))


def usual_ranks(nodes: object = None) -> int:
    """Ranks of a run that does not say how many: all places of a job, on ``nodes`` of its hosts; one without a job."""
    if _current is None:
        return 1
    hosts = len(_current.hosts)
    return _current.node_size * (min(hosts, nodes) if isinstance(nodes, int) and nodes > 0 else hosts)


def training_cores() -> int:
    """Cores to train or sample with now: a fair share beside others; all in a job, whose ranks are no strangers."""
    return hardware.usable_cores() if _current else fair_cores(free_cores(LOOK_SECONDS))


class RemoteRank:
    """A rank that another process of the job holds, as a ``LocalRank`` there."""

    def __init__(self, job: RankJob, host: str, channel: Channel) -> None:
        assert job.store is not None, "ranks of several processes meet in the store"
        self.job, self.host, self.channel, self.group = job, host, channel, job.store.prefix
        self.ears = [channel.ear]  # ready when the rank speaks or ends
        self.report: dict[str, Any] = {}  # what the rank measured by its latest command
        self._life, self._heard = Life(0.0, 0, 0, "start"), time.monotonic()
        self.ending: Ending | None = None
        fields = {f.name: getattr(job, f.name) for f in dataclasses.fields(job) if f.name not in ("folder", "tree")}
        fields |= {"config": job.config.as_dict(), "modules": dict(job.modules)}
        self.channel.send(do="start", group=self.group, job=fields)

    @property
    def unheard(self) -> bool:
        """Whether the process that holds the rank may be lost, which takes some beats to know."""
        return self.channel.silent_beats > 1

    def tell(self, command: str, arguments: dict[str, Any]) -> None:
        self._life, self._heard = self._life._replace(silent_seconds=0.0), time.monotonic()
        self.channel.send(do="tell", group=self.group, command=command, arguments=arguments)

    def hear(self) -> bool:
        """Whether the rank has reported that it did what it was told; ``ending`` says why it will not."""
        while self.ending is None and (message := self.channel.receive()) is not None:
            if message.get("group") != self.group:
                continue  # of a group that has been killed since
            self._life, self._heard = Life(*message["life"]), time.monotonic()
            if "report" in message:
                self.report = message["report"]
                return True
            if "ending" in message:
                # From how long ago it was there: the clocks of two hosts have nothing in common.
                ending = Ending(*message["ending"])
                self.ending = ending._replace(time=self._heard - ending.time)
        if self.ending is None and self.channel.silent_beats >= LOST_BEATS:
            how = f"was lost: its process has not answered for {LOST_BEATS * BEAT_SECONDS:.0f} s"
            self.ending = Ending("crashed", how, "", time.monotonic(), reported=False)
        return False

    def life(self) -> Life:
        """The rank's last sign of life, as old as it is by now."""
        return self._life._replace(silent_seconds=self._life.silent_seconds + time.monotonic() - self._heard)

    def stack(self) -> str:
        """Nothing: it is known where the rank is held."""
        return ""

    def kill(self) -> None:
        """Have the rank killed; nobody waits for it, since what its process is sent next comes after that."""
        self.channel.send(do="kill", group=self.group)

    def close(self) -> None:
        """Nothing is held here."""


def serve(process: Process) -> int:
    """Hold ranks until the leader says that there is nothing more to do: 0. Raises ConfigError if it is lost."""
    # Signals go to every process of a job: what they mean is the leader's to say. Those that end a job are blocked,
    # since loader workers handle SIGTERM in a way of their own.
    resource_tracker.ensure_running()  # it would let SIGTERM through again
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGHUP})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(process, f"to {process.rank}", f"from {process.rank}")
    join(process)
    held: dict[str, _Held] = {}
    try:
        while channel.silent_beats < 4 * LOST_BEATS:
            working = [one for one in held.values() if one.at_work]
            connection.wait([channel.ear, *(ear for one in working for ear in one.ears)], BEAT_SECONDS)
            for one in working:
                channel.send(group=one.group, **one.news())
            while message := channel.receive():
                do, group = message["do"], str(message.get("group"))
                if do == "end":
                    return 0
                if do == "start":
                    try:
                        held[group] = _Held(group, message["job"])
                    except (ConfigError, EOFError, OSError, psutil.NoSuchProcess) as error:
                        ending = Ending("crashed", str(error) or "the process that starts ranks was killed", "", 0.0)
                        channel.send(group=group, life=Life(0.0, 0, 0, "start"), ending=ending)
                elif do == "kill" and group in held:
                    held.pop(group).end()
                elif do == "tell" and group in held:  # else it is too late
                    held[group].at_work = True
                    held[group].tell(message["command"], message["arguments"])
    finally:
        for one in held.values():
            one.end()
        channel.close()
    raise ConfigError(
        f"rank {process.rank} on {socket.gethostname()}: rank 0, which leads, no longer answers: see what it said"
    )


class _Held(LocalRank):
    """The rank of one group, in the process that holds it."""

    def __init__(self, group: str, job: dict[str, Any]) -> None:
        config = RunConfig.from_dict(job["config"])
        if config.data and not Path(config.data).is_dir():
            raise ConfigError(
                f"{config.data} does not exist here: put the images where all hosts see them, or prepare them there "
                "too (ddpm-lab prepare)"
            )
        self.group, self.at_work = group, True
        self._private = private_folder()
        changed = {"config": config, "store": Store(*job["store"]), "folder": Path(self._private.name)}
        super().__init__(RankJob(**{**job, **changed}))

    def news(self) -> dict[str, Any]:
        """What the rank says, or at least that it lives."""
        done, news = self.hear(), dict[str, Any](life=self.life())
        self.at_work = not (done or self.ending)
        if done:
            news["report"] = self.report
        elif self.ending:
            news["ending"] = self.ending._replace(time=time.monotonic() - self.ending.time)
        return news

    def end(self) -> None:
        self.kill()
        self.close()
        with contextlib.suppress(OSError):  # what others own in it stays
            self._private.cleanup()
