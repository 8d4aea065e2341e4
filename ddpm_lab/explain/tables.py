"""Tables for people: a study as strings with units, short enough for a page."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from ddpm_lab.explain import (
    advice,
    budget,
    compiling,
    gains,
    limits,
    links,
    lost_scaling,
    lost_scaling_table,
    machine_state,
    operators,
    peers,
    phrases,
    recommended,
    recommended_words,
    scaling,
    trained,
)
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import ALL_REDUCE, CLAIMS, RECOMMENDATION, SCALING, Study
from ddpm_lab.explain.questions import claims
from ddpm_lab.plan import WITH_TRIALS

TOP_OPERATORS = 12
_NONE = phrases.DASH


def table(study: Study) -> pd.DataFrame:
    """The answer of a study as a table of strings: one row a configuration (in a profile a phase or an operator)."""
    if study.experiment == RECOMMENDATION:
        searched = recommended.recommendation(study)
        return gains.table(study) if searched is None else recommended_words.table(searched)
    if study.experiment == "profile":
        record = operators.latest_profile(study.records)
        taken = budget.budget(record) if record else None
        return _profile(study) if taken is None else budget.table(taken)
    return _OWN.get(study.experiment, _comparison)(study)


def more(study: Study) -> list[tuple[str, pd.DataFrame]]:
    """Further tables as (caption, table): the operators of a profile whose answer is its time budget, the machine."""
    found = []
    record = operators.latest_profile(study.records) if study.experiment == "profile" else None
    if record is not None and budget.budget(record) is not None and not operators.operators(record).empty:
        found.append(("The operators in numbers.", _profile(study)))
    if study.experiment == peers.EXPERIMENT:
        found += [
            (
                "The parts of a step: work for an image, its least time at this machine's peaks, and what sets it.",
                limits.table(study, peers.own(study)),
            ),
            ("What each setting of the trainer is worth here.", peers.lever_table(study)),
        ]
    if study.experiment == RECOMMENDATION and (searched := recommended.recommendation(study)) is not None:
        found += [
            ("What the search tried, by what all its short sets say.", recommended_words.tried_table(searched)),
            ("Every change that was measured, each against its own baseline in the same sets.", gains.table(study)),
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
        said = " ".join(lost_scaling_table.sentence(split) for split in lost_scaling.splits(study))
        found.append((f"Where the lost scaling went. {said}", lost_scaling_table.table(study)))
    if study.experiment == "profile" and not any(r.config.is_own for r in study.records):  # whose changes are others
        measured = tuple(r for r in study.beside if r.role != "profile")  # of which each has a budget of its own
        known = replace(study, records=(*study.records, *measured))
        found.append(
            (
                "What to change next, as measured; ddpm-lab bottleneck measures each change of one setting.",
                advice.table(known),
            )
        )
    if study.experiment in ("profile", SCALING):
        found.append(("What the machine did meanwhile.", machine_state.table(study)))
    return [(caption, frame) for caption, frame in found if not frame.empty]


def _comparison(study: Study) -> pd.DataFrame:
    scales = study.experiment == scaling.EXPERIMENT
    columns: list[str] = []
    rows = []
    for row in map(scaling.named, scaling.rows(study)) if scales else comparisons(study):
        cells = {
            "Family": row.family,
            "Configuration": f"{row.label}{_SELF.get(row.role, '')}",
            **_speed(study, row),
        }
        columns = list(dict.fromkeys([*columns, *cells]))
        rows.append(cells)
    if rows and (said := machine_state.unknown(study)):
        rows[0]["Note"] = f"{rows[0]['Note']}{said}".strip()
    shown = pd.DataFrame(rows, columns=columns)
    if shown.empty:
        return pd.DataFrame(columns=["Configuration", "Speed", "Verdict"])
    if shown["Family"].nunique() == 1 and not scales:
        shown = shown.drop(columns="Family")
    for column in ("Note", "Disturbed sets"):
        if column in shown and shown[column].isin(["", "0"]).all():
            shown = shown.drop(columns=column)
    return _without_empty(shown)


def _without_empty(frame: pd.DataFrame) -> pd.DataFrame:
    """The table without columns of losses where none is known."""
    return frame.drop(columns=[c for c in phrases.LOSS if c in frame and frame[c].eq(_NONE).all()])


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


def _profile(study: Study) -> pd.DataFrame:
    record = operators.latest_profile(study.records)
    if record is None:
        failed = [(r.label, phrases.status(r.status), r.reason or "") for r in study.records if r.status != "ok"]
        return pd.DataFrame(failed, columns=["Configuration", "Status", "Reason"])
    steps = max(1, int((record.profile or {}).get("steps", 1)))
    frame = operators.operators(record)
    top = [
        (r["name"], r["class"], f"{r['calls'] / steps:,.0f}", phrases.seconds(r["seconds"] / steps), _share(r["share"]))
        for _, r in frame.head(TOP_OPERATORS).iterrows()
    ]
    if len(rest := frame.iloc[TOP_OPERATORS:]):
        calls, time = rest["calls"].sum() / steps, rest["seconds"].sum() / steps
        name = f"{phrases.plural(len(rest), 'other operator')}"
        top.append((name, "", f"{calls:,.0f}", phrases.seconds(time), _share(rest["share"].sum())))
    columns = ["Operator", "Class", "Calls per step", "Exclusive time per step, under the profiler", "Share"]
    return pd.DataFrame(top, columns=columns)


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


_OWN: dict[str, Callable[[Study], pd.DataFrame]] = {
    peers.EXPERIMENT: peers.table,
    trained.EXPERIMENT: trained.table,
    CLAIMS: claims.table,
    ALL_REDUCE: links.table,
}
"""Questions whose answer is a table of its own kind."""
