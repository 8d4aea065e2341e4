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
from functools import cache
from typing import Annotated, Any

from ddpm_lab.checks import ConfigError

PLAIN = (int, float, bool, str)
_NUMBERS = {2: "two", 3: "three"}
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

    ``count`` is how many values there have to be, 0 for one or more. ``optional`` settings may be None.
    """

    name: str
    kind: Any
    default: Any
    opt: Opt
    optional: bool = False
    several: bool = False
    count: int = 0

    def checked(self, value: Any, place: str) -> Any:
        """The value, a list as a tuple. Raises ConfigError, which names ``place``."""
        if (value is None and self.optional) or not (self.kind in PLAIN or dataclasses.is_dataclass(self.kind)):
            return value
        if not self.several:
            return self._one(value, place)
        if not isinstance(value, list | tuple) or not value:
            raise ConfigError(f"{place} is {value!r}: give a list with at least one entry")
        if self.count and (len(value) != self.count or not all(self.opt.allows(self.kind, v) for v in value)):
            raise ConfigError(f"{place} is {value!r}: give {_NUMBERS[self.count]} numbers in {self._range}")
        return tuple(self._one(v, place) for v in value)

    @property
    def _range(self) -> str:
        return f"[{self.opt.least:g}, {self.opt.below:g})"

    def _one(self, value: Any, place: str) -> Any:
        choices = self.opt.choices or ((True, False) if self.kind is bool else ())
        if choices:
            if value not in choices or (
                isinstance(value, int | float) and type(value) is not type(next(iter(choices)))
            ):
                raise ConfigError(f"{place} is {value!r}: choose one of {', '.join(map(str, choices))}")
        elif dataclasses.is_dataclass(self.kind):
            if not isinstance(value, typing.cast(type, self.kind)):
                names = ", ".join(options(typing.cast(Any, self.kind)))
                raise ConfigError(f"{place} is {value!r}: give settings by name, some of {names}")
        elif self.kind is str:
            if not isinstance(value, str):
                raise ConfigError(f"{place} is {value!r}: give a text in quotation marks")
        elif not self.opt.allows(self.kind, value):
            none = ", or null for none" if self.optional else ""
            raise ConfigError(f"{place} is {value!r}: give {self.opt.limits(self.kind)}{none}")
        return value


@cache
def options(owner: Any) -> dict[str, Option]:
    """The settings of a dataclass (its fields) or of a function (its keyword-only parameters), by name."""
    hints = typing.get_type_hints(owner, include_extras=True)
    if dataclasses.is_dataclass(owner):
        rows = [(f.name, _default(f)) for f in dataclasses.fields(owner) if f.init]
    else:
        parameters = inspect.signature(owner).parameters.values()
        rows = [(p.name, p.default) for p in parameters if p.kind is p.KEYWORD_ONLY]
    return {name: _option(name, hints[name], default) for name, default in rows}


def _default(field: dataclasses.Field[Any]) -> Any:
    made = field.default_factory
    if callable(made):
        return made()
    return inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default


def _option(name: str, hint: Any, default: Any) -> Option:
    opt = Opt()
    if typing.get_origin(hint) is Annotated:
        hint, opt = typing.get_args(hint)
    among = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    kind, *_ = [k for k in among if k is not type(None)]
    if typing.get_origin(kind) is Annotated:  # or None
        kind, opt = typing.get_args(kind)
    inner = typing.get_args(kind) if typing.get_origin(kind) in (tuple, Sequence) else ()
    return Option(
        name=name,
        kind=inner[0] if inner else kind,
        default=default,
        opt=opt,
        optional=type(None) in among,
        several=bool(inner),
        count=len(inner) if len(inner) > 1 and Ellipsis not in inner else 0,
    )


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


class UnfitError(ValueError):
    """A value that is not what its place says: ``windows[3].steps is '5': expected int``."""

    def __init__(self, fault: str, place: str = "") -> None:
        super().__init__(f"{place} {fault}")
        self.fault, self.place = fault, place

    def inside(self, outer: str) -> UnfitError:
        """The same, seen from further out."""
        return UnfitError(
            self.fault, f"{outer}{'.' if self.place and not self.place.startswith('[') else ''}{self.place}"
        )


@cache
def reader(kind: Any) -> Callable[[Any], Any]:  # noqa: PLR0911 - one for each kind
    """A function from a value of JSON to a value of the annotation ``kind``, which raises UnfitError.

    Dataclasses are read field by field, or by a ``from_dict`` of their own; lists become tuples.
    """
    if typing.get_origin(kind) is Annotated:
        return _reader_of_annotated(kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        some = reader(next(k for k in inner if k is not type(None)))
        return lambda value: None if value is None else some(value)
    if origin is tuple:
        return lambda value: _tuple(inner[0], _expected(value, (list, tuple)))
    if origin is dict:
        of_value = reader(inner[1])
        return lambda value: {k: _at(k, of_value, v) for k, v in _expected(value, dict).items()}
    if hasattr(kind, "from_dict"):
        return lambda value: value if isinstance(value, kind) else kind.from_dict(value)
    if dataclasses.is_dataclass(kind):
        return fields_reader(kind)
    return (lambda value: value) if kind is Any else lambda value: _expected(value, kind)


def _reader_of_annotated(kind: Any) -> Callable[[Any], Any]:
    plain, opt = typing.get_args(kind)
    read = reader(plain)

    def checked(value: Any) -> Any:
        if opt.choices and value not in opt.choices:
            raise UnfitError(f"is {str(value)[:60]!r}: expected one of {', '.join(opt.choices)}")
        return read(value)

    return checked


def fields_reader(kind: Any) -> Callable[[Any], Any]:
    """A function from a table of JSON to the dataclass ``kind``, field by field. It raises UnfitError."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {f.name: reader(hints[f.name]) for f in dataclasses.fields(kind) if f.init}
    needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]

    def read(value: Any) -> Any:
        for name in needed:
            if name not in _expected(value, dict):
                raise UnfitError("is missing", name)
        for name in value:
            if name not in fields:
                raise UnfitError(f"is no field of {kind.__name__}", name)
        return kind(**{name: _at(name, fields[name], v) for name, v in value.items()})

    return read


