"""Predicted steps in words: a table, what they take for granted, and how far predictions lay from measurements."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from ddpm_lab.explain import phrases
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.link_fit import NotEnoughData
from ddpm_lab.explain.predicted import WORLD_SIZES, Basis, Made, Measured, basis, beside, predictions
from ddpm_lab.explain.prediction import EXTRAPOLATED, EXTRAPOLATION, Prediction


def further(study: Study) -> tuple[str, pd.DataFrame]:
    """Caption and table of what is predicted, without rows where it cannot be."""
    try:
        found = basis(study)
        made = predictions(found, WORLD_SIZES)
    except NotEnoughData as missing:
        return f"Predicted steps: not enough data ({missing}).", pd.DataFrame()
    said = [found.assumptions(max(made)), check(found), rule(made)]
    caption = f"Predicted, not measured, unless a row says so: {found.rank_batch} images a rank."
    return " ".join([caption, *(text for text in said if text)]), table(made, beside(found, made))


def table(made: Mapping[int, Made], measured: Mapping[int, Measured] | None = None) -> pd.DataFrame:
    """Predictions as strings, one row for each number of ranks, and below each what was ``measured`` of as many."""
    rows = []
    for ranks, p in made.items():
        rows += [_cells(ranks, p), *(_cells(ranks, m) for n, m in (measured or {}).items() if n == ranks)]
    order = ("Configuration", "Images a rank", "Step", "Compute", "Exchange", "Images/s", "Efficiency", "Label")
    return pd.DataFrame([[row.get(name, phrases.DASH) for name in order] for row in rows], columns=list(order))


def _cells(ranks: int, p: Made) -> dict[str, str]:
    name = {"Configuration": phrases.plural(ranks, "rank")}
    if isinstance(p, str):
        return {**name, "Label": p}
    cells = {
        **name,
        "Images a rank": f"{p.rank_batch:g}",
        "Step": phrases.with_interval(phrases.seconds, p.seconds, p.low, p.high),
        "Images/s": phrases.significant(ranks * p.rank_batch / p.seconds),
        "Label": p.label,
    }
    if isinstance(p, Prediction):
        cells |= {"Compute": phrases.seconds(p.compute_seconds), "Exchange": phrases.seconds(p.exchange_seconds)}
    elif p.cores is not None:
        each = phrases.plural(f"{p.cores / ranks:.3g}", "core")
        cells["Label"] = f"{p.label}, {each} a rank"
    if not math.isnan(p.efficiency):
        low, high = (f"{100 * end:.0f}" for end in (p.efficiency_low, p.efficiency_high))
        span = "" if math.isnan(p.efficiency_low) else f" ({low} to {high} %)"
        cells["Efficiency"] = f"{100 * p.efficiency:.0f} %{span}"
    return cells


def check(found: Basis) -> str:
    """How far measured steps of several ranks lay from their predictions."""
    few = ""
    if found.unchecked:
        counts = phrases.joined([f"{n:,}" for n in found.unchecked])
        few = f" Without the all-reduces and the overlap of {counts} ranks there is not enough data to predict theirs."
    if not found.checks:
        return f"No measured step of several ranks can be held against a prediction here.{few}"
    said = []
    for seconds, made in found.checks:
        images = phrases.plural(f"{made.rank_batch:g}", "image")
        outside = "" if made.low <= seconds <= made.high else " (outside of its interval)"
        said.append(f"{made.ranks} ranks of {images} {100 * (made.seconds / seconds - 1):+.0f} %{outside}")
    return (
        "Predicted against measured, each without the all-reduces and the overlap of its own number of ranks (compute "
        "is that of these ranks without exchange, or of one rank where that was not measured): "
        f"{phrases.joined(said)}.{few}"
    )


def rule(made: Mapping[int, Made]) -> str:
    """When a prediction is an extrapolation, and what that does to its interval; empty where none is one."""
    if not any(isinstance(p, Prediction) and p.label == EXTRAPOLATED for p in made.values()):
        return ""
    return (
        f"Extrapolation: beyond {EXTRAPOLATION} times the largest measured number of ranks, or outside the measured "
        "batches; each doubling beyond adds the error of the exchange, or of the compute, once more, in logarithm."
    )
