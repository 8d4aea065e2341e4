"""Run the numbered notebooks headlessly and publish each as an HTML page, with an index over all of them."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import papermill

from ddpm_lab import __version__
from ddpm_lab.checks import ConfigError, LabError, choice
from ddpm_lab.config import NETWORKS
from ddpm_lab.data import archives
from ddpm_lab.data.folder import DataError, list_images
from ddpm_lab.data.packed import is_prepared, resolve
from ddpm_lab.explain import pages
from ddpm_lab.explain.pages import DONE, FAILED, METADATA, NOT_RUN, STOPPED, Page, Section
from ddpm_lab.files import CHECKOUT, expanded
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.plan import RECOMMENDATION
from ddpm_lab.plan import preset as preset_called
from ddpm_lab.questions import agenda
from ddpm_lab.questions import calibrate as calibration
from ddpm_lab.questions.ask import QUESTIONS
from ddpm_lab.reports.notebooks import NUMBERED, check_parameters, choose, execute
from ddpm_lab.training.own_workload import check_brought, check_name
from ddpm_lab.training.setting import usual_device
from ddpm_lab.training.stopping import Stop

LAST = "06_recommendation"
LONG = (LAST, "07_peers", "08_quality", "09_claims")
"""They show what the others measured, or what was measured before, and get time to measure only in ``full``."""
_SHOWING = ("bands", "minutes", "published")
"""Parameters of notebooks that say how results are shown, and not what is measured."""
NOTEBOOK_SECONDS = 6.0
"""What a notebook takes beside measuring: its kernel, imports, figures and page."""


class ReportError(LabError):
    """A report that cannot be made, in one sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult:
    """What a report came to: a page for each numbered notebook, and the index over them."""

    pages: tuple[Page, ...]
    index: Path
    stopped: bool

    @property
    def exit_code(self) -> int:
        """0 when every notebook that was asked for is done, 1 when one failed, 130 when the report was stopped."""
        if self.stopped:
            return 130
        return int(any(page.state != DONE for page in self.pages if page.state != NOT_RUN and not page.earlier))


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
    progress: Callable[[str], None] | None = None,
) -> ReportResult:
    """Execute notebooks one after the other and write ``reports/NN_name.html`` and ``reports/index.html``.

    A notebook that fails is published as failed and the others go on. Ctrl-C and SIGTERM stop the report: what is done
    is kept, and the index says what is missing. The pages of notebooks that do not run now are kept from an earlier
    report, and marked so.

    Args:
        preset: smoke, quick or full.
        data: "synthetic", a folder of images, or an archive.
        held_out: a folder of images that are never trained on.
        network: tiny, seed, ddpm or s000; None is the preset's choice for the machine.
        workload: a training of your own as module:function; then the notebooks run that can be asked of it.
        minutes: budget of all notebooks together; None is the preset's, which ``full`` does not have.
        output_dir: folder that receives ``reports/``, ``image_output/`` and ``trace_output/``; None is the checkout.
        notebooks: names (03_amp or amp) or paths; None is every numbered notebook of the checkout.
        parameters: further notebook parameters, each for the notebooks that have it.
        progress: called with one line at a time; None prints it.

    Raises:
        NotebookError: a notebook or a parameter does not exist.
        ReportError: the output folder cannot be written, or ``minutes`` is not above 0, or too few to measure anything.
        ConfigError: there is no such preset, network or workload, or torch cannot use the GPU.
        DataError: there are no images where ``data`` or ``held_out`` says.
    """
    given = {"preset": preset, "data": data, "held_out": held_out, "network": network, "workload": workload}
    given["output_dir"] = None if output_dir is None else str(output_dir)
    run, values = _checked(given, minutes, notebooks, dict(parameters or {}), progress or partial(print, flush=True))
    try:
        if run.seconds is not None:
            run.measure(values)
        with Stop() as stop:
            stop.gentle = True
            for file in list(run.files):
                run.one(file, values[file], stop)
                if stop.number is not None:
                    return run.finish(stopped=True)
    except KeyboardInterrupt:
        return run.finish(stopped=True)
    return run.finish(stopped=False)


