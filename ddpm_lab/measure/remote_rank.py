"""A rank on another host, or in another process that torchrun started: a ``LocalRank`` there, and a wire to it."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from multiprocessing import connection
from typing import Any

from ddpm_lab.measure.code_version import code_version
from ddpm_lab.measure.fleet import Slot
from ddpm_lab.measure.local_rank import LEFT, Ending, Life
from ddpm_lab.measure.process import RankJob
from ddpm_lab.measure.wire import Wire

ANSWER_SECONDS = 3.0


class RemoteRank:
    """A rank that a serving process has started; what it says comes over the wire, and is for this group alone."""

    def __init__(self, job: RankJob, slot: Slot, group: str) -> None:
        self.job, self.slot, self.group = job, slot, group
        self.host = slot.host
        self.watched: dict[str, float | None] = {}
        self._life, self._heard = Life(0.0, 0, 0, "start"), time.monotonic()
        self._reports: dict[str, Any] = {}
        self._ending: Ending | None = None
        self._log: str | None = None
        meeting = job.meeting
        assert meeting is not None, "ranks on several hosts have a place to meet"
        if slot.lost:
            self._lose(slot.lost)
            return
        self._send(
            do="start",
            config=job.config.as_dict(),
            rank=job.rank,
            threads=job.threads,
            collective_seconds=job.collective_seconds,
            modules=dict(job.modules),
            environment=job.environment,
            device_index=slot.device_index,
            meeting={"address": meeting.address, "port": meeting.port, "token": meeting.token},
            code=code_version().key,
            relatives=slot.relatives if slot.watches else None,
        )

    @property
    def wire(self) -> Wire:
        """The wire to the serving process."""
        assert self.slot.wire is not None, "the leading process starts its own ranks itself"
        return self.slot.wire

    @property
    def ears(self) -> list[Any]:
        """What becomes ready when the rank speaks or ends; nothing once its process is out of reach."""
        return [] if self.slot.lost else [self.wire.connection]

    def tell(self, command: str, arguments: dict[str, Any]) -> None:
        """Give the rank a command."""
        self._life, self._heard = self._life._replace(silent_seconds=0.0), time.monotonic()
        self._send(do="tell", command=command, arguments=arguments)

    def hear(self) -> str | None:
        """The word that the rank has said, ``LEFT`` if it will say no more, None if it is still at it."""
        if self.slot.lost and not self._ending:  # noticed by another group, whose ranks are on the same wire
            self._lose(self.slot.lost)
        if self._ending:
            return LEFT
        while message := self._next():
            if said := self._take(message):
                return said
        return LEFT if self._ending else None

    def _next(self) -> dict[str, Any] | None:
        """The next message that is there already, of whatever group."""
        try:
            return self.wire.receive() if not self.slot.lost and self.wire.waiting() else None
        except (OSError, EOFError) as error:
            silent = isinstance(error, OSError) and not isinstance(error, ConnectionError)
            self._lose("its host no longer answers" if silent else "its process on that host has ended")
            return None

    def _take(self, message: dict[str, Any]) -> str | None:
        if message.get("group") != self.group:
            return None  # of a group that has been killed since
        self._heard = time.monotonic()
        if "life" in message:
            self._life = Life(*message["life"])
        if "ended" in message:
            # From how long ago it was there: the clocks of two hosts have nothing in common.
            told = Ending(*message["ended"])
            self._ending = told._replace(time=time.monotonic() - told.time)
            return LEFT
        self._log = message.get("log", self._log)
        if "said" in message:
            self._reports |= message["reports"]
            self.watched = message.get("watched", {})
            return str(message["said"])
        return None

    def life(self) -> Life:
        """The rank's last sign of life, as old as it is by now."""
        age = time.monotonic() - self._heard
        return self._life._replace(silent_seconds=self._life.silent_seconds + age)

    def running(self) -> bool:
        """Whether the rank lives as far as is known."""
        self.hear()
        return self._ending is None

    def ending(self) -> Ending | None:
        """How the rank ended; None of one that lives, or left in order."""
        self.hear()
        return self._ending

    def report(self, name: str) -> dict[str, Any]:
        """What the rank wrote under ``name``."""
        found: dict[str, Any] = self._reports[name]
        return found

    def log(self) -> str:
        """The end of what the rank printed, as far as it was told."""
        return self._ending.detail if self._ending else self._log or ""

    def stack(self) -> str:
        """The rank's log with the stacks of its threads; what is known without them where nobody answers."""
        self._log = None
        self._send(do="stack")
        deadline = time.monotonic() + ANSWER_SECONDS
        while self._log is None and not self.slot.lost and (left := deadline - time.monotonic()) > 0:
            if connection.wait(self.ears, left):
                self.hear()
        return self.log()

    def kill(self) -> None:
        """Have the rank killed; nobody waits for it, since what the process is told next comes after that."""
        self._send(do="kill")

    def close(self) -> None:
        """Nothing is held here."""

    def _send(self, **message: Any) -> None:
        if self.slot.lost:
            return
        with contextlib.suppress(ValueError):  # the wire has been closed, with everything else
            try:
                self.wire.send(group=self.group, **message)
            except OSError:
                self._lose("its process on that host has ended")

    def _lose(self, how: str) -> None:
        self.slot.lost = how
        self._ending = Ending("crashed", f"was lost: {how}", "", False, time.monotonic())


def start_of(message: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a ``RankJob`` from the message that starts one."""
    names = {field.name for field in dataclasses.fields(RankJob)}
    return {name: value for name, value in message.items() if name in names}
