"""Where does the time of a training step go? One profiled run."""

from __future__ import annotations

from dataclasses import replace

from ddpm_lab.explain import budget, figure_profile, machine_state, operators, phrases, quality
from ddpm_lab.explain.answer import Answer, View
from ddpm_lab.explain.comparisons import MECHANISM_ONLY
from ddpm_lab.explain.findings import ANSWERED, FAILED, NOT_EXPLAINED, Finding, compared, plain
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.questions import bottleneck
from ddpm_lab.explain.table import Table
from ddpm_lab.plan import Experiment
from ddpm_lab.training.setting import (
    Batch,
    Precision,
    Setup,
    WorldSize,
)


def profile(
    setup: Setup, *, global_batch_size: Batch = None, precision: Precision = "fp32", world_size: WorldSize = 1
) -> Experiment:
    """Where does the time of a training step go? One profiled run, which supplies no speed."""
    setup.check_ranks(world_size)
    config = setup.config(
        purpose="profile",
        global_batch_size=setup.batch_size(global_batch_size, world_size),
        precision=precision,
        world_size=world_size,
    )
    label = f"{setup.precision_name(precision)}, {setup.ranks_label(world_size)}"
    family = setup.family_name(config.global_batch_size, world_size)
    return Experiment(name="profile", families=(), profiles=((family, label, config),))


def answer(study: Study) -> Answer:
    """Show the time budget of the latest profile, its operators, and what to change next."""
    record, found = operators.latest_profile(study.records), finding(study)
    taken = budget.budget(record) if record else None

    def beside() -> Table:
        both = record is not None and taken is not None and operators.operators(record)
        return operators_table(study) if both else []

    views = [
        View(
            caption="Operators of profiled steps, each second counted once.",
            name="operators",
            figure=lambda: figure_profile.operators_beside(study),
        ),
        View(caption="The operators in numbers.", table=beside),
    ]
    if not any(r.config.is_own for r in study.records):  # whose changes are others
        caption = "What to change next, as measured; ddpm-lab bottleneck measures each change of one setting."
        views.append(View(caption=caption, table=lambda: bottleneck.table(_with_changes(study))))
    views.append(View(caption="What the machine did meanwhile.", table=lambda: machine_state.table(study)))
    return Answer(
        study=study,
        finding=found,
        figure=lambda: figure_profile.figure(study, found),
        table=lambda: operators_table(study) if taken is None else budget.table(taken),
        views=views,
    )


def _with_changes(study: Study) -> Study:
    """The study with what other questions measured, but for their profiles, of which each has a budget of its own."""
    return replace(study, records=(*study.records, *(r for r in study.beside if r.role != "profile")))


def finding(study: Study) -> Finding:
    """Say what takes the largest part of a step."""
    if not study.records:
        return compared(study)
    record = operators.latest_profile(study.records)
    if record is None:
        failed = next((r for r in reversed(study.records) if r.status != "ok"), None)
        if failed is None:
            how = "The command that measures it: ddpm-lab run profile."
            return plain(study, "No profile was recorded", quality.NOT_MEASURED, how)
        why = f"{failed.label}: {phrases.failed(failed.status, failed.reason)}."
        return plain(study, "The profile failed", FAILED, why)
    if (taken := budget.budget(record)) is not None:
        mechanism = f"{MECHANISM_ONLY.capitalize()}." if record.mechanism_only else ""
        status, verdict = (ANSWERED, "profiled") if taken.explained else (NOT_EXPLAINED, NOT_EXPLAINED)
        found = plain(study, budget.headline(taken), status, mechanism, evidence=f"{budget.evidence(taken)}.")
        return replace(found, verdict=verdict)
    if not operators.operators(record):
        return plain(study, "The profile holds no operator time", FAILED)
    headline, text = operators.shares(record)
    return replace(plain(study, headline, ANSWERED, evidence=f"{text}."), verdict="profiled")


_TOP_OPERATORS = 12


def operators_table(study: Study) -> Table:
    """Return the operators that take most of a profiled step."""
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
        for op in found[:_TOP_OPERATORS]
    ]
    if rest := found[_TOP_OPERATORS:]:
        calls, time = sum(op.calls for op in rest) / steps, sum(op.seconds for op in rest) / steps
        name = f"{phrases.plural(len(rest), 'other operator')}"
        top.append((name, "", f"{calls:,.0f}", phrases.seconds(time), _share(sum(op.share for op in rest))))
    columns = ["Operator", "Class", "Calls per step", "Exclusive time per step, under the profiler", "Share"]
    return [dict(zip(columns, cells, strict=True)) for cells in top]


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"
