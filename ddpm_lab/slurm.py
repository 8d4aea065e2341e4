"""Hand work to SLURM: one job, or an array of configurations, each task with a results folder of its own.

A submission is a folder: ``submission.json`` says what was asked for, ``task-N/`` holds what task N is told
(``arguments``), what its script did (``state``) and all its results, and the logs lie beside them. Tasks share no file
that both write, so that no lock must hold across nodes; ``slurm_collect`` brings their records together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ddpm_lab import __version__
from ddpm_lab.checks import ConfigError, choice, whole
from ddpm_lab.files import CHECKOUT, expanded, replace, writing
from ddpm_lab.questions import QUESTIONS
from ddpm_lab.settings_file import read_settings

SCRIPTS = CHECKOUT / "slurm"
SUBMISSION = "submission.json"
ARGUMENTS, STATE = "arguments", "state"
COMMANDS = ("run", "train", "compare", "calibrate")
"""Commands whose results go to an --output-dir, and that a job can run."""
MANY_NODES = ("run", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of a submission: its command without --output-dir, and the file of settings that it came from."""

    arguments: tuple[str, ...]
    configuration: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is asked of SLURM; what is None is left to the job script and to the site's defaults."""

    nodes: int = 1
    gpus_per_node: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    name: str = "ddpm-lab"

    def __post_init__(self) -> None:
        whole("--nodes", self.nodes, 1)
        whole("--gpus-per-node", self.gpus_per_node, 0)
        for option, text in (("--name", self.name), ("--time", self.time), ("--partition", self.partition)):
            if text is not None and (not text or not text.isprintable()):
                raise ConfigError(f"{option} is {text!r}: give printable text")

    @property
    def script(self) -> Path:
        """The job script for this size."""
        one = "one_gpu.sh" if self.gpus_per_node == 1 else "one_node.sh"
        return SCRIPTS / ("many_nodes.sh" if self.nodes > 1 else one)

    def options(self) -> Iterator[str]:
        """Options of sbatch; each is one word, whatever it holds."""
        yield f"--job-name={self.name}"
        yield f"--nodes={self.nodes}"
        yield f"--gres={f'gpu:{self.gpus_per_node}' if self.gpus_per_node else 'none'}"
        for name in ("time", "partition", "account"):
            if (value := getattr(self, name)) is not None:
                yield f"--{name}={value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What was submitted. ``job_id`` is that of the array where there are several tasks; None was not accepted."""

    folder: Path
    job_id: str | None
    tasks: tuple[Task, ...]
    sbatch: tuple[str, ...]
    date: str

    def task_id(self, task: int) -> str:
        """A task's job as SLURM names it."""
        return f"{self.job_id}_{task}" if len(self.tasks) > 1 else str(self.job_id)

    def results(self, task: int) -> Path:
        """A task's results folder."""
        return self.folder / f"task-{task}"

    def log(self, task: int) -> Path:
        """A task's log."""
        return self.folder / f"slurm-{self.task_id(task)}.out"

    def write(self) -> None:
        """Write ``submission.json``, whole or not at all."""
        values = {
            "schema": 1,
            "lab": __version__,
            "date": self.date,
            "job_id": self.job_id,
            "sbatch": self.sbatch,
            "tasks": [{**dataclasses.asdict(t), "results": self.results(i).name} for i, t in enumerate(self.tasks)],
        }
        replace(self.folder / SUBMISSION, json.dumps(values, indent=1) + "\n")


def read_submission(folder: Path) -> Submission:
    """The submission in a folder. Raises ConfigError if it cannot be read."""
    try:
        values = json.loads((folder / SUBMISSION).read_text())
        return Submission(
            folder=folder,
            job_id=values["job_id"],
            tasks=tuple(
                Task(arguments=tuple(t["arguments"]), configuration=t["configuration"]) for t in values["tasks"]
            ),
            sbatch=tuple(values["sbatch"]),
            date=values["date"],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / SUBMISSION} cannot be read ({error}): was it written by slurm submit?") from error


