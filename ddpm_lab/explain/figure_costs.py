"""What a run costs beside its steps: start-up, data, compile, warm-up and tear-down, eager and compiled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddpm_lab.explain import compiling, phrases
from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord

STAGES = {
    "start": "start-up",
    "build": "data and network",
    "compile": "compile",
    "warmup": "warm-up",
    "steady": "timed steps",
    "teardown": "tear-down",
}
_COLOURS = {name: fs.PALETTE[i] for name, i in zip(STAGES, (7, 9, 3, 1, 0, 4), strict=True)}
_ROW, _LEFT, _RIGHT = 0.95, 1.75, 1.2


def stage_seconds(records: Sequence[RunRecord]) -> dict[str, float]:
    """Median seconds of each stage that any of the records went through, in the order of a run."""
    values = {name: [r.stages[name] for r in records if name in r.stages] for name in STAGES}
    return {name: float(np.median(found)) for name, found in values.items() if found}


def cost_split(study: Study) -> Figure | None:
    """One stacked bar for eager training, and for compiled training from a warm and from a cold cache."""
    panels = []
    for row in comparisons(study):
        if row.role == "candidate" and (bars := _bars(study, row)):
            panels.append((row.family, bars, compiling.counters(study, row.run_id)))
    if not panels:
        return None
    counted = phrases.joined(list(dict.fromkeys(words for _, _, words in panels if words)))
    figure, axes = fs.sheet(
        "What a run costs beside its steps",
        phrases.context(study),
        [_ROW * len(bars) for _, bars, _ in panels],
        headings=[family for family, _, _ in panels],
        left=_LEFT,
        right=_RIGHT,
        note="Bar: the median of each stage over the groups measured. Timed steps last as long as the plan of a set "
        f"says; a cold compile is measured without them.{f' Witnessed: {counted}.' if counted else ''}",
    )
    longest = max(sum(stages.values()) for _, bars, _ in panels for _, stages in bars)
    for ax, (_, bars, _) in zip(axes, panels, strict=True):
        _stack(ax, bars, longest)
        ax.tick_params(axis="x", labelbottom=ax is axes[-1])
    axes[-1].set_xlabel("seconds")
    return figure


def _bars(study: Study, row: Comparison) -> list[tuple[str, dict[str, float]]]:
    """Names and stages of the bars of a compiled configuration; none unless its compile was measured."""
    ok = [r for r in study.records if r.status == "ok" and r.baseline_id == row.baseline_id]
    cold = [r for r in ok if r.run_id == row.run_id and r.compile_cache == "cold"]
    warm = [r for r in ok if r.run_id == row.run_id and r.compile_cache == "warm"]
    eager = [r for r in ok if r.role in ("baseline", "twin")]
    if not (cold or warm):
        return []
    named = (
        (row.baseline_label, eager),
        (f"{row.label}, warm cache", warm),
        (f"{row.label}, cold cache", cold),
    )
    return [
        (f"{name}\n({phrases.plural(len(found), 'group')})", stage_seconds(found)) for name, found in named if found
    ]


def _stack(ax: Axes, bars: Sequence[tuple[str, dict[str, float]]], longest: float) -> None:
    """Bars, with each stage's colour, name and seconds under them."""
    wide = fs.WIDTH - _LEFT - _RIGHT
    to = ax.get_yaxis_transform()
    for y, (_, stages) in enumerate(bars):
        done, x, line = 0.0, 0.0, 0
        for name, seconds in stages.items():
            ax.barh(y - 0.18, seconds, left=done, height=0.36, color=_COLOURS[name], lw=0.6, edgecolor="white")
            done += seconds
            words = f"{STAGES[name]} {phrases.seconds(seconds)}"
            inches = fs.width(words) + 0.36
            x, line = (x, line) if x + inches <= wide else (0.0, line + 1)
            below = y + 0.13 + 0.19 * line
            ax.plot([(x + 0.08) / wide], [below], "s", transform=to, color=_COLOURS[name], ms=6, clip_on=False)
            ax.text((x + 0.16) / wide, below, words, transform=to, va="center_baseline", fontsize=fs.SMALL_POINTS)
            x += inches
        ax.text(1.02, y - 0.18, phrases.seconds(done), transform=to, va="center_baseline", fontweight="bold")
    ax.set_yticks(
        [y - 0.18 for y in range(len(bars))], [fs.fit(name, _LEFT - 0.3, 3, fs.TEXT_POINTS) for name, _ in bars]
    )
    ax.set_xlim(0, 1.02 * longest)
    ax.set_ylim(len(bars) - 0.45, -0.5)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    fs.plain_numbers(ax.xaxis, 6)
