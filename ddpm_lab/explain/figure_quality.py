"""Speed against quality: each setting with both intervals, and the loss curves they rest on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import learned, phrases, quality, trained
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.learned import Array
from ddpm_lab.record import RunRecord

_COLOURS = {
    quality.IDENTICAL: fs.PALETTE[2],
    quality.NOT_WORSE: fs.PALETTE[2],
    quality.SLIGHTLY: fs.PALETTE[1],
    quality.WORSE: fs.PALETTE[3],
    quality.NOT_ENOUGH: fs.FAINT,
}
_BESIDE = 3.1
_POINTS = 50


def figure(study: Study, title: str) -> Figure | None:
    """Two columns for each setting: how much faster it is, and what it costs in loss; None where nothing is known.

    Settings on the Pareto front are filled, others are hollow.
    """
    lead = trained.base(study)
    shown = [r for r in trained.rows(study) if r.equivalence.seeds and r.sets]
    if lead is None or not shown:
        return None
    shown = sorted(shown, key=lambda r: -r.ratio.value)
    ahead = {r.run_id for r in trained.front([lead, *shown])}
    names = [fs.fit(r.label, 2.2, 2, fs.TEXT_POINTS) for r in shown]
    left = 0.3 + max(fs.block_width(name, fs.TEXT_POINTS) for name in names)
    margin = next((r.equivalence.margin for r in shown if not math.isnan(r.equivalence.margin)), math.nan)
    note = trained.method(study) + " Filled: on the Pareto front, no other setting is both faster and better. "
    note += "Grey: the baseline repeated, and the margin of the loss."
    if not math.isnan(margin):
        note += f" A loss counts as not worse up to {margin:.2g} more."
    sheet, (ax,) = fs.sheet(title, phrases.context(study), [0.62 * len(shown) + 0.2], left=left, right=0.3, note=note)
    box = ax.get_position()
    gap = 0.35 / fs.WIDTH
    half = (box.width - _BESIDE / fs.WIDTH - gap) / 2
    ax.set_position((box.x0, box.y0, half, box.height))
    beside = sheet.add_axes((box.x0 + half + gap, box.y0, half, box.height))
    _speeds(ax, shown, names, ahead)
    _losses(beside, shown, ahead, margin)
    return sheet


def _speeds(ax: Axes, shown: list[Comparison], names: list[str], ahead: set[str]) -> None:
    if not math.isnan(shown[0].noise.low):
        ax.axvspan(shown[0].noise.low, shown[0].noise.high, color=fs.BAND, lw=0, zorder=0)
    ax.axvline(1, color=fs.SOFT, lw=1)
    for y, row in enumerate(shown):
        _mark(ax, y, (row.ratio.value, row.ratio.low, row.ratio.high), row, ahead)
    ends = [v for r in shown for v in (r.ratio.value, r.ratio.low, r.ratio.high, 1.0) if not math.isnan(v)]
    pad = 0.08 * (max(ends) - min(ends) or 1)
    ax.set_xlim(min(ends) - pad, max(ends) + pad)
    fs.name_rows(ax, names, end=0.45)
    ax.set_xlabel("times as fast")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: fs.number(value)))


def _losses(ax: Axes, shown: list[Comparison], ahead: set[str], margin: float) -> None:
    equal = [r.equivalence for r in shown]
    close = [e for e in equal if e.verdict != quality.WORSE] or equal
    ends = [v for e in close for v in (e.low, e.high, e.difference) if not math.isnan(v)]
    ends += [] if math.isnan(margin) else [margin, -margin]
    low, high = min(ends, default=-1.0), max(ends, default=1.0)
    pad = 0.15 * (high - low or 1e-6)
    if not math.isnan(margin):
        ax.axvspan(-margin, margin, color=fs.BAND, lw=0, zorder=0)
    ax.axvline(0, color=fs.SOFT, lw=1)
    ax.set_xlim(low - pad, high + pad)
    to = ax.get_yaxis_transform()
    for y, (row, e) in enumerate(zip(shown, equal, strict=True)):
        colour = _COLOURS.get(e.verdict, fs.FAINT)
        if e.difference > high + pad or math.isnan(e.difference):
            ax.text(0.98, y, "\N{RIGHTWARDS ARROW}", transform=to, ha="right", va="center", color=colour)
        else:
            _mark(ax, y, (e.difference, e.low, e.high), row, ahead)
        first = e.verdict if e.reason or e.verdict in quality.DECIDED else quality.sentence(e)
        second = quality.interval(e) if e.verdict != quality.IDENTICAL else "the same weights to the last bit"
        ax.text(
            1.05, y - 0.03, fs.fit(first, _BESIDE - 0.5, 2), transform=to, va="bottom", color=colour, fontweight="bold"
        )
        detail = fs.fit(e.reason or second, _BESIDE - 0.3, 2, fs.SMALL_POINTS)
        ax.text(1.05, y + 0.05, detail, transform=to, va="top", fontsize=fs.SMALL_POINTS, color=fs.SOFT)
    fs.name_rows(ax, [""] * len(shown), end=0.45)
    ax.set_xlabel("held-out loss, less the baseline's")
    ax.xaxis.set_major_locator(MaxNLocator(3))


def _mark(ax: Axes, y: int, span: tuple[float, float, float], row: Comparison, ahead: set[str]) -> None:
    value, low, high = span
    colour = _COLOURS.get(row.equivalence.verdict, fs.FAINT)
    fs.interval(ax, (low, high), y, color=colour, lw=2.8, zorder=3)
    face = colour if row.run_id in ahead else "white"
    ax.plot([value], [y], "o", ms=8, mfc=face, mec=colour, mew=1.8, zorder=4)


def curves(study: Study) -> Figure | None:
    """Held-out loss against images, and each setting's difference from the baseline; None without trials."""

    def looks(records: Sequence[RunRecord], base: RunRecord) -> tuple[Array, Array]:
        images, _ = quality.curve(base)
        return images, learned.held_out(records, images)

    return _overlaid(study, "What each setting has learned, on the way", "Held-out loss of the averaged weights", looks)


