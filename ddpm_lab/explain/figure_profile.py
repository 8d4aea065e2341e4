"""Where the time of a step goes: its phases one after the other, and the operators that take most."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddpm_lab.explain import budget as bd
from ddpm_lab.explain import operators, phrases
from ddpm_lab.explain.budget import Budget, Line
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.bars import bars
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import MECHANISM_ONLY
from ddpm_lab.explain.findings import Finding
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOP_OPERATORS = 10
RESIDUAL = "in no phase"
_COLOURS = dict(zip((bd.COMPUTE, bd.IO, bd.TRANSFER, bd.OTHER), style.SERIES, strict=False))
_SHOWN = 0.0005
"""Smaller phases are named in the note."""


def figure(study: Study, found: Finding) -> Figure:
    """The time budget of the latest profile; without one its operators, without both a message."""
    record = operators.latest_profile(study.records)
    if record is not None and (taken := bd.budget(record)) is not None:
        return _budget(taken, f"{_context(study, record)}{style.SEPARATOR}{record.label}", record.mechanism_only)
    if record is None or not operators.operators(record):
        return style.message(found.headline, phrases.context(study), found.claim)
    return _operators(study, record)


def operators_beside(study: Study) -> Figure | None:
    """The operators of a profile whose answer is its time budget."""
    record = operators.latest_profile(study.records)
    if record is None or bd.budget(record) is None or not operators.operators(record):
        return None
    return _operators(study, record)


def _context(study: Study, record: RunRecord) -> str:
    return phrases.context(dataclasses.replace(study, records=(record,)))


def _budget(found: Budget, context: str, mechanism_only: bool) -> Figure:
    """A step as it runs, that of the rank that waits most, and with each phase waited for where that differs."""
    whose = f"Rank {found.rank}, the slowest, as" if found.others else "As"
    shown = [_panel(f"{whose} training runs", found.running, _beside(found))]
    if found.others:
        rank = max(found.others, key=lambda r: found.others[r].phases.get("communication", 0.0))
        most = ", which waits most" if len(found.others) > 1 else ""
        shown.append(_panel(f"Rank {rank}{most}, as training runs", found.others[rank]))
    if found.others or found.on_device:
        what = "the device" if found.on_device else "communication"
        shown.append(_panel(f"Waiting for {what} at the end of each phase", found.waiting))
    kinds = {bd.class_of(name) for name in found.running.phases}
    small = [name for name in found.running.phases if found.running.share(name) < _SHOWN]
    note = f"Compute share {bd.percent(found.running.share(bd.COMPUTE))}: forward, backward, optimizer and averaging."
    note += f" Below 0.1 %: {phrases.joined(small)}." if small else ""
    return bars(
        shown,
        title=bd.headline(found),
        context=f"{context}{style.SEPARATOR}{phrases.plural(found.steps, 'step')}"
        f"{f'{style.SEPARATOR}{MECHANISM_ONLY}' * mechanism_only}",
        label="milliseconds since the step began",
        note=note + (f" {found.disturbance}." if found.disturbance else ""),
        names={kind: colour for kind, colour in _COLOURS.items() if kind in kinds},
        steps=True,
    )


def _panel(heading: str, line: Line, beside: Sequence[tuple[str, float]] = ()) -> Panel:
    rows, at, end = [], 0.0, 0.0
    for name, seconds in line.phases.items():
        at += 1e3 * max(0.0, seconds)
        end = at if name == "backward" else end
        if line.share(name) >= _SHOWN:
            rows.append(_row(bd.LONG.get(name, name), seconds, line, colour=_COLOURS[bd.class_of(name)]))
    rows.append(_row(RESIDUAL, line.residual_seconds, line, colour=style.FAINT))
    stop = end or at  # most of it runs beside the backward pass, and is drawn up to its end
    for name, seconds in beside:
        words = f"{'loading' if name == 'data' else name}, beside computing"
        values = {"start": max(0.0, stop - 1e3 * seconds), "value": stop, "whole": True}
        rows.append(_row(words, seconds, line, colour=_COLOURS[bd.class_of(name)], **values))
    return Panel(heading=f"{heading}: {phrases.seconds(line.step_seconds)} a step", rows=rows)


def _row(name: str, seconds: float, line: Line, **values: Any) -> Row:
    text = f"{bd.percent(seconds / line.step_seconds)}, {phrases.seconds(max(0.0, seconds))}"
    return Row(**{"name": name, "value": 1e3 * max(0.0, seconds), "text": text, **values})


def _beside(found: Budget) -> list[tuple[str, float]]:
    """What ran beside the phases, by name, and for how long beside computing."""
    least = 0.005 * found.running.step_seconds
    return [(name, both) for name, (_, both) in found.beside.items() if name != bd.WORKERS and both > least]


def _operators(study: Study, record: RunRecord) -> Figure:
    classes, top = operators.classes(record), operators.operators(record)[:TOP_OPERATORS]
    colours = dict(zip((kind.name for kind in classes), [*style.SERIES, style.SOFT, style.INK], strict=False))
    colours[operators.OTHER] = style.FAINT
    steps = max(1, int((record.profile or {}).get("steps", 1)))
    panels = [
        Panel(
            heading=heading,
            rows=[
                Row(
                    name=_short(op.name),
                    value=100 * op.share,
                    colour=colours[op.kind],
                    text=f"{100 * op.share:.1f} %, {phrases.plural(style.number(op.calls / steps), 'call')} a step",
                )
                for op in shown
            ],
        )
        for heading, shown in (
            ("Classes of operators", classes),
            (f"The {len(top)} operators that take most time" if len(top) > 1 else "The only operator", top),
        )
    ]
    kind = "device" if operators.on_device(record) else "CPU"
    counted = phrases.plural(steps, "profiled step")
    return bars(
        panels,
        title=operators.shares(record)[0],
        context=style.SEPARATOR.join([_context(study, record), record.family, counted]),
        label="share of all operator time, %",
        note=f"Exclusive {kind} time: in an operator without those it calls, so that each second counts once. The "
        "profiler slows a step down: shares are shown, not speeds.",
    )


def _short(name: str) -> str:
    """The name of an operator; of kernels, which are longer than two lines, both ends."""
    n = style.NAME
    return name if len(name) <= 2 * n else f"{name[:n]}\N{HORIZONTAL ELLIPSIS}{name[1 - n :]}"
