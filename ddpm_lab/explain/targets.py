"""What a good step looks like: the shares, and their names, that a bottleneck report holds a step against."""

from __future__ import annotations

from dataclasses import dataclass

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