def losses(study: Study) -> Figure | None:
    """Training loss against images, and each setting's difference from the baseline; None without trials."""

    def smoothed(records: Sequence[RunRecord], base: RunRecord) -> tuple[Array, Array]:
        batches = [r.config.global_batch_size for r in (base, *records)]
        images = min(len((r.quality or {})["losses"]) * n for r, n in zip((base, *records), batches, strict=True))
        points = min(_POINTS, images // max(batches))
        return (np.arange(points) + 0.5) * images / points, learned.training(records, images, points)

    return _overlaid(
        study,
        "Training loss of each setting",
        "Training loss",
        smoothed,
        f"Each point is the mean over one of up to {_POINTS} equal shares of the images. ",
    )


def _overlaid(
    study: Study,
    title: str,
    heading: str,
    series: Callable[[Sequence[RunRecord], RunRecord], tuple[Array, Array]],
    note: str = "",
) -> Figure | None:
    """Two panels for each family with trials: a loss against images, and its difference from the baseline's.

    ``series`` gives images (n,) and losses (trials, n) of trials beside one of the baseline's.
    """
    found = _families(study)
    if not found:
        return None
    several = len(found) > 1
    seeds = {phrases.plural(len(learned.baseline_trials(rows[1:])), "seed") for rows in found}
    heads = [f"{rows[0].family}: {phrases.within(heading)}" if several else heading for rows in found]
    figure, axes = fs.sheet(
        title,
        phrases.context(study),
        [height for _ in found for height in (2.6, 1.9)],
        headings=[text for head in heads for text in (head, "Difference from the baseline with the same seed")],
        left=0.95,
        right=2.4,
        gap=0.5 if several else 0.3,
        note=f"{note}Lines: mean over {seeds.pop() if len(seeds) == 1 else 'seeds'}; shade: lowest and highest seed. "
        "Differences are between runs with the same seed; those of settings that are worse are left to the upper "
        "panel, since beside them no other could be seen.",
    )
    for rows, above, below in zip(found, axes[::2], axes[1::2], strict=True):
        lead, *others = learned.tried(study, rows)
        base = learned.baseline_trials(rows[1:])
        images, values = series(base, base[0])
        above.plot(images, values.mean(0), color=fs.INK, lw=2.2, label=fs.fit(lead.label, 1.9, 2))
        above.fill_between(images, values.min(0), values.max(0), color=fs.INK, alpha=0.12, lw=0)
        below.axhline(0, color=fs.INK, lw=1)
        wide = _hide(others)
        for i, row in enumerate(others):
            pairs = learned.pairs_of(row, learned.extent_of(rows[1:]))
            colour = fs.PALETTE[i % len(fs.PALETTE)]
            (images, theirs), (_, mine) = (series([p[side] for p in pairs], pairs[0][1 - side]) for side in (0, 1))
            above.plot(images, mine.mean(0), color=colour, lw=1.6, label=fs.fit(row.label, 1.9, 2))
            if row.label in wide:
                continue
            apart = mine - theirs
            below.plot(images, apart.mean(0), color=colour, lw=1.6)
            below.fill_between(images, apart.min(0), apart.max(0), color=colour, alpha=0.12, lw=0)
        above.legend(loc="upper left", bbox_to_anchor=(1.01, 1.03), frameon=False, fontsize=fs.SMALL_POINTS)
        above.tick_params(labelbottom=False)
        for ax in (above, below):
            ax.yaxis.set_major_locator(MaxNLocator(5))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
            ax.set_xlim(0, learned.images_of(rows[1:]))
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: fs.number(value)))
    axes[-1].set_xlabel("images trained on")
    return figure


