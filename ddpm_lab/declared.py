"""Settings declared once: a dataclass field or a keyword parameter carries its type, limits, default and help.

Validation, reading of records, and options of the command line with their help are derived from that place.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import math
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any

from ddpm_lab.checks import ConfigError, choice, several

PLAIN = (int, float, bool, str)
MOST = 2**63 - 1
"""Whole numbers are at most this: torch can hold them."""


@dataclass(frozen=True, slots=True)
class Opt:
    """What a type cannot say of a setting: help, limits of a number (``least`` <= n < ``below``, or n > ``above``)."""

    help: str = ""
    least: float = -math.inf
    below: float = math.inf
    above: float = -math.inf
    choices: Sequence[Any] = ()

    def limits(self, kind: type) -> str:
        """What a number has to be, in words."""
        if kind is int:
            return f"a whole number of at least {self.least:g}, and below 2**63"
        if math.isfinite(self.least):
            return f"a number in [{self.least:g}, {self.below:g})"
        return f"a finite number above {self.above:g}" if math.isfinite(self.above) else "a finite number"

    def allows(self, kind: type, value: Any) -> bool:
        """Whether a value of any type is a number within the limits; True and False are none."""
        able = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
        most = MOST if kind is int else sys.float_info.max
        return able and abs(value) <= most and self.least <= value < self.below and value > self.above


@dataclass(frozen=True, slots=True)
class Option:
    """A setting: ``kind`` is int, float, bool, str or a dataclass, of several values with ``several``.

    ``optional`` settings may be None.
    """

    name: str
    kind: Any
    default: Any
    opt: Opt
    optional: bool = False
    several: bool = False

    def checked(self, value: Any, place: str) -> Any:
        """The value, a list as a tuple. Raises ConfigError, which names ``place``."""
        if (value is None and self.optional) or not (self.kind in PLAIN or dataclasses.is_dataclass(self.kind)):
            return value
        if not self.several:
            return self._one(value, place)
        several(place, value)
        return tuple(self._one(v, place) for v in value)

    def _one(self, value: Any, place: str) -> Any:
        kind: Any = self.kind
        if choices := self.opt.choices or ((True, False) if kind is bool else ()):
            choice(place, value, choices)
            if isinstance(value, int | float) and type(value) is not type(choices[0]):  # 1 is no True
                raise ConfigError(f"{place} is {value!r}: choose one of {', '.join(map(str, choices))}")
        elif kind is str or dataclasses.is_dataclass(self.kind):
            if not isinstance(value, kind):
                names = "a text in quotation marks" if kind is str else f"settings: {', '.join(options(kind))}"
                raise ConfigError(f"{place} is {value!r}: give {names}")
        elif not self.opt.allows(kind, value):
            none = ", or null for none" if self.optional else ""
            raise ConfigError(f"{place} is {value!r}: give {self.opt.limits(kind)}{none}")
        return value


@cache
def options(owner: Any) -> dict[str, Option]:
    """The settings of a dataclass (its fields) or of a function (its keyword-only parameters), by name."""
    hints = typing.get_type_hints(owner, include_extras=True)
    if dataclasses.is_dataclass(owner):
        fields = [(f.name, f.default, f.default_factory) for f in dataclasses.fields(owner) if f.init]
        rows = {name: factory() if callable(factory) else default for name, default, factory in fields}
    else:
        parameters = inspect.signature(owner).parameters.values()
        rows = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    return {name: _option(name, hints[name], default) for name, default in rows.items()}


def _option(name: str, hint: Any, default: Any) -> Option:
    opt, optional = Opt(), False
    while typing.get_origin(hint) in (Annotated, types.UnionType, typing.Union):
        if typing.get_origin(hint) is Annotated:
            hint, opt = typing.get_args(hint)
        else:
            optional = type(None) in typing.get_args(hint)
            hint = next(k for k in typing.get_args(hint) if k is not type(None))
    inner = typing.get_args(hint) if typing.get_origin(hint) in (tuple, Sequence) else ()
    return Option(name, inner[0] if inner else hint, default, opt, optional, several=bool(inner))


def validate(made: Any, place: str = "") -> None:
    """Check every field of a frozen dataclass. Raises ConfigError for the first that is wrong."""
    for name, option in options(typing.cast(Any, type(made))).items():
        object.__setattr__(made, name, option.checked(getattr(made, name), f"{place}{name}"))


def known(place: str, values: Iterable[str], owner: Any) -> None:
    """Raise ConfigError for a name in ``values`` that is no setting of ``owner``, with those that are."""
    able = sorted(options(owner))
    for name in values:
        if name not in able:
            raise ConfigError(f"{place} has no setting {name!r}: it has {', '.join(able)}")


def arguments(function: Callable[..., Any], values: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Keyword arguments of ``function``, checked. Raises ConfigError for a name or a value that it does not take."""
    found = options(function)
    if not any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values()):
        known(place, values, function)
    return {name: found[name].checked(value, name) if name in found else value for name, value in values.items()}


