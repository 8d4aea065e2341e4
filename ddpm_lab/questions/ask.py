"""Find the questions, ask one for its configurations, and answer it from records.

Every ``Question`` in a module of this folder is one. Its function takes a ``Setup`` (what is trained, on what, how
much) and a grid, of which None means the preset's choice for this machine. What the machine cannot run is left out and
named, or refused if it was asked for by name.
"""

from __future__ import annotations

import dataclasses
import pkgutil
import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ddpm_lab.checks import ConfigError
from ddpm_lab.declared import arguments
from ddpm_lab.explain.answer import Answer, speeds
from ddpm_lab.explain.comparisons import comparisons, families
from ddpm_lab.explain.findings import compared
from ddpm_lab.explain.selection import Study, once
from ddpm_lab.plan import RECOMMENDATION, SEARCH, Experiment, Question
from ddpm_lab.questions.quality import trained_view, with_trials
from ddpm_lab.questions.search import recommendation, search
from ddpm_lab.training.setting import Setup, nothing_asked


class Entry(NamedTuple):
    """A question: what it declares, and its functions."""

    about: Question
    ask: Callable[..., Experiment]
    answer: Callable[[Study], Answer] | None


@cache
def every_question() -> dict[str, Entry]:
    """All questions by name, those with a notebook first."""
    files = pkgutil.iter_modules([str(Path(__file__).parent)])
    modules = [vars(import_module(f"ddpm_lab.questions.{file.name}")) for file in files]
    found = [(about, module) for module in modules for about in module.values() if isinstance(about, Question)]
    return {
        about.name: Entry(about, module[about.name], module.get("answer"))
        for about, module in sorted(found, key=lambda each: each[0].file)
    }


def questions() -> dict[str, Callable[..., Experiment]]:
    """The functions that ask, by name, of the questions that ``ddpm-lab run`` measures."""
    return {name: entry.ask for name, entry in every_question().items() if entry.about.asked}


STAGES: dict[str, Callable[..., Experiment]] = {f.__name__: f for f in (search, recommendation)}
"""What ``recommend`` measures in the course of its answer; nobody asks for one alone."""


def trained() -> tuple[str, ...]:
    """Questions about speed whose configurations can be trained for quality besides."""
    return tuple(name for name, entry in every_question().items() if entry.about.trains)


def ask(name: str, setup: Setup, *, seeds: int | None = None, images: int | None = None, **grid: Any) -> Experiment:
    """The experiment that answers a question; ``seeds`` and ``images`` are those of the runs that are for quality."""
    made = {**questions(), **STAGES}[name]
    grid = arguments(made, grid, name)
    given = {option: value for option, value in (("seeds", seeds), ("images", images)) if value is not None}
    if setup.own and setup.own.lacks(name):
        experiment = nothing_asked(name, setup)
    elif name in (*trained(), RECOMMENDATION):
        experiment = with_trials(made(setup, **grid), setup, seeds=seeds, images=images)
    elif name == "quality":
        experiment = made(setup, **grid, **arguments(made, given, name))
    elif given and name != SEARCH:
        (option, value), *_ = given.items()
        able = ", ".join((*trained(), "quality"))
        raise ConfigError(f"{option} is {value!r}, and {name} trains no runs for quality: only {able} do")
    else:
        experiment = made(setup, **grid)
    # A question has one primary comparison: that of its first family.
    others = tuple(dataclasses.replace(f, primary="") for f in experiment.families[1:])
    return dataclasses.replace(experiment, families=experiment.families[:1] + others)


@once
def answer(study: Study) -> Answer:
    """The answer that the records of a study give to its question; of a comparison without one, of its speeds."""
    entry = every_question().get(study.experiment)
    found = entry.answer(study) if entry and entry.answer else speeds(study, compared(study))
    if entry is None:
        return found
    about = entry.about
    named = dataclasses.replace(found.finding, question=about.title)
    # Figures of a user's training lie beside those of the lab's.
    own = "".join(f"_{r.config.work_name}" for r in study.records[-1:] if r.config.is_own)
    file = about.file + re.sub(r"\W", "_", own)[:60]  # of up to four bytes each
    views = (*found.views, trained_view(study, families(comparisons(study)))) if about.trains else found.views
    return dataclasses.replace(found, finding=named, file=file, trains=about.trains, views=views)
