"""Names for parallel efficiency, from two documents or one's own table."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from ddpm_lab.checks import ConfigError, number

DOCUMENTS = {
    "S000": "a benchmark of DDPM training on one GPU and on eight",
    "S001": "a guide to benchmarking on several GPUs and nodes",
    "S002": "a report on the bottlenecks of one training run",
    "S003": "a benchmark of one GPU against several with repeats",
    "S004": "a report on optimising DDPM training without losing quality",
}
"""The published studies whose names and thresholds are used, and whose claims are checked."""

Names = tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """A table of names for parallel efficiency, where 1 is perfect; efficiencies count in whole per cent, as shown.

    ``table`` holds (name, lower bound) from the best down to 0, and ``threshold`` is the line that charts draw.
    ``asks`` is what good scaling must exceed on one node and on several, and below ``poor`` it is poor; both are None
    where a table does not say.
    """

    whose: str
    table: Names
    threshold: float
    asks: tuple[float, float] | None = None
    poor: float | None = None

    @property
    def owner(self) -> str:
        """Such as "S001's", or "your own"."""
        return f"{self.whose}'s" if self.whose in DOCUMENTS else self.whose

    def name(self, efficiency: float) -> str:
        return next((name for name, bound in self.table if round(efficiency, 2) >= bound), self.table[-1][0])

    def verdict(self, low: float, high: float, nodes: int = 1) -> str:
        """Say whether efficiencies from ``low`` to ``high`` are good scaling; empty where the table asks nothing."""
        if self.asks is None:
            return ""
        low, high, bound = round(low, 2), round(high, 2), self.asks[nodes > 1]
        where = f"on {'several nodes' if nodes > 1 else 'one node'} (above {share(bound)})"
        if low > bound:
            return f"good scaling {where}"
        if high > bound:
            return "the interval does not decide whether this is good scaling"
        if self.poor is not None and high < self.poor:
            return f"poor scaling (below {share(self.poor)})"
        return f"short of good scaling {where}"

    def sentence(self) -> str:
        """Return the table in words: "perfect from 100 %, good from 75 %, overhead below"."""
        text = ", ".join(f"{name} from {share(bound)}" if bound else f"{name} below" for name, bound in self.table)
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
    """Return the table called ``s000`` or ``s001``, or one's own: a mapping of names to bounds, or "good=75%, poor=0".

    Raises ConfigError, which calls the value ``place``, for no such name, or unless bounds are shares that fall to 0.
    """
    if isinstance(value, str) and value.lower() in NAMED:
        return NAMED[value.lower()]
    table = _pairs(value) if isinstance(value, str) else list(value.items()) if isinstance(value, Mapping) else []
    names, bounds = [name for name, _ in table], [bound for _, bound in table]
    named = all(isinstance(name, str) and name.strip() for name in names) and len(set(names)) == len(names) > 1
    falling = all(map(number, bounds)) and bounds[:1] <= [1] and all(a > b for a, b in pairwise(bounds))
    if not named or not falling or bounds[-1] != 0:
        raise ConfigError(
            f"{place} is {value!r}: choose one of {', '.join(NAMED)}, or give names with falling lower bounds, "
            "shares from 1 to 0 that end at 0, such as good=75%, fair=50%, poor=0"
        )
    own = tuple((name, float(bound)) for name, bound in table)
    return Bands(whose="your own", table=own, threshold=dict(own).get("good") or own[-2][1])


def _pairs(text: str) -> list[tuple[str, float]]:
    """Return ``good=75%, poor=0`` as pairs; none where it is no such list."""
    try:
        pairs = [(name.strip(), bound.strip()) for name, bound in (part.split("=") for part in text.split(","))]
        return [(name, float(bound.removesuffix("%")) / (100 if bound.endswith("%") else 1)) for name, bound in pairs]
    except ValueError:
        return []
