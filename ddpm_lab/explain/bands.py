"""Names for parallel efficiency, from two documents or one's own table."""

from dataclasses import dataclass
from itertools import pairwise

from ddpm_lab.checks import ConfigError

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
    """

    whose: str
    table: Names
    threshold: float

    @property
    def owner(self) -> str:
        """Such as "S001's", or "your own"."""
        return f"{self.whose}'s" if self.whose in DOCUMENTS else self.whose

    def name(self, efficiency: float) -> str:
        return next((name for name, bound in self.table if round(efficiency, 2) >= bound), self.table[-1][0])

    def sentence(self) -> str:
        """Return the table in words: "perfect from 100 %, good from 75 %, overhead below"."""
        return ", ".join(f"{name} from {share(bound)}" if bound else f"{name} below" for name, bound in self.table)


S000 = Bands(
    whose="S000", table=(("perfect", 1.0), ("good", 0.75), ("acceptable", 0.50), ("poor", 0.0)), threshold=0.75
)
"""Its good ends at 87 %; what lies between that and perfect has no name there and counts as good."""
S001 = Bands(
    whose="S001", table=(("perfect", 1.0), ("excellent", 0.90), ("good", 0.75), ("overhead", 0.0)), threshold=0.75
)
NAMED = {"s000": S000, "s001": S001}
DEFAULT = "s001"


def share(value: float) -> str:
    """A share in per cent: "75 %", "87.5 %"."""
    return f"{100 * value:.3g} %"


def bands(value: object, place: str = "bands") -> Bands:
    """Return the table called ``s000`` or ``s001``, or one's own, such as "good=75%, fair=0.5, poor=0".

    Raises ConfigError, which calls the value ``place``, for no such name, or unless bounds are shares that fall to 0.
    """
    text = str(value)
    if text.lower() in NAMED:
        return NAMED[text.lower()]
    try:
        pairs = [(name.strip(), bound.strip()) for name, bound in (part.split("=") for part in text.split(","))]
        table = tuple((n, float(b.removesuffix("%")) / (100 if b.endswith("%") else 1)) for n, b in pairs)
    except ValueError:
        table = ()
    names, bounds = {name for name, _ in table if name}, [bound for _, bound in table]
    falling = bounds[:1] <= [1] and all(a > b for a, b in pairwise(bounds)) and bounds[-1:] == [0]
    if not falling or len(names) != len(table) or len(names) < 2:
        raise ConfigError(
            f"{place} is {value!r}: choose one of {', '.join(NAMED)}, or give names with falling lower bounds, "
            "shares from 1 to 0 that end at 0, such as good=75%, fair=50%, poor=0"
        )
    return Bands(whose="your own", table=table, threshold=dict(table).get("good") or bounds[-2])
