"""Further figures: throughput, and when compiling pays off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ddpm_lab.explain import compiling, decisions, phrases
from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain.comparisons import Comparison, families
from ddpm_lab.explain.figure_ratios import rows_of
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.stats import Interval

_BAR = 0.4

Rows = list[Comparison]


def measured(study: Study) -> list[Rows]:
    kept = [[r for r in rows if r.sets and r.role != "twin"] for rows in families(rows_of(study))]
    return [rows for rows in kept if rows]


def throughput(study: Study) -> Figure | None:
    """Images per second of every configuration; loader and training have axes of their own."""
    panels = measured(study)
    if not panels:
        return None
    alone = any(r.loader_alone for rows in panels for r in rows)
    title = "Images per second: training, and the loader alone" if alone else "Images per second in training"
    headings = [rows[0].family for rows in panels]
    return throughput_bars(title, study, panels, headings, lambda r: 2 if r.loader_alone else 0)


def throughput_bars(
    title: str, study: Study, panels: Sequence[Rows], headings: Sequence[str], colour: Callable[[Comparison], int]
) -> Figure:
    """Images per second as bars, all panels on one scale; ``colour`` is a number in the palette."""
    most = max(r.images_per_second for rows in panels for r in rows)

    def draw(ax: Axes, rows: Rows) -> None:
        bars(ax, rows, [fs.PALETTE[colour(r)] for r in rows], speed, phrases.throughput)
        ax.set_xlim(0, most * 1.02)

    note = "Bar: geometric mean over sets of the set's median. "
    note += "Use the ratios to compare: images/s also rise and fall with the machine."
    return bar_panels(title, study, panels, headings=headings, note=note, draw=draw, label="images per second")


def bar_panels(
    title: str,
    study: Study,
    panels: Sequence[Rows],
    *,
    headings: Sequence[str],
    note: str,
    draw: Callable[[Axes, Rows], None],
    label: str,
) -> Figure:
    """A panel of bars below the other, each as high as its longest name needs; ``label`` is that of their axis."""
    names = [_bar_label(r) for rows in panels for r in rows]
    height = max(_BAR, 0.06 + 0.175 * max(name.count("\n") + 1 for name in names))
    figure, axes = fs.sheet(
        title,
        phrases.context(study),
        [height * len(rows) + 0.1 for rows in panels],
        headings=headings,
        left=max(1.2, 0.3 + max(fs.block_width(name, fs.TEXT_POINTS) for name in names)),
        right=2.0,
        gap=0.16,
        note=note,
    )
    for ax, rows in zip(axes, panels, strict=True):
        draw(ax, rows)
        ax.tick_params(axis="x", labelbottom=ax is axes[-1])
    axes[-1].set_xlabel(label)
    return figure


def _bar_label(row: Comparison) -> str:
    return fs.fit(row.label, 2.2, 6, fs.TEXT_POINTS)


def speed(row: Comparison) -> Interval:
    """Images per second, without an interval."""
    return Interval(value=row.images_per_second)


def projection(rows: Sequence[Comparison]) -> tuple[str, Callable[[Comparison], Interval]]:
    """The unit in which the longest time for 50,000 images is read, and what gives the time of a row in it."""
    longest = max(r.projected_seconds for r in rows)
    unit, scale = ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0) if longest > 300 else ("seconds", 1.0)
    return unit, lambda row: Interval(value=row.projected_seconds / scale)


def known(value: float, other: float) -> float:
    return other if math.isnan(value) else value


def bars(
    ax: Axes,
    rows: Rows,
    colours: Sequence[str],
    values: Callable[[Comparison], Interval],
    text: Callable[[Comparison], str],
    *,
    scale: float = 1,
) -> None:
    """Horizontal bars from zero with intervals, ``scale`` times the ``values``, and the number at the right."""
    for y, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        ax.barh(y, scale * values(row).value, height=0.62, color=colour, alpha=0.85, lw=0)
        fs.interval(ax, [scale * end for end in values(row).ends], y, color=fs.INK, lw=1.6)
        ax.text(1.02, y, text(row), transform=ax.get_yaxis_transform(), va="center_baseline", fontsize=fs.SMALL_POINTS)
    fs.name_rows(ax, [_bar_label(r) for r in rows])
    fs.plain_numbers(ax.xaxis, 6)


def spread(values: Sequence[float], least: float, high: float) -> list[float]:
    """Positions for labels at ``values``, at least ``least`` apart, from 0 to ``high``, order kept."""
    order = np.argsort(values, kind="stable")
    placed = np.array(values, dtype=float)[order]
    for _ in range(200):
        for i in range(1, len(placed)):
            lack = least - (placed[i] - placed[i - 1])
            if lack > 1e-12:
                placed[i] += lack / 2
                placed[i - 1] -= lack / 2
    for i in range(len(placed)):  # first away from the lower end, then away from the upper one
        placed[i] = max(placed[i], (i + 0.5) * least)
    for i in range(len(placed)):
        placed[-1 - i] = min(placed[-1 - i], high - (i + 0.5) * least)
    result = np.empty_like(placed)
    result[order] = placed
    return [float(v) for v in result]


def break_even(study: Study) -> Figure | None:
    """Time since the start with and without compiling, up to beyond the step where the lines cross."""
    found = []
    for rows in measured(study):
        for row in rows:
            cost = compiling.break_even(study, row)
            if row.role == "candidate" and not math.isnan(cost.cold_seconds):
                found.append((row, cost))
    if not found:
        return None
    found = found[:4]
    figure, axes = fs.sheet(
        "When compiling pays off: total time with and without it",
        phrases.context(study),
        [2.5] * len(found),
        headings=[row.family for row, _ in found],
        left=0.95,
        right=2.3,
        gap=0.62,
        note="A projection: cold compile time and steady steps. The band is a 95 % interval: of the speed ratio, and "
        "of the compile time where it was measured more than once.",
    )
    for ax, (row, cost) in zip(axes, found, strict=True):
        _crossing(ax, row, cost)
    return figure


def _crossing(ax: Axes, row: Comparison, cost: compiling.BreakEven) -> None:
    step = row.step_seconds * row.ratio.value
    crossing = cost.steps if row.verdict == decisions.FASTER and math.isfinite(cost.steps) else math.nan
    last = 2.2 * crossing if not math.isnan(crossing) else 4 * cost.cold_seconds / step
    steps = np.array([0.0, last])
    scale, unit = (60.0, "minutes") if step * last > 300 else (1.0, "seconds")
    eager, compiled = steps * step / scale, (cost.cold_seconds + steps * step / row.ratio.value) / scale
    ax.plot(steps, eager, color=fs.PALETTE[1], lw=2.2, ls="--")
    ax.plot(steps, compiled, color=fs.PALETTE[0], lw=2.2)
    if not math.isnan(row.ratio.low):
        along = np.linspace(0, last, 60)
        _, low, high = np.array([compiling.total_seconds(cost, row, at) for at in along]).T / scale
        ax.fill_between(along, low, high, color=fs.PALETTE[0], alpha=0.15, lw=0)
    top = 1.08 * max(eager[1], compiled[1])
    ax.set_xlim(0, last)
    ax.set_ylim(0, top)
    places = spread([eager[1], compiled[1]], 0.1 * top, top)
    names = (row.baseline_label, row.label)
    to = ax.get_yaxis_transform()
    for name, y, colour in zip(names, places, (fs.PALETTE[1], fs.PALETTE[0]), strict=True):
        text = fs.fit(str(name), 2.0, 1, fs.TEXT_POINTS, bold=True)
        ax.text(1.02, y, text, transform=to, va="center", color=colour, fontweight="bold")
    when = compiling.pays_off(cost, row)
    words = f"pays off {when}" if when.startswith(("after", "never")) else f"break-even {when}"
    ax.text(1.02, 0.02, fs.fit(words, 2.0, 4), transform=ax.transAxes, va="bottom", fontsize=fs.SMALL_POINTS)
    if not math.isnan(crossing):
        ax.plot([crossing], [crossing * step / scale], "o", ms=8, mfc="white", mec=fs.INK, mew=1.8, zorder=5)
        ax.plot([crossing] * 2, [0, crossing * step / scale], color=fs.SOFT, lw=1, ls=":")
    cost_text = f"compiling: {phrases.seconds(cost.cold_seconds)} before the first step"
    ax.text(0.02, 0.95, cost_text, transform=ax.transAxes, va="top", fontsize=fs.SMALL_POINTS, color=fs.SOFT)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.set_xlabel("steps")
    ax.set_ylabel(f"{unit} since the start")
