"""Names for parallel efficiency, from the documents that use them."""

from __future__ import annotations

BANDS: dict[str, tuple[tuple[float, str], ...]] = {
    "S000": ((1.0, "perfect"), (0.75, "good"), (0.50, "acceptable"), (0.0, "poor")),
    "S001": ((1.0, "perfect"), (0.90, "excellent"), (0.75, "good"), (0.0, "overhead")),
}
"""Names of parallel efficiency, each from its lower bound on, by the source document that uses them."""
THRESHOLD = 0.75
"""Efficiency at which both source documents begin to call scaling good."""


def band(efficiency: float, name: str = "S001") -> str:
    """The name of a parallel efficiency (1 is perfect) in the named table of bands."""
    return next((word for bound, word in BANDS[name] if efficiency >= bound), BANDS[name][-1][1])