def _checked(
    given: dict[str, Any],
    minutes: float | None,
    notebooks: Sequence[str | Path] | None,
    parameters: dict[str, Any],
    progress: Callable[[str], None],
) -> tuple[_Run, dict[Path, dict[str, Any]]]:
    """The report that is to be made, and each notebook's parameters; all that can be refused is refused here."""
    preset, data = given["preset"], given["data"]
    total = preset_called(preset).minutes if minutes is None else minutes
    if minutes is not None and not minutes > 0:
        raise ReportError(f"minutes is {minutes!r}: give a number above 0")
    if given["network"] is not None:
        choice("network", given["network"], NETWORKS)
    given["workload"] = parameters.pop("workload", given["workload"])
    files = choose(notebooks)
    _check_data(data, given["held_out"])
    known = _parameters(files, given, parameters, every=not notebooks)
    fixed = {name: value for name, value in given.items() if value is not None} | parameters
    output = given["output_dir"]
    run = _Run(
        folder=_writable(CHECKOUT if output is None else expanded(output)),
        preset=preset,
        progress=progress,
        command=_command({**given, "minutes": minutes}, parameters, notebooks or ()),
        data="of its own" if given["workload"] else data,
        workload=given["workload"] or "",
        measuring=[
            file
            for file, names in known.items()
            if _question(file) in (*QUESTIONS, RECOMMENDATION)  # one of the user's own measures by itself
            and "minutes" in names
            and "minutes" not in parameters
            and (preset == "full" or file.stem not in LONG)
        ],
        seconds=None if total is None else total * 60,
    )
    if data != "synthetic":  # once, and refused here rather than in each notebook
        options = {name: value for name, value in parameters.items() if name in ("image_size", "skip_bad")}
        held_out = given["held_out"]
        resolve(data, run.folder.parent / "data" / "prepared", held_out=held_out, progress=progress, **options)
    run.collect(list(known))
    return run, {file: {name: fixed[name] for name in names if name in fixed} for file, names in known.items()}


def _question(file: Path) -> str:
    return file.stem.partition("_")[2]


def _parameters(
    files: Sequence[Path], given: Mapping[str, Any], parameters: Mapping[str, Any], *, every: bool
) -> dict[Path, list[str]]:
    """The parameters of each notebook that runs; what is wrong is refused here, once, rather than in each of them."""
    known = {file: list(papermill.inspect_notebook(file)) for file in files}
    if (workload := given["workload"]) is not None:
        check_name("profile", workload)
        check_brought(workload, {**{name: given[name] for name in ("data", "held_out", "network")}, **parameters})
        if every:  # the others are about the lab's own trainer
            known = {file: names for file, names in known.items() if "workload" in names}
    check_parameters(known, parameters)
    if any("device" in names for names in known.values()) and not parameters.keys() & {"ledger", "machine"}:
        usual_device(parameters.get("device"))  # a GPU that torch cannot use
    return known


def _command(options: Mapping[str, Any], parameters: Mapping[str, Any], notebooks: Sequence[str | Path]) -> str:
    """The command that makes the same report again."""
    words = ["ddpm-lab", "report"]
    for name, value in options.items():
        words += [] if value in (None, "synthetic") else [f"--{name.replace('_', '-')}", str(value)]
    for name, value in parameters.items():
        words += ["-p", name, value if isinstance(value, str) else json.dumps(value)]
    return shlex.join([*words, *(word for notebook in notebooks for word in ("--notebook", str(notebook)))])


