"""How fast ranks exchange: time and bus bandwidth of an all-reduce against its message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import links, phrases
from ddpm_lab.explain.frames import Study

_RIGHT, _PANEL = 1.75, 2.5  # inches beside the panels, and their height


def exchange(study: Study, title: str) -> Figure | None:
    """Time and bus bandwidth of an all-reduce against the size of its message; None where none was measured."""
    found = links.exchanges(study)
    if not found:
        return None
    figure, axes = fs.sheet(
        title,
        phrases.context(study),
        [_PANEL, _PANEL],
        headings=["Time of an all-reduce", "Bus bandwidth"],
        left=0.95,
        right=_RIGHT,
        gap=0.3,
        note="Geometric mean over sets. Bus bandwidth: 2 (N - 1) / N of the message over the time, "
        "to be held against the link's own whatever the number of ranks.",
    )
    for i, name in enumerate(dict.fromkeys(e.ranks_name for e in found)):
        shown = [e for e in found if e.ranks_name == name]
        look: dict[str, Any] = {"color": fs.PALETTE[i % len(fs.PALETTE)], "marker": fs.MARKERS[i % len(fs.MARKERS)]}
        messages = [e.message_bytes for e in shown]
        axes[0].plot(messages, [1e3 * e.seconds for e in shown], lw=1.3, ms=6, **look)
        axes[1].plot(messages, [1e-9 * e.bus_bandwidth for e in shown], lw=1.3, ms=6, **look)
        to, y = axes[0].transAxes, 0.96 - 0.28 * i / _PANEL
        axes[0].plot([1.04], [y], transform=to, ms=6, clip_on=False, **look)
        axes[0].text(1.075, y, name, transform=to, va="center", fontsize=fs.SMALL_POINTS)
    sizes = sorted({e.message_bytes: e.message for e in found}.items())
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_minor_locator(NullLocator())
        kept = _apart([size for size, _ in sizes], 2.0)
        ax.set_xticks([size for size, _ in sizes if size in kept], [name for size, name in sizes if size in kept])
        ax.set_yscale("log")
        ax.set_ylim(top=1.5 * ax.get_ylim()[1])
        low, high = ax.get_ylim()
        ax.yaxis.set_major_locator(LogLocator(10, subs=(1, 2, 5) if high < 300 * low else (1,), numticks=8))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes[0].tick_params(axis="x", labelbottom=False)
    axes[0].set_ylabel("milliseconds")
    axes[1].set_ylabel("GB/s")
    axes[1].set_xlabel("message")
    return figure


def _apart(sizes: Sequence[int], octaves: float) -> list[int]:
    """Sizes that lie far enough from each other to be labelled."""
    kept: list[int] = []
    for size in sizes:
        if not kept or math.log2(size / kept[-1]) >= octaves:
            kept.append(size)
    return kept
