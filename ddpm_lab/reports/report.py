"""Run the numbered notebooks headlessly and publish each as an HTML page, with an index over all of them."""

from __future__ import annotations

import json
import os
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
from ddpm_lab.checks import ConfigError, choice
from ddpm_lab.config import NETWORKS
from ddpm_lab.data.packed import resolve
from ddpm_lab.explain import pages
from ddpm_lab.explain.pages import DONE, FAILED, METADATA, NOT_RUN, STOPPED, Page, Section
from ddpm_lab.files import CHECKOUT, LEDGER, PREPARED, expanded, replace, writing
from ddpm_lab.ledger import Ledger
from ddpm_lab.measure import hardware
from ddpm_lab.plan import RECOMMENDATION
from ddpm_lab.plan import preset as preset_called
from ddpm_lab.questions import agenda
from ddpm_lab.questions import calibrate as calibration
from ddpm_lab.questions.ask import every_question
from ddpm_lab.reports.notebooks import NUMBERED, ReportError, choose, execute, load
from ddpm_lab.training.setting import check_brought, check_name, usual_device
from ddpm_lab.training.stopping import Stop

_SHOWING = ("bands", "minutes", "published")
"""Parameters of notebooks that say how results are shown, and not what is measured."""
PRINT = partial(print, flush=True)
NOTEBOOK_SECONDS = 6.0
"""What a notebook takes beside measuring: its kernel, imports, figures and page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportResult:
    """What a report came to: a page for each numbered notebook, and the index over them."""

    pages: tuple[Page, ...]
    index: Path
    stopped: bool

    @property
    def exit_code(self) -> int:
        """0 when every notebook that was asked for is done, 1 when one failed, 130 when the report was stopped."""
        failed = any(page.state not in (DONE, NOT_RUN) and not page.earlier for page in self.pages)
        return 130 if self.stopped else int(failed)


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
    progress: Callable[[str], None] = PRINT,
    command: str = "ddpm-lab report",
) -> ReportResult:
    """Execute notebooks one after the other and write ``reports/NN_name.html`` and ``reports/index.html``.

    A notebook that fails is published as failed and the others go on. Ctrl-C and SIGTERM stop the report: what is done
    is kept, and the index says what is missing. The pages of notebooks that do not run now are kept from an earlier
    report, and marked so.

    The arguments are the options of ``ddpm-lab report``: ``notebooks`` are names (03_amp or amp) or paths, None is all
    that are numbered; ``parameters`` go to the notebooks that have them; ``minutes`` are for all together, None is the
    preset's; ``progress`` is called with one line at a time; the index names the ``command`` that makes it again.

    Raises:
        ReportError: a notebook or a parameter does not exist, the output folder cannot be written, or ``minutes`` is
            not above 0, or too few to measure anything.
        ConfigError: there is no such preset, network or workload, or torch cannot use the GPU.
        DataError: there are no images where ``data`` or ``held_out`` says.
    """
    given = {"preset": preset, "data": data, "held_out": held_out, "network": network, "workload": workload}
    given["output_dir"] = None if output_dir is None else str(output_dir)
    more = dict(parameters or {})
    given["workload"] = more.pop("workload", workload)
    files = choose(notebooks)
    total = preset_called(preset).minutes if minutes is None else minutes
    if minutes is not None and not minutes > 0:
        raise ReportError(f"minutes is {minutes!r}: give a number above 0")
    values = _values(files, given, more, every=not notebooks)
    output = CHECKOUT if output_dir is None else expanded(output_dir)
    if data != "synthetic" or held_out is not None:  # once, and refused here rather than in each notebook
        options = {name: value for name, value in more.items() if name in ("image_size", "skip_bad")}
        resolve(data, output / PREPARED, held_out=held_out, progress=progress, **options)
    run = _Run(output / "reports", given, values, command, progress, None if total is None else total * 60)
    stopped = False
    try:
        run.measure()
        with Stop() as stop:
            stop.gentle = True
            for file in values:
                run.one(file, stop)
                if stopped := stop.number is not None:
                    break
    except KeyboardInterrupt:
        stopped = True
    return run.finish(stopped=stopped)


def _values(
    files: Sequence[Path], given: Mapping[str, Any], more: dict[str, Any], *, every: bool
) -> dict[Path, dict[str, Any]]:
    """The parameters of each notebook that runs; what is wrong is refused here, once, rather than in each of them."""
    if given["network"] is not None:
        choice("network", given["network"], NETWORKS)
    known = {file: papermill.inspect_notebook(file) for file in files}
    if (workload := given["workload"]) is not None:
        check_name("profile", workload)
        check_brought(workload, {name: given[name] for name in ("data", "held_out", "network")} | more)
        if every:  # the others are about the lab's own trainer
            known = {file: names for file, names in known.items() if "workload" in names}
    exist = dict.fromkeys(name for names in known.values() for name in names)
    for name in more:
        if name not in exist:
            listed, choices = ", ".join(file.stem for file in known), ", ".join(exist) or "no parameters"
            raise ReportError(f"{name!r} is no parameter of {listed}: choose from {choices}")
    if "device" in exist and not more.keys() & {"ledger", "machine"}:
        usual_device(more.get("device"))  # a GPU that torch cannot use
    fixed = {name: value for name, value in given.items() if value is not None} | more
    return {file: {name: fixed[name] for name in names if name in fixed} for file, names in known.items()}


def _question(file: Path) -> str:
    return file.stem.partition("_")[2]


@dataclass(slots=True)
class _Run:
    """A report while it is being made: ``values`` are the parameters of the notebooks that run.

    ``minutes`` are those of the notebooks that get a budget; all but the search measure nothing by themselves.
    """

    folder: Path
    given: Mapping[str, Any]
    values: dict[Path, dict[str, Any]]
    command: str
    progress: Callable[[str], None]
    seconds: float | None
    minutes: dict[Path, float] = field(default_factory=dict)
    pages: dict[str, Page] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    calibration: Section | None = None

    def __post_init__(self) -> None:
        """Fill the index with every numbered notebook beside those that run, and with what an earlier report left."""
        with writing(self.folder, ReportError, "output folder"):
            (self.folder / "notebooks").mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder), tempfile.TemporaryFile(dir=self.folder / "notebooks"):
                pass
        self.calibration = _calibration(self.ledger)
        beside = {file for chosen in self.values for file in chosen.parent.glob(NUMBERED)} | set(self.values)
        for file in sorted(beside, key=lambda file: file.stem):
            page = Page(name=file.stem, title=pages.title(load(file)))
            executed = self.folder / "notebooks" / file.name
            if executed.exists() and (self.folder / f"{file.stem}.html").exists():
                try:
                    page = pages.read(load(executed), file.stem, earlier=True, here=hardware.machine().name)
                except (OSError, ValueError):
                    executed.unlink(missing_ok=True)
            self.pages[file.stem] = page
        self.index()

    @property
    def ledger(self) -> Path:
        return self.folder.parent / LEDGER

    def elapsed(self) -> timedelta:
        return timedelta(seconds=round(time.monotonic() - self.started))

    def say(self, name: str, line: str) -> None:
        self.progress(f"[{self.elapsed()}] {name}: {line}")

    def measure(self) -> None:
        """Measure what the notebooks will show, the primary comparisons of all of them first; they measure nothing.

        The search is one of its own, and gets an equal share of the time. Raises ReportError where there is too little.
        """
        if self.seconds is None:
            return
        known, full = every_question(), self.given["preset"] == "full"
        names = {
            name: file
            for file, values in self.values.items()
            if (name := _question(file)) in known  # one of the user's own measures by itself
            and "minutes" in papermill.inspect_notebook(file)
            and "minutes" not in values
            and (full or not (name == RECOMMENDATION or known[name].about.long))
        }
        asked = {
            name: {k: v for k, v in self.values[file].items() if k not in _SHOWING}
            for name, file in names.items()
            if not self.values[file].keys() & {"ledger", "machine"}
        }
        pages_take = NOTEBOOK_SECONDS * len(self.values)
        seconds = self.seconds - self.elapsed().total_seconds() - pages_take
        self.minutes = dict.fromkeys(names.values(), 0.0)
        if asked.pop(RECOMMENDATION, None) is not None:
            share = max(0.0, seconds / (len(asked) + 1))
            self.minutes[names[RECOMMENDATION]] = share / 60
            seconds -= share
        self.say("report", f"measuring takes up to {max(0.0, seconds) / 60:.1f} min; then {len(self.values)} pages")

        def say(name: str, line: str) -> None:
            self.say(names[name].stem if name in names else name, line)

        try:
            agenda.measure(asked, seconds=seconds, say=say)
        except ConfigError as error:
            least = str(error).partition(": ")[2]
            spent = f"minutes is {self.seconds / 60:.2g}, and the pages take {pages_take / 60:.2g}"
            raise ReportError(f"{spent}: beside them {least}") from error

    def one(self, file: Path, stop: Stop) -> None:
        """Execute one notebook, publish it, and bring the index up to date."""
        values = self.values[file] | ({"minutes": self.minutes[file]} if file in self.minutes else {})
        self.say(file.stem, "starts")
        target = self.folder / "notebooks" / file.name
        error = execute(file, target, values, say=lambda line: self.say(file.stem, line), stop=stop)
        state = STOPPED if error and stop.number is not None else FAILED if error else DONE
        if state == STOPPED:
            error = "Stopped before it was finished. What was measured is in the ledger."
        notebook = load(target)
        notebook.metadata[METADATA] = {"state": state, "error": error, "preset": self.given["preset"]}
        replace(target, json.dumps(notebook, indent=1) + "\n")
        page = pages.read(notebook, file.stem, here=hardware.machine().name)
        self.pages[file.stem] = page
        pages.write_page(page, notebook, self.folder / f"{file.stem}.html")
        self.index()
        self.say(file.stem, f"{state}: {error}" if error else page.headline or state)

    def finish(self, *, stopped: bool) -> ReportResult:
        index = self.index(stopped=stopped)
        for name, lines in pages.answers([*self.pages.values()]):
            self.progress(f"{name}: {'; '.join(lines)}")
        self.say("report", str(index))
        return ReportResult(pages=(*self.pages.values(),), index=index, stopped=stopped)

    def index(self, *, stopped: bool = False) -> Path:
        """Write the index as it stands."""
        waiting = [f.stem for f in self.values if self.pages[f.stem].earlier or self.pages[f.stem].state == NOT_RUN]
        said = "The report was stopped." if stopped else "This report is still being made, or was ended."
        to_come = f" {'Not run' if stopped else 'To come'}: {', '.join(waiting)}." if waiting else ""
        pages.write_index(
            list(self.pages.values()),
            target := self.folder / "index.html",
            subject=self.given["workload"] or "a diffusion model",
            facts=self.facts(),
            notice=said + to_come if stopped or waiting else "",
            command=self.command,
            ledger=os.path.relpath(self.ledger, self.folder) if self.ledger.exists() else "",
            calibration=self.calibration,
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


def _calibration(ledger: Path) -> Section | None:
    """What the last calibration of this machine said, if there was one."""
    mine = (calibration.EXPERIMENT, hardware.machine().key)
    records, _ = Ledger(ledger).read(lambda heads: [h for h in heads if (h.experiment, h.machine.key) == mine])
    found = calibration.calibrations(records)
    return calibration.section(found[-1]) if found else None
