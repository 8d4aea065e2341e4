"""Waterfalls: the lost scaling from the ideal step to the measured; a recommendation, change by change."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ddpm_lab.explain import decisions, phrases, quality, recommended_words
from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.lost_scaling import Seconds, Split, splits
from ddpm_lab.explain.lost_scaling_table import headline, milliseconds, rate
from ddpm_lab.explain.recommended import Recommendation, Step
from ddpm_lab.plan import LOST

_WHOLE, _GAIN, _LOSS, _REST = fs.PALETTE[0], fs.PALETTE[2], fs.PALETTE[3], fs.FAINT
_ROW, _RIGHT, _NAME = 0.5, 3.0, 2.2
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0)


def recommendation(found: Recommendation, title: str) -> Figure:
    """Plain step, each change where the one before ends, and what is recommended; all from the same sets."""
    names = ["baseline", *(f"+ {step.label}" for step in found.steps), "recommended"]
    names = [fs.fit(name, _NAME, 2, fs.TEXT_POINTS) for name in names]
    judged = quality.sentence(found.judged)
    panel, (ax,) = fs.sheet(
        title,
        phrases.context(found.study),
        [_ROW * len(names) + 0.1],
        left=0.3 + max(fs.block_width(name, fs.TEXT_POINTS) for name in names),
        right=_RIGHT,
        note="Measured again after the search, all in the same sets, one change more in each row: its bar is the gain "
        "over the row before, with its 95 % interval over sets. Grey: neither faster nor slower, or not recommended. "
        "The quality of a row is that of all changes up to it, against the baseline. "
        f"Of the recommended: {judged}.",
    )
    _speed(ax, found, names)
    return panel


def _speed(ax: Axes, found: Recommendation, names: Sequence[str]) -> None:
    reached, edges, last = 1.0, [1.0], len(found.steps) + 1
    ax.plot([1], [0], "o", ms=8, color=_WHOLE)
    _beside(ax, 0, f"{phrases.throughput(found.baseline)}", "1, as it was", bold=True)
    for y, step in enumerate(found.steps, 1):
        ends = [reached * v for v in (step.gain.value, step.gain.low, step.gain.high) if not math.isnan(v)]
        end = ends[0] if ends else reached
        ax.barh(y, end - reached, left=reached, height=0.56, color=_colour(found, step, y), alpha=0.85, lw=0)
        if len(ends) == 3:
            fs.interval(ax, ends[1:], y, color=fs.INK, lw=1.6)
        if y < len(found.steps) or y == found.count:
            ax.plot([end, end], [y + 0.28, y + 0.72], color=fs.SOFT, lw=1)
        _beside(ax, y, recommended_words.gain_words(step), _note(found, step, y))
        edges += [end, *ends]
        reached = end
    whole = found.best
    ax.barh(last, whole.ratio.value - 1, left=1, height=0.56, color=_WHOLE, alpha=0.85, lw=0)
    fs.interval(ax, (whole.ratio.low, whole.ratio.high), last, color=fs.INK, lw=1.6)
    edges += [end for end in whole.ratio.ends if not math.isnan(end)]
    if found.count:
        below = f"{phrases.throughput(whole)}, quality {quality.sentence(found.judged)}"
        _beside(ax, last, phrases.ratio_with_interval(whole), below, bold=True)
    else:
        _beside(ax, last, "the baseline", "no change is recommended", bold=True)
    ax.axvline(1, color=fs.SOFT, lw=1, zorder=0)
    ax.set_xscale("log")
    low, high = min([*edges, whole.ratio.value]), max([*edges, whole.ratio.value])
    margin = max((high / low) ** 0.04, 1.01)
    ax.set_xlim(low / margin, high * margin)
    # Over so little a logarithmic axis is nearly an even one.
    near = MaxNLocator(6, steps=[1, 2, 5, 10]).tick_values(low / margin, high * margin) if high < 1.5 * low else _TICKS
    ticks = [float(t) for t in near if low / margin <= t <= high * margin]
    room = math.log(high / low * margin**2) / 12  # ticks closer than this would run into each other
    kept: list[float] = []
    for tick in sorted(ticks, key=lambda t: (t != 1, t)):
        if all(abs(math.log(tick / k)) > room for k in kept):
            kept.append(tick)
    fs.fixed_ticks(ax.xaxis, sorted(kept), ".4g")
    fs.name_rows(ax, names, end=0.45)
    ax.set_xlabel("speed, the baseline is 1 (logarithmic)")


def _colour(found: Recommendation, step: Step, place: int) -> str:
    if place > found.count and found.count:
        return _REST
    return {decisions.FASTER: _GAIN, decisions.SLOWER: _LOSS}.get(step.verdict, _REST)


def _note(found: Recommendation, step: Step, place: int) -> str:
    words = f"quality {step.quality}"
    return f"{words}; not recommended" if place > found.count else words


def _beside(ax: Axes, y: float, text: str, below: str, *, bold: bool = False) -> None:
    to = ax.get_yaxis_transform()
    weight = "bold" if bold else "normal"
    ax.text(1.02, y - 0.03, text, transform=to, va="bottom", fontsize=fs.SMALL_POINTS, fontweight=weight)
    lines = fs.fit(below, _RIGHT - 0.25, 2, fs.SMALL_POINTS - 1)
    ax.text(1.02, y + 0.04, lines, transform=to, va="top", fontsize=fs.SMALL_POINTS - 1, color=fs.SOFT)


def lost_scaling(study: Study) -> Figure | None:
    """Ideal step, each part of the loss where the one before ends, and the measured step; None without any."""
    found = [split for split in splits(study) if split.loss.known and split.total.known]
    if not found:
        return None
    records = tuple(r for r in study.records if r.family.endswith(LOST))
    names = [name for split in found for name, _ in _rows(split)]
    panels, axes = fs.sheet(
        headline(found),
        phrases.context(replace(study, records=records), batch=False),
        [0.38 * len(_rows(split)) + 0.1 for split in found],
        headings=[f"{split.family}{f' ({split.doubt})' if split.doubt else ''}" for split in found],
        left=0.3 + max(fs.width(name, fs.TEXT_POINTS) for name in names),
        right=2.3,
        gap=0.62,
        note="Each part is what a step gains where it alone is switched off, with its 95 % interval over sets; the "
        "interaction is what all of them together gain more or less. Ideal: one rank's time for the whole batch, "
        "divided by the number of ranks. Intervals that rest on which rank is the slowest are corrected for it. "
        "Rank 0 does nothing that the others do not.",
    )
    for ax, split in zip(axes, found, strict=True):
        _step(ax, split)
    return panels


def _rows(split: Split) -> list[tuple[str, Seconds]]:
    """Names and seconds of the bars, from the ideal down."""
    parts = [(part.name, part.seconds) for part in split.parts]
    return [("ideal", split.ideal), *parts, ("interaction", split.interaction), ("measured", split.measured)]


def _step(ax: Axes, split: Split) -> None:
    to = ax.get_yaxis_transform()
    rows, notes = _rows(split), {part.name: part.note for part in split.parts}
    reached, edges = 0.0, [0.0]
    for y, (name, seconds) in enumerate(rows):
        whole = name in ("ideal", "measured")
        start = 0.0 if whole else reached
        reached = start + 1e3 * seconds.value
        colour = _WHOLE if whole else _REST if name == "interaction" else _LOSS if seconds.value >= 0 else _GAIN
        ax.barh(y, reached - start, left=start, height=0.62, color=colour, alpha=0.85, lw=0)
        edges.append(reached)
        ends = [start + 1e3 * seconds.low, start + 1e3 * seconds.high]
        edges += [end for end in ends if not math.isnan(end)]
        fs.interval(ax, ends, y, color=fs.INK, lw=1.6)
        if y + 1 < len(rows):
            ax.plot([reached, reached], [y + 0.31, y + 0.69], color=fs.SOFT, lw=1)
        text = milliseconds(split, seconds, sign=not whole)
        below = rate(split, seconds) if whole else notes.get(name, "")
        up, bold = (-0.2 if below else 0.0), "bold" if whole else "normal"
        ax.text(1.02, y + up, text, transform=to, va="center_baseline", fontsize=fs.SMALL_POINTS, fontweight=bold)
        ax.text(1.02, y + 0.24, below, transform=to, va="center_baseline", fontsize=fs.SMALL_POINTS, color=fs.SOFT)
    fs.name_rows(ax, [name for name, _ in rows])
    ax.set_xlim(1.03 * min(edges), 1.03 * max(edges))
    fs.plain_numbers(ax.xaxis, 6)
    ax.set_xlabel(f"milliseconds for a batch of {split.batch}")
