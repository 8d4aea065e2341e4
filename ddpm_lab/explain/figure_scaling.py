"""Figures of strong and weak scaling, each in panels of its own: speed-up, efficiency, time, throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import phrases, scaling
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.figure_extras import (
    Rows,
    bar_panels,
    bars,
    known,
    measured,
    projection,
    speed,
    spread,
    throughput_bars,
)
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.scaling import KINDS
from ddpm_lab.explain.stats import Interval

_LABEL_LINE = 0.22  # inches from one label at the end of a line to the next
_NAMES = 2.6  # inches for the names of lines
_MANY = 16  # ranks from which on an axis of equal steps has no room for the small numbers
_INTERVALS = "Vertical lines: 95 % interval over sets. "

Lines = dict[str, Rows]
Values = Callable[[Comparison], Interval]


def speed_up(study: Study) -> Figure | None:
    """Speed-up against the number of ranks, one line a family, with the ideal line."""
    kinds = _by_family(study)
    if not kinds:
        return None
    unit = _unit(kinds)
    figure, axes = fs.sheet(
        f"Speed-up against the number of {unit}",
        phrases.context(study),
        sizes := [max(4.2 if len(kinds) == 1 else 3.2, _LABEL_LINE * len(lines)) for lines in kinds.values()],
        headings=[f"{kind.capitalize()} scaling: {KINDS[kind]}" for kind in kinds],
        left=0.85,
        right=_NAMES,
        gap=0.62,
        note=_shared_cores(study, kinds) + _INTERVALS + "Speeds compare equal numbers of images.",
    )
    for ax, height, lines in zip(axes, sizes, kinds.values(), strict=True):
        every = [r for rows in lines.values() for r in rows]
        ranks = _rank_axis(ax, every)
        top = max(known(r.ratio.high, r.ratio.value) for r in every)
        ceiling = 1.08 * max(top, min(ranks[-1], 2 * top))
        if ranks[-1] > _MANY:
            least = min(min(known(r.ratio.low, r.ratio.value), r.ratio.value) for r in every)
            ax.set_yscale("log", base=2)
            ceiling = 1.1 * max(top, ranks[-1])
            ax.set_ylim(min(0.8, least / 1.1), ceiling)
            ax.yaxis.set_minor_locator(NullLocator())
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: fs.number(value)))
        else:
            ax.set_ylim(0, ceiling)
        ax.plot([1, ranks[-1]], [1, ranks[-1]], "--", color=fs.SOFT, lw=1.4, zorder=1)
        at = 1 + 0.72 * (min(ranks[-1], ceiling) - 1)
        # On the side of the line where the points are not.
        above = all(r.ratio.value <= r.ranks for r in every)
        beside, side, edge = (0.03, "right", "bottom") if above else (-0.03, "left", "top")
        ax.text(at, at + beside * ceiling, "ideal", color=fs.SOFT, ha=side, va=edge)
        _lines(
            ax,
            height,
            lines,
            x=lambda r: r.ranks,
            values=lambda r: r.ratio,
            name=lambda name, r: f"{name}: {phrases.ratio(r)}",
        )
        base = next(iter(lines.values()))[0].baseline_label
        ax.set_ylabel(fs.fit(f"speed relative to {base}", height, 1, fs.TEXT_POINTS))
    axes[-1].set_xlabel(unit)
    return figure


def efficiency(study: Study) -> Figure | None:
    """Parallel efficiency as bars over the bands, with the line from where on scaling is called good."""
    kinds, bands = _by_family(study), study.bands
    panels = [[r for r in rows if r.role != "baseline"] for lines in kinds.values() for rows in lines.values()]
    panels = [rows for rows in panels if rows]
    if not panels:
        return None
    most = max(1.05, *(known(r.efficiency.high, r.efficiency.value) for rows in panels for r in rows))

    def text(row: Comparison) -> str:
        return f"{scaling.efficiency(row)}, {scaling.band(row, bands)}"

    def draw(ax: Axes, rows: Rows) -> None:
        bars(ax, rows, [fs.PALETTE[0]] * len(rows), lambda r: r.efficiency, text, scale=100)
        for i, (_, bound) in enumerate(bands.table):
            above = bands.table[i - 1][1] if i else 1.02 * most
            ax.axvspan(100 * bound, 100 * above, color=fs.BAND, alpha=0.55 * (i % 2), lw=0, zorder=0)
        ax.axvline(100 * bands.threshold, color=fs.INK, lw=1.2, ls="--")
        ax.set_xlim(0, 102 * most)

    title = "Parallel efficiency: speed-up divided by the number of " + _unit(kinds)
    note = scaling.legend(bands) + "Line: 95 % interval over sets. " + _shared_cores(study, kinds)
    headings = [rows[0].family for rows in panels]
    label = "parallel efficiency, %"
    return bar_panels(title, study, panels, headings=headings, note=note, draw=draw, label=label)


def by_ranks(study: Study) -> Figure | None:
    """Time for 50,000 images, and throughput, against the number of ranks: one line a batch size."""
    kinds = _by_family(study)
    if not kinds:
        return None
    unit = _unit(kinds)

    def ranks(ax: Axes, rows: Rows) -> None:
        _rank_axis(ax, rows)
        ax.set_xlabel(unit)

    return _time_and_throughput(study, kinds, f"against the number of {unit}", ranks, lambda r: r.ranks)


def by_batch(study: Study) -> Figure | None:
    """Time for 50,000 images, and throughput, against the batch size: one line a number of ranks."""
    kinds: dict[str, Lines] = {}
    for kind in KINDS:
        rows = [r for panel in measured(study) for r in panel if r.scaling == kind]
        several = len({r.config.image_size for r in rows}) > 1
        lines: Lines = {}
        for row in sorted(rows, key=lambda r: (r.config.image_size, r.config.device, r.ranks, _x_batch(r))):
            size = f", {row.config.image_size} px" if several else ""
            lines.setdefault(scaling.layout(row.config) + size, []).append(row)
        if len({_x_batch(r) for r in rows}) > 1:
            kinds[kind] = lines
    if not kinds:
        return None

    def batches(ax: Axes, rows: Rows) -> None:
        shown = sorted({_x_batch(r) for r in rows})
        _logarithmic(ax, shown[0], shown[-1])
        fs.fixed_ticks(ax.xaxis, shown, ".0f")
        strong = rows[0].scaling == "strong"
        ax.set_xlabel("global batch size, images a step" if strong else "images a step on each rank")

    return _time_and_throughput(study, kinds, "against the batch size", batches, _x_batch, batch=False)


def layouts(study: Study) -> Figure | None:
    """Images per second of CPU, one GPU, several and hosts, side by side wherever they did equal work."""
    groups: dict[tuple[object, ...], dict[tuple[str, str], Comparison]] = {}
    for row in (r for rows in measured(study) for r in rows if r.scaling == "strong"):
        config = row.config
        work = (config.work_name, config.image_size, config.global_batch_size, config.data_sha256)
        name = scaling.layout(config)
        known_row = groups.setdefault(work, {}).get((name, config.precision))
        if known_row is None or row.sets > known_row.sets:
            groups[work][name, config.precision] = replace(row, label=name)
    panels = [_told_apart(list(rows.values())) for rows in groups.values() if len(rows) > 1]
    if not panels:
        return None
    headings = [f"{r.config.work_name}, batch {r.batch}{_pixels(r)}" for r, *_ in panels]
    return throughput_bars("Images per second of equal work on each device", study, panels, headings, _colour)


def _told_apart(rows: Rows) -> Rows:
    """Rows from the smallest to the largest machine; where several precisions were measured, each says its own."""
    several = len({r.config.precision for r in rows}) > 1
    ordered = sorted(rows, key=lambda r: (r.config.device, r.config.nodes, r.ranks))
    return [replace(r, label=f"{r.label}, {r.config.precision}") for r in ordered] if several else ordered


def _colour(row: Comparison) -> int:
    if row.config.device == "cpu":
        return 1
    return 2 if row.config.nodes > 1 else 0


def _pixels(row: Comparison) -> str:
    size = row.config.image_size
    return "" if row.config.is_own else f", {size}\N{MULTIPLICATION SIGN}{size} images"


def _by_family(study: Study) -> dict[str, Lines]:
    """Families that hold more than the baseline, by kind of scaling, under short names, by batch size."""
    panels = [sorted(rows, key=_size) for rows in measured(study) if len(rows) > 1]
    panels.sort(key=lambda rows: (rows[0].config.image_size, rows[0].batch))
    found: dict[str, Lines] = {}
    for kind in KINDS:
        mine = [rows for rows in panels if rows[0].scaling == kind]
        for rows in mine:
            lines, name = found.setdefault(kind, {}), _short(rows[0], mine)
            lines[name if name not in lines else rows[0].family] = rows
    return found


def _every(kinds: dict[str, Lines]) -> Rows:
    return [r for lines in kinds.values() for rows in lines.values() for r in rows]


def _size(row: Comparison) -> tuple[int, int]:
    return row.ranks, row.config.nodes


def _short(base: Comparison, panels: Sequence[Rows]) -> str:
    """The part of a family's name that differs: its batch size where that is all."""
    sizes = {p[0].config.image_size for p in panels}
    name = f"batch {base.batch}" + " per rank" * (base.scaling == "weak")
    return name if len(sizes) == 1 else f"{base.config.image_size} px, {name}"