def tasks_of(command: Sequence[str], files: Sequence[Path]) -> list[Task]:
    """The tasks of a command with files of settings: one, or one for each file, or for each ``[[task]]`` in a file.

    Settings are options of the command by name, ``batch_size = 64`` for ``--batch-size 64``. A whole file for
    ``train`` is its ``--config``. Raises ConfigError, which names the file, if one cannot be used.
    """
    if not command:
        raise ConfigError("there is no command: give it after two dashes, such as slurm submit -- run amp")
    choice("the command of a job", command[0], COMMANDS)
    if command[0] == "run":
        for name in command[1:]:
            if name.startswith("-"):
                break
            choice("experiment", name, QUESTIONS)
    if any(word == "--output-dir" or word.startswith("--output-dir=") for word in command):
        raise ConfigError("--output-dir: every task has a results folder of its own; leave it out, or give --folder")
    tasks = [
        Task(arguments=(*command, *more), configuration=str(file.absolute()))
        for file in files
        for more in _settings(command[0], file)
    ]
    return tasks or [Task(arguments=tuple(command))]


def _settings(command: str, file: Path) -> Iterator[tuple[str, ...]]:
    """The further options that each task of a file gives."""
    values = read_settings(file, "--array")
    tables = values.get("task", [values])
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise ConfigError(f"--array: task in {file} is {tables!r}: give tables, each below a line [[task]]")
    for table in tables:
        if command == "train" and table is values:
            yield (f"--config={file.absolute()}",)
        else:
            yield tuple(_options(table, file))


def _options(table: Mapping[str, Any], file: Path) -> Iterator[str]:
    for name, value in table.items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            if value:
                yield option
            continue
        items = value if isinstance(value, list) else [value]
        if not items or any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
            raise ConfigError(f"--array: {name} in {file} is {value!r}: give text, a number, true, or a list of them")
        yield f"{option}={','.join(map(str, items))}"


def submit(tasks: Sequence[Task], request: Request, folder: Path, *, requeue: bool = False) -> Submission:
    """Submit tasks, with a new folder for them in ``folder``.

    No text of the user's passes through a shell: sbatch gets a list of words, and a task reads its arguments from a
    file in which each ends with a zero byte.

    Raises:
        ConfigError: SLURM or the job scripts are not here, the folder cannot be written, or sbatch refused the job.
    """
    for task in tasks:
        if request.nodes > 1:
            choice("the command of a job on several nodes", task.arguments[0], MANY_NODES)
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ConfigError("there is no sbatch here: submit from a login node of a SLURM cluster")
    if not request.script.is_file():
        raise ConfigError(f"there is no job script {request.script}: submit with the lab of a checkout")
    place = _new_folder(expanded(folder).absolute(), request.name)
    log = str(place).replace("%", "%%") + f"/slurm-{'%A_%a' if len(tasks) > 1 else '%j'}.out"
    words = [sbatch, "--parsable", "--export=ALL", f"--chdir={Path.cwd()}", f"--output={log}", *request.options()]
    words += [f"--array=0-{len(tasks) - 1}"] if len(tasks) > 1 else []
    words.append(str(request.script))
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    asked = Submission(folder=place, job_id=None, tasks=tuple(tasks), sbatch=tuple(words), date=date)
    for number, task in enumerate(tasks):
        results = asked.results(number)
        results.mkdir()
        told = [*task.arguments, f"--output-dir={results}"]
        if f"--config={task.configuration}" in told:  # the job may begin days later: the file as it is now counts
            shutil.copyfile(str(task.configuration), copy := results / "settings.toml")
            told[told.index(f"--config={task.configuration}")] = f"--config={copy}"
        (results / ARGUMENTS).write_bytes(b"".join(os.fsencode(word) + b"\0" for word in told))
    asked.write()
    environment = {
        **os.environ,
        "DDPM_LAB_PYTHON": sys.executable,
        "DDPM_LAB_SLURM": str(SCRIPTS),
        "DDPM_LAB_TASKS": str(place),
        "DDPM_LAB_REQUEUE": str(int(requeue)),
    }
    done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        shutil.rmtree(place)
        said = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise ConfigError(f"sbatch refused the job: {said[-1].removeprefix('sbatch: ') if said else 'without a word'}")
    job_id = done.stdout.strip().splitlines()[-1].partition(";")[0]
    accepted = dataclasses.replace(asked, job_id=job_id)
    accepted.write()
    return accepted


def _new_folder(parent: Path, name: str) -> Path:
    """A folder for a submission that no other has."""
    plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip(".")[:40]
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{plain}"
    for number in range(1, 1_000):
        place = parent / (stem if number == 1 else f"{stem}-{number}")
        with writing(parent, option="--folder"), contextlib.suppress(FileExistsError):
            place.mkdir(parents=True)
            return place
    raise ConfigError(f"{parent} has a thousand submissions of this second: choose another --folder")
