"""A group: the ranks of one configuration in one set, started fresh, watched, and gone without a trace.

The parent sleeps while ranks work. It judges each rank by its own heartbeat, not by a collective's time-out, so that
it can name the rank that hangs, where it ran and what it was doing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import psutil

from ddpm_lab.config import DDPM, RunConfig
from ddpm_lab.measure.cluster import Place, RemoteRank, current
from ddpm_lab.measure.code_version import Loaded
from ddpm_lab.measure.guard import Paused
from ddpm_lab.measure.hook import opened
from ddpm_lab.measure.process import Life, LocalRank, RankJob, own_places, private_folder, server_died

SLOW_START_SECONDS = 60.0  # that somebody's own code may take at least, silently: to import, say, from a slow disk
AWAY_SECONDS = 5.0  # between two looks at the clock: this process was stopped itself, as with a whole suspended job
LAST_WORDS_SECONDS = 2.0  # that the others have to say what they failed of: who failed first is to blame

Progress = Callable[[str], None]


class GroupFailed(RuntimeError):  # noqa: N818 - an outcome that becomes a row
    """A configuration that could not be measured: its status, one sentence of reason, and the rank's own traceback."""

    def __init__(self, status: str, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.status, self.reason, self.detail = status, reason, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Longest silence of a rank in seconds: until it is warm; in a window, or 20 warm steps; at the end."""

    build_seconds: float = 600.0
    window_seconds: float = 10.0
    finish_seconds: float = 20.0

    @classmethod
    def of_own(cls, seconds: float) -> Limits:
        """Those of somebody's own code in a time budget: a start that takes all of it leaves nothing to measure."""
        return cls(build_seconds=min(max(SLOW_START_SECONDS, seconds), cls().build_seconds))

    def told(self, limit: float) -> str:
        """A limit that is over, for a sentence."""
        more = limit == self.build_seconds < Limits().build_seconds
        return f"{limit:.0f} s" + " (more --minutes wait longer)" * more


class Group(AbstractContextManager["Group"]):
    """The ranks of one configuration; leaving the context kills them. Processes start within ``starting``.

    ``how`` is more that each ``RankJob`` is told: its modules, environment, tree. Files of settings that somebody's own
    code wrote here are added to ``written``, when it has ended.
    """

    _awake: ClassVar[Group | None] = None  # the last one that was told something
    _guilty = ""

    def __init__(
        self,
        config: RunConfig,
        *,
        threads: int,
        limits: Limits | None = None,
        written: set[str] | None = None,
        progress: Progress = lambda _: None,
        starting: Callable[[], AbstractContextManager[None]] = nullcontext,
        **how: Any,
    ) -> None:
        self.config, self.limits, self.progress = config, limits or Limits(), progress
        self.written = set() if written is None else written
        begun = time.monotonic()
        self._ranks: list[LocalRank | RemoteRank] = []
        self._paused = Paused()
        self._private = private_folder()
        self.folder = Path(self._private.name)
        try:
            with starting():
                self._start(threads, **how)
            built = self._first_reports()
        except BaseException as error:
            self.kill()
            if isinstance(error, (EOFError, ConnectionError, psutil.NoSuchProcess)):
                raise GroupFailed("crashed", "the process that starts the ranks ended while starting one") from error
            raise
        self.start_seconds = time.monotonic() - begun
        self.build_seconds = max((float(report["build_seconds"]) for report in built), default=self.start_seconds)
        """The slowest rank's, until its workload was built: a part of ``start_seconds``."""

    def _start(self, threads: int, **how: Any) -> None:
        """Start every rank where its place is: on this host, or on those that this process leads."""
        cluster = current()
        places = cluster.places(self.config) if cluster else [Place(i, "", None) for i in range(self.config.world_size)]
        if cluster and len(places) > 1:
            how["store"] = cluster.store._replace(prefix=f"{cluster.store.prefix}/{self.folder.name}")
        else:
            how["environment"] = {"GLOO_SOCKET_IFNAME": "lo", **how.get("environment", {})}
        how |= {"folder": self.folder, "threads": threads, "collective_seconds": self.limits.build_seconds}
        for rank, place in enumerate(places):
            mine = RankJob(config=self.config, rank=rank, device_index=place.device_index, **how)
            self._ranks.append(RemoteRank(mine, place.host, place.channel) if place.channel else LocalRank(mine))

    def _first_reports(self) -> list[dict[str, Any]]:
        return self._reports(self.limits.build_seconds, "building")

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks that this process has started itself, which are the first ones."""
        return [rank.pid for rank in self._ranks if isinstance(rank, LocalRank)]

    def window(self, *, settle: int, steps: int, limit: float, stage: str) -> list[dict[str, Any]]:
        """Run a window on every rank; ``limit`` is the longest silence of a rank, in seconds.

        ``start`` and ``end`` are seconds of this host's clock. Those of another host, whose clock has nothing to do
        with it, are moved so that its ranks leave the barrier before the window when those of this host do.
        """
        reports = self.ask("window", limit, stage, settle=settle, steps=steps)
        self._pause()
        hosts = {report["host"] for report in reports}
        begun = {host: min(r["start"] for r in reports if r["host"] == host) for host in hosts}
        for report in reports:
            shift = begun[reports[0]["host"]] - begun[report["host"]]
            report["start"], report["end"] = report["start"] + shift, report["end"] + shift
        return reports

    def witness(self) -> list[dict[str, Any]]:
        """What each rank says of itself."""
        said = self.ask("witness", self.limits.build_seconds, "reading the witness")
        self._pause()
        return said

    def _pause(self) -> None:
        """Stop the ranks here that may do more than they are told, until they are told again."""
        if self.config.workload != DDPM or self.config.loader_workers:
            self._paused.stop([rank.leader for rank in self._ranks if isinstance(rank, LocalRank)])

    def loaded(self) -> Loaded:
        """What the first rank has loaded from outside of libraries, and the files of settings that ranks here read."""
        found = Loaded(**self.ask("loaded", self.limits.build_seconds, "naming what it loaded")[0])
        return found._replace(settings=sorted(opened(self.folder, "r")))

    def advance(self, steps: int, limit: float, stage: str = "training") -> list[dict[str, Any]]:
        """Train ``steps`` steps on every rank; each reports its mean loss of every step, and its seconds."""
        return self.ask("advance", limit, stage, steps=steps)

    def call(self, method: str, limit: float, **arguments: Any) -> list[Any]:
        """Call a method of the workload on every rank, and return their answers."""
        return [r["answer"] for r in self.ask("call", limit, f"in {method}", method=method, arguments=arguments)]

    def set_threads(self, count: int, limit: float) -> None:
        """Have every rank compute with so many threads from here on."""
        self.ask("set_threads", limit, "taking other threads", count=count)

    def finish(self) -> list[dict[str, Any]]:
        """End the ranks in order and return their summaries."""
        summaries = self.ask("finish", self.limits.finish_seconds, "finishing")
        self.kill()
        return summaries

    def kill(self) -> None:
        """Kill whatever is left of the group, loader workers and compilers included, and remove its folder."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.close()
        self._ranks = []
        self.written |= opened(self.folder, "w")
        with suppress(OSError):  # what others own in it stays
            self._private.cleanup()

    def ask(self, command: str, limit: float, stage: str, **arguments: Any) -> list[dict[str, Any]]:
        """Give every rank a command, and return the reports; ``limit`` is the longest silence. Raises GroupFailed."""
        self._paused.resume()
        for rank in self._ranks:
            rank.tell(command, arguments)
        return self._reports(limit, stage)

    def _looks(self, stage: str, ears: Callable[[], list[Any]]) -> Iterator[tuple[list[Any], float]]:
        """Wake when one of the ``ears`` is ready, or after half a second: which are, and how long this was awake.

        A limit that was over while this process was stopped itself, as with a whole suspended job, begins anew.
        """
        self._stage = stage
        begun = shown = since = now = time.monotonic()
        while True:
            ready, before = connection.wait(ears(), timeout=0.5), now
            now = time.monotonic()
            since = now if now - before > AWAY_SECONDS else since
            yield ready, now - since
            if now - shown >= 2:
                shown = now
                self.progress(f"{stage}, {now - begun:.0f} s")

    def _reports(self, limit: float, stage: str) -> list[dict[str, Any]]:
        """Sleep until every rank has done what it was told; raise GroupFailed for one that fails or falls silent."""
        self._blame()
        Group._awake = self
        pending = dict(enumerate(self._ranks))
        for _, awake in self._looks(stage, lambda: [ear for rank in pending.values() for ear in rank.ears]):
            for number, rank in list(pending.items()):
                if rank.hear():
                    del pending[number]
                elif rank.ending:
                    self._fail()
            if not pending:
                break
            lives = {number: rank.life() for number, rank in pending.items()}
            last = min(life.steps for life in lives.values())
            # Whoever waits for others is not behind them. All make the same marks: in one step those say who waits.
            behind = {number: life for number, life in lives.items() if life.steps == last}
            if awake > limit and all(life.silent_seconds > limit for life in behind.values()):
                self._silent(behind, limit)
        self._blame()
        return [rank.report for rank in self._ranks]

    def _blame(self) -> None:
        """Where the fork server was killed, the group that was awake last has done so, and ends; ranks of others go on.

        A killed process takes a while to end, and another group may be the first to see it.
        """
        if server_died() and Group._awake:
            Group._awake._guilty = f"the process that starts the ranks was killed while {Group._awake._stage}"
        if self._guilty:
            raise GroupFailed("crashed", self._guilty)

    def _name(self, number: int) -> str:
        """A rank for people, with its host and GPU where the number alone would not find it."""
        rank = self._ranks[number]
        gpu = f"cuda:{rank.job.device_index}" if self.config.device == "cuda" else ""
        place = ", ".join(filter(None, (rank.host and f"host {rank.host}", gpu)))
        return f"rank {number} ({place})" if place else f"rank {number}"

    def _doing(self, number: int) -> str:
        life = self._ranks[number].life()
        return f"{life.phase!r} of step {life.steps + 1}"

    def _silent(self, behind: dict[int, Life], limit: float) -> NoReturn:
        """Name the ranks for which the others wait; of some that stopped at one mark nobody can say who for whom."""
        least = min(life.marks for life in behind.values())
        stacks = {n: self._ranks[n].stack() for n, life in behind.items() if life.marks == least}
        doing = self._doing(min(stacks))
        mains = [own_places(stack.rpartition("Current thread")[2])[:1] for stack in stacks.values()]  # the innermost
        places = "".join(dict.fromkeys(f" ({place})" for main in mains for place in main))
        how = f"showed no sign of life for {self.limits.told(limit)} while {self._stage}, in {doing}{places}"
        raise GroupFailed("timed out", f"{', '.join(map(self._name, stacks))} {how}", "\n".join(stacks.values()))

    def _fail(self) -> NoReturn:
        """Name the rank that failed first: one that was killed or left without a word, else the earliest error.

        The others often fail a moment later, because their collective broke; give every report time to arrive.
        """
        deadline = time.monotonic() + LAST_WORDS_SECONDS
        while True:
            for rank in self._ranks:
                rank.hear()
            endings = {number: rank.ending for number, rank in enumerate(self._ranks) if rank.ending}
            for number, ending in endings.items():
                if not ending.reported:
                    how = f"{self._name(number)} {ending.message} in {self._doing(number)}"
                    raise GroupFailed(ending.status, how, ending.detail)
            silent = [rank for rank in self._ranks if not rank.ending]
            if not any(rank.unheard or time.monotonic() < deadline for rank in silent):
                break
            time.sleep(0.05)
        number, ending = min(endings.items(), key=lambda found: found[1].time)
        named = "" if ending.status == "unsupported" else f"{self._name(number)}: "
        raise GroupFailed(ending.status, named + ending.message, ending.detail if named else "")