def _x_batch(row: Comparison) -> int:
    """Images of a step: of all ranks in strong scaling, of one in weak."""
    return int(row.config.rank_batch_size if row.scaling == "weak" else row.batch)


def _unit(kinds: dict[str, Lines]) -> str:
    devices = {r.config.device for r in _every(kinds)}
    return "GPUs" if devices == {"cuda"} else "CPU ranks" if devices == {"cpu"} else "ranks"


def _shared_cores(study: Study, kinds: dict[str, Lines]) -> str:
    if _unit(kinds) == "GPUs":
        return ""
    return f"{scaling.shared_cores(study, _every(kinds))}; the ideal is that of ranks with devices of their own. "


def _rank_axis(ax: Axes, rows: Rows) -> list[int]:
    """An axis of numbers of ranks, which names the hosts where there are several; the numbers."""
    ranks = sorted({r.ranks for r in rows})
    first, last = ranks[0], ranks[-1]
    spread_over = {r.ranks: r.config.nodes for r in sorted(rows, key=_size)}
    if last > _MANY:
        _logarithmic(ax, first, last)
    else:
        ax.set_xlim(first - 0.1 * (last - first), last + 0.08 * (last - first))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_locator(FixedLocator(ranks))
    names = [f"{n}\n{phrases.plural(spread_over[n], 'host')}" if spread_over[n] > 1 else str(n) for n in ranks]
    ax.set_xticklabels(names)
    return ranks


