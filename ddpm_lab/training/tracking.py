"""Log to Comet ML: online, or into an archive that ``comet upload`` sends later.

The parent process makes all calls, so that there is one experiment whatever the number of ranks. Only what the lab
names here is sent.
"""

import logging.handlers
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, Self

from ddpm_lab.config import RunConfig
from ddpm_lab.data.folder import Progress
from ddpm_lab.data.packed import read_manifest
from ddpm_lab.files import NOT_IN_FILES
from ddpm_lab.measure import hardware
from ddpm_lab.measure.others import Watch
from ddpm_lab.record import Environment
from ddpm_lab.training.run_folder import logged, name_of

WATCH_SECONDS = 10.0
ENVIRONMENT = {
    "COMET_DISABLE_AUTO_LOGGING": "1",  # otherwise the import patches torch, Matplotlib and others
    "COMET_ERROR_TRACKING_ENABLE": "0",
    "COMET_INTERNAL_REPORTING": "0",
    "COMET_DISABLE_ANNOUNCEMENT": "1",
    "COMET_LOGGING_CONSOLE": "CRITICAL",
    "COMET_TIMEOUT_CLEANING": "60",  # seconds that the end of a run waits for what is not sent yet
    "COMET_TIMEOUT_UPLOAD": "60",
    "COMET_GET_OR_ADD_EXPERIMENT_RETRY_TOTAL": "2",  # a server that does not answer keeps no run waiting for minutes
}
STATE = (
    *("cpu_utilisation_percent", "ram_used_bytes", "gpu_utilisation_percent", "gpu_memory_used_bytes"),
    *("gpu_clock_mhz", "gpu_temperature_celsius", "gpu_power_watts"),
)
"""Fields of ``Watch.state`` that are logged."""


class Tracker:
    """One experiment, whose calls comet_ml queues for a thread of its own; what fails in it never raises.

    ``kind`` is comet, or comet-offline for an archive in ``folder``; the same ``key``, 32 letters or digits, continues
    the same experiment. ``say`` is called with one sentence, at the first failure or else at the end.
    """

    def __init__(self, kind: str, folder: Path, key: str, *, name: str, say: Progress) -> None:
        self._online, self._folder, self._key, self._say = kind == "comet", folder, key, say
        self._errors = logging.handlers.BufferingHandler(sys.maxsize)  # comet_ml logs most errors, and raises few
        self._errors.setLevel(logging.ERROR)
        self._errors.addFilter(lambda _: not self._errors.buffer)  # the first is told, and no other kept
        self._experiment: Any = None
        try:
            self._experiment = self._open(name)
        except ModuleNotFoundError as missing:
            self._fail(f"{missing.name} is not installed: run make trackers")
        except Exception as error:  # whatever fails here takes nothing from the run
            self._fail(f"{type(error).__name__}: {error}")

    def call(self, method: str, *values: Any, **named: Any) -> None:
        """Call a method of comet_ml's experiment, unless one has failed."""
        if self._experiment:
            try:
                getattr(self._experiment, method)(*values, **named)
            except Exception as error:  # as above
                self._fail(f"{type(error).__name__}: {error}")

    def metrics(self, values: Mapping[str, float | None], **when: int) -> None:
        """Log numbers by name; what is None or not finite is unknown and left out."""
        if known := {name: value for name, value in values.items() if value is not None and math.isfinite(value)}:
            self.call("log_metrics", known, **when)

    def close(self) -> None:
        """Wait until everything is logged, at most a minute, and say where it is."""
        self.call("end")
        if self._experiment and not self._errors.buffer:
            archives = sorted(self._folder.glob(f"{self._key}*.zip"), key=lambda path: path.stat().st_mtime)
            offline = archives and not self._online
            self._say(f"tracker: {f'{archives[-1]} (comet upload FILE sends it)' if offline else self._experiment.url}")
        elif self._experiment:
            self._fail("")

    def _open(self, name: str) -> Any:
        """Import comet_ml and open the experiment, with everything off that it collects by itself."""
        os.environ.update(ENVIRONMENT)
        hook = sys.excepthook
        import comet_ml  # noqa: PLC0415 - optional, and reads the environment when imported

        sys.excepthook = hook
        logger = logging.getLogger("comet_ml")
        logger.addHandler(self._errors)
        logger.setLevel(logging.ERROR)  # it takes the console's level for that of every handler
        own = [setting for setting in vars(comet_ml.ExperimentConfig()) if re.match("auto_|log_|parse_", setting)]
        config = comet_ml.ExperimentConfig(
            name=name,
            offline_directory=str(self._folder),
            display_summary_level=0,
            **{setting: False for setting in own if not setting.endswith("_rate")},
        )
        if not self._online:
            self._folder.mkdir(parents=True, exist_ok=True)
        experiment = comet_ml.start(
            online=self._online, mode="get_or_create", experiment_key=self._key, experiment_config=config
        )
        if not experiment.alive:
            raise RuntimeError("it did not accept the experiment")
        return experiment

    def _fail(self, reason: str) -> None:
        self._experiment = None
        logged = self._errors.buffer[0].getMessage() if self._errors.buffer else reason
        what = "logged to Comet" if self._online else "archived for Comet"
        short = " ".join(logged.split())[:200].rstrip(". ")
        self._say(f"tracker: not, or not wholly, {what} ({short}); nothing else depends on it")


