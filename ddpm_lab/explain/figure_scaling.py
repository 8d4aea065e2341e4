"""Figures of strong and weak scaling, each in panels of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ddpm_lab.explain import phrases, scaling
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.bars import bars
from ddpm_lab.explain.charts.lines import Line, Plot, lines
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.figure_ratios import measured, projection, timed
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.scaling import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MANY = 16
"""Ranks above which axes are logarithmic."""


def speed_up(study: Study) -> Figure | None:
    """Speed-up against the number of ranks, one line a family, with the ideal line; None below three numbers."""
    families = _families(study)
    plots = []
    for kind in KINDS:
        shown = [rows for rows in families if rows[0].scaling == kind]
        hosts = {c.ranks: c.config.nodes for rows in shown for c in rows}
        ranks = sorted(hosts)
        if len(ranks) < 3:
            continue
        ideal = Line(name="ideal", x=[1, ranks[-1]], y=[1, ranks[-1]], colour=style.SOFT, look="--", width=1.4)
        plots.append(
            Plot(
                lines=[ideal, *map(_line, shown)],
                heading=f"{kind.capitalize()} scaling: {KINDS[kind]}",
                x_label=_unit(families),
                y_label=f"speed relative to {shown[0][0].baseline_label}",
                ticks=ranks,
                names=[f"{n}\n{hosts[n]} hosts" if hosts[n] > 1 else str(n) for n in ranks],
                log_x=ranks[-1] > _MANY,
                log_y=ranks[-1] > _MANY,
                height=3.2,
            )
        )
    if not plots:
        return None
    return lines(
        plots,
        title=f"Speed-up against the number of {_unit(families)}",
        context=phrases.context(study),
        note=f"{_shared(study, families)}Upright lines: 95 % interval over sets. Speeds are for equal images.",
    )


def _line(rows: Sequence[Comparison]) -> Line:
    low, high = [c.ratio.low for c in rows], [c.ratio.high for c in rows]
    name = rows[0].family.rpartition(", ")[0]
    return Line(name=name, x=[c.ranks for c in rows], y=[c.ratio.value for c in rows], low=low, high=high)


def efficiency(study: Study) -> Figure | None:
    """Parallel efficiency as bars, with the line from where on scaling is called good.

    None where ranks share a CPU and there are fewer than three numbers of them: the answer's figure says as much.
    """
    families, bands = _families(study), study.bands
    if not families or (_unit(families) == "CPU ranks" and max(map(len, families)) < 3):
        return None

    def row(c: Comparison) -> Row:
        low, high = (100 * end for end in c.efficiency.ends)
        text = f"{scaling.efficiency(c)}, {scaling.band(c, bands)}"
        value = 100 * c.efficiency.value
        return Row(name=c.label, value=value, low=low, high=high, colour=style.SERIES[0], text=text)

    panels = [
        Panel(
            heading=rows[0].family,
            rows=[row(c) for c in rows if c.role != "baseline"],
            reference=100 * bands.threshold,
        )
        for rows in families
    ]
    return bars(
        panels,
        title=f"Parallel efficiency: speed-up divided by the number of {_unit(families)}",
        context=phrases.context(study),
        label="parallel efficiency, %",
        note=f"{scaling.legend(bands)}Line: 95 % interval over sets. {_shared(study, families)}",
    )


def by_batch(study: Study) -> Figure | None:
    """Time for 50,000 images against the batch size, one line a number of ranks; None below three sizes."""
    every = [c for rows in measured(study) for c in rows]
    if not every:
        return None
    unit, time_of = projection(every)
    bases = {(c.family, c.baseline_id): c for c in every if c.role == "baseline"}
    plots = []
    for kind in KINDS:
        rows = sorted((c for c in every if c.scaling == kind), key=lambda c: (c.config.device, c.ranks, _batch(c)))
        batches = sorted({_batch(c) for c in rows})
        if len(batches) < 3:
            continue
        found: dict[str, list[Comparison]] = {}
        for c in rows:
            found.setdefault(f"{scaling.layout(c.config)}, {c.config.image_size} px", []).append(c)
        label = "global batch size, images a step" if kind == "strong" else "images a step on each rank"
        series = [
            timed(rows, lambda c, _: time_of(c, bases.get((c.family, c.baseline_id))), _batch, name)
            for name, rows in found.items()
        ]
        heading = f"{kind.capitalize()} scaling: {KINDS[kind]}"
        plots.append(Plot(lines=series, heading=heading, x_label=label, y_label=unit, log_x=True, ticks=batches))
    if not plots:
        return None
    return lines(
        plots,
        title="Time for 50,000 images against the batch size",
        context=phrases.context(study, batch=False),
        note="A projection from timed steps, without start-up; upright lines: 95 % interval of the ratio to one rank.",
    )


def layouts(study: Study) -> Figure | None:
    """Images per second of CPU, GPUs and hosts, wherever they did equal work; None for one kind alone."""
    groups: dict[tuple[object, ...], dict[str, Comparison]] = {}
    for c in sorted((c for rows in measured(study) for c in rows if c.scaling == "strong"), key=lambda c: c.sets):
        work = (c.config.work_name, c.config.image_size, c.config.global_batch_size, c.config.data_sha256)
        groups.setdefault(work, {})[f"{scaling.layout(c.config)}, {c.config.precision}"] = c
    panels = []
    for (name, size, batch, _), found in groups.items():
        if len({(c.config.device, c.config.nodes) for c in found.values()}) > 1:
            ordered = sorted(
                found.items(), key=lambda item: (item[1].config.device, item[1].config.nodes, item[1].ranks)
            )
            rows = [
                Row(name=label, value=rate, colour=style.SERIES[0], text=phrases.significant(rate))
                for label, rate in ((label, c.images_per_second) for label, c in ordered)
            ]
            panels.append(Panel(heading=f"{name}, batch {batch}, {size} px", rows=rows))
    if not panels:
        return None
    return bars(
        panels,
        title="Images per second of equal work on each device",
        context=phrases.context(study),
        label="images per second",
        note="Geometric mean over sets. Speeds of different hours also differ by the machine.",
    )


def _families(study: Study) -> list[list[Comparison]]:
    """Families that hold more than the baseline, by image size and batch, each by its numbers of ranks."""
    found = [sorted(rows, key=lambda c: (c.ranks, c.config.nodes)) for rows in measured(study) if len(rows) > 1]
    return sorted(found, key=lambda rows: (rows[0].scaling or "", rows[0].config.image_size, rows[0].batch))


def _batch(c: Comparison) -> int:
    """Images of a step: of all ranks in strong scaling, of one in weak."""
    return int(c.config.rank_batch_size if c.scaling == "weak" else c.batch)


def _unit(families: Sequence[Sequence[Comparison]]) -> str:
    devices = {c.config.device for rows in families for c in rows}
    return "GPUs" if devices == {"cuda"} else "CPU ranks" if devices == {"cpu"} else "ranks"


def _shared(study: Study, families: Sequence[Sequence[Comparison]]) -> str:
    if _unit(families) == "GPUs":
        return ""
    rows = [c for found in families for c in found]
    return f"{scaling.shared_cores(study, rows)}; the ideal is that of ranks with devices of their own. "
