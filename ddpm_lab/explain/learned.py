"""What the configurations of a family have learned in their trials, and the images that each took to the same loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ddpm_lab.explain import phrases, quality
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.comparisons import families as by_family
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import scaled
from ddpm_lab.record import RunRecord

TARGET_SHARE = 0.9
"""The target is the loss that the baseline has reached on average after this share of its images."""

Pairs = tuple[tuple[RunRecord, RunRecord], ...]
Array = npt.NDArray[np.float64]


def families(study: Study) -> list[list[Comparison]]:
    """Families of which trials exist: each its baseline's row, then those of its candidates."""
    found = by_family(r for r in comparisons(study) if r.role in ("baseline", "candidate"))
    return [rows for rows in found if rows[0].role == "baseline" and images_of(rows[1:])]


def pairs_of(row: Comparison, extent: tuple[int, int]) -> Pairs:
    """The trials behind a row's verdict, the baseline's first; none if they are of another ``extent``."""
    pairs: Pairs = row.equivalence.pairs
    return pairs if pairs and quality.extent(pairs[0][0]) == extent else ()


def extent_of(rows: Sequence[Comparison]) -> tuple[int, int]:
    """The largest ``quality.extent`` of trials that any verdict rests on; zeros without any."""
    pairs = [r.equivalence.pairs for r in rows if r.equivalence.pairs]
    return max((quality.extent(p[0][0]) for p in pairs), default=(0, 0))


def images_of(rows: Sequence[Comparison]) -> int:
    """Images of those trials; 0 without any."""
    return extent_of(rows)[1]


def baseline_trials(rows: Sequence[Comparison]) -> list[RunRecord]:
    """The baseline's trials that the verdicts of ``rows`` rest on, in the order of their seeds."""
    extent = extent_of(rows)
    by_seed = {a.config.seed: a for r in rows for a, _ in pairs_of(r, extent)}
    return [by_seed[seed] for seed in sorted(by_seed)]


def held_out(records: Sequence[RunRecord], at: Array) -> Array:
    """Held-out loss of each trial after so many images (trials, n), between its looks by straight lines."""
    return np.array([np.interp(at, *quality.curve(r)) for r in records])


def training(records: Sequence[RunRecord], images: int, points: int) -> Array:
    """Training loss of each trial (trials, points): the mean over as many equal shares of its first ``images``."""
    found = []
    for record in records:
        batch, losses = record.config.global_batch_size, np.array((record.quality or {})["losses"], float)
        share = ((np.arange(len(losses)) + 0.5) * batch * points / images).astype(int)
        inside = share < points
        counts = np.bincount(share[inside], minlength=points)
        found.append(np.bincount(share[inside], losses[inside], minlength=points) / counts)
    return np.array(found)


def target(rows: Sequence[Comparison]) -> float:
    """The held-out loss to be reached; NaN where the baseline has no trials."""
    records = baseline_trials(rows)
    return float(held_out(records, np.array([TARGET_SHARE * images_of(rows)])).mean()) if records else math.nan


def tried(study: Study, rows: Sequence[Comparison]) -> list[Comparison]:
    """The baseline's row and those of candidates with trials of the same extent.

    A larger batch whose learning rate was tried scaled with it has a second row: its speed is the same.
    """
    lead, extent = rows[0], extent_of(rows[1:])
    trials = quality.Trials.of(study)
    found = [lead]
    for row in rows[1:]:
        if pairs_of(row, extent):
            found.append(row)
        if row.config.global_batch_size > lead.config.global_batch_size:
            other = trials.verdict(lead.config, scaled(row.config, lead.config), row.code_version)
            if pairs := pairs_of(again := replace(row, equivalence=other), extent):
                found.append(replace(again, label=pairs[0][1].label))
    return found


def images_to_reach(records: Sequence[RunRecord], loss: float) -> str:
    """Images that trials needed to a held-out ``loss``, the mean over seeds, such as "6,810".

    "not reached (3 of 8 seeds)" where some of them never did; a dash without trials.
    """
    needed = np.array([quality.images_to_reach(r, loss) for r in records])
    if lost := int(np.isinf(needed).sum()):
        return f"not reached ({lost} of {phrases.plural(len(records), 'seed')})"
    return f"{needed.mean():,.0f}" if len(needed) else phrases.DASH
