"""Records of a search with planted speeds, as ``recommend`` leaves them in a ledger."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import records as make

from ddpm_lab.config import RunConfig
from ddpm_lab.explain.selection import Study
from ddpm_lab.plan import BATCH, LEAST_SETS, RECOMMENDATION, SEARCH, START, Plan, Space, Value
from ddpm_lab.questions import search
from ddpm_lab.record import RunRecord

BASE = RunConfig(global_batch_size=8)
SPACE = Space(
    baseline=BASE,
    settings={
        "precision": (Value("fp32", "fp32", {}), Value("bf16", "bf16", {"precision": "bf16"})),
        "ranks": (Value("1", "1 rank", {}), Value("2", "2 ranks", {"world_size": 2})),
        "memory": (Value("channels_last", "channels_last", {}), Value("fused", "fused kernels", {"kernels": "fused"})),
        BATCH: (Value("8", "batch 8", {}), Value("16", "batch 16", {"global_batch_size": 16})),
    },
    left_out=(("tf32", "needs a CUDA device"), ("fp16", "needs a CUDA device")),
)
GAINS = {"bf16": 1.2, "2 ranks": 1.5, "fused kernels": 0.8, "batch 16": 1.3}
TOGETHER = 0.9
"""bf16 and two ranks give less together than the product of what each gives."""


def speed(space: Space, cell: tuple[int, ...], gains: Mapping[str, float]) -> float:
    words = space.changed(cell, space.start).split(", ")
    found = math.prod(gains.get(word, 1.0) for word in words)
    return found * (TOGETHER if {"bf16", "2 ranks"} <= set(words) else 1.0)


def searched(
    space: Space = SPACE,
    gains: Mapping[str, float] = GAINS,
    *,
    sets: int = 6,
    noise: float = 0.003,
    winner: tuple[int, ...] | None = None,
    among: list[tuple[int, ...]] | None = None,
    seed: int = 0,
    **values: Any,
) -> list[RunRecord]:
    """Short sets of all of ``space``, the winner measured again in ``sets`` sets, and the record of the space."""
    cells = space.cells
    common: dict[str, Any] = {"baseline": space.baseline, "baseline_label": START, "set_noise": noise, **values}
    rows = {space.changed(c): (config, speed(space, c, gains)) for c, config in cells.items()}
    others = {name: row for name, row in rows.items() if name}
    how: dict[str, Any] = {"count": LEAST_SETS, "turns": 4, "seed": seed + 100, "plan": Plan(turns=6), **common}
    records = make.sets(others, experiment=SEARCH, **how)
    may = among if among is not None else search.admissible(space, lambda _: "")
    belief = search.believe(space, search.observations(records, space.baseline.run_id))
    steps = [space.changed(c) for c in search.path(belief, winner or belief.winner(may))[1:]]
    rows = {name: rows[name] for name in (*steps[-1:], *steps[:-1])}
    family = "tiny, batch 8, found"
    records += make.sets(rows, count=sets, experiment=RECOMMENDATION, family=family, seed=seed, **common)
    told = next(r for r in records if r.experiment == RECOMMENDATION)
    space_record = replace(told, role="space", set_id="", windows=(), ranks=(), space=space.as_dict())
    return [*records, space_record]


def study(records: list[RunRecord], **changes: Any) -> Study:
    return replace(make.study(records, RECOMMENDATION), **changes)
