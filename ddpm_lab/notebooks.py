"""Find the notebooks, and execute one in a kernel of its own: progress lines, a clean stop, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import papermill
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from jupyter_core.utils import run_sync
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

from ddpm_lab.checks import LabError
from ddpm_lab.files import CHECKOUT

NUMBERED = "[0-9][0-9]_*.ipynb"
PROGRESS = "DDPM_LAB_PROGRESS"
"""Environment variable that names the file to which the lab appends its progress lines."""
GRACE_SECONDS = 10.0
HEARTBEAT = re.compile(r"\d+ s$")
HEARTBEAT_SECONDS = 10.0
"""Lines that differ only in the seconds at their end are passed on no more often than this."""
LONGEST_FOLDER = 70  # the path of a Unix socket has at most 107 characters


class NotebookError(LabError):
    """A notebook or a parameter that does not exist, in one sentence."""


def choose(names: Sequence[str | Path] | None) -> list[Path]:
    """The notebooks to run, in the order of their numbers.

    Args:
        names: names (03_amp or amp) or paths of .ipynb files; None is every numbered notebook of the checkout.

    Raises:
        NotebookError: one of them does not exist.
    """
    numbered = sorted((CHECKOUT / "notebooks").glob(NUMBERED))
    if not names:
        if not numbered:
            raise NotebookError(f"there are no notebooks in {CHECKOUT / 'notebooks'}: run the lab from its checkout")
        return numbered
    chosen = []
    for name in names:
        path = Path(name)
        if path.suffix != ".ipynb":
            matches = [file for file in numbered if str(name) in (file.stem, file.stem.partition("_")[2])]
            if not matches:
                listed = ", ".join(file.stem for file in numbered)
                raise NotebookError(f"there is no notebook {str(name)!r}: choose from {listed}")
            path = matches[0]
        elif not path.is_file():
            raise NotebookError(f"there is no notebook {path}: give the path of an .ipynb file")
        if path not in chosen:
            chosen.append(path)
    return sorted(chosen, key=lambda file: file.stem)


def parameter_names(file: Path) -> list[str]:
    """Names of the parameters of a notebook, in order."""
    return list(papermill.inspect_notebook(file))


def check_parameters(known: Mapping[Path, Sequence[str]], given: Mapping[str, Any]) -> None:
    """Raise NotebookError for a parameter that none of the notebooks has."""
    for name in given:
        if not any(name in names for names in known.values()):
            listed = ", ".join(file.stem for file in known)
            exist = ", ".join(dict.fromkeys(each for names in known.values() for each in names)) or "no parameters"
            which = f"notebook {listed} has" if len(known) == 1 else f"none of the notebooks {listed} has"
            no = "no" if len(known) == 1 else "a"
            raise NotebookError(f"{which} {no} parameter {name!r}: choose from {exist}")


class _Kernel(AsyncKernelManager):
    """A kernel manager that keeps its client, so that the client's sockets can be closed."""

    opened: Any = None

    def client(self, **options: Any) -> Any:
        self.opened = super().client(**options)
        return self.opened


class Stop:
    """The wish to stop: the first one interrupts the kernel, a second one or ``GRACE_SECONDS`` end it."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def requested(self) -> bool:
        """Whether somebody asked to stop."""
        return self.since is not None

    def request(self, *_: object) -> None:
        """Ask to stop; takes the arguments of a signal handler."""
        first = self.since is None
        if first:
            self.since = time.monotonic()
        self._send(signal.SIGINT if first else signal.SIGKILL)

    def enforce(self) -> None:
        """End a kernel that has not obeyed within the time of grace."""
        if self.since is not None and time.monotonic() - self.since > GRACE_SECONDS:
            self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(number)


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Turn Ctrl-C and SIGTERM into a request to stop, for as long as the context lasts."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, stop.request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def execute(
    notebook: Path, target: Path, parameters: Mapping[str, Any], *, say: Callable[[str], None], stop: Stop
) -> str:
    """Execute ``notebook`` with papermill and write it with its outputs to ``target``, also when a cell fails.

    Args:
        notebook: the notebook to execute; it is not changed.
        target: where the executed notebook goes; always there afterwards.
        parameters: values for its parameters cell.
        say: called with each progress line of the kernel, from a thread of its own.
        stop: says when to stop.

    Returns:
        The error in one line, or "" if every cell ran.
    """
    target.unlink(missing_ok=True)
    short = None if len(tempfile.gettempdir()) <= LONGEST_FOLDER else "/tmp"
    with tempfile.TemporaryDirectory(prefix="ddpm-lab-", dir=short) as private:
        kernel = _Kernel(
            # Without folders to look in, the kernel is that of this Python, whatever else is installed.
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            kernel_name="python3",
            transport="ipc",
            connection_file=f"{private}/kernel.json",
        )
        lines, complaints = Path(private) / "progress", Path(private) / "stderr"
        environment = {**os.environ, PROGRESS: str(lines), "IPYTHONDIR": f"{private}/ipython"}
        finished = threading.Event()
        follower = threading.Thread(target=_follow, args=(lines, say, stop, finished), daemon=True)
        try:
            # Errors of cells come with their outputs. This is what a kernel says of its own end.
            with complaints.open("wb") as stderr:
                run_sync(kernel.start_kernel)(env=environment, stderr=stderr)
            stop.process = getattr(kernel.provisioner, "process", None)
            follower.start()
            papermill.execute_notebook(
                notebook, target, parameters=dict(parameters), kernel_name="python3", progress_bar=False, km=kernel
            )
            error = ""
        except PapermillExecutionError as failure:
            error = f"{failure.ename}: {failure.evalue}".strip().partition("\n")[0]
        except DeadKernelError:
            error = "The kernel died: it was killed, or the machine was out of memory." + _last_line(complaints)
        except (RuntimeError, OSError) as failure:
            error = f"The kernel could not be used: {failure}" + _last_line(complaints)
        finally:
            finished.set()
            stop.process = None
            if follower.ident is not None:
                follower.join()
            if kernel.has_kernel:
                run_sync(kernel.shutdown_kernel)()
            if kernel.opened is not None:
                kernel.opened.stop_channels()
    if not target.exists():
        target.write_bytes(notebook.read_bytes())
    return error


def _last_line(complaints: Path) -> str:
    """What a kernel said at last, as a sentence to append, or ""."""
    said = complaints.read_text(errors="replace").split("\n") if complaints.exists() else []
    last = next((line.strip() for line in reversed(said) if line.strip()), "")
    return f" It last said: {last}" if last else ""


def _follow(lines: Path, say: Callable[[str], None], stop: Stop, finished: threading.Event) -> None:
    """Pass on each line appended to ``lines``; its last part only when it is complete."""
    position, rest = 0, b""
    said, when = "", 0.0
    while True:
        last = finished.wait(0.2)
        stop.enforce()
        with suppress(FileNotFoundError), lines.open("rb") as file:
            file.seek(position)
            new = file.read()
            position += len(new)
            *complete, rest = (rest + new).split(b"\n")
            for line in (each.decode(errors="replace").rstrip() for each in complete if each.strip()):
                stage, beat = HEARTBEAT.sub("", line), HEARTBEAT.search(line) is not None
                if not beat or stage != said or time.monotonic() - when > HEARTBEAT_SECONDS:
                    say(line)
                    said, when = stage, time.monotonic()
        if last:
            return
