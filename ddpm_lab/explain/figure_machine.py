"""The memory, clock and power of each configuration over the run, turn by turn."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ddpm_lab.explain import phrases
from ddpm_lab.explain.charts.lines import Line, Plot, lines
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.machine_state import Moment, moments

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PANELS = (
    ("rss_bytes", 2**20, "Memory of the largest rank (resident set, RSS)", "MiB"),
    ("allocated_bytes", 2**20, "GPU memory allocated by the largest rank", "MiB"),
    ("gpu_clock_min_mhz", 1, "GPU clock, lowest", "MHz"),
    ("gpu_power_watts", 1, "Power of a group's GPUs", "W"),
)


def over_the_run(study: Study) -> Figure | None:
    """What the configurations held in each turn; None for records that say nothing of it."""
    found = [m for m in moments(study) if m.record.windows and m.record.role != "twin"]
    known = {panel[0] for panel in _PANELS if any(m.state.get(panel[0]) is not None for m in found)}
    if "allocated_bytes" in known:
        known.discard("rss_bytes")  # a GPU's own memory is what a configuration runs out of
    plots = [
        Plot(
            lines=_runs(found, name, size),
            heading=heading,
            x_label="turn, counted over all sets",
            y_label=unit,
            height=1.6,
        )
        for name, size, heading, unit in _PANELS
        if name in known
    ]
    if not plots:
        return None
    return lines(
        plots,
        title="Memory over the run" if len(plots) == 1 else "Memory, clock and power over the run",
        context=phrases.context(study),
        note="One window of every configuration is a turn. Each set has new processes, so lines begin anew.",
    )


def _runs(found: list[Moment], name: str, size: int) -> list[Line]:
    """One line a configuration, with a gap between sets."""
    runs: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for m in found:
        if (value := m.state.get(name)) is not None:
            runs.setdefault(m.record.label, {}).setdefault(m.record.set_id, []).append((m.turn, value / size))
    result = []
    for label, sets in runs.items():
        points = [point for run in sets.values() for point in [*run, (math.nan, math.nan)]]
        result.append(Line(name=label, x=[x for x, _ in points], y=[y for _, y in points], look=".-"))
    return result
