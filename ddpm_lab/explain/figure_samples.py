"""What each setting draws from the same noise, pixel by pixel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ddpm_lab.explain import phrases, quality, samples, trained
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.frames import Study
from ddpm_lab.record import RunRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EDGE, _HEADING = 0.18, 0.32  # inches
_GAP = 6  # pixels of the figure between two images
_LARGEST = 160  # pixels of the figure that an image is magnified to at most


def figure(study: Study) -> Figure | None:
    """One row of images for each configuration, drawn with one seed; None where the baseline drew none.

    A column begins with the same noise in every row. Pixels are repeated, never interpolated.
    """
    shown = _shown(study)
    if not shown:
        return None
    first = shown[0][1]
    told = samples.drawn(first)
    rows = [_row(record) for _, record in shown]
    height = sum(_HEADING + row.shape[0] / style.DPI for row in rows) + 0.1
    with style.style():
        sheet, body = style.sheet(
            "What each setting draws from the same noise",
            phrases.context(study),
            height,
            f"{phrases.plural(told['images'], 'image')} of each configuration's averaged weights, trained on "
            f"{int(first.config.option('images', 0)):,} images with seed {first.config.seed}; "
            f"{told['sampler'].upper()}, {told['steps']} steps, in fp32 and eager. A column starts from the same noise "
            "in every row. The verdict is that of all seeds.",
        )
        box = body.bbox
        top = box.y1 / style.DPI
        for (heading, _), row in zip(shown, rows, strict=True):
            body.text(
                _EDGE / style.WIDTH, (top - 0.1 - box.y0 / style.DPI) / height, heading, va="top", fontsize=style.SMALL
            )
            top -= _HEADING
            sheet.figimage(row, xo=round(_EDGE * style.DPI), yo=round(top * style.DPI) - row.shape[0], origin="upper")
            top -= row.shape[0] / style.DPI
    return style.settle(sheet)


def _shown(study: Study) -> list[tuple[str, RunRecord]]:
    """The configurations that drew with the baseline's seed and sampler, the baseline first, each with a heading."""
    lead = trained.base(study)
    like = next((r for r in trained.trials_of(study, lead) if samples.drawn(r)), None) if lead else None
    if lead is None or like is None:
        return []
    found = []
    for row in (lead, *trained.rows(study)):
        verdict = "baseline" if row is lead else row.equivalence.verdict
        for record in trained.trials_of(study, row):
            if _alike(record, like):
                fid = samples.fid([record])
                words = [verdict, f"held-out loss {quality.final_loss(record):.4f}"]
                words += [f"FID {samples.fid_words(fid)}"] if fid else []
                found.append((f"{row.label}: {', '.join(words)}", record))
    return found


def _alike(record: RunRecord, other: RunRecord) -> bool:
    """Whether two trials drew the same images: equal numbers, seed and sampler, and so equal noise."""
    one, two = ({k: v for k, v in samples.drawn(r).items() if k != "png"} for r in (record, other))
    return bool(one) and one == two


def _row(record: RunRecord) -> samples.Pixels:
    """A trial's images beside each other, magnified by a whole number."""
    images = samples.pixels(record)
    count, side = images.shape[:2]
    room = round((style.WIDTH - 2 * _EDGE) * style.DPI) - _GAP * (count - 1)
    times = max(1, min(room // (count * side), _LARGEST // side))
    tiles = images.repeat(times, axis=1).repeat(times, axis=2)
    white = np.full((side * times, _GAP, 3), 255, dtype=np.uint8)
    return np.concatenate([part for tile in tiles for part in (tile, white)][:-1], axis=1)
