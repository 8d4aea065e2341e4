"""Refusals: bad input becomes one sentence that names the value, the place and the remedy."""

import difflib
import math
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard


class LabError(ValueError):
    """A refusal: one sentence for the user. Any other error is a defect and keeps its traceback."""

    def _render_traceback_(self: BaseException) -> list[str]:
        """What IPython shows in a notebook: the sentence, without the lab's insides above it."""
        return [f"{type(self).__name__}: {self}"]


class Interrupted(KeyboardInterrupt):
    """Measuring that was interrupted in a notebook: one sentence with what is kept."""

    _render_traceback_ = LabError._render_traceback_


class ConfigError(LabError):
    """A setting that cannot be run: one sentence that names the value, the place and the remedy."""


def choice(place: str, value: object, allowed: Iterable[object]) -> None:
    """Raise ConfigError unless ``value`` is one of ``allowed``."""
    allowed = tuple(allowed)
    if value not in allowed:
        names = ", ".join(map(str, allowed))
        raise ConfigError(f"{place} is {value!r}: choose one of {names}{did_you_mean(value, allowed)}")


def did_you_mean(value: object, allowed: Iterable[object]) -> str:
    """The end of a sentence, which names what is spelt most like ``value``, if anything is."""
    near = difflib.get_close_matches(str(value), map(str, allowed), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def whole(place: str, value: object, least: int) -> None:
    """Raise ConfigError unless ``value`` is a whole number of at least ``least``, and one that torch can hold."""
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**63:
        raise ConfigError(f"{place} is {value!r}: give a whole number of at least {least}, and below 2**63")


def several(place: str, value: object) -> None:
    """Raise ConfigError unless ``value`` is a list (or tuple) with at least one entry."""
    if not isinstance(value, list | tuple) or not value:
        raise ConfigError(f"{place} is {value!r}: give a list with at least one entry")


def number(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a finite number; True and False are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def percent(text: str, place: str = "a share") -> float:
    """``2%``, ``2 %`` or ``0.02`` as a share. Raises ConfigError for anything else."""
    bare = text.strip()
    try:
        value = float(bare.removesuffix("%")) / (100 if bare.endswith("%") else 1)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise ConfigError(f"{place} is {text!r}: give more than 0 and less than 100 %, such as 2% or 0.02")
    return value


def compiler(device: str) -> tuple[str, str, str, str | None]:
    """What torch.compile runs for a device, as inductor and Triton choose it: kind, package, name, and place if any."""
    kind, variable, usual = ("C++", "CXX", ("g++",)) if device == "cpu" else ("C", "CC", ("gcc", "clang"))
    names = (os.environ[variable],) if variable in os.environ else usual
    return f"{kind} compiler", usual[0], names[0], next(filter(None, map(shutil.which, names)), None)


def missing_to_compile(device: str) -> str:
    """Return what torch.compile needs for a device and is missing, with how to get it; empty where nothing is."""
    kind, package, name, place = compiler(device)
    if place is None:
        return f"no {kind} ({name}); on Debian or Ubuntu: apt install {package}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "no Python headers (Python.h); on Debian or Ubuntu: apt install python3-dev"
    return ""


def missing_to_explain() -> str:
    """Return the package that answers need and a bare GPU node lacks, such as scipy; empty where none is missing."""
    return next((name for name in ("scipy", "matplotlib") if find_spec(name) is None), "")
