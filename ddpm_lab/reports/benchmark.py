"""One device against several as a folder to share: a report, two pictures, and the results as JSON and CSV."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from ddpm_lab.explain import machine_state, pages, phrases, scaling, stats
from ddpm_lab.explain.bands import S000, S001, Bands
from ddpm_lab.explain.charts import style as fs
from ddpm_lab.explain.comparisons import MECHANISM_ONLY, PROJECTED_IMAGES, Comparison
from ddpm_lab.explain.frames import Study
from ddpm_lab.explain.grids import csv_text, literal, markdown
from ddpm_lab.explain.stats import Interval
from ddpm_lab.questions.answers import answer
from ddpm_lab.record import RunRecord
from ddpm_lab.reports.summary import Row, Scaling, SpeedUps, Summary

DASHBOARD, TABLE, REPORT = "gpu_benchmark_comparison.png", "performance_summary_table.png", "comparison_report"
RESULTS = "benchmark_results"
RECOMMENDATIONS = Bands(
    whose="S003",
    table=(("multi-GPU beneficial", 1.1), ("marginal difference", 0.95), ("single GPU preferred", 0.0)),
    threshold=1.1,
)
"""S003's names for speed-ups, with their lower bounds."""
_COLOURS = ("#de8f05", "#0173b2", "#029e73", "#cc78bc", "#949494")


def rows(study: Study) -> list[Comparison]:
    """Every configuration that was asked for: weak scaling before strong, then by batch and number of devices."""
    found = [
        r
        for r in scaling.rows(study)
        if r.role in ("baseline", "candidate") or (r.role == "note" and r.run_id != r.baseline_id)
    ]
    return sorted(found, key=lambda r: (r.scaling != "weak", _batch(r), r.ranks))


def _batch(row: Comparison) -> int:
    return int(row.config.rank_batch_size if row.scaling == "weak" else row.batch)


def _name(row: Comparison) -> str:
    return f"{_batch(row)}{' each' * (row.scaling == 'weak')}"


def compared(row: Comparison) -> bool:
    """Whether a row has a speed-up over one device."""
    return row.role == "candidate" and row.sets > 0


def recommendation(row: Comparison) -> str:
    """S003's name for a resolved speed-up, and those of its interval where they differ; else why there is none."""
    if not row.resolved:
        return phrases.outcome(row)
    name, low, high = (RECOMMENDATIONS.name(value) for value in (row.ratio.value, *row.ratio.ends))
    text = name if low == high else f"{name} (interval: {low} to {high})"
    return text if row.config.device == "cuda" else text.replace("GPU", "rank")


def means(found: Iterable[Comparison]) -> dict[str, Interval]:
    """The geometric mean speed-up of each number of devices over the batches that they share.

    Batches are measured in sets of their own, so the halves of their intervals add up as squares do.
    """
    ratios: dict[str, list[Interval]] = {}
    for r in found:
        if r.scaling == "strong" and compared(r):
            ratios.setdefault(scaling.layout(r.config), []).append(r.ratio)
    return {on: _mean(mine) for on, mine in ratios.items()}


def _mean(ratios: Sequence[Interval]) -> Interval:
    value = stats.geometric_mean([r.value for r in ratios])
    halves = np.log([r.high / r.low for r in ratios]) / 2
    factor = math.exp(float(np.sqrt((halves**2).sum())) / len(ratios))
    return Interval(value=value, low=value / factor, high=value * factor)


# --- the folder ------------------------------------------------------------------------------------------------------