def environment(where: Environment) -> dict[str, Any]:
    """What is logged of the place of a measurement; what is unknown is left out."""
    names = ("slurm_job_id", "ram_bytes", "kernel", "python", "git_commit", "date")
    known = {name: getattr(where, name) for name in names} | where.packages
    known |= {"host_name": where.hostname, "machine": where.machine.name, "gpu_driver": where.machine.driver}
    return {name: value for name, value in known.items() if value is not None}


def settings(config: RunConfig) -> dict[str, Any]:
    """Settings by name, those of a part as ``part.name``; none of them holds a path."""
    kept = ((n, v) for n, v in config.flat.items() if n.partition(".")[0] not in ("data", *NOT_IN_FILES))
    return {name: str(value) if isinstance(value, list) else value for name, value in kept}


class TrackedTraining:
    """Log a training run that goes on after ``step`` steps, to the experiment that its folder names."""

    def __init__(  # noqa: PLR0917 - what ``train`` has prepared
        self, kind: str, folder: Path, config: RunConfig, schedule: Mapping[str, int], step: int, say: Progress
    ) -> None:
        self._tracker = Tracker(kind, folder / "comet", _key_of(folder), name=name_of(config), say=say)
        self._tracker.call("log_parameters", settings(config) | {f"train.{k}": value for k, value in schedule.items()})
        self._tracker.call("log_others", environment(hardware.environment()))
        self._batch, self._images = config.global_batch_size, read_manifest(Path(config.data)).train_count
        self._step, now = step, self._epoch(step + 1)
        self._losses = [row["loss"] for row in logged(folder, step) if self._epoch(row["step"]) == now]
        gpus = hardware.gpus()[: config.node_size] if config.device == "cuda" else ()
        self._gpus = {gpu.uuid: 0 for gpu in gpus if gpu.uuid}

    def __enter__(self) -> Self:
        self._watch, self._watched = Watch(self._gpus), time.monotonic()
        self._watch.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._log_machine()
        self._tracker.close()

    def steps(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the next rows of the run's log, and every ten seconds the state of the machine."""
        for row in rows:
            self._step = row["step"]
            epoch = self._epoch(self._step)
            values = {"train_loss": row["loss"], "images_per_second": row["images_per_second"]}
            self._losses.append(row["loss"])
            if self._epoch(self._step + 1) > epoch:
                values["train_loss_epoch"] = fmean(self._losses)
                self._losses.clear()
            self._tracker.metrics(values | {"held_out_loss": row.get("held_out_loss")}, step=self._step, epoch=epoch)
        if time.monotonic() - self._watched >= WATCH_SECONDS:
            self._log_machine()
            self.__enter__()

    def _epoch(self, step: int) -> int:
        """The pass through the images, from 1, in which a step ends."""
        return (step * self._batch - 1) // self._images + 1

    def _log_machine(self) -> None:
        self._watch.__exit__()
        values = {name: self._watch.state.get(name) for name in STATE}
        self._tracker.metrics(values, step=self._step, epoch=self._epoch(max(1, self._step)))


def _key_of(folder: Path) -> str:
    """The key that a run's folder keeps; a new one where there is none."""
    file = folder / "comet_experiment.txt"
    with suppress(OSError, ValueError):
        if re.fullmatch("[0-9a-f]{32}", kept := file.read_text().strip()):
            return kept
    key = uuid.uuid4().hex
    with suppress(OSError):
        file.write_text(f"{key}\n")
    return key
