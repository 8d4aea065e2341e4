"""What wrong ways of measuring make of a number: one row a fault, what it reads over what is true."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import phrases
from ddpm_lab.explain.faults import NEEDS_GPU, WHY_GPU, Fault, faults
from ddpm_lab.explain.frames import Study

_ROW, _LEFT, _RIGHT = 0.58, 2.62, 3.0  # inches: of a row, of the names, and of what stands beside the points
_NEAR = 0.05
"""A number so near to the truth is drawn as true."""


def figure(study: Study, title: str) -> Figure | None:
    """One row for each fault, on a logarithmic axis; None where no wrong way was run."""
    found = faults(study)
    if not any(f.shown for f in found):
        return None
    known = [f.ratio for f in found if f.shown and math.isfinite(f.ratio)]
    least, most = min(known, default=1.0), max(known, default=1.0)
    note = (
        "What a wrong way of measuring reads, divided by what the sets of this machine say: point and bar are the "
        "geometric mean over repeats and sets and its 95 % interval. At 1 the wrong way would be right. The table "
        "under More tells each fault in full."
    )
    note += f" Needs a GPU: {WHY_GPU}." if any(f.missing == NEEDS_GPU for f in found) else ""
    panels = [[f for f in found if f.group == group] for group in dict.fromkeys(f.group for f in found)]
    drawn, axes = fs.sheet(
        f"{title}; wrong ways read {_number(least)} to {_number(most)} times what is true",
        phrases.context(study),
        [_ROW * len(rows) + 0.06 for rows in panels],
        headings=[rows[0].group for rows in panels],
        left=_LEFT,
        right=_RIGHT,
        gap=0.12,
        note=note,
    )
    low, high = _limits(found)
    for ax, rows in zip(axes, panels, strict=True):
        _panel(ax, rows, low, high, last=ax is axes[-1])
    axes[-1].set_xlabel("reads so many times what is true")
    return drawn


def _factor(fault: Fault) -> str:
    if math.isinf(fault.ratio):
        return "the truth is 0"
    text = f"\N{MULTIPLICATION SIGN} {_number(fault.ratio)}"
    between = f"  ({_number(fault.low)}{phrases.DASH}{_number(fault.high)})" if not math.isnan(fault.low) else ""
    return text + between


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else phrases.significant(value, 2 if value < 100 else 3)


def _limits(found: Sequence[Fault]) -> tuple[float, float]:
    values = [v for f in found for v in (f.ratio, f.low, f.high) if math.isfinite(v) and v > 0]
    return min(0.5, *values) / 1.3, max(2.0, *values) * 1.6


def _panel(ax: Axes, rows: Sequence[Fault], low: float, high: float, *, last: bool) -> None:
    ax.set_xscale("log")
    ax.set_xlim(low, high)
    ticks = [m * 10.0**k for k in range(-3, 6) for m in ((1, 3) if high / low < 1e4 else (1,))]
    fs.fixed_ticks(ax.xaxis, [t for t in ticks if low <= t <= high], ",g")
    ax.tick_params(axis="x", labelbottom=last, length=3 if last else 0)
    ax.set_ylim(len(rows) - 0.5, -0.55)
    ax.grid(visible=False, axis="y")
    ax.axvline(1, color=fs.SOFT, lw=1.2, zorder=1)
    ax.set_yticks([])
    for y, fault in enumerate(rows):
        to = ax.get_yaxis_transform()
        ax.text(-0.03, y - 0.02, fault.name, transform=to, ha="right", va="bottom")
        ax.text(
            -0.03, y + 0.04, fault.brief, transform=to, ha="right", va="top", fontsize=fs.SMALL_POINTS, color=fs.SOFT
        )
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_visible(last)
    for y, fault in enumerate(rows):
        if fault.shown:
            _point(ax, y, fault)
        else:
            fs.absent(ax, y, fs.fit(fault.missing, fs.WIDTH - _LEFT - 0.6, 2), fs.FAINT, 0.05)


def _point(ax: Axes, y: int, fault: Fault) -> None:
    low, high = ax.get_xlim()
    to = ax.get_yaxis_transform()
    endless = math.isinf(fault.ratio)
    end = high if endless else fault.ratio
    true = not endless and abs(math.log(fault.ratio)) <= math.log1p(_NEAR)
    colour = fs.SOFT if true else fs.PALETTE[3]
    ax.plot([1, end], [y, y], color=colour, lw=1.2, alpha=0.45, zorder=2)
    if not math.isnan(fault.low):
        fs.interval(ax, (max(fault.low, low), min(fault.high, high)), y, color=colour, lw=4.0, zorder=3)
    ax.plot([end], [y], ">" if endless else "o", ms=7, color=colour, zorder=5, clip_on=False)
    words = fs.fit(fault.beside(), _RIGHT - 0.3, 2)
    ax.text(1.03, y - 0.03, _factor(fault), transform=to, va="bottom", color=colour, fontweight="bold")
    ax.text(1.03, y + 0.03, words, transform=to, va="top", fontsize=fs.SMALL_POINTS, color=fs.SOFT)