def write(study: Study, folder: Path) -> list[Path]:
    """Write every file, the report first. Raises OSError if the folder cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    results = [to_dict(study, r) for r in rows(study)]
    fs.save(dashboard(study), folder / DASHBOARD)
    fs.save(table(study), folder / TABLE)
    text = report(study)
    grid = [list(results[0]), *(["" if v is None else v for v in r.values()] for r in results)] if results else [[]]
    for name, content in (
        (f"{REPORT}.md", text),
        (f"{RESULTS}.csv", csv_text(grid)),
        (f"{RESULTS}.json", json.dumps(results, allow_nan=False, indent=1) + "\n"),
    ):
        pages.replace_text(folder / name, content)
    pages.write_markdown(text, folder / f"{REPORT}.html")
    names = (f"{REPORT}.html", f"{REPORT}.md", DASHBOARD, TABLE, f"{RESULTS}.csv", f"{RESULTS}.json")
    return [folder / name for name in names]


def to_dict(study: Study, row: Comparison) -> dict[str, Any]:
    """A configuration as plain values: seconds, bytes, images; None is unknown.

    The time of an epoch is projected from measured throughput to 50,000 images; ends of intervals are of 95 %.
    """
    config, last = row.config, ([r for r in study.records if r.run_id == row.run_id] or study.records)[-1]
    ratio, efficiency = (row.ratio, row.efficiency) if compared(row) else (Interval(value=math.nan),) * 2
    numbers = {
        "images_per_second": row.images_per_second if row.sets else math.nan,
        "step_seconds": row.step_seconds if row.sets else math.nan,
        "epoch_seconds": row.projected_seconds if row.sets else math.nan,
        "peak_memory_bytes": row.peak_rss_bytes if config.device == "cpu" else row.peak_memory_bytes,
        **dict(zip(("speedup", "speedup_low", "speedup_high"), (ratio.value, *ratio.ends), strict=True)),
        **dict(
            zip(("efficiency", "efficiency_low", "efficiency_high"), (efficiency.value, *efficiency.ends), strict=True)
        ),
    }
    names = ("network", "image_size", "device", "world_size", "nodes", "rank_batch_size", "global_batch_size")
    return {
        **{name: getattr(row, name) for name in ("scaling", "family", "label", "run_id", "code_version")},
        **{name: getattr(config, name) for name in (*names, "precision", "compile", "loader", "loader_workers")},
        "data": last.data_name,
        "machine": last.machine.name,
        "measured": last.date,
        "status": row.status,
        "reason": None if row.sets else phrases.without_speed(row),
        "sets": row.sets,
        "disturbed_sets": row.disturbed_sets,
        **{name: value if math.isfinite(value) else None for name, value in numbers.items()},
        "verdict": row.verdict if compared(row) else None,
        "band": scaling.band(row, S000) if compared(row) and row.answered else None,
        "recommendation": recommendation(row) if compared(row) and row.scaling == "strong" else None,
        "quality": row.quality if row.role == "candidate" else None,
    }


def comparison(study: Study) -> list[list[str]]:
    """S003's table: for each batch the time of an epoch on one device and on several, and what the gain comes to."""
    found = rows(study)
    gpu = any(r.config.device == "cuda" for r in found)
    sides = ("Single GPU", "Multi GPU") if gpu else ("Single CPU rank", "Several CPU ranks")
    more = ("Recommendation", "95 % interval", "Efficiency", "Peak memory", "Sets", "Quality")
    grid = [["Batch Size", *sides, "Speedup", *more]]
    for _, same in groupby(found, key=lambda r: (r.scaling, _batch(r), r.family)):
        group = list(same)
        single = next((r for r in group if r.ranks == 1), None)
        many: list[Comparison | None] = [r for r in group if r.ranks > 1]
        for several in many or [None]:
            row = several or group[0]
            gains = [phrases.DASH] * 4
            if compared(row):
                called = recommendation(row) if row.scaling == "strong" else phrases.outcome(row)
                efficiency = scaling.efficiency(row) + (f", {scaling.band(row, S000)}" if row.answered else "")
                gains = [f"{row.ratio.value:.2f}x", called, phrases.between(row.ratio) or phrases.DASH, efficiency]
            memory = phrases.peak_memory(row) if row.sets else phrases.DASH
            grid.append([_name(row), _epoch(single), _epoch(several), *gains, memory, str(row.sets), row.quality])
    return grid


def _epoch(row: Comparison | None) -> str:
    if row is None:
        return "not measured"
    on = f" ({scaling.layout(row.config)})" if row.ranks > 1 else ""
    return f"{phrases.seconds(row.projected_seconds) if row.sets else phrases.without_speed(row)}{on}"


def report(study: Study) -> str:
    """The report as Markdown: the finding, one device beside several for each batch, and what the numbers rest on."""
    environment = Environment(loader=FileSystemLoader(pages.TEMPLATES), undefined=StrictUndefined, trim_blocks=True)
    finding = answer(replace(study, bands=S000)).finding
    return environment.get_template("benchmark.md.j2").render(
        headline=literal(finding.headline),
        claim=literal(finding.claim.removeprefix(f"{finding.headline}. ")),
        context=literal(phrases.context(study, batch=False)),
        comparison=markdown(comparison(study)),
        means={on: phrases.times(mean, what="x") for on, mean in means(rows(study)).items()},
        thresholds=RECOMMENDATIONS.table,
        bands=S000,
        figure=DASHBOARD,
    )


