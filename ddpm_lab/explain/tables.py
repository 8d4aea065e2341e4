"""Tables of a study: strings with units, short enough for a page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from ddpm_lab.explain import (
    budget,
    compiling,
    limits,
    links,
    machine_state,
    operators,
    peers,
    phrases,
    scaling,
    trained,
)
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import ALL_REDUCE, CLAIMS, RECOMMENDATION, SCALING, Study
from ddpm_lab.explain.questions import bottleneck, claims, lost_scaling, recommendation
from ddpm_lab.explain.table import Table, one_family, without_constant
from ddpm_lab.plan import WITH_TRIALS

TOP_OPERATORS = 12
_NONE = phrases.DASH


def table(study: Study) -> Table:
    """Return the answer as a table: one row a configuration, in a profile a phase or an operator."""
    if study.experiment == RECOMMENDATION:
        searched = recommendation.recommendation(study)
        return recommendation.changes_table(study) if searched is None else recommendation.table(searched)
    if study.experiment == "profile":
        record = operators.latest_profile(study.records)
        taken = budget.budget(record) if record else None
        return _profile(study) if taken is None else budget.table(taken)
    return _OWN.get(study.experiment, _comparison)(study)


def more(study: Study) -> list[tuple[str, Table]]:
    """Return further tables as (caption, table)."""
    found = []
    record = operators.latest_profile(study.records) if study.experiment == "profile" else None
    if record is not None and budget.budget(record) is not None and operators.operators(record):
        found.append(("The operators in numbers.", _profile(study)))
    if study.experiment == peers.EXPERIMENT:
        found += [
            (
                "The parts of a step: work for an image, its least time at this machine's peaks, and what sets it.",
                limits.table(study, peers.own(study)),
            ),
            ("What each setting of the trainer is worth here.", peers.lever_table(study)),
        ]
    if study.experiment == RECOMMENDATION and (searched := recommendation.recommendation(study)) is not None:
        found += [
            ("What the search tried, by what all its short sets say.", recommendation.tried_table(searched)),
            (
                "Every change that was measured, each against its own baseline in the same sets.",
                recommendation.changes_table(study),
            ),
        ]
    if study.experiment == CLAIMS:
        caption = "Each fault: what is done wrong, what that did to a number here, how it is done right."
        found.append((caption, claims.fault_table(study)))
        found.append(("What the right way rests on: the sets of this notebook.", _comparison(study)))
    if study.experiment in (trained.EXPERIMENT, *WITH_TRIALS):
        found.append(("Loss and gradient of a step against fp32 on the same batch.", trained.check_table(study)))
    if study.experiment in WITH_TRIALS:
        found += trained.tables(study)
    if study.experiment == SCALING:
        said = " ".join(lost_scaling.sentence(split) for split in lost_scaling.splits(study))
        found.append((f"Where the lost scaling went. {said}", lost_scaling.table(study)))
    if study.experiment == "profile" and not any(r.config.is_own for r in study.records):  # whose changes are others
        measured = tuple(r for r in study.beside if r.role != "profile")  # of which each has a budget of its own
        known = replace(study, records=(*study.records, *measured))
        found.append(
            (
                "What to change next, as measured; ddpm-lab bottleneck measures each change of one setting.",
                bottleneck.table(known),
            )
        )
    if study.experiment in ("profile", SCALING):
        found.append(("What the machine did meanwhile.", machine_state.table(study)))
    return [(caption, frame) for caption, frame in found if frame]


def _comparison(study: Study) -> Table:
    scales = study.experiment == scaling.EXPERIMENT
    rows = [*map(scaling.named, scaling.rows(study))] if scales else comparisons(study)
    cells = [
        {"Family": row.family, "Configuration": f"{row.label}{_SELF.get(row.role, '')}", **_speed(study, row)}
        for row in rows
    ]
    if not cells:
        return []
    cells[0]["Note"] = f"{cells[0]['Note']} {machine_state.unknown(study)}".strip()
    empty = {"Note": [""], "Disturbed sets": ["0"], **{key: [_NONE] for key in phrases.LOSS}}
    return without_constant(cells if scales else one_family(cells), empty)


_SELF = {"baseline": " (baseline)", "twin": ", repeated"}
"""Roles of the baseline's own configuration, as they are named."""


def _speed(study: Study, row: Comparison) -> dict[str, str]:
    measured = bool(row.sets)
    cells = {
        "Speed": phrases.ratio_with_interval(row) if measured else _NONE,
        "Verdict": phrases.outcome(row),
        "Images/s": phrases.significant(row.images_per_second) if measured else _NONE,
        "Step": phrases.seconds(row.step_seconds) if measured else _NONE,
        "Time for 50,000 images (projected)": phrases.seconds(row.projected_seconds) if measured else _NONE,
    }
    if study.experiment == scaling.EXPERIMENT:
        rated = measured and row.role == "candidate"
        cells[f"Efficiency, by {scaling.whose(study.bands)} bands"] = (
            scaling.rated(row, study.bands) if rated else _NONE
        )
    if study.experiment == "torch_compile":
        cost = compiling.break_even(study, row)
        compiled = measured and row.role == "candidate"
        known = compiled and not math.isnan(cost.cold_seconds)
        cells["Compile, cold"] = phrases.seconds(cost.cold_seconds) if known else _NONE
        cells["Pays off"] = compiling.pays_off(cost, row) if compiled else _NONE
    return cells | {
        "Peak memory": phrases.peak_memory(row) if row.status == "ok" else _NONE,
        "Sets \N{MULTIPLICATION SIGN} turns": f"{row.sets} \N{MULTIPLICATION SIGN} {row.turns}" if measured else _NONE,
        "Disturbed sets": str(row.disturbed_sets),
        "Quality": row.quality if measured and row.role not in _SELF else _NONE,
        **phrases.loss(row),
        "Note": _note(row),
    }


def _note(row: Comparison) -> str:
    if row.sets and row.failed_sets:
        return f"{phrases.plural(row.failed_sets, 'set')} failed: {row.reason}"
    if row.status != "ok" and not row.mechanism_only:
        return row.reason
    return ""


def _profile(study: Study) -> Table:
    record = operators.latest_profile(study.records)
    if record is None:
        return [
            {"Configuration": r.label, "Status": phrases.status(r.status), "Reason": r.reason or ""}
            for r in study.records
            if r.status != "ok"
        ]
    steps = max(1, int((record.profile or {}).get("steps", 1)))
    found = operators.operators(record)
    top = [
        (op.name, op.kind, f"{op.calls / steps:,.0f}", phrases.seconds(op.seconds / steps), _share(op.share))
        for op in found[:TOP_OPERATORS]
    ]
    if rest := found[TOP_OPERATORS:]:
        calls, time = sum(op.calls for op in rest) / steps, sum(op.seconds for op in rest) / steps
        name = f"{phrases.plural(len(rest), 'other operator')}"
        top.append((name, "", f"{calls:,.0f}", phrases.seconds(time), _share(sum(op.share for op in rest))))
    columns = ["Operator", "Class", "Calls per step", "Exclusive time per step, under the profiler", "Share"]
    return [dict(zip(columns, cells, strict=True)) for cells in top]


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


_OWN: dict[str, Callable[[Study], Table]] = {
    peers.EXPERIMENT: peers.table,
    trained.EXPERIMENT: trained.table,
    CLAIMS: claims.table,
    ALL_REDUCE: links.table,
}
"""Questions whose answer is a table of its own kind."""
