"""A group: the ranks of one configuration in one set, which are started, watched and cleaned up.

The parent sleeps while ranks work. It watches the heartbeat of each rank rather than the timeout of a collective, so
that it can report which rank hangs, where it runs and what it was doing.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import psutil

from ddpm_lab.config import DDPM, RunConfig
from ddpm_lab.measure.cluster import Place, RemoteRank, current
from ddpm_lab.measure.code_version import Loaded
from ddpm_lab.measure.guard import Paused
from ddpm_lab.measure.hook import opened
from ddpm_lab.measure.process import (
    Life,
    LocalRank,
    RankJob,
    own_places,
    private_folder,
    shorten,
    start_server,
)

SLOW_START_SECONDS = 60.0  # minimum limit on silence while the user's code starts, such as imports from a slow disk
AWAY_SECONDS = 5.0  # a longer gap between clock readings means that this process was stopped, as in a suspended job
LAST_WORDS_SECONDS = 2.0  # time for other ranks to report their errors, since the first to fail is blamed

Progress = Callable[[str], None]


class GroupFailed(RuntimeError):  # noqa: N818 - an outcome that is recorded
    """A configuration could not be measured: its status, the reason in one sentence, and the rank's traceback."""

    def __init__(self, status: str, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.status, self.reason, self.detail = status, reason, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Longest silence of a rank in seconds: until it is warm, in a window (at least 20 warm steps), and at the end."""

    build_seconds: float = 600.0
    window_seconds: float = 10.0
    finish_seconds: float = 20.0

    @classmethod
    def of_own(cls, seconds: float) -> "Limits":
        """Return the limits for the user's code with a budget of ``seconds``, which its start may not exceed."""
        return cls(build_seconds=min(max(SLOW_START_SECONDS, seconds), cls().build_seconds))

    def describe(self, limit: float) -> str:
        """Return an exceeded limit in words."""
        more = limit == self.build_seconds < Limits().build_seconds
        return f"{limit:.0f} s" + " (more --minutes wait longer)" * more


class Group(AbstractContextManager["Group"]):
    """The ranks of one configuration, which are killed when the context exits.

    The process that starts ranks is itself started inside the context ``starting``. ``patience`` returns the longest
    silence of a rank from now on, whatever the limit. ``how`` has further fields of each ``RankJob``: modules,
    environment, tree. When the group ends, files of settings that the user's code wrote are added to ``written``.
    """

    suspended = False  # whether this process was stopped during the last command

    def __init__(
        self,
        config: RunConfig,
        *,
        threads: int,
        limits: Limits | None = None,
        written: set[str] | None = None,
        progress: Progress = lambda _: None,
        starting: Callable[[], AbstractContextManager[None]] | None = None,
        patience: Callable[[], float] = lambda: math.inf,
        **how: Any,
    ) -> None:
        self.config, self.limits, self.progress, self.patience = config, limits or Limits(), progress, patience
        self.written = set() if written is None else written
        begun = time.monotonic()
        self._ranks: list[LocalRank | RemoteRank] = []
        self._paused = Paused()
        self._private = private_folder()
        self.folder = Path(self._private.name)
        try:
            if starting:
                with starting():
                    start_server()
            built = self._start(threads, **how)
        except BaseException as error:
            self.kill()
            if isinstance(error, (EOFError, ConnectionError, psutil.NoSuchProcess)):
                ended = "the process that starts the ranks ended while starting one, as for want of memory"
                raise GroupFailed("crashed", ended) from error
            raise
        self.start_seconds = time.monotonic() - begun
        self.build_seconds = max((float(report["build_seconds"]) for report in built), default=self.start_seconds)
        """Time until the slowest rank had built its workload; part of ``start_seconds``."""

    def _start(self, threads: int, **how: Any) -> list[dict[str, Any]]:
        """Start every rank at its place, on this host or on the hosts that this process leads; return first reports."""
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
        return self._reports(self.limits.build_seconds, "building")

    def __exit__(self, *_: object) -> None:
        self.kill()

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks on this host, which come first."""
        return [rank.pid for rank in self._ranks if isinstance(rank, LocalRank)]

    def window(self, *, settle: int, steps: int, limit: float, stage: str) -> list[dict[str, Any]]:
        """Run a window on every rank and return their reports; ``limit`` is the longest silence of a rank in seconds.

        ``start`` and ``end`` in a report are seconds on this host's clock. Since the clocks of other hosts are
        unrelated, their times are shifted so that all hosts leave the barrier before the window at the same time.
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
        """Return the actual settings of each rank."""
        said = self.ask("witness", self.limits.build_seconds, "reading the witness")
        self._pause()
        return said

    def _pause(self) -> None:
        """Stop the ranks on this host that may have background work, until the next command."""
        if self.config.workload != DDPM or self.config.loader_workers:
            self._paused.stop([rank.leader for rank in self._ranks if isinstance(rank, LocalRank)])

    def loaded(self) -> Loaded:
        """Return the non-library code that the first rank loaded, and the settings files that local ranks read."""
        found = Loaded(**self.ask("loaded", self.limits.build_seconds, "naming what it loaded")[0])
        return found._replace(settings=sorted(opened(self.folder, "r")))

    def advance(self, steps: int, limit: float, stage: str = "training") -> list[dict[str, Any]]:
        """Train ``steps`` steps on every rank and return reports with the mean loss of each step and the seconds."""
        return self.ask("advance", limit, stage, steps=steps)

    def call(self, method: str, limit: float, **arguments: Any) -> list[Any]:
        """Call a method of the workload on every rank and return the results."""
        return [r["answer"] for r in self.ask("call", limit, f"in {method}", method=method, arguments=arguments)]

    def finish(self) -> list[dict[str, Any]]:
        """Shut the ranks down cleanly and return their summaries."""
        summaries = self.ask("finish", self.limits.finish_seconds, "finishing")
        self.kill()
        return summaries

    def kill(self) -> None:
        """Kill all remaining processes of the group, including loader workers and compilers, and remove its folder."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.close()
        self._ranks = []
        self.written |= opened(self.folder, "w")
        with suppress(OSError):  # files of other users cannot be removed
            self._private.cleanup()

    def ask(self, command: str, limit: float, stage: str, **arguments: Any) -> list[dict[str, Any]]:
        """Send a command to every rank and return the reports; ``limit`` is the longest silence. Raises GroupFailed."""
        self._paused.resume()
        for rank in self._ranks:
            rank.tell(command, arguments)
        return self._reports(limit, stage)

    def _looks(self, stage: str, ears: Callable[[], list[Any]]) -> Iterator[tuple[list[Any], float]]:
        """Yield whenever one of ``ears`` is ready, and every half second: (those that are ready, seconds so far).

        The seconds restart at 0 after this process was stopped, as in a suspended job, so that no limit is exceeded.
        """
        self._stage, self.suspended = stage, False
        begun = shown = since = now = time.monotonic()
        while True:
            ready, before = connection.wait(ears(), timeout=0.5), now
            now = time.monotonic()
            if now - before > AWAY_SECONDS:
                since, self.suspended = now, True
            for log in self._logs():
                shorten(log)
            yield ready, now - since
            if now - shown >= 2:
                shown = now
                self.progress(f"{stage}, {now - begun:.0f} s")

    def _logs(self) -> Iterable[Path]:
        return self.folder.glob("rank*.log")

    def _reports(self, limit: float, stage: str) -> list[dict[str, Any]]:
        """Wait for every rank's report and return all. Raises GroupFailed if a rank fails or is silent for too long."""
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
            # A rank that waits for others is ahead of them. All make the same marks, which show this within a step.
            behind = {number: life for number, life in lives.items() if life.steps == last}
            most = min(limit, self.patience())
            if awake > most and all(life.silent_seconds > most for life in behind.values()):
                self._silent(behind, most)
        return [rank.report for rank in self._ranks]

    def _name(self, number: int) -> str:
        """Return a readable name of a rank, with its host and GPU if any."""
        rank = self._ranks[number]
        gpu = f"cuda:{rank.job.device_index}" if self.config.device == "cuda" else ""
        place = ", ".join(filter(None, (rank.host and f"host {rank.host}", gpu)))
        return f"rank {number} ({place})" if place else f"rank {number}"

    def _doing(self, number: int) -> str:
        life = self._ranks[number].life()
        return f"{life.phase!r} of step {life.steps + 1}"

    def _silent(self, behind: dict[int, Life], limit: float) -> NoReturn:
        """Raise GroupFailed with the ranks that the others wait for: those that stopped at the earliest mark."""
        least = min(life.marks for life in behind.values())
        stacks = {n: self._ranks[n].stack() for n, life in behind.items() if life.marks == least}
        doing = self._doing(min(stacks))
        mains = [own_places(stack.rpartition("Current thread")[2])[:1] for stack in stacks.values()]  # the innermost
        places = "".join(dict.fromkeys(f" ({place})" for main in mains for place in main))
        how = f"showed no sign of life for {self.limits.describe(limit)} while {self._stage}, in {doing}{places}"
        raise GroupFailed("timed out", f"{', '.join(map(self._name, stacks))} {how}", "\n".join(stacks.values()))

    def _fail(self) -> NoReturn:
        """Raise GroupFailed for the rank that failed first: one that ended without a report, else the earliest error.

        Other ranks often fail a moment later because their collective broke, so all reports get time to arrive.
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