# --- the pictures ----------------------------------------------------------------------------------------------------


def dashboard(study: Study) -> Figure:
    """Time of an epoch, throughput, speed-up with its ideal, and efficiency, for each batch and number of devices."""
    found = [r for r in rows(study) if r.sets]
    title = answer(study).finding.headline
    note = f"{_context(study)} An epoch is 50,000 images, its time a projection. Lines: 95 % intervals. "
    note += f"Dashed: ideal speed-up; efficiency that {S000.whose} calls good."
    with fs.style():
        if not found:
            return fs.message(title, _context(study), "Nothing was measured: see the table.")
        figure, (bottom, top) = _sheet(title, note, 6.0)
        figure.subplots_adjust(left=0.08, right=0.98, top=top, bottom=bottom, hspace=0.4, wspace=0.2)
        time, rate, gain, efficiency = figure.subplots(2, 2).flat
        _bars(time, found, "Time of an epoch, seconds", lambda r: Interval(value=r.projected_seconds))
        _bars(rate, found, "Images per second", lambda r: Interval(value=r.images_per_second))
        several = [r for r in found if compared(r)]
        _bars(gain, several, "Speed-up", lambda r: r.ratio)
        _bars(efficiency, several, "Efficiency", lambda r: r.efficiency)
        ideal = {r.ranks for r in several}
        for ranks in {1, *ideal}:
            gain.axhline(ranks, color=fs.SOFT, lw=1.2, ls="--" if ranks > 1 else "-")
        gain.set_ylim(0, max(gain.get_ylim()[1], 1.1 * max(ideal, default=1)))
        efficiency.axhline(S000.threshold, color=fs.SOFT, lw=1.2, ls="--")
        handles, names = time.get_legend_handles_labels()
        figure.legend(handles, names, loc="lower right", ncols=len(names), frameon=False, fontsize=9)
        return figure


def _context(study: Study) -> str:
    return f"{phrases.context(study, batch=False)}.{machine_state.busy(study)}"


def _sheet(title: str, note: str, height: float, width: float = 9.0) -> tuple[Figure, tuple[float, float]]:
    """A figure with a title and a note, and the shares of its height between which there is room for a body."""
    title, note = fill(title, int(8 * width)), fill(note, int(14 * width))
    head, foot = 0.75 + 0.22 * title.count("\n"), 1.0 + 0.17 * note.count("\n")
    total = head + height + foot
    figure = Figure(figsize=(width, total))
    FigureCanvasAgg(figure)
    figure.text(0.02, 1 - 0.15 / total, title, fontsize=13, fontweight="bold", va="top")
    figure.text(0.02, (foot - 0.55) / total, note, fontsize=9, color=fs.SOFT, va="top", linespacing=1.3)
    return figure, (foot / total, 1 - head / total)


def _bars(ax: Axes, found: Sequence[Comparison], heading: str, value: Callable[[Comparison], Interval]) -> None:
    """A bar for each number of devices at each batch, with the interval of its value where it has one."""
    batches = list(dict.fromkeys(_name(r) for r in found))
    sizes = list(dict.fromkeys((r.ranks, scaling.layout(r.config)) for r in sorted(found, key=lambda r: r.ranks)))
    width, top = 0.8 / max(1, len(sizes)), max((value(r).value for r in found), default=1.0)
    for i, (_, on) in enumerate(sizes):
        mine = [r for r in found if scaling.layout(r.config) == on]
        places = [batches.index(_name(r)) + width * (i - (len(sizes) - 1) / 2) for r in mine]
        colour = _COLOURS[(i + (sizes[0][0] > 1)) % len(_COLOURS)]
        ax.bar(places, [value(r).value for r in mine], 0.9 * width, color=colour, lw=0, label=on)
        for x, r in zip(places, mine, strict=True):
            if value(r).exists:
                ax.plot([x, x], value(r).ends, color=fs.INK, lw=1.4)
    ax.set_title(heading, loc="left", fontsize=10, fontweight="bold")
    ax.set_xticks(range(len(batches)), [name.replace(" ", "\n") for name in batches])
    ax.set_xlim(-0.6, max(0.6, len(batches) - 0.4))
    ax.set_ylim(0, 1.35 * top)  # an interval from two sets would hide the bars
    ax.grid(visible=False, axis="x")


