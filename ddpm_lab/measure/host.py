"""What a process that torchrun started does when it does not lead: serve ranks on its host, one for each group.

It holds them as the leader holds those of its own host, so that they end with this process, and this process with the
leader. It sleeps while they do, and says once a second how long the one that works has been silent.
"""

from __future__ import annotations

import contextlib
import signal
import time
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig
from ddpm_lab.measure.code_version import code_version
from ddpm_lab.measure.group_folder import GroupFolder, sweep
from ddpm_lab.measure.local_rank import LEFT, LocalRank
from ddpm_lab.measure.machine_watch import Watch
from ddpm_lab.measure.process import Meeting, RankJob
from ddpm_lab.measure.remote_rank import start_of
from ddpm_lab.measure.torchrun import network_settings
from ddpm_lab.measure.wire import Wire

LIFE_SECONDS = 1.0


def serve(wire: Wire, start_method: str = "forkserver") -> int:
    """Serve ranks until the leader sends this process home (0), or is gone (1)."""
    # Sent to every process of a job: what they mean is the leader's to say. SIGTERM is blocked, since loader workers
    # handle it in a way of their own.
    resource_tracker.ensure_running()  # it would let SIGTERM through again
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sweep()
    served: dict[str, _Served] = {}
    try:
        while True:
            working = [s for s in served.values() if s.at_work]
            ears = [wire.connection, *(ear for s in working for ear in s.rank.ears)]
            ready = connection.wait(ears, LIFE_SECONDS if working else None)
            if wire.connection in ready:
                message = wire.receive()
                if message["do"] == "end":
                    return 0
                _obey(message, served, wire, start_method)
            for one in working:
                if one.group in served:
                    one.tell_of(wire)
    except (OSError, EOFError):
        return 1
    finally:
        for one in served.values():
            one.end()


def _obey(message: dict[str, Any], served: dict[str, _Served], wire: Wire, start_method: str) -> None:
    group = message["group"]
    one = served.get(group)
    match message["do"]:
        case "start":
            try:
                served[group] = _Served(message, wire, start_method)
            except (ConfigError, OSError) as error:
                wire.send(group=group, ended=["crashed", str(error), "", True, 0.0])
        case "tell" if one:
            one.tell(message["command"], message["arguments"])
        case "stack" if one:
            wire.send(group=group, log=one.rank.stack())
        case "kill" if one:
            del served[group]
            one.end()


class _Served:
    """One rank of one group."""

    def __init__(self, message: dict[str, Any], wire: Wire, start_method: str) -> None:
        config = RunConfig.from_dict(message["config"])
        if code_version().key != message["code"]:
            raise ConfigError("the code here is another than the leader's: bring both checkouts to the same state")
        if config.data and not Path(config.data).is_dir():
            raise ConfigError(
                f"{config.data} does not exist here: put the images where all hosts see them, or prepare them there "
                "too (ddpm-lab prepare)"
            )
        told = start_of(message) | {
            "config": config,
            "modules": message["modules"],
            "environment": {**network_settings(wire.own_address), **message["environment"]},
            "meeting": Meeting(**message["meeting"]),
        }
        self.group: str = message["group"]
        self.relatives: list[int] | None = message["relatives"]
        self.watch: Watch | None = None
        self.at_work = True
        self.folder = GroupFolder()
        try:
            self.rank = LocalRank(RankJob(**told, folder=self.folder.path), start_method)
        except BaseException:
            self.folder.remove()
            raise

    def tell(self, command: str, arguments: dict[str, Any]) -> None:
        """Pass a command on to the rank, and watch the host meanwhile where that is asked for."""
        self.at_work = True
        if command == "window" and self.relatives is not None:
            self.watch = Watch({}, self.relatives)
            self.watch.__enter__()
        self.rank.tell(command, arguments)

    def tell_of(self, wire: Wire) -> None:
        """Say what the rank says, or at least that it lives."""
        said = self.rank.hear()
        life = list(self.rank.life())
        if said is None:
            wire.send(group=self.group, life=life)
            return
        self.at_work = False
        if said == LEFT:
            deadline = time.monotonic() + 1.0
            while (ending := self.rank.ending()) is None and time.monotonic() < deadline:
                time.sleep(0.01)  # for its exit code
            told = ["crashed", "left without a word", self.rank.log(), False, 0.0]
            if ending:
                told = list(ending._replace(time=time.monotonic() - ending.time))
            wire.send(group=self.group, ended=told, life=life)
            return
        wire.send(group=self.group, said=said, reports=self._new_reports(), life=life, watched=self._end_watch())

    def _new_reports(self) -> dict[str, Any]:
        """The files that the rank has written since it was last asked."""
        prefix = f"rank{self.rank.job.rank}."
        found = {}
        for path in self.folder.path.glob(f"{prefix}*.json"):
            name = path.name.removeprefix(prefix).removesuffix(".json")
            found[name] = self.rank.report(name)
            path.unlink()
        return found

    def _end_watch(self) -> dict[str, float | None]:
        if self.watch is None:
            return {}
        watch, self.watch = self.watch, None
        watch.__exit__(None, None, None)
        return {"others_cores": watch.others_cores, "stolen_seconds": watch.stolen_seconds}

    def end(self) -> None:
        """Kill the rank and remove what it wrote."""
        with contextlib.suppress(OSError):
            self._end_watch()
        self.rank.kill()
        self.rank.close()
        self.folder.remove()
