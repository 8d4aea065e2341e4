"""What configurations learned in trials: losses over images, images to the same loss, and gradient checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ddpm_lab.explain import phrases, quality, samples
from ddpm_lab.explain.charts import style
from ddpm_lab.explain.charts.forest import forest
from ddpm_lab.explain.charts.lines import Line, Plot, lines
from ddpm_lab.explain.charts.style import Panel, Row
from ddpm_lab.explain.comparisons import Comparison, comparisons
from ddpm_lab.explain.comparisons import families as by_family
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.table import Table, one_family
from ddpm_lab.plan import scaled
from ddpm_lab.record import RunRecord, gradient_fault

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_NONE = phrases.DASH
_COLOURS = dict.fromkeys(quality.GOOD, style.GOOD) | {quality.WORSE: style.BAD}
MEANING = "Blue: not worse; orange: worse; grey: not enough data. Band: the margin, up to which a loss counts as equal."
_LOSS = "held-out loss, less the baseline's"
_POINTS = 50
TARGET_SHARE = 0.9
"""The target is the loss that the baseline has reached on average after this share of its images."""

Pairs = tuple[tuple[RunRecord, RunRecord], ...]
Array = npt.NDArray[np.float64]


def families(study: Study) -> list[list[Comparison]]:
    """Families of which trials exist: each its baseline's row, then those of its candidates."""
    found = by_family(r for r in comparisons(study) if r.role in ("baseline", "candidate"))
    return [rows for rows in found if rows[0].role == "baseline" and images_of(rows)]


def pairs_of(row: Comparison, extent: tuple[int, int]) -> Pairs:
    """The trials behind a row's verdict, the baseline's first; none if they are of another ``extent``."""
    pairs: Pairs = row.equivalence.pairs
    return pairs if pairs and quality.extent(pairs[0][0]) == extent else ()


def extent_of(rows: Sequence[Comparison]) -> tuple[int, int]:
    """The largest ``quality.extent`` of trials that any verdict rests on; zeros without any."""
    return max((quality.extent(r.equivalence.pairs[0][0]) for r in rows if r.equivalence.pairs), default=(0, 0))


def images_of(rows: Sequence[Comparison]) -> int:
    """Images of those trials; 0 without any."""
    return extent_of(rows)[1]


def baseline_trials(rows: Sequence[Comparison]) -> list[RunRecord]:
    """The baseline's trials that the verdicts of ``rows`` rest on, in the order of their seeds."""
    extent = extent_of(rows)
    by_seed = {a.config.seed: a for r in rows for a, _ in pairs_of(r, extent)}
    return [by_seed[seed] for seed in sorted(by_seed)]


def held_out(records: Sequence[RunRecord], at: Array) -> Array:
    """Held-out loss of each trial after so many images (trials, n), between its looks by straight lines."""
    return np.array([np.interp(at, *quality.curve(r)) for r in records])


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


def tried(study: Study, rows: Sequence[Comparison]) -> list[Comparison]:
    """The baseline's row and those of candidates with trials of the same extent.

    A larger batch whose learning rate was tried scaled with it has a second row: its speed is the same.
    """
    lead, extent = rows[0], extent_of(rows)
    trials = quality.Trials.of(study)
    found = [lead]
    for row in rows[1:]:
        if pairs_of(row, extent):
            found.append(row)
        if row.config.global_batch_size > lead.config.global_batch_size:
            other = trials.verdict(lead.config, scaled(row.config, lead.config), row.code_version)
            if pairs := pairs_of(again := replace(row, equivalence=other), extent):
                found.append(replace(again, label=pairs[0][1].label))
    return found


def images_to_reach(records: Sequence[RunRecord], loss: float) -> str:
    """Images that trials needed to a held-out ``loss``, the mean over seeds, such as "6,810".

    "not reached (3 of 8 seeds)" where some of them never did; a dash without trials.
    """
    needed = np.array([quality.images_to_reach(r, loss) for r in records])
    if lost := int(np.isinf(needed).sum()):
        return f"not reached ({lost} of {phrases.plural(len(records), 'seed')})"
    return f"{needed.mean():,.0f}" if len(needed) else phrases.DASH


def loss_table(family: Sequence[Comparison], *, fid: bool) -> Table:
    """One row a configuration: speed, quality, held-out loss, and the images to the loss that the baseline reaches."""
    extent, base, shown = extent_of(family), baseline_trials(family), []
    aim = float(held_out(base, np.array([TARGET_SHARE * extent[1]])).mean()) if base else math.nan
    for row in family:
        lead = row.role == "baseline"
        records = base if lead else [b for _, b in pairs_of(row, extent)]
        final = held_out(records, np.array([extent[1]])).mean() if records else math.nan
        distance = samples.fid(records)
        shown.append(
            {
                "Configuration": f"{row.label} (baseline)" if lead else row.label,
                "Speed": phrases.ratio_with_interval(row) if row.sets else _NONE,
                "Verdict on speed": phrases.outcome(row),
                "Quality": "baseline" if lead else row.quality,
                "Held-out loss": f"{final:.4f}" if records else _NONE,
                **({"FID": samples.fid_words(distance) if distance else _NONE} if fid else {}),
                **phrases.loss(row),
                "Images to the same loss": images_to_reach(records, aim),
                "Seeds": str(len(records)),
            }
        )
    return shown


