"""Names for parallel efficiency, from two documents or one's own table, and for the shares of a step, from a third."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpm_lab.checks import ConfigError, number

DOCUMENTS = {
    "S000": "a benchmark of DDPM training on one GPU and on eight",
    "S001": "a guide to benchmarking on several GPUs and nodes",
    "S002": "a report on the bottlenecks of one training run",
    "S003": "a benchmark of one GPU against several with repeats",
    "S004": "a report on optimising DDPM training without losing quality",
}
"""The published studies whose names and thresholds are used, and whose claims are checked."""
_FORM = "give names with falling lower bounds that end at 0, such as good=0.75, fair=0.5, poor=0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """A table of names for parallel efficiency, where 1 is perfect; efficiencies count in whole per cent, as shown.

    ``table`` holds (name, lower bound) from the best down to 0; ``whose`` says in sentences where the names come from;
    ``threshold`` is the line that charts draw. ``asks`` is what good scaling must exceed on one node and on several,
    ``poor`` what it may not fall below; both are None where a table does not say.
    """

    whose: str
    table: tuple[tuple[str, float], ...]
    threshold: float
    asks: tuple[float, float] | None = None
    poor: float | None = None

    def name(self, efficiency: float) -> str:
        """The name of an efficiency."""
        shown = round(efficiency, 2)
        return next((name for name, bound in self.table if shown >= bound), self.table[-1][0])

    def good(self, efficiency: float, nodes: int = 1) -> bool:
        """Whether an efficiency is above what the table asks of good scaling on so many nodes."""
        return self.asks is not None and round(efficiency, 2) > self.asks[nodes > 1]

    def verdict(self, efficiency: float, nodes: int = 1) -> str:
        """What the table asks of good scaling on so many nodes, and whether it is met; empty where it asks nothing."""
        if self.asks is None:
            return ""
        bound = self.asks[nodes > 1]
        where = f"on {'several nodes' if nodes > 1 else 'one node'} (above {share(bound)})"
        if self.good(efficiency, nodes):
            return f"good scaling {where}"
        if self.poor is not None and round(efficiency, 2) < self.poor:
            return f"poor scaling (below {share(self.poor)})"
        return f"short of good scaling {where}"

    def sentence(self) -> str:
        """The table in words: "perfect from 100 %, good from 75 %, overhead below"."""
        words = [f"{name} from {share(bound)}" for name, bound in self.table if bound > 0]
        text = ", ".join([*words, f"{self.table[-1][0]} below"])
        if self.asks is not None:
            text += f"; good scaling is above {share(self.asks[0])} on one node, above {share(self.asks[1])} on several"
        return text


S000 = Bands(
    whose="S000",
    table=(("perfect", 1.0), ("good", 0.75), ("acceptable", 0.50), ("poor", 0.0)),
    threshold=0.75,
)
"""Its good ends at 87 %; what lies between that and perfect has no name there and counts as good."""
S001 = Bands(
    whose="S001",
    table=(("perfect", 1.0), ("excellent", 0.90), ("good", 0.75), ("overhead", 0.0)),
    threshold=0.75,
    asks=(0.85, 0.75),
    poor=0.70,
)
NAMED = {"s000": S000, "s001": S001}
DEFAULT = "s001"


def documents(*keys: str) -> str:
    """What published studies are, in a sentence."""
    return f"Published: {'; '.join(f'{key}, {DOCUMENTS[key]}' for key in keys)}."


def share(value: float) -> str:
    """A share in per cent: "75 %", "87.5 %"."""
    return f"{100 * value:.3g} %"


def bands(value: object, place: str = "bands") -> Bands:
    """The table called ``s000`` or ``s001``, or one's own.

    Args:
        value: a name; a mapping of names to lower bounds, best first; or the same as text: "good=75%, poor=0".
        place: what the value is called where it was given.

    Raises:
        ConfigError: there is no such table, or one's own is not a falling row of shares that ends at 0.
    """
    if isinstance(value, str) and "=" not in value:
        if value.lower() not in NAMED:
            raise ConfigError(f"{place} is {value!r}: choose one of {', '.join(NAMED)}, or {_FORM}")
        return NAMED[value.lower()]
    table = _pairs(value, place) if isinstance(value, str) else value
    if not isinstance(table, Mapping) or len(table) < 2:
        raise ConfigError(f"{place} is {value!r}: {_FORM}")
    for name, bound in table.items():
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"{place} has {name!r} as a name: {_FORM}")
        if not number(bound) or not 0 <= bound <= 1:
            raise ConfigError(f"{place} begins {name!r} at {bound!r}: give a share from 0 to 1, such as 0.75 for 75 %")
    bounds = [float(bound) for bound in table.values()]
    for (name, low), (above, high) in zip(list(table.items())[1:], table.items(), strict=False):
        if low >= high:
            raise ConfigError(f"{place} begins {name!r} at {low}, not below {above!r} at {high}: {_FORM}")
    if bounds[-1] != 0:
        raise ConfigError(f"{place} ends with {list(table)[-1]!r} at {bounds[-1]}, so less has no name: {_FORM}")
    named = dict(zip(table, bounds, strict=True))
    return Bands(whose="your own", table=tuple(named.items()), threshold=named.get("good") or bounds[-2])


def _pairs(text: str, place: str) -> dict[str, Any]:
    """``good=75%, poor=0`` as a mapping."""
    found: dict[str, Any] = {}
    for pair in text.split(","):
        name, _, bound = (part.strip() for part in pair.partition("="))
        try:
            found_bound = float(bound.removesuffix("%")) / (100 if bound.endswith("%") else 1)
        except ValueError:
            raise ConfigError(f"{place} has {pair.strip()!r}: {_FORM}") from None
        if name in found:
            raise ConfigError(f"{place} names {name!r} twice: {_FORM}")
        found[name] = found_bound
    return found


Names = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """A table of thresholds, each a share of 1.

    ``compute`` is to be exceeded by the part of a step's wall time that computes, ``io`` not to be reached by the part
    that waits for data; ``memory`` are the ends of what should be in use, ``utilisation`` is to be exceeded by the
    device. ``compute_names`` holds (name, lower bound) from the best, ``io_names`` (name, upper bound) from the best.
    ``impacts`` are names of a gain by its lower end: (name, least ratio).
    """

    whose: str
    compute: float
    io: float
    memory: tuple[float, float]
    utilisation: float
    compute_names: Names
    io_names: Names
    impacts: Names

    def compute_name(self, share: float) -> str:
        """What a compute share is called."""
        return next(name for name, bound in self.compute_names if share >= bound)

    def io_name(self, share: float) -> str:
        """What a share of I/O is called."""
        return next((name for name, bound in self.io_names if share <= bound), self.io_names[-1][0])

    def impact(self, ratio: float) -> str:
        """What a gain of at least ``ratio`` is called."""
        return next((name for name, bound in self.impacts if ratio >= bound), self.impacts[-1][0])


S002 = Targets(
    whose="S002",
    compute=0.80,
    io=0.15,
    memory=(0.30, 0.60),
    utilisation=0.80,
    compute_names=(("good", 0.80), ("between good and poor", 0.70), ("poor", 0.0)),
    io_names=(("good", 0.20), ("between good and poor", 0.30), ("poor", 1.0)),
    impacts=(("high", 1.20), ("medium", 1.05), ("low", 0.0)),
)
"""Its bands are good 80 to 90 % and poor 50 to 70 % of compute, good 10 to 20 % and poor 30 to 50 % of I/O: what lies
beyond has the name of the nearer band, what lies between has none there. The names of impacts are the lab's own."""
