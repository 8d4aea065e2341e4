"""The lost scaling as a waterfall: from the ideal step over each part of the loss to the step that was measured."""

from __future__ import annotations

import math
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import phrases
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.lost_scaling import Seconds, Split, splits
from ddpm_lab.explain.lost_scaling_table import milliseconds, rate
from ddpm_lab.plan import LOST

_ROW, _RIGHT = 0.38, 2.3
_WHOLE, _LOSS, _GAIN, _REST = fs.PALETTE[0], fs.PALETTE[3], fs.PALETTE[2], fs.FAINT


def figure(study: Study) -> Figure | None:
    """Ideal step, each part of the loss where the one before ends, and the measured step; None without any."""
    found = [split for split in splits(study) if split.loss.known and split.total.known]
    if not found:
        return None
    records = tuple(r for r in study.records if r.family.endswith(LOST))
    names = [name for split in found for name, _ in _rows(split)]
    panels, axes = fs.sheet(
        "Where the lost scaling went",
        phrases.context(replace(study, records=records), batch=False),
        [_ROW * len(_rows(split)) + 0.1 for split in found],
        headings=[f"{split.family}{f' ({split.doubt})' if split.doubt else ''}" for split in found],
        left=0.3 + max(fs.width(name, fs.TEXT_POINTS) for name in names),
        right=_RIGHT,
        gap=0.62,
        note="Each part is what a step gains where it alone is switched off, with its 95 % interval over sets; the "
        "interaction is what all of them together gain more or less. Ideal: one rank's time for the whole batch, "
        "divided by the number of ranks. Intervals that rest on which rank is the slowest are corrected for it.",
    )
    for ax, split in zip(axes, found, strict=True):
        _waterfall(ax, split)
    return panels


def _rows(split: Split) -> list[tuple[str, Seconds]]:
    """Names and seconds of the bars, from the ideal down."""
    parts = [(part.name, part.seconds) for part in split.parts]
    return [("ideal", split.ideal), *parts, ("interaction", split.interaction), ("measured", split.measured)]


def _waterfall(ax: Axes, split: Split) -> None:
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
