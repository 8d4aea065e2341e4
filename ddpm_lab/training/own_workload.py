"""A training of the user's, tried before anything is measured: what it offers, and what identifies it.

One rank makes it and does one step. What cannot be imported, returns the wrong thing or fails in its first step is
refused here in one sentence, with the line.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import OBSERVED_OPTIONS, RunConfig
from ddpm_lab.measure.code_version import CodeVersion, Loaded, Tree, code_version, in_lab
from ddpm_lab.measure.group import Group, GroupFailed
from ddpm_lab.measure.sets import Instrument
from ddpm_lab.measure.witness import mismatches
from ddpm_lab.plan import RECOMMENDATION, SEARCH, WHOLE_QUESTION, Experiment
from ddpm_lab.training.setting import Own, Setup

FOR_OWN = ("profile", "multi_gpu", "amp", "workers", "torch_compile", "batch_size")
"""Questions that can be asked of a training of the user's."""
BATCH_SIZE = 8
"""Images of the one step."""


def find_here() -> None:
    """The folder one works in may hold the module: a script finds it there, a command does not by itself."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)  # first, as for a script: train.py and test.py are common names


def check_name(question: str, name: object) -> None:
    """Raise ConfigError for a training of the user's that is not named so that it is found, or cannot be asked of."""
    module, _, function = name.partition(":") if isinstance(name, str) else ("", "", "")
    if not module or not function.isidentifier():
        raise ConfigError(f"workload is {name!r}: name the function that makes your training as module:function")
    if question not in (*FOR_OWN, SEARCH, RECOMMENDATION):
        raise ConfigError(
            f"workload is {name!r}, and the experiment {question} is about the lab's own trainer: leave it out, or ask "
            f"some of {', '.join(FOR_OWN)}"
        )
    find_here()
    if importlib.util.find_spec(top := module.partition(".")[0]) is None:
        raise ConfigError(f"workload {name!r}: there is no module {top!r}; is its folder on the Python path?")


def code_of(configs: Iterable[RunConfig], instrument: Instrument, tree: Tree | None = None) -> CodeVersion:
    """The code that ranks run, in ``tree`` for a revision's. Raises ConfigError where a rank cannot tell it."""
    modules: dict[str, str] = {}
    libraries: set[str] = set()
    for config in {config.sources: config for config in configs}.values():
        if not all(in_lab(source.partition(":")[0]) for source in config.sources):
            revision = tree.revision if tree else config.revision
            eager = dataclasses.replace(config, compile="off", compile_mode="default", revision=revision)
            _, found = look(eager, instrument, tree)
            modules.update(found.modules)
            libraries.update(found.libraries)
    return code_version(Loaded(modules, sorted(libraries)), tree)


def look(config: RunConfig, instrument: Instrument, tree: Tree | None = None) -> tuple[dict[str, Any], Loaded]:
    """What a workload's first rank says after one step, and what it loaded. Raises ConfigError if it fails."""
    name = config.sources[-1]
    instrument.progress(f"looking at {name}")
    limit = instrument.limits.build_seconds
    try:
        with Group(
            config,
            threads=config.rank_threads(instrument.usable_cores),
            modules={},
            environment={},
            tree=tree,
            limits=instrument.limits,
            progress=lambda text: instrument.progress(f"{name}: {text}"),
        ) as group:
            group.advance(1, limit)
            ranks, loaded = group.witness(), group.loaded()
    except GroupFailed as failed:
        raise ConfigError(f"workload {name!r} cannot be measured: {failed.reason}") from failed
    if wrong := mismatches(config, [{**seen, "unlisted_modules": []} for seen in ranks]):
        raise ConfigError(f"workload {name!r} cannot be measured: {'; '.join(wrong)}")
    return ranks[0], loaded


def look_at(name: str, instrument: Instrument, *, device: str, seed: int) -> tuple[Own, CodeVersion]:
    """What the training of ``name`` offers, and its code. Raises ConfigError where its first step fails."""
    config = RunConfig(**Own(name=name).settings(), device=device, seed=seed, global_batch_size=BATCH_SIZE)
    seen, loaded = look(config, instrument)
    offers = ("training", *seen["offers"]) if "offers" in seen else ()
    options = [(key, seen[key]) for key in OBSERVED_OPTIONS if offers]
    if "loss" not in offers:
        options.append(("number_format", "own"))
    found = Own(name=name, place=seen.get("maker", ""), options=tuple(options), offers=offers)
    return found, code_version(loaded)


def check_brought(name: str, given: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of the lab's own data and network, beside a training that brings both."""
    usual = {"data": "synthetic", "held_out": None, "skip_bad": False, "network": None, "image_size": 32}
    usual |= {"image_sizes": None}
    for place, value in given.items():
        if place in usual and value != usual[place]:
            raise ConfigError(f"{place} is {value!r}, and {name} brings its own data and model: leave it out")


def with_own(setup: Setup, own: Own) -> Setup:
    """The set-up of a training of the user's."""
    samples = dict(own.options).get("samples")
    told = "data of its own" if samples is None else f"{samples:,} samples"
    images = dataclasses.replace(setup.images, sha256=own.sha256, name=told)
    return dataclasses.replace(setup, own=own, images=images)


def nothing_asked(question: str, setup: Setup) -> Experiment:
    """An experiment of which nothing is measured, and that says why."""
    reason = setup.own.lacks(question) if setup.own else ""
    left_out = ((setup.family_name(None), WHOLE_QUESTION, reason),)
    return Experiment(name=question, families=(), left_out=left_out, asked=setup.config())
