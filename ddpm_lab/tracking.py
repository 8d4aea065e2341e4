"""Tell an experiment tracker what a run does: Comet ML, online or as an archive for later.

Nothing here waits for it before the run has ended, or raises: what is told goes through a queue into a process of its
own (``comet_process``). Only what is named here and in ``tracked`` is sent. The parent tells, so there is one
experiment whatever the number of ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ddpm_lab.config import RunConfig
from ddpm_lab.measure import hardware
from ddpm_lab.measure.machine_watch import Watch
from ddpm_lab.record import Environment
from ddpm_lab.run_folder import OWN, logged_losses
from ddpm_lab.summary_lines import name_of, train_count

WAITING = 20_000
"""Calls that wait for the tracker, about as many steps; those beyond are dropped, and counted."""
CONNECT_SECONDS, END_SECONDS = 30, 30
"""For an answer of the server, and for the rest once the run has ended."""
WATCHED_SECONDS = 10.0
STATE = (
    *("cpu_utilisation_percent", "ram_used_bytes", "gpu_utilisation_percent", "gpu_memory_used_bytes"),
    *("gpu_clock_mhz", "gpu_temperature_celsius", "gpu_power_watts"),
)
"""What a tracker is told of the machine, by the names of ``Watch``."""
_KEPT_KEY = "comet_experiment.txt"


class Tracker:
    """One experiment of a tracker.

    Args:
        kind: comet, or comet-offline for an archive in ``folder``.
        folder: where archives go.
        key: 32 letters or digits: the same key goes on with the same experiment.
        name: what the experiment is called.
        say: called with at most one sentence if it fails, and one at the end.
    """

    def __init__(self, kind: str, folder: Path, key: str, *, name: str, say: Callable[[str], None]) -> None:
        self._online, self._folder, self._key, self._say = kind == "comet", folder, key, say
        self._calls: queue.Queue[str | None] = queue.Queue(WAITING)
        self._dropped, self._failed, self._ended = 0, False, ""
        where = {"key": key, "online": self._online, "folder": str(folder), "name": name}
        self._calls.put(json.dumps({**where, "connect_seconds": CONNECT_SECONDS, "end_seconds": END_SECONDS}))
        # -P: the folder that one works in may hold a module of any name.
        command = [sys.executable, "-P", str(Path(__file__).with_name("comet_process.py"))]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        try:
            self._process = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
        except OSError as error:
            self._fail(str(error.strerror))
            return
        self._listener = threading.Thread(target=self._listen, name="ddpm_lab tracker answers", daemon=True)
        for thread in (self._listener, threading.Thread(target=self._write, name="ddpm_lab tracker", daemon=True)):
            thread.start()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log_parameters(self, values: Mapping[str, Any]) -> None:
        """Hyper-parameters by name."""
        self._put("log_parameters", dict(values))

    def log_others(self, values: Mapping[str, Any]) -> None:
        """What is neither a hyper-parameter nor measured, by name; what is None is unknown, and not told."""
        self._put("log_others", {name: value for name, value in values.items() if value is not None})

    def log_metrics(
        self, values: Mapping[str, float | None], *, step: int | None = None, epoch: int | None = None
    ) -> None:
        """Numbers by name; those that are None or not finite are unknown, and not told."""
        known = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
        if known:
            self._put("log_metrics", known, step=step, epoch=epoch)

    def log_figure(self, path: Path, name: str) -> None:
        """A picture, which must stay where it is until the tracker is closed."""
        self._put("log_image", str(path), name=name)

    def close(self) -> None:
        """Wait a limited time until the tracker has taken everything, and say where it is."""
        if self._failed:
            return
        while True:
            with contextlib.suppress(queue.Full):
                self._calls.put_nowait(None)
                break
            with contextlib.suppress(queue.Empty):  # room for the end itself
                self._calls.get_nowait()
                self._dropped += 1
        try:
            self._listener.join(CONNECT_SECONDS + END_SECONDS)
        finally:  # also where a signal ends the run at once
            if self._process.poll() is None:
                self._process.kill()
                self._listener.join()
        if self._failed:
            return
        archives = sorted(self._folder.glob(f"{self._key}*.zip"), key=lambda path: path.stat().st_mtime)
        where = self._ended if self._online or not archives else f"{archives[-1]} (comet upload FILE sends it)"
        lost = f"; {self._dropped:,} calls came too fast for it and are not in it" if self._dropped else ""
        self._say(f"tracker: {where}{lost}")

    def _put(self, call: str, *values: Any, **named: Any) -> None:
        if self._failed:
            return
        try:
            self._calls.put_nowait(json.dumps({"call": call, "values": values, "named": named}))
        except queue.Full:
            self._dropped += 1

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError), pipe:  # the listener says why it has ended
            while (line := self._calls.get()) is not None:
                pipe.write(f"{line}\n")
                pipe.flush()

    def _listen(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None
        told: dict[str, str] = {}
        with contextlib.suppress(OSError, ValueError), pipe:
            for line in pipe:
                told |= json.loads(line)
        code = self._process.wait()
        if "ended" in told:
            self._ended = told["ended"]
        elif "failed" in told:
            self._fail(told["failed"])
        else:
            late = code in (-signal.SIGALRM, -signal.SIGKILL)
            self._fail("no answer in time" if late else f"its process ended ({code})")

    def _fail(self, reason: str) -> None:
        self._failed = True
        short = " ".join(reason.split())[:200].rstrip(". ")
        what = "logged to Comet" if self._online else "archived for Comet"
        self._say(f"tracker: not, or not wholly, {what} ({short}); nothing else depends on it")


def environment(found: Environment) -> dict[str, Any]:
    """What a tracker is told of where something was measured."""
    return {
        "host_name": found.hostname,
        "slurm_job_id": found.slurm_job_id,
        "machine": found.machine.name,
        "gpu_driver": found.machine.driver,
        "ram_bytes": found.ram_bytes,
        "kernel": found.kernel,
        "python": found.python,
        **found.packages,
        "git_commit": found.git_commit,
        "date": found.date,
    }


def settings(config: RunConfig) -> dict[str, Any]:
    """The settings of a configuration by name, those of a part as ``part.name``; no path is among them."""
    found: dict[str, Any] = {}
    for name, value in config.as_dict().items():
        if name not in ("data", *OWN):
            found |= {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
    return {name: str(value) if isinstance(value, list) else value for name, value in found.items()}


class TrackedTraining:
    """A training run as a tracker is told of it: entered while the run trains after ``step`` steps.

    The run goes on in the experiment that its folder names. A step that was lost with a kill is told again.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        config: RunConfig,
        *,
        schedule: Mapping[str, int],
        step: int,
        say: Callable[[str], None],
    ) -> None:
        self._tracker = Tracker(kind, folder / "comet", _key_of(folder), name=name_of(config), say=say)
        self._tracker.log_parameters(settings(config) | {f"train.{name}": value for name, value in schedule.items()})
        self._tracker.log_others(environment(hardware.environment()))
        self._batch, self._images, self._step = config.global_batch_size, train_count(config), step
        self._losses = [
            loss for number, loss in logged_losses(folder, step) if self._epoch(number) == self._epoch(step + 1)
        ]
        gpus = hardware.gpus()[: config.node_size] if config.device == "cuda" else ()
        self._gpus = {gpu.uuid: 0 for gpu in gpus if gpu.uuid}
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ddpm_lab tracked machine", daemon=True)

    def __enter__(self) -> TrackedTraining:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watcher.join()
        self._tracker.close()

    def steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Tell of the next steps, as they stand in the log."""
        for row in rows:
            self._step = row["step"]
            epoch = self._epoch(self._step)
            values = {"train_loss": row["loss"], "images_per_second": row["images_per_second"]}
            self._losses.append(row["loss"])
            if self._epoch(self._step + 1) > epoch:
                values["train_loss_epoch"] = fmean(self._losses)
                self._losses.clear()
            self._tracker.log_metrics(
                values | {"held_out_loss": row.get("held_out_loss")}, step=self._step, epoch=epoch
            )

    def _epoch(self, step: int) -> int:
        """The pass through the images, from 1, in which a step ends."""
        return (step * self._batch - 1) // self._images + 1

    def _watch(self) -> None:
        stopped = False
        while not stopped:
            with Watch(self._gpus) as watch:
                stopped = self._stop.wait(WATCHED_SECONDS)
            values = {name: watch.state.get(name) for name in STATE}
            self._tracker.log_metrics(values, step=self._step, epoch=self._epoch(max(1, self._step)))


def _key_of(folder: Path) -> str:
    """The key that a run's folder keeps, or a new one where there is none."""
    file = folder / _KEPT_KEY
    with contextlib.suppress(OSError, ValueError):
        if re.fullmatch("[0-9a-f]{32}", kept := file.read_text().strip()):
            return kept
    key = uuid.uuid4().hex
    with contextlib.suppress(OSError):
        file.write_text(f"{key}\n")
    return key
