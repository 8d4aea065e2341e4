"""Run the numbered notebooks headlessly and publish each as an HTML page, with an index over all of them."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from typing import IO, Any

import nbformat
import yaml
from IPython.core.inputtransformer2 import TransformerManager

from ddpm_lab import __version__
from ddpm_lab.checks import ConfigError, choice, number
from ddpm_lab.config import NETWORKS
from ddpm_lab.data.packed import resolve
from ddpm_lab.explain import pages
from ddpm_lab.explain.pages import DONE, FAILED, METADATA, NOT_RUN, STOPPED, Page
from ddpm_lab.files import CHECKOUT, LEDGER, PREPARED, check_room, expanded, replace
from ddpm_lab.measure import hardware
from ddpm_lab.measure.process import end_guarded, guarded, private_folder, temporary
from ddpm_lab.output import FILE_VARIABLE, say
from ddpm_lab.plan import RECOMMENDATION
from ddpm_lab.plan import preset as preset_called
from ddpm_lab.questions import experiments
from ddpm_lab.questions.ask import every_question
from ddpm_lab.training.setting import check_brought, check_name, usual_device
from ddpm_lab.training.stopping import Stop, Stopped

NUMBERED = "[0-9][0-9]_*.ipynb"
GRACE_SECONDS = 10.0
"""From the request to stop to the end of a notebook that does not obey."""
DEAD_KERNEL = 138
"""Exit status of papermill."""
_SHOWING = ("bands", "minutes", "published", "ledger", "machine")
"""Parameters of notebooks that say how results are shown, and not what is measured."""
Say = Callable[[str], None]
NOTEBOOK_SECONDS = 5.0
"""What a notebook takes beside measuring: its kernel, imports, figures and page."""


def report(
    *,
    preset: str = "quick",
    data: str = "synthetic",
    held_out: str | None = None,
    network: str | None = None,
    workload: str | None = None,
    minutes: float | None = None,
    output_dir: str | Path | None = None,
    notebooks: Sequence[str | Path] | None = None,
    parameters: Mapping[str, Any] | None = None,
    command: str = "ddpm-lab report",
) -> "Report":
    """Execute notebooks one after the other and write ``reports/NN_name.html`` and ``reports/index.html``.

    A notebook that fails is published as failed, and the others still run. Ctrl-C, SIGTERM and SIGHUP stop the report:
    finished pages are kept, and the index lists what is missing. Pages of notebooks that do not run are kept from an
    earlier report and marked as such.

    The arguments are the options of ``ddpm-lab report``. ``notebooks`` are names (03_amp or amp) or paths; None means
    all numbered ones. ``parameters`` are passed to the notebooks that have them. ``minutes`` is the total time, by
    default the preset's. The index shows the ``command`` to repeat it.

    Raises:
        ConfigError: there is no such notebook, parameter, preset, network or workload, ``minutes`` is not above 0,
            torch cannot use the GPU, or the output folder cannot be written.
        DataError: there are no images where ``data`` or ``held_out`` says.
    """
    if minutes is not None and not (number(minutes) and minutes > 0):
        raise ConfigError(f"minutes is {minutes!r}: give a number above 0")
    more = dict(parameters or {})
    given = {"preset": preset, "data": data, "held_out": held_out, "network": network, "workload": workload}
    given["output_dir"] = None if output_dir is None else str(output_dir)
    if twice := sorted(given.keys() & more.keys()):
        raise ConfigError(f"--parameter {twice[0]}: give it as --{twice[0].replace('_', '-')}")
    budget = preset_called(preset).minutes if minutes is None else minutes
    files = choose(notebooks)
    values = _values(files, given, more, every=not notebooks)
    output = CHECKOUT if output_dir is None else expanded(output_dir)
    if data != "synthetic" or held_out is not None:  # prepare once, and fail here rather than in each notebook
        preparing = {name: more[name] for name in ("image_size", "skip_bad") if name in more}
        resolve(data, output / PREPARED, held_out=held_out, progress=say, **preparing)
    run = Report(output / "reports", given, values, command)
    run.all(None if budget is None else budget * 60)
    index = run.index()
    for name, lines in pages.answers([*run.pages.values()]):
        say(f"{name}: {'; '.join(lines)}")
    run.say("report", str(index))
    return run


def _values(
    files: Sequence[Path], given: Mapping[str, Any], more: dict[str, Any], *, every: bool
) -> dict[Path, dict[str, Any]]:
    """The parameters of each notebook that runs; what is wrong is refused here, once, rather than in each of them."""
    if given["network"] is not None:
        choice("network", given["network"], NETWORKS)
    known = {file: _parameters(file) for file in files}
    if (workload := given["workload"]) is not None:
        check_name("profile", workload)
        check_brought(workload, {name: given[name] for name in ("data", "held_out", "network")} | more)
        others = [file for file, names in known.items() if "workload" not in names]
        if others and not every:
            raise ConfigError(f"{others[0].stem} is about the lab's own trainer, not about {workload}: leave it out")
        known = {file: names for file, names in known.items() if file not in others}
    exist = dict.fromkeys(name for names in known.values() for name in names)
    for name in (*more, *(name for name in ("network", "held_out") if given[name] is not None)):
        if name not in exist:
            listed, choices = ", ".join(file.stem for file in known), ", ".join(exist) or "no parameters"
            raise ConfigError(f"{name!r} is no parameter of {listed}: choose from {choices}")
    if "device" in exist and not more.keys() & {"ledger", "machine"}:
        usual_device(more.get("device"))  # a GPU that torch cannot use
    fixed = {name: value for name, value in given.items() if value is not None} | more
    return {file: {name: fixed[name] for name in names if name in fixed} for file, names in known.items()}


class Report:
    """A page for each numbered notebook, and an index over them.

    ``values`` are the parameters of the notebooks that run, ``stopped`` is the signal that stopped it, or 0. The index
    begins with every numbered notebook beside those that run, and with what an earlier report left.
    """

    def __init__(
        self, folder: Path, given: Mapping[str, Any], values: dict[Path, dict[str, Any]], command: str
    ) -> None:
        self.folder, self.given, self.values, self.command = folder, given, values, command
        self.started, self.stopped, self.pages = time.monotonic(), 0, dict[str, Page]()
        check_room(folder / "notebooks", folder.parent / "image_output")
        beside = {file for chosen in values for file in chosen.parent.glob(NUMBERED)} | set(values)
        for file in sorted(beside, key=lambda file: file.stem):
            page = Page(name=file.stem, title=pages.title(load(file)))
            executed = folder / "notebooks" / file.name
            if executed.exists() and (folder / f"{file.stem}.html").exists():
                with suppress(ConfigError):  # of a report that was killed
                    page = pages.read(load(executed), file.stem, earlier=True, here=hardware.machine().name)
            self.pages[file.stem] = page

    @property
    def exit_code(self) -> int:
        """0 when every notebook that was asked for is done, 1 when one failed, 128 + n when signal n stopped it."""
        failed = any(page.state not in (DONE, NOT_RUN) and not page.earlier for page in self.pages.values())
        return 128 + self.stopped if self.stopped else int(failed)

    def elapsed(self) -> timedelta:
        return timedelta(seconds=round(time.monotonic() - self.started))

    def say(self, name: str, line: str) -> None:
        say(f"[{self.elapsed()}] {name}: {line}")

    def all(self, seconds: float | None) -> None:
        """Measure for so long, and make the pages of all notebooks one after the other, until a signal stops it."""
        try:
            if seconds is not None:
                self.measure(seconds)
            self.index()
            with Stop() as stop:
                stop.gentle = True
                for file in self.values:
                    self.one(file, stop)
                    if stop.number:
                        self.stopped = stop.number
                        break
        except KeyboardInterrupt as interrupt:
            self.stopped = interrupt.number if isinstance(interrupt, Stopped) else signal.SIGINT

    def measure(self, seconds: float) -> None:
        """Measure what the notebooks will show, the primary comparisons of all of them first; they measure nothing.

        The search is one of its own, and gets an equal share of the time.
        """
        known, full = every_question(), self.given["preset"] == "full"
        every = {file: _defaults(file) | values for file, values in self.values.items()}
        names = {
            name: file
            for file, values in every.items()
            if (name := file.stem.partition("_")[2]) in known  # one of the user's own measures by itself
            and "minutes" in values.keys() - self.values[file].keys()
            and (full or values.get("published") is False or not (name == RECOMMENDATION or known[name].about.long))
        }
        asked = {
            name: {k: v for k, v in every[file].items() if k not in _SHOWING}
            for name, file in names.items()
            if every[file].get("ledger") is None and every[file].get("machine") is None
        }
        seconds -= self.elapsed().total_seconds() + NOTEBOOK_SECONDS * len(self.values)
        for file in names.values():  # all but the search measure nothing by themselves
            self.values[file]["minutes"] = 0.0
        if asked.pop(RECOMMENDATION, None) is not None:
            share = max(0.0, seconds / (len(asked) + 1))
            self.values[names[RECOMMENDATION]]["minutes"] = share / 60
            seconds -= share
        self.say("report", f"measuring takes up to {max(0.0, seconds) / 60:.1f} min; then {len(self.values)} pages")

        def say(name: str, line: str) -> None:
            self.say(names[name].stem if name in names else name, line)

        experiments.measure_all(asked, seconds=seconds, say=say)

    def one(self, file: Path, stop: Stop) -> None:
        """Execute one notebook, publish it, and bring the index up to date."""
        self.say(file.stem, "starts")
        target = self.folder / "notebooks" / file.name
        error = execute(file, target, self.values[file], say=lambda line: self.say(file.stem, line), stop=stop)
        state = STOPPED if error and stop.number is not None else FAILED if error else DONE
        if state == STOPPED:
            error = "Stopped before it was finished. What was measured is in the ledger."
        notebook = load(target)
        notebook.metadata[METADATA] = {"state": state, "error": error}
        replace(target, json.dumps(notebook, indent=1) + "\n")
        page = pages.read(notebook, file.stem, here=hardware.machine().name)
        self.pages[file.stem] = page
        pages.write_page(page, notebook, self.folder / f"{file.stem}.html")
        self.index()
        whose = f" ({page.status})" * page.elsewhere
        self.say(file.stem, f"{state}: {error}" if error else f"{page.headline or state}{whose}")

    def index(self) -> Path:
        """Write the index and return its path."""
        waiting = [f.stem for f in self.values if self.pages[f.stem].earlier or self.pages[f.stem].state == NOT_RUN]
        state = "The report was stopped." if self.stopped else "This report is still being made, or was ended."
        ledger = self.folder.parent / LEDGER
        why = "Not run" if self.stopped else "To come"
        missing = f" {why}: {', '.join(waiting)}." if waiting else ""
        pages.write_index(
            list(self.pages.values()),
            target := self.folder / "index.html",
            subject=self.given["workload"] or "a diffusion model",
            facts=self.facts(),
            notice=state + missing if self.stopped or waiting else "",
            command=self.command,
            ledger=os.path.relpath(ledger, self.folder) if ledger.exists() else "",
        )
        return target

    def facts(self) -> dict[str, str]:
        """The head of the index: machine, date, preset, data, and the versions of the code."""
        pages_now = (page for page in self.pages.values() if page.finding and not page.earlier)
        found = [page.finding for page in pages_now if not page.finding.get("published")]
        machine, training, data, code = (
            "; ".join(dict.fromkeys(str(each[name]) for each in found if each.get(name)))
            for name in ("hardware", "training", "data", "code_version")
        )
        workload = self.given["workload"]
        facts = {
            "Machine": machine,
            "Report made": pages.spoken_date(datetime.now().astimezone().isoformat(timespec="seconds")),
            "Preset": self.given["preset"],
            "Training": workload or training,
            "Images": data or ("of its own" if workload else self.given["data"]),
            "This call took": str(self.elapsed()),
            "Code": ", measuring code ".join(filter(None, (f"ddpm_lab {__version__}", code))),
        }
        return {term: value for term, value in facts.items() if value}


# --- one notebook ----------------------------------------------------------------------------------------------------


def choose(names: Sequence[str | Path] | None) -> list[Path]:
    """The notebooks by names (03_amp or amp) or paths, in the order of their numbers; None is every numbered one.

    Raises ConfigError where one of them does not exist.
    """
    numbered = sorted((CHECKOUT / "notebooks").glob(NUMBERED))
    known = {name: file for file in numbered for name in (file.stem, file.stem.partition("_")[2])}
    chosen = {known.get(str(name), Path(name)) for name in names or numbered}
    if not chosen:
        raise ConfigError(f"there are no notebooks in {CHECKOUT / 'notebooks'}: run the lab from its checkout")
    for path in chosen:
        if path.suffix != ".ipynb" or not path.is_file():
            listed = ", ".join(file.stem for file in numbered)
            raise ConfigError(f"there is no notebook {str(path)!r}: choose from {listed}, or give the path of a file")
    return sorted(chosen, key=lambda file: file.stem)


def _parameters(notebook: Path) -> dict[str, ast.expr]:
    """What each parameter of a notebook is set to, in its first cell that is tagged so. Raises ConfigError."""
    cells = (cell.source for cell in load(notebook).cells if "parameters" in cell.metadata.get("tags", ()))
    found = dict[str, ast.expr]()
    try:
        plain = TransformerManager().transform_cell(next(cells, ""))  # type: ignore[no-untyped-call] # magics as calls
        for line in ast.parse(plain).body:
            if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
                targets = line.targets if isinstance(line, ast.Assign) else [line.target]
                found |= {target.id: line.value for target in targets if isinstance(target, ast.Name)}
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{notebook}: its cell of parameters is not Python: {error}") from error
    return found


def _defaults(notebook: Path) -> dict[str, Any]:
    """The parameters of a notebook as they stand in it, which its reader may have edited."""
    values = dict[str, Any]()
    for name, expression in _parameters(notebook).items():
        with suppress(ValueError, TypeError):  # an expression is known when the notebook runs
            values[name] = ast.literal_eval(expression)
    return values


def load(path: Path) -> Any:
    """Read a notebook. Raises ConfigError for a file that is none."""
    try:
        found = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
        nbformat.validate(found)
    except Exception as error:  # as many kinds as a file can be wrong
        raise ConfigError(f"{path} is no notebook: {type(error).__name__}") from error
    return found


def execute(notebook: Path, target: Path, parameters: Mapping[str, Any], *, say: Say, stop: Stop) -> str:
    """Execute ``notebook`` with papermill and write it with its outputs to ``target``, also when a cell fails.

    A first signal interrupts it; a second one, or ``GRACE_SECONDS``, ends it. ``say`` gets each progress line.
    Returns the error in one line, or "" if every cell ran.
    """
    with private_folder() as private:
        lines, log, made = Path(private, "progress"), Path(private, "log"), Path(private, target.name)
        lines.touch()
        own = temporary(Path(private)) | {
            FILE_VARIABLE: str(lines),
            "IPYTHONDIR": f"{private}/ipython",
            "JUPYTER_RUNTIME_DIR": f"{private}/runtime",
            "JUPYTER_PATH": f"{sys.prefix}/share/jupyter",  # the kernel of this Python, whatever else is installed
        }
        words = ["--kernel=python3", "--language=python", "--no-progress-bar", "--log-level=ERROR"]
        paths = (str(path).replace("{", "{{").replace("}", "}}") for path in (notebook, made))  # it fills in braces
        words += ["--parameters_yaml", yaml.safe_dump(dict(parameters)), *paths]
        with log.open("wb") as out, lines.open(encoding="utf-8") as progress:
            process = guarded([sys.executable, "-P", "-m", "papermill", *words], out, env={**os.environ, **own})
            try:
                with suppress(Stopped):  # by a second signal
                    _wait(process, progress, say, stop)
            finally:
                end_guarded(process)
        try:
            load(made)
        except (OSError, ValueError):  # ended before it was written, or meanwhile
            made = notebook
        replace(target, made.read_bytes())
        return _error(process.returncode, target, log.read_text(errors="replace"))


def _wait(process: subprocess.Popen[bytes], progress: IO[str], say: Say, stop: Stop) -> None:
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
            process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)


def _error(status: int, target: Path, log: str) -> str:
    """What went wrong, in one line; "" if nothing did."""
    if status in (0, DEAD_KERNEL):
        return "The kernel died: it was killed, or the machine was out of memory." if status else ""
    for output in (o for cell in load(target).cells for o in cell.get("outputs", ()) if o.output_type == "error"):
        return f"{output.ename}: {output.evalue}".strip().partition("\n")[0]
    return f"The notebook could not be run: {log.strip().rpartition(chr(10))[2]}"
