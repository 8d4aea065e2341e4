"""The answer of a comparison: speed relative to the baseline, with intervals, set values and the baseline repeated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ddpm_lab.explain import decisions, gains, phrases, quality, scaling, sentences
from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain.comparisons import MECHANISM_ONLY, Comparison, comparisons, families
from ddpm_lab.explain.findings import finding
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import LOST, TOGETHER

_ROW = 0.52
_RIGHT = 2.25  # inches for the numbers beside each row
_LABEL = 2.0  # inches for the name of a row, which is wrapped
_COLOURS = {decisions.FASTER: fs.PALETTE[0], decisions.SLOWER: fs.PALETTE[3]}


def rows_of(study: Study) -> list[Comparison]:
    """Rows of ``comparisons``, without those that must not appear in a figure of speed."""
    scales = study.experiment == scaling.EXPERIMENT
    rows = [scaling.named(row) for row in scaling.rows(study)] if scales else comparisons(study)
    return [row for row in rows if not row.mechanism_only]


def ratios(study: Study) -> Figure:
    """Speed of each configuration relative to its baseline: one panel a family, failures as rows with their reason."""
    found = finding(study)
    panels = [
        rows for rows in families(rows_of(study)) if any(r.role in ("candidate", "note") or not r.sets for r in rows)
    ]
    if not panels:
        return fs.message(found.headline, phrases.context(study), found.claim)
    drawn = [row for rows in panels for row in _drawn(rows)]
    left = max(1.2, 0.3 + max(fs.block_width(_label(row), fs.TEXT_POINTS) for row in drawn))
    height = max(_row_height(row, fs.WIDTH - left - _RIGHT) for row in drawn)
    bases = {rows[0].baseline_label for rows in panels}
    base = bases.pop() if len(bases) == 1 else "the baseline"
    figure, axes = fs.sheet(
        found.headline,
        phrases.context(study),
        [height * len(_drawn(rows)) + 0.1 for rows in panels],
        headings=[rows[0].family for rows in panels],
        left=left,
        right=_RIGHT,
        gap=0.16,
        note=_note(study, panels),
    )
    low, high = _limits([row for rows in panels for row in rows])
    for ax, rows in zip(axes, panels, strict=True):
        _panel(ax, _drawn(rows), low, high, height, last=ax is axes[-1])
    meaning = "(1 is the same speed, above 1 is faster)"
    axis = f"speed relative to {base} {meaning}"
    if fs.width(axis, fs.TEXT_POINTS) > fs.WIDTH - left - _RIGHT + 0.8:
        axis = f"speed relative to the baseline {meaning}"
    axes[-1].set_xlabel(axis)
    return figure


def changes(study: Study) -> Figure:
    """Every change of a training step that was measured, each against its own baseline, the fastest first."""
    found, rows = finding(study), gains.measured(study)
    together = [c for c in comparisons(study) if c.family.endswith(TOGETHER) and c.role == "candidate" and c.sets]
    if not rows:
        return fs.message(found.headline, phrases.context(study), found.claim)
    several = len({(c.family, c.label) for c in rows}) > len({c.label for c in rows})
    drawn = [
        replace(c, label=f"{c.label} ({c.baseline_label if not several else c.family})")
        for c in (*together, *sorted(rows, key=lambda c: -c.ratio.value))
    ]
    left = max(1.2, 0.3 + max(fs.block_width(_label(c), fs.TEXT_POINTS) for c in drawn))
    height = max(_row_height(c, fs.WIDTH - left - _RIGHT) for c in drawn)
    note = "Point and bar: geometric mean and 95 % interval over sets, against the baseline named in brackets, in the "
    note += "same sets. Faint dots: single sets."
    figure, (ax,) = fs.sheet(
        found.headline, phrases.context(study), [height * len(drawn) + 0.1], left=left, right=_RIGHT, note=note
    )
    _panel(ax, drawn, *_limits(drawn), height, last=True)
    ax.set_xlabel("speed relative to the baseline (above 1 is faster)")
    return figure


def _row_height(row: Comparison, panel: float) -> float:
    """Inches that a row needs for its label, and for its verdict or its reason; ``panel`` is the panel's width."""
    label = 0.12 + 0.175 * (_label(row).count("\n") + 1)
    text = _words(row) if row.sets else _reason(row, panel)
    # A measured row has its numbers above the words.
    return max(_ROW, label, 0.2 + fs.LINE * (text.count("\n") + (2 if row.sets else 1)))


def _drawn(rows: Sequence[Comparison]) -> list[Comparison]:
    """Candidates from the top, then the twin; the baseline is the line at 1, unless it failed.

    A twin without a set is left out, unless nothing but its failure is there.
    """
    order = {"baseline": 0, "candidate": 1, "note": 2, "twin": 3}
    kept = [r for r in rows if r.role != "baseline" or not r.sets]
    kept = [r for r in kept if r.role != "twin" or r.sets] or list(rows)
    return sorted(kept, key=lambda r: order[r.role])


def _label(row: Comparison) -> str:
    if row.role == "twin":
        return fs.fit(f"{row.baseline_label}, repeated", _LABEL, 6)
    return fs.fit(row.label, _LABEL, 6, fs.TEXT_POINTS)


def _note(study: Study, panels: Sequence[Sequence[Comparison]]) -> str:
    twins = any(r.role == "twin" and r.sets for rows in panels for r in rows)
    some = any(not math.isnan(r.ratio.low) for rows in panels for r in rows)
    text = "Point and bar: geometric mean and 95 % interval over sets. " if some else "Point: the ratio measured. "
    text += "Faint dots: single sets. " if some else ""
    if twins and some:
        text += "Grey band: the baseline repeated. "
    text += f"{phrases.begun(sentences.quality([row for rows in panels for row in rows]))}."
    hidden = {r.label for r in study.records if r.mechanism_only and r.role != "twin" and not r.family.endswith(LOST)}
    if hidden:
        text += f" Not shown: {phrases.joined(sorted(hidden))} ({MECHANISM_ONLY})."
    return text


