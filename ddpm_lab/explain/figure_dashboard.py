"""The pictures that a benchmark is shared with: a dashboard of four panels, and the results as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import phrases, scaling, sentences
from ddpm_lab.explain.bands import S000
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.figure_ratios import projection
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.pairs import (
    EPOCH,
    LEAST_SHOWN,
    Pair,
    known,
    layout,
    means,
    pairs,
    recommendation,
    remarks,
    speed_up,
    unit,
    where,
)

_HEIGHT, _LEFT, _BETWEEN, _RIGHT = 2.5, 0.95, 0.95, 0.25  # inches
_MOST = 7
"""Pairs that have room side by side."""
_ROOM = 2.0
"""Axes end at so many times their tallest bar or point: an interval beyond that would hide what was measured."""
Values = Callable[[Comparison], float]


def dashboard(study: Study) -> Figure:
    """Time of an epoch, throughput, speed-up with its ideal, and memory: one device beside several for each batch."""
    found = [p for p in pairs(study) if any(r.sets for r in p.sides)]
    with fs.style():
        if not found:
            return fs.message("Nothing was measured", where(study), _why(pairs(study)))
        return _dashboard(study, found[:_MOST], len(found) - _MOST)


def _why(found: Sequence[Pair]) -> str:
    return "; ".join(f"{p.name}: {recommendation(p)}" for p in found) or "There are no records of several devices."


def _dashboard(study: Study, found: Sequence[Pair], hidden: int) -> Figure:
    quality = sentences.quality([r for p in found for r in p.sides])
    figure, rows = fs.sheet(
        headline(found),
        where(study),
        [_HEIGHT, _HEIGHT],
        headings=["", ""],  # room for those of the halves
        left=_LEFT,
        right=_RIGHT,
        gap=0.62,
        bottom=0.66,
        note=f"Bars: geometric mean over sets; {_lines(found)}. Batch N each: each device has N images a step; "
        f"batch N: they share N. {EPOCH} {phrases.begun(quality)}. "
        + " ".join([f"{hidden} more in the table."] * (hidden > 0) + remarks(study)),
    )
    time, rate, gain, memory = (ax for row in rows for ax in _halves(figure, row))
    unit_of_time, time_of = projection([r for p in found for r in p.sides if r.sets])
    _bars(time, found, f"Time of an epoch (projected), {unit_of_time}", lambda r: time_of(r).value)
    _bars(rate, found, "Throughput, images per second", lambda r: r.images_per_second)
    _gains(gain, found)
    gpu = unit(found) == "GPU"
    field, of = ("peak_memory_bytes", "a GPU") if gpu else ("peak_rss_bytes", "a rank (RSS)")
    _bars(memory, found, f"Peak memory of {of}, GiB", lambda r: getattr(r, field) / 2**30)
    _legend(time, found)
    return figure


def _lines(found: Sequence[Pair]) -> str:
    """What the lines at the bars are; why there are none."""
    if any(_drawn(row) for p in found for row in p.sides):
        return "lines: 95 % interval (arrow: it goes on)"
    return f"no interval from fewer than {LEAST_SHOWN} sets"


def _drawn(row: Comparison) -> bool:
    return row.sets >= LEAST_SHOWN


def headline(found: Sequence[Pair]) -> str:
    """What the pictures show, in a line: the speed-up with a batch for each, and the mean of the shared batches."""
    told = []
    weak = next((p for p in found if p.kind == "weak" and p.compared), None)
    if weak is not None and (row := weak.compared) is not None:
        devices, single = scaling.layout(row.config), layout(found)[0]
        speed = f"{speed_up(row)} as fast as {single}" if row.resolved else f"{phrases.outcome(row)} against {single}"
        told.append(f"{devices} {speed} with {weak.name}")
    told += [mean.headline() for mean in means(found)]
    return "; ".join(told) or f"{next(scaling.layout(r.config) for p in found for r in p.sides if r.sets)} alone"


def _halves(figure: Figure, ax: Axes) -> tuple[Axes, Axes]:
    """Two panels in the place of one."""
    box = ax.get_position()
    ax.remove()
    between = _BETWEEN / fs.WIDTH
    wide = (box.width - between) / 2
    lefts = (box.x0, box.x0 + wide + between)
    first, second = (figure.add_axes((x, box.y0, wide, box.height)) for x in lefts)
    return first, second


def _ticks(ax: Axes, found: Sequence[Pair], heading: str) -> None:
    inches = ax.get_position().width * fs.WIDTH / len(found) - 0.04
    names = [fs.fit(p.name.replace("batch ", "batch\N{NO-BREAK SPACE}"), inches, 3) for p in found]
    ax.set_xticks(range(len(found)), names)
    ax.set_xlim(-0.6, len(found) - 0.4)
    ax.tick_params(axis="x", length=0)
    ax.grid(visible=False, axis="x")
    fs.plain_numbers(ax.yaxis, 5)
    ax.tick_params(axis="y", labelsize=fs.SMALL_POINTS)
    ax.set_title(heading, loc="left", fontsize=fs.TEXT_POINTS, fontweight="bold", pad=7)


def _bars(ax: Axes, found: Sequence[Pair], heading: str, values: Values) -> None:
    """One bar a side; a side without a value is named instead of drawn."""
    top = 0.0
    for x, pair in enumerate(found):
        for side, row, (colour, hatch) in zip((-1, 1), (pair.single, pair.multi), _LOOKS, strict=True):
            if row is None:
                continue
            value = values(row) if row.sets else math.nan
            at = x + 0.19 * side
            if not known(value):
                ax.text(at, 0, " no value", rotation=90, ha="center", va="bottom", fontsize=fs.SMALL_POINTS)
                continue
            ax.bar(at, value, 0.36, color=colour, hatch=hatch, edgecolor="white", lw=0)
            top = max(top, value)
    _ticks(ax, found, heading)
    ax.set_ylim(0, 1.1 * top or 1)


def _intervals(ax: Axes, spans: Sequence[tuple[float, float, float]], top: float, **look: Any) -> float:
    """Upright lines at (place, low, high); return where the highest ends, no further than _ROOM times ``top``."""
    most = _ROOM * top
    for at, low, high in spans:
        fs.interval(ax, (low, min(high, most)), at, upright=True, **look)
        if high > most:
            ax.plot([at], [most], "^", ms=6, color=look["color"])
    return max([top, *(min(high, most) for _, _, high in spans if known(high))])


_LOOKS = ((fs.PALETTE[1], ""), (fs.PALETTE[0], "///"))


def _legend(ax: Axes, found: Sequence[Pair]) -> None:
    """What the two kinds of bars are, above them."""
    for (colour, hatch), rows in zip(_LOOKS, ([p.single for p in found], [p.multi for p in found]), strict=True):
        if names := list(dict.fromkeys(scaling.layout(row.config) for row in rows if row)):
            ax.bar([0], [0], color=colour, hatch=hatch, edgecolor="white", lw=0, label=phrases.joined(names))
    ax.legend(loc="upper right", ncols=2, frameon=False, fontsize=fs.SMALL_POINTS, borderpad=0, borderaxespad=0)
    ax.set_ylim(0, 1.15 * ax.get_ylim()[1])


def _gains(ax: Axes, found: Sequence[Pair]) -> None:
    """Speed-ups as points with their intervals, below the ideal of so many devices."""
    rows = [p.compared for p in found]
    top = max([1.0, *(max(r.ranks, r.ratio.value) for r in rows if r)])
    spans = [(float(x), r.ratio.low, r.ratio.high) for x, r in enumerate(rows) if r and _drawn(r)]
    end = _intervals(ax, spans, top, color=fs.PALETTE[0], lw=3)
    tops = {x: min(high, _ROOM * top) for x, _, high in spans}
    for x, row in enumerate(rows):
        if row is None:
            ax.text(x, 0.05, " not compared", rotation=90, ha="center", va="bottom", fontsize=fs.SMALL_POINTS)
            continue
        ax.plot([x - 0.38, x + 0.38], [row.ranks] * 2, "--", color=fs.SOFT, lw=1.4)
        ax.plot([x], [row.ratio.value], "o", ms=5, color=fs.PALETTE[0], zorder=5)
        label = f"{speed_up(row)}\n{scaling.efficiency(row)}"
        ax.annotate(
            label,
            (x, tops.get(x, row.ratio.value)),
            (0, 5),
            textcoords="offset points",
            ha="center",
            fontsize=fs.SMALL_POINTS,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    ax.axhline(1, color=fs.INK, lw=1)
    _ticks(ax, found, "Speed-up and efficiency (dashed: ideal)")
    ax.set_ylim(0, 1.28 * end)


# --- the table -------------------------------------------------------------------------------------------------------


def summary_table(study: Study) -> Figure:
    """Every configuration of a benchmark as a table that is a picture."""
    found = pairs(study)
    head = ("Batch", "On", "In all", "Epoch", "Images/s", "Speedup (95 %)", "Efficiency", "Memory", "Sets", "Quality")
    lines = [_line(pair, row) for pair in found for row in pair.sides]
    with fs.style():
        if not lines:
            return fs.message("Nothing was measured", where(study), _why(found))
        return _table(study, found, [head, *lines])


def _line(pair: Pair, row: Comparison) -> tuple[str, ...]:
    name, on, total = pair.name.removeprefix("batch "), scaling.layout(row.config), str(row.batch)
    if not row.sets:
        return (name, on, total, phrases.without_speed(row), "", "", "", "", "0", "")
    gain, efficiency, quality = phrases.DASH, phrases.DASH, phrases.DASH
    if row is pair.compared:
        between = f" ({phrases.interval(row)})" if phrases.interval(row) and _drawn(row) else ""
        gain = f"{speed_up(row)}{between} {phrases.outcome(row)}"
        efficiency = scaling.efficiency(row) + (f", {scaling.band(row, S000)}" if row.resolved else "")
        quality = row.quality
    took = phrases.seconds(row.projected_seconds)
    rate = phrases.significant(row.images_per_second)
    return (name, on, total, took, rate, gain, efficiency, phrases.peak_memory(row), str(row.sets), quality)


_WIDE = (0.72, 0.85, 0.5, 0.72, 0.72, 1.6, 0.95, 0.85, 0.42, 1.1)
"""Inches of the columns."""


def _table(study: Study, found: Sequence[Pair], lines: Sequence[tuple[str, ...]]) -> Figure:
    wrapped = [[fs.fit(cell, w - 0.08, 4) for cell, w in zip(line, _WIDE, strict=True)] for line in lines]
    failed = [i for i, line in enumerate(lines) if i and line[-2] == "0"]
    for i in failed:  # the reason takes the room of the numbers that are not there
        wrapped[i][3] = fs.fit(lines[i][3], sum(_WIDE[3:8]) - 0.1, 3)
    heights = [0.14 + fs.LINE * (max(cell.count("\n") for cell in line) + 1) for line in wrapped]
    told = " ".join(mean.sentence() for mean in means(found))
    figure, (ax,) = fs.sheet(
        f"Performance: {headline(found)}" if any(r.sets for p in found for r in p.sides) else "Nothing was measured",
        where(study),
        [sum(heights)],
        left=0.22,
        right=0.22,
        bottom=0.15,
        note=f"{told} {EPOCH} N each: every device has N images a step. Efficiency by S000's bands. "
        + " ".join(remarks(study)),
    )
    ax.set_axis_off()
    ax.set_xlim(0, fs.WIDTH - 0.44)
    ax.set_ylim(sum(heights), 0)
    y = 0.0
    for i, (line, height) in enumerate(zip(wrapped, heights, strict=True)):
        if i % 2 == 0 and i:
            ax.axhspan(y, y + height, color=fs.BAND, alpha=0.4, lw=0)
        x = 0.0
        for cell, w in zip(line, _WIDE, strict=True):
            ax.text(
                x + 0.04, y + height / 2, cell, va="center", fontsize=fs.SMALL_POINTS, fontweight=None if i else "bold"
            )
            x += w
        y += height
    ax.plot([0, fs.WIDTH - 0.44], [heights[0]] * 2, color=fs.SOFT, lw=1.2)
    return figure
