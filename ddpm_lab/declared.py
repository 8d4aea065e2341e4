"""Settings declared once: a dataclass field or a keyword parameter carries its type, limits, default and help.

Validation, reading of records, and options of the command line with their help are derived from that place.
"""

import argparse
import dataclasses
import inspect
import json
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
MOST = 2**63 - 1  # whole numbers are at most this: torch can hold them
LARGEST_TEXT = 2**28
"""Bytes of JSON that are read, enough for the names of a million images."""
Reader = Callable[[Any, str], Any]  # from a value, and its place for a sentence about it, to the value as it is kept
_UNSAID = (None, "", (), inspect.Parameter.empty, dataclasses.MISSING)  # defaults that no help tells
FLAGS = {"global_batch_size": "batch-size", "global_batch_sizes": "batch-sizes"}
"""What is called by a shorter name on the command line."""


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
            below = "2**63" if math.isinf(self.below) else f"{self.below:,}"
            return f"a whole number of at least {self.least:g}, and below {below}"
        if math.isfinite(self.least):
            return f"a number in [{self.least:g}, {self.below:g})"
        return f"a finite number above {self.above:g}" if math.isfinite(self.above) else "a finite number"

    def allows(self, kind: type, value: Any) -> bool:
        """Whether a value of any type is a number within the limits; True and False are none."""
        able = type(value) is kind or (isinstance(value, (kind, int)) and not isinstance(value, bool))
        most = MOST if kind is int else sys.float_info.max
        return able and self.least <= value < self.below and self.above < value and -most <= value <= most


@dataclass(frozen=True, slots=True)
class Option:
    """A setting: ``kind`` is int, float, bool, str or a dataclass, of several values with ``several``.

    ``checked(value, place)`` is a value as it is kept, a list as a tuple; it raises ConfigError, which names ``place``.
    """

    name: str
    kind: Any
    default: Any
    opt: Opt
    several: bool
    checked: Reader


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
    opt, kind = Opt(), hint
    while typing.get_origin(kind) in (Annotated, types.UnionType, typing.Union):
        if typing.get_origin(kind) is Annotated:
            kind, opt = typing.get_args(kind)
        else:
            kind = _present(kind)
    inner = typing.get_args(kind) if typing.get_origin(kind) in (tuple, Sequence) else ()
    return Option(name, inner[0] if inner else kind, default, opt, bool(inner), reader(hint))


def _present(union: Any) -> Any:
    """The type of a setting that may be None besides."""
    return next(kind for kind in typing.get_args(union) if kind is not type(None))


def reader(hint: Any, opt: Opt | None = None, remedy: str = "") -> Reader:
    """Make a reader of values of an annotation: tables as dataclasses, lists as tuples; any other type is as it is.

    ``Entries`` may stand in place of a type, in a list of them, in a table ``{str: entries}`` of them, and before None.
    What does not fit raises ConfigError: ``windows[3].steps is '5': give int``. Numbers have limits where ``opt``,
    which is what an ``Annotated`` type brings, sets some; without one they may be infinite.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    found: Reader = partial(_expected, hint) if opt is None else partial(_within, hint, opt, remedy)
    if origin is Annotated:
        found = reader(inner[1]) if isinstance(inner[1], Entries) else reader(*inner)
    elif isinstance(hint, Entries):
        found = hint.read
    elif isinstance(hint, list):
        found = partial(_tuple, (dict, ...), [reader(hint[0])], None)
    elif isinstance(hint, dict):
        found = partial(_dictionary, reader(hint[str]))
    elif isinstance(hint, tuple):
        found = partial(_optional, reader(hint[0]))
    elif origin in (types.UnionType, typing.Union):
        found = partial(_optional, reader(_present(hint), opt, ", or null for none"))
    elif origin is Sequence:
        found = partial(_listed, reader(inner[0], opt))
    elif origin is tuple:
        found = partial(_tuple, inner, [reader(kind, opt) for kind in inner if kind is not ...], opt)
    elif isinstance(hint, type) and issubclass(hint, tuple):
        kinds = [*typing.get_type_hints(hint).values()]
        found = partial(_named_tuple, hint, kinds, [*map(reader, kinds)])
    elif origin in (dict, Mapping):
        found = partial(_dictionary, reader(inner[1]))
    elif dataclasses.is_dataclass(hint):
        found = _table_reader(typing.cast(Any, hint))
    elif hint not in PLAIN:
        found = partial(_optional, None)
    return found


class Entries:
    """A table that is kept as it is: what it ``needs``, and what it ``may`` hold, has to fit; it may hold more."""

    def __init__(self, needs: Mapping[str, Any] | None = None, /, **may: Any) -> None:
        self._needs = needs or {}
        self._readers = {name: reader(kind) for name, kind in {**self._needs, **may}.items()}

    def read(self, table: Any, place: str) -> dict[str, Any]:
        _expected(dict, table, place)
        for name, read in self._readers.items():
            if name in table:
                read(table[name], f"{place}.{name}")
            elif name in self._needs:
                raise ConfigError(f"{place}.{name} is missing")
        return dict(table)


@cache
def _table_reader(kind: Any) -> Reader:
    """Make a reader of the dataclass ``kind`` from a table; one that is there already is taken as it is."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {f.name: reader(hints[f.name]) for f in dataclasses.fields(kind) if f.init}
    needed = [f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING]

    def read(value: Any, place: str) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"{place} is {str(value)[:60]!r}: give settings: {', '.join(fields)}")
        if not value.keys() <= fields.keys():
            known(place or kind.__name__, value, kind)
        inside = f"{place}." if place else ""
        for name in needed:
            if name not in value:
                raise ConfigError(f"{inside}{name} is missing")
        return kind(**{name: fields[name](v, f"{inside}{name}") for name, v in value.items()})

    return read


