"""The picture of a calibration: what each set read, and what the machine can resolve in how many minutes."""

from __future__ import annotations

import base64
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ddpm_lab.explain import decisions, phrases
from ddpm_lab.explain.calibration import FINE, Calibration, lines
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.lines import Line, Plot
from ddpm_lab.explain.charts.lines import lines as draw
from ddpm_lab.explain.pages import Section, spoken_date
from ddpm_lab.explain.stats import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "calibration.png"


def save(found: Calibration, output: Path) -> Path:
    """Draw into ``image_output/``; returns the path."""
    path = output / "image_output" / NAME
    style.save(figure(found), path)
    return path


def section(found: Calibration) -> Section:
    """For the index of the report."""
    image = base64.b64encode(style.png(figure(found))).decode("ascii")
    sentences = (*lines(found), f"Measured on {found.hardware}, {spoken_date(found.date)}.")
    return Section(sentences=sentences, image=image, alt=found.verdict())


def figure(found: Calibration) -> Figure:
    """Ratios of single sets over time above, the smallest resolvable difference against minutes below."""
    truth = 1 / (1 + found.planted)
    above = Plot(
        lines=[
            *_sets(found, "itself", 1.0, found.null, found.null_ratios),
            *_sets(
                found, f"{100 * found.planted:.0f} % more work", truth, found.planted_estimate, found.planted_ratios
            ),
        ],
        heading="What each set read",
        x_label="minutes since the first set",
        y_label="speed relative to the baseline",
        from_zero=False,
    )
    told = ", ".join(f"{m} min: {'none' if v is None else f'{100 * v:.2g} %'}" for m, v in found.resolvable.items())
    context = [
        found.hardware,
        found.date[:16].replace("T", " "),
        f"{phrases.plural(found.sets, 'set')} of {found.seconds_per_set:.1f} s",
        f"steps of {phrases.seconds(found.step_seconds)}",
    ]
    return draw(
        [above, _resolvable(found)],
        title=found.verdict(),
        context=style.SEPARATOR.join(context),
        note="The same work was measured against itself, and with more work planted. Dots: single sets; shades: 95 % "
        f"interval of the geometric mean; dashed: the truth, below what fine measuring needs. Resolved in {told}.",
    )


def _sets(found: Calibration, name: str, truth: float, estimate: Estimate, ratios: tuple[float, ...]) -> list[Line]:
    colour, ends = style.SERIES[name != "itself"], [0.0, max(1e-3, *found.minutes)]
    low, high = ([estimate.low] * 2, [estimate.high] * 2) if math.isfinite(estimate.low) else ((), ())
    return [
        Line(name="", x=ends, y=[truth] * 2, low=low, high=high, colour=colour, look="--", shade=True, width=1.0),
        Line(name=name, x=found.minutes, y=ratios, colour=colour, look="o"),
    ]


def _resolvable(found: Calibration) -> Plot:
    """The smallest difference that so many minutes resolve, and what a machine must resolve that is fit to measure."""
    minutes = np.geomspace(0.5, 60, 200)
    counts = [int(m * 60 / found.seconds_per_set) if found.seconds_per_set else 0 for m in minutes]
    effects = np.array([decisions.resolvable(found.noise, n) for n in counts])
    known = [(m, v) for m, v in found.resolvable.items() if v is not None]
    shown = np.isfinite(effects) & (effects <= 1.15 * max([2 * FINE, *(v for _, v in known)]))
    return Plot(
        lines=[
            Line(name="", x=minutes[shown], y=100 * effects[shown], colour=style.INK, look="-"),
            Line(name="", x=[m for m, _ in known], y=[100 * v for _, v in known], colour=style.INK, look="o"),
        ],
        heading="Smallest difference that is resolved",
        x_label="minutes of measuring",
        y_label="difference, %",
        log_x=True,
        ticks=[0.5, 1, 2, 5, 10, 20, 60],
        level=100 * FINE,
        height=1.9,
    )
