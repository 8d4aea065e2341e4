"""Further figures: throughput, scaling over ranks and batch sizes, and when compiling pays off."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ddpm_lab.explain import compiling, phrases, stats
from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain.bands import THRESHOLD, band
from ddpm_lab.explain.figure_ratios import families, rows_of
from ddpm_lab.explain.frames import Study

_BAR = 0.4
_LABEL_LINE = 0.22  # inches from one label at the end of a line to the next
_MARKERS = "osD^vPX*"

Rows = list[dict[str, Any]]


def _measured(study: Study) -> list[Rows]:
    kept = [[r for r in rows if r["sets"] and r["role"] != "twin"] for rows in families(rows_of(study))]
    return [rows for rows in kept if rows]


def throughput(study: Study) -> Figure | None:
    """Images per second of every configuration; loader and training have axes of their own."""
    panels = _measured(study)
    if not panels:
        return None
    alone = any(r["loader_alone"] for rows in panels for r in rows)
    title = "Images per second: training, and the loader alone" if alone else "Images per second in training"
    figure, axes = fs.sheet(
        title,
        phrases.context(study),
        _heights(panels),
        headings=[str(rows[0]["family"]) for rows in panels],
        left=_left(panels),
        right=2.0,
        gap=0.16,
        note="Bar: geometric mean over sets of the set's median. Line: 95 % interval over sets. "
        "Compare configurations by the paired ratios: throughputs also hold what changed between sets.",
    )
    most = max(max(r["images_per_second"], known(r["images_per_second_high"], 0)) for rows in panels for r in rows)
    for ax, rows in zip(axes, panels, strict=True):
        colours = [fs.PALETTE[2] if r["loader_alone"] else fs.PALETTE[0] for r in rows]
        _bars(ax, rows, colours, "images_per_second", lambda r: f"{phrases.throughput(r)}")
        ax.set_xlim(0, most * 1.02)
        ax.tick_params(axis="x", labelbottom=ax is axes[-1])
    axes[-1].set_xlabel("images per second")
    return figure


def _bar_label(row: dict[str, Any]) -> str:
    return fs.fit(str(row["label"]), 2.2, 6, fs.TEXT_POINTS)


def _heights(panels: Sequence[Rows]) -> list[float]:
    """Inches for panels of bars, as high as their longest name needs."""
    lines = max(_bar_label(r).count("\n") + 1 for rows in panels for r in rows)
    return [max(_BAR, 0.06 + 0.175 * lines) * len(rows) + 0.1 for rows in panels]


def _left(panels: Sequence[Rows]) -> float:
    """Inches for the names of bars."""
    return max(1.2, 0.3 + max(fs.block_width(_bar_label(r), fs.TEXT_POINTS) for rows in panels for r in rows))


def known(value: float, other: float) -> float:
    return other if math.isnan(value) else value


def _bars(ax: Axes, rows: Rows, colours: Sequence[str], field: str, text: Callable[[dict[str, Any]], str]) -> None:
    """Horizontal bars from zero with intervals, and the number at the right of the panel."""
    for y, (row, colour) in enumerate(zip(rows, colours, strict=True)):
        value, low, high = (row[field], row[f"{field}_low"], row[f"{field}_high"])
        ax.barh(y, value, height=0.62, color=colour, alpha=0.85, lw=0)
        if not math.isnan(low):
            ax.plot([low, high], [y, y], color=fs.INK, lw=1.6, solid_capstyle="butt")
        ax.text(1.02, y, text(row), transform=ax.get_yaxis_transform(), va="center_baseline", fontsize=fs.SMALL_POINTS)
    ax.set_yticks(range(len(rows)), [_bar_label(r) for r in rows])
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: fs.number(value)))


def _scaling(study: Study) -> list[Rows]:
    """Families of the multi-GPU experiment that hold more than the baseline, by batch size."""
    panels = [sorted(rows, key=lambda r: r["ranks"]) for rows in _measured(study) if len(rows) > 1]
    return sorted(panels, key=lambda rows: (rows[0]["config"].image_size, rows[0]["batch"]))


def _unit(panels: Sequence[Rows]) -> str:
    return "GPUs" if any(r["config"].device == "cuda" for rows in panels for r in rows) else "CPU ranks"


def _spread(values: Sequence[float], least: float, high: float) -> list[float]:
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


def speed_up(study: Study) -> Figure | None:
    """Speed-up against the number of ranks, one line a family, with the ideal line."""
    panels = _scaling(study)
    if not panels:
        return None
    unit = _unit(panels)
    figure, (ax,) = fs.sheet(
        f"Speed-up against the number of {unit}",
        phrases.context(study),
        [max(4.2, _LABEL_LINE * len(panels))],
        left=0.85,
        right=2.6,
        note=_shared_cores(study, panels) + "Bars: 95 % interval over sets. Global batch size stays the same.",
    )
    ranks = sorted({r["ranks"] for rows in panels for r in rows})
    most = max(ranks)
    top = max(known(r["high"], r["ratio"]) for rows in panels for r in rows)
    ceiling = 1.08 * max(top, min(most, 2 * top))
    ax.plot([1, most], [1, most], "--", color=fs.SOFT, lw=1.4, zorder=1)
    end = min(most, ceiling)
    at = 1 + 0.72 * (end - 1)
    ax.text(at, at + 0.03 * ceiling, "ideal", color=fs.SOFT, ha="right", va="bottom")
    ax.set_xlim(min(ranks) - 0.1 * (most - min(ranks)), most + 0.08 * (most - min(ranks)))
    ax.set_ylim(0, ceiling)
    for i, rows in enumerate(panels):
        colour = fs.PALETTE[i % len(fs.PALETTE)]
        # A small shift keeps intervals of several families apart.
        x = [
            r["ranks"] + min(0.012, 0.1 / len(panels)) * (most - min(ranks)) * (i - (len(panels) - 1) / 2) for r in rows
        ]
        for at_x, r in zip(x, rows, strict=True):
            if not math.isnan(r["low"]):
                ax.plot([at_x, at_x], [r["low"], r["high"]], color=colour, lw=2, alpha=0.6)
        ax.plot(x, [r["ratio"] for r in rows], marker=_MARKERS[i % 8], ms=6, lw=1.8, color=colour)
    ends = [rows[-1]["ratio"] for rows in panels]
    places = _spread(ends, _LABEL_LINE / max(4.2, _LABEL_LINE * len(panels)) * ceiling, ceiling)
    for i, (rows, y) in enumerate(zip(panels, places, strict=True)):
        text = fs.fit(f"{_short(rows, panels)}: {phrases.ratio(rows[-1])}", 2.1, 1)
        to = ax.get_yaxis_transform()
        colour = fs.PALETTE[i % len(fs.PALETTE)]
        ax.plot([1.03], [y], _MARKERS[i % 8], transform=to, color=colour, ms=6, clip_on=False)
        ax.text(1.055, y, text, transform=to, va="center", fontsize=fs.SMALL_POINTS)
    ax.xaxis.set_major_locator(FixedLocator(ranks))
    ax.set_xlabel(unit)
    ax.set_ylabel(fs.fit(f"speed relative to {panels[0][0]['baseline_label']}", 4.0, 1, fs.TEXT_POINTS))
    return figure


def _short(rows: Rows, panels: Sequence[Rows]) -> str:
    """The part of a family's name that differs: its batch size where that is all."""
    sizes = {p[0]["config"].image_size for p in panels}
    name = f"batch {rows[0]['batch']}"
    return name if len(sizes) == 1 else f"{rows[0]['config'].image_size} px, {name}"