def _limits(rows: Sequence[Comparison]) -> tuple[float, float]:
    """Ends of the axis: all points, and intervals as far as they are not absurdly wide."""
    points = [1.0] + [v for r in rows for v in (r.ratio.value, *r.set_ratios) if math.isfinite(v) and v > 0]
    low, high = min(points), max(points)
    ends = [v for r in rows for v in (r.ratio.low, r.ratio.high) if math.isfinite(v)]
    reach = max(0.15, high - low)
    low, high = min([low, *(max(v, low - reach) for v in ends)]), max([high, *(min(v, high + reach) for v in ends)])
    low = max(low, 0.5 * min(points))
    if high / low > 5:
        return low / 1.15, high * 1.15
    margin = max(0.02, 0.06 * (high - low))
    return low - margin, high + margin


def _panel(ax: Axes, rows: Sequence[Comparison], low: float, high: float, height: float, *, last: bool) -> None:
    """Rows of ``height`` inches on an axis from ``low`` to ``high``."""
    logarithmic = high / low > 5
    if logarithmic:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(FixedLocator([2.0**k for k in range(-6, 8) if low <= 2.0**k <= high]))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    ax.set_xlim(low, high)
    ax.set_ylim(len(rows) - 0.5, -0.6)
    ax.grid(visible=False, axis="y")
    noise = next(((r.ratio.low, r.ratio.high) for r in rows if r.role == "twin" and not math.isnan(r.ratio.low)), None)
    if noise:
        ax.axvspan(max(noise[0], low), min(noise[1], high), color=fs.BAND, lw=0, zorder=0.5)
    ax.axvline(1, color=fs.SOFT, lw=1.2, zorder=1)
    ax.set_yticks(range(len(rows)), [_label(r) for r in rows])
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelbottom=last, length=3 if last else 0)
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_visible(last)
    for y, row in enumerate(rows):
        if row.sets:
            _point(ax, y, row, height)
        else:
            colour = fs.FAINT if row.status == "left out" else fs.PALETTE[3]
            fs.absent(ax, y, _reason(row, ax.get_position().width * fs.WIDTH), colour, 0.045)
    for tick, row in zip(ax.get_yticklabels(), rows, strict=True):
        if row.role == "twin":
            tick.set_color(fs.SOFT)
            tick.set_fontsize(fs.SMALL_POINTS)
    if any(r.role == "twin" for r in rows) and len(rows) > 1:
        ax.axhline(len(rows) - 1.5, color="#d5dae0", lw=0.8, zorder=0.6)


def _point(ax: Axes, y: int, row: Comparison, height: float) -> None:
    low, high = ax.get_xlim()
    twin = row.role == "twin"
    colour = fs.SOFT if twin else _COLOURS.get(row.verdict, fs.INK)
    if row.sets > 1:
        # Fixed offsets keep the dots apart and the figure reproducible.
        offsets = 0.2 + 0.05 * (np.arange(len(row.set_ratios)) % 3 - 1)
        ax.plot(row.set_ratios, y + offsets, "o", ms=3.2, mew=0, color=colour, alpha=0.4, zorder=2)
    if not math.isnan(row.ratio.low):
        ends = max(row.ratio.low, low), min(row.ratio.high, high)
        ax.plot(ends, [y, y], color=colour, lw=2.6, solid_capstyle="butt", zorder=3)
        for cut, end, marker in ((row.ratio.low < low, low, "<"), (row.ratio.high > high, high, ">")):
            if cut:
                ax.plot([end], [y], marker, color=colour, ms=7, zorder=4, clip_on=False)
    face = colour if row.resolved or twin else "white"
    ax.plot([row.ratio.value], [y], "o", ms=6 if not twin else 4.5, mfc=face, mec=colour, mew=1.8, zorder=5)
    interval = phrases.between(row.ratio, to=phrases.DASH)
    numbers = phrases.ratio(row) + (f"  ({interval})" if interval else "")
    words = _words(row)
    x, to = 1.02, ax.get_yaxis_transform()
    # Numbers and words are one block, centred on the row.
    middle = y - 0.5 * fs.LINE * words.count("\n") / height
    above, below = middle - 0.03, middle + 0.05
    ax.text(x, above, numbers, transform=to, va="bottom", fontsize=fs.TEXT_POINTS, color=colour, fontweight="bold")
    ax.text(x, below, words, transform=to, va="top", fontsize=fs.SMALL_POINTS, color=fs.SOFT)


def _words(row: Comparison) -> str:
    """The verdicts beside a measured row, on speed and on quality."""
    text = "the baseline repeated" if row.role == "twin" else phrases.outcome(row)
    lines = [fs.fit(text, _RIGHT - 0.25, 3)]
    if row.role == "candidate" and (judged := row.equivalence).seeds:
        lines.append(fs.fit(f"quality {quality.sentence(judged)}", _RIGHT - 0.25, 4))
        if quality.evidence(judged):
            lines.append(fs.fit(f"loss {quality.difference(judged)}", _RIGHT - 0.25, 3))
    return "\n".join(lines)


def _reason(row: Comparison, panel: float) -> str:
    """Why a row has no speed, as wide as panel and margin; the table has the rest of a very long one."""
    return fs.fit(phrases.failure(row), panel + _RIGHT - 0.55, 4)