Reader = Callable[[Any, str], Any]
"""From a value of JSON, and its place for a sentence about it, to a value of Python."""


@cache
def reader(kind: Any) -> Reader:
    """Make a reader of values of the annotation ``kind``: dataclasses field by field, lists as tuples.

    What does not fit raises ValueError: ``windows[3].steps is '5': expected int``.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        read, allowed = reader(inner[0]), inner[1].choices
        return lambda value, place: read(value if not allowed else _among(allowed, value, place), place)
    if origin in (types.UnionType, typing.Union):
        read = reader(next(k for k in inner if k is not type(None)))
        return lambda value, place: None if value is None else read(value, place)
    if origin is tuple:
        return partial(_tuple, inner[0])
    if origin is dict:
        read = reader(inner[1])
        return lambda table, place: {k: read(v, f"{place}.{k}") for k, v in _expected(dict, table, place).items()}
    return fields_reader(kind) if dataclasses.is_dataclass(kind) else partial(_expected, kind)


def fields_reader(kind: Any) -> Reader:
    """Make a reader of the dataclass ``kind`` from a table; one that is there already is taken as it is."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {f.name: reader(hints[f.name]) for f in dataclasses.fields(kind) if f.init}
    needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]

    def read(value: Any, place: str) -> Any:
        if isinstance(value, kind):
            return value
        inside = f"{place}." if place else ""
        for name in needed:
            if name not in _expected(dict, value, place):
                raise ValueError(f"{inside}{name} is missing")
        for name in value:
            if name not in fields:
                raise ValueError(f"{inside}{name} is no field of {kind.__name__}")
        return kind(**{name: fields[name](v, f"{inside}{name}") for name, v in value.items()})

    return read


def _among(allowed: Sequence[str], value: Any, place: str) -> Any:
    if value not in allowed:
        raise ValueError(f"{place} is {str(value)[:60]!r}: expected one of {', '.join(allowed)}")
    return value


def _tuple(kind: Any, values: Any, place: str) -> tuple[Any, ...]:
    _expected(list, list(values) if isinstance(values, tuple) else values, place)
    if kind in PLAIN and all(type(v) is kind for v in values):  # thousands of seconds
        return tuple(values)
    read = reader(kind)
    return tuple(read(v, f"{place}[{i}]") for i, v in enumerate(values))


def _expected(kind: Any, value: Any, place: str) -> Any:
    able = object if kind is Any else (int, float) if kind is float else kind
    if not isinstance(value, able) or (isinstance(value, bool) and kind in (int, float)):
        raise ValueError(f"{place} is {str(value)[:60]!r}: expected {kind.__name__}")
    return value


FLAGS = {"global_batch_size": "batch-size", "global_batch_sizes": "batch-sizes"}
"""What is called by a shorter name on the command line."""


def flag(name: str) -> str:
    """The option of the command line for a setting: ``--world-sizes``."""
    return f"--{FLAGS.get(name, name).replace('_', '-')}"


_UNSAID = (None, "", (), inspect.Parameter.empty, dataclasses.MISSING)
"""Defaults that no help tells."""


def add_options(parser: argparse._ActionsContainer, found: Iterable[Option]) -> None:
    """Options of the command line; what is not given is absent from the result, so that a default stands in one place.

    Lists are written with commas between their values.
    """
    for option in found:
        usual, text = option.default, option.opt.help
        if text != argparse.SUPPRESS:
            text += f": {', '.join(map(str, option.opt.choices))}" if option.opt.choices else ""
            text += "" if usual is False or usual in _UNSAID else f" (default: {usual})"
            text = text.replace("%", "%%")
        how: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS, "dest": option.name}
        if option.kind is bool:
            how["action"] = argparse.BooleanOptionalAction if option.default else "store_true"
        else:
            how["type"] = partial(_values if option.several else _value, option.kind)
            how["metavar"] = "A,B,..." if option.several else flag(option.name)[2:].replace("-", "_").upper()
        parser.add_argument(flag(option.name), **how)


def _value(kind: Any, text: str) -> Any:
    """A value from its text; one that is no number stays text, and is refused in a sentence when it is checked."""
    try:
        return kind(text.strip())
    except ValueError:
        return text


def _values(kind: Any, text: str) -> list[Any]:
    return [_value(kind, each) for each in text.split(",")]
