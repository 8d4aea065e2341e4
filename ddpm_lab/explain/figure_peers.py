"""How fast this trainer is beside others, what each of its settings is worth, and how far the limit is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpm_lab.explain import limits, peers, phrases
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.bars import bars
from ddpm_lab.explain.charts.forest import forest
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.figure_ratios import MEANING, band, row
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import FORMATS, TUNED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KINDS = ("convolution", "matrix product", "normalisation", "element-wise", "optimizer", "rest")


def figure(study: Study, title: str) -> Figure | None:
    """One row for each other trainer and how it was set: how many times as fast this one is; None without any.

    What was measured in fp32 alone, in sampling, or with another network or batch stands in the table.
    """
    rows = [r for r in peers.rows(study) if r.sets]
    if not rows:
        return None
    own = peers.own(study)
    mine = [r for r in rows if peers.is_peer(r) and own is not None and r.baseline_id == own.run_id] or rows
    panels: dict[str, list[Comparison]] = {}
    for r in sorted(mine, key=lambda r: (peers.step_of(r), -r.ratio.value)):
        panels.setdefault(re.split(f"{FORMATS}|{TUNED}|, ", r.label)[0], []).append(r)
    others = phrases.plural(len(rows) - len(mine), "other comparison")
    return forest(
        [
            Panel(
                heading=name,
                rows=[row(r, r.label.removeprefix(name).removeprefix(", ") or "as it comes") for r in found],
                reference=1,
                band=band(found),
            )
            for name, found in panels.items()
        ],
        title=title,
        context=phrases.context(peers.drawn(study, mine)),
        note=f"Time of the other trainer for equal images divided by this one's, with 95 % interval over sets; dots: "
        f"single sets; band: this trainer repeated. Blue: this trainer is faster; orange: slower; grey: no difference "
        f"found. Quality is not measured. {f'The table has {others}.' if len(rows) > len(mine) else ''}",
        label="this trainer is so many times as fast",
    )


def levers(study: Study) -> Figure | None:
    """One row for each setting put back alone: how fast the trainer then is; None where none is measured."""
    rows = sorted((r for r in peers.levers(study) if r.sets), key=lambda r: r.ratio.value)
    if not rows:
        return None
    return forest(
        [Panel(rows=[*map(row, rows)], reference=1, band=band(rows))],
        title="What each setting of the trainer is worth here",
        context=phrases.context(peers.drawn(study, rows)),
        note="Each setting put back alone: below 1 the trainer's default is faster. Geometric mean and 95 % interval "
        f"over sets; band: the baseline repeated. {MEANING}",
        label="speed relative to the default settings",
    )


def roofline(study: Study) -> Figure | None:
    """The time of an image: measured, and at the machine's peaks by kind of work; None where it was not measured."""
    base = peers.own(study)
    line = limits.roofline(study, base)
    if base is None or line is None:
        return None
    peaks = (
        f"peak {phrases.significant(line.flops / 1e9)} GFLOP/s in {line.precision}, "
        f"{phrases.significant(line.bandwidth / 1e9)} GB/s in a copy"
    )
    rows = [
        Row(
            name="measured",
            value=1e3 * line.measured_seconds,
            colour=style.SOFT,
            text=phrases.seconds(line.measured_seconds),
        ),
        _bar("at peak, every kernel for itself", {p.kind: p.seconds for p in line.parts}),
        _bar("at peak, the rest free", _needed(line.parts)),
    ]
    return bars(
        [Panel(rows=rows)],
        title=f"Runs at {100 * line.flop_share:.0f} % of the hardware limit",
        context=f"{phrases.context(peers.drawn(study, [base]))}{style.SEPARATOR}{peaks}",
        label="milliseconds for an image",
        names={kind: colour for kind, colour in zip(_KINDS, style.SERIES, strict=False) if kind in rows[1].parts},
        note="At the peak each kind of work takes the longer of its FLOP at the measured FLOP/s (the better of a large "
        "product and a convolution) and its bytes at the measured bandwidth. Caches can make bytes cheaper.",
    )


def _needed(parts: Sequence[limits.Part]) -> dict[str, float]:
    return {p.kind: p.seconds for p in parts if p.kind in (*limits.NEEDED, limits.OPTIMIZER)}


def _bar(name: str, parts: dict[str, float]) -> Row:
    parts = {kind: 1e3 * seconds for kind, seconds in parts.items()}
    return Row(name=name, parts=parts, text=phrases.seconds(sum(parts.values()) / 1e3))
