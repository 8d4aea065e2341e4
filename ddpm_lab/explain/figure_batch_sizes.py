"""The largest batch that fits, and how fast and with how much memory each size trains."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ddpm_lab.explain import phrases
from ddpm_lab.explain.batch_sizes import CAVEAT, EXPERIMENT, Sizes, sizes
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.lines import Line, Plot, lines
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def beside(study: Study) -> Figure | None:
    """The figure of the batch sizes among the records of all experiments, under the largest batch as its title."""
    own = replace(study, experiment=EXPERIMENT, records=tuple(r for r in study.records if r.experiment == EXPERIMENT))
    return figure(own)


def figure(study: Study, title: str = "") -> Figure | None:
    """Images per second, and peak memory, against the batch size, with the largest that fits and why no more.

    The largest batch is the title where none is given, and where no size was compared with another.
    """
    found = [s for s in sizes(study) if s.tries or s.rows]
    if not found:
        return None
    if not title or not any(s.rows for s in found):
        title = phrases.begun("; ".join(s.words().partition(" (")[0] for s in found))
    plots = [plot(s) for s in found for plot, has in ((_speed, s.rows), (_memory, s.tries)) if has]
    ends = "; ".join(f"{s.family}: {s.words()}" if len(found) > 1 else s.words() for s in found if s.end)
    return lines(
        plots,
        title=title,
        context=phrases.context(study, batch=False),
        note="Speed: the smallest batch's times each ratio to it, with its 95 % interval over sets; band: the smallest "
        "batch repeated. Memory: peak of each size, alone; a cross did not fit. "
        f"{f'Dashed: {ends}. ' if ends else ''}{CAVEAT}",
    )


def _speed(known: Sizes) -> Plot:
    rate, rows = known.rows[0].images_per_second, known.rows
    noise = known.rows[0].noise
    line = Line(
        name="",
        x=[c.batch for c in rows],
        y=[rate * c.ratio.value for c in rows],
        low=[rate * c.ratio.low for c in rows],
        high=[rate * c.ratio.high for c in rows],
        colour=style.INK,
        look="o-",
    )
    band = (rate * noise.low, rate * noise.high) if noise.exists else None
    return _plot(known, [line], "training speed", "images per second", band)


def _memory(known: Sizes) -> Plot:
    peaks = {r.config.global_batch_size: _peak_bytes(r) / 2**30 for r in known.tries if r.status == "ok"}
    fits = {batch: peak for batch, peak in peaks.items() if not math.isnan(peak)}
    top = 1.15 * max(fits.values(), default=1.0)
    lost = [r.config.global_batch_size for r in known.tries if r.status != "ok"]
    series = [Line(name="", x=list(fits), y=list(fits.values()), colour=style.INK, look="o-")]
    series += [Line(name="", x=lost, y=[top] * len(lost), colour=style.INK, look="x")] if lost else []
    return _plot(known, series, "memory at the peak, each size alone", "GiB", None)


def _plot(known: Sizes, series: list[Line], heading: str, label: str, band: tuple[float, float] | None) -> Plot:
    batches = sorted({*(r.config.global_batch_size for r in known.tries), *(c.batch for c in known.rows)})
    powers = [2.0**k for k in range(int(math.log2(batches[0])), int(math.log2(batches[-1])) + 1)]
    return Plot(
        lines=series,
        heading=f"{known.family}: {heading}",
        x_label="global batch size, images a step",
        y_label=label,
        log_x=True,
        ticks=[p for p in powers if p >= batches[0]],
        band=band,
        at=known.largest or None,
        height=2.3,
    )


def _peak_bytes(record: RunRecord) -> float:
    """On CUDA what the fullest rank's allocator held, on a CPU what all ranks together held in main memory."""
    cuda = record.config.device == "cuda"
    held = [r.peak_reserved_bytes if cuda else r.peak_rss_bytes for r in record.ranks]
    values = [float(v) for v in held if v is not None]
    return math.nan if not values or len(values) < len(held) else max(values) if cuda else sum(values)
