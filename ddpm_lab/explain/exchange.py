"""What the exchange of gradients costs, from the ranks that exchange nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ddpm_lab.explain import phrases
from ddpm_lab.explain.comparisons import resolved

EXPERIMENT = "exchange"


def trains(row: Mapping[str, Any]) -> bool:
    """Whether a row's ranks learn one network: without exchange each has its own, and its speed is no offer."""
    return bool(row["config"].exchange.enabled)


def sentence(rows: Sequence[Mapping[str, Any]]) -> str:
    """How much of a step is exposed communication: what a step takes less where nothing is exchanged."""
    told = ""
    for row in rows:
        if row["role"] != "candidate" or trains(row) or not row["sets"]:
            continue
        named = f"Without exchange a step of {row['family']} is"
        if resolved(row):
            told += f" {named} {_percent(1 - 1 / row['ratio'])} shorter{_interval(row)}: exposed communication."
        else:
            told += f" {named} not called shorter (ratio {phrases.ratio(row)}, {phrases.evidence(row)})."
    return told


def _interval(row: Mapping[str, Any]) -> str:
    if math.isnan(row["low"]):
        return ""
    return f" ({100 * (1 - 1 / row['low']):.1f} to {_percent(1 - 1 / row['high'])})"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
