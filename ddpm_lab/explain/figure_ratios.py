"""The answer of a comparison: speed relative to the baseline, with intervals, set values and the noise floor."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ddpm_lab.explain import figure_style as fs
from ddpm_lab.explain import phrases, quality, scaling, sentences, stats
from ddpm_lab.explain.comparisons import MECHANISM_ONLY, Row, comparisons, families, resolved
from ddpm_lab.explain.findings import finding
from ddpm_lab.explain.frames import Study
from ddpm_lab.plan import LOST

_ROW = 0.52
_RIGHT = 2.25  # inches for the numbers beside each row
_LABEL = 2.0  # inches for the name of a row, which is wrapped
_COLOURS = {stats.FASTER: fs.PALETTE[0], stats.SLOWER: fs.PALETTE[3]}


def rows_of(study: Study) -> list[Row]:
    """Rows of ``comparisons``, without those that must not appear in a figure of speed."""
    scales = study.experiment == scaling.EXPERIMENT
    rows = [scaling.named(row) for row in scaling.rows(study)] if scales else comparisons(study)
    return [row for row in rows if not row["mechanism_only"]]


def ratios(study: Study) -> Figure:
    """Speed of each configuration relative to its baseline: one panel a family, failures as rows with their reason."""
    found = finding(study)
    panels = [
        rows
        for rows in families(rows_of(study))
        if any(r["role"] in ("candidate", "note") or not r["sets"] for r in rows)
    ]
    if not panels:
        return fs.message(found.headline, phrases.context(study), found.claim)
    drawn = [row for rows in panels for row in _drawn(rows)]
    left = max(1.2, 0.3 + max(fs.block_width(_label(row), fs.TEXT_POINTS) for row in drawn))
    height = max(_row_height(row, fs.WIDTH - left - _RIGHT) for row in drawn)
    bases = {str(rows[0]["baseline_label"]) for rows in panels}
    base = bases.pop() if len(bases) == 1 else "the baseline"
    figure, axes = fs.sheet(
        found.headline,
        phrases.context(study),
        [height * len(_drawn(rows)) + 0.1 for rows in panels],
        headings=[str(rows[0]["family"]) for rows in panels],
        left=left,
        right=_RIGHT,
        gap=0.16,
        note=_note(study, panels),
    )
    low, high = _limits([row for rows in panels for row in rows])
    for ax, rows in zip(axes, panels, strict=True):
        _panel(ax, _drawn(rows), low, high, height, last=ax is axes[-1])
    meaning = "(1 is the same speed, above 1 is faster)"
    axis = f"speed relative to {base} {meaning}"
    if fs.width(axis, fs.TEXT_POINTS) > fs.WIDTH - left - _RIGHT + 0.8:
        axis = f"speed relative to the baseline {meaning}"
    axes[-1].set_xlabel(axis)
    return figure


def _row_height(row: Row, panel: float) -> float:
    """Inches that a row needs for its label, and for its verdict or its reason; ``panel`` is the panel's width."""
    label = 0.12 + 0.175 * (_label(row).count("\n") + 1)
    text = _words(row) if row["sets"] else _reason(row, panel)
    # A measured row has its numbers above the words.
    return max(_ROW, label, 0.2 + fs.LINE * (text.count("\n") + (2 if row["sets"] else 1)))


def _drawn(rows: Sequence[Row]) -> list[Row]:
    """Candidates from the top, then the twin; the baseline is the line at 1, unless it failed.

    A twin without a set is left out, unless nothing but its failure is there.
    """
    order = {"baseline": 0, "candidate": 1, "note": 2, "twin": 3}
    kept = [r for r in rows if r["role"] != "baseline" or not r["sets"]]
    kept = [r for r in kept if r["role"] != "twin" or r["sets"]] or list(rows)
    return sorted(kept, key=lambda r: order[r["role"]])


def _label(row: Row) -> str:
    if row["role"] == "twin":
        again = fs.fit(f"{row['baseline_label']} again", _LABEL, 6)
        return f"{again}\n({'null twin' if math.isnan(row['low']) else 'noise floor'})"
    return fs.fit(str(row["label"]), _LABEL, 6, fs.TEXT_POINTS)


def _note(study: Study, panels: Sequence[Sequence[Row]]) -> str:
    twins = any(r["role"] == "twin" and r["sets"] for rows in panels for r in rows)
    some = any(not math.isnan(r["low"]) for rows in panels for r in rows)
    text = "Point and bar: geometric mean and 95 % interval over sets. " if some else "Point: the ratio measured. "
    text += "Faint dots: single sets. " if some else ""
    if twins and some:
        text += "Grey band: the baseline measured against itself. "
    text += f"{phrases.begun(sentences.quality([row for rows in panels for row in rows]))}."
    hidden = {r.label for r in study.records if r.mechanism_only and r.role != "twin" and not r.family.endswith(LOST)}
    if hidden:
        text += f" Not shown: {phrases.joined(sorted(hidden))} ({MECHANISM_ONLY})."
    return text


def _limits(rows: Sequence[Row]) -> tuple[float, float]:
    """Ends of the axis: all points, and intervals as far as they are not absurdly wide."""
    points = [1.0] + [v for r in rows for v in (r["ratio"], *r["set_ratios"]) if math.isfinite(v) and v > 0]
    low, high = min(points), max(points)
    ends = [v for r in rows for v in (r["low"], r["high"]) if math.isfinite(v)]
    reach = max(0.15, high - low)
    low, high = min([low, *(max(v, low - reach) for v in ends)]), max([high, *(min(v, high + reach) for v in ends)])
    low = max(low, 0.5 * min(points))
    if high / low > 5:
        return low / 1.15, high * 1.15
    margin = max(0.02, 0.06 * (high - low))
    return low - margin, high + margin


