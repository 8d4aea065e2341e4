"""The recommendation as a waterfall: from the baseline over each change to what is recommended."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import phrases, quality, recommended_words, stats
from ddpm_lab.explain.recommended import Recommendation, Step

_ROW, _RIGHT, _NAME = 0.5, 3.0, 2.2
_WHOLE, _GAIN, _LOSS, _OPEN = fs.PALETTE[0], fs.PALETTE[2], fs.PALETTE[3], fs.FAINT
_TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 20.0)


def figure(found: Recommendation, title: str) -> Figure:
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
    _waterfall(ax, found, names)
    return panel


def _waterfall(ax: Axes, found: Recommendation, names: Sequence[str]) -> None:
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
    ax.barh(last, whole["ratio"] - 1, left=1, height=0.56, color=_WHOLE, alpha=0.85, lw=0)
    fs.interval(ax, (whole["low"], whole["high"]), last, color=fs.INK, lw=1.6)
    edges += [whole[end] for end in ("low", "high") if not math.isnan(whole[end])]
    if found.count:
        below = f"{phrases.throughput(whole)}, quality {quality.sentence(found.judged)}"
        _beside(ax, last, phrases.ratio_with_interval(whole), below, bold=True)
    else:
        _beside(ax, last, "the baseline", "no change is recommended", bold=True)
    ax.axvline(1, color=fs.SOFT, lw=1, zorder=0)
    ax.set_xscale("log")
    low, high = min([*edges, whole["ratio"]]), max([*edges, whole["ratio"]])
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
        return _OPEN
    return {stats.FASTER: _GAIN, stats.SLOWER: _LOSS}.get(step.verdict, _OPEN)


def _note(found: Recommendation, step: Step, place: int) -> str:
    words = f"quality {step.quality}"
    return f"{words}; not recommended" if place > found.count else words


def _beside(ax: Axes, y: float, text: str, below: str, *, bold: bool = False) -> None:
    to = ax.get_yaxis_transform()
    weight = "bold" if bold else "normal"
    ax.text(1.02, y - 0.03, text, transform=to, va="bottom", fontsize=fs.SMALL_POINTS, fontweight=weight)
    lines = fs.fit(below, _RIGHT - 0.25, 2, fs.SMALL_POINTS - 1)
    ax.text(1.02, y + 0.04, lines, transform=to, va="top", fontsize=fs.SMALL_POINTS - 1, color=fs.SOFT)


def describe(found: Recommendation) -> str:
    """The figure in words."""
    said = [f"{step.label}: {recommended_words.gain_words(step)}" for step in found.steps]
    ends = f"baseline: {phrases.throughput(found.baseline)}"
    return f"Waterfall of speed. {'; '.join([ends, *said])}; recommended: {phrases.throughput(found.best)}."
