"""How fast ranks exchange: bus bandwidth of an all-reduce against its message."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpm_lab.explain import links, phrases
from ddpm_lab.explain.charts.lines import Line, Plot, lines
from ddpm_lab.explain.frames import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def exchange(study: Study, title: str) -> Figure | None:
    """Bus bandwidth of an all-reduce against the size of its message; None where none was measured."""
    found = links.exchanges(study)
    if not found:
        return None
    series = []
    for name in dict.fromkeys(e.ranks_name for e in found):
        shown = [e for e in found if e.ranks_name == name]
        bandwidth = [1e-9 * e.bus_bandwidth for e in shown]
        series.append(Line(name=name, x=[e.message_bytes for e in shown], y=bandwidth))
    sizes = sorted({e.message_bytes: e.message for e in found}.items())
    plot = Plot(
        lines=series,
        x_label="message",
        y_label="bus bandwidth, GB/s",
        log_x=True,
        log_y=True,
        ticks=[size for size, _ in sizes],
        names=[name for _, name in sizes],
        height=3.0,
    )
    return lines(
        [plot],
        title=title,
        context=phrases.context(study),
        note="Geometric mean over sets. Bus bandwidth: 2 (N - 1) / N of the message over the time, to be held against "
        "the link's own whatever the number of ranks.",
    )
