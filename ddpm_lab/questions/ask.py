"""Find the questions, get the experiment of a question, and answer a question from records.

Every module of this folder that defines a ``Question`` is found. Its function takes a ``Setup`` (what is trained, on
what machine, and how much) and keyword arguments; None means the preset's choice for this machine. Configurations that
the machine cannot run are left out and listed, or refused if the user named them.
"""

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
    """A question: its declaration, the function that returns its experiment, and the one that answers it."""

    about: Question
    ask: Callable[..., Experiment]
    answer: Callable[[Study], Answer] | None


@cache
def every_question() -> dict[str, Entry]:
    """Return all questions by name, those with a notebook first."""
    files = pkgutil.iter_modules([str(Path(__file__).parent)])
    modules = [vars(import_module(f"ddpm_lab.questions.{file.name}")) for file in files]
    found = [(about, module) for module in modules for about in module.values() if isinstance(about, Question)]
    return {
        about.name: Entry(about, module[about.name], module.get("answer"))
        for about, module in sorted(found, key=lambda each: each[0].file)
    }


def questions() -> dict[str, Callable[..., Experiment]]:
    """Return the functions that create experiments, by name, of the questions that ``ddpm-lab run`` measures."""
    return {name: entry.ask for name, entry in every_question().items() if entry.about.asked}


STAGES: dict[str, Callable[..., Experiment]] = {f.__name__: f for f in (search, recommendation)}
"""The experiments that ``recommend`` measures; neither is available as a question of its own."""


def trained() -> tuple[str, ...]:
    """Return the names of the questions about speed whose configurations can also be trained for quality."""
    return tuple(name for name, entry in every_question().items() if entry.about.trains)


def ask(name: str, setup: Setup, *, seeds: int | None = None, images: int | None = None, **grid: Any) -> Experiment:
    """Return the experiment of a question. ``seeds`` and ``images`` configure its training runs for quality."""
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
    """Return the answer to the question of a study; for an experiment that is not a question, a table of speeds."""
    entry = every_question().get(study.experiment)
    found = entry.answer(study) if entry and entry.answer else speeds(study, compared(study))
    if entry is None:
        return found
    about = entry.about
    named = dataclasses.replace(found.finding, question=about.title)
    # Figures of the user's own training must not overwrite those of the lab's trainer.
    own = "".join(f"_{r.config.work_name}" for r in study.records[-1:] if r.config.is_own)
    file = about.file + re.sub(r"\W", "_", own)[:60]  # characters of up to four bytes each
    views = (*found.views, trained_view(study, families(comparisons(study)))) if about.trains else found.views
    return dataclasses.replace(found, finding=named, file=file, trains=about.trains, views=views)
