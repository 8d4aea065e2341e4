"""Do two sides compute the same? Their first losses, from equal seeds, side by side to the last bit.

What a baseline differs from its own twin by is no fault of the other side: steps without a fixed seed, or sums in
another order at each run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ddpm_lab.explain import phrases
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.quality import IDENTICAL, NOT_MEASURED
from ddpm_lab.record import RunRecord

DIFFERENT = "differs"
NOT_COMPARABLE = "not comparable"


@dataclass(frozen=True, slots=True)
class Losses:
    """identical, differs, not comparable or not measured; and a sentence without a full stop that begins with it."""

    verdict: str
    sentence: str


def first_losses(study: Study) -> Losses:
    """What the records of a study with one candidate say of its first losses.

    The difference is relative to the larger of two losses, the largest over steps, ranks and sets.
    """
    sets: dict[str, dict[str, RunRecord]] = {}
    for record in study.records:
        if record.role in ("baseline", "candidate", "twin") and record.status == "ok":
            sets.setdefault(record.set_id, {})[record.role] = record
    whole = [held for held in sets.values() if len(held) == 3]
    if not whole:
        return Losses(NOT_MEASURED, f"{NOT_MEASURED}: no set is complete")
    silent = [r.label for r in (whole[0]["baseline"], whole[0]["candidate"]) if not any(map(any, _losses(r)))]
    if silent:
        return Losses(
            NOT_MEASURED, f"{NOT_MEASURED}: {phrases.joined(silent)} {'give' if len(silent) > 1 else 'gives'} no loss"
        )
    steps = min(len(rank) for held in whole for record in held.values() for rank in _losses(record))
    base, label = whole[0]["baseline"].label, whole[0]["candidate"].label
    ranks = {record.config.world_size for record in whole[0].values()}
    if len(ranks) > 1 or not steps:
        return Losses(NOT_COMPARABLE, f"{NOT_COMPARABLE}: {label} and {base} have other ranks")
    apart = _apart(((held["baseline"], held["candidate"]) for held in whole), steps)
    own = _apart(((held["baseline"], held["twin"]) for held in whole), steps)
    of = f"the first {steps} losses"
    if not apart:
        return Losses(IDENTICAL, f"{IDENTICAL}: {of} agree to the last bit")
    if own:
        return Losses(
            NOT_COMPARABLE,
            f"{NOT_COMPARABLE}: {of} differ by up to {_share(apart)}, and those of {base} from one run to the next by "
            f"{_share(own)}",
        )
    return Losses(
        DIFFERENT, f"{DIFFERENT}: {of} by up to {_share(apart)}, where {base} repeats its own to the last bit"
    )


def _losses(record: RunRecord) -> list[list[float]]:
    """The first losses of each rank; 0 is what a step without a loss gives."""
    ranks: list[dict[str, Any]] = record.witness.get("ranks") or []
    return [rank.get("first_losses") or [] for rank in ranks]


def _apart(pairs: Iterable[tuple[RunRecord, RunRecord]], steps: int) -> float:
    """The largest relative difference of two sides in their first ``steps`` steps."""
    compared = (
        (a, b)
        for one, two in pairs
        for ours, theirs in zip(_losses(one), _losses(two), strict=True)
        for a, b in zip(ours[:steps], theirs[:steps], strict=True)
    )
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in compared if a != b), default=0.0)


def _share(difference: float) -> str:
    return f"{100 * difference:.2g} %" if difference >= 1e-4 else f"{difference:.0e} of the loss"