def _logarithmic(ax: Axes, first: float, last: float) -> None:
    """Powers of two on the axis, with room at the ends for lines that are shifted apart."""
    ax.set_xscale("log", base=2)
    room = (last / first) ** 0.07
    ax.set_xlim(first / room, last * room)


def _lines(
    ax: Axes,
    height: float,
    lines: Lines,
    *,
    x: Callable[[Comparison], float],
    values: Values,
    name: Callable[[str, Comparison], str],
) -> None:
    """Lines with intervals in a panel of ``height`` inches whose limits are set; names stand at the right."""
    to_axes = ax.transScale + ax.transLimits
    ends = []
    for i, rows in enumerate(lines.values()):
        colour = fs.PALETTE[i % len(fs.PALETTE)]
        # A small shift keeps the intervals of several lines apart.
        shift = min(0.012, 0.1 / len(lines)) * (i - (len(lines) - 1) / 2)
        points = [(x(r), values(r)) for r in rows]
        places = [to_axes.transform((at, value.value)) for at, value in points]
        shifted = [to_axes.inverted().transform((place[0] + shift, place[1]))[0] for place in places]
        for at, (_, value) in zip(shifted, points, strict=True):
            if value.exists:
                ax.plot([at, at], value.ends, color=colour, lw=2, alpha=0.6)
        ax.plot(shifted, [value.value for _, value in points], marker=fs.MARKERS[i % 8], ms=6, lw=1.8, color=colour)
        ends.append(float(places[-1][1]))
    for i, ((short, rows), y) in enumerate(zip(lines.items(), spread(ends, _LABEL_LINE / height, 1.0), strict=True)):
        colour = fs.PALETTE[i % len(fs.PALETTE)]
        ax.plot([1.03], [y], fs.MARKERS[i % 8], transform=ax.transAxes, color=colour, ms=6, clip_on=False)
        text = fs.fit(name(short, rows[-1]), _NAMES - 0.5, 1)
        ax.text(1.055, y, text, transform=ax.transAxes, va="center", fontsize=fs.SMALL_POINTS)


def _time_and_throughput(
    study: Study,
    kinds: dict[str, Lines],
    against: str,
    axis: Callable[[Axes, Rows], None],
    x: Callable[[Comparison], float],
    *,
    batch: bool = True,
) -> Figure:
    """Two panels for each kind of scaling, over an axis that ``axis`` sets for its rows."""
    unit, time = projection(_every(kinds))
    shown = (
        ("time for 50,000 images", f"{unit} (projected)", time),
        ("throughput", "images per second", speed),
    )
    panels = [(kind, lines, *show) for kind, lines in kinds.items() for show in shown]
    figure, axes = fs.sheet(
        f"Time for 50,000 images, and throughput, {against}",
        phrases.context(study, batch=batch),
        sizes := [max(2.5, _LABEL_LINE * len(lines)) for _, lines, *_ in panels],
        headings=[f"{kind.capitalize()} scaling ({KINDS[kind]}): {what}" for kind, _, what, _, _ in panels],
        left=1.15,
        right=_NAMES,
        gap=0.62,
        note="The time is a projection from short timed windows, without start-up.",
    )
    for ax, height, (_, lines, _, label, values) in zip(axes, sizes, panels, strict=True):
        rows = [r for found in lines.values() for r in found]
        axis(ax, rows)
        ax.set_ylim(0, 1.08 * max(values(r).value for r in rows))
        fs.plain_numbers(ax.yaxis, 6)
        _lines(ax, height, lines, x=x, values=values, name=lambda name, _: name)
        ax.set_ylabel(label)
    return figure