def _shared_cores(study: Study, panels: Sequence[Rows]) -> str:
    if _unit(panels) == "GPUs":
        return ""
    cores = study.records[-1].environment.machine.usable_cores
    return f"All ranks share the same {phrases.plural(cores, 'core')}: the ideal is not within reach. "


def efficiency(study: Study) -> Figure | None:
    """Parallel efficiency, speed-up / N, as bars with the threshold of good scaling."""
    panels = [[r for r in rows if r["role"] != "baseline"] for rows in _scaling(study)]
    panels = [rows for rows in panels if rows]
    if not panels:
        return None
    rated = _unit(panels) == "GPUs"
    threshold = f"Dashed: {100 * THRESHOLD:.0f} %, from where scaling is called good. "
    about = threshold if rated else _shared_cores(study, panels)
    figure, axes = fs.sheet(
        "Parallel efficiency: speed-up divided by the number of " + _unit(panels),
        phrases.context(study),
        _heights(panels),
        headings=[str(rows[0]["family"]) for rows in panels],
        left=_left(panels),
        right=2.0,
        gap=0.16,
        note=about + "Line: 95 % interval over sets.",
    )
    most = max(1.05, *(known(r["efficiency_high"], r["efficiency"]) for rows in panels for r in rows))
    for ax, rows in zip(axes, panels, strict=True):
        percent = [{**r, **{k: 100 * r[k] for k in ("efficiency", "efficiency_low", "efficiency_high")}} for r in rows]
        _bars(
            ax,
            percent,
            [fs.PALETTE[0]] * len(rows),
            "efficiency",
            lambda r: f"{r['efficiency']:.1f} %" + (f", {band(r['efficiency'] / 100)}" if rated else ""),
        )
        if rated:
            ax.axvline(100 * THRESHOLD, color=fs.INK, lw=1.2, ls="--")
        ax.set_xlim(0, 102 * most)
        ax.tick_params(axis="x", labelbottom=ax is axes[-1])
    axes[-1].set_xlabel("parallel efficiency, %")
    return figure