def unsound(study: Study) -> str:
    """A sentence on settings whose gradient check failed or found a fault; empty without any."""
    told = []
    for r, answer in _checks(study):
        if not answer:
            told.append(f"the check of {r.label} failed ({phrases.failed(r.status, r.reason)})")
        elif fault := gradient_fault(answer):
            told.append(f"the gradient of {r.label} is not as expected: {fault}")
    return f"{phrases.begun(phrases.joined(list(dict.fromkeys(told))))}." if told else ""


def _checks(study: Study) -> list[tuple[RunRecord, Mapping[str, Any]]]:
    """The gradient checks of a study, each with its answer, empty where it has none."""
    return [(r, (r.quality or {}).get("gradients") or {}) for r in study.records if r.role == "check"]


def check_table(study: Study) -> Table:
    """One row for each configuration whose loss and gradient were compared with fp32, eager, on the same batch."""
    shown = []
    for r, answer in _checks(study):
        verdict = phrases.failed(r.status, r.reason) if not answer else gradient_fault(answer) or "as expected"
        cells = {"Family": r.family, "Configuration": r.label, "Verdict": verdict}
        if answer:
            worst, layer = answer["worst"], answer["worst"].get("worst_layer") or {}
            cells |= {
                "Loss off by": _share(worst.get("loss_error")),
                "Gradient off by": _share(worst.get("gradient_error")),
                "Cosine": f"{worst['cosine']:.6f}" if worst.get("cosine") is not None else _NONE,
                "Worst layer": f"{layer['name']}: {_share(layer['error'])}" if layer else _NONE,
                "Not finite": str(worst.get("nonfinite", _NONE)),
                "Skipped steps": str(worst.get("skipped", _NONE)),
            }
        shown.append(cells)
    columns = dict.fromkeys(name for row in shown for name in row)
    return one_family([{name: row.get(name, _NONE) for name in columns} for row in shown])


def _share(error: float | None) -> str:
    return _NONE if error is None else f"{error:.1e}"


def differences(study: Study) -> Figure | None:
    """The final loss of each setting less its baseline's, one panel a family; None without trials."""
    panels = []
    for rows in families(study):
        shown = [c for c in rows if c.equivalence.seeds]
        shown += [c for c in tried(study, rows)[1:] if c not in rows]  # with a scaled learning rate
        panels.append(loss_panel(shown, rows[0].family))
    if not panels:
        return None
    return forest(
        panels,
        title="What each setting costs in held-out loss",
        context=phrases.context(study),
        note=f"Mean over seeds of differences between runs with the same seed, and 90 % interval. {MEANING}",
        label=_LOSS,
    )


def loss_panel(shown: Sequence[Comparison], heading: str) -> Panel:
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


Series = Callable[[Sequence[RunRecord], RunRecord], tuple[Array, Array]]


def curves(study: Study, shown_families: Sequence[Sequence[Comparison]]) -> Figure | None:
    """Held-out and training loss of all settings over the images trained on, overlaid; None without trials."""
    plots, labels = [], dict[str, Any](x_label="images trained on", y_label="loss")
    for rows in shown_families:
        several = f"{rows[0].family}: " if len(shown_families) > 1 else ""
        for heading, series in (("held-out loss of the averaged weights", _held_out), ("training loss", _smoothed)):
            shown = _overlaid(study, rows, series)
            plots.append(Plot(lines=shown, heading=several + heading, from_zero=False, **labels))
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


def _overlaid(study: Study, rows: Sequence[Comparison], series: Series) -> list[Line]:
    """The baseline, what loses more, and in grey all others; ``series`` gives images (n,), losses (trials, n)."""
    lead, *others = tried(study, rows)
    base = baseline_trials(rows)
    found = []
    for c in sorted(others, key=_apart):
        pairs = pairs_of(c, extent_of(rows))
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
    return images, held_out(records, images)


def _smoothed(records: Sequence[RunRecord], base: RunRecord) -> tuple[Array, Array]:
    batches = [r.config.global_batch_size for r in (base, *records)]
    images = min(len((r.quality or {})["losses"]) * n for r, n in zip((base, *records), batches, strict=True))
    points = min(_POINTS, images // max(batches))
    return (np.arange(points) + 0.5) * images / points, training(records, images, points)
