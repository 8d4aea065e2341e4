"""Where does the time of a training step go? One profiled run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ddpm_lab.explain import phrases
from ddpm_lab.explain.answer import Answer, View
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.bars import bars
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import MECHANISM_ONLY
from ddpm_lab.explain.findings import ANSWERED, FAILED, NOT_EXPLAINED, Finding, compared, plain
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.table import Table
from ddpm_lab.plan import Experiment, Question
from ddpm_lab.questions import time_budget as budget
from ddpm_lab.questions.time_budget import Budget, Line, Operator
from ddpm_lab.record import RunRecord
from ddpm_lab.training.setting import Batch, Precision, Setup, WorldSize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUESTION = Question(title="Where does the time of a training step go?", file="01_profile")

_DRAWN_OPERATORS = 10
_COLOURS = dict(zip((budget.COMPUTE, budget.IO, budget.TRANSFER, budget.OTHER), style.SERIES, strict=False))
_SHOWN = 0.0005
"""Smaller phases are named in the note."""


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
    """Show the time budget of the latest profile and its operators; without a budget the operators alone."""
    record = budget.latest_profile(study.records)
    if record is None:
        return _without_profile(study, _why_none(study))
    taken, known, unseen = budget.budget(record), budget.operators(record), budget.unseen(record)
    if taken is None and not known:
        return _without_profile(study, plain(study, "The profile holds no operator time", FAILED))
    context = phrases.context(replace(study, records=(record,)))

    def drawn() -> Figure:
        return _operators_figure(f"{context}{style.SEPARATOR}{record.family}", record)

    if taken is None:
        found = replace(plain(study, budget.operator_headline(record), ANSWERED, unseen), verdict="profiled")
        return Answer(study=study, finding=found, figure=drawn, table=lambda: operators_table(record))
    mechanism = f"{MECHANISM_ONLY.capitalize()}." if record.mechanism_only else ""
    status, verdict = (ANSWERED, "profiled") if taken.explained else (NOT_EXPLAINED, NOT_EXPLAINED)
    found = plain(study, budget.headline(taken), status, mechanism, unseen, evidence=f"{budget.evidence(taken)}.")
    views = (
        View(caption="Operators of profiled steps, each second counted once.", name="operators", figure=drawn),
        View(caption="The operators in numbers.", table=lambda: operators_table(record)),
    )
    where = style.SEPARATOR.join([context, record.label, phrases.plural(taken.steps, "step")])
    where += f"{style.SEPARATOR}{MECHANISM_ONLY}" * record.mechanism_only
    return Answer(
        study=study,
        finding=replace(found, verdict=verdict),
        figure=lambda: _budget_figure(taken, where),
        table=lambda: budget.table(taken),
        views=views if known else (),
    )


def _without_profile(study: Study, found: Finding) -> Answer:
    message = partial(style.message, found.headline, phrases.context(study), found.claim)
    return Answer(study=study, finding=found, figure=message, table=lambda: [])


def _why_none(study: Study) -> Finding:
    failed = next((r for r in reversed(study.records) if r.status != "ok"), None)
    if failed is None:
        return compared(replace(study, records=()))
    why = f"{failed.label}: {phrases.failed(failed.status, failed.reason)}."
    return plain(study, "The profile failed", FAILED, why)


_TOP_OPERATORS = 12


def operators_table(record: RunRecord) -> Table:
    """Return the operators that take most of a profiled step."""
    steps, found = _steps(record), budget.operators(record)
    if rest := found[_TOP_OPERATORS:]:
        others = budget.in_all(phrases.plural(len(rest), "other operator"), "", rest)
        found = [*found[:_TOP_OPERATORS], others]
    return [
        {
            "Operator": op.name,
            "Class": op.kind,
            "Calls per step": f"{op.calls / steps:,.0f}",
            "Exclusive time per step, under the profiler": phrases.seconds(op.seconds / steps),
            "Share": f"{100 * op.share:.1f} %",
        }
        for op in found
    ]


def _steps(record: RunRecord) -> int:
    return max(1, int((record.profile or {}).get("steps", 1)))


def _budget_figure(found: Budget, context: str) -> Figure:
    """A step as it runs, of several ranks the slowest one's; and with each phase waited for, where that differs."""
    shown = [_panel(f"{f'Rank {found.rank}, the slowest, as' if found.others else 'As'} training runs", found.running)]
    if found.others or found.on_device:
        what = "the device" if found.on_device else "communication"
        shown.append(_panel(f"Waiting for {what} at the end of each phase", found.waiting))
    kinds = {budget.class_of(name) for name in found.running.phases}
    small = [name for name in found.running.phases if found.running.share(name) < _SHOWN]
    compute = budget.percent(found.running.share(budget.COMPUTE))
    note = f"Compute share {compute}: forward, backward, optimizer and averaging."
    note += f" Below 0.1 %: {phrases.joined(small)}." if small else ""
    return bars(
        shown,
        title=budget.headline(found),
        context=context,
        label="milliseconds since the step began",
        note=note + (f" {found.disturbance}." if found.disturbance else ""),
        names={kind: colour for kind, colour in _COLOURS.items() if kind in kinds},
        steps=True,
    )


def _panel(heading: str, line: Line) -> Panel:
    phases = [(n, s, _COLOURS[budget.class_of(n)]) for n, s in line.phases.items() if line.share(n) >= _SHOWN]
    rows = [
        Row(
            name=budget.LONG.get(name, name),
            value=1e3 * max(0.0, seconds),
            colour=colour,
            text=f"{budget.percent(seconds / line.step_seconds)}, {phrases.seconds(max(0.0, seconds))}",
        )
        for name, seconds, colour in [*phases, ("in no phase", line.residual_seconds, style.FAINT)]
    ]
    return Panel(heading=f"{heading}: {phrases.seconds(line.step_seconds)} a step", rows=rows)


def _operators_figure(context: str, record: RunRecord) -> Figure:
    classes, top, steps = budget.operator_classes(record), budget.operators(record)[:_DRAWN_OPERATORS], _steps(record)
    colours = dict(zip((kind.name for kind in classes), [*style.SERIES, style.SOFT, style.INK], strict=False))
    colours[budget.OTHER] = style.FAINT

    def row(op: Operator) -> Row:
        calls = phrases.plural(style.number(op.calls / steps), "call")
        text = f"{100 * op.share:.1f} %, {calls} a step"
        return Row(name=_short(op.name), value=100 * op.share, colour=colours[op.kind], text=text)

    longest = f"The {len(top)} operators that take most time" if len(top) > 1 else "The only operator"
    kind = "device" if budget.on_device(record) else "CPU"
    return bars(
        [
            Panel(heading="Classes of operators", rows=[*map(row, classes)]),
            Panel(heading=longest, rows=[*map(row, top)]),
        ],
        title=budget.operator_headline(record),
        context=f"{context}{style.SEPARATOR}{phrases.plural(steps, 'profiled step')}",
        label="share of all operator time, %",
        note=f"Exclusive {kind} time: in an operator without those it calls, so that each second counts once. The "
        f"profiler slows a step down: shares are shown, not speeds. {budget.unseen(record)}".strip(),
    )


def _short(name: str) -> str:
    """The name of an operator; of kernels, which are longer than two lines, both ends."""
    n = style.NAME
    return name if len(name) <= 2 * n else f"{name[:n]}\N{HORIZONTAL ELLIPSIS}{name[1 - n :]}"
