"""How fast ranks exchange, and the steps that this predicts: predictions are hollow and dashed, measurements filled."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import link_fit, links, phrases, predicted, predicted_words
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.link_fit import NotEnoughData
from ddpm_lab.explain.links import Exchange
from ddpm_lab.explain.predicted import WORLD_SIZES, Basis
from ddpm_lab.explain.prediction import WIDEST, Prediction

_RIGHT, _PANEL = 2.15, 2.5  # inches beside the panels, and their height
_DASHES = {"ring": (0, (5, 2)), "tree": (0, (1.5, 1.5))}


def exchange(study: Study, title: str) -> Figure | None:
    """Time and bus bandwidth of an all-reduce against the size of its message; None where none was measured."""
    kinds = links.fitted(study)
    if not kinds:
        return None
    figure, axes = fs.sheet(
        title,
        phrases.context(study),
        [_PANEL, _PANEL],
        headings=["Time of an all-reduce", "Bus bandwidth"],
        left=0.95,
        right=_RIGHT,
        gap=0.3,
        note="Filled: measured, geometric mean and 95 % interval over sets. Dashed: the fitted link, 2 (N - 1) "
        "latencies and 2 (N - 1) / N of the message. Bus bandwidth: these bytes over the time, to be held against the "
        "link's own whatever the number of ranks.",
    )
    groups = [(kind, n) for kind in kinds.values() for n in sorted({e.ranks for e in kind.exchanges})]
    top = 1.0
    for i, (kind, ranks) in enumerate(groups):
        shown = [e for e in kind.exchanges if e.ranks == ranks]
        look: dict[str, Any] = {"color": fs.PALETTE[i % len(fs.PALETTE)], "marker": fs.MARKERS[i % len(fs.MARKERS)]}
        _curve(axes[0], shown, kind.link, look, lambda _, seconds: 1e3 * seconds)
        _curve(axes[1], shown, kind.link, look, lambda e, seconds: 1e-9 * e.passed_bytes / seconds)
        lines = [phrases.plural(ranks, "rank") + (f", {kind.where}" if len(kinds) > 1 else "")]
        if i == 0 or groups[i - 1][0] is not kind:
            lines += ["not enough data to fit a link"] if kind.link is None else _link(kind.link)
        to = axes[0].transAxes
        axes[0].plot([1.04], [top - 0.03], transform=to, ms=6, clip_on=False, **look)
        axes[0].text(1.075, top, "\n".join(lines), transform=to, va="top", fontsize=fs.SMALL_POINTS, linespacing=1.35)
        top -= (0.18 * len(lines) + 0.1) / _PANEL
    sizes = sorted({e.message_bytes: e.message for kind in kinds.values() for e in kind.exchanges}.items())
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.xaxis.set_minor_locator(NullLocator())
        kept = _apart([size for size, _ in sizes], 2.0)
        ax.set_xticks([size for size, _ in sizes if size in kept], [name for size, name in sizes if size in kept])
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(10, numticks=8))
        ax.yaxis.set_minor_formatter(NullFormatter())
        ax.set_ylim(top=1.5 * ax.get_ylim()[1])
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes[0].tick_params(axis="x", labelbottom=False)
    axes[0].set_ylabel("milliseconds")
    axes[1].set_ylabel("GB/s")
    axes[1].set_xlabel("message")
    return figure


def describe(study: Study) -> str:
    """The figure of exchanges in words, with its numbers."""
    listed = "; ".join(
        f"{phrases.plural(e.ranks, 'rank')}, {e.message}: {links.duration(e.seconds)}, "
        f"{links.bandwidth(e.bus_bandwidth)}"
        for e in links.exchanges(study)
    )
    return f"Chart of time and bus bandwidth of an all-reduce against its message. {listed}."


def _link(link: link_fit.Link) -> list[str]:
    (a_low, a_high), (b_low, b_high) = link.interval()
    return [
        f"latency {links.duration(link.alpha)}",
        f"  ({links.duration(a_low)} to {links.duration(a_high)})",
        f"bandwidth {links.bandwidth(1 / link.beta)}",
        f"  ({links.bandwidth(1 / b_high)} to {links.bandwidth(1 / b_low)})",
    ]


def _curve(
    ax: Axes,
    shown: Sequence[Exchange],
    link: link_fit.Link | None,
    look: dict[str, Any],
    value: Callable[[Exchange, float], float],
) -> None:
    """Measured points with their intervals, and the fitted link."""
    x = [e.message_bytes for e in shown]
    for e in shown:
        ends = [value(e, seconds) for seconds in (e.low, e.high)]
        fs.interval(ax, ends, e.message_bytes, upright=True, color=look["color"], lw=2.4, alpha=0.6)
    ax.plot(x, [value(e, e.seconds) for e in shown], ls="none", ms=6, **look)
    if link is not None:
        fitted = [value(e, link.seconds(e.ranks, e.message_bytes)) for e in shown]
        ax.plot(x, fitted, color=look["color"], lw=1.3, ls=_DASHES["ring"], zorder=1)


def _apart(sizes: Sequence[int], octaves: float) -> list[int]:
    """Sizes that lie far enough from each other to be labelled."""
    kept: list[int] = []
    for size in sizes:
        if not kept or math.log2(size / kept[-1]) >= octaves:
            kept.append(size)
    return kept


def steps(study: Study) -> Figure | None:
    """Predicted step time, throughput and efficiency against the number of ranks; None without any all-reduce."""
    if not study.exchanges:
        return None
    title = "Predicted: the step with more ranks than were measured"
    try:
        known = {algorithm: predicted.basis(study, algorithm=algorithm) for algorithm in link_fit.ALGORITHMS}
        predictions = {name: predicted.predictions(found, WORLD_SIZES).values() for name, found in known.items()}
    except NotEnoughData as missing:
        return fs.message(f"{title}: not enough data", phrases.context(study), f"Not enough data: {missing}.")
    made = {name: [p for p in each if isinstance(p, Prediction)] for name, each in predictions.items()}
    ring, shown = known["ring"], {p.ranks: p for each in made.values() for p in each}
    most = max(shown)
    ended = [name for name, each in made.items() if each and each[-1].ranks < max(WORLD_SIZES)]
    note = f"{ring.assumptions(most)} Bands: 90 % prediction intervals. {predicted_words.rule(shown)}".strip()
    if ended:
        note += f" Where the interval would span more than a factor of {WIDEST:.0f}, the {phrases.joined(ended)} ends."
    own = "" if ring.cores is None else f" and has {phrases.plural(ring.cores, 'core')} of its own"
    first = next((p for p in reversed(made["ring"]) if p.label == "predicted"), made["ring"][0])
    figure, axes = fs.sheet(
        f"Predicted for {first.ranks} ranks: {100 * first.efficiency:.0f} % efficiency "
        f"({100 * first.efficiency_low:.0f} to {100 * first.efficiency_high:.0f} %)",
        f"{phrases.context(study, batch=False)} \N{MIDDLE DOT} each rank keeps {ring.rank_batch} images{own}",
        [1.75, 1.75, 1.75],
        headings=["Step", "Throughput", "Efficiency: images a second of each rank, one rank alone is 100 %"],
        left=1.15,
        right=_RIGHT,
        gap=0.22,
        note=note,
    )
    views: tuple[Callable[[int, float], float], ...] = (
        lambda _, seconds: 1e3 * seconds,
        lambda ranks, seconds: ranks * ring.rank_batch / seconds,
        lambda _, seconds: 100 * ring.own_seconds / seconds,
    )
    measured = [(1, ring.own_seconds), *((p.ranks, seconds) for seconds, p in ring.checks if _comparable(ring, p))]
    for ax, view in zip(axes, views, strict=True):
        for i, (name, found) in enumerate(made.items()):
            x = [p.ranks for p in found]
            low, middle, high = ([view(p.ranks, getattr(p, n)) for p in found] for n in ("low", "seconds", "high"))
            if ax is axes[-1]:
                names = ("efficiency_low", "efficiency", "efficiency_high")
                low, middle, high = ([100 * getattr(p, n) for p in found] for n in names)
            ax.fill_between(x, low, high, color=fs.PALETTE[i], alpha=0.14, lw=0, zorder=1)
            ax.plot(x, middle, color=fs.PALETTE[i], ls=_DASHES[name], lw=1.5, marker=fs.MARKERS[i], ms=5.5, mfc="white")
        for ranks, seconds in measured:
            ax.plot([ranks], [view(ranks, seconds)], "o", color=fs.INK, ms=6.5, zorder=4)
        _across(ax, max(made.values(), key=len), 0.06 if ax is axes[-1] else 0.96)
    _legend(axes[0], list(made))
    axes[0].set_ylabel("milliseconds")
    axes[1].set_ylabel("images per second")
    axes[2].set_ylabel("%")
    axes[2].set_ylim(0, 105)
    for ax in axes[:2]:
        ax.tick_params(axis="x", labelbottom=False)
        ax.set_yscale("log")
        bottom, top = ax.get_ylim()
        ax.yaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if top < 50 * bottom else (1.0,), numticks=9))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: fs.number(value)))
        ax.yaxis.set_minor_locator(NullLocator())
    axes[2].set_xlabel("ranks")
    return figure


def _comparable(ring: Basis, made: Prediction) -> bool:
    """Whether a measured step had the images and the device of the rank that was measured alone."""
    return made.rank_batch == ring.rank_batch and ring.config.device == "cuda"


def _across(ax: Axes, found: Sequence[Prediction], height: float) -> None:
    """The axis of ranks, with what is extrapolated shaded, and named at a height where no line is."""
    ax.set_xscale("log", base=2)
    ax.set_xlim(0.85, 1.25 * found[-1].ranks)
    fs.fixed_ticks(ax.xaxis, [1, *(p.ranks for p in found)], ".0f")
    outside = [p.ranks for p in found if p.label != "predicted"]
    if outside:
        start = outside[0] / math.sqrt(2)
        ax.axvspan(start, 1.25 * found[-1].ranks, color=fs.BAND, alpha=0.55, lw=0, zorder=0)
        ax.text(
            start * 1.06,
            height,
            "extrapolation",
            transform=ax.get_xaxis_transform(),
            va="top" if height > 0.5 else "bottom",
            color=fs.SOFT,
            fontsize=fs.SMALL_POINTS,
            zorder=5,
        )


def _legend(ax: Axes, algorithms: Sequence[str]) -> None:
    """What each mark means, beside the panel."""
    entries: list[tuple[str, dict[str, Any]]] = [("measured", {"marker": "o", "color": fs.INK, "ls": "none"})]
    entries += [
        (
            f"predicted, {name}",
            {"marker": fs.MARKERS[i], "color": fs.PALETTE[i], "mfc": "white", "ls": _DASHES[name], "lw": 1.5},
        )
        for i, name in enumerate(algorithms)
    ]
    to = ax.transAxes
    for i, (text, look) in enumerate(entries):
        y = 0.92 - 0.14 * i
        ax.plot([1.03, 1.07, 1.11], [y] * 3, ms=5.5, markevery=[1], transform=to, clip_on=False, **look)
        ax.text(1.14, y, text, transform=to, va="center", fontsize=fs.SMALL_POINTS)
