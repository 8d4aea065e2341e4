"""Find the notebooks, and execute one with papermill: progress lines, a clean stop, and nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import nbformat
import yaml

from ddpm_lab.checks import LabError
from ddpm_lab.files import CHECKOUT
from ddpm_lab.measure.progress import FILE_VARIABLE
from ddpm_lab.training.stopping import Stop, Stopped

NUMBERED = "[0-9][0-9]_*.ipynb"
GRACE_SECONDS = 10.0
"""From the request to stop to the end of a notebook that does not obey."""
DEAD_KERNEL = 138
"""Exit status of papermill."""
PAPERMILL = """
import ctypes, runpy, signal, sys
if sys.platform == "linux":  # end with the report, even where that is killed; a kernel ends with its papermill
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
runpy.run_module("papermill", run_name="__main__")
"""


class ReportError(LabError):
    """A report that cannot be made, in one sentence."""


def choose(names: Sequence[str | Path] | None) -> list[Path]:
    """The notebooks to run, in the order of their numbers.

    Args:
        names: names (03_amp or amp) or paths of .ipynb files; None is every numbered notebook of the checkout.

    Raises:
        ReportError: one of them does not exist.
    """
    numbered = sorted((CHECKOUT / "notebooks").glob(NUMBERED))
    known = {name: file for file in numbered for name in (file.stem, file.stem.partition("_")[2])}
    chosen = {known.get(str(name), Path(name)) for name in names or numbered}
    if not chosen:
        raise ReportError(f"there are no notebooks in {CHECKOUT / 'notebooks'}: run the lab from its checkout")
    for path in chosen:
        if path.suffix != ".ipynb" or not path.is_file():
            listed = ", ".join(file.stem for file in numbered)
            raise ReportError(f"there is no notebook {str(path)!r}: choose from {listed}, or give the path of a file")
    return sorted(chosen, key=lambda file: file.stem)


def load(path: Path) -> Any:
    """Read a notebook; raises OSError or ValueError if it cannot be read."""
    return nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]


def execute(
    notebook: Path, target: Path, parameters: Mapping[str, Any], *, say: Callable[[str], None], stop: Stop
) -> str:
    """Execute ``notebook`` with papermill and write it with its outputs to ``target``, also when a cell fails.

    A first signal interrupts it; a second one, or ``GRACE_SECONDS``, ends it. ``say`` gets each progress line.
    Returns the error in one line, or "" if every cell ran.
    """
    target.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="ddpm-lab-") as private:
        lines, log = Path(private) / "progress", Path(private) / "log"
        lines.touch()
        own = {
            FILE_VARIABLE: str(lines),
            "IPYTHONDIR": f"{private}/ipython",
            "JUPYTER_RUNTIME_DIR": f"{private}/runtime",
            "JUPYTER_PATH": f"{sys.prefix}/share/jupyter",  # the kernel of this Python, whatever else is installed
        }
        words = ["--kernel=python3", "--no-progress-bar", "--log-level=ERROR"]
        words += ["--parameters_yaml", yaml.safe_dump(dict(parameters)), str(notebook), str(target)]
        with log.open("wb") as out, lines.open() as progress:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", PAPERMILL, *words],
                env={**os.environ, **own},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            try:
                with suppress(Stopped):  # by a second signal
                    _wait(process, progress, say, stop)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if not target.exists():
            target.write_bytes(notebook.read_bytes())
        return _error(process.returncode, target, log.read_text(errors="replace"))


def _wait(process: subprocess.Popen[bytes], progress: IO[str], say: Callable[[str], None], stop: Stop) -> None:
    """Pass on progress lines until the process ends, or does not end in time after a signal."""
    interrupted, stage, running = 0.0, "", True
    while running and not (interrupted and time.monotonic() - interrupted > GRACE_SECONDS):
        running = process.poll() is None
        while line := progress.readline().strip():
            before, stage = stage, re.sub(r"\d+ s$", "", line)
            if stage != before or stage == line:  # how long a stage has taken is not told every two seconds
                say(line)
        if running and stop.number is not None and not interrupted:
            interrupted = time.monotonic()
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


def _error(status: int, target: Path, log: str) -> str:
    """What went wrong, in one line; "" if nothing did."""
    if status in (0, DEAD_KERNEL):
        return "The kernel died: it was killed, or the machine was out of memory." if status else ""
    for output in (o for cell in load(target).cells for o in cell.get("outputs", ()) if o.output_type == "error"):
        return f"{output.ename}: {output.evalue}".strip().partition("\n")[0]
    return f"The notebook could not be run: {log.strip().rpartition(chr(10))[2]}"
