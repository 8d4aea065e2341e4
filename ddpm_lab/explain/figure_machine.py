"""The machine over a run: what neighbours took, and each configuration's memory, clock and power, turn by turn."""

from __future__ import annotations

import math
from collections.abc import Callable

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import phrases
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.machine_state import NOT_AVAILABLE, Moment, moments, unknown
from ddpm_lab.record import CROWDED_CORES

_NAMED = 7  # configurations with a colour and a name; further ones are grey

Value = Callable[[Moment], float | None]


def _state(name: str, unit: float = 1.0) -> Value:
    return lambda moment: None if (known := moment.state.get(name)) is None else known / unit


_PANELS: tuple[tuple[str, str, Value], ...] = (
    ("Memory of the largest rank (resident set, RSS)", "MiB", _state("rss_bytes", 2**20)),
    ("GPU memory allocated by the largest rank", "MiB", _state("allocated_bytes", 2**20)),
    ("GPU clock, lowest", "MHz", _state("gpu_clock_min_mhz")),
    ("Power of a group's GPUs", "W", _state("gpu_power_watts")),
)


def over_the_run(study: Study) -> Figure | None:
    """What neighbours took and what the configurations held in each turn; None for records that tell of the former
    alone, as those of older versions do.
    """
    found = [m for m in moments(study) if m.record.windows]
    panels = [panel for panel in _PANELS if any(panel[2](m) is not None for m in found)]
    if not panels:
        return None
    if len(panels) > 1 and panels[1] is _PANELS[1]:
        del panels[0]  # a GPU's own memory is what a configuration runs out of
    labels = list(dict.fromkeys(m.record.label for m in found if m.record.role != "twin"))
    colours = {label: fs.PALETTE[i] if i < _NAMED else fs.FAINT for i, label in enumerate(labels)}
    note = "One window of every configuration is a turn; sets follow each other. "
    note += (
        f"Dashed: {CROWDED_CORES} cores. Cross: a set in which other processes took cores that it needed in more than "
    )
    note += f"a fifth of its turns; it does not count.{unknown(study)}"
    figure, axes = fs.sheet(
        "The machine while it was measured",
        phrases.context(study),
        [1.3] + [1.5] * len(panels),
        headings=["Cores kept busy by other processes, at most in a window", *(heading for heading, _, _ in panels)],
        left=0.85,
        right=2.5,
        gap=0.25,
        note=note,
    )
    _neighbours(axes[0], found)
    for ax, (_, unit, value) in zip(axes[1:], panels, strict=True):
        # In each set a configuration's processes are new, and its line begins anew: a line each would take seconds.
        runs: dict[str, dict[str, list[tuple[float, float]]]] = {}
        for m in found:
            if m.record.label in colours and (known := value(m)) is not None:
                sets = runs.setdefault(m.record.label, {})
                sets.setdefault(m.record.set_id, []).append((m.turn, known))
        for label, sets in runs.items():
            points = [point for run in sets.values() for point in [*run, (math.nan, math.nan)]]
            ax.plot(*zip(*points, strict=True), color=colours[label], lw=1.5, marker="o", ms=2.5)
        ax.set_ylabel(unit)
        ax.set_ylim(0, 1.2 * ax.dataLim.y1 or 1)
    for ax in axes:
        ax.set_xlim(0.5, found[-1].turn + 0.5)
        ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(4))
        ax.tick_params(axis="x", labelbottom=ax is axes[-1])
    for label in labels[:_NAMED]:
        axes[0].plot([], [], color=colours[label], lw=2.2, label=fs.fit(label, 1.9, 2))
    axes[0].legend(loc="upper left", bbox_to_anchor=(1.01, 1.05), frameon=False, fontsize=fs.SMALL_POINTS)
    axes[-1].set_xlabel("turn, counted over all sets")
    return figure


def _neighbours(ax: Axes, found: list[Moment]) -> None:
    taken: dict[int, float] = {}
    for m in found:
        if m.others_cores is not None:
            taken[m.turn] = max(taken.get(m.turn, 0.0), m.others_cores)
    if not taken:
        ax.text(0.5, 0.5, NOT_AVAILABLE, transform=ax.transAxes, ha="center", va="center", color=fs.SOFT)
    dropped = sorted({m.turn for m in found if m.disturbed})
    # One collection: a bar each would take seconds where a ledger holds thousands of turns.
    bars = [[(t - 0.35, 0), (t - 0.35, v), (t + 0.35, v), (t + 0.35, 0)] for t, v in taken.items()]
    ax.add_collection(PolyCollection(bars, facecolors=fs.FAINT, edgecolors="none"), autolim=False)
    ax.axhline(CROWDED_CORES, color=fs.INK, lw=1.0, ls="--")
    ax.plot(dropped, [0.9] * len(dropped), "x", transform=ax.get_xaxis_transform(), color=fs.INK, mew=1.6)
    ax.set_ylim(0, 1.3 * max([*taken.values(), CROWDED_CORES]))
    ax.set_ylabel("cores")