def _families(study: Study) -> list[list[Comparison]]:
    """Families with trials; of the question quality the one that it is about."""
    if study.experiment != trained.EXPERIMENT:
        return learned.families(study)
    lead, rows = trained.base(study), trained.rows(study)
    return [[lead, *rows]] if lead is not None and learned.images_of(rows) else []


def _hide(rows: list[Comparison]) -> set[str]:
    """Names of settings that are worse, beside which no other could be seen; none where all are."""
    worse = {r.label for r in rows if r.equivalence.verdict == quality.WORSE}
    return worse if len(worse) < len(rows) else set()


def by_time(study: Study) -> Figure | None:
    """Where in the noise a setting is better or worse: the difference of the final loss by timestep; None without."""
    lead = trained.base(study)
    if lead is None or not (base := learned.baseline_trials(trained.rows(study))):
        return None
    figure, (ax,) = fs.sheet(
        "At which timesteps a setting learns more or less",
        phrases.context(study),
        [2.6],
        left=0.95,
        right=2.4,
        note="Final held-out loss of each setting less the baseline's with the same seed, mean over seeds, by ten "
        "equal ranges of timesteps. Early timesteps have little noise. Settings that are worse are left out.",
    )
    ax.axhline(0, color=fs.INK, lw=1)
    at = (np.arange(10) + 0.5) / 10 * lead.config.diffusion.timesteps
    extent = quality.extent(base[0])
    wide = _hide(trained.rows(study))
    for i, row in enumerate(trained.rows(study)):
        if row.label not in wide and (pairs := learned.pairs_of(row, extent)):
            apart = trained.by_time([b for _, b in pairs]) - trained.by_time([a for a, _ in pairs])
            label = fs.fit(row.label, 1.9, 2)
            ax.plot(at, apart.mean(0), color=fs.PALETTE[i % len(fs.PALETTE)], lw=1.6, marker="o", ms=3.5, label=label)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    ax.set_xlabel("timestep")
    ax.set_ylabel("difference of the loss")
    ax.legend(loc="upper left", bbox_to_anchor=(1.01, 1.03), frameon=False, fontsize=fs.SMALL_POINTS)
    return figure