def table(study: Study) -> Figure:
    """The comparison as a table that is a picture."""
    grid = [[fill(cell, 22) for cell in row] for row in comparison(study)]
    lines = [1.6 + max(cell.count("\n") for cell in row) for row in grid]
    gains = [f"Geometric mean speed-up of {on}: {phrases.times(mean)}." for on, mean in means(rows(study)).items()]
    with fs.style():
        note = " ".join([*gains, _context(study)])
        figure, (bottom, top) = _sheet("Performance: one device against several", note, 0.17 * sum(lines), 13)
        ax = figure.add_axes((0.02, bottom, 0.96, top - bottom))
        ax.set_axis_off()
        widths = [max(len(line) for row in grid for line in row[i].split("\n")) + 3 for i in range(len(grid[0]))]
        shares = [width / sum(widths) for width in widths]
        drawn = ax.table(grid, cellLoc="left", colWidths=shares, edges="horizontal", bbox=Bbox.unit())
        drawn.auto_set_font_size(False)
        for (row, _), cell in drawn.get_celld().items():
            cell.set_height(lines[row])
            cell.set_edgecolor(fs.BAND)
            cell.set_text_props(fontsize=9, fontweight="normal" if row else "bold")
        return figure


# --- S001's table ----------------------------------------------------------------------------------------------------


def summary_of(study: Study, source: str) -> tuple[list[Row], SpeedUps]:
    """The runs of a study as rows of S001's table, and their paired speed-ups; ``source`` is the ledger."""
    found = [r for r in scaling.rows(study) if r.role in ("baseline", "candidate")]
    how = "Speed-ups are paired, in sets whose configurations take turns; times of an epoch are projections."
    sizes = tuple(_size(r) for r in found if r.sets)
    notes = (how, f"Measured on {_context(study)}") if found else ()
    return [_run(study, r, found, source) for r in found], SpeedUps(per_epoch=True, sizes=sizes, notes=notes)


def _run(study: Study, row: Comparison, found: Sequence[Comparison], source: str) -> Row:
    config = row.config
    kind = (row.run_id, row.role, row.baseline_id, row.family)
    mine = [r for r in study.records if (r.run_id, r.role, r.baseline_id, r.family) == kind]
    windows = [w for r in mine if r.status == "ok" for w in r.windows] if row.sets else []
    busy = [p for w in windows if (p := w.state.get("gpu_utilisation_percent")) is not None]
    summary = Summary(
        job_id=next((r.environment.slurm_job_id for r in reversed(mine) if r.environment.slurm_job_id), None),
        configuration=row.family,
        gpus=config.world_size if config.device == "cuda" else 0,
        ranks=config.world_size,
        nodes=config.nodes,
        epochs=sum(w.images for w in windows) / PROJECTED_IMAGES if windows else None,
        seconds=sum(w.seconds for w in windows) if windows else None,
        epoch_seconds=row.projected_seconds if windows else None,
        loss=_best(row, found),
        gpu_percent=sum(busy) / len(busy) if busy else None,
        note=MECHANISM_ONLY if row.mechanism_only else "",
    )
    why = phrases.plural(row.sets, "set") if row.sets else phrases.without_speed(row)
    quality = f"; quality {row.quality}" if row.role == "candidate" and row.sets else ""
    return Row(log=source, summary=summary, note=f"{scaling.layout(config)}; {why}{quality}")


def _best(row: Comparison, found: Sequence[Comparison]) -> float | None:
    """The lowest held-out loss that trials of a configuration reached; None without any."""
    beside = [r for r in found if r is row or (row.role == "baseline" and r.baseline_id == row.run_id)]
    trials: list[RunRecord] = [pair[r is row] for r in beside for pair in r.equivalence.pairs]
    return min((look["loss"] for trial in trials for look in (trial.quality or {})["held_out"]), default=None)


def _size(row: Comparison) -> Scaling:
    rating = scaling.band(row, S001) if row.answered else phrases.status(row.verdict)
    return Scaling(
        configuration=row.family,
        gpu=row.config.device == "cuda",
        devices=row.ranks,
        nodes=row.config.nodes,
        times=(row.projected_seconds,),
        speed_up=row.ratio.value if compared(row) else None,
        evidence=f"{phrases.evidence(row)}, {phrases.outcome(row)}" if compared(row) else "no run on one device",
        rating=rating if compared(row) else "",
    )