def _optional(read: Reader | None, value: Any, place: str) -> Any:
    return value if value is None or read is None else read(value, place)


def _dictionary(read: Reader, table: Any, place: str) -> dict[str, Any]:
    return {name: read(value, f"{place}.{name}") for name, value in _expected(dict, table, place).items()}


def _named_tuple(made: Any, kinds: Sequence[Any], reads: Sequence[Reader], values: Any, place: str) -> Any:
    return made(*_tuple(kinds, reads, None, values, place))


def _listed(read: Reader, values: Any, place: str) -> tuple[Any, ...]:
    several(place, values)
    return tuple(read(v, place) for v in values)


def _tuple(kinds: Sequence[Any], reads: Sequence[Reader], opt: Opt | None, values: Any, place: str) -> tuple[Any, ...]:
    _expected((list, tuple), values, place)
    if kinds[-1] is ...:
        plain = kinds[0] in PLAIN and {*map(type, values)} <= {kinds[0]}  # thousands of seconds
        if plain and (not opt or not values or all(opt.allows(kinds[0], f(values)) for f in (min, max, sum))):
            return tuple(values)
        return tuple(reads[0](v, f"{place}[{i}]") for i, v in enumerate(values))
    if len(values) != len(reads):
        raise ConfigError(f"{place} is {values!r}: give {len(reads)} values")
    return tuple(read(v, f"{place}[{i}]") for i, (read, v) in enumerate(zip(reads, values, strict=True)))


def _within(kind: type, opt: Opt, remedy: str, value: Any, place: str) -> Any:
    if opt.choices:
        choice(place, value, opt.choices)
    elif kind in (int, float):
        if opt.allows(kind, value):
            return value
        raise ConfigError(f"{place} is {value!r}: give {opt.limits(kind)}{remedy}")
    return _expected(kind, value, place)


def _expected(kind: Any, value: Any, place: str) -> Any:
    able = (int, float) if kind is float else kind
    whole = isinstance(value, int) and kind in (int, float)
    if not isinstance(value, able) or (whole and (isinstance(value, bool) or abs(value) > MOST)):
        name = {bool: "True or False", str: "a text in quotation marks", (list, tuple): "a list"}.get(kind)
        raise ConfigError(f"{place} is {str(value)[:60]!r}: give {name or kind.__name__}")
    return value


def validate(made: Any, place: str = "") -> None:
    """Check every field of a frozen dataclass. Raises ConfigError for the first that is wrong."""
    for name, option in options(typing.cast(Any, type(made))).items():
        object.__setattr__(made, name, option.checked(getattr(made, name), f"{place}{name}"))


def parsed(text: str | bytes) -> Any:
    """The values in a text of JSON from a file or a peer. Raises ValueError, also where it is too long or deep."""
    if len(text) > LARGEST_TEXT:
        raise ValueError(f"a text of {len(text):,} bytes, more than {LARGEST_TEXT:,}")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


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


def flag(name: str) -> str:
    """The option of the command line for a setting: ``--world-sizes``."""
    return f"--{FLAGS.get(name, name).replace('_', '-')}"


def add_options(parser: argparse._ActionsContainer, found: Iterable[Option]) -> None:
    """Options of the command line; what is not given is absent from the result, so that a default stands in one place.

    Lists are written with commas between their values.
    """
    for option in found:
        usual, text = option.default, option.opt.help
        text += f": {', '.join(map(str, option.opt.choices))}" if option.opt.choices else ""
        text += "" if usual is False or usual in _UNSAID else f" (default: {usual})"
        how: dict[str, Any] = {"help": text.replace("%", "%%"), "default": argparse.SUPPRESS, "dest": option.name}
        if option.kind is bool:
            how["action"] = argparse.BooleanOptionalAction if usual is True else "store_true"
        else:
            how["type"] = partial(comma_separated if option.several else _value, option.kind)
            how["metavar"] = "A,B,..." if option.several else flag(option.name)[2:].replace("-", "_").upper()
        parser.add_argument(flag(option.name), **how)


def _value(kind: Any, text: str) -> Any:
    try:
        return kind(text.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give {'a whole number' if kind is int else 'a number'}") from None


def comma_separated(kind: Any, text: str) -> list[Any]:
    return [_value(kind, each) for each in text.split(",")]