def _panel(ax: Axes, rows: Sequence[Row], low: float, high: float, height: float, *, last: bool) -> None:
    """Rows of ``height`` inches on an axis from ``low`` to ``high``."""
    logarithmic = high / low > 5
    if logarithmic:
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(FixedLocator([2.0**k for k in range(-6, 8) if low <= 2.0**k <= high]))
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        ax.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 2.5, 5, 10]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    ax.set_xlim(low, high)
    ax.set_ylim(len(rows) - 0.5, -0.6)
    ax.grid(visible=False, axis="y")
    noise = next(((r["low"], r["high"]) for r in rows if r["role"] == "twin" and not math.isnan(r["low"])), None)
    if noise:
        ax.axvspan(max(noise[0], low), min(noise[1], high), color=fs.BAND, lw=0, zorder=0.5)
    ax.axvline(1, color=fs.SOFT, lw=1.2, zorder=1)
    ax.set_yticks(range(len(rows)), [_label(r) for r in rows])
    ax.tick_params(axis="y", length=0)
    ax.tick_params(axis="x", labelbottom=last, length=3 if last else 0)
    ax.spines["left"].set_visible(False)
    ax.spines["bottom"].set_visible(last)
    for y, row in enumerate(rows):
        if row["sets"]:
            _point(ax, y, row, height)
        else:
            colour = fs.FAINT if row["status"] == "left out" else fs.PALETTE[3]
            fs.absent(ax, y, _reason(row, ax.get_position().width * fs.WIDTH), colour, 0.045)
    for tick, row in zip(ax.get_yticklabels(), rows, strict=True):
        if row["role"] == "twin":
            tick.set_color(fs.SOFT)
            tick.set_fontsize(fs.SMALL_POINTS)
    if any(r["role"] == "twin" for r in rows) and len(rows) > 1:
        ax.axhline(len(rows) - 1.5, color="#d5dae0", lw=0.8, zorder=0.6)


def _point(ax: Axes, y: int, row: Row, height: float) -> None:
    low, high = ax.get_xlim()
    twin = row["role"] == "twin"
    colour = fs.SOFT if twin else _COLOURS.get(str(row["verdict"]), fs.INK)
    if row["sets"] > 1:
        # Fixed offsets keep the dots apart and the figure reproducible.
        offsets = 0.2 + 0.05 * (np.arange(len(row["set_ratios"])) % 3 - 1)
        ax.plot(row["set_ratios"], y + offsets, "o", ms=3.2, mew=0, color=colour, alpha=0.4, zorder=2)
    if not math.isnan(row["low"]):
        ends = max(row["low"], low), min(row["high"], high)
        ax.plot(ends, [y, y], color=colour, lw=2.6, solid_capstyle="butt", zorder=3)
        for cut, end, marker in ((row["low"] < low, low, "<"), (row["high"] > high, high, ">")):
            if cut:
                ax.plot([end], [y], marker, color=colour, ms=7, zorder=4, clip_on=False)
    face = colour if resolved(row) or twin else "white"
    ax.plot([row["ratio"]], [y], "o", ms=6 if not twin else 4.5, mfc=face, mec=colour, mew=1.8, zorder=5)
    interval = phrases.between(row["ratio"], row["low"], row["high"], to=phrases.DASH)
    numbers = phrases.ratio(row) + (f"  ({interval})" if interval else "")
    words = _words(row)
    x, to = 1.02, ax.get_yaxis_transform()
    # Numbers and words are one block, centred on the row.
    middle = y - 0.5 * fs.LINE * words.count("\n") / height
    above, below = middle - 0.03, middle + 0.05
    ax.text(x, above, numbers, transform=to, va="bottom", fontsize=fs.TEXT_POINTS, color=colour, fontweight="bold")
    ax.text(x, below, words, transform=to, va="top", fontsize=fs.SMALL_POINTS, color=fs.SOFT)


def _words(row: Row) -> str:
    """The verdicts beside a measured row, on speed and on quality."""
    if row["role"] != "twin":
        text = phrases.outcome(row)
    else:
        text = "instrument not trusted" if row["verdict"] == stats.NOT_TRUSTED else "baseline against itself"
    lines = [fs.fit(text, _RIGHT - 0.25, 3)]
    if row["role"] == "candidate" and (judged := row["equivalence"]) is not None and judged.seeds:
        lines.append(fs.fit(f"quality {quality.sentence(judged)}", _RIGHT - 0.25, 3))
        if rests_on := quality.evidence(judged):
            lines.append(fs.fit(f"loss {rests_on}", _RIGHT - 0.25, 3))
    return "\n".join(lines)


def _reason(row: Row, panel: float) -> str:
    """Why a row has no speed, as wide as panel and margin; the table has the rest of a very long one."""
    return fs.fit(phrases.failure(row), panel + _RIGHT - 0.55, 4)


def describe(study: Study) -> str:
    """The rows of the figure in words."""
    parts = []
    for rows in families(rows_of(study)):
        points = []
        for row in _drawn(rows):
            name = "baseline against itself" if row["role"] == "twin" else str(row["label"])
            if row["sets"]:
                judged = row["equivalence"]
                learned = f", {quality.full(judged)}" if judged is not None and judged.seeds else ""
                said = f"{phrases.evidence(row)}), {phrases.outcome(row)}{learned}"
                points.append(f"{name} {phrases.ratio(row)} ({said}")
            else:
                points.append(f"{name}: {phrases.failure(row)}")
        parts.append(f"{rows[0]['family']}: {'; '.join(points)}.")
    base = " ".join(parts)
    return f"Chart of speed relative to the baseline, where above 1 is faster. {base}"