@dataclass(slots=True, kw_only=True)
class _Run:
    """A report while it is being made. ``files`` are the notebooks that still have to run.

    ``searching`` are the seconds of the notebook that searches by itself, of which no question is asked before.
    """

    folder: Path
    preset: str
    data: str
    workload: str
    command: str
    progress: Callable[[str], None]
    measuring: list[Path]
    seconds: float | None
    files: list[Path] = field(default_factory=list)
    pages: dict[str, Page] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    calibration: Section | None = None
    searching: float = 0.0
    here: str = field(default_factory=lambda: hardware.machine().name)

    @property
    def elapsed(self) -> timedelta:
        return timedelta(seconds=round(time.monotonic() - self.started))

    def collect(self, files: Sequence[Path]) -> None:
        """Fill the index with every numbered notebook beside those that run, and with what an earlier report left."""
        self.files = list(files)
        self.calibration = _calibration(self.folder.parent / "trace_output" / "ledger.jsonl")
        beside = {file for chosen in files for file in chosen.parent.glob(NUMBERED)} | set(files)
        for file in sorted(beside, key=lambda file: file.stem):
            page = Page(name=file.stem, title=pages.title(pages.load(file)))
            executed = self.executed(file)
            if executed.exists() and (self.folder / f"{file.stem}.html").exists():
                try:
                    page = pages.read(pages.load(executed), file.stem, earlier=True, here=self.here)
                except (OSError, ValueError):
                    executed.unlink(missing_ok=True)
            self.pages[file.stem] = page
        self.index()

    def measure(self, values: Mapping[Path, Mapping[str, Any]]) -> None:
        """Measure what the notebooks will show, the primary comparisons of all of them first; they measure nothing.

        The search is one of its own, and gets an equal share of the time. Raises ReportError where there is too little.
        """
        asked = {
            _question(file): {name: value for name, value in values[file].items() if name not in _SHOWING}
            for file in self.measuring
            if not values[file].keys() & {"ledger", "machine"}
        }
        names = {_question(file): file.stem for file in self.measuring}
        pages_take = NOTEBOOK_SECONDS * len(self.files)
        seconds = (self.seconds or 0.0) - self.elapsed.total_seconds() - pages_take
        if asked.pop(RECOMMENDATION, None) is not None:
            self.searching = max(0.0, seconds / (len(asked) + 1))
            seconds -= self.searching
        self.say("report", f"measuring takes up to {max(0.0, seconds) / 60:.1f} min; then {len(self.files)} pages")
        try:
            agenda.measure(asked, seconds=seconds, say=lambda name, line: self.say(names.get(name, name), line))
        except ConfigError as error:
            least = str(error).partition(": ")[2]
            given = (self.seconds or 0.0) / 60
            raise ReportError(
                f"minutes is {given:.2g}, and the pages take {pages_take / 60:.2g}: beside them {least}"
            ) from error

    def executed(self, file: Path) -> Path:
        return self.folder / "notebooks" / file.name

    def one(self, file: Path, values: dict[str, Any], stop: Stop) -> None:
        """Execute one notebook, publish it, and bring the index up to date."""
        if self.seconds is not None and file in self.measuring:
            values = {**values, "minutes": self.searching / 60 if file.stem.endswith(RECOMMENDATION) else 0}
        self.say(file.stem, "starts")
        began = time.monotonic()
        target = self.executed(file)
        error = execute(file, target, values, say=lambda line: self.say(file.stem, line), stop=stop)
        state = STOPPED if error and stop.number is not None else FAILED if error else DONE
        if state == STOPPED:
            error = "Stopped before it was finished. What was measured is in the ledger."
        notebook = pages.load(target)
        notebook.metadata[METADATA] = {
            "state": state,
            "error": error,
            "preset": self.preset,
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - began, 1),
        }
        pages.save(notebook, target)
        page = pages.read(notebook, file.stem, here=self.here)
        self.files.remove(file)
        self.pages[file.stem] = page
        pages.write_page(page, notebook, self.folder / f"{file.stem}.html")
        self.index()
        self.say(file.stem, f"{state}: {error}" if error else page.headline or state)

    def say(self, name: str, line: str) -> None:
        self.progress(f"[{self.elapsed}] {name}: {line}")

    def finish(self, stopped: bool) -> ReportResult:
        index = self.index(stopped=stopped)
        for name, lines in pages.answers(list(self.pages.values())):
            self.progress(f"{name}: {'; '.join(lines)}")
        self.say("report", str(index))
        return ReportResult(pages=tuple(self.pages.values()), index=index, stopped=stopped)

    def index(self, *, stopped: bool = False) -> Path:
        """Write the index as it stands."""
        target = self.folder / "index.html"
        missing = ", ".join(file.stem for file in self.files)
        notice = ""
        if stopped:
            notice = f"The report was stopped. Not run: {missing}." if missing else "The report was stopped."
        elif missing:
            notice = f"This report is still being made, or was ended. To come: {missing}."
        ledger = self.folder.parent / "trace_output" / "ledger.jsonl"
        pages.write_index(
            list(self.pages.values()),
            target,
            subject=self.workload or "a diffusion model",
            facts=self.facts(),
            answered=pages.answers(list(self.pages.values())),
            notice=notice,
            command=self.command,
            ledger=os.path.relpath(ledger, self.folder) if ledger.exists() else "",
            calibration=self.calibration,
        )
        return target

    def facts(self) -> list[tuple[str, str]]:
        """The head of the index: machine, date, preset, data, and the versions of the code."""
        mine = [page.finding for page in self.pages.values() if page.finding and not page.earlier]
        found = [finding for finding in mine if not finding.get("published")]

        def of(name: str) -> str:
            return "; ".join(dict.fromkeys(str(finding[name]) for finding in found if finding.get(name)))

        facts = [
            ("Machine", of("hardware")),
            ("Report made", pages.spoken_date(datetime.now().astimezone().isoformat(timespec="seconds"))),
            ("Preset", self.preset),
            ("Training", self.workload or of("training")),
            ("Images", of("data") or self.data),
            ("This call took", str(self.elapsed)),
            ("Code", ", measuring code ".join(filter(None, (f"ddpm_lab {__version__}", of("code_version"))))),
        ]
        return [(term, value) for term, value in facts if value]


def _calibration(ledger: Path) -> Section | None:
    """What the last calibration of this machine said, if there was one."""
    here = hardware.machine().key
    records, _ = Ledger(ledger).read(
        lambda heads: [h for h in heads if h.experiment == calibration.EXPERIMENT and h.machine.key == here]
    )
    found = calibration.calibrations(records)
    return calibration.section(found[-1]) if found else None


def _check_data(data: str, held_out: str | None) -> None:
    """Refuse a place without images now, rather than in each notebook."""
    for path in (None if data == "synthetic" else expanded(data), held_out and expanded(held_out)):
        if not path or (path.is_file() and archives.is_archive(path)) or is_prepared(path):
            continue
        if not list_images(path):
            raise DataError(f"no PNG or JPEG images in {path}; give a folder of images, or 'synthetic'")


def _writable(output: Path) -> Path:
    """The folder of the pages, made if it is missing and tried with a file."""
    target = output / "reports"
    try:
        (target / "notebooks").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target), tempfile.TemporaryFile(dir=target / "notebooks"):
            pass
    except OSError as error:
        raise ReportError(f"cannot write to {target}: {error.strerror}; choose another output folder") from error
    return target
