"""What configurations learned in trials: losses over images, and FIDs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ddpm_lab.explain import charts, phrases, quality
from ddpm_lab.explain.answer import View
from ddpm_lab.explain.charts import Figure, Line, Panel, Plot, Row, lines
from ddpm_lab.explain.comparisons import Comparison
from ddpm_lab.explain.selection import Study
from ddpm_lab.explain.table import Table
from ddpm_lab.record import RunRecord

_NONE = phrases.DASH
_COLOURS = dict.fromkeys(quality.GOOD, charts.GOOD) | {quality.WORSE: charts.BAD}
MEANING = "Blue: not worse; orange: worse; grey: not enough data. Band: the margin, up to which a loss counts as equal."
_LOSS = "held-out loss, less the baseline's"
_POINTS = 50
LEAST_IMAGES = 2_049  # images with which the covariance of Inception's 2,048 features can have its full rank
FEW = f"with fewer than {LEAST_IMAGES:,} images the covariance is singular, and the FID too rough to compare"

Array = npt.NDArray[np.float64]
Series = Callable[[Sequence[RunRecord], RunRecord], tuple[Array, Array]]


def extent_of(rows: Sequence[Comparison]) -> tuple[int, int]:
    """The largest ``quality.extent`` of trials that any verdict rests on; zeros without any."""
    return max((quality.extent(r.equivalence.pairs[0][0]) for r in rows if r.equivalence.pairs), default=(0, 0))


def trials_of(rows: Sequence[Comparison], row: Comparison) -> list[RunRecord]:
    """The trials of one of ``rows`` that verdicts rest on, of the largest extent, in the order of their seeds."""
    extent, lead = extent_of(rows), row.role == "baseline"
    pairs = [p for r in (rows if lead else [row]) for p in r.equivalence.pairs if quality.extent(p[0]) == extent]
    found = {r.config.seed: r for r in (base if lead else tried for base, tried in pairs)}
    return [found[seed] for seed in sorted(found)]


def training(records: Sequence[RunRecord], images: int, points: int) -> Array:
    """Training loss of each trial (trials, points): the mean over as many equal shares of its first ``images``."""
    found = []
    for record in records:
        batch, losses = record.config.global_batch_size, np.array((record.quality or {})["losses"], float)
        share = ((np.arange(len(losses)) + 0.5) * batch * points / images).astype(int)
        inside = share < points
        counts = np.bincount(share[inside], minlength=points)
        found.append(np.bincount(share[inside], losses[inside], minlength=points) / counts)
    return np.array(found)


def loss_table(family: Sequence[Comparison], *, fid: bool) -> Table:
    """One row a configuration: speed, quality, and held-out loss."""
    images, shown = extent_of(family)[1], []
    for row in family:
        lead = row.role == "baseline"
        records = trials_of(family, row)
        final = np.mean([np.interp(images, *quality.curve(r)) for r in records]) if records else math.nan
        distance = fid_of(records)
        shown.append(
            {
                "Configuration": f"{row.label} (baseline)" if lead else row.label,
                "Speed": phrases.times(row.ratio) if row.sets else _NONE,
                "Verdict on speed": phrases.outcome(row),
                "Quality": "baseline" if lead else row.quality,
                "Held-out loss": f"{final:.4f}" if records else _NONE,
                **({"FID": fid_words(distance) if distance else _NONE} if fid else {}),
                **phrases.loss(row),
                "Seeds": str(len(records)),
            }
        )
    return shown


# --- FIDs -------------------------------------------------------------------------------------------------------------


def fid_of(records: Sequence[RunRecord]) -> Mapping[str, Any] | None:
    """The FID of one of these trials, with its counts, or the reason why it failed; None where none was asked for."""
    asked = (((r.quality or {}).get("fid") or {}) for r in records)
    return next((found for found in asked if found), None)


def fid_words(found: Mapping[str, Any]) -> str:
    """A FID with the number of images it is of: ``12.3 (2,500 images)``."""
    if "fid" not in found:
        return "failed"
    few = ", too few" if found["images"] < LEAST_IMAGES else ""
    return f"{found['fid']:.{1 if found['fid'] >= 10 else 2}f} ({found['images']:,} images{few})"


def fid_method(known: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """How FIDs by label were measured, why any failed, and whether they are of too few images."""
    first = known[0][1]
    text = f"against as many training images, with the first seed, by DDIM in {first['steps']} steps; "
    text += f"Inception {first['inception_sha256'][:8]}"
    text += "".join(f"; {label} failed ({f.get('reason', 'unpublished')})" for label, f in known if "fid" not in f)
    return f"{text}; {FEW}" if any(found["images"] < LEAST_IMAGES for _, found in known) else text


# --- figures ----------------------------------------------------------------------------------------------------------


def loss_panel(shown: Sequence[Comparison], heading: str) -> Panel:
    """Rows of differences of the final loss, with the margin as a band around 0."""
    margin = next((c.equivalence.margin for c in shown if not math.isnan(c.equivalence.margin)), None)
    margins = None if margin is None else (-margin, margin)
    return Panel(rows=[*map(_loss, shown)], heading=heading, reference=0, band=margins, label=_LOSS)


def _loss(c: Comparison) -> Row:
    e = c.equivalence
    if math.isnan(e.difference):
        return Row(name=c.label, missing=quality.sentence(e))
    colour = _COLOURS.get(e.verdict, charts.OPEN)
    return Row(name=c.label, value=e.difference, low=e.low, high=e.high, colour=colour, text=f"{e.difference:+.2g}")


def trained_view(study: Study, families: Sequence[Sequence[Comparison]]) -> View:
    """What configurations have learned, of the ``families`` that were trained."""
    caption = "Held-out and training loss on the way, all settings overlaid."
    return View(caption, "curves", lambda: _curves(study, [rows for rows in families if extent_of(rows)[1]]))


def _curves(study: Study, families: Sequence[Sequence[Comparison]]) -> Figure | None:
    """Held-out and training loss of all settings over the images trained on, overlaid; None without trials."""
    plots, labels = [], dict[str, Any](x_label="images trained on", y_label="loss")
    for rows in families:
        several = f"{rows[0].family}: " if len(families) > 1 else ""
        for heading, series in (("held-out loss of the averaged weights", _held_out), ("training loss", _smoothed)):
            plots.append(Plot(lines=_overlaid(rows, series), heading=several + heading, from_zero=False, **labels))
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


def _overlaid(rows: Sequence[Comparison], series: Series) -> list[Line]:
    """The baseline, what loses more, and in grey all others; ``series`` gives images (n,), losses (trials, n)."""
    base, found = trials_of(rows, rows[0]), []
    for c in sorted((c for c in rows if c.role == "candidate"), key=_apart):
        if mine := trials_of(rows, c):
            name, colour = (c.label, "") if _apart(c) else ("no larger loss found", charts.OPEN)
            found.append(_curve(name, *series(mine, base[0]), colour))
    return [*found, _curve(f"{rows[0].label} (baseline)", *series(base, base[0]), charts.INK)]


def _apart(c: Comparison) -> bool:
    """Whether the final loss is found to be larger, and by more than the margin where there is one."""
    e = c.equivalence
    return e.verdict == quality.WORSE or e.low > (0.0 if math.isnan(e.margin) else e.margin)


def _curve(name: str, images: Array, values: Array, colour: str) -> Line:
    low, high = values.min(0), values.max(0)
    return Line(name=name, x=images, y=values.mean(0), low=low, high=high, colour=colour, look="-", shade=True)


def _held_out(records: Sequence[RunRecord], base: RunRecord) -> tuple[Array, Array]:
    images, _ = quality.curve(base)
    return images, np.array([np.interp(images, *quality.curve(r)) for r in records])


def _smoothed(records: Sequence[RunRecord], base: RunRecord) -> tuple[Array, Array]:
    batches = [r.config.global_batch_size for r in (base, *records)]
    images = min(len((r.quality or {})["losses"]) * n for r, n in zip((base, *records), batches, strict=True))
    points = min(_POINTS, images // max(batches))
    return (np.arange(points) + 0.5) * images / points, training(records, images, points)
