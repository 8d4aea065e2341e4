"""How many times as fast this trainer is as others, what each of its settings is worth, and how far the limit is."""

from __future__ import annotations

import math

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import limits, peers, phrases, quality
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import SAMPLING

_ROW, _VERSUS = 0.6, 2.75  # inches for a row, and for what stands beside it


def figure(study: Study, title: str) -> Figure | None:
    """One row for each other trainer: how many times as fast this one is; None where none has a speed."""
    rows = [r for r in peers.rows(study) if r.sets]
    if not rows:
        return None
    rows = sorted(rows, key=lambda r: (not peers.is_peer(r), peers.step_of(r), -r.ratio.value))
    note = "Time of the other trainer for equal images divided by this trainer's, with 95 % interval over sets. "
    base = peers.own(study)
    if base is not None:
        note += f"This trainer takes {phrases.throughput(base)}, {phrases.peak_memory(base)}. "
    note += "Quality is not measured."
    figure, (ax,) = fs.sheet(
        title,
        _context(study, [r for r in rows if SAMPLING not in r.label] or rows),
        [_height([_beside(r) for r in rows])],
        left=0.3 + max(fs.block_width(_name(r), fs.TEXT_POINTS) for r in rows),
        right=_VERSUS,
        note=note,
    )
    noise = next(((r.noise.low, r.noise.high) for r in rows if not math.isnan(r.noise.low)), None)
    _draw(ax, rows, [_name(r) for r in rows], [_beside(r) for r in rows], noise)
    ax.set_xlabel("this trainer is so many times as fast")
    return figure


def levers(study: Study) -> Figure | None:
    """One row for each setting put back alone: how fast the trainer then is; None where none is measured."""
    rows = sorted((r for r in peers.levers(study) if r.sets), key=lambda r: r.ratio.value)
    if not rows:
        return None
    names = [_name(r) for r in rows]
    beside = [_beside(r) for r in rows]
    note = "Speed of the trainer with one setting put back, relative to the trainer as it is by default: below 1 the "
    note += "default is faster. Point and bar: geometric mean and 95 % interval over sets; grey: the baseline repeated."
    figure, (ax,) = fs.sheet(
        "What each setting of the trainer is worth here",
        _context(study, rows),
        [_height(beside)],
        left=0.3 + max(fs.block_width(name, fs.TEXT_POINTS) for name in names),
        right=_VERSUS,
        note=note,
    )
    noise = (rows[0].noise.low, rows[0].noise.high)
    _draw(ax, rows, names, beside, None if math.isnan(noise[0]) else noise)
    ax.set_xlabel("speed relative to the default settings")
    return figure


def roofline(study: Study) -> Figure | None:
    """The time of an image: at the machine's peaks by kind of work, and measured; None where it was not measured."""
    base = peers.own(study)
    line = limits.roofline(study, base)
    if base is None or line is None:
        return None
    percent = f"{100 * line.flop_share:.0f} %"
    note = "Each kind of work takes the longer of its FLOP at the measured peak (the better of a large product and a "
    note += "convolution forward) and its bytes at the measured bandwidth. Caches can make bytes cheaper."
    if line.shares:
        note += " The measured time is split as a profile splits that of the operators"
        note += ", where attention's linear layers are convolutions" * (base.config.kernels == "fused") + "."
    peaks = (
        f"peak {phrases.significant(line.flops / 1e9)} GFLOP/s in {line.precision} "
        f"({phrases.significant(line.single_flops / 1e9)} in fp32), "
        f"{phrases.significant(line.bandwidth / 1e9)} GB/s in a copy"
    )
    figure, (ax,) = fs.sheet(
        f"{percent} of the peak; roofline limit {line.headroom:.1f} times as fast",
        f"{_context(study, [base])} \N{MIDDLE DOT} {peaks}",
        [1.5],
        left=2.35,
        right=0.4,
        bottom=1.05,
        note=note,
    )
    names = ["measured", "at peak, every kernel\nfor itself", "at peak, the rest free"]
    ax.barh([0], [1e3 * line.measured_seconds], color=fs.FAINT, height=0.6, lw=0)
    colours = {part.kind: fs.PALETTE[i % len(fs.PALETTE)] for i, part in enumerate(line.parts)}
    done = 0.0
    for kind, colour in colours.items():
        taken = 1e3 * line.measured_seconds * line.shares.get(kind, 0.0)
        ax.barh([0], [taken], left=done, color=colour, height=0.6, lw=0)
        done += taken
    for y, kinds in ((1, [p.kind for p in line.parts]), (2, [*limits.NEEDED, limits.OPTIMIZER])):
        left = 0.0
        for part in line.parts:
            if part.kind in kinds:
                label = part.kind if y == 1 else None
                ax.barh([y], [1e3 * part.seconds], left=left, color=colours[part.kind], height=0.6, lw=0, label=label)
                left += 1e3 * part.seconds
    ax.set_yticks(range(3), names)
    ax.set_ylim(2.5, -0.5)
    ax.grid(visible=False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.set_xlabel("milliseconds for an image")
    ax.legend(loc="upper center", bbox_to_anchor=(0.4, -0.36), ncols=6, frameon=False, fontsize=fs.SMALL_POINTS)
    return figure


def _name(row: Comparison) -> str:
    return fs.fit(row.label.replace("batch ", "batch\N{NO-BREAK SPACE}"), 2.6, 3, fs.TEXT_POINTS)


def _beside(row: Comparison) -> str:
    first = f"{phrases.throughput(row)}, {phrases.peak_memory(row)}"
    lines = [fs.fit(line, _VERSUS - 0.25, most) for most, line in enumerate((first, phrases.outcome(row)), 1)]
    judged = row.equivalence
    if judged.seeds:
        told = [f"quality {quality.sentence(judged)}", f"loss {quality.difference(judged)}"]
        lines += [fs.fit(line, _VERSUS - 0.25, 3) for line in told[: 1 + bool(quality.evidence(judged))]]
    return "\n".join(lines)


def _height(beside: list[str]) -> float:
    """Inches for the rows, of which the one with most lines beside it sets how high each is."""
    return (_ROW + fs.LINE * (max(text.count("\n") for text in beside) - 1)) * len(beside) + 0.1


def _context(study: Study, rows: list[Comparison]) -> str:
    """Of what is drawn."""
    return phrases.context(peers.drawn(study, rows))


def _draw(
    ax: Axes, rows: list[Comparison], names: list[str], beside: list[str], noise: tuple[float, float] | None
) -> None:
    if noise is not None:
        ax.axvspan(*noise, color=fs.BAND, lw=0, zorder=0)
    ax.axvline(1, color=fs.SOFT, lw=1)
    spans = [(r.ratio.value, r.ratio.low, r.ratio.high) for r in rows]
    between = [phrases.between(r.ratio, to=phrases.DASH) for r in rows]
    numbers = [
        f"{phrases.ratio(r)} \N{MULTIPLICATION SIGN}" + (f"  ({ends})" if ends else "")
        for r, ends in zip(rows, between, strict=True)
    ]
    blue = fs.PALETTE[0]
    fs.points(ax, names, spans, list(zip(numbers, beside, strict=True)), start=1, first=blue, others=blue)
    most = max(max(r.ratio.value, 0 if math.isnan(r.ratio.high) else r.ratio.high) for r in rows)
    ax.set_xlim(0, 1.05 * max(most, 1.0))
