"""The picture of a calibration: what each set read, and what the machine can resolve in how many minutes."""

from __future__ import annotations

import base64
import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddpm_lab.explain import decisions, phrases
from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain.calibration import FINE, Calibration, lines
from ddpm_lab.explain.pages import Section, spoken_date

NAME = "calibration.png"


def save(found: Calibration, output: Path) -> Path:
    """Draw into ``image_output/``; returns the path."""
    path = output / "image_output" / NAME
    fs.save(figure(found), path)
    return path


def section(found: Calibration) -> Section:
    """For the index of the report."""
    image = base64.b64encode(fs.png(figure(found))).decode("ascii")
    sentences = (*lines(found), f"Measured on {found.hardware}, {spoken_date(found.date)}.")
    return Section(sentences=sentences, image=image, alt=found.verdict())


def figure(found: Calibration) -> Figure:
    """Ratios of single sets over time above, the smallest resolvable difference against minutes below."""
    with fs.style():
        context = fs.SEPARATOR.join(
            [
                found.hardware,
                found.date[:16].replace("T", " "),
                f"{phrases.plural(found.sets, 'set')} of {found.seconds_per_set:.1f} s",
                f"steps of {phrases.seconds(found.step_seconds)}",
            ]
        )
        drawn, (above, below) = fs.sheet(
            found.verdict(),
            context,
            [2.2, 1.7],
            headings=["What each set read", "Smallest difference that is resolved"],
            left=0.95,
            right=2.15,
            gap=0.55,
            note="Dots: single sets. Lines and bands: geometric mean and 95 % interval over sets. "
            "Dashed: the truth. The same work was measured against itself, and with more work planted.",
        )
        _sets(above, found)
        _curve(below, found)
        return drawn


def _sets(ax: Axes, found: Calibration) -> None:
    truth = 1 / (1 + found.planted)
    series = (
        ("itself", 1.0, found.null, found.null_ratios, fs.PALETTE[0]),
        (f"{100 * found.planted:.0f} % more work", truth, found.planted_estimate, found.planted_ratios, fs.PALETTE[3]),
    )
    to = ax.get_yaxis_transform()
    end = max(1e-3, *found.minutes)
    for name, expected, estimate, ratios, colour in series:
        ax.axhline(expected, color=colour, lw=1, ls=(0, (4, 3)), zorder=1)
        if math.isfinite(estimate.low):
            ax.axhspan(estimate.low, estimate.high, color=colour, alpha=0.18, lw=0)
        ax.plot(found.minutes, ratios, "o", ms=5, color=colour, zorder=3)
        text = f"{name}\n{estimate.value:.3f}"
        text += f" ({estimate.low:.3f}{phrases.DASH}{estimate.high:.3f})" if math.isfinite(estimate.low) else ""
        ax.text(1.02, estimate.value, text, transform=to, va="center", color=colour, fontsize=fs.SMALL_POINTS)
    values = [1.0, truth, *found.null_ratios, *found.planted_ratios]
    low, high = min(values), max(values)
    margin = max(0.01, 0.1 * (high - low))
    ax.set_ylim(low - margin, high + margin)
    ax.set_xlim(-0.03 * end, 1.03 * end)
    ax.set_xlabel("minutes since the first set")
    ax.set_ylabel("speed relative\nto the baseline")


def _curve(ax: Axes, found: Calibration) -> None:
    minutes = np.geomspace(0.5, 60, 200)
    counts = [int(m * 60 / found.seconds_per_set) if found.seconds_per_set else 0 for m in minutes]
    effects = np.array([decisions.resolvable(found.noise, n) for n in counts])
    shown = np.isfinite(effects)
    ax.set_xscale("log")
    if shown.any():
        ax.plot(minutes[shown], 100 * effects[shown], color=fs.PALETTE[0], lw=2)
    to = ax.get_yaxis_transform()
    lines = [f"{m} min: {'none' if v is None else f'{100 * v:.2g} %'}" for m, v in found.resolvable.items()]
    ax.text(1.02, 0.95, "\n".join(lines), transform=ax.transAxes, va="top", fontsize=fs.SMALL_POINTS, linespacing=1.5)
    for m, effect in found.resolvable.items():
        if effect is not None:
            ax.plot([m], [100 * effect], "o", ms=6, color=fs.PALETTE[0])
    ax.axhline(100 * FINE, color=fs.SOFT, lw=1, ls=(0, (4, 3)))
    ax.text(
        0.99,
        100 * FINE,
        f"{FINE:.0%} ".replace("%", " %"),
        transform=to,
        va="bottom",
        ha="right",
        color=fs.SOFT,
        fontsize=fs.SMALL_POINTS,
    )
    fs.fixed_ticks(ax.xaxis, [0.5, 1, 2, 5, 10, 20, 60], "g")
    ax.set_xlim(0.5, 60)
    top = max([2 * FINE, *(v for v in found.resolvable.values() if v is not None)])
    ax.set_ylim(0, 100 * 1.15 * top)
    ax.set_xlabel("minutes of measuring")
    ax.set_ylabel("difference, %")