def time_by_batch(study: Study) -> Figure | None:
    """Seconds for 50,000 images against the global batch size, one line a number of ranks."""
    rows = [r for panel in _measured(study) for r in panel]
    sizes = {r["config"].image_size for r in rows}
    batches = sorted({r["batch"] for r in rows})
    if len(batches) < 2:
        return None
    lines: dict[str, Rows] = {}
    for row in sorted(rows, key=lambda r: (r["config"].image_size, r["ranks"], r["batch"])):
        name = str(row["label"]) + (f", {row['config'].image_size} px" if len(sizes) > 1 else "")
        lines.setdefault(name, []).append(row)
    longest = max(r["projected_seconds"] for r in rows)
    unit, scale = ("hours", 3600.0) if longest > 7200 else ("minutes", 60.0) if longest > 300 else ("seconds", 1.0)
    figure, (ax,) = fs.sheet(
        "Time for 50,000 images against the batch size",
        phrases.context(study, batch=False),
        [height := max(4.0, _LABEL_LINE * len(lines))],
        left=0.95,
        right=2.1,
        note="A projection from short timed windows, without start-up. Bars: 95 % interval over sets.",
    )
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(FixedLocator(batches))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    top = 0.0
    for i, line in enumerate(lines.values()):
        colour = fs.PALETTE[i % len(fs.PALETTE)]
        x = [r["batch"] * 2 ** (0.02 * (i - (len(lines) - 1) / 2)) for r in line]
        y = [r["projected_seconds"] / scale for r in line]
        for at, r in zip(x, line, strict=True):
            ends = [
                r["projected_seconds"] * r["images_per_second"] / r[f"images_per_second_{e}"] for e in ("high", "low")
            ]
            if not math.isnan(ends[0]):
                ax.plot([at, at], [e / scale for e in ends], color=colour, lw=2, alpha=0.6)
                top = max(top, ends[1] / scale)
        ax.plot(x, y, marker=_MARKERS[i % 8], ms=6, lw=1.8, color=colour)
        top = max(top, *y)
    ax.set_ylim(0, 1.08 * top)
    to = ax.get_yaxis_transform()
    places = _spread(
        [line[-1]["projected_seconds"] / scale for line in lines.values()],
        _LABEL_LINE / height * 1.08 * top,
        1.08 * top,
    )
    for i, (name, y_at) in enumerate(zip(lines, places, strict=True)):
        ax.plot([1.03], [y_at], _MARKERS[i % 8], transform=to, color=fs.PALETTE[i % 10], ms=6, clip_on=False)
        ax.text(1.06, y_at, fs.fit(name, 1.65, 1), transform=to, va="center", fontsize=fs.SMALL_POINTS)
    ax.set_xlabel("global batch size, images a step")
    ax.set_ylabel(f"{unit} for 50,000 images (projection)")
    return figure


def break_even(study: Study) -> Figure | None:
    """Time since the start with and without compiling, up to beyond the step where the lines cross."""
    found = []
    for rows in _measured(study):
        for row in rows:
            cost = compiling.break_even(study, row)
            if row["role"] == "candidate" and not math.isnan(cost.cold_seconds):
                found.append((row, cost))
    if not found:
        return None
    found = found[:4]
    figure, axes = fs.sheet(
        "When compiling pays off: total time with and without it",
        phrases.context(study),
        [2.5] * len(found),
        headings=[str(row["family"]) for row, _ in found],
        left=0.95,
        right=2.3,
        gap=0.62,
        note="A projection: cold compile time and steady steps. The band is a 95 % interval: of the speed ratio, and "
        "of the compile time where it was measured more than once.",
    )
    for ax, (row, cost) in zip(axes, found, strict=True):
        _crossing(ax, row, cost)
    return figure


def _crossing(ax: Axes, row: dict[str, Any], cost: compiling.BreakEven) -> None:
    step = row["step_seconds"] * row["ratio"]
    crossing = cost.steps if row["verdict"] == stats.FASTER and math.isfinite(cost.steps) else math.nan
    last = 2.2 * crossing if not math.isnan(crossing) else 4 * cost.cold_seconds / step
    steps = np.array([0.0, last])
    scale, unit = (60.0, "minutes") if step * last > 300 else (1.0, "seconds")
    eager, compiled = steps * step / scale, (cost.cold_seconds + steps * step / row["ratio"]) / scale
    ax.plot(steps, eager, color=fs.PALETTE[1], lw=2.2, ls="--")
    ax.plot(steps, compiled, color=fs.PALETTE[0], lw=2.2)
    if not math.isnan(row["low"]):
        along = np.linspace(0, last, 60)
        _, low, high = np.array([compiling.total_seconds(cost, row, at) for at in along]).T / scale
        ax.fill_between(along, low, high, color=fs.PALETTE[0], alpha=0.15, lw=0)
    top = 1.08 * max(eager[1], compiled[1])
    ax.set_xlim(0, last)
    ax.set_ylim(0, top)
    places = _spread([eager[1], compiled[1]], 0.1 * top, top)
    names = (row["baseline_label"], row["label"])
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
