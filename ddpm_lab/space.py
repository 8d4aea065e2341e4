"""What a search may choose from: settings, each with its values, and the combinations of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from ddpm_lab.checks import ConfigError
from ddpm_lab.config import RunConfig

BATCH = "batch"
Cell = tuple[int, ...]
"""One value of each setting, by its place; the baseline is all zeros."""


class Value(NamedTuple):
    """A value of a setting: its short name for a command line, its name for people, and what it changes."""

    key: str
    label: str
    changes: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Space:
    """Settings in order, each with its values, the baseline's own first, and what was left out with the reason.

    ``guess`` is what is thought to be fast, and tried first. ``any_batch`` lets a search choose any batch, although
    another batch is another training.
    """

    baseline: RunConfig
    settings: Mapping[str, tuple[Value, ...]]
    guess: Cell = ()
    left_out: tuple[tuple[str, str], ...] = ()  # (label, reason)
    any_batch: bool = False

    @property
    def start(self) -> Cell:
        """The baseline."""
        return (0,) * len(self.settings)

    @cached_property
    def cells(self) -> dict[Cell, RunConfig]:
        """Every combination that is a configuration of its own: what excludes itself is not there."""
        found: dict[RunConfig, Cell] = {}
        for cell in product(*(range(len(values)) for values in self.settings.values())):
            changes: dict[str, Any] = {}
            for value in self.values(cell):
                changes |= value.changes
            with contextlib.suppress(ConfigError):
                found.setdefault(dataclasses.replace(self.baseline, **changes), cell)
        return {cell: config for config, cell in found.items()}

    def values(self, cell: Cell) -> list[Value]:
        """Return the values of a cell, one for each setting."""
        return [values[i] for values, i in zip(self.settings.values(), cell, strict=True)]

    def changed(self, cell: Cell, since: Cell | None = None) -> str:
        """Return what a cell has that another, or the baseline, has not: "bf16, 2 ranks"."""
        pairs = zip(self.values(cell), cell, since or self.start, strict=True)
        return ", ".join(value.label for value, mine, others in pairs if mine != others)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, ready for JSON, without the baseline."""
        names = ("settings", "guess", "left_out", "any_batch")
        values: dict[str, Any] = json.loads(json.dumps({name: getattr(self, name) for name in names}))
        return values

    @classmethod
    def from_dict(cls, baseline: RunConfig, values: Mapping[str, Any]) -> Space:
        """Return what ``as_dict`` gave, with its baseline."""
        return cls(
            baseline=baseline,
            settings={name: tuple(Value(*value) for value in found) for name, found in values["settings"].items()},
            guess=tuple(values["guess"]),
            left_out=tuple((label, reason) for label, reason in values["left_out"]),
            any_batch=values["any_batch"],
        )