def _tuple(kind: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    if kind in PLAIN and all(type(v) is kind for v in values):  # thousands of seconds
        return tuple(values)
    read = reader(kind)
    return tuple(_at(f"[{i}]", read, v) for i, v in enumerate(values))


def _at(place: str, read: Callable[[Any], Any], value: Any) -> Any:
    try:
        return read(value)
    except UnfitError as fault:
        raise fault.inside(place) from None


def _expected(value: Any, kind: Any) -> Any:
    able = (int, float) if kind is float else kind
    if not isinstance(value, able) or (isinstance(value, bool) and kind is not bool):
        wanted = "a list" if kind == (list, tuple) else kind.__name__
        raise UnfitError(f"is {str(value)[:60]!r}: expected {wanted}")
    return value


FLAGS = {"global_batch_size": "batch-size", "global_batch_sizes": "batch-sizes"}
"""What is called by a shorter name on the command line."""


def flag(name: str) -> str:
    """The option of the command line for a setting: ``--world-sizes``."""
    return f"--{FLAGS.get(name, name).replace('_', '-')}"


def add_options(parser: argparse._ActionsContainer, found: Iterable[Option]) -> None:
    """Options of the command line; what is not given is absent from the result, so that a default stands in one place.

    Lists are written with commas between their values.
    """
    for option in found:
        usual, text = option.default, option.opt.help
        if text != argparse.SUPPRESS:
            text += f": {', '.join(map(str, option.opt.choices))}" if option.opt.choices else ""
            text += "" if usual in (None, "", (), False, inspect.Parameter.empty) else f" (default: {_shown(option)})"
            text = text.replace("%", "%%")
        how: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS, "dest": option.name}
        if option.kind is bool:
            how["action"] = argparse.BooleanOptionalAction if option.default else "store_true"
        elif option.several:
            how |= {"type": lambda text, one=option: [_cast(one, t) for t in text.split(",")], "metavar": "A,B,..."}
        else:
            how |= {
                "type": lambda text, one=option: _cast(one, text),
                "metavar": FLAGS.get(option.name, option.name).replace("-", "_").upper(),
            }
        parser.add_argument(flag(option.name), **how)


def _cast(option: Option, text: str) -> Any:
    """A value from its text; one that is no number stays text, and is refused in a sentence when it is checked."""
    try:
        return option.kind(text.strip())
    except ValueError:
        return text


def _shown(option: Option) -> str:
    return ",".join(map(str, option.default)) if option.several else str(option.default)
