"""Speed against quality: each setting with both intervals, and the loss curves they rest on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ddpm_lab.explain import learned, phrases, quality, trained
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.forest import forest
from ddpm_lab.explain.charts.lines import Line, Plot, lines
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.figure_ratios import band, row
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.learned import Array
from ddpm_lab.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLOURS = dict.fromkeys(quality.GOOD, style.GOOD) | {quality.WORSE: style.BAD}
_MEANING = (
    "Blue: not worse; orange: worse; grey: not enough data. Band: the margin, up to which a loss counts as equal."
)
_LOSS = "held-out loss, less the baseline's"
_POINTS = 50


def figure(study: Study, title: str) -> Figure | None:
    """Two columns for each setting: how much faster it is, and what it costs in loss; None where nothing is known."""
    shown = [c for c in trained.rows(study) if c.equivalence.seeds and c.sets]
    if trained.base(study) is None or not shown:
        return None
    shown.sort(key=lambda c: -c.ratio.value)
    return forest(
        [
            Panel(rows=[*map(row, shown)], heading="Speed", reference=1, band=band(shown), label="times as fast"),
            _losses(shown, "Quality"),
        ],
        title=title,
        context=phrases.context(study),
        note=f"{trained.method(study)} Speed: blue faster, orange slower, grey no difference found; band: the baseline "
        f"repeated. Loss: {phrases.within(_MEANING)}",
        beside=True,
    )


def differences(study: Study) -> Figure | None:
    """The final loss of each setting less its baseline's, one panel a family; None without trials."""
    panels = [_losses([c for c in rows if c.equivalence.seeds], rows[0].family) for rows in learned.families(study)]
    if not panels:
        return None
    return forest(
        panels,
        title="What each setting costs in held-out loss",
        context=phrases.context(study),
        note=f"Mean over seeds of differences between runs with the same seed, and 90 % interval. {_MEANING}",
        label=_LOSS,
    )


def _losses(shown: Sequence[Comparison], heading: str) -> Panel:
    """Rows of differences of the final loss, with the margin as a band around 0."""
    margin = next((c.equivalence.margin for c in shown if not math.isnan(c.equivalence.margin)), None)
    margins = None if margin is None else (-margin, margin)
    return Panel(rows=[*map(_loss, shown)], heading=heading, reference=0, band=margins, label=_LOSS)


def _loss(c: Comparison) -> Row:
    e = c.equivalence
    if math.isnan(e.difference):
        return Row(name=c.label, missing=quality.sentence(e))
    colour = _COLOURS.get(e.verdict, style.OPEN)
    return Row(name=c.label, value=e.difference, low=e.low, high=e.high, colour=colour, text=f"{e.difference:+.2g}")


def curves(study: Study) -> Figure | None:
    """Held-out and training loss of all settings over the images trained on, overlaid; None without trials."""
    plots = []
    for rows in _families(study):
        several = f"{rows[0].family}: " if len(_families(study)) > 1 else ""
        for heading, series in (("held-out loss of the averaged weights", _held_out), ("training loss", _smoothed)):
            shown = _overlaid(study, rows, series)
            plots.append(
                Plot(
                    lines=shown, heading=several + heading, x_label="images trained on", y_label="loss", from_zero=False
                )
            )
    if not plots:
        return None
    return lines(
        plots,
        title="Loss during training",
        context=phrases.context(study),
        note=f"Mean over seeds; shade: lowest and highest seed. The training loss is the mean over each of up to "
        f"{_POINTS} equal shares of the images. "
        "Grey: settings whose loss is not found to be larger by the margin.",
    )


def _families(study: Study) -> list[list[Comparison]]:
    """Families with trials; of the question quality the one that it is about."""
    if study.experiment != trained.EXPERIMENT:
        return learned.families(study)
    lead, rows = trained.base(study), trained.rows(study)
    return [[lead, *rows]] if lead is not None and learned.images_of(rows) else []


Series = Callable[[Sequence[RunRecord], RunRecord], tuple[Array, Array]]


def _overlaid(study: Study, rows: Sequence[Comparison], series: Series) -> list[Line]:
    """The baseline, what loses more, and in grey all others; ``series`` gives images (n,), losses (trials, n)."""
    lead, *others = learned.tried(study, rows)
    base = learned.baseline_trials(rows[1:])
    found = []
    for c in sorted(others, key=_apart):
        pairs = learned.pairs_of(c, learned.extent_of(rows[1:]))
        images, mine = series([candidate for _, candidate in pairs], pairs[0][0])
        name, colour = (c.label, "") if _apart(c) else ("no larger loss found", style.OPEN)
        found.append(_curve(name, images, mine, colour))
    images, values = series(base, base[0])
    return [*found, _curve(f"{lead.label} (baseline)", images, values, style.INK)]


def _apart(c: Comparison) -> bool:
    """Whether the final loss is found to be larger, and by more than the margin where there is one."""
    e = c.equivalence
    return e.verdict == quality.WORSE or e.low > (0.0 if math.isnan(e.margin) else e.margin)


def _curve(name: str, images: Array, values: Array, colour: str) -> Line:
    low, high = values.min(0), values.max(0)
    return Line(name=name, x=images, y=values.mean(0), low=low, high=high, colour=colour, look="-", shade=True)


def _held_out(records: Sequence[RunRecord], base: RunRecord) -> tuple[Array, Array]:
    images, _ = quality.curve(base)
    return images, learned.held_out(records, images)


def _smoothed(records: Sequence[RunRecord], base: RunRecord) -> tuple[Array, Array]:
    batches = [r.config.global_batch_size for r in (base, *records)]
    images = min(len((r.quality or {})["losses"]) * n for r, n in zip((base, *records), batches, strict=True))
    points = min(_POINTS, images // max(batches))
    return (np.arange(points) + 0.5) * images / points, learned.training(records, images, points)
